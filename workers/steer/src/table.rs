//! All SQL of `steer`.

use std::collections::{HashMap, HashSet};

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

/// Steers that are read for one sandbox at a time: 2 MiB of messages at most.
pub const TO_SEND: i64 = 64;

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

/// Which of these runs have steers that nobody was sent yet.
pub async fn waiting(db: &PgPool, runs: &[RunId]) -> Result<HashSet<RunId>> {
    let ids: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    let rows =
        sqlx::query_scalar!("select distinct run_id from steer where run_id = any($1) and state = 'queued'", &ids).fetch_all(db).await?;
    Ok(rows.into_iter().map(RunId).collect())
}

/// The steers after `after` (an ordinal) that the supervisor of a live epoch may not have yet, in order and at most [`TO_SEND`]: `queued` ones, and with `again`
/// those that were `sent` to it before (it drops ids that it knows).
pub async fn to_send(db: &PgPool, run: RunId, epoch: i32, again: bool, after: i64) -> Result<Vec<SteerOrder>> {
    let rows = sqlx::query!(
        "select id, ordinal, message from steer
         where run_id = $1 and ordinal > $4 and (state = 'queued' or ($3 and state = 'sent' and epoch = $2)) order by ordinal limit $5",
        run.uuid(),
        epoch,
        again,
        after,
        TO_SEND
    )
    .fetch_all(db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| SteerOrder { steer: row.id.into(), ordinal: row.ordinal, message: row.message, files: Vec::new() })
        .collect())
}

/// Marks steers (run, epoch, steer) as sent; the ones that moved. The caller holds the run rows' locks.
pub async fn sent(work: &mut Work, steers: &[(RunId, i32, SteerId)]) -> Result<HashSet<SteerId>> {
    if steers.is_empty() {
        return Ok(HashSet::new());
    }
    let runs: Vec<Uuid> = steers.iter().map(|(run, ..)| run.uuid()).collect();
    let epochs: Vec<i32> = steers.iter().map(|(_, epoch, _)| *epoch).collect();
    let ids: Vec<Uuid> = steers.iter().map(|(.., steer)| steer.uuid()).collect();
    let moved = sqlx::query_scalar!(
        "update steer set state = 'sent', epoch = new.epoch, changed_at = now() from unnest($1::uuid[], $2::int[], $3::uuid[]) as new (run, epoch, id)
         where steer.id = new.id and run_id = new.run and state = 'queued' returning steer.id",
        &runs,
        &epochs,
        &ids
    )
    .fetch_all(work.db())
    .await?;
    Ok(moved.into_iter().map(SteerId).collect())
}

/// Applies what supervisors said of steers (run, epoch, what); the ones that moved. The caller holds the run rows' locks.
pub async fn report(work: &mut Work, reports: &[(RunId, i32, SteerEnd)]) -> Result<Vec<(RunId, SteerEnd)>> {
    if reports.is_empty() {
        return Ok(Vec::new());
    }
    let mut runs: Vec<RunId> = reports.iter().map(|(run, ..)| *run).collect();
    runs.sort_unstable();
    runs.dedup();
    let mut moved = Vec::new();
    for (run, steer, from) in open(work, &runs).await? {
        let said = reports.iter().filter(|(of, _, end)| *of == run && end.steer == steer);
        // What two connections say may come in any order; it only goes forward.
        let (mut state, mut by) = (from, None);
        for (_, epoch, end) in said {
            if moves(state, end.state) {
                (state, by) = (end.state, Some(*epoch));
            }
        }
        if let Some(epoch) = by {
            moved.push((run, epoch, SteerEnd { steer, state }));
        }
    }
    let ends: Vec<(i32, SteerEnd)> = moved.iter().map(|(_, epoch, end)| (*epoch, end.clone())).collect();
    update(work, &ends, None).await?;
    Ok(moved.into_iter().map(|(run, _, end)| (run, end)).collect())
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
    let ends: Vec<(i32, SteerEnd)> = open(work, runs)
        .await?
        .into_iter()
        .filter(|(_, _, state)| rule(*state) != *state)
        .map(|(_, steer, state)| (0, SteerEnd { steer, state: rule(state) }))
        .collect();
    update(work, &ends, Some(reason)).await
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

/// Writes ends (epoch, end); epoch 0 leaves the steer's epoch as it is.
async fn update(work: &mut Work, ends: &[(i32, SteerEnd)], reason: Option<&str>) -> Result<()> {
    if ends.is_empty() {
        return Ok(());
    }
    let epochs: Vec<i32> = ends.iter().map(|(epoch, _)| *epoch).collect();
    let ids: Vec<Uuid> = ends.iter().map(|(_, end)| end.steer.uuid()).collect();
    let states: Vec<String> = ends.iter().map(|(_, end)| word(end.state).to_owned()).collect();
    sqlx::query!(
        "update steer set state = new.state, epoch = coalesce(nullif(new.epoch, 0), steer.epoch), reason = $4, changed_at = now()
         from unnest($1::uuid[], $2::text[], $3::int[]) as new (id, state, epoch) where steer.id = new.id",
        &ids,
        &states,
        &epochs,
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

/// Where these steers are.
pub async fn states(work: &mut Work, steers: &[SteerId]) -> Result<HashMap<SteerId, SteerState>> {
    let ids: Vec<Uuid> = steers.iter().map(|steer| steer.uuid()).collect();
    let rows = sqlx::query!("select id, state from steer where id = any($1)", &ids).fetch_all(work.db()).await?;
    rows.into_iter().map(|row| Ok((row.id.into(), state_of(&row.state)?))).collect()
}

/// The places of these steers among their runs'.
pub async fn ordinals(work: &mut Work, steers: &[SteerId]) -> Result<HashMap<SteerId, i64>> {
    let ids: Vec<Uuid> = steers.iter().map(|steer| steer.uuid()).collect();
    let rows = sqlx::query!("select id, ordinal from steer where id = any($1)", &ids).fetch_all(work.db()).await?;
    Ok(rows.into_iter().map(|row| (row.id.into(), row.ordinal)).collect())
}

/// Forgets the steers of removed runs.
pub async fn remove(work: &mut Work, runs: &[RunId]) -> Result<()> {
    towpath_file::detach_steers(work, runs).await?;
    let runs: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    sqlx::query!("delete from steer where run_id = any($1)", &runs).execute(work.db()).await?;
    Ok(())
}
