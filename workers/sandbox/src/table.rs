//! All SQL of `sandbox`.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use sqlx::PgPool;
use towpath_chassis::{Error, Result, Work};
use towpath_schemas::{
    command::Command,
    guest::{Identity, Walls},
    id::{RunId, SessionId, TenantId},
};
use uuid::Uuid;

/// Beyond a tenth of the fence itself, which stands for clocks that do not run alike: the time that ending a command may take on a busy host.
pub(crate) const FENCE_MARGIN: Duration = Duration::from_secs(10);
/// Hosts look every 3 s and gateways every 5 s; after this silence of both nobody knows whether a sandbox is there.
const UNOBSERVED: Duration = Duration::from_secs(60);

/// A sandbox that an admission asks for.
#[derive(Debug, Clone)]
pub struct Asked {
    pub run: RunId,
    pub epoch: i32,
    pub tenant: TenantId,
    pub session: SessionId,
    pub host: String,
    pub backend: String,
    pub walls: serde_json::Value,
    pub fence_s: Option<i32>,
}

/// Asks hosts for sandboxes, with the admission's transaction.
pub async fn ask(work: &mut Work, asked: &[Asked]) -> Result<()> {
    if asked.is_empty() {
        return Ok(());
    }
    let runs: Vec<Uuid> = asked.iter().map(|row| row.run.uuid()).collect();
    let epochs: Vec<i32> = asked.iter().map(|row| row.epoch).collect();
    let tenants: Vec<Uuid> = asked.iter().map(|row| row.tenant.uuid()).collect();
    let sessions: Vec<Uuid> = asked.iter().map(|row| row.session.uuid()).collect();
    let hosts: Vec<String> = asked.iter().map(|row| row.host.clone()).collect();
    let backends: Vec<String> = asked.iter().map(|row| row.backend.clone()).collect();
    let walls: Vec<serde_json::Value> = asked.iter().map(|row| row.walls.clone()).collect();
    let fences: Vec<Option<i32>> = asked.iter().map(|row| row.fence_s).collect();
    sqlx::query!(
        "insert into sandbox (run_id, epoch, tenant_id, session_id, host, backend, walls, fence_s, state)
         select *, 'asked' from unnest($1::uuid[], $2::int[], $3::uuid[], $4::uuid[], $5::text[], $6::text[], $7::jsonb[], $8::int[])",
        &runs,
        &epochs,
        &tenants,
        &sessions,
        &hosts,
        &backends,
        &walls,
        &fences as &[Option<i32>]
    )
    .execute(work.db())
    .await?;
    for row in asked {
        work.command(Command::Host { host: row.host.clone(), run: row.run });
    }
    Ok(())
}

/// Nobody needs these sandboxes any more: they are fenced when they come.
pub async fn unwant(work: &mut Work, sandboxes: &[(RunId, i32)]) -> Result<()> {
    let (runs, epochs): (Vec<Uuid>, Vec<i32>) = sandboxes.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    let rows = sqlx::query!(
        "with old as (
             select run_id, sandbox.epoch from sandbox join unnest($1::uuid[], $2::int[]) as old (run, epoch) on run_id = old.run and sandbox.epoch = old.epoch
             order by run_id, sandbox.epoch for update of sandbox)
         update sandbox set unwanted = true from old
         where sandbox.run_id = old.run_id and sandbox.epoch = old.epoch and state <> 'gone' returning sandbox.run_id, host",
        &runs,
        &epochs
    )
    .fetch_all(work.db())
    .await?;
    for row in rows {
        work.command(Command::Host { host: row.host, run: row.run_id.into() });
    }
    Ok(())
}

/// A supervisor process that is to be bound to its epoch.
#[derive(Debug, Clone)]
pub struct Binding {
    pub run: RunId,
    pub epoch: i32,
    pub incarnation: String,
    pub key_sha256: Vec<u8>,
    pub identity: Identity,
}

