//! The client commands. They use nothing but the HTTP API under `/v1`.

mod access;
mod agent;
mod api;
mod attach;
mod channel;
mod context;
mod dead;
mod doctor;
mod failure;
mod file;
mod follow;
mod listen;
mod logs;
mod outputs;
mod print;
mod run;
mod runs;
mod save;
mod search;
mod session;
mod status;
mod steer;
mod terminal;
mod transcript;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use api::Api;
use failure::Failure;
use print::Printer;

/// Where `towpath dev` listens.
const DEFAULT_URL: &str = "http://127.0.0.1:7800";

/// Given before or after any client command.
#[derive(Args)]
pub struct Global {
    /// Where the server is; otherwise the one of `towpath login`, otherwise http://127.0.0.1:7800.
    #[arg(long, global = true, env = "TOWPATH_URL", value_name = "URL")]
    url: Option<String>,
    /// The server of that name, as `towpath login` was told it.
    #[arg(long, global = true, env = "TOWPATH_CONTEXT", value_name = "NAME", conflicts_with = "url")]
    context: Option<String>,
    /// The token to show; otherwise the one of `towpath login`, otherwise the file .towpath/token in this folder or one above it.
    #[arg(long, global = true, env = "TOWPATH_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    token: Option<String>,
    /// Print what the API answered, as JSON.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
pub enum ClientCommand {
    /// Start a run.
    Run(run::RunArgs),
    /// Send a message to a run while it works.
    Steer(steer::SteerArgs),
    /// List runs, the newest first.
    Runs(runs::RunsArgs),
    /// Show one run: its state, why, its result.
    Show(runs::RunArg),
    /// Print what a run has printed; with -f go on while it works.
    Logs(logs::LogsArgs),
    /// Fetch a run's record: text, raw, cast for asciinema, ndjson; whole or a part.
    Transcript(transcript::TranscriptArgs),
    /// Find lines in a run's transcript.
    Search(search::SearchArgs),
    /// Sit at a run's terminal; the run goes on when you leave.
    Attach(attach::AttachArgs),
    /// Run something again: the same prompt, files, labels and targets, by the agent's newest version.
    Rerun(runs::RerunArgs),
    /// End a run. It settles within 15 seconds in any case.
    Cancel(runs::RunArg),
    /// Remove an ended run with all that is kept of it.
    Remove(runs::RunArg),
    /// Say that a run's sandbox is certainly gone, when nothing else can find out.
    Abandon(runs::RunArg),
    /// Every move of a run: when, what, by whom.
    History(runs::RunArg),
    /// What became of the results that a run owes.
    Deliveries(runs::RunArg),
    /// Try a delivery again, now.
    Redeliver(runs::RedeliverArgs),
    /// List a run's output files, or fetch one.
    Outputs(outputs::OutputsArgs),
    /// Define agents.
    #[command(subcommand)]
    Agents(agent::AgentsCommand),
    /// Channels: where messages come from and results go to
    #[command(subcommand)]
    Channel(channel::ChannelCommand),
    /// Messages that came in, and what became of them
    Inbound(channel::InboundArguments),
    /// List sessions, or show one.
    Sessions(session::SessionsArgs),
    /// Upload files for runs, and fetch them.
    #[command(subcommand)]
    Files(file::FilesCommand),
    /// Create, list and revoke tokens.
    #[command(subcommand)]
    Tokens(access::TokensCommand),
    /// Start nothing any more: of a tenant, or of all (agents have `towpath agents pause`). What runs goes on, what comes waits.
    Pause(access::PauseArgs),
    /// Let a tenant, or all, go on.
    Resume(access::PauseArgs),
    /// See and handle messages that were laid aside after too many failures.
    #[command(subcommand)]
    Dead(dead::DeadCommand),
    /// Create and list tenants.
    #[command(subcommand)]
    Tenants(access::TenantsCommand),
    /// Find out what is in the way, from here to the server and in it.
    Doctor,
    /// Keep a server and its token under a name, and use it from now on; without a name list them.
    Login(context::LoginArgs),
    /// Use the server of that name from now on.
    Use(context::NameArg),
    /// Forget a server and its token.
    Logout(context::NameArg),
    /// Print a script that completes commands in your shell: `towpath completion bash > /etc/bash_completion.d/towpath`.
    Completion { shell: clap_complete::Shell },
    /// Say whether the server is ready, and what it waits for otherwise.
    Status,
    /// Receive webhook deliveries here, verify their signatures and print them.
    Listen(listen::ListenArgs),
}

/// Carries the command out and tells failures; the exit code that `--help` promises.
pub async fn run(global: Global, command: ClientCommand) -> ExitCode {
    let printer = Printer::new(global.json);
    let done = async {
        let command = match alone(&global, &printer, command).await? {
            Some(command) => command,
            None => return Ok(()),
        };
        // A server that is named by its URL has nothing to do with one that was logged in to.
        let context = if global.url.is_some() { None } else { context::chosen(global.context.as_deref())? };
        let url = global.url.or_else(|| context.as_ref().map(|context| context.url.clone())).unwrap_or_else(|| DEFAULT_URL.to_owned());
        let api = Api::new(&url, global.token.or_else(|| context.map(|context| context.token)))?;
        carry_out(&api, &printer, command).await
    };
    let failure = match done.await {
        Ok(()) => return ExitCode::SUCCESS,
        Err(failure) => failure,
    };
    printer.failure(&failure);
    failure.exit_code()
}

/// Carries out what needs no server; anything else comes back.
async fn alone(global: &Global, printer: &Printer, command: ClientCommand) -> Result<Option<ClientCommand>, Failure> {
    match command {
        ClientCommand::Login(args) => context::login(global, printer, args).await?,
        ClientCommand::Use(args) => context::switch(printer, args)?,
        ClientCommand::Logout(args) => context::logout(printer, args)?,
        ClientCommand::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut crate::command(), "towpath", &mut script);
            printer.bytes(&script);
        }
        other => return Ok(Some(other)),
    }
    Ok(None)
}

