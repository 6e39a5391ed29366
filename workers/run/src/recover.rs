//! After a backup of the database was restored: what ran when it was taken may have gone on, ended or been started anew since, and nobody remembers. Every run that may be alive gets epochs
//! that were never given out, and every sandbox that the backup knows is fenced; what they had not handed over by then is told as lost.

use towpath_chassis::{Chassis, Result};
use towpath_schemas::{body::RunState, id::RunId};

use crate::{
    apply::note,
    table::{self, Locked},
};

/// More epochs than a run can use up by itself.
const EPOCHS: i32 = 10;
/// Runs of one transaction.
const BATCH: i64 = 1000;

/// What was done, or would be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Runs that wait for a place: they start as if nothing had been.
    pub waiting: u64,
    /// Runs whose sandbox is fenced: they end as lost, or start again when their agent says `on_lost = "restart"`.
    pub fenced: u64,
}

/// Recovers what is left to recover of it; `act`: not only counts. It may be broken off and asked for again.
pub async fn recover(chassis: &Chassis, act: bool) -> Result<Recovered> {
    let floor = table::fresh_epochs(&chassis.db).await?;
    let mut all = Recovered::default();
    let mut after = None;
    loop {
        let runs = table::alive(&chassis.db, floor, after, BATCH).await?;
        let Some(last) = runs.last() else { return Ok(all) };
        after = Some(*last);
        let mut work = chassis.begin().await?;
        let locked = table::lock(work.db(), &runs).await?;
        let fenced: Vec<&Locked> = locked.iter().filter(|run| run.machine.epoch > 0 && run.machine.state != RunState::Queued).collect();
        all.fenced += fenced.len() as u64;
        all.waiting += (locked.len() - fenced.len()) as u64;
        if !act {
            continue;
        }
        let floors: Vec<(RunId, i32)> = locked.iter().map(|run| (run.id, floor.max(run.machine.epoch.saturating_add(EPOCHS)))).collect();
        table::raise_floors(&mut work, &floors).await?;
        note(&mut work, &fenced, "recovered", "towpath recover", "backup_restored").await?;
        let sandboxes: Vec<(RunId, i32)> = fenced.iter().map(|run| (run.id, run.machine.epoch)).collect();
        towpath_sandbox::distrust_leases(&mut work, &sandboxes).await?;
        towpath_sandbox::unwant(&mut work, &sandboxes).await?;
        work.commit().await?;
    }
}