/// Binds supervisor processes to their epochs, each where none is bound yet or the same one; those that are bound now. The caller holds the run rows' locks.
pub async fn bind(work: &mut Work, bindings: &[Binding]) -> Result<HashSet<(RunId, i32)>> {
    let runs: Vec<Uuid> = bindings.iter().map(|binding| binding.run.uuid()).collect();
    let epochs: Vec<i32> = bindings.iter().map(|binding| binding.epoch).collect();
    let incarnations: Vec<String> = bindings.iter().map(|binding| binding.incarnation.clone()).collect();
    let keys: Vec<Vec<u8>> = bindings.iter().map(|binding| binding.key_sha256.clone()).collect();
    let identities = bindings.iter().map(|binding| serde_json::to_value(&binding.identity)).collect::<Result<Vec<_>, _>>();
    let identities = identities.map_err(|error| Error::broken(format!("identity: {error}")))?;
    let bound = sqlx::query!(
        "with new as (select * from unnest($1::uuid[], $2::int[], $3::text[], $4::bytea[], $5::jsonb[]) as new (run, epoch, incarnation, key_sha256, identity)),
         locked as (
             select run_id, sandbox.epoch from sandbox join (select distinct run, epoch from new) as new on run_id = new.run and sandbox.epoch = new.epoch
             order by run_id, sandbox.epoch for update of sandbox)
         update sandbox set state = 'bound', incarnation = new.incarnation, key_sha256 = new.key_sha256, identity = new.identity, last_heard_at = now()
         from new join locked on locked.run_id = new.run and locked.epoch = new.epoch
         where sandbox.run_id = new.run and sandbox.epoch = new.epoch and not unwanted
             and (state = 'asked' or (state = 'bound' and sandbox.incarnation = new.incarnation and sandbox.key_sha256 = new.key_sha256))
         returning sandbox.run_id, sandbox.epoch",
        &runs,
        &epochs,
        &incarnations,
        &keys,
        &identities
    )
    .fetch_all(work.db())
    .await?;
    Ok(bound.into_iter().map(|row| (row.run_id.into(), row.epoch)).collect())
}

/// What the gateway checks a hello against.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credential {
    pub tenant: TenantId,
    pub incarnation: Option<String>,
    pub key_sha256: Option<Vec<u8>>,
    pub unwanted: bool,
}

pub async fn credentials(db: &PgPool, sandboxes: &[(RunId, i32)]) -> Result<HashMap<(RunId, i32), Credential>> {
    let (runs, epochs): (Vec<Uuid>, Vec<i32>) = sandboxes.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    let rows = sqlx::query!(
        "select run_id, sandbox.epoch, tenant_id, incarnation, key_sha256, unwanted
         from sandbox join unnest($1::uuid[], $2::int[]) as asked (run, epoch) on run_id = asked.run and sandbox.epoch = asked.epoch",
        &runs,
        &epochs
    )
    .fetch_all(db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let credential = Credential {
                tenant: row.tenant_id.into(),
                incarnation: row.incarnation,
                key_sha256: row.key_sha256,
                unwanted: row.unwanted,
            };
            ((row.run_id.into(), row.epoch), credential)
        })
        .collect())
}

/// Records that a gateway heard from these sandboxes.
pub async fn heard(db: &PgPool, sandboxes: &[(RunId, i32)]) -> Result<()> {
    let (runs, epochs): (Vec<Uuid>, Vec<i32>) = sandboxes.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    sqlx::query!(
        // One that somebody works on now is heard at the next look.
        "update sandbox set last_heard_at = now() where (run_id, epoch) in (
             select run_id, sandbox.epoch from sandbox join unnest($1::uuid[], $2::int[]) as live (run, epoch) on run_id = live.run and sandbox.epoch = live.epoch
             for update of sandbox skip locked)",
        &runs,
        &epochs
    )
    .execute(db)
    .await?;
    Ok(())
}

/// Records that these sandboxes, which ask for it, get a lease; those of which it is committed now, and that count. Only they may be told.
pub async fn lease(db: &PgPool, sandboxes: &[(RunId, i32)]) -> Result<HashSet<(RunId, i32)>> {
    let (runs, epochs): (Vec<Uuid>, Vec<i32>) = sandboxes.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    let leased = sqlx::query!(
        "update sandbox set leased_at = now() where state = 'bound' and not unwanted and (run_id, epoch) in (
             select run_id, sandbox.epoch from sandbox join unnest($1::uuid[], $2::int[]) as asking (run, epoch) on run_id = asking.run and sandbox.epoch = asking.epoch
             for update of sandbox skip locked)
         returning run_id, epoch",
        &runs,
        &epochs
    )
    .fetch_all(db)
    .await?;
    Ok(leased.into_iter().map(|row| (row.run_id.into(), row.epoch)).collect())
}

