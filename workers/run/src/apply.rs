//! Applies what happened to runs, many in one transaction: locks the rows in order, lets `state::decide` say what comes of it, writes the moved rows back under their revisions, adds
//! the history, performs the effects. What the rules let pass without a change has no effects.

use std::collections::{BTreeMap, HashMap};

use towpath_chassis::{Error, Result, Work, telemetry, timer};
use towpath_schemas::{
    ErrorCode, event,
    id::{RunId, TenantId},
};

use towpath_delivery::About;
use towpath_transcript::Opened;

use crate::{
    admission, settle,
    state::{Effect, On, Verdict, decide},
    table::{self, Entry, Locked},
};

/// Kinds of timers. Keys: the run's id; with an epoch for those that an epoch brings.
pub const TIMER_WANTED: &str = "run_wanted";
pub const TIMER_START: &str = "run_start";
pub const TIMER_SEAL: &str = "run_seal";
pub const TIMER_DEADLINE: &str = "run_deadline";
pub const TIMER_MAX: &str = "run_max";

/// Something that happened to a run, and who or what made it happen.
#[derive(Debug, Clone)]
pub struct Happening {
    pub run: RunId,
    pub on: On,
    pub actor: String,
}

impl Happening {
    pub fn new(run: RunId, on: On, actor: impl Into<String>) -> Self {
        Self { run, on, actor: actor.into() }
    }
}

