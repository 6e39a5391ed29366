//! Runs from submit to start order, or to the end.

use std::{
    pin::pin,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::{
    Stream, StreamExt, TryStreamExt,
    future::{ready, try_join_all},
};
use serde_json::{Value, json};
use stage::wait_for;
use towpath_schemas::{id::RunId, subject};

use crate::{
    accept::BODY,
    ground::{Ground, HOST},
    guest, limit,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    Started,
    Settled,
}

const IN_FLIGHT: usize = 64;
/// Supervisors that are connected at a time.
const GUESTS: usize = 1024;
/// Runs submitted one after the other, each once the one before has come to its start or its end: the time that one takes when nothing else is going on.
const ALONE: usize = 100;
const SOON: Duration = Duration::from_secs(120);

pub async fn measure(ground: &Ground, until: Until) -> Result<Value> {
    let (name, runs) = match until {
        Until::Started => ("dispatch", 2000),
        Until::Settled => ("drain", 1000),
    };
    ground.pool(i32::try_from(2 * runs)?).await?;
    let _api = ground.api().await?;
    let _worker = ground.spawn(&["worker"])?;
    let mut alone = Figures::default();
    for _ in 0..ALONE {
        alone.waits.extend(batch(ground, until, 1, 1).await?.waits);
    }
    alone.waits.sort_by(f64::total_cmp);
    ground.forget_statements().await?;
    let before = ground.counts().await?;
    let many = batch(ground, until, runs, IN_FLIGHT).await?;
    let after = ground.counts().await?;
    ground.print_statements(runs).await?;
    let each = |after: f64, before: f64| (after - before) / runs as f64;
    let (statements, commits, rows) =
        (each(after.statements, before.statements), each(after.commits, before.commits), each(after.rows, before.rows));
    let limit = limit::rows(ground, rows, Duration::from_secs(4)).await?;
    println!(
        "{runs} runs, {IN_FLIGHT} submits in flight: {:.0}/s, submit to start p50 {:.1} ms, p99 {:.1} ms",
        many.per_s,
        many.at(0.5),
        many.at(0.99)
    );
    println!("one at a time: submit to start p50 {:.1} ms, p99 {:.1} ms", alone.at(0.5), alone.at(0.99));
    println!(
        "limit {limit:.0}/s ({rows:.1} rows a run, sharing commits), ratio {:.2}; {statements:.1} statements and {commits:.2} commits a run",
        many.per_s / limit
    );
    Ok(json!({ name: {
        "runs": runs, "per_s": many.per_s.round(), "limit_per_s": limit.round(), "ratio": many.per_s / limit, "p50_ms": many.at(0.5), "p99_ms": many.at(0.99),
        "alone_p50_ms": alone.at(0.5), "alone_p99_ms": alone.at(0.99), "rows_per_run": rows, "statements_per_run": statements, "commits_per_run": commits,
    } }))
}

#[derive(Default)]
struct Figures {
    per_s: f64,
    /// Milliseconds from submit to start order, sorted.
    waits: Vec<f64>,
}

impl Figures {
    fn at(&self, share: f64) -> f64 {
        at(&self.waits, share)
    }
}

/// The value that `share` of these are not above. They are sorted.
pub fn at(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
}

/// Runs that are given to the host from now on, each once.
async fn placed(ground: &Ground) -> Result<impl Stream<Item = RunId> + use<>> {
    let nats = stage::connect_nats(&ground.nats_url).await?;
    let asked = nats.subscribe(subject::host_all(HOST)).await?;
    nats.flush().await?;
    Ok(asked
        .filter_map(async |message| message.subject.rsplit('.').next().and_then(|run| run.parse::<RunId>().ok()))
        .scan(std::collections::HashSet::new(), |seen, run| ready(Some(seen.insert(run).then_some(run))))
        .filter_map(ready))
}

/// A run that was started, and its supervisor.
pub async fn printer(ground: &Ground) -> Result<(RunId, guest::Printer)> {
    let placed = placed(ground).await?;
    let (run, _) = submit(ground, 1, 1).await?.pop().context("no run")?;
    let start = async {
        // The host is asked about earlier runs too.
        pin!(placed.filter(|placed| ready(*placed == run))).next().await.context("NATS hung up")?;
        guest::printer(ground, run).await
    };
    Ok((run, tokio::time::timeout(SOON, start).await.context("the run was not started")??))
}

/// Starts runs whose sandboxes stay connected and do nothing, for as long as the answer lives.
pub async fn idle(ground: &Ground, runs: usize) -> Result<Vec<guest::Connected>> {
    let placed = placed(ground).await?;
    let guests = placed.take(runs).map(|run| guest::connect(ground, run)).buffer_unordered(64).try_collect::<Vec<_>>();
    let (_, guests) = tokio::try_join!(submit(ground, runs, IN_FLIGHT), async {
        tokio::time::timeout(SOON, guests).await.context("not all runs were started")?
    })?;
    Ok(guests)
}

/// Submits runs and plays their supervisors.
async fn batch(ground: &Ground, until: Until, runs: usize, in_flight: usize) -> Result<Figures> {
    let placed = placed(ground).await?;
    let begun = Instant::now();
    let guests = placed
        .take(runs)
        .map(|run| async move { anyhow::Ok((run, guest::live(ground, run, until).await?)) })
        .buffer_unordered(GUESTS)
        .try_collect::<Vec<_>>();
    let (submitted, started) = tokio::try_join!(submit(ground, runs, in_flight), async {
        tokio::time::timeout(SOON, guests).await.context("not all runs were started")?
    })?;
    if until == Until::Settled {
        let open = "select count(*) from run where ended_at is null";
        wait_for("all runs to settle", SOON, async || {
            (sqlx::query_scalar::<_, i64>(open).fetch_one(&ground.db).await.ok()? == 0).then_some(())
        })
        .await?;
    }
    let per_s = runs as f64 / begun.elapsed().as_secs_f64();
    let created: std::collections::HashMap<RunId, Instant> = submitted.into_iter().collect();
    let mut waits: Vec<f64> = started
        .into_iter()
        .filter_map(|(run, at)| Some(at.saturating_duration_since(*created.get(&run)?).as_secs_f64() * 1000.0))
        .collect();
    waits.sort_by(f64::total_cmp);
    ensure!(waits.len() == runs, "{} of {runs} runs were started", waits.len());
    Ok(Figures { per_s, waits })
}

/// Each run with the moment before its request was sent.
pub async fn submit(ground: &Ground, runs: usize, in_flight: usize) -> Result<Vec<(RunId, Instant)>> {
    let left = AtomicUsize::new(runs);
    let all = try_join_all((0..in_flight).map(|_| async {
        let mut client = ground.client().await?;
        let mut mine = Vec::new();
        while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
            let at = Instant::now();
            let status = client.send("POST", "/v1/runs", BODY).await?;
            ensure!(status == 201, "POST /v1/runs: {status}");
            mine.push((client.created()?, at));
        }
        anyhow::Ok(mine)
    }))
    .await?;
    Ok(all.into_iter().flatten().collect())
}
