//! Many runs at once.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::json;
use towpath_journeys::{Ground, SOON, World};

/// 200 runs, 20 at a time: all settle, none is lost, each is executed once, counted at the agent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_runs_twenty_at_a_time_are_each_executed_once() -> Result<()> {
    let world = World::prepare(Ground::shared().await?, &[("TOWPATH_SLOTS", "20")]).await?;
    world.spawn("all", &["dev"])?;
    world.ready().await?;
    world.example("echo").await?;
    let began = std::time::Instant::now();
    let runs: Vec<String> = stream::iter(0..200)
        .map(|number| {
            let world = &world;
            async move { world.run("echo", &json!({ "print": format!("run {number}"), "lines": 20, "witness": true })).await }
        })
        .buffer_unordered(20)
        .try_collect()
        .await?;
    let ended: Vec<serde_json::Value> =
        stream::iter(&runs).map(|run| world.ended_within(run, SOON * 3)).buffer_unordered(20).try_collect().await?;
    println!("200 runs, 20 slots: {:.1} s", began.elapsed().as_secs_f64());
    let mut executed: HashMap<String, usize> = HashMap::new();
    for run in &ended {
        ensure!(run["state"] == "succeeded" && run["epoch"] == 1, "{run}");
        let session = run["session"].as_str().context("session")?;
        for line in std::fs::read_to_string(world.workspace(session).join("witness"))?.lines() {
            let mut words = line.split(' ');
            let (run, epoch) = (words.next().unwrap_or_default(), words.next());
            ensure!(epoch == Some("1"), "{line}");
            *executed.entry(run.to_owned()).or_default() += 1;
        }
    }
    ensure!(executed.len() == 200 && executed.values().all(|times| *times == 1), "{} runs executed", executed.len());
    ensure!(runs.iter().all(|run| executed.contains_key(run)), "a run was never executed");
    world.finish().await
}
