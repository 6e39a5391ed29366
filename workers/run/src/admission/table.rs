//! All SQL of `pool`, `slot` and `workspace`, and the choice among waiting runs.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use sqlx::PgPool;
use towpath_chassis::{Result, Work};
use towpath_schemas::{
    command::Command,
    id::{RunId, SessionId, TenantId},
};
use uuid::Uuid;

/// A pool under its lock.
pub(crate) struct Room {
    pub name: String,
    pub backend: String,
    pub host: String,
    pub capacity: i64,
    pub used: i64,
    /// Slots that each tenant has.
    pub running: HashMap<TenantId, i64>,
}

/// A run that could be admitted.
#[derive(Debug, Clone)]
pub struct Waiting {
    pub run: RunId,
    pub tenant: TenantId,
    pub priority: i16,
    pub created_at: DateTime<Utc>,
    pub sandbox: serde_json::Value,
    pub agent: Uuid,
    /// Runs that its agent, and its tenant, may still have; None: no limit.
    pub agent_left: Option<i64>,
    pub tenant_left: Option<i64>,
}

/// A host says what it offers, and wakes its pool.
pub async fn register_pool(work: &mut Work, name: &str, backend: &str, host: &str, capacity: u32) -> Result<()> {
    sqlx::query!(
        "insert into pool (name, backend, host, capacity) values ($1, $2, $3, $4)
         on conflict (name) do update set backend = excluded.backend, host = excluded.host, capacity = excluded.capacity, heard_at = now()",
        name,
        backend,
        host,
        i32::try_from(capacity).unwrap_or(i32::MAX)
    )
    .execute(work.db())
    .await?;
    work.command(Command::Admit { pool: name.to_owned() });
    Ok(())
}

/// A host says that it is there.
pub async fn hear_pool(db: &PgPool, name: &str) -> Result<()> {
    sqlx::query!("update pool set heard_at = now() where name = $1", name).execute(db).await?;
    Ok(())
}

pub(crate) async fn pools_of(work: &mut Work, backend: &str) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar!("select name from pool where backend = $1 order by name limit 1000", backend).fetch_all(work.db()).await?)
}

pub(crate) async fn lock_pool(work: &mut Work, name: &str) -> Result<Option<Room>> {
    let Some(pool) = sqlx::query!(
        "select backend, host, capacity from pool where name = $1 and heard_at > now() - interval '30 seconds' for update",
        name
    )
    .fetch_optional(work.db())
    .await?
    else {
        return Ok(None);
    };
    let shares = sqlx::query!(r#"select tenant_id, count(*) as "count!" from slot where pool = $1 group by tenant_id"#, name)
        .fetch_all(work.db())
        .await?;
    Ok(Some(Room {
        name: name.to_owned(),
        backend: pool.backend,
        host: pool.host,
        capacity: i64::from(pool.capacity),
        used: shares.iter().map(|share| share.count).sum(),
        running: shares.into_iter().map(|share| (share.tenant_id.into(), share.count)).collect(),
    }))
}

/// Locks the tenants and agents of waiting runs that may have only so many at a time.
pub(crate) async fn lock_limited(work: &mut Work, backend: &str) -> Result<()> {
    sqlx::query!(
        "select id from tenant where concurrent is not null and exists (select 1 from run where state = 'queued' and backend = $1 and tenant_id = tenant.id)
         order by id for update",
        backend
    )
    .fetch_all(work.db())
    .await?;
    sqlx::query!(
        "select id from agent where id in (select agent_id from run where state = 'queued' and concurrent is not null and backend = $1) order by id for update",
        backend
    )
    .fetch_all(work.db())
    .await?;
    Ok(())
}

/// The best `most` waiting runs of each tenant whose workspace is here or nowhere yet, and free; none that is paused or has no room left. One index step for each tenant,
/// however many wait.
pub(crate) async fn waiting(work: &mut Work, room: &Room, most: i64) -> Result<Vec<Waiting>> {
    let rows = sqlx::query!(
        r#"with recursive of_agent as (select agent_id, count(*) as slots from slot group by agent_id),
           of_tenant as (select tenant_id, count(*) as slots from slot group by tenant_id),
           tenants as (
               (select tenant_id from run where state = 'queued' and backend = $1 order by tenant_id limit 1)
               union all
               select (select tenant_id from run where state = 'queued' and backend = $1 and tenant_id > tenants.tenant_id order by tenant_id limit 1)
               from tenants where tenants.tenant_id is not null)
           select best.id as "id!", best.tenant_id as "tenant_id!", best.priority as "priority!", best.created_at as "created_at!", best.sandbox as "sandbox!",
                  best.agent_id as "agent_id!", best.agent_left, tenant.concurrent - coalesce(of_tenant.slots, 0) as tenant_left
           from tenants join tenant on tenant.id = tenants.tenant_id and tenant.paused_at is null left join of_tenant on of_tenant.tenant_id = tenant.id
           cross join lateral (
               select run.id, run.tenant_id, run.priority, run.created_at, run.sandbox, run.agent_id, run.concurrent - coalesce(of_agent.slots, 0) as agent_left
               from run join agent on agent.id = run.agent_id and agent.paused_at is null left join of_agent on of_agent.agent_id = run.agent_id
                   left join workspace on workspace.session_id = run.session_id
               where run.state = 'queued' and run.backend = $1 and run.tenant_id = tenants.tenant_id
                   and (run.concurrent is null or run.concurrent > coalesce(of_agent.slots, 0))
                   and (workspace.session_id is null or (workspace.pool = $2 and workspace.run_id is null))
               order by run.priority desc, run.created_at, run.id limit $3) as best
           where tenants.tenant_id is not null and not exists (select 1 from installation where paused_at is not null)
               and (tenant.concurrent is null or tenant.concurrent > coalesce(of_tenant.slots, 0))"#,
        room.backend,
        room.name,
        most
    )
    .fetch_all(work.db())
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| Waiting {
            run: row.id.into(),
            tenant: row.tenant_id.into(),
            priority: row.priority,
            created_at: row.created_at,
            sandbox: row.sandbox,
            agent: row.agent_id,
            agent_left: row.agent_left,
            tenant_left: row.tenant_left,
        })
        .collect())
}

