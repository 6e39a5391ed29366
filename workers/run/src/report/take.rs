//! Reports of bound supervisors.

use std::collections::HashMap;

use futures::FutureExt;
use towpath_chassis::{
    Chassis, Result, Work,
    group::{Answer, halving},
};
use towpath_file::Content;
use towpath_schemas::{
    body::RunState,
    event,
    guest::{SteerEnd, SteerState},
    id::{RunId, SteerId},
    limit::RESULT_BYTES,
};

use super::{Report, Reporter};
use crate::{
    apply::{Applied, Happening, apply},
    state::{Exited, On},
    table::{self, Entry, Locked, ResultRow, StepRow},
};

/// Bytes kept of a code, of a sentence, of an output's name.
const CODE_BYTES: usize = 64;
const SENTENCE_BYTES: usize = 1024;
const NAME_BYTES: usize = 1024;

/// Applies reports; of each whether its reporter's word counts.
pub async fn reports(chassis: &Chassis, batch: &[(Reporter, Report)]) -> Vec<Answer<bool>> {
    metrics::histogram!("towpath_report_batch").record(batch.len() as f64);
    halving(batch, |part| take(chassis, part).boxed()).await
}

/// Kind by kind, in the one order of locks.
async fn take(chassis: &Chassis, batch: &[(Reporter, Report)]) -> Result<Vec<bool>> {
    let mut work = chassis.begin().await?;
    let mut runs = lock(&mut work, batch).await?;
    let heard = heard(&mut work, batch, &runs).await?;
    end(&mut work, batch, &mut runs).await?;
    let said: Vec<(&Reporter, &Report, &Locked)> = batch
        .iter()
        .zip(&heard)
        .filter(|(_, heard)| **heard)
        .filter_map(|((reporter, report), _)| Some((reporter, report, runs.get(&reporter.run)?)))
        .collect();
    steps(&mut work, &said).await?;
    results(&mut work, &said).await?;
    steers(&mut work, &said).await?;
    outputs(&mut work, &said).await?;
    let answers = batch.iter().zip(heard).map(|((reporter, report), heard)| heard && may_go(report, runs.get(&reporter.run))).collect();
    work.commit().await?;
    Ok(answers)
}

/// Steers go to a run that executes.
fn may_go(report: &Report, run: Option<&Locked>) -> bool {
    !matches!(report, Report::SteersSent(_)) || run.is_some_and(|run| matches!(run.machine.state, RunState::Running | RunState::Stopping))
}

async fn lock(work: &mut Work, batch: &[(Reporter, Report)]) -> Result<HashMap<RunId, Locked>> {
    let mut ids: Vec<RunId> = batch.iter().map(|(reporter, _)| reporter.run).collect();
    ids.sort_unstable();
    ids.dedup();
    Ok(table::lock(work.db(), &ids).await?.into_iter().map(|run| (run.id, run)).collect())
}

/// Whose word counts: the incarnation that its run's epoch is bound to, as long as somebody counts on its sandbox. One that was given up as lost has
/// the same epoch and incarnation still, and no say any more.
async fn heard(work: &mut Work, batch: &[(Reporter, Report)], runs: &HashMap<RunId, Locked>) -> Result<Vec<bool>> {
    let sandboxes: Vec<(RunId, i32)> = batch.iter().map(|(reporter, _)| (reporter.run, reporter.epoch)).collect();
    let wanted = towpath_sandbox::wanted(work, &sandboxes).await?;
    Ok(batch
        .iter()
        .map(|(reporter, _)| {
            wanted.contains(&(reporter.run, reporter.epoch))
                && runs.get(&reporter.run).is_some_and(|run| {
                    run.machine.epoch == reporter.epoch && run.machine.incarnation.as_deref() == Some(&reporter.incarnation)
                })
        })
        .collect())
}

/// Commands that have ended; the rules look at epoch and incarnation themselves.
async fn end(work: &mut Work, batch: &[(Reporter, Report)], runs: &mut HashMap<RunId, Locked>) -> Result<()> {
    let ended: Vec<Happening> = batch
        .iter()
        .filter_map(|(reporter, report)| {
            let Report::Ended { exit, cause } = report else { return None };
            let reason = cause.as_ref().map(|(reason, _)| clean(reason, CODE_BYTES));
            let message = cause.as_ref().and_then(|(_, message)| message.as_ref()).map(|message| clean(message, SENTENCE_BYTES));
            let exited = Exited { exit: exit.clone(), reason, message };
            let on = On::Ended { epoch: reporter.epoch, incarnation: reporter.incarnation.clone(), exited };
            Some(Happening::new(reporter.run, on, "supervisor"))
        })
        .collect();
    if ended.is_empty() {
        return Ok(());
    }
    for applied in apply(work, &ended).await? {
        if let Applied::Moved(run) = applied {
            runs.insert(run.id, *run);
        }
    }
    Ok(())
}

async fn steps(work: &mut Work, said: &[(&Reporter, &Report, &Locked)]) -> Result<()> {
    let mut rows = Vec::new();
    for (_, report, run) in said {
        let Report::Step { step, detail } = report else { continue };
        rows.push(StepRow {
            run: run.id,
            epoch: run.machine.epoch,
            tenant: run.tenant,
            step: clean(step, CODE_BYTES),
            detail: detail.as_ref().map(|detail| clean(detail, SENTENCE_BYTES)),
        });
        work.event(run.tenant, run.id, event::Kind::Moved { revision: run.revision });
    }
    table::steps(work, &rows).await
}

