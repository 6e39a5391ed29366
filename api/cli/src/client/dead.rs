//! `towpath dead`: messages that were laid aside after too many failures.

use clap::Subcommand;
use reqwest::Method;
use serde_json::Value;
use towpath_schemas::body::Dead;

use super::{
    api::{Api, Payload},
    failure::Failure,
    print::{Printer, time},
};

#[derive(Subcommand)]
pub enum DeadCommand {
    /// List them, the newest first, each with its reason.
    List {
        #[arg(long)]
        cursor: Option<String>,
    },
    /// Show one with its command.
    Show { id: i64 },
    /// Have it handled again, once its cause is mended.
    Redrive { id: i64 },
    /// Forget it. What it was about is still looked after by the sweeps.
    Drop { id: i64 },
}

pub async fn dead(api: &Api, printer: &Printer, command: DeadCommand) -> Result<(), Failure> {
    match command {
        DeadCommand::List { cursor } => {
            let query: Vec<(&str, String)> = cursor.into_iter().map(|cursor| ("cursor", cursor)).collect();
            printer.page(api.get(&["v1", "dead"], &query).await?, Some("towpath dead list"), |printer, letters: Vec<Dead>| {
                let row = |dead: Dead| vec![dead.id.to_string(), dead.role, dead.attempts.to_string(), time(dead.created_at), dead.reason];
                printer.table(&["id", "role", "attempts", "laid aside", "reason"], letters.into_iter().map(row).collect())
            })
        }
        DeadCommand::Show { id } => {
            printer.answer(api.get(&["v1", "dead", &id.to_string()], &[]).await?, |_, dead: Value| format!("{dead:#}\n"))
        }
        DeadCommand::Redrive { id } => {
            let answer = api.json(Method::POST, &["v1", "dead", &id.to_string(), "redrive"], &[], Payload::Nothing).await?;
            printer.answer(answer, |_, _: Value| format!("{id} is handled again\n"))
        }
        DeadCommand::Drop { id } => {
            let answer = api.json(Method::DELETE, &["v1", "dead", &id.to_string()], &[], Payload::Nothing).await?;
            printer.answer(answer, |_, _: Value| format!("{id} dropped\n"))
        }
    }
}
