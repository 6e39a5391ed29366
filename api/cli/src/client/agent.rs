//! `towpath agents`.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use reqwest::Method;
use serde_json::Value;
use towpath_schemas::{agent::AgentDefinition, body::Agent};

use super::{
    api::{Api, Payload},
    failure::Failure,
    print::{Printer, time},
};

#[derive(Subcommand)]
pub enum AgentsCommand {
    /// Create agents, or give them a new version when their definition has changed.
    #[command(after_help = "Example:\n  towpath agents apply deploy/agents/*.toml")]
    Apply {
        /// Definitions, TOML or JSON.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// List agents.
    List,
    /// Show an agent's newest definition.
    Show { name: String },
    /// Start no more of its runs until it is resumed.
    Pause { name: String },
    /// Start its runs again.
    Resume { name: String },
    /// Accept no more runs for it; live ones end.
    Delete { name: String },
}

pub async fn agents(api: &Api, printer: &Printer, command: AgentsCommand) -> Result<(), Failure> {
    match command {
        AgentsCommand::Apply { files } => apply(api, printer, &files).await,
        AgentsCommand::List => list(api, printer).await,
        AgentsCommand::Show { name } => {
            printer.answer(api.get(&["v1", "agents", &name], &[]).await?, |_, agent: Value| format!("{agent:#}\n"))
        }
        AgentsCommand::Pause { name } => act(api, printer, &name, "pause", "paused").await,
        AgentsCommand::Resume { name } => act(api, printer, &name, "resume", "resumed").await,
        AgentsCommand::Delete { name } => {
            let answer = api.json(Method::DELETE, &["v1", "agents", &name], &[], Payload::Nothing).await?;
            printer.answer(answer, |_, _: Value| format!("{name} deleted\n"))
        }
    }
}

/// All definitions are read and checked before the first is sent.
async fn apply(api: &Api, printer: &Printer, files: &[PathBuf]) -> Result<(), Failure> {
    let definitions = files.iter().map(|path| definition(path)).collect::<Result<Vec<_>, _>>()?;
    for definition in definitions {
        let body = serde_json::to_value(&definition).map_err(|error| Failure::Use(error.to_string()))?;
        let answer = api.json(Method::PUT, &["v1", "agents", &definition.name], &[], Payload::Json(body)).await?;
        printer.answer(answer, |_, agent: Agent| format!("{} version {}\n", agent.name, agent.version))?;
    }
    Ok(())
}

fn definition(path: &Path) -> Result<AgentDefinition, Failure> {
    let wrong = |text: String| Failure::Use(format!("{}: {text}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let definition: AgentDefinition = if path.extension().is_some_and(|extension| extension == "json") {
        serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?
    } else {
        toml::from_str(&text).map_err(|error| wrong(error.to_string()))?
    };
    definition.check().map_err(|error| wrong(error.to_string()))?;
    Ok(definition)
}

async fn list(api: &Api, printer: &Printer) -> Result<(), Failure> {
    let answer = api.get(&["v1", "agents"], &[]).await?;
    printer.page(answer, None, |printer, agents: Vec<Agent>| {
        let row = |agent: Agent| {
            let paused = if agent.paused { "paused" } else { "" };
            vec![agent.name, agent.version.to_string(), time(agent.created_at), paused.to_owned(), agent.definition.description]
        };
        printer.table(&["agent", "version", "created", "", ""], agents.into_iter().map(row).collect())
    })
}

async fn act(api: &Api, printer: &Printer, name: &str, action: &str, done: &str) -> Result<(), Failure> {
    let answer = api.post(&["v1", "agents", name, action], serde_json::json!({}), None).await?;
    printer.answer(answer, |_, _: Value| format!("{name} {done}\n"))
}
