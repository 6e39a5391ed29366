//! Which runs are over their time, and which of them may be removed.

use chrono::{DateTime, Utc};
use sqlx::PgPool;
use towpath_chassis::{Result, Work};
use towpath_schemas::id::{RunId, TenantId};
use uuid::Uuid;

/// Runs that are looked at together.
const RUNS: i64 = 100;

/// The tenant's runs that ended from `from` and before `before`, oldest first, with all that ended at the same moment as the last of them.
pub(super) async fn ended_between(
    db: &PgPool,
    tenant: TenantId,
    from: DateTime<Utc>,
    before: DateTime<Utc>,
) -> Result<Vec<(RunId, DateTime<Utc>)>> {
    let rows = sqlx::query!(
        r#"select id, ended_at as "ended_at!" from run where tenant_id = $1 and ended_at >= $2 and ended_at < $3 order by ended_at fetch first $4 rows with ties"#,
        tenant.uuid(),
        from,
        before,
        RUNS
    )
    .fetch_all(db)
    .await?;
    Ok(rows.into_iter().map(|row| (row.id.into(), row.ended_at)).collect())
}

/// What keeps a run from being removed.
pub(super) struct Held {
    state: String,
    ended: bool,
    sandbox: bool,
    delivery: bool,
    record: bool,
}

impl Held {
    pub fn why(&self, run: RunId) -> Option<String> {
        if !self.ended {
            return Some(format!("{run} is {}: cancel it, or wait for its end", self.state));
        }
        if self.sandbox {
            return Some(format!("the sandbox of {run} is not known to be gone: wait a moment, or `towpath abandon {run}`"));
        }
        if self.record {
            return Some(format!("the record of {run} is still being sealed; try again later"));
        }
        self.delivery.then(|| format!("deliveries of {run} are still on their way; try again later"))
    }
}

pub(super) async fn held(db: &PgPool, tenant: TenantId, run: RunId) -> Result<Option<Held>> {
    Ok(sqlx::query_as!(
        Held,
        r#"select state, ended_at is not null as "ended!",
               (active or exists (select 1 from sandbox where run_id = run.id and sandbox.state <> 'gone')) as "sandbox!",
               exists (select 1 from delivery where run_id = run.id and next_attempt_at is not null) as "delivery!",
               exists (select 1 from transcript where run_id = run.id and transcript.state <> 'closed') as "record!"
           from run where id = $1 and tenant_id = $2"#,
        run.uuid(),
        tenant.uuid()
    )
    .fetch_optional(db)
    .await?)
}

/// The tenant's runs that ended before and that nothing holds, oldest first.
pub(super) async fn removable(db: &PgPool, tenant: TenantId, before: DateTime<Utc>) -> Result<Vec<RunId>> {
    let ids = sqlx::query_scalar!(
        "select id from run where tenant_id = $1 and ended_at < $2 and not active
             and not exists (select 1 from sandbox where run_id = run.id and sandbox.state <> 'gone')
             and not exists (select 1 from delivery where run_id = run.id and next_attempt_at is not null)
             and not exists (select 1 from transcript where run_id = run.id and transcript.state <> 'closed')
         order by ended_at, id limit $3",
        tenant.uuid(),
        before,
        RUNS
    )
    .fetch_all(db)
    .await?;
    Ok(ids.into_iter().map(RunId).collect())
}

/// Locks those of these runs that nothing holds, and of which no content is kept any more.
pub(super) async fn lock_removable(work: &mut Work, runs: &[RunId]) -> Result<Vec<RunId>> {
    let ids: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    let ids = sqlx::query_scalar!(
        "select id from run where id = any($1) and ended_at is not null and not active
             and not exists (select 1 from sandbox where run_id = run.id and sandbox.state <> 'gone')
             and not exists (select 1 from delivery where run_id = run.id and next_attempt_at is not null)
             and not exists (select 1 from transcript where run_id = run.id and transcript.state <> 'closed')
             and not exists (select 1 from chunk where run_id = run.id)
         order by id for update",
        &ids
    )
    .fetch_all(work.db())
    .await?;
    Ok(ids.into_iter().map(RunId).collect())
}
