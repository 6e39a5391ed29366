//! What is kept no longer: transcripts, outputs, uploaded files and whole runs, each for as long as its tenant says. Done piece by piece: whatever breaks off goes on at the
//! next look, and how much went is counted.

use std::{future::Future, time::Duration};

use towpath_chassis::{Chassis, Error, Result, sweep::Sweep};
use towpath_schemas::{
    ErrorCode,
    id::{RunId, SessionId, TenantId},
};
use towpath_tenant::Expiry;

use crate::{admission, apply::no_such_run, view};

mod table;

/// How often it is looked what is over its time.
const LOOK: Duration = Duration::from_secs(60);

pub fn sweeps() -> Vec<Sweep> {
    vec![
        Sweep::new("expired transcripts", LOOK, transcripts),
        Sweep::new("expired outputs", LOOK, outputs),
        Sweep::new("expired files", LOOK, files),
        Sweep::new("expired runs", LOOK, runs),
    ]
}

fn count(kind: &'static str, number: u64) {
    metrics::counter!("towpath_expired_total", "kind" => kind).increment(number);
}

/// Does something for each tenant; the sum of what was done.
async fn each<F, Fut>(chassis: &Chassis, act: F) -> Result<u64>
where
    F: Fn(Chassis, Expiry) -> Fut,
    Fut: Future<Output = Result<u64>>,
{
    let mut all = 0;
    for expiry in towpath_tenant::expiries(&chassis.db).await? {
        all += act(chassis.clone(), expiry).await?;
    }
    Ok(all)
}

async fn transcripts(chassis: Chassis) -> Result<u64> {
    each(&chassis, |chassis, expiry| async move {
        let Some(before) = expiry.transcripts_before else { return Ok(0) };
        let ended = table::ended_between(&chassis.db, expiry.tenant, expiry.transcripts_done, before).await?;
        let mut all = 0;
        for (run, _) in &ended {
            all += u64::from(expire_transcript(&chassis, *run).await?);
        }
        let done = ended.last().map(|(_, at)| *at);
        towpath_tenant::expired(&chassis.db, expiry.tenant, done, None).await?;
        count("transcripts", all);
        Ok(all)
    })
    .await
}

/// Whether there was anything.
async fn expire_transcript(chassis: &Chassis, run: RunId) -> Result<bool> {
    let mut found = false;
    loop {
        let mut work = chassis.begin().await?;
        let dropped = towpath_transcript::expire(&mut work, run).await?;
        work.commit().await?;
        found |= dropped > 0;
        if dropped == 0 {
            return Ok(found);
        }
    }
}

async fn outputs(chassis: Chassis) -> Result<u64> {
    each(&chassis, |chassis, expiry| async move {
        let Some(before) = expiry.outputs_before else { return Ok(0) };
        let ended = table::ended_between(&chassis.db, expiry.tenant, expiry.outputs_done, before).await?;
        let Some((_, done)) = ended.last() else { return Ok(0) };
        let ids: Vec<RunId> = ended.iter().map(|(run, _)| *run).collect();
        let mut work = chassis.begin().await?;
        let all = towpath_file::expire_outputs(&mut work, &ids).await?;
        work.commit().await?;
        towpath_tenant::expired(&chassis.db, expiry.tenant, None, Some(*done)).await?;
        count("outputs", all);
        Ok(all)
    })
    .await
}

async fn files(chassis: Chassis) -> Result<u64> {
    each(&chassis, |chassis, expiry| async move {
        let Some(before) = expiry.outputs_before else { return Ok(0) };
        let mut work = chassis.begin().await?;
        let all = towpath_file::expire_files(&mut work, expiry.tenant, before).await?;
        towpath_file::forget_files(&mut work, expiry.tenant).await?;
        work.commit().await?;
        count("files", all);
        Ok(all)
    })
    .await
}

async fn runs(chassis: Chassis) -> Result<u64> {
    each(&chassis, |chassis, expiry| async move {
        let Some(before) = expiry.runs_before else { return Ok(0) };
        let over = table::removable(&chassis.db, expiry.tenant, before).await?;
        for run in &over {
            expire_transcript(&chassis, *run).await?;
        }
        let removed = remove_all(&chassis, &over).await?;
        count("runs", removed);
        Ok(removed)
    })
    .await
}

/// Removes an ended run with all that was kept of it. Nothing is given up before it is sure that it can be removed.
pub async fn remove(chassis: &Chassis, tenant: TenantId, run: RunId) -> Result<()> {
    let held = table::held(&chassis.db, tenant, run).await?.ok_or_else(|| no_such_run(run))?;
    if let Some(why) = held.why(run) {
        return Err(Error::refused(ErrorCode::RunNotEnded, why));
    }
    expire_transcript(chassis, run).await?;
    if remove_all(chassis, &[run]).await? == 0 {
        // Somebody else has removed it at the same moment, or its result is delivered once more.
        view::state(&chassis.db, tenant, run).await?;
        return Err(Error::refused(ErrorCode::RunNotEnded, format!("{run} is worked on again; try again later")));
    }
    Ok(())
}

/// Removes runs in one transaction; how many. Those stay that hold something or owe something yet.
async fn remove_all(chassis: &Chassis, runs: &[RunId]) -> Result<u64> {
    if runs.is_empty() {
        return Ok(0);
    }
    let mut work = chassis.begin().await?;
    let runs = table::lock_removable(&mut work, runs).await?;
    towpath_steer::remove(&mut work, &runs).await?;
    towpath_sandbox::remove(&mut work, &runs).await?;
    towpath_transcript::remove(&mut work, &runs).await?;
    towpath_delivery::remove(&mut work, &runs).await?;
    towpath_file::expire_outputs(&mut work, &runs).await?;
    towpath_file::remove(&mut work, &runs).await?;
    crate::table::remove(&mut work, &runs).await?;
    work.commit().await?;
    Ok(runs.len() as u64)
}

/// Removes a host's workspaces whose sessions are kept no longer, by `remove`. Runs on the host itself.
pub fn host_sweep<F, Fut>(remove: F) -> Sweep
where
    F: Fn(SessionId) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = std::io::Result<()>> + Send + 'static,
{
    Sweep::new("unwanted workspaces", LOOK, move |chassis| {
        let remove = remove.clone();
        async move { workspaces(&chassis, remove).await }
    })
}

async fn workspaces<F, Fut>(chassis: &Chassis, remove: F) -> Result<u64>
where
    F: Fn(SessionId) -> Fut,
    Fut: Future<Output = std::io::Result<()>>,
{
    let unwanted = admission::unwanted_workspaces(&chassis.db, &chassis.config.pool()).await?;
    let mut all = 0;
    for session in unwanted {
        let mut work = chassis.begin().await?;
        if !admission::forget_workspace(&mut work, session).await? {
            continue;
        }
        // The row is gone only once the folder is: until the commit nobody else may take it.
        if let Err(error) = remove(session).await {
            // It holds up no other.
            tracing::warn!(%session, %error, "a workspace cannot be removed; tried again later");
            continue;
        }
        work.commit().await?;
        all += 1;
    }
    count("workspaces", all);
    Ok(all)
}
