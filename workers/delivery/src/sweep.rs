//! Nobody told us: timers bring the next attempt, and the sweep finds what neither command nor timer brought.

use std::time::Duration;

use towpath_chassis::{
    Chassis, Result, Work, clock,
    sweep::Sweep,
    timer::{Timers, boxed},
};
use towpath_schemas::{command::Command, id::DeliveryId};

use crate::table;

/// The kind of timer that brings a next attempt; its key is the delivery's id.
pub const TIMER: &str = "deliver";
/// A delivery that is due for this long was missed.
const MISSED: Duration = Duration::from_secs(5);

pub fn timers(timers: Timers) -> Timers {
    timers.on(TIMER, |work, keys| boxed(fire(work, keys)))
}

async fn fire(work: &mut Work, keys: Vec<String>) -> Result<()> {
    let ids: Vec<DeliveryId> = keys.iter().filter_map(|key| key.parse().ok()).collect();
    for (tenant, delivery) in table::tenant_of(work, &ids).await? {
        work.command(Command::Deliver { tenant, delivery });
    }
    Ok(())
}

pub fn sweeps() -> Vec<Sweep> {
    vec![Sweep::new("missed deliveries", Duration::from_secs(5), missed)]
}

async fn missed(chassis: Chassis) -> Result<u64> {
    let overdue = table::overdue(&chassis.db, clock::scaled(MISSED)).await?;
    let found = overdue.len() as u64;
    if found > 0 {
        let mut work = chassis.begin().await?;
        for (tenant, delivery) in overdue {
            work.command(Command::Deliver { tenant, delivery });
        }
        work.commit().await?;
    }
    Ok(found)
}
