//! All SQL of `run`, `run_history`, `run_step`, `run_result` and `run_target` that changes or locks rows. Reading for people is in `view.rs`, admission in `admission/table.rs`.

use std::{collections::HashMap, time::Duration};

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, PgPool};
use towpath_chassis::{Error, Result, Work};
use towpath_delivery::TargetKind;
use towpath_schemas::{
    body::RunState,
    guest::Exit,
    id::{PrincipalId, RunId, SessionId, TenantId},
};
use uuid::Uuid;

use crate::state::{Exited, Machine};

/// A run's row under its lock.
#[derive(Debug, Clone)]
pub struct Locked {
    pub id: RunId,
    pub tenant: TenantId,
    pub session: SessionId,
    pub backend: String,
    pub start: Duration,
    pub grace_s: i32,
    pub transcript_bytes: i64,
    pub fence_s: Option<i32>,
    pub max: Option<Duration>,
    pub traceparent: Option<String>,
    pub revision: i64,
    pub machine: Machine,
}

/// Locks runs, in order of id. Those that do not exist are left out; one in a state of a newer release is an error.
pub async fn lock(db: &mut PgConnection, runs: &[RunId]) -> Result<Vec<Locked>> {
    let (known, newer) = lock_known(db, runs).await?;
    newer.first().map_or(Ok(known), |run| Err(of_a_newer_release(*run)))
}

/// Not a refusal that passes: in a batch it stands alone and holds up no other.
pub(crate) fn of_a_newer_release(run: RunId) -> Error {
    Error::broken(format!("{run} is in a state that this release does not know"))
}

/// Locks runs as [`lock`] does. Beside them those in a state of a newer release, which knows what to do with them.
pub(crate) async fn lock_known(db: &mut PgConnection, runs: &[RunId]) -> Result<(Vec<Locked>, Vec<RunId>)> {
    let ids: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    let rows = sqlx::query!(
        "select id, tenant_id, session_id, backend, start_s, grace_s, transcript_bytes, fence_s, max_s, traceparent, revision, state, wanted, epoch, epoch_floor, active, incarnation, starts, restarts, restartable,
                sandbox -> 'memory_bytes' as memory_bytes, exited, exit_code, exit_signal, exit_oom, exit_reason, exit_message, reason, message
         from run where id = any($1) order by id for update",
        &ids
    )
    .fetch_all(db)
    .await?;
    let (mut known, mut newer) = (Vec::with_capacity(rows.len()), Vec::new());
    for row in rows {
        let wanted = row.wanted.as_deref().map(RunState::from_word);
        let (Some(state), None | Some(Some(_))) = (RunState::from_word(&row.state), wanted) else {
            newer.push(row.id.into());
            continue;
        };
        let exited = row.exited.then_some(Exited {
            exit: Exit { code: row.exit_code, signal: row.exit_signal, oom: row.exit_oom },
            reason: row.exit_reason,
            message: row.exit_message,
        });
        known.push(Locked {
            id: row.id.into(),
            tenant: row.tenant_id.into(),
            session: row.session_id.into(),
            backend: row.backend,
            start: Duration::from_secs(u64::try_from(row.start_s).unwrap_or(0)),
            grace_s: row.grace_s,
            transcript_bytes: row.transcript_bytes,
            fence_s: row.fence_s,
            max: row.max_s.and_then(|max_s| u64::try_from(max_s).ok()).map(Duration::from_secs),
            traceparent: row.traceparent,
            revision: row.revision,
            machine: Machine {
                state,
                wanted: wanted.flatten(),
                epoch: row.epoch,
                epoch_floor: row.epoch_floor,
                active: row.active,
                incarnation: row.incarnation,
                starts: row.starts,
                restarts: row.restarts,
                restartable: row.restartable,
                memory_bytes: row.memory_bytes.and_then(|bytes| bytes.as_u64()),
                exited,
                reason: row.reason,
                message: row.message,
            },
        });
    }
    Ok((known, newer))
}

