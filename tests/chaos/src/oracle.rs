//! The oracle: what was promised and what was seen outside of Towpath, against what Towpath says.

use std::{collections::HashSet, path::PathBuf, time::Duration};

use anyhow::Result;
use serde_json::Value;
use stage::wait_for;
use towpath_journeys::supervisors;

use crate::{
    ground::Ground,
    job::Job,
    load::{Load, Promise, by_run},
    storm::Weather,
};

/// How long everything may take to come to rest after the storm.
const REST: Duration = Duration::from_secs(90);

/// What was counted, and what must not be.
#[derive(Debug, Default)]
pub struct Verdict {
    pub runs: usize,
    pub bytes: usize,
    pub steers: usize,
    pub deliveries: usize,
    /// Posts beyond the first of a delivery.
    pub again: usize,
    pub gaps: usize,
    pub lost: Vec<String>,
    pub doubled: Vec<String>,
    pub stuck: Vec<String>,
    /// Anything else that breaks an invariant.
    pub wrong: Vec<String>,
}

impl Verdict {
    pub fn violations(&self) -> usize {
        self.lost.len() + self.doubled.len() + self.stuck.len() + self.wrong.len()
    }
}

pub async fn judge(ground: &Ground, load: &Load, weather: &Weather) -> Result<Verdict> {
    let mut verdict = Verdict::default();
    let promises = load.promises.lock().map(|promises| promises.clone()).unwrap_or_default();
    verdict.runs = promises.len();
    let known: HashSet<&str> = promises.iter().map(|promise| promise.run.as_str()).collect();
    rest(ground, &known, &mut verdict).await;
    // What came until everything was at rest.
    let posts = load.posts.lock().map(|posts| posts.clone()).unwrap_or_default();
    let by_run = by_run(&posts);
    let there: i64 = ground.world.count("select count(*) from run").await?;
    if there != i64::try_from(known.len())? {
        verdict.doubled.push(format!("{there} runs for {} promises", known.len()));
    }
    for promise in &promises {
        run(ground, promise, weather, &mut verdict).await?;
        let came = by_run.get(promise.run.as_str()).map(Vec::as_slice).unwrap_or_default();
        deliveries(promise, came, &mut verdict);
    }
    verdict.again = posts.len().saturating_sub(verdict.deliveries);
    Ok(verdict)
}

/// Waits until nothing is left to be done; what stays is stuck.
async fn rest(ground: &Ground, runs: &HashSet<&str>, verdict: &mut Verdict) {
    let left = [
        ("unsettled runs", "select count(*) from run where ended_at is null"),
        ("open transcripts", "select count(*) from transcript where state <> 'closed'"),
        ("sandboxes", "select count(*) from sandbox where state <> 'gone'"),
        ("slots", "select count(*) from slot"),
        ("held workspaces", "select count(*) from workspace where run_id is not null"),
        ("open steers", "select count(*) from steer where state in ('queued', 'sent', 'written')"),
        ("open deliveries", "select count(*) from delivery where next_attempt_at is not null"),
        ("outbox rows", "select count(*) from outbox"),
        ("leases", "select count(*) from lease where until > now()"),
        ("dead letters", "select count(*) from dead"),
        ("failed attempts", "select count(*) from attempt"),
        (
            "live objects that nothing refers to",
            "select count(*) from object where state = 'live' and not exists (select 1 from chunk where object_key = key)
            and not exists (select 1 from output where object_key = key) and not exists (select 1 from file where object_key = key)",
        ),
    ];
    let started = tokio::time::Instant::now();
    for (what, sql) in left {
        let patience = REST.saturating_sub(started.elapsed()).max(Duration::from_secs(2));
        let none = wait_for(what, patience, async || ground.world.count(sql).await.ok().filter(|count| *count == 0)).await;
        if none.is_err() {
            let count = ground.world.count(sql).await.unwrap_or(-1);
            verdict.stuck.push(format!("{count} {what}"));
        }
    }
    let left = wait_for("supervisors", Duration::from_secs(10), async || supervisors(&ground.world.state).is_empty().then_some(())).await;
    if left.is_err() {
        verdict.stuck.push(format!("{} supervisors", supervisors(&ground.world.state).len()));
    }
    let left = wait_for("cgroups", Duration::from_secs(10), async || cgroups(runs).is_empty().then_some(())).await;
    if left.is_err() {
        verdict
            .stuck
            .extend(cgroups(runs).into_iter().map(|(folder, processes)| format!("{} with processes {processes:?}", folder.display())));
    }
}

