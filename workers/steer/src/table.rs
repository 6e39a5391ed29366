//! All SQL of `steer`.

use sqlx::PgPool;
use towpath_chassis::{Error, Result, Work};
use towpath_schemas::{
    body::Steer,
    guest::{SteerEnd, SteerOrder, SteerState},
    id::{FileId, PrincipalId, RunId, SteerId, TenantId},
    limit::PAGE_ROWS,
};
use uuid::Uuid;

use crate::state::{at_loss, at_settling, from_word, moves, word};

/// Inserts a steer as its run's next. The caller holds the run row's lock.
pub async fn insert(
    work: &mut Work,
    tenant: TenantId,
    run: RunId,
    id: SteerId,
    principal: PrincipalId,
    message: &str,
    files: &[FileId],
) -> Result<i64> {
    let ordinal = sqlx::query_scalar!(
        r#"insert into steer (id, tenant_id, run_id, ordinal, message, state, principal_id)
           values ($1, $2, $3, (select coalesce(max(ordinal), 0) + 1 from steer where run_id = $3), $4, 'queued', $5) returning ordinal"#,
        id.uuid(),
        tenant.uuid(),
        run.uuid(),
        message,
        principal.uuid()
    )
    .fetch_one(work.db())
    .await?;
    if !files.is_empty() {
        towpath_file::attach_to_steer(work, tenant, id, files).await?;
    }
    Ok(ordinal)
}

/// How many steers of the run are open.
pub async fn open_count(work: &mut Work, run: RunId) -> Result<i64> {
    Ok(sqlx::query_scalar!(
        r#"select count(*) as "count!" from steer where run_id = $1 and state in ('queued', 'sent', 'written')"#,
        run.uuid()
    )
    .fetch_one(work.db())
    .await?)
}

/// The steers of live epochs that their supervisor may not have yet, in order: `queued` ones, and `sent` ones again (it drops ids it knows).
pub async fn to_send(db: &PgPool, runs: &[(RunId, i32)]) -> Result<Vec<(RunId, SteerOrder)>> {
    let (ids, epochs): (Vec<Uuid>, Vec<i32>) = runs.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    let rows = sqlx::query!(
        "select steer.id, run_id, ordinal, message from steer join unnest($1::uuid[], $2::int[]) as live (run, epoch) on run_id = live.run
         where state = 'queued' or (state = 'sent' and steer.epoch = live.epoch) order by run_id, ordinal",
        &ids,
        &epochs
    )
    .fetch_all(db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| (row.run_id.into(), SteerOrder { steer: row.id.into(), ordinal: row.ordinal, message: row.message, files: Vec::new() }))
        .collect())
}

/// Marks steers as sent in `epoch`; the ones that moved. The caller holds the run row's lock.
pub async fn sent(work: &mut Work, run: RunId, epoch: i32, steers: &[SteerId]) -> Result<Vec<SteerId>> {
    let ids: Vec<Uuid> = steers.iter().map(|id| id.uuid()).collect();
    let moved = sqlx::query_scalar!(
        "update steer set state = 'sent', epoch = $2, changed_at = now() where run_id = $1 and id = any($3) and state = 'queued' returning id",
        run.uuid(),
        epoch,
        &ids
    )
    .fetch_all(work.db())
    .await?;
    Ok(moved.into_iter().map(SteerId).collect())
}

/// Applies what a supervisor said of steers; the ones that moved. The caller holds the run row's lock.
pub async fn report(work: &mut Work, run: RunId, epoch: i32, reports: &[SteerEnd]) -> Result<Vec<SteerEnd>> {
    let mut moved = Vec::new();
    for (steer, from) in open(work, &[run]).await?.into_iter().map(|row| (row.1, row.2)) {
        let Some(report) = reports.iter().rfind(|report| report.steer == steer) else { continue };
        if moves(from, report.state) {
            moved.push(report.clone());
        }
    }
    update(work, epoch, &moved, None).await?;
    Ok(moved)
}

/// The epoch of these runs is lost.
pub async fn lose(work: &mut Work, runs: &[RunId]) -> Result<()> {
    end_by(work, runs, at_loss, "its sandbox was lost; it is not sent again").await
}

