//! Nobody told us: the twins of every command for runs, and what their timers do.

use std::time::Duration;

use towpath_chassis::{
    Chassis, Result, Work,
    sweep::Sweep,
    timer::{self, Timers, boxed},
};
use towpath_delivery::About;
use towpath_schemas::id::RunId;

use crate::{
    admission,
    apply::{Applied, Happening, TIMER_DEADLINE, TIMER_MAX, TIMER_SEAL, TIMER_START, TIMER_WANTED, apply, note, parse_epoch_key},
    settle,
    state::On,
    table::{self, Locked},
    view, worker,
};

pub fn timers(timers: Timers) -> Timers {
    timers
        .on(TIMER_WANTED, |work, keys| boxed(fire(work, TIMER_WANTED, keys, |key| Some((key.parse().ok()?, On::WantedOverdue)))))
        .on(TIMER_DEADLINE, |work, keys| boxed(fire(work, TIMER_DEADLINE, keys, |key| Some((key.parse().ok()?, On::Deadline)))))
        .on(TIMER_MAX, |work, keys| {
            boxed(fire(work, TIMER_MAX, keys, |key| Some((key.parse().ok()?, On::TimeLimit { reason: "maximum" }))))
        })
        .on(TIMER_START, |work, keys| {
            boxed(fire(work, TIMER_START, keys, |key| parse_epoch_key(key).map(|(run, epoch)| (run, On::StartDeadline { epoch }))))
        })
        .on(TIMER_SEAL, |work, keys| {
            boxed(fire(work, TIMER_SEAL, keys, |key| parse_epoch_key(key).map(|(run, epoch)| (run, On::SealOverdue { epoch }))))
        })
}

/// How long the timer of a run in a state of a newer release stays away, for a clock of that release.
const HANDED_ON: Duration = Duration::from_secs(30);

async fn fire(work: &mut Work, kind: &'static str, keys: Vec<String>, read: fn(&str) -> Option<(RunId, On)>) -> Result<()> {
    let due = keys.into_iter().filter_map(|key| read(&key).map(|(run, on)| (key, Happening::new(run, on, "clock"))));
    let (keys, happenings): (Vec<String>, Vec<Happening>) = due.unzip();
    let applied = apply(work, &happenings).await?;
    let newer = keys.into_iter().zip(applied).filter(|(_, applied)| matches!(applied, Applied::NotOurs));
    timer::set(work, &newer.map(|(key, _)| (kind, key, HANDED_ON)).collect::<Vec<_>>()).await
}

pub fn sweeps() -> Vec<Sweep> {
    vec![
        Sweep::new("pools with room", Duration::from_secs(5), room),
        Sweep::new("untold facts", Duration::from_secs(5), untold),
        Sweep::new("doubted sandboxes", Duration::from_secs(60), doubted),
    ]
}

/// After so long without knowing whether a run's sandbox is there, its owner is told.
const DOUBT: Duration = Duration::from_secs(15 * 60);
/// Runs that one look tells of.
const DOUBTED: i64 = 100;

/// Tells the owners of runs that nobody can tell whether they still work: by a notice to each target, and in the run's history and event streams.
async fn doubted(chassis: Chassis) -> Result<u64> {
    let mut doubted = towpath_sandbox::doubted(&chassis.db, DOUBT, DOUBTED).await?;
    if doubted.is_empty() {
        return Ok(0);
    }
    let mut work = chassis.begin().await?;
    let runs: Vec<RunId> = doubted.iter().map(|(run, _)| *run).collect();
    let (locked, newer) = table::lock_known(work.db(), &runs).await?;
    doubted.retain(|(run, _)| !newer.contains(run));
    let told = towpath_sandbox::tell_doubt(&mut work, &doubted).await?;
    let told: Vec<&Locked> = locked.iter().filter(|run| run.machine.active && told.contains(&(run.id, run.machine.epoch))).collect();
    note(&mut work, &told, "doubted", "clock", "sandbox_unknown").await?;
    settle::owe(&mut work, &told.iter().map(|run| run.id).collect::<Vec<_>>(), About::SandboxUnknown).await?;
    work.commit().await?;
    Ok(told.len() as u64)
}

/// Admits itself: with NATS away runs are started all the same.
async fn room(chassis: Chassis) -> Result<u64> {
    let mut admitted = 0;
    for pool in admission::pools_with_room(&chassis.db).await? {
        admitted += admission::admit(&chassis, &pool).await?;
    }
    Ok(admitted)
}

/// Runs whose record is closed or whose sandbox is gone, and that nobody moved.
async fn untold(chassis: Chassis) -> Result<u64> {
    let (observed, sealed) = view::untold(&chassis.db).await?;
    if observed.is_empty() && sealed.is_empty() {
        return Ok(0);
    }
    worker::take_facts(&chassis, &observed, &sealed).await?;
    Ok((observed.len() + sealed.len()) as u64)
}
