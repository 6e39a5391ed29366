//! Commands about runs that exist.

use clap::Args;
use reqwest::Method;
use serde_json::Value;
use towpath_schemas::body::{Delivery, HistoryEntry, Rerun, Run};

use super::{
    api::{Api, Payload},
    failure::Failure,
    follow::{self, Show},
    print::{Printer, read, time},
    run::label,
};

#[derive(Args)]
#[command(after_help = "Examples:\n  towpath runs --state running --agent surveyor\n  towpath runs --label team=core --json")]
pub struct RunsArgs {
    #[arg(long)]
    agent: Option<String>,
    /// queued, starting, running, stopping, finishing, succeeded, failed, canceled or timed_out.
    #[arg(long)]
    state: Option<String>,
    #[arg(long)]
    session: Option<String>,
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    label: Option<(String, String)>,
    /// Where the next page begins, as the last one told.
    #[arg(long)]
    cursor: Option<String>,
}

#[derive(Args)]
pub struct RunArg {
    /// The run's id.
    run: String,
}

#[derive(Args)]
#[command(
    after_help = "Examples:\n  towpath rerun RUN --follow\n  towpath rerun RUN --prompt \"count it again, without tests\" --same-session"
)]
pub struct RerunArgs {
    /// The run's id.
    run: String,
    /// Another prompt.
    #[arg(long)]
    prompt: Option<String>,
    /// In the same session, with the workspace as it is now.
    #[arg(long)]
    same_session: bool,
    /// Print what the run prints while it works, then its result.
    #[arg(long)]
    follow: bool,
}

#[derive(Args)]
pub struct RedeliverArgs {
    /// The delivery's id, as `towpath deliveries RUN` shows it.
    delivery: String,
}

pub async fn list(api: &Api, printer: &Printer, args: RunsArgs) -> Result<(), Failure> {
    let label = args.label.map(|(key, value)| format!("{key}={value}"));
    let given = [("agent", args.agent), ("state", args.state), ("session", args.session), ("label", label), ("cursor", args.cursor)];
    let query: Vec<(&str, String)> = given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    let answer = api.get(&["v1", "runs"], &query).await?;
    printer.page(answer, Some("towpath runs"), |printer, runs: Vec<Run>| {
        let row = |run: Run| {
            let why = run.waiting_for.or(run.message).or(run.reason).unwrap_or_default();
            vec![run.id.to_string(), printer.state(run.state), run.agent, time(run.created_at), why]
        };
        printer.table(&["run", "state", "agent", "created", ""], runs.into_iter().map(row).collect())
    })
}

pub async fn show(api: &Api, printer: &Printer, args: RunArg) -> Result<(), Failure> {
    printer.answer(api.get(&["v1", "runs", &args.run], &[]).await?, shown)
}

pub async fn rerun(api: &Api, printer: &Printer, args: RerunArgs) -> Result<(), Failure> {
    let change = Rerun { prompt: args.prompt, same_session: args.same_session };
    let answer = api.post(&["v1", "runs", &args.run, "rerun"], change, None).await?;
    if !args.follow {
        return printer.answer(answer, |_, run: Run| format!("{}\n", run.id));
    }
    let run: Run = read(answer)?;
    printer.note(&format!("{} in {}", run.id, run.session));
    follow::conclude_followed(printer, follow::follow(api, printer, &run.id.to_string(), Show::Safe).await?)
}

pub async fn cancel(api: &Api, printer: &Printer, args: RunArg) -> Result<(), Failure> {
    let answer = api.post(&["v1", "runs", &args.run, "cancel"], serde_json::json!({}), None).await?;
    printer.answer(answer, |printer, run: Run| {
        let wanted = run.wanted.map(|wanted| format!(", is to be {wanted}")).unwrap_or_default();
        format!("{} is {}{wanted}\n", run.id, printer.state(run.state))
    })
}

pub async fn remove(api: &Api, printer: &Printer, args: RunArg) -> Result<(), Failure> {
    let answer = api.json(Method::DELETE, &["v1", "runs", &args.run], &[], Payload::Nothing).await?;
    printer.answer(answer, |_, _: Value| format!("{} removed\n", args.run))
}