async fn results(work: &mut Work, said: &[(&Reporter, &Report, &Locked)]) -> Result<()> {
    let mut rows: Vec<ResultRow> = Vec::new();
    for (_, report, run) in said {
        let Report::Result { text, truncated } = report else { continue };
        if rows.iter().any(|row| row.run == run.id) {
            continue;
        }
        rows.push(ResultRow {
            run: run.id,
            tenant: run.tenant,
            epoch: run.machine.epoch,
            text: clean(text, RESULT_BYTES),
            truncated: *truncated || text.len() > RESULT_BYTES,
        });
    }
    table::results(work, &rows).await
}

async fn steers(work: &mut Work, said: &[(&Reporter, &Report, &Locked)]) -> Result<()> {
    let sending: Vec<(RunId, i32, SteerId)> = said
        .iter()
        .filter_map(|(_, report, run)| match report {
            Report::SteersSent(steers) if may_go(report, Some(run)) => Some((run, steers)),
            _ => None,
        })
        .flat_map(|(run, steers)| steers.iter().map(|steer| (run.id, run.machine.epoch, *steer)))
        .collect();
    let sent = towpath_steer::sent(work, &sending).await?;
    let told: Vec<(RunId, i32, SteerEnd)> = said
        .iter()
        .filter_map(|(_, report, run)| match report {
            Report::Steers(ends) => Some((run, ends)),
            _ => None,
        })
        .flat_map(|(run, ends)| ends.iter().map(|end| (run.id, run.machine.epoch, end.clone())))
        .collect();
    let moved = towpath_steer::report(work, &told).await?;
    let of = |id: RunId| said.iter().find(|(.., run)| run.id == id).map(|(.., run)| *run);
    let sent = sending
        .iter()
        .filter(|(.., steer)| sent.contains(steer))
        .map(|(run, _, steer)| (*run, SteerEnd { steer: *steer, state: SteerState::Sent }));
    let notes: Vec<(&Locked, SteerEnd)> = sent.chain(moved).filter_map(|(run, end)| Some((of(run)?, end))).collect();
    note_steers(work, &notes).await
}

async fn outputs(work: &mut Work, said: &[(&Reporter, &Report, &Locked)]) -> Result<()> {
    for (_, report, run) in said {
        match report {
            Report::Output { name, size, sha256, object_key } => {
                let content = Content { size: *size, sha256, object_key };
                towpath_file::output_stored(work, run.tenant, run.id, run.machine.epoch, name, content).await?;
            }
            Report::OutputUnavailable { name, size, reason } => {
                let (name, reason) = (clean(name, NAME_BYTES), clean(reason, SENTENCE_BYTES));
                towpath_file::output_unavailable(work, run.tenant, run.id, run.machine.epoch, &name, *size, &reason).await?;
            }
            Report::Step { .. } | Report::Ended { .. } | Report::Result { .. } | Report::SteersSent(_) | Report::Steers(_) => {}
        }
    }
    Ok(())
}

/// Writes moves of steers into the histories of their runs, so that event streams have one order for both. The caller holds the rows' locks.
pub(crate) async fn note_steers(work: &mut Work, moves: &[(&Locked, SteerEnd)]) -> Result<()> {
    if moves.is_empty() {
        return Ok(());
    }
    let mut numbers: HashMap<RunId, i64> = HashMap::new();
    for (run, _) in moves {
        *numbers.entry(run.id).or_default() += 1;
    }
    let wanted: Vec<(RunId, i64)> = numbers.iter().map(|(run, number)| (*run, *number)).collect();
    let last = table::next_revisions(work, &wanted).await?;
    let ordinals = towpath_steer::ordinals(work, &moves.iter().map(|(_, end)| end.steer).collect::<Vec<_>>()).await?;
    let mut entries = Vec::with_capacity(moves.len());
    for (run, end) in moves {
        let left = numbers.entry(run.id).or_default();
        *left -= 1;
        let revision = last.get(&run.id).copied().unwrap_or(run.revision) - *left;
        let state = towpath_steer::state::word(end.state);
        entries.push(Entry {
            run: run.id,
            tenant: run.tenant,
            revision,
            from: Some(run.machine.state),
            to: run.machine.state,
            cause: "steer".to_owned(),
            actor: "supervisor".to_owned(),
            epoch: run.machine.epoch,
            reason: None,
            detail: Some(serde_json::json!({ "steer": end.steer, "ordinal": ordinals.get(&end.steer), "state": state })),
        });
        work.event(run.tenant, run.id, event::Kind::Moved { revision });
    }
    table::history(work, &entries).await
}

/// Text from a sandbox made fit for the database: U+0000 replaced, cut at `most` bytes.
fn clean(text: &str, most: usize) -> String {
    let mut text = text.replace('\0', "\u{fffd}");
    let mut cut = most.min(text.len());
    while !text.is_char_boundary(cut) {
        cut -= 1;
    }
    text.truncate(cut);
    text
}
