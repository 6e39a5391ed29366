//! Nobody told us: the twins of every command for runs, and what their timers do.

use std::time::Duration;

use towpath_chassis::{
    Chassis, Result, Work,
    sweep::Sweep,
    timer::{Timers, boxed},
};
use towpath_schemas::id::RunId;

use crate::{
    admission,
    apply::{Happening, TIMER_DEADLINE, TIMER_MAX, TIMER_SEAL, TIMER_START, TIMER_WANTED, apply, parse_epoch_key},
    state::On,
    view, worker,
};

pub fn timers(timers: Timers) -> Timers {
    timers
        .on(TIMER_WANTED, |work, keys| boxed(fire(work, keys, |key| Some((key.parse().ok()?, On::WantedOverdue)))))
        .on(TIMER_DEADLINE, |work, keys| boxed(fire(work, keys, |key| Some((key.parse().ok()?, On::Deadline)))))
        .on(TIMER_MAX, |work, keys| boxed(fire(work, keys, |key| Some((key.parse().ok()?, On::TimeLimit { reason: "maximum" })))))
        .on(TIMER_START, |work, keys| {
            boxed(fire(work, keys, |key| parse_epoch_key(key).map(|(run, epoch)| (run, On::StartDeadline { epoch }))))
        })
        .on(TIMER_SEAL, |work, keys| {
            boxed(fire(work, keys, |key| parse_epoch_key(key).map(|(run, epoch)| (run, On::SealOverdue { epoch }))))
        })
}

async fn fire(work: &mut Work, keys: Vec<String>, read: fn(&str) -> Option<(RunId, On)>) -> Result<()> {
    let happenings: Vec<Happening> = keys.iter().filter_map(|key| read(key)).map(|(run, on)| Happening::new(run, on, "clock")).collect();
    apply(work, &happenings).await?;
    Ok(())
}

pub fn sweeps() -> Vec<Sweep> {
    vec![Sweep::new("pools with room", Duration::from_secs(5), room), Sweep::new("untold facts", Duration::from_secs(5), untold)]
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
