//! `./dev chaos`.

use clap::Parser;

#[derive(Debug, Parser)]
#[command(about = "A mixed load under a storm of faults; ends with 1 when anything was lost, doubled, stuck or otherwise wrong")]
struct Arguments {
    /// How long it rages
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Draws the load and the faults; a new one by default
    #[arg(long)]
    seed: Option<u64>,
    /// Storms one after the other, with the seeds that follow
    #[arg(long, default_value_t = 1)]
    times: u64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let first = arguments.seed.unwrap_or_else(|| fastrand::u64(0..1_000_000));
    for seed in first..first + arguments.times {
        eprintln!("seed {seed}: {} s", arguments.seconds);
        let report = towpath_chaos::run(seed, arguments.seconds).await?;
        println!("{}", report.table);
        if let Some(logs) = report.logs {
            eprintln!("logs are kept in {logs}\nagain: ./dev chaos --seconds {} --seed {seed}", report.seconds);
            std::process::exit(1);
        }
    }
    Ok(())
}
