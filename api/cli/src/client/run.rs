//! `towpath run`: starts a run, and follows or awaits it if asked to.

use std::path::PathBuf;

use clap::Args;
use tokio::io::AsyncReadExt;
use towpath_schemas::{
    agent::Mode,
    body::{NewRun, Run, Target, WebhookTarget},
    id::SessionId,
    limit::PROMPT_BYTES,
};

use super::{
    api::Api,
    attach::{self, AttachArgs},
    failure::Failure,
    file,
    follow::{self, Show},
    print::{Printer, read},
};

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct RunArgs {
    agent: String,
    /// What the agent is to do, at most 1 MiB; `-` reads it from stdin. An interactive agent can do without.
    #[arg(required_unless_present_any = ["attach", "mode"])]
    prompt: Option<String>,
    /// A file to give to the run; may be repeated.
    #[arg(long = "file", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Go on in this session, with its workspace.
    #[arg(long, value_name = "SESSION")]
    session: Option<SessionId>,
    /// KEY=VALUE; may be repeated.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,
    /// -100 to 100; higher goes first.
    #[arg(long, allow_negative_numbers = true)]
    priority: Option<i16>,
    /// End it at this time at the latest, waiting or not: RFC 3339, or how long from now, as 2h.
    #[arg(long, value_name = "TIME")]
    deadline: Option<String>,
    /// Where to send the result to.
    #[arg(long, value_name = "URL")]
    deliver_webhook: Vec<String>,
    /// What deliveries are signed with: `whsec_` and the base64 of 24 to 64 bytes.
    #[arg(long, value_name = "SECRET", requires = "deliver_webhook", env = "TOWPATH_WEBHOOK_SECRET", hide_env_values = true)]
    webhook_secret: Option<String>,
    /// A repeat with the same key starts nothing twice.
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// Print what the run prints while it works, then its result.
    #[arg(long)]
    follow: bool,
    /// Wait until it has ended, then print its result.
    #[arg(long, conflicts_with = "follow")]
    wait: bool,
    /// Sit at its terminal.
    #[arg(long, conflicts_with_all = ["follow", "wait"])]
    attach: bool,
    /// Run it with or without a person at its terminal, whatever its agent says.
    #[arg(long, value_name = "MODE", value_parser = ["one_shot", "interactive"])]
    mode: Option<String>,
}

const EXAMPLES: &str = "\
Examples:
  towpath run surveyor \"count the code\" --file code.tar.gz --follow
  towpath run shell --attach
  git diff | towpath run reviewer - --wait
  towpath run surveyor \"again, without tests\" --session ses_0193… --label team=core
  towpath run surveyor \"count\" --file code.zip --deliver-webhook https://example.com/hook --webhook-secret whsec_…

With --follow or --wait the exit code is 0 when the run succeeded, 1 failed, 3 canceled, 4 timed out.";

pub async fn run(api: &Api, printer: &Printer, args: RunArgs) -> Result<(), Failure> {
    if args.attach {
        attach::has_terminal()?;
    }
    let prompt = text_or_stdin(args.prompt.unwrap_or_default()).await?;
    let files = file::upload_all(api, printer, &args.files).await?;
    let target = |url| Target::Webhook(WebhookTarget { url, secret: args.webhook_secret.clone() });
    let body = NewRun {
        agent: args.agent,
        prompt,
        session: args.session,
        files: files.into_iter().map(|file| file.id).collect(),
        deliver: args.deliver_webhook.into_iter().map(target).collect(),
        labels: args.labels.into_iter().collect(),
        priority: args.priority,
        deadline: args.deadline,
        mode: args.mode.map(|mode| if mode == "interactive" { Mode::Interactive } else { Mode::OneShot }),
    };
    let answer = api.post(&["v1", "runs"], body, args.idempotency_key).await?;
    if !args.follow && !args.wait && !args.attach {
        return printer.answer(answer, |_, run: Run| format!("{}\n", run.id));
    }
    let run: Run = read(answer)?;
    printer.note(&format!("{} in {}", run.id, run.session));
    if args.attach {
        return attach::attach(api, printer, AttachArgs::new(run.id.to_string())).await;
    }
    if args.follow {
        return follow::conclude_followed(printer, follow::follow(api, printer, &run.id.to_string(), Show::Safe).await?);
    }
    follow::conclude(printer, follow::wait(api, printer, &run).await?)
}

/// The text itself, or stdin's when it is `-`.
pub async fn text_or_stdin(text: String) -> Result<String, Failure> {
    if text != "-" {
        return Ok(text);
    }
    let mut bytes = Vec::new();
    let read = tokio::io::stdin().take(PROMPT_BYTES as u64 + 1).read_to_end(&mut bytes).await;
    read.map_err(|error| Failure::local("stdin", &error))?;
    String::from_utf8(bytes).map_err(|_| Failure::Use("stdin is not UTF-8; give binary material as --file".to_owned()))
}

/// KEY=VALUE in two.
pub fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}