/// The cgroups of these runs' sandboxes, and the processes in each.
fn cgroups(runs: &HashSet<&str>) -> Vec<(PathBuf, Vec<String>)> {
    let entries = |folder: PathBuf| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    // v2 has one tree, v1 one below each controller.
    let trees = entries("/sys/fs/cgroup".into()).chain([PathBuf::from("/sys/fs/cgroup")]);
    trees
        .flat_map(|tree| entries(tree.join("towpath")))
        .filter(|folder| {
            let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.rsplit_once('.').is_some_and(|(run, _)| runs.contains(run))
        })
        .map(|folder| {
            let processes = std::fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
            (folder, processes.lines().map(str::to_owned).collect())
        })
        .collect()
}

/// What the agent noted.
fn noted(ground: &Ground, promise: &Promise, name: &str) -> Vec<String> {
    let path: PathBuf = ground.world.workspace(&promise.session).join(&promise.job.tag).join(name);
    std::fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
}

async fn run(ground: &Ground, promise: &Promise, weather: &Weather, verdict: &mut Verdict) -> Result<()> {
    let (job, id) = (&promise.job, &promise.run);
    let Ok(run) = ground.world.get(&format!("/v1/runs/{id}")).await else {
        verdict.lost.push(format!("{id} ({}) is not there", job.tag));
        return Ok(());
    };
    if run["ended_at"].is_null() {
        // Told as stuck already.
        return Ok(());
    }
    let hit = weather.hit.contains(id);
    let state = run["state"].as_str().unwrap_or_default();
    let about = format!("{id} ({}, {state}, {}, {})", job.tag, run["reason"], run["transcript"]);

    // ONCE
    let settled: i64 = sqlx::query_scalar(
        "select count(*) from run_history where run_id = $1 and to_state in ('succeeded', 'failed', 'canceled', 'timed_out')
             and from_state not in ('succeeded', 'failed', 'canceled', 'timed_out') and cause <> 'steer'",
    )
    .bind(id.parse::<towpath_schemas::RunId>().map_err(|error| anyhow::anyhow!("{error}"))?.uuid())
    .fetch_one(&ground.world.db)
    .await?;
    if settled != 1 {
        verdict.doubled.push(format!("{about} settled {settled} times"));
    }
    let started = noted(ground, promise, "started");
    let epochs: HashSet<&String> = started.iter().collect();
    if epochs.len() != started.len() {
        verdict.doubled.push(format!("{about} was executed in epochs {started:?}"));
    }
    let expected = if job.exit == 0 { "succeeded" } else { "failed" };
    let exit = run["exit"]["code"].as_i64();
    let as_told = match state {
        "canceled" => promise.canceled || job.cancel_ms.is_some(),
        "failed" if hit => true,
        _ => state == expected && exit == Some(i64::from(job.exit)) && (started.len() == 1 || (job.fenced && hit)),
    };
    if !as_told {
        verdict.wrong.push(format!("{about} should be {expected}, exit {exit:?}, started {started:?}"));
    }
    if !noted(ground, promise, "wrong").is_empty() {
        verdict.wrong.push(format!("{about} found another input file than was sent"));
    }
    transcript(ground, promise, &run, hit, &about, verdict).await?;
    steers(ground, promise, hit, &about, verdict).await?;
    // What a killed supervisor had not handed over yet is gone with it; the gap in the record tells.
    if state == "succeeded" && job.output && !hit {
        let content = ground
            .world
            .client
            .get(format!("{}/v1/runs/{id}/outputs/{}", ground.world.url, job.tag))
            .bearer_auth(&ground.world.token)
            .send()
            .await?;
        if content.text().await? != job.tag {
            verdict.lost.push(format!("{about}: its output"));
        }
    }
    if state == "succeeded" && !hit && run["result"]["text"] != format!("result of {}", job.tag) {
        verdict.lost.push(format!("{about}: its result, {}", run["result"]));
    }
    Ok(())
}

/// What the last epoch printed; and when there were others whether each of them printed what it should, as far as it came.
fn last_epoch<'a>(job: &Job, raw: &'a [u8]) -> (&'a [u8], Option<bool>) {
    let first = job.printed(1);
    let printed = job.printed(job.lines);
    let begins: Vec<usize> = raw.windows(first.len()).enumerate().filter(|(_, window)| *window == first).map(|(at, _)| at).collect();
    let Some(&last) = begins.last().filter(|last| **last > 0) else { return (raw, None) };
    let bounds: Vec<usize> = std::iter::once(0).chain(begins.iter().copied().filter(|at| *at > 0)).collect();
    let as_printed = bounds.windows(2).all(|bounds| {
        let piece = &raw[bounds[0]..bounds[1]];
        let same = piece.iter().zip(&printed).take_while(|(one, other)| one == other).count();
        // Another one before it may have come no further than into its first line.
        (0..=same).any(|at| first.starts_with(&piece[at..]))
    });
    (&raw[last..], Some(as_printed))
}

