//! `towpath channel` and `towpath inbound`.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use reqwest::Method;
use serde_json::Value;
use towpath_schemas::{
    body::{Channel, Inbound},
    channel::ChannelDefinition,
};

use super::{
    api::{Api, Payload},
    failure::Failure,
    print::{Printer, time},
};

#[derive(Subcommand)]
pub enum ChannelCommand {
    /// Create channels, or change them to what their definitions say. Secrets that a definition leaves out stay as they were.
    #[command(after_help = "Example:\n  towpath channel apply deploy/channels/mail.toml")]
    Apply {
        /// Definitions, TOML or JSON.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// List channels.
    List,
    /// Show a channel's definition, without its secrets.
    Show { name: String },
    /// Take nothing more in by it; what it has started goes on.
    Delete { name: String },
    /// Take nothing in until it is resumed; what comes meanwhile is kept and waits.
    Pause { name: String },
    /// Take in what has waited, and what comes.
    Resume { name: String },
}

#[derive(Args)]
#[command(after_help = "Example:\n  towpath inbound --replay inb_0198…")]
pub struct InboundArguments {
    /// Take this message in once more: one that was refused, ignored or given up.
    #[arg(long, value_name = "ID")]
    replay: Option<String>,
    #[arg(long)]
    cursor: Option<String>,
}

pub async fn channel(api: &Api, printer: &Printer, command: ChannelCommand) -> Result<(), Failure> {
    match command {
        ChannelCommand::Apply { files } => apply(api, printer, &files).await,
        ChannelCommand::List => {
            let answer = api.get(&["v1", "channels"], &[]).await?;
            printer.page(answer, None, |printer, channels: Vec<Channel>| {
                let row = |channel: Channel| {
                    let takes = channel.definition.place();
                    vec![channel.definition.name, channel.definition.agent, takes, channel.hook, time(channel.created_at)]
                };
                printer.table(&["channel", "agent", "takes", "hook", "created"], channels.into_iter().map(row).collect())
            })
        }
        ChannelCommand::Show { name } => {
            printer.answer(api.get(&["v1", "channels", &name], &[]).await?, |_, channel: Value| format!("{channel:#}\n"))
        }
        ChannelCommand::Delete { name } => {
            let answer = api.json(Method::DELETE, &["v1", "channels", &name], &[], Payload::Nothing).await?;
            printer.answer(answer, |_, _: Value| format!("{name} deleted\n"))
        }
        ChannelCommand::Pause { name } => paused(api, printer, &name, "pause", "is paused").await,
        ChannelCommand::Resume { name } => paused(api, printer, &name, "resume", "is resumed").await,
    }
}

async fn paused(api: &Api, printer: &Printer, name: &str, action: &str, done: &str) -> Result<(), Failure> {
    let answer = api.json(Method::POST, &["v1", "channels", name, action], &[], Payload::Nothing).await?;
    printer.answer(answer, |_, _: Value| format!("{name} {done}\n"))
}

/// All definitions are read and checked before the first is sent.
async fn apply(api: &Api, printer: &Printer, files: &[PathBuf]) -> Result<(), Failure> {
    let definitions = files.iter().map(|path| definition(path)).collect::<Result<Vec<_>, _>>()?;
    for definition in definitions {
        let body = serde_json::to_value(&definition).map_err(|error| Failure::Use(error.to_string()))?;
        let answer = api.json(Method::PUT, &["v1", "channels", &definition.name], &[], Payload::Json(body)).await?;
        printer.answer(answer, |_, channel: Channel| format!("{} takes {}\n", channel.definition.name, channel.definition.place()))?;
    }
    Ok(())
}

fn definition(path: &Path) -> Result<ChannelDefinition, Failure> {
    let wrong = |text: String| Failure::Use(format!("{}: {text}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let definition: ChannelDefinition = if path.extension().is_some_and(|extension| extension == "json") {
        serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?
    } else {
        toml::from_str(&text).map_err(|error| wrong(error.to_string()))?
    };
    definition.check().map_err(wrong)?;
    Ok(definition)
}

pub async fn inbound(api: &Api, printer: &Printer, arguments: InboundArguments) -> Result<(), Failure> {
    if let Some(id) = arguments.replay {
        let answer = api.json(Method::POST, &["v1", "inbound", &id, "replay"], &[], Payload::Nothing).await?;
        return printer.answer(answer, |_, _: Value| format!("{id} is taken in once more\n"));
    }
    let query: Vec<(&str, String)> = arguments.cursor.into_iter().map(|cursor| ("cursor", cursor)).collect();
    printer.page(api.get(&["v1", "inbound"], &query).await?, Some("towpath inbound"), |printer, messages: Vec<Inbound>| {
        let row = |message: Inbound| {
            let run = message.run.map(|run| run.to_string()).unwrap_or_default();
            let what = message.reason.unwrap_or(run);
            vec![message.id.to_string(), time(message.created_at), message.channel, message.author.unwrap_or_default(), message.state, what]
        };
        printer.table(&["message", "came", "channel", "author", "state", ""], messages.into_iter().map(row).collect())
    })
}