/// Runs whose session's workspace is still held by an earlier run say so.
pub(crate) async fn say_what_held_ones_wait_for(work: &mut Work, pool: &str) -> Result<()> {
    sqlx::query!(
        "update run set waiting_for = case when workspace.run_id is null then 'place' else 'workspace_held' end
         from workspace where workspace.session_id = run.session_id and workspace.pool = $1 and run.state = 'queued'
             and waiting_for <> case when workspace.run_id is null then 'place' else 'workspace_held' end",
        pool
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// Takes slots and workspaces for runs that were just admitted: (run, epoch, tenant, session).
pub(crate) async fn take(work: &mut Work, pool: &str, slots: &[(RunId, i32, TenantId, SessionId)]) -> Result<()> {
    let runs: Vec<Uuid> = slots.iter().map(|slot| slot.0.uuid()).collect();
    let epochs: Vec<i32> = slots.iter().map(|slot| slot.1).collect();
    let tenants: Vec<Uuid> = slots.iter().map(|slot| slot.2.uuid()).collect();
    let sessions: Vec<Uuid> = slots.iter().map(|slot| slot.3.uuid()).collect();
    sqlx::query!(
        "insert into slot (run_id, epoch, pool, tenant_id, agent_id)
         select t.run, t.epoch, $4, tenant, run.agent_id from unnest($1::uuid[], $2::int[], $3::uuid[]) as t (run, epoch, tenant) join run on run.id = t.run",
        &runs,
        &epochs,
        &tenants,
        pool
    )
    .execute(work.db())
    .await?;
    sqlx::query!(
        "insert into workspace (session_id, tenant_id, pool, run_id, epoch)
         select session, tenant, $5, run, epoch from unnest($1::uuid[], $2::int[], $3::uuid[], $4::uuid[]) as t (run, epoch, tenant, session)
         on conflict (session_id) do update set run_id = excluded.run_id, epoch = excluded.epoch, unwanted = false",
        &runs,
        &epochs,
        &tenants,
        &sessions,
        pool
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// Frees slots and wakes their pools; all of the backend's where a limit of the agent or the tenant has room now, too.
pub(crate) async fn release_slots(work: &mut Work, slots: &[(RunId, i32)]) -> Result<()> {
    if slots.is_empty() {
        return Ok(());
    }
    let (runs, epochs): (Vec<Uuid>, Vec<i32>) = slots.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    let freed = sqlx::query!(
        r#"delete from slot using unnest($1::uuid[], $2::int[]) as old (run, epoch) where run_id = old.run and slot.epoch = old.epoch
           returning pool, (exists (select 1 from run where run.id = slot.run_id and concurrent is not null)
                            or exists (select 1 from tenant where tenant.id = slot.tenant_id and concurrent is not null)) as "limited!""#,
        &runs,
        &epochs
    )
    .fetch_all(work.db())
    .await?;
    let limited = freed.iter().any(|slot| slot.limited);
    let mut pools: Vec<String> = freed.into_iter().map(|slot| slot.pool).collect();
    pools.sort_unstable();
    pools.dedup();
    if limited {
        pools = sqlx::query_scalar!(
            "select name from pool where backend in (select backend from pool where name = any($1)) order by name limit 1000",
            &pools
        )
        .fetch_all(work.db())
        .await?;
    }
    for pool in pools {
        work.command(Command::Admit { pool });
    }
    Ok(())
}

/// Lets go of the workspaces that these runs hold, and wakes the pools where their sessions' next runs wait.
pub(crate) async fn release_workspaces(work: &mut Work, runs: &[RunId]) -> Result<()> {
    if runs.is_empty() {
        return Ok(());
    }
    let runs: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    let pools = sqlx::query_scalar!("update workspace set run_id = null, epoch = null where run_id = any($1) returning pool", &runs)
        .fetch_all(work.db())
        .await?;
    for pool in pools {
        work.command(Command::Admit { pool });
    }
    Ok(())
}

/// Waiting runs and the age of the oldest in seconds: what autoscaling reads for `provision`.
pub async fn ready(db: &PgPool) -> Result<(i64, f64)> {
    let row = sqlx::query!(
        r#"select count(*) as "count!", coalesce(extract(epoch from now() - min(created_at)), 0)::float8 as "age!" from run where state = 'queued'"#
    )
    .fetch_one(db)
    .await?;
    Ok((row.count, row.age))
}

/// Slots taken in all pools.
pub async fn slots_held(db: &PgPool) -> Result<i64> {
    Ok(sqlx::query_scalar!(r#"select count(*) as "count!" from slot"#).fetch_one(db).await?)
}

/// Pools that have room while somebody waits: what a lost wake-up would leave.
pub(crate) async fn pools_with_room(db: &PgPool) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar!(
        "select name from pool where heard_at > now() - interval '30 seconds' and capacity > (select count(*) from slot where slot.pool = pool.name)
             and exists (select 1 from run where state = 'queued' and run.backend = pool.backend)"
    )
    .fetch_all(db)
    .await?)
}

/// Asks the hosts of these sessions' workspaces to remove them.
pub async fn unwant_workspaces(work: &mut Work, sessions: &[SessionId]) -> Result<()> {
    let sessions: Vec<Uuid> = sessions.iter().map(|session| session.uuid()).collect();
    sqlx::query!("update workspace set unwanted = true where session_id = any($1) and run_id is null and not unwanted", &sessions)
        .execute(work.db())
        .await?;
    Ok(())
}

/// A pool's workspaces that are to be removed.
pub(crate) async fn unwanted_workspaces(db: &PgPool, pool: &str) -> Result<Vec<SessionId>> {
    let sessions =
        sqlx::query_scalar!("select session_id from workspace where pool = $1 and unwanted limit 100", pool).fetch_all(db).await?;
    Ok(sessions.into_iter().map(SessionId).collect())
}

/// Forgets a workspace that is still unwanted: its session has no run. The row stays locked until the transaction ends.
pub(crate) async fn forget_workspace(work: &mut Work, session: SessionId) -> Result<bool> {
    let done = sqlx::query!(
        "delete from workspace where session_id = $1 and unwanted and run_id is null and not exists (select 1 from run where run.session_id = $1)",
        session.uuid()
    )
    .execute(work.db())
    .await?;
    Ok(done.rows_affected() == 1)
}