/// Writes moved runs back, each under the revision that was read. The rows are locked, so all of them match, or something is broken.
pub(crate) async fn write(work: &mut Work, moved: &[(Locked, i64)]) -> Result<()> {
    let each = |f: &dyn Fn(&Locked) -> Option<String>| -> Vec<Option<String>> { moved.iter().map(|(run, _)| f(run)).collect() };
    let numbers = |f: &dyn Fn(&Locked) -> i32| -> Vec<i32> { moved.iter().map(|(run, _)| f(run)).collect() };
    let exits = |f: &dyn Fn(&Exited) -> Option<i32>| -> Vec<Option<i32>> {
        moved.iter().map(|(run, _)| run.machine.exited.as_ref().and_then(f)).collect()
    };
    let ids: Vec<Uuid> = moved.iter().map(|(run, _)| run.id.uuid()).collect();
    let read: Vec<i64> = moved.iter().map(|(_, read)| *read).collect();
    let revisions: Vec<i64> = moved.iter().map(|(run, _)| run.revision).collect();
    let states: Vec<String> = moved.iter().map(|(run, _)| run.machine.state.word().to_owned()).collect();
    let active: Vec<bool> = moved.iter().map(|(run, _)| run.machine.active).collect();
    let exited: Vec<bool> = moved.iter().map(|(run, _)| run.machine.exited.is_some()).collect();
    let oom: Vec<Option<bool>> = moved.iter().map(|(run, _)| run.machine.exited.as_ref().and_then(|e| e.exit.oom)).collect();
    let written = sqlx::query!(
        r#"update run set
               revision = new.revision, state = new.state, wanted = new.wanted,
               wanted_at = case when new.wanted is null then null else coalesce(run.wanted_at, now()) end,
               epoch = new.epoch, active = new.active, incarnation = new.incarnation, starts = new.starts, restarts = new.restarts,
               exited = new.exited, exit_code = new.exit_code, exit_signal = new.exit_signal, exit_oom = new.exit_oom,
               exit_reason = new.exit_reason, exit_message = new.exit_message, reason = new.reason, message = new.message,
               waiting_for = case when new.state <> 'queued' then null else coalesce(run.waiting_for, 'place') end,
               started_at = case when new.state in ('running', 'stopping', 'finishing') then coalesce(run.started_at, now()) else run.started_at end,
               ended_at = case when new.state in ('succeeded', 'failed', 'canceled', 'timed_out') then coalesce(run.ended_at, now()) end
           from unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::text[], $5::text[], $6::int[], $7::bool[], $8::text[], $9::int[], $10::int[],
                       $11::bool[], $12::int[], $13::int[], $14::bool[], $15::text[], $16::text[], $17::text[], $18::text[])
               as new (id, read, revision, state, wanted, epoch, active, incarnation, starts, restarts,
                       exited, exit_code, exit_signal, exit_oom, exit_reason, exit_message, reason, message)
           where run.id = new.id and run.revision = new.read"#,
        &ids,
        &read,
        &revisions,
        &states,
        &each(&|run| run.machine.wanted.map(|wanted| wanted.word().to_owned())) as &[Option<String>],
        &numbers(&|run| run.machine.epoch),
        &active,
        &each(&|run| run.machine.incarnation.clone()) as &[Option<String>],
        &numbers(&|run| run.machine.starts),
        &numbers(&|run| run.machine.restarts),
        &exited,
        &exits(&|e| e.exit.code) as &[Option<i32>],
        &exits(&|e| e.exit.signal) as &[Option<i32>],
        &oom as &[Option<bool>],
        &each(&|run| run.machine.exited.as_ref().and_then(|e| e.reason.clone())) as &[Option<String>],
        &each(&|run| run.machine.exited.as_ref().and_then(|e| e.message.clone())) as &[Option<String>],
        &each(&|run| run.machine.reason.clone()) as &[Option<String>],
        &each(&|run| run.machine.message.clone()) as &[Option<String>]
    )
    .execute(work.db())
    .await?;
    if written.rows_affected() != moved.len() as u64 {
        return Err(Error::broken("a locked run was changed by somebody else"));
    }
    Ok(())
}

