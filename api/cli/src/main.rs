//! `towpath`: every role of the server and the command line client, in one binary.

mod client;
mod recover;
mod serve;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Towpath runs long-running agents, each in a sandbox of its own, and lets people steer them while they work.
#[derive(Parser)]
#[command(version, propagate_version = true, after_help = EXAMPLES)]
struct Arguments {
    #[command(flatten)]
    global: client::Global,
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  towpath agents apply deploy/agents/surveyor.toml
  towpath run surveyor \"count the code\" --file code.tar.gz --follow
  towpath steer RUN \"also list the ten largest files\"
  towpath runs --state running
  towpath logs -f RUN
  towpath run shell --attach
  towpath doctor

Exit codes: 0 done; 1 the run failed; 2 wrong use; 3 the run was canceled; 4 the run timed out; 5 the server refused; 6 no server.";

#[derive(Subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one of it in a process")]
enum Command {
    #[command(flatten)]
    Client(client::ClientCommand),
    #[command(flatten)]
    Serve(serve::ServeCommand),
}

/// The whole command line, for completion scripts.
fn command() -> clap::Command {
    Arguments::command()
}

fn main() -> ExitCode {
    let Arguments { global, command } = Arguments::parse();
    // Only fails when it was done before.
    rustls::crypto::ring::default_provider().install_default().ok();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("towpath: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    runtime.block_on(async {
        match command {
            Command::Client(command) => client::run(global, command).await,
            Command::Serve(command) => match serve::run(command).await {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("towpath: {error:#}");
                    ExitCode::FAILURE
                }
            },
        }
    })
}
