#![doc = include_str!("../README.md")]

mod accept;
mod ground;
mod guest;
mod idle;
mod life;
mod limit;
mod queue;
mod slack;
mod streams;

use clap::{Parser, Subcommand};
use ground::Ground;

#[derive(Debug, Parser)]
#[command(about = "How fast runs are accepted, started and finished")]
struct Arguments {
    #[command(subcommand)]
    what: What,
    /// End with one line of JSON
    #[arg(long, global = true)]
    json: bool,
    /// Show which statements a run costs, and their time in Postgres
    #[arg(long, global = true)]
    statements: bool,
}

#[derive(Debug, Subcommand)]
enum What {
    /// POST /v1/runs at 1, 64 and 256 in flight
    Accept,
    /// From submit to start order
    Dispatch,
    /// From submit to settled
    Drain,
    /// Submitting and looking beside 100,000 runs that wait
    Queue,
    /// 2,000 sandboxes that are connected and do nothing
    Idle,
    /// 1,000 event streams of one run that prints, with and without those that do not read
    Streams,
    /// How long signed Slack events wait for their answer
    Slack,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    // Nobody chose another one in this process.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let ground = Ground::start(arguments.statements).await?;
    let measured = match arguments.what {
        What::Accept => accept::measure(&ground).await,
        What::Dispatch => life::measure(&ground, life::Until::Started).await,
        What::Queue => queue::measure(&ground).await,
        What::Idle => idle::measure(&ground).await,
        What::Slack => slack::measure(&ground).await,
        What::Streams => streams::measure(&ground).await,
        What::Drain => life::measure(&ground, life::Until::Settled).await,
    };
    ground.stop().await?;
    let measured = measured?;
    if arguments.json {
        println!("{measured}");
    }
    Ok(())
}
