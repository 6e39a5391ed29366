#![doc = include_str!("../README.md")]

mod ground;
mod job;
mod load;
mod oracle;
mod storm;

use std::{fmt::Write, time::Duration};

use anyhow::{Context, Result};
use futures::FutureExt;
use ground::Ground;
use load::Load;
pub use oracle::Verdict;
use tokio::time::Instant;

/// Time without a fault at the beginning, so that there is something to break.
const CALM: Duration = Duration::from_secs(2);

/// One storm and its verdict, in words.
pub struct Report {
    pub seed: u64,
    pub seconds: u64,
    pub verdict: Verdict,
    pub table: String,
    /// What the processes wrote, when something is wrong.
    pub logs: Option<String>,
}

/// Lets a storm of so many seconds rage over everything.
pub async fn run(seed: u64, seconds: u64) -> Result<Report> {
    let ground = Ground::start().await?;
    let mut rng = fastrand::Rng::with_seed(seed);
    let (load, mut clients) = Load::start(&ground.urls, &ground.world.token, seed).await?;
    tokio::time::sleep(CALM).await;
    let until = Instant::now() + Duration::from_secs(seconds);
    let weather = storm::rage(&ground, &mut rng, until).await?;
    ground.heal().await?;
    load.stop();
    let mut refused = Vec::new();
    while let Some(client) = clients.clients.join_next().await {
        if let Err(error) = client.context("a client")? {
            refused.push(format!("{error:#}"));
        }
    }
    let mut verdict = oracle::judge(&ground, &load, &weather).boxed().await?;
    verdict.lost.extend(refused);
    let table = table(seed, seconds, &weather, &verdict)?;
    let logs = (verdict.violations() > 0).then(|| ground.keep_logs()).transpose()?;
    Ok(Report { seed, seconds, verdict, table, logs })
}

fn table(seed: u64, seconds: u64, weather: &storm::Weather, verdict: &Verdict) -> Result<String> {
    let mut text = String::new();
    writeln!(text, "seed {seed}, {seconds} s")?;
    writeln!(text, "{:<50} {:>6} {:>22}", "fault", "times", "slowest to next settled")?;
    for (fault, told) in &weather.faults {
        writeln!(text, "{:<50} {:>6} {:>20.1} s", fault.name(), told.times, told.slowest.as_secs_f64())?;
    }
    writeln!(
        text,
        "{} runs, {} bytes of transcripts, {} steers seen, {} deliveries ({} posts again), {} gaps after killed or stopped supervisors",
        verdict.runs, verdict.bytes, verdict.steers, verdict.deliveries, verdict.again, verdict.gaps
    )?;
    writeln!(
        text,
        "lost {}, doubled {}, stuck {}, otherwise wrong {}",
        verdict.lost.len(),
        verdict.doubled.len(),
        verdict.stuck.len(),
        verdict.wrong.len()
    )?;
    let all = [("lost", &verdict.lost), ("doubled", &verdict.doubled), ("stuck", &verdict.stuck), ("wrong", &verdict.wrong)];
    for (kind, found) in all {
        for one in found.iter().take(20) {
            writeln!(text, "  {kind}: {one}")?;
        }
    }
    Ok(text)
}