/// Sandboxes whose newest lease was granted longer ago than their fence and [`FENCE_MARGIN`]: their commands have ended by themselves, so they are gone. How many.
pub(crate) async fn run_out(work: &mut Work, most: i64) -> Result<u64> {
    let rows = sqlx::query!(
        "with over as (
             select run_id, epoch from sandbox
             where state = 'bound' and fence_s is not null and leased_at < now() - make_interval(secs => fence_s * 1.1::float8 + $1)
             order by run_id, epoch limit $2 for update skip locked)
         update sandbox set observed = 'absent', observed_at = now(), unknown_since = null, state = 'gone', gone_at = now(), unwanted = true
         from over where sandbox.run_id = over.run_id and sandbox.epoch = over.epoch
         returning sandbox.run_id, sandbox.epoch, tenant_id, fence_s",
        FENCE_MARGIN.as_secs_f64(),
        most
    )
    .fetch_all(work.db())
    .await?;
    for row in &rows {
        let run = RunId(row.run_id);
        tracing::info!(%run, epoch = row.epoch, fence_s = row.fence_s, "the sandbox is gone: its lease has run out");
        work.command(Command::Observed { tenant: row.tenant_id.into(), run, epoch: row.epoch });
    }
    Ok(rows.len() as u64)
}

/// Leases that nobody remembers may have been granted up to this moment: those of these sandboxes count from now.
pub async fn distrust_leases(work: &mut Work, sandboxes: &[(RunId, i32)]) -> Result<()> {
    let (runs, epochs): (Vec<Uuid>, Vec<i32>) = sandboxes.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    sqlx::query!(
        "update sandbox set leased_at = now() from unnest($1::uuid[], $2::int[]) as alive (run, epoch)
         where run_id = alive.run and sandbox.epoch = alive.epoch and leased_at is not null",
        &runs,
        &epochs
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// Their commands have ended, so silence proves nothing of them any more and costs nobody anything.
pub async fn lift_fence(work: &mut Work, sandboxes: &[(RunId, i32)]) -> Result<()> {
    let (runs, epochs): (Vec<Uuid>, Vec<i32>) = sandboxes.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    sqlx::query!(
        "update sandbox set fence_s = null from unnest($1::uuid[], $2::int[]) as ended (run, epoch) where run_id = ended.run and sandbox.epoch = ended.epoch",
        &runs,
        &epochs
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// Sandboxes that neither their host has seen nor a gateway heard for [`UNOBSERVED`]: nobody knows whether they are there. How many more.
pub(crate) async fn unobserved(db: &PgPool, most: i64) -> Result<u64> {
    let doubted = sqlx::query!(
        "update sandbox set observed = 'unknown', unknown_since = now() where (run_id, epoch) in (
             select run_id, epoch from sandbox
             where state = 'bound' and unknown_since is null and coalesce(observed_at, created_at) < now() - make_interval(secs => $1)
                 and coalesce(last_heard_at, created_at) < now() - make_interval(secs => $1)
             order by run_id, epoch limit $2 for update skip locked)",
        UNOBSERVED.as_secs_f64(),
        most
    )
    .execute(db)
    .await?;
    Ok(doubted.rows_affected())
}

/// Sandboxes of which nobody has known for `after` whether they are there, and whose owners were not told.
pub async fn doubted(db: &PgPool, after: Duration, most: i64) -> Result<Vec<(RunId, i32)>> {
    let rows = sqlx::query!(
        "select run_id, epoch from sandbox where state <> 'gone' and unknown_told_at is null and unknown_since < now() - make_interval(secs => $1)
         order by unknown_since limit $2",
        after.as_secs_f64(),
        most
    )
    .fetch_all(db)
    .await?;
    Ok(rows.into_iter().map(|row| (row.run_id.into(), row.epoch)).collect())
}

/// Takes note that the owners of these sandboxes are told; those of which it is not noted yet and that are in doubt still. The caller holds the run rows' locks.
pub async fn tell_doubt(work: &mut Work, sandboxes: &[(RunId, i32)]) -> Result<Vec<(RunId, i32)>> {
    let (runs, epochs): (Vec<Uuid>, Vec<i32>) = sandboxes.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    let rows = sqlx::query!(
        "update sandbox set unknown_told_at = now() from unnest($1::uuid[], $2::int[]) as doubted (run, epoch)
         where run_id = doubted.run and sandbox.epoch = doubted.epoch and state <> 'gone' and unknown_told_at is null and unknown_since is not null
         returning run_id, sandbox.epoch",
        &runs,
        &epochs
    )
    .fetch_all(work.db())
    .await?;
    Ok(rows.into_iter().map(|row| (row.run_id.into(), row.epoch)).collect())
}

/// One row that a host has to look at.
#[derive(Debug, Clone)]
pub struct Row {
    pub run: RunId,
    pub epoch: i32,
    pub tenant: TenantId,
    pub session: SessionId,
    pub walls: Walls,
    pub bound: bool,
    pub unwanted: bool,
    /// Somebody else has proved or decided that it is gone; what is left of it is to be removed.
    pub gone: bool,
}

/// The host's sandboxes that are not gone, and those whose remains are there still; only those of `runs` when given.
pub(crate) async fn of_host(db: &PgPool, host: &str, runs: Option<&[RunId]>) -> Result<Vec<Row>> {
    let runs: Option<Vec<Uuid>> = runs.map(|runs| runs.iter().map(|run| run.uuid()).collect());
    let rows = sqlx::query!(
        "select run_id, epoch, tenant_id, session_id, walls, state, unwanted from sandbox
         where host = $1 and removed_at is null and refusal is null and ($2::uuid[] is null or run_id = any($2)) order by created_at limit 10000",
        host,
        runs.as_deref()
    )
    .fetch_all(db)
    .await?;
    rows.into_iter()
        .map(|row| {
            Ok(Row {
                run: row.run_id.into(),
                epoch: row.epoch,
                tenant: row.tenant_id.into(),
                session: row.session_id.into(),
                walls: serde_json::from_value(row.walls).map_err(|error| Error::broken(format!("walls: {error}")))?,
                bound: row.state == "bound",
                unwanted: row.unwanted,
                gone: row.state == "gone",
            })
        })
        .collect()
}

/// Those of these sandboxes that have a row.
pub(crate) async fn known(db: &PgPool, sandboxes: &[(RunId, i32)]) -> Result<HashSet<(RunId, i32)>> {
    let (runs, epochs): (Vec<Uuid>, Vec<i32>) = sandboxes.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    let rows = sqlx::query!(
        "select run_id, sandbox.epoch from sandbox join unnest($1::uuid[], $2::int[]) as asked (run, epoch) on run_id = asked.run and sandbox.epoch = asked.epoch",
        &runs,
        &epochs
    )
    .fetch_all(db)
    .await?;
    Ok(rows.into_iter().map(|row| (row.run_id.into(), row.epoch)).collect())
}

/// Nothing is left of these sandboxes on their host.
pub(crate) async fn removed(db: &PgPool, sandboxes: &[(RunId, i32)]) -> Result<()> {
    let (runs, epochs): (Vec<Uuid>, Vec<i32>) = sandboxes.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    sqlx::query!(
        "update sandbox set removed_at = now() from unnest($1::uuid[], $2::int[]) as done (run, epoch)
         where run_id = done.run and sandbox.epoch = done.epoch and state = 'gone'",
        &runs,
        &epochs
    )
    .execute(db)
    .await?;
    Ok(())
}

/// The host can never start it. Nothing was created.
pub(crate) async fn refused(work: &mut Work, row: &Row, reason: &str, message: &str) -> Result<()> {
    sqlx::query!(
        "update sandbox set refusal = $3, refusal_message = $4, state = 'gone', gone_at = now(), removed_at = now() where run_id = $1 and epoch = $2 and state = 'asked'",
        row.run.uuid(),
        row.epoch,
        reason,
        message
    )
    .execute(work.db())
    .await?;
    work.command(Command::Observed { tenant: row.tenant, run: row.run, epoch: row.epoch });
    Ok(())
}

/// Its end is proved.
pub(crate) async fn gone(work: &mut Work, row: &Row) -> Result<()> {
    sqlx::query!(
        "update sandbox set observed = 'absent', observed_at = now(), unknown_since = null, state = 'gone', gone_at = now() where run_id = $1 and epoch = $2 and state <> 'gone'",
        row.run.uuid(),
        row.epoch
    )
    .execute(work.db())
    .await?;
    work.command(Command::Observed { tenant: row.tenant, run: row.run, epoch: row.epoch });
    Ok(())
}

/// These are there. What was seen long ago counts as unknown, so this is said again at every look.
pub(crate) async fn present(db: &PgPool, rows: &[(RunId, i32)]) -> Result<()> {
    let (runs, epochs): (Vec<Uuid>, Vec<i32>) = rows.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    sqlx::query!(
        // One that somebody works on now is seen at the next look.
        "update sandbox set observed = 'present', observed_at = now(), unknown_since = null where (run_id, epoch) in (
             select run_id, sandbox.epoch from sandbox join unnest($1::uuid[], $2::int[]) as seen (run, epoch) on run_id = seen.run and sandbox.epoch = seen.epoch
             where state <> 'gone' for update of sandbox skip locked)",
        &runs,
        &epochs
    )
    .execute(db)
    .await?;
    Ok(())
}

/// Nobody can tell whether it is there.
pub(crate) async fn unknown(db: &PgPool, row: &Row) -> Result<()> {
    sqlx::query!(
        "update sandbox set observed = 'unknown', observed_at = now(), unknown_since = coalesce(unknown_since, now())
         where run_id = $1 and epoch = $2 and state <> 'gone'",
        row.run.uuid(),
        row.epoch
    )
    .execute(db)
    .await?;
    Ok(())
}

/// What is known of a run's sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fact {
    pub run: RunId,
    pub epoch: i32,
    pub refusal: Option<(String, String)>,
    pub gone: bool,
    pub present: bool,
}

pub async fn facts(work: &mut Work, sandboxes: &[(RunId, i32)]) -> Result<Vec<Fact>> {
    let (runs, epochs): (Vec<Uuid>, Vec<i32>) = sandboxes.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    let rows = sqlx::query!(
        "select run_id, sandbox.epoch, refusal, refusal_message, state,
                coalesce(observed = 'present' and observed_at > now() - interval '30 seconds', false) as \"present!\" from sandbox join unnest($1::uuid[], $2::int[]) as asked (run, epoch)
             on run_id = asked.run and sandbox.epoch = asked.epoch",
        &runs,
        &epochs
    )
    .fetch_all(work.db())
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| Fact {
            run: row.run_id.into(),
            epoch: row.epoch,
            refusal: row.refusal.map(|reason| (reason, row.refusal_message.unwrap_or_default())),
            gone: row.state == "gone",
            present: row.present && row.state != "gone",
        })
        .collect())
}