/// One row of a run's history.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub run: RunId,
    pub tenant: TenantId,
    pub revision: i64,
    pub from: Option<RunState>,
    pub to: RunState,
    pub cause: String,
    pub actor: String,
    pub epoch: i32,
    pub reason: Option<String>,
    pub detail: Option<serde_json::Value>,
}

pub(crate) async fn history(work: &mut Work, entries: &[Entry]) -> Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    let text = |f: &dyn Fn(&Entry) -> String| -> Vec<String> { entries.iter().map(f).collect() };
    let runs: Vec<Uuid> = entries.iter().map(|entry| entry.run.uuid()).collect();
    let revisions: Vec<i64> = entries.iter().map(|entry| entry.revision).collect();
    let tenants: Vec<Uuid> = entries.iter().map(|entry| entry.tenant.uuid()).collect();
    let from: Vec<Option<String>> = entries.iter().map(|entry| entry.from.map(|state| state.word().to_owned())).collect();
    let epochs: Vec<i32> = entries.iter().map(|entry| entry.epoch).collect();
    let reasons: Vec<Option<String>> = entries.iter().map(|entry| entry.reason.clone()).collect();
    let details: Vec<Option<serde_json::Value>> = entries.iter().map(|entry| entry.detail.clone()).collect();
    sqlx::query!(
        "insert into run_history (run_id, revision, tenant_id, from_state, to_state, cause, actor, epoch, reason, detail)
         select * from unnest($1::uuid[], $2::bigint[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::text[], $8::int[], $9::text[], $10::jsonb[])",
        &runs,
        &revisions,
        &tenants,
        &from as &[Option<String>],
        &text(&|entry| entry.to.word().to_owned()),
        &text(&|entry| entry.cause.clone()),
        &text(&|entry| entry.actor.clone()),
        &epochs,
        &reasons as &[Option<String>],
        &details as &[Option<serde_json::Value>]
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// Gives runs new revisions for what is no move of their own (steers): (run, how many); the last of each. The caller holds the rows' locks.
pub(crate) async fn next_revisions(work: &mut Work, runs: &[(RunId, i64)]) -> Result<HashMap<RunId, i64>> {
    let (ids, numbers): (Vec<Uuid>, Vec<i64>) = runs.iter().map(|(run, number)| (run.uuid(), *number)).unzip();
    let rows = sqlx::query!(
        "update run set revision = revision + more.number from unnest($1::uuid[], $2::bigint[]) as more (id, number) where run.id = more.id returning run.id, revision",
        &ids,
        &numbers
    )
    .fetch_all(work.db())
    .await?;
    Ok(rows.into_iter().map(|row| (row.id.into(), row.revision)).collect())
}

/// An epoch higher than any that was given out before this minute: minutes since 2020, which is more than a run ever counts up to by itself.
pub(crate) async fn fresh_epochs(db: &PgPool) -> Result<i32> {
    Ok(sqlx::query_scalar!(r#"select (extract(epoch from now() - timestamptz '2020-01-01 00:00:00Z') / 60)::int as "minutes!""#)
        .fetch_one(db)
        .await?)
}

/// Runs that may be alive, or whose sandbox may be, and that have no floor of epochs from `floor` up yet.
pub(crate) async fn alive(db: &PgPool, floor: i32, after: Option<RunId>, most: i64) -> Result<Vec<RunId>> {
    let runs = sqlx::query_scalar!(
        "select id from run where epoch_floor < $1 and ($2::uuid is null or id > $2)
             and (state in ('queued', 'starting', 'running', 'stopping', 'finishing') or exists (select 1 from sandbox where run_id = run.id and sandbox.state <> 'gone'))
         order by id limit $3",
        floor,
        after.map(|run| run.uuid()),
        most
    )
    .fetch_all(db)
    .await?;
    Ok(runs.into_iter().map(RunId).collect())
}

/// From now on these runs get epochs above these. The caller holds the rows' locks.
pub(crate) async fn raise_floors(work: &mut Work, floors: &[(RunId, i32)]) -> Result<()> {
    let (runs, floors): (Vec<Uuid>, Vec<i32>) = floors.iter().map(|(run, floor)| (run.uuid(), *floor)).unzip();
    sqlx::query!(
        "update run set epoch_floor = new.floor from unnest($1::uuid[], $2::int[]) as new (id, floor) where run.id = new.id",
        &runs,
        &floors
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// A run about to be accepted.
#[derive(Debug, Clone)]
pub struct NewRow {
    pub id: RunId,
    pub tenant: TenantId,
    pub session: SessionId,
    pub agent: Uuid,
    pub agent_name: String,
    pub agent_version: i32,
    pub principal: PrincipalId,
    pub mode: &'static str,
    pub backend: &'static str,
    pub priority: i16,
    pub prompt: String,
    pub labels: serde_json::Value,
    pub sandbox: serde_json::Value,
    pub start_s: i32,
    pub grace_s: i32,
    pub transcript_bytes: i64,
    pub fence_s: Option<i32>,
    pub restartable: bool,
    pub concurrent: Option<i32>,
    pub max_s: Option<i32>,
    pub deadline: Option<Deadline>,
    pub traceparent: Option<String>,
}

/// When a run is ended at the latest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Deadline {
    At(DateTime<Utc>),
    /// From its acceptance, by the database's clock.
    After(Duration),
}

/// A run that was inserted.
pub(crate) struct Inserted {
    pub created_at: DateTime<Utc>,
    pub deadline_at: Option<DateTime<Utc>>,
}

/// Inserts runs; the ones that were, and when. One is left out when its session has a live run.
pub(crate) async fn insert(work: &mut Work, rows: &[NewRow]) -> Result<HashMap<RunId, Inserted>> {
    let uuids = |f: &dyn Fn(&NewRow) -> Uuid| -> Vec<Uuid> { rows.iter().map(f).collect() };
    let text = |f: &dyn Fn(&NewRow) -> String| -> Vec<String> { rows.iter().map(f).collect() };
    let numbers = |f: &dyn Fn(&NewRow) -> i32| -> Vec<i32> { rows.iter().map(f).collect() };
    let priorities: Vec<i16> = rows.iter().map(|row| row.priority).collect();
    let caps: Vec<i64> = rows.iter().map(|row| row.transcript_bytes).collect();
    let labels: Vec<serde_json::Value> = rows.iter().map(|row| row.labels.clone()).collect();
    let sandboxes: Vec<serde_json::Value> = rows.iter().map(|row| row.sandbox.clone()).collect();
    let traces: Vec<Option<String>> = rows.iter().map(|row| row.traceparent.clone()).collect();
    let concurrent: Vec<Option<i32>> = rows.iter().map(|row| row.concurrent).collect();
    let max: Vec<Option<i32>> = rows.iter().map(|row| row.max_s).collect();
    let fences: Vec<Option<i32>> = rows.iter().map(|row| row.fence_s).collect();
    let restartable: Vec<bool> = rows.iter().map(|row| row.restartable).collect();
    let deadlines: Vec<Option<DateTime<Utc>>> =
        rows.iter().map(|row| if let Some(Deadline::At(at)) = row.deadline { Some(at) } else { None }).collect();
    let after: Vec<Option<f64>> =
        rows.iter().map(|row| if let Some(Deadline::After(after)) = row.deadline { Some(after.as_secs_f64()) } else { None }).collect();
    let inserted = sqlx::query!(
        r#"insert into run (id, tenant_id, session_id, agent_id, agent_name, agent_version, principal_id, mode, backend, priority, prompt, labels, sandbox, start_s, grace_s, transcript_bytes,
                            concurrent, max_s, deadline_at, traceparent, fence_s, restartable, state, waiting_for, revision)
           select id, tenant_id, session_id, agent_id, agent_name, agent_version, principal_id, mode, backend, priority, prompt, labels, sandbox, start_s, grace_s, transcript_bytes,
                  concurrent, max_s, coalesce(deadline_at, now() + make_interval(secs => deadline_s)), traceparent, fence_s, restartable, 'queued', 'place', 1
           from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::text[], $6::int[], $7::uuid[], $8::text[], $9::text[], $10::smallint[], $11::text[], $12::jsonb[],
                       $13::jsonb[], $14::int[], $15::int[], $16::bigint[], $17::text[], $18::int[], $19::int[], $20::timestamptz[], $21::float8[], $22::int[], $23::bool[])
               as t (id, tenant_id, session_id, agent_id, agent_name, agent_version, principal_id, mode, backend, priority, prompt, labels, sandbox, start_s, grace_s, transcript_bytes, traceparent, concurrent, max_s, deadline_at, deadline_s,
                     fence_s, restartable)
           order by session_id
           on conflict do nothing returning id, created_at, deadline_at"#,
        &uuids(&|row| row.id.uuid()),
        &uuids(&|row| row.tenant.uuid()),
        &uuids(&|row| row.session.uuid()),
        &uuids(&|row| row.agent),
        &text(&|row| row.agent_name.clone()),
        &numbers(&|row| row.agent_version),
        &uuids(&|row| row.principal.uuid()),
        &text(&|row| row.mode.to_owned()),
        &text(&|row| row.backend.to_owned()),
        &priorities,
        &text(&|row| row.prompt.clone()),
        &labels,
        &sandboxes,
        &numbers(&|row| row.start_s),
        &numbers(&|row| row.grace_s),
        &caps,
        &traces as &[Option<String>],
        &concurrent as &[Option<i32>],
        &max as &[Option<i32>],
        &deadlines as &[Option<DateTime<Utc>>],
        &after as &[Option<f64>],
        &fences as &[Option<i32>],
        &restartable
    )
    .fetch_all(work.db())
    .await?;
    Ok(inserted.into_iter().map(|row| (row.id.into(), Inserted { created_at: row.created_at, deadline_at: row.deadline_at })).collect())
}

/// The live run of a session.
pub async fn live_run(db: &mut PgConnection, session: SessionId) -> Result<Option<RunId>> {
    let live = sqlx::query_scalar!(
        "select id from run where session_id = $1 and state in ('queued', 'starting', 'running', 'stopping', 'finishing')",
        session.uuid()
    )
    .fetch_optional(db)
    .await?;
    Ok(live.map(RunId))
}

/// Which of these runs exist: for reading back a COMMIT without an answer.
pub async fn existing(db: &mut PgConnection, runs: &[RunId]) -> Result<Vec<RunId>> {
    let ids: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    let found = sqlx::query_scalar!("select id from run where id = any($1)", &ids).fetch_all(db).await?;
    Ok(found.into_iter().map(RunId).collect())
}

/// Where a result goes.
#[derive(Debug, Clone)]
pub struct TargetRow {
    pub run: RunId,
    pub n: i32,
    pub tenant: TenantId,
    pub kind: TargetKind,
    /// A thread's id when it is one.
    pub url: String,
    pub secret: Option<Vec<u8>>,
}

pub(crate) async fn insert_targets(work: &mut Work, rows: &[TargetRow]) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let runs: Vec<Uuid> = rows.iter().map(|row| row.run.uuid()).collect();
    let places: Vec<i32> = rows.iter().map(|row| row.n).collect();
    let tenants: Vec<Uuid> = rows.iter().map(|row| row.tenant.uuid()).collect();
    let kinds: Vec<String> = rows.iter().map(|row| row.kind.word().to_owned()).collect();
    let urls: Vec<String> = rows.iter().map(|row| row.url.clone()).collect();
    let secrets: Vec<Option<Vec<u8>>> = rows.iter().map(|row| row.secret.clone()).collect();
    sqlx::query!(
        "insert into run_target (run_id, n, tenant_id, kind, url, secret)
         select * from unnest($1::uuid[], $2::int[], $3::uuid[], $6::text[], $4::text[], $5::bytea[])
         on conflict do nothing",
        &runs,
        &places,
        &tenants,
        &urls,
        &secrets as &[Option<Vec<u8>>],
        &kinds
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// Where the results of these runs go.
pub async fn targets(db: &mut PgConnection, runs: &[RunId]) -> Result<Vec<TargetRow>> {
    let ids: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    let rows =
        sqlx::query!("select run_id, n, tenant_id, kind, url, secret from run_target where run_id = any($1) order by run_id, n", &ids)
            .fetch_all(db)
            .await?;
    rows.into_iter()
        .map(|row| {
            Ok(TargetRow {
                run: row.run_id.into(),
                n: row.n,
                tenant: row.tenant_id.into(),
                kind: TargetKind::of(&row.kind).ok_or_else(|| Error::broken(format!("run_target: kind `{}`", row.kind)))?,
                url: row.url,
                secret: row.secret,
            })
        })
        .collect()
}

/// A step of the start.
#[derive(Debug, Clone)]
pub(crate) struct StepRow {
    pub run: RunId,
    pub epoch: i32,
    pub tenant: TenantId,
    pub step: String,
    pub detail: Option<String>,
}

/// Notes steps; the first of its name in an epoch counts.
pub(crate) async fn steps(work: &mut Work, steps: &[StepRow]) -> Result<()> {
    if steps.is_empty() {
        return Ok(());
    }
    let runs: Vec<Uuid> = steps.iter().map(|step| step.run.uuid()).collect();
    let epochs: Vec<i32> = steps.iter().map(|step| step.epoch).collect();
    let tenants: Vec<Uuid> = steps.iter().map(|step| step.tenant.uuid()).collect();
    let names: Vec<String> = steps.iter().map(|step| step.step.clone()).collect();
    let details: Vec<Option<String>> = steps.iter().map(|step| step.detail.clone()).collect();
    sqlx::query!(
        "insert into run_step (run_id, epoch, tenant_id, step, detail)
         select run, epoch, tenant, step, detail from unnest($1::uuid[], $2::int[], $3::uuid[], $4::text[], $5::text[])
             with ordinality as new (run, epoch, tenant, step, detail, n) order by run, epoch, step, n
         on conflict do nothing",
        &runs,
        &epochs,
        &tenants,
        &names,
        &details as &[Option<String>]
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// A run's result text, as one epoch told it.
#[derive(Debug, Clone)]
pub(crate) struct ResultRow {
    pub run: RunId,
    pub tenant: TenantId,
    pub epoch: i32,
    pub text: String,
    pub truncated: bool,
}

/// Keeps results, at most one of each run in a batch; the first one of an epoch counts.
pub(crate) async fn results(work: &mut Work, rows: &[ResultRow]) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let runs: Vec<Uuid> = rows.iter().map(|row| row.run.uuid()).collect();
    let tenants: Vec<Uuid> = rows.iter().map(|row| row.tenant.uuid()).collect();
    let epochs: Vec<i32> = rows.iter().map(|row| row.epoch).collect();
    let texts: Vec<String> = rows.iter().map(|row| row.text.clone()).collect();
    let truncated: Vec<bool> = rows.iter().map(|row| row.truncated).collect();
    sqlx::query!(
        "insert into run_result (run_id, tenant_id, epoch, text, truncated)
         select * from unnest($1::uuid[], $2::uuid[], $3::int[], $4::text[], $5::bool[])
         on conflict (run_id) do update set epoch = excluded.epoch, text = excluded.text, truncated = excluded.truncated where run_result.epoch < excluded.epoch",
        &runs,
        &tenants,
        &epochs,
        &texts,
        &truncated
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// Forgets runs. Whatever else refers to them was removed before.
pub(crate) async fn remove(work: &mut Work, runs: &[RunId]) -> Result<()> {
    let ids: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    for sql in [
        "delete from run_history where run_id = any($1)",
        "delete from run_step where run_id = any($1)",
        "delete from run_result where run_id = any($1)",
        "delete from run_target where run_id = any($1)",
        "delete from run where id = any($1)",
    ] {
        sqlx::query(sql).bind(&ids).execute(work.db()).await?;
    }
    Ok(())
}