/// These runs have ended; nothing of theirs stays open.
pub async fn settle(work: &mut Work, runs: &[RunId]) -> Result<()> {
    end_by(work, runs, at_settling, "the run ended before it was taken").await
}

async fn end_by(work: &mut Work, runs: &[RunId], rule: fn(SteerState) -> SteerState, reason: &str) -> Result<()> {
    let ends: Vec<SteerEnd> = open(work, runs)
        .await?
        .into_iter()
        .filter(|(_, _, state)| rule(*state) != *state)
        .map(|(_, steer, state)| SteerEnd { steer, state: rule(state) })
        .collect();
    update(work, 0, &ends, Some(reason)).await
}

async fn open(work: &mut Work, runs: &[RunId]) -> Result<Vec<(RunId, SteerId, SteerState)>> {
    let runs: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    let rows = sqlx::query!(
        "select run_id, id, state from steer where run_id = any($1) and state in ('queued', 'sent', 'written') order by id for update",
        &runs
    )
    .fetch_all(work.db())
    .await?;
    rows.into_iter().map(|row| Ok((row.run_id.into(), row.id.into(), state_of(&row.state)?))).collect()
}

/// `epoch` 0 leaves the steer's epoch as it is.
async fn update(work: &mut Work, epoch: i32, ends: &[SteerEnd], reason: Option<&str>) -> Result<()> {
    if ends.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = ends.iter().map(|end| end.steer.uuid()).collect();
    let states: Vec<String> = ends.iter().map(|end| word(end.state).to_owned()).collect();
    sqlx::query!(
        "update steer set state = new.state, epoch = coalesce(nullif($3, 0), steer.epoch), reason = $4, changed_at = now()
         from unnest($1::uuid[], $2::text[]) as new (id, state) where steer.id = new.id",
        &ids,
        &states,
        epoch,
        reason
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// The run's steers after `after` (an ordinal), in order.
pub async fn of_run(db: &PgPool, tenant: TenantId, run: RunId, after: i64) -> Result<Vec<Steer>> {
    let rows = sqlx::query!(
        "select id, ordinal, message, state, reason, principal_id, created_at, changed_at from steer
         where run_id = $1 and tenant_id = $2 and ordinal > $3 order by ordinal limit $4",
        run.uuid(),
        tenant.uuid(),
        after,
        PAGE_ROWS
    )
    .fetch_all(db)
    .await?;
    rows.into_iter()
        .map(|row| {
            Ok(Steer {
                id: row.id.into(),
                run,
                ordinal: row.ordinal,
                message: row.message,
                state: state_of(&row.state)?,
                reason: row.reason,
                principal: row.principal_id.into(),
                created_at: row.created_at,
                changed_at: row.changed_at,
            })
        })
        .collect()
}

/// One steer of the tenant.
pub async fn by_id(db: &PgPool, tenant: TenantId, steer: SteerId) -> Result<Option<Steer>> {
    let row = sqlx::query!(
        "select run_id, ordinal, message, state, reason, principal_id, created_at, changed_at from steer where id = $1 and tenant_id = $2",
        steer.uuid(),
        tenant.uuid()
    )
    .fetch_optional(db)
    .await?;
    row.map(|row| {
        Ok(Steer {
            id: steer,
            run: row.run_id.into(),
            ordinal: row.ordinal,
            message: row.message,
            state: state_of(&row.state)?,
            reason: row.reason,
            principal: row.principal_id.into(),
            created_at: row.created_at,
            changed_at: row.changed_at,
        })
    })
    .transpose()
}

fn state_of(text: &str) -> Result<SteerState> {
    from_word(text).ok_or_else(|| Error::broken(format!("steer state `{text}` is not known")))
}

/// Was this steer accepted already?
pub async fn exists(work: &mut Work, steer: SteerId) -> Result<bool> {
    Ok(sqlx::query_scalar!(r#"select exists (select 1 from steer where id = $1) as "exists!""#, steer.uuid()).fetch_one(work.db()).await?)
}

/// Its place among its run's steers.
pub async fn ordinal(work: &mut Work, steer: SteerId) -> Result<Option<i64>> {
    Ok(sqlx::query_scalar!("select ordinal from steer where id = $1", steer.uuid()).fetch_optional(work.db()).await?)
}