/// A person said that it is gone; its host stops looking.
pub async fn abandon(work: &mut Work, run: RunId, epoch: i32) -> Result<()> {
    sqlx::query!(
        "update sandbox set state = 'gone', gone_at = now(), unwanted = true where run_id = $1 and epoch = $2 and state <> 'gone'",
        run.uuid(),
        epoch
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// Those of these sandboxes that somebody still counts on. On one that is proved to be gone nobody does.
pub async fn wanted(work: &mut Work, sandboxes: &[(RunId, i32)]) -> Result<HashSet<(RunId, i32)>> {
    let (runs, epochs): (Vec<Uuid>, Vec<i32>) = sandboxes.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    let rows = sqlx::query!(
        "select run_id, sandbox.epoch from sandbox join unnest($1::uuid[], $2::int[]) as asked (run, epoch)
             on run_id = asked.run and sandbox.epoch = asked.epoch where not unwanted and state <> 'gone'",
        &runs,
        &epochs
    )
    .fetch_all(work.db())
    .await?;
    Ok(rows.into_iter().map(|row| (row.run_id.into(), row.epoch)).collect())
}

/// Forgets the sandboxes of removed runs, which are gone.
pub async fn remove(work: &mut Work, runs: &[RunId]) -> Result<()> {
    let runs: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    sqlx::query!("delete from sandbox where run_id = any($1)", &runs).execute(work.db()).await?;
    Ok(())
}