async fn carry_out(api: &Api, printer: &Printer, command: ClientCommand) -> Result<(), Failure> {
    match command {
        ClientCommand::Run(args) => run::run(api, printer, args).await,
        ClientCommand::Steer(args) => steer::steer(api, printer, args).await,
        ClientCommand::Runs(args) => runs::list(api, printer, args).await,
        ClientCommand::Show(args) => runs::show(api, printer, args).await,
        ClientCommand::Logs(args) => logs::logs(api, printer, args).await,
        ClientCommand::Transcript(args) => transcript::transcript(api, printer, args).await,
        ClientCommand::Search(args) => search::search(api, printer, args).await,
        ClientCommand::Attach(args) => attach::attach(api, printer, args).await,
        ClientCommand::Rerun(args) => runs::rerun(api, printer, args).await,
        ClientCommand::Cancel(args) => runs::cancel(api, printer, args).await,
        ClientCommand::Remove(args) => runs::remove(api, printer, args).await,
        ClientCommand::Abandon(args) => runs::abandon(api, printer, args).await,
        ClientCommand::History(args) => runs::history(api, printer, args).await,
        ClientCommand::Deliveries(args) => runs::deliveries(api, printer, args).await,
        ClientCommand::Redeliver(args) => runs::redeliver(api, printer, args).await,
        ClientCommand::Outputs(args) => outputs::outputs(api, printer, args).await,
        ClientCommand::Agents(command) => agent::agents(api, printer, command).await,
        ClientCommand::Channel(command) => channel::channel(api, printer, command).await,
        ClientCommand::Inbound(arguments) => channel::inbound(api, printer, arguments).await,
        ClientCommand::Sessions(args) => session::sessions(api, printer, args).await,
        ClientCommand::Files(command) => file::files(api, printer, command).await,
        ClientCommand::Tokens(command) => access::tokens(api, printer, command).await,
        ClientCommand::Tenants(command) => access::tenants(api, printer, command).await,
        ClientCommand::Pause(args) => access::pause(api, printer, args, true).await,
        ClientCommand::Resume(args) => access::pause(api, printer, args, false).await,
        ClientCommand::Dead(command) => dead::dead(api, printer, command).await,
        ClientCommand::Status => status::status(api, printer).await,
        ClientCommand::Doctor => doctor::doctor(api, printer).await,
        ClientCommand::Login(_) | ClientCommand::Use(_) | ClientCommand::Logout(_) | ClientCommand::Completion { .. } => Ok(()),
        ClientCommand::Listen(args) => listen::listen(printer, args).await,
    }
}