pub async fn abandon(api: &Api, printer: &Printer, args: RunArg) -> Result<(), Failure> {
    let answer = api.post(&["v1", "runs", &args.run, "abandon"], serde_json::json!({}), None).await?;
    printer.answer(answer, |printer, run: Run| format!("{} is {}\n", run.id, printer.state(run.state)))
}

pub async fn history(api: &Api, printer: &Printer, args: RunArg) -> Result<(), Failure> {
    let answer = api.get(&["v1", "runs", &args.run, "history"], &[]).await?;
    printer.page(answer, None, |printer, entries: Vec<HistoryEntry>| {
        let row = |entry: HistoryEntry| {
            let from = entry.from.map_or_else(|| "–".to_owned(), |state| state.to_string());
            let moved = if entry.from == Some(entry.to) { from } else { format!("{from} → {}", entry.to) };
            vec![
                entry.revision.to_string(),
                time(entry.at),
                entry.on,
                moved,
                entry.epoch.to_string(),
                entry.actor,
                entry.reason.unwrap_or_default(),
            ]
        };
        printer.table(&["revision", "at", "on", "state", "epoch", "actor", "reason"], entries.into_iter().map(row).collect())
    })
}

/// Asks for one more try of a delivery that was given up or waits.
pub async fn redeliver(api: &Api, printer: &Printer, args: RedeliverArgs) -> Result<(), Failure> {
    let answer = api.post(&["v1", "deliveries", &args.delivery, "retry"], serde_json::json!({}), None).await?;
    printer.answer(answer, |_, _: serde_json::Value| format!("{} is tried again\n", args.delivery))
}

pub async fn deliveries(api: &Api, printer: &Printer, args: RunArg) -> Result<(), Failure> {
    let answer = api.get(&["v1", "runs", &args.run, "deliveries"], &[]).await?;
    printer.page(answer, None, |printer, deliveries: Vec<Delivery>| {
        if deliveries.is_empty() {
            return "this run's result is owed to nobody\n".to_owned();
        }
        let row = |delivery: Delivery| {
            let next = delivery.next_attempt_at.map(|at| format!("next try {}", time(at)));
            let said = delivery.answer.or(next).unwrap_or_default();
            vec![delivery.id.to_string(), delivery.state, delivery.kind, delivery.target, delivery.attempts.to_string(), said]
        };
        printer.table(&["delivery", "state", "kind", "target", "attempts", "answer"], deliveries.into_iter().map(row).collect())
    })
}

fn shown(printer: &Printer, run: Run) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: Option<String>| {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            text.push_str(&format!("{name:<12}{value}\n"));
        }
    };
    line("run", Some(printer.bold(&run.id.to_string())));
    line("state", Some(printer.state(run.state)));
    line("wanted", run.wanted.map(|wanted| wanted.to_string()));
    line("waits for", run.waiting_for);
    line("why", run.message.or(run.reason));
    line(
        "exit",
        run.exit.and_then(|exit| exit.code.map(|code| format!("code {code}")).or(exit.signal.map(|signal| format!("signal {signal}")))),
    );
    line("agent", Some(format!("{} version {}", run.agent, run.agent_version)));
    line("session", Some(run.session.to_string()));
    line("labels", Some(run.labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(" ")));
    line("created", Some(time(run.created_at)));
    line("started", run.started_at.map(time));
    line("ended", run.ended_at.map(time));
    line("transcript", Some(format!("{}, {} bytes", run.transcript.state, run.transcript.bytes)));
    line(
        "files",
        run.files.map(|files| files.iter().map(|file| format!("{} ({})", file.name, file.status)).collect::<Vec<_>>().join(", ")),
    );
    line("deliveries", (run.deliveries > 0).then(|| run.deliveries.to_string()));
    for step in &run.startup {
        line("", Some(format!("{} {} {}", time(step.at), step.step, step.detail.as_deref().unwrap_or_default())));
    }
    if let Some(result) = run.result {
        text.push('\n');
        text.push_str(printer.filter().pass(result.text.as_bytes()).trim_end());
        text.push('\n');
    }
    text
}
