//! Nobody told us: timers bring the next attempt, and the sweeps find what neither command nor timer brought.

use std::time::Duration;

use towpath_chassis::{
    Chassis, Result, Work, clock,
    sweep::Sweep,
    timer::{Timers, boxed},
};
use towpath_schemas::{command::Command, id::InboundId};

use crate::intake::table;

/// The kind of timer that brings a next attempt; its key is the message's id.
pub const TIMER: &str = "intake";
/// A message that is due for this long was missed.
const MISSED: Duration = Duration::from_secs(5);

pub fn timers(timers: Timers) -> Timers {
    timers.on(TIMER, |work, keys| boxed(fire(work, keys)))
}

async fn fire(work: &mut Work, keys: Vec<String>) -> Result<()> {
    let ids: Vec<InboundId> = keys.iter().filter_map(|key| key.parse().ok()).collect();
    for (tenant, inbound) in table::tenant_of(work, &ids).await? {
        work.command(Command::Intake { tenant, inbound });
    }
    Ok(())
}

pub fn sweeps() -> Vec<Sweep> {
    vec![
        Sweep::new("missed inbound", Duration::from_secs(5), missed),
        Sweep::new("old inbound", Duration::from_secs(600), |chassis| async move { table::forget_raw(&chassis.db).await }),
    ]
}

async fn missed(chassis: Chassis) -> Result<u64> {
    let overdue = table::overdue(&chassis.db, clock::scaled(MISSED)).await?;
    let found = overdue.len() as u64;
    if found > 0 {
        let mut work = chassis.begin().await?;
        for (tenant, inbound) in overdue {
            work.command(Command::Intake { tenant, inbound });
        }
        work.commit().await?;
    }
    Ok(found)
}