/// WHOLE: byte for byte what was printed, at least as far as the agent knows that it printed; or cut by a gap, where a supervisor was hit.
async fn transcript(ground: &Ground, promise: &Promise, run: &Value, hit: bool, about: &str, verdict: &mut Verdict) -> Result<()> {
    let job = &promise.job;
    let raw = match ground.world.raw(&promise.run).await {
        Ok(raw) => raw,
        Err(error) => {
            verdict.lost.push(format!("{about}: its transcript cannot be read: {error}"));
            return Ok(());
        }
    };
    verdict.bytes += raw.len();
    let (raw, earlier) = last_epoch(job, &raw);
    if let Some(earlier) = earlier {
        // It was lost and started again; what it printed before stands before.
        if !job.fenced || !hit || !earlier {
            verdict.wrong.push(format!("{about}: what an earlier epoch printed is not so, or there should be none"));
        }
    }
    let printed = job.printed(job.lines);
    let known = noted(ground, promise, "printed").last().and_then(|lines| lines.parse::<usize>().ok()).unwrap_or(0);
    let least = job.printed(known).len();
    // A terminal echoes nothing here, so both are the bytes and nothing else.
    let complete = run["transcript"]["state"] == "complete";
    if !printed.starts_with(raw) {
        let same = raw.iter().zip(&printed).take_while(|(one, other)| one == other).count();
        verdict.wrong.push(format!("{about}: {} bytes read back, other than printed from byte {same}", raw.len()));
    } else if complete && raw.len() < least {
        verdict.lost.push(format!("{about}: {} bytes read back, {least} were printed, and no gap is told", raw.len()));
    } else if run["state"] == "succeeded" && raw.len() != printed.len() && (!hit || earlier.is_some()) {
        verdict.lost.push(format!("{about}: {} bytes read back of {}", raw.len(), printed.len()));
    }
    let never_bound = run["epoch"] == 0 || noted(ground, promise, "started").is_empty();
    if !complete {
        verdict.gaps += 1;
        if !hit && !never_bound {
            verdict.wrong.push(format!("{about}: a gap although nobody touched its supervisor"));
        }
    }
    Ok(())
}

/// Each steer was seen at most once and in order, and what Towpath says of it is so.
async fn steers(ground: &Ground, promise: &Promise, hit: bool, about: &str, verdict: &mut Verdict) -> Result<()> {
    let seen = noted(ground, promise, "steers");
    verdict.steers += seen.len();
    let sent: Vec<&String> = promise.steers.iter().map(|(_, text)| text).collect();
    let mut at = sent.iter();
    if !seen.iter().all(|text| at.any(|sent| *sent == text)) {
        verdict.doubled.push(format!("{about} saw the steers {seen:?}, sent were {sent:?}"));
    }
    if promise.steers.is_empty() {
        return Ok(());
    }
    let page = ground.world.get(&format!("/v1/runs/{}/steers", promise.run)).await?;
    for steer in page["items"].as_array().into_iter().flatten() {
        let (state, text) = (steer["state"].as_str().unwrap_or_default(), steer["message"].as_str().unwrap_or_default());
        let was_seen = seen.iter().any(|seen| seen == text);
        match state {
            "expired" if was_seen => verdict.wrong.push(format!("{about}: `{text}` is told as expired and was seen")),
            // The command may end while it reads, and then nobody can know.
            "unknown" if !hit && !was_seen && noted(ground, promise, "ended").is_empty() && !promise.canceled => {
                verdict.wrong.push(format!("{about}: `{text}` is unknown although nobody touched its supervisor"));
            }
            "queued" | "sent" | "written" => verdict.stuck.push(format!("{about}: `{text}` is still {state}")),
            _ => {}
        }
    }
    Ok(())
}

/// Each delivery arrived, always under the same id.
fn deliveries(promise: &Promise, came: &[&crate::load::Post], verdict: &mut Verdict) {
    if !promise.job.delivered {
        if !came.is_empty() {
            verdict.wrong.push(format!("{}: a post that nobody asked for", promise.run));
        }
        return;
    }
    verdict.deliveries += 1;
    let ids: HashSet<&String> = came.iter().map(|post| &post.id).collect();
    match ids.len() {
        1 => {}
        0 => verdict.lost.push(format!("{} ({}): its delivery", promise.run, promise.job.tag)),
        more => verdict.doubled.push(format!("{} ({}): delivered under {more} ids", promise.run, promise.job.tag)),
    }
    if !came.is_empty() && !came.iter().any(|post| post.answered) {
        verdict.lost.push(format!("{} ({}): its delivery was given up before it was answered", promise.run, promise.job.tag));
    }
}
