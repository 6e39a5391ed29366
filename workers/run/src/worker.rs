//! Commands for runs: pools to be filled, sandboxes that are gone or cannot be, records that are closed.

use towpath_chassis::{
    Chassis, Result,
    consume::{Handler, Outcome},
};
use towpath_schemas::{command::Command, id::RunId, subject};

use crate::{
    admission,
    apply::{Happening, apply},
    state::On,
};

/// The handlers of the role `provision`.
pub fn handlers() -> Vec<Handler> {
    vec![Handler::new("admit", subject::ADMIT_ALL, fill_pools), Handler::new("run", subject::RUN_ALL, facts)]
}

async fn fill_pools(chassis: Chassis, batch: Vec<Command>) -> Result<Vec<Outcome>> {
    let mut pools: Vec<String> = batch
        .iter()
        .filter_map(|command| match command {
            Command::Admit { pool } => Some(pool.clone()),
            _ => None,
        })
        .collect();
    pools.sort_unstable();
    pools.dedup();
    for pool in pools {
        admission::admit(&chassis, &pool).await?;
    }
    Ok(vec![Outcome::Done; batch.len()])
}

async fn facts(chassis: Chassis, batch: Vec<Command>) -> Result<Vec<Outcome>> {
    let mut observed = Vec::new();
    let mut sealed = Vec::new();
    for command in &batch {
        match command {
            Command::Observed { run, epoch, .. } => observed.push((*run, *epoch)),
            Command::Sealed { run, epoch, .. } => sealed.push((*run, *epoch)),
            Command::Admit { .. }
            | Command::Host { .. }
            | Command::Seal { .. }
            | Command::Deliver { .. }
            | Command::Intake { .. }
            | Command::Unknown => {}
        }
    }
    take_facts(&chassis, &observed, &sealed).await?;
    Ok(vec![Outcome::Done; batch.len()])
}

/// Applies facts about sandboxes and records, read from their own rows.
pub(crate) async fn take_facts(chassis: &Chassis, observed: &[(RunId, i32)], sealed: &[(RunId, i32)]) -> Result<()> {
    let mut work = chassis.begin().await?;
    let sealed = if sealed.is_empty() { Vec::new() } else { towpath_transcript::closed(&mut work, sealed).await? };
    let mut happenings: Vec<Happening> =
        sealed.into_iter().map(|(run, epoch)| Happening::new(run, On::Sealed { epoch }, "transcript")).collect();
    for fact in towpath_sandbox::facts(&mut work, observed).await? {
        let on = match fact.refusal {
            Some((reason, message)) => On::Refused { epoch: fact.epoch, reason, message },
            None if fact.gone => On::Absent { epoch: fact.epoch },
            None => continue,
        };
        happenings.push(Happening::new(fact.run, on, "sandbox"));
    }
    apply(&mut work, &happenings).await?;
    work.commit().await
}
