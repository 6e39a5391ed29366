//! Admission: slots are rows (run, epoch, pool), never counters. Under the pool's lock as many waiting runs as fit are admitted, by priority, then the tenant's least running share, then age.
//! What waits says for what. Everything that frees something announces it to the pools where it may be waited for: no polling, no lost wake-up.

use std::collections::HashMap;

use towpath_chassis::{Chassis, Error, Result, Work};
use towpath_sandbox::Asked;
use towpath_schemas::{agent::Sandbox, command::Command, guest::Walls, id::TenantId};

use crate::{
    apply::{Applied, Happening, apply},
    state::On,
    table::StepRow,
};

mod table;

pub use table::{Waiting, hear_pool, ready, register_pool, slots_held, unwant_workspaces};
pub(crate) use table::{forget_workspace, pools_with_room, release_slots, release_workspaces, unwanted_workspaces};

/// Runs admitted by one transaction.
const BATCH: i64 = 100;

/// Tells every pool of a backend that somebody may be waiting.
pub async fn announce(work: &mut Work, backend: &str) -> Result<()> {
    for pool in table::pools_of(work, backend).await? {
        work.command(Command::Admit { pool });
    }
    Ok(())
}

/// Tells every pool of every backend.
pub async fn announce_all(work: &mut Work) -> Result<()> {
    for backend in ["process", "container", "kubernetes"] {
        announce(work, backend).await?;
    }
    Ok(())
}

/// Admits into a pool until it is full or nobody fits; how many were admitted.
pub async fn admit(chassis: &Chassis, pool: &str) -> Result<u64> {
    let mut all = 0;
    loop {
        let mut work = chassis.begin().await?;
        let (admitted, more) = admit_some(&mut work, pool).await?;
        work.commit().await?;
        all += admitted;
        if !more {
            return Ok(all);
        }
    }
}

async fn admit_some(work: &mut Work, pool: &str) -> Result<(u64, bool)> {
    let Some(room) = table::lock_pool(work, pool).await? else { return Ok((0, false)) };
    table::say_what_held_ones_wait_for(work, pool).await?;
    let free = (room.capacity - room.used).clamp(0, BATCH);
    if free == 0 {
        return Ok((0, false));
    }
    // Whoever else admits for the same tenants and agents waits until their slots are counted.
    table::lock_limited(work, &room.backend).await?;
    let mut waiting = table::waiting(work, &room, free).await?;
    // Settings that this release cannot read are a newer one's to enforce.
    waiting.retain(|one| {
        walls(&one.sandbox).inspect_err(|error| tracing::info!(run = %one.run, error = error.chain(), "not admitted here")).is_ok()
    });
    let (found, free) = (waiting.len(), usize::try_from(free).unwrap_or(0));
    let chosen = choose(waiting, room.running, free);
    if chosen.is_empty() {
        return Ok((0, false));
    }
    let happenings: Vec<Happening> = chosen.iter().map(|waiting| Happening::new(waiting.run, On::Admitted, "admission")).collect();
    let applied = apply(work, &happenings).await?;
    let mut slots = Vec::new();
    let mut asked = Vec::new();
    for (waiting, applied) in chosen.iter().zip(applied) {
        let Applied::Moved(run) = applied else { continue };
        slots.push((run.id, run.machine.epoch, run.tenant, run.session));
        asked.push(Asked {
            run: run.id,
            epoch: run.machine.epoch,
            tenant: run.tenant,
            session: run.session,
            host: room.host.clone(),
            backend: room.backend.clone(),
            walls: walls(&waiting.sandbox)?,
            fence_s: run.fence_s,
        });
    }
    table::take(work, pool, &slots).await?;
    towpath_sandbox::ask(work, &asked).await?;
    let steps: Vec<StepRow> = slots
        .iter()
        .map(|(run, epoch, tenant, _)| StepRow {
            run: *run,
            epoch: *epoch,
            tenant: *tenant,
            step: "admitted".to_owned(),
            detail: Some(pool.to_owned()),
        })
        .collect();
    crate::table::steps(work, &steps).await?;
    // Another pool may have taken some of them: there may be more for this one.
    // Or what was found was held up by a limit that the next look knows of.
    let more = slots.len() as i64 == BATCH || slots.len() < chosen.len() || (chosen.len() < free && chosen.len() < found);
    Ok((slots.len() as u64, more))
}