/// What came of one happening.
#[derive(Debug, Clone)]
pub enum Applied {
    Moved(Box<Locked>),
    /// It changed nothing.
    Unchanged(Box<Locked>),
    Refused(ErrorCode, &'static str),
    NoSuchRun,
    /// The run is in a state that a newer release brought, which knows what comes of it.
    NotOurs,
}

/// The key of a timer that an epoch brings.
pub fn epoch_key(run: RunId, epoch: i32) -> String {
    format!("{run}.{epoch}")
}

/// Reads [`epoch_key`].
pub fn parse_epoch_key(key: &str) -> Option<(RunId, i32)> {
    let (run, epoch) = key.rsplit_once('.')?;
    Some((run.parse().ok()?, epoch.parse().ok()?))
}

/// Applies `happenings` in their order; the answers are in that order too.
pub async fn apply(work: &mut Work, happenings: &[Happening]) -> Result<Vec<Applied>> {
    let mut ids: Vec<RunId> = happenings.iter().map(|happening| happening.run).collect();
    ids.sort_unstable();
    ids.dedup();
    let (known, newer) = table::lock_known(work.db(), &ids).await?;
    let mut rows: BTreeMap<RunId, Locked> = known.into_iter().map(|run| (run.id, run)).collect();
    let read: HashMap<RunId, i64> = rows.values().map(|run| (run.id, run.revision)).collect();
    let mut applied = Vec::with_capacity(happenings.len());
    let mut entries = Vec::new();
    let mut effects: Vec<(Locked, Locked, Effect)> = Vec::new();
    for happening in happenings {
        let Some(run) = rows.get_mut(&happening.run) else {
            applied.push(if newer.contains(&happening.run) { Applied::NotOurs } else { Applied::NoSuchRun });
            continue;
        };
        match decide(&run.machine, &happening.on) {
            Verdict::Unchanged => applied.push(Applied::Unchanged(Box::new(run.clone()))),
            Verdict::Refused(code, why) => applied.push(Applied::Refused(code, why)),
            Verdict::Move(next, follow) => {
                let before = run.clone();
                if *next != run.machine {
                    run.machine = *next;
                    run.revision += 1;
                    entries.push(entry(&before, run, happening));
                    trace(&before, run, happening);
                }
                effects.extend(follow.into_iter().map(|effect| (before.clone(), run.clone(), effect)));
                applied.push(Applied::Moved(Box::new(run.clone())));
            }
        }
    }
    let moved: Vec<(Locked, i64)> = rows
        .into_values()
        .filter_map(|run| read.get(&run.id).filter(|read| **read != run.revision).map(|read| (run.clone(), *read)))
        .collect();
    if !moved.is_empty() {
        table::write(work, &moved).await?;
        table::history(work, &entries).await?;
        for (run, _) in &moved {
            work.event(run.tenant, run.id, event::Kind::Moved { revision: run.revision });
        }
    }
    perform(work, effects).await?;
    Ok(applied)
}

/// One span for each move, in the trace of the request that made the run.
fn trace(before: &Locked, after: &Locked, happening: &Happening) {
    let span = telemetry::span_from(happening.on.word(), after.traceparent.as_deref());
    span.in_scope(
        || tracing::debug!(run = %after.id, from = %before.machine.state, to = %after.machine.state, actor = happening.actor, "moved"),
    );
}

fn entry(before: &Locked, after: &Locked, happening: &Happening) -> Entry {
    let exit = match &happening.on {
        On::Ended { exited, .. } => serde_json::to_value(&exited.exit).ok(),
        _ => None,
    };
    Entry {
        run: after.id,
        tenant: after.tenant,
        revision: after.revision,
        from: Some(before.machine.state),
        to: after.machine.state,
        cause: happening.on.word().to_owned(),
        actor: happening.actor.clone(),
        epoch: after.machine.epoch,
        reason: after.machine.reason.clone(),
        detail: exit,
    }
}

/// Performs effects kind by kind, in the one order of locks: slots and workspaces, steers, sandboxes, transcripts, deliveries.
async fn perform(work: &mut Work, effects: Vec<(Locked, Locked, Effect)>) -> Result<()> {
    let of = |kind: Effect| -> Vec<(&Locked, &Locked)> {
        effects.iter().filter(|(_, _, effect)| *effect == kind).map(|(before, after, _)| (before, after)).collect()
    };
    let epochs = |runs: Vec<(&Locked, &Locked)>| -> Vec<(RunId, i32, TenantId)> {
        runs.into_iter().map(|(before, _)| (before.id, before.machine.epoch, before.tenant)).collect()
    };
    let ids = |runs: Vec<(&Locked, &Locked)>| -> Vec<RunId> { runs.into_iter().map(|(_, after)| after.id).collect() };

    let freed: Vec<(RunId, i32)> = epochs(of(Effect::ReleaseSlot)).into_iter().map(|(run, epoch, _)| (run, epoch)).collect();
    admission::release_slots(work, &freed).await?;
    admission::release_workspaces(work, &ids(of(Effect::ReleaseWorkspace))).await?;
    for (_, run) in of(Effect::Requeue) {
        admission::announce(work, &run.backend).await?;
    }

    let lost = epochs(of(Effect::LoseEpoch));
    let settled = ids(of(Effect::Settle));
    if !lost.is_empty() {
        towpath_steer::lose(work, &lost.iter().map(|(run, ..)| *run).collect::<Vec<_>>()).await?;
    }
    if !settled.is_empty() {
        towpath_steer::settle(work, &settled).await?;
    }
    let over: Vec<(RunId, i32)> =
        of(Effect::LiftFence).into_iter().filter(|(run, _)| run.fence_s.is_some()).map(|(run, _)| (run.id, run.machine.epoch)).collect();
    if !over.is_empty() {
        towpath_sandbox::lift_fence(work, &over).await?;
    }
    let dropped: Vec<(RunId, i32)> = epochs(of(Effect::DropSandbox)).into_iter().map(|(run, epoch, _)| (run, epoch)).collect();
    if !dropped.is_empty() {
        towpath_sandbox::unwant(work, &dropped).await?;
    }
    towpath_transcript::lose(work, &lost).await?;
    let opened: Vec<Opened> = of(Effect::OpenRecord)
        .into_iter()
        .map(|(run, _)| Opened { run: run.id, epoch: run.machine.epoch, tenant: run.tenant, most_bytes: run.transcript_bytes })
        .collect();
    towpath_transcript::open(work, &opened).await?;
    timers(work, &effects).await?;
    if !settled.is_empty() {
        settle::owe(work, &settled, About::RunEnded).await?;
    }
    Ok(())
}

async fn timers(work: &mut Work, effects: &[(Locked, Locked, Effect)]) -> Result<()> {
    let limits = work.chassis().config.limits.clone();
    let mut set = Vec::new();
    let mut clear = Vec::new();
    for (_, run, effect) in effects {
        let key = epoch_key(run.id, run.machine.epoch);
        match effect {
            Effect::CreateSandbox => set.push((TIMER_START, key, run.start)),
            Effect::OpenRecord => {
                clear.push((TIMER_START, key));
                set.extend(run.max.map(|max| (TIMER_MAX, run.id.to_string(), max)));
            }
            Effect::Requeue => clear.push((TIMER_START, key)),
            Effect::Stop => set.push((TIMER_WANTED, run.id.to_string(), limits.settle_wanted)),
            Effect::AwaitRecord => set.push((TIMER_SEAL, key, limits.seal_max)),
            Effect::Settle => {
                let of_run = [TIMER_WANTED, TIMER_DEADLINE, TIMER_MAX].map(|kind| (kind, run.id.to_string()));
                clear.extend(of_run.into_iter().chain([(TIMER_SEAL, key.clone()), (TIMER_START, key)]));
            }
            Effect::ReleaseSlot | Effect::ReleaseWorkspace | Effect::LiftFence | Effect::LoseEpoch | Effect::DropSandbox => {}
        }
    }
    // A timer that one move of a batch sets and a later one of the same run makes needless is cleared: it fires in vain at worst.
    timer::set(work, &set).await?;
    timer::clear(work, &clear).await
}

/// Writes into the histories of runs what is no move of theirs.
pub(crate) async fn note(work: &mut Work, runs: &[&Locked], cause: &str, actor: &str, reason: &str) -> Result<()> {
    if runs.is_empty() {
        return Ok(());
    }
    let revisions = table::next_revisions(work, &runs.iter().map(|run| (run.id, 1)).collect::<Vec<_>>()).await?;
    let mut entries = Vec::with_capacity(runs.len());
    for run in runs {
        let revision = revisions.get(&run.id).copied().unwrap_or(run.revision);
        entries.push(Entry {
            run: run.id,
            tenant: run.tenant,
            revision,
            from: Some(run.machine.state),
            to: run.machine.state,
            cause: cause.to_owned(),
            actor: actor.to_owned(),
            epoch: run.machine.epoch,
            reason: Some(reason.to_owned()),
            detail: None,
        });
        work.event(run.tenant, run.id, event::Kind::Moved { revision });
    }
    table::history(work, &entries).await
}

/// One happening, with the answer that an asker gets.
pub async fn apply_one(work: &mut Work, happening: Happening) -> Result<Locked> {
    let run = happening.run;
    match apply(work, &[happening]).await?.pop() {
        Some(Applied::Moved(row) | Applied::Unchanged(row)) => Ok(*row),
        Some(Applied::Refused(code, why)) => Err(Error::refused(code, why)),
        Some(Applied::NotOurs) => Err(table::of_a_newer_release(run)),
        Some(Applied::NoSuchRun) | None => Err(no_such_run(run)),
    }
}

pub fn no_such_run(run: RunId) -> Error {
    Error::refused(ErrorCode::NotFound, format!("there is no run {run}"))
}
