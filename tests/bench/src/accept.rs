//! `POST /v1/runs`.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::future::try_join_all;
use serde_json::{Value, json};

use crate::{ground::Ground, limit};

/// How long each figure is measured.
const SPAN: Duration = Duration::from_secs(4);
const IN_FLIGHT: [usize; 3] = [1, 64, 256];
pub const BODY: &str = r#"{"agent": "bench", "prompt": "count the code"}"#;

pub async fn measure(ground: &Ground) -> Result<Value> {
    let _api = ground.api().await?;
    println!(
        "{:>9} {:>10} {:>10} {:>7} {:>10} {:>12} {:>9}",
        "in flight", "runs/s", "limit/s", "ratio", "single/s", "statements", "commits"
    );
    let mut all = serde_json::Map::new();
    for in_flight in IN_FLIGHT {
        let before = ground.counts().await?;
        let (runs, per_s) = submit(ground, in_flight).await?;
        let after = ground.counts().await?;
        let (limit, single) = (limit::accepts(ground, in_flight, SPAN).await?, limit::singles(ground, in_flight.min(16), SPAN).await?);
        let (statements, commits) = ((after.statements - before.statements) / runs, (after.commits - before.commits) / runs);
        println!("{in_flight:>9} {per_s:>10.0} {limit:>10.0} {:>7.2} {single:>10.0} {statements:>12.2} {commits:>9.3}", per_s / limit);
        let figures = json!({ "per_s": per_s.round(), "limit_per_s": limit.round(), "ratio": per_s / limit, "single_per_s": single.round(),
            "statements_per_run": statements, "commits_per_run": commits });
        all.insert(in_flight.to_string(), figures);
    }
    println!("statements by pg_stat_statements, commits by pg_stat_database, each for one accepted run");
    Ok(json!({ "accept": all }))
}

/// Accepted runs, and how many in a second.
async fn submit(ground: &Ground, in_flight: usize) -> Result<(f64, f64)> {
    let started = Instant::now();
    let counts = try_join_all((0..in_flight).map(|_| async move {
        let mut client = ground.client().await?;
        let mut count = 0_u64;
        while started.elapsed() < SPAN {
            let status = client.send("POST", "/v1/runs", BODY).await?;
            ensure!(status == 201, "POST /v1/runs: {status}");
            count += 1;
        }
        anyhow::Ok(count)
    }))
    .await?;
    let runs = counts.iter().sum::<u64>() as f64;
    Ok((runs, runs / started.elapsed().as_secs_f64()))
}
