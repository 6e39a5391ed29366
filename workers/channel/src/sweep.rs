//! Nobody told us: timers bring the next attempt, and the sweeps find what neither command nor timer brought.

use std::time::Duration;

use towpath_chassis::{
    Chassis, Result, Work, clock,
    sweep::Sweep,
    timer::{Timers, boxed},
};
use towpath_schemas::{body::RunState, command::Command, guest::SteerState, id::InboundId};

use crate::{
    intake::{steer_id, table},
    notice,
};

/// The kind of timer that brings a next attempt; its key is the message's id.
pub const TIMER: &str = "intake";
/// Messages of one look whose steers are asked after.
const STEERS: i64 = 500;
/// How often one message may be a steer that its run did not take before it is left at that.
const AGAIN: i32 = 5;
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
        Sweep::new("steers of messages", Duration::from_secs(2), steers),
        Sweep::new("answers given up", Duration::from_secs(10), notice::given_up),
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

/// Whoever stops a run does not ask for the next one.
async fn is_canceled(chassis: &Chassis, steering: &table::Steering) -> Result<bool> {
    Ok(towpath_run::view::run(&chassis.db, steering.tenant, steering.run).await?.state == RunState::Canceled)
}

/// What became of the steers that messages were made into. One that its run surely did not take is taken in again and starts the next run: a reply is not lost because
/// it came a moment too late. Of one that the run may have read its author is told, and nothing is sent twice.
async fn steers(chassis: Chassis) -> Result<u64> {
    let mut work = chassis.begin().await?;
    let steering = table::steering(&mut work, STEERS).await?;
    let ids: Vec<_> = steering.iter().map(|steering| steer_id(steering.message, steering.steers)).collect();
    let states = towpath_steer::states(&mut work, &ids).await?;
    let (mut settled, mut again, mut told) = (Vec::new(), Vec::new(), Vec::new());
    for (steering, id) in steering.iter().zip(&ids) {
        match states.get(id) {
            Some(SteerState::Queued | SteerState::Sent | SteerState::Written) => continue,
            Some(SteerState::Expired) if steering.steers < AGAIN && !is_canceled(&chassis, steering).await? => {
                again.push((steering.tenant, steering.message));
            }
            Some(SteerState::Expired) => told.push(notice::unread(steering, "without having read your message")),
            Some(SteerState::Unknown) => told.push(notice::unread(steering, "and nobody can tell whether it had read your message")),
            // Without a row its run was removed.
            Some(SteerState::Read) | None => {}
        }
        settled.push(steering.message);
    }
    table::reopen(&mut work, &again).await?;
    table::steered(&mut work, &settled).await?;
    towpath_delivery::create(&mut work, &told).await?;
    work.commit().await?;
    Ok((again.len() + told.len()) as u64)
}
