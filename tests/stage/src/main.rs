//! `stage`: starts and stops the servers that Towpath stands on, for `./dev`.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Parser, Subcommand};
use stage::{Options, Servers, Status, Which, stop_recorded};
use tokio::signal::unix::{SignalKind, signal};

const TEST_ACCOUNTS: usize = 64;

/// Postgres, NATS with JetStream and an S3 server for development and tests.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start all three in a folder and write the settings that Towpath needs to DIR/env.
    Up {
        #[arg(long)]
        dir: PathBuf,
        /// Return once they answer and leave them running until `stage down`.
        #[arg(long)]
        detach: bool,
        /// For test runs: Postgres does not sync to disk, and NATS has accounts to lease.
        #[arg(long)]
        tests: bool,
    },
    /// Stop what `up` started in a folder, and nothing else.
    Down {
        #[arg(long)]
        dir: PathBuf,
        /// Remove the data too.
        #[arg(long)]
        wipe: bool,
    },
    /// Say which of them run. Exit code 1 unless all do.
    Status {
        #[arg(long)]
        dir: PathBuf,
    },
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Up { dir, detach, tests } => up(dir, detach, tests).await.map(|()| ExitCode::SUCCESS),
        Command::Down { dir, wipe } => stop_recorded(&dir, wipe).await.map(|()| ExitCode::SUCCESS),
        Command::Status { dir } => Status::read(&dir).map(status),
    };
    done.unwrap_or_else(|error| {
        eprintln!("stage: {error:#}");
        ExitCode::FAILURE
    })
}

async fn up(dir: PathBuf, detach: bool, tests: bool) -> Result<()> {
    let accounts = if tests { TEST_ACCOUNTS } else { 0 };
    let options = Options { durable: !tests, accounts, which: Which::ALL, detached: true, ..Options::new(&dir) };
    let started = async { Servers::start(options).await?.write_env() }.await;
    let env = match started {
        Ok(env) => env,
        Err(error) => {
            stop_recorded(&dir, false).await?;
            return Err(error);
        }
    };
    println!("Postgres, NATS and S3 serve; their settings are in {}", env.display());
    if !detach {
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            interrupted = tokio::signal::ctrl_c() => interrupted?,
            _ = terminate.recv() => {}
        }
        stop_recorded(&dir, false).await?;
    }
    Ok(())
}

fn status(status: Status) -> ExitCode {
    let servers = [("postgres", status.postgres), ("nats", status.nats), ("s3", status.s3)];
    for (name, pid) in servers {
        match pid {
            Some(pid) => println!("{name} runs (pid {pid})"),
            None => println!("{name} does not run"),
        }
    }
    ExitCode::from(u8::from(servers.iter().any(|(_, pid)| pid.is_none())))
}
