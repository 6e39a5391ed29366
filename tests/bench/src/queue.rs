//! A long queue: what it costs those who submit and look, and in memory.

use std::time::Instant;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::{
    accept::BODY,
    ground::{Ground, Process},
    life,
};

/// Runs that wait.
const RUNS: usize = 100_000;
const IN_FLIGHT: usize = 256;
/// Requests of each kind whose time is taken, one after the other.
const ASKED: usize = 1000;

/// The time that one kind of request takes, in milliseconds.
struct Times {
    p50: f64,
    p99: f64,
}

pub async fn measure(ground: &Ground) -> Result<Value> {
    // Nobody has room.
    ground.pool(0).await?;
    let api = ground.api().await?;
    let worker = ground.spawn(&["worker"])?;
    let mut all = serde_json::Map::new();
    println!("{:>9} {:>22} {:>22} {:>12} {:>12}", "queued", "POST p50 / p99 ms", "GET list p50 / p99 ms", "api MiB", "worker MiB");
    for (name, queued) in [("empty", 0), ("full", RUNS)] {
        life::submit(ground, queued, IN_FLIGHT).await?;
        // What came is taken note of everywhere, and the table's statistics are as they would be.
        tokio::time::sleep(std::time::Duration::from_secs(10)).await;
        let post = times(ground, "POST", "/v1/runs", BODY).await?;
        let list = times(ground, "GET", "/v1/runs", "").await?;
        let (api, worker) = (mebibytes(&api), mebibytes(&worker));
        println!(
            "{queued:>9} {:>22} {:>22} {api:>12.0} {worker:>12.0}",
            format!("{:.2} / {:.2}", post.p50, post.p99),
            format!("{:.2} / {:.2}", list.p50, list.p99)
        );
        let figures = json!({ "post_p50_ms": post.p50, "post_p99_ms": post.p99, "list_p50_ms": list.p50, "list_p99_ms": list.p99,
            "api_mib": api, "worker_mib": worker });
        all.insert(name.to_owned(), figures);
    }
    Ok(json!({ "queue": all }))
}

async fn times(ground: &Ground, method: &str, path: &str, body: &str) -> Result<Times> {
    let mut client = ground.client().await?;
    let mut all = Vec::with_capacity(ASKED);
    for _ in 0..ASKED {
        let asked = Instant::now();
        let status = client.send(method, path, body).await?;
        ensure!((200..300).contains(&status), "{method} {path}: {status}");
        all.push(asked.elapsed().as_secs_f64() * 1000.0);
    }
    all.sort_by(f64::total_cmp);
    Ok(Times { p50: all[ASKED / 2], p99: all[ASKED * 99 / 100] })
}

/// The most memory that a process has taken so far (proc(5), VmHWM).
pub fn mebibytes(process: &Process) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("0");
    line.trim().trim_end_matches(" kB").trim().parse::<f64>().unwrap_or(0.0) / 1024.0
}
