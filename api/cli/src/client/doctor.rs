//! `towpath doctor`: from here to the server, step by step, each with what to do when it fails.

use serde_json::Value;
use towpath_schemas::body::{Agent, Page, Run, Stuck};

use super::{
    api::Api,
    failure::Failure,
    print::{Printer, read},
};

struct Finding {
    what: &'static str,
    told: String,
    /// What to do; None when all is well.
    cure: Option<String>,
}

pub async fn doctor(api: &Api, printer: &Printer) -> Result<(), Failure> {
    let findings = examine(api).await;
    let sick = findings.iter().filter(|finding| finding.cure.is_some()).count();
    if printer.json {
        let findings =
            findings.iter().map(|finding| serde_json::json!({ "what": finding.what, "told": finding.told, "cure": finding.cure }));
        printer.out(&format!("{:#}\n", serde_json::json!({ "well": sick == 0, "findings": findings.collect::<Vec<_>>() })));
    } else {
        for Finding { what, told, cure } in &findings {
            let mark = if cure.is_some() { "✗" } else { "✓" };
            printer.out(&format!("{mark} {what}: {told}\n"));
            if let Some(cure) = cure {
                printer.out(&format!("    {cure}\n"));
            }
        }
    }
    if sick == 0 { Ok(()) } else { Err(Failure::Unwell) }
}

async fn examine(api: &Api) -> Vec<Finding> {
    let mut findings = Vec::new();
    let well = |what, told: String| Finding { what, told, cure: None };
    let ready = match api.probe(&["readyz"]).await {
        Ok(ready) => ready,
        Err(failure) => {
            let cure = "Is the server up, and is this its address? Start one by `./dev up`, name another by --url, or see `towpath login`.";
            findings.push(Finding { what: "server", told: words(&failure), cure: Some(cure.to_owned()) });
            return findings;
        }
    };
    findings.push(well("server", api.address()));
    let parts: Value = serde_json::from_str(&ready.1).unwrap_or_default();
    for name in ["postgres", "nats", "s3"] {
        let told = parts[name].as_str().unwrap_or("not told").to_owned();
        let cure = (!told.starts_with("ok")).then(|| {
            format!("The server cannot reach it: look at its address in TOWPATH_…, at the server's log, and whether {name} runs.")
        });
        findings.push(Finding { what: name, told, cure });
    }
    if parts["draining"] == true {
        findings.push(Finding {
            what: "server",
            told: "it is shutting down".to_owned(),
            cure: Some("Wait for the next one, or ask another.".to_owned()),
        });
    }
    match api.get(&["v1", "agents"], &[]).await.and_then(read::<Page<Agent>>) {
        Err(failure) => {
            let cure =
                "Give a token that works: --token, TOWPATH_TOKEN, `towpath login`, or the file .towpath/token of a development server.";
            findings.push(Finding { what: "token", told: words(&failure), cure: Some(cure.to_owned()) });
            return findings;
        }
        Ok(agents) if agents.items.is_empty() => {
            let cure = "towpath agents apply deploy/agents/surveyor.toml".to_owned();
            findings.push(Finding { what: "agents", told: "none is defined".to_owned(), cure: Some(cure) });
        }
        Ok(agents) => {
            let names: Vec<String> =
                agents.items.into_iter().map(|agent| if agent.paused { format!("{} (paused)", agent.name) } else { agent.name }).collect();
            findings.push(well("agents", names.join(", ")));
        }
    }
    match api.get(&["v1", "runs"], &[("state", "queued".to_owned())]).await.and_then(read::<Page<Run>>) {
        Ok(runs) if runs.items.is_empty() => findings.push(well("waiting runs", "none".to_owned())),
        Ok(runs) => {
            let oldest = runs.items.last().map(|run| format!("{} waits for {}", run.id, run.waiting_for.as_deref().unwrap_or("its turn")));
            findings.push(well(
                "waiting runs",
                format!(
                    "{}{}, the oldest of them: {}",
                    runs.items.len(),
                    if runs.cursor.is_some() { " and more" } else { "" },
                    oldest.unwrap_or_default()
                ),
            ));
        }
        Err(failure) => {
            findings.push(Finding { what: "waiting runs", told: words(&failure), cure: Some("Try again in a moment.".to_owned()) })
        }
    }
    findings.extend(stuck(api).await);
    findings
}

/// What has not moved for too long. Only the operator is told.
async fn stuck(api: &Api) -> Vec<Finding> {
    let stuck = match api.get(&["v1", "stuck"], &[]).await.and_then(read::<Page<Stuck>>) {
        Ok(stuck) => stuck,
        Err(Failure::Refused(problem)) if problem.status == 403 => return Vec::new(),
        Err(failure) => return vec![Finding { what: "stuck", told: words(&failure), cure: Some("Try again in a moment.".to_owned()) }],
    };
    if stuck.items.is_empty() {
        return vec![Finding { what: "stuck", told: "nothing".to_owned(), cure: None }];
    }
    stuck
        .items
        .into_iter()
        .map(|stuck| Finding {
            what: "stuck",
            told: format!(
                "{}: {}, the oldest for {:.0} s{}",
                stuck.told,
                stuck.count,
                stuck.oldest_s,
                stuck.example.map(|example| format!(" ({example})")).unwrap_or_default()
            ),
            cure: Some(stuck.cure),
        })
        .collect()
}

fn words(failure: &Failure) -> String {
    match failure {
        Failure::Use(text) | Failure::Unreachable(text) => text.clone(),
        Failure::Refused(problem) => format!("{} {}", problem.detail, problem.help),
        Failure::Ended(_) | Failure::Interrupted | Failure::Unwell => String::new(),
    }
}