fn walls(sandbox: &serde_json::Value) -> Result<serde_json::Value> {
    let sandbox: Sandbox = serde_json::from_value(sandbox.clone()).map_err(|error| Error::broken(format!("sandbox settings: {error}")))?;
    serde_json::to_value(Walls {
        isolation: sandbox.isolation,
        egress: sandbox.egress,
        memory_bytes: sandbox.memory_bytes,
        pids: sandbox.pids,
        disk_bytes: sandbox.disk_bytes,
        uid: None,
    })
    .map_err(|error| Error::broken(format!("walls: {error}")))
}

/// Picks `free` of those that wait. Pure: priority, then the tenant's running share (what was picked counts), then age; no tenant and no agent gets more than it has left.
fn choose(mut waiting: Vec<Waiting>, mut running: HashMap<TenantId, i64>, free: usize) -> Vec<Waiting> {
    let mut chosen: Vec<Waiting> = Vec::new();
    while chosen.len() < free {
        waiting.retain(|one| {
            let picked = |same: &dyn Fn(&Waiting) -> bool| chosen.iter().filter(|other| same(other)).count() as i64;
            one.tenant_left.is_none_or(|left| picked(&|other| other.tenant == one.tenant) < left)
                && one.agent_left.is_none_or(|left| picked(&|other| other.agent == one.agent) < left)
        });
        let best = waiting
            .iter()
            .enumerate()
            .min_by_key(|(_, one)| {
                (std::cmp::Reverse(one.priority), running.get(&one.tenant).copied().unwrap_or(0), one.created_at, one.run)
            })
            .map(|(index, _)| index);
        let Some(best) = best else { break };
        let one = waiting.remove(best);
        *running.entry(one.tenant).or_default() += 1;
        chosen.push(one);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;
    use towpath_schemas::id::RunId;

    use super::*;

    fn waiting(tenant: TenantId, priority: i16, age: i64) -> Waiting {
        Waiting {
            run: RunId::mint(),
            tenant,
            priority,
            created_at: DateTime::from_timestamp(age, 0).expect("time"),
            sandbox: serde_json::json!({}),
            agent: uuid::Uuid::nil(),
            agent_left: None,
            tenant_left: None,
        }
    }

    #[test]
    fn nobody_gets_more_than_is_left_to_it() {
        let (a, b) = (TenantId::mint(), TenantId::mint());
        let limited = |tenant, age| Waiting { agent_left: Some(1), ..waiting(tenant, 5, age) };
        let queue = vec![
            limited(a, 1),
            limited(a, 2),
            Waiting { tenant_left: Some(0), ..waiting(b, 9, 3) },
            Waiting { agent: uuid::Uuid::max(), ..waiting(a, 0, 4) },
        ];
        let order: Vec<_> = choose(queue.clone(), HashMap::new(), 10).into_iter().map(|one| one.run).collect();
        assert_eq!(order, [queue[0].run, queue[3].run]);
    }

    #[test]
    fn a_tenant_that_queued_much_does_not_delay_another_s_first() {
        let (many, one) = (TenantId::mint(), TenantId::mint());
        let queue: Vec<Waiting> = (0..10).map(|age| waiting(many, 0, age)).chain([waiting(one, 0, 100)]).collect();
        let first = queue[10].run;
        let chosen = choose(queue, HashMap::from([(many, 3)]), 2);
        assert_eq!(chosen[0].run, first);
        assert_eq!(chosen[1].tenant, many);
    }

    #[test]
    fn priority_goes_before_share_and_age() {
        let (a, b) = (TenantId::mint(), TenantId::mint());
        let queue = vec![waiting(a, 0, 1), waiting(b, 5, 9), waiting(a, 5, 2)];
        let order: Vec<_> = choose(queue.clone(), HashMap::from([(b, 1)]), 3).into_iter().map(|one| one.run).collect();
        assert_eq!(order, [queue[2].run, queue[1].run, queue[0].run]);
    }
}
