//! Sandboxes that are connected and do nothing: what one of them costs the gateway.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::{ground::Ground, life, queue::mebibytes};

const SANDBOXES: usize = 2000;
/// How long they are idle while it is counted.
const SPAN: Duration = Duration::from_secs(60);

pub async fn measure(ground: &Ground) -> Result<Value> {
    ground.pool(i32::try_from(2 * SANDBOXES)?).await?;
    let api = ground.api().await?;
    let _worker = ground.spawn(&["worker", "--roles", "provision"])?;
    let before_mib = mebibytes(&api);
    let _sandboxes = life::idle(ground, SANDBOXES).await.context("connect")?;
    // Until everybody has settled down.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let (before, messages) = (ground.counts().await?, ground.jetstream_messages().await?);
    let begun = Instant::now();
    tokio::time::sleep(SPAN).await;
    let (after, messages_after) = (ground.counts().await?, ground.jetstream_messages().await?);
    let minutes = begun.elapsed().as_secs_f64() / 60.0;
    let each = |count: f64| count / SANDBOXES as f64 / minutes;
    let (statements, commits) = (each(after.statements - before.statements), each(after.commits - before.commits));
    let messages = each(messages_after - messages);
    let kib = (mebibytes(&api) - before_mib) * 1024.0 / SANDBOXES as f64;
    println!(
        "{SANDBOXES} idle sandboxes: {kib:.0} KiB each, and each minute {statements:.3} statements, {commits:.3} commits and {messages:.3} JetStream messages each"
    );
    Ok(
        json!({ "idle": { "sandboxes": SANDBOXES, "kib_each": kib, "statements_each_minute": statements, "commits_each_minute": commits, "jetstream_messages_each_minute": messages } }),
    )
}
