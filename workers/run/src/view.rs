//! Runs as people see them. Reads only.

use std::collections::{BTreeMap, HashMap};

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, PgPool, Postgres, QueryBuilder, Row};
use towpath_chassis::{Error, Result};
use towpath_schemas::{
    ErrorCode,
    agent::Mode,
    body::{HistoryEntry, Page, Run, RunResult, RunState, Transcript},
    guest::{Exit, Step},
    id::{PrincipalId, RunId, SessionId, TenantId},
    limit::PAGE_ROWS,
};
use uuid::Uuid;

/// What a list may be narrowed by.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    pub agent: Option<String>,
    pub state: Option<RunState>,
    pub session: Option<SessionId>,
    /// `key=value`, or `key` alone.
    pub label: Option<String>,
    pub cursor: Option<String>,
}

/// A run with what a delivery needs beside it.
pub(crate) struct ForDelivery {
    pub run: Run,
    pub result: Option<RunResult>,
    pub traceparent: Option<String>,
}

// One list of columns for one run, a page of them and a delivery: these queries are built at run time, so `./dev check` runs each of them once.
const COLUMNS: &str = "run.id, run.session_id, run.agent_name, run.agent_version, run.principal_id, run.mode, run.state, run.wanted, run.reason, run.message, run.labels, run.priority,
    run.deadline_at, run.exited, run.exit_code, run.exit_signal, run.exit_oom, run.epoch, run.revision, run.created_at, run.started_at, run.ended_at, run.traceparent, run.prompt,
    coalesce((select sum(bytes) from transcript where run_id = run.id), 0)::bigint as transcript_bytes,
    (select count(*) from transcript where run_id = run.id and state <> 'closed') as transcript_open,
    (select count(*) from transcript where run_id = run.id and gap is not null) as transcript_gaps,
    coalesce((select sum(cut_bytes) from transcript where run_id = run.id), 0)::bigint as transcript_cut,
    (select count(*) from run_target where run_id = run.id) as targets,
    (run.active and exists (select 1 from sandbox where run_id = run.id and epoch = run.epoch and unknown_since is not null)) as sandbox_unknown,
    case when run.state <> 'queued' then null
         when exists (select 1 from installation where paused_at is not null) or exists (select 1 from tenant where id = run.tenant_id and paused_at is not null)
             or exists (select 1 from agent where id = run.agent_id and paused_at is not null) then 'pause'
         when run.concurrent is not null and run.concurrent <= (select count(*) from slot where slot.agent_id = run.agent_id) then 'limit'
         when exists (select 1 from tenant where id = run.tenant_id and concurrent is not null and concurrent <= (select count(*) from slot where slot.tenant_id = tenant.id)) then 'limit'
         else run.waiting_for end as waiting_for";

fn run_of(row: &sqlx::postgres::PgRow) -> Result<Run> {
    let state = word(row.try_get("state")?)?;
    let wanted: Option<&str> = row.try_get("wanted")?;
    let exited: bool = row.try_get("exited")?;
    let (open, gaps): (i64, i64) = (row.try_get("transcript_open")?, row.try_get("transcript_gaps")?);
    let cut: i64 = row.try_get("transcript_cut")?;
    let sandbox_unknown: bool = row.try_get("sandbox_unknown")?;
    let labels: sqlx::types::Json<BTreeMap<String, String>> = row.try_get("labels")?;
    Ok(Run {
        id: row.try_get::<Uuid, _>("id")?.into(),
        session: row.try_get::<Uuid, _>("session_id")?.into(),
        agent: row.try_get("agent_name")?,
        agent_version: row.try_get("agent_version")?,
        principal: row.try_get::<Uuid, _>("principal_id")?.into(),
        mode: mode(row.try_get("mode")?),
        state,
        wanted: wanted.map(word).transpose()?,
        // Said for as long as it is so; it changes nothing.
        reason: if sandbox_unknown && !state.ended() { Some("sandbox_unknown".to_owned()) } else { row.try_get("reason")? },
        message: if sandbox_unknown && !state.ended() {
            Some("nobody can tell whether its sandbox is there; its host's log tells why".to_owned())
        } else {
            row.try_get("message")?
        },
        prompt: None,
        labels: labels.0,
        priority: row.try_get("priority")?,
        files: None,
        result: None,
        exit: if exited {
            Some(Exit { code: row.try_get("exit_code")?, signal: row.try_get("exit_signal")?, oom: row.try_get("exit_oom")? })
        } else {
            None
        },
        epoch: row.try_get("epoch")?,
        revision: row.try_get("revision")?,
        startup: Vec::new(),
        // A run that is finishing waits for nothing else than its record: that what was printed is in the object store.
        waiting_for: if state == RunState::Finishing { Some("record".to_owned()) } else { row.try_get("waiting_for")? },
        transcript: Transcript {
            state: match (open > 0, state.ended() || state == RunState::Finishing, gaps > 0 || cut > 0) {
                (true, true, _) => "sealing",
                (_, false, _) => "live",
                (false, true, true) => "gap",
                (false, true, false) => "complete",
            }
            .to_owned(),
            bytes: row.try_get("transcript_bytes")?,
            missing: if gaps > 0 { None } else { Some(cut) },
        },
        ahead: None,
        deadline: row.try_get("deadline_at")?,
        created_at: row.try_get("created_at")?,
        started_at: row.try_get("started_at")?,
        ended_at: row.try_get("ended_at")?,
        deliveries: row.try_get("targets")?,
    })
}

fn mode(word: &str) -> Mode {
    if word == "interactive" { Mode::Interactive } else { Mode::OneShot }
}

/// Only a process of the release that brought a state can show it; during a roll the same question may reach one.
fn word(text: &str) -> Result<RunState> {
    RunState::from_word(text)
        .ok_or_else(|| Error::refused(ErrorCode::Unavailable, format!("`{text}` is a state of a newer release than this process is of")))
}

/// One run of the tenant, with everything.
pub async fn run(db: &PgPool, tenant: TenantId, id: RunId) -> Result<Run> {
    let sql = format!("select {COLUMNS} from run where id = $1 and tenant_id = $2");
    let row = sqlx::query(sqlx::AssertSqlSafe(sql))
        .bind(id.uuid())
        .bind(tenant.uuid())
        .fetch_optional(db)
        .await?
        .ok_or_else(|| crate::apply::no_such_run(id))?;
    let mut run = run_of(&row)?;
    run.prompt = row.try_get("prompt")?;
    run.result = sqlx::query_as!(
        RunResultRow,
        "select text, truncated from run_result where run_id = $1 and tenant_id = $2",
        id.uuid(),
        tenant.uuid()
    )
    .fetch_optional(db)
    .await?
    .map(|row| RunResult { text: row.text, truncated: row.truncated });
    run.startup = sqlx::query!(
        "select step, at, detail from run_step where run_id = $1 and tenant_id = $2 and epoch = $3 order by at, step",
        id.uuid(),
        tenant.uuid(),
        run.epoch
    )
    .fetch_all(db)
    .await?
    .into_iter()
    .map(|row| Step { step: row.step, at: row.at, detail: row.detail })
    .collect();
    run.files = Some(towpath_file::of_run(db, tenant, id).await?);
    if run.state == RunState::Queued {
        run.ahead = Some(ahead(db, tenant, id).await?);
    }
    Ok(run)
}

/// Runs of the tenant that go before a queued one, counted up to 100.
async fn ahead(db: &PgPool, tenant: TenantId, id: RunId) -> Result<i64> {
    Ok(sqlx::query_scalar!(
        r#"select count(*) as "count!" from (
               select 1 from run as other, run as this
               where this.id = $1 and other.state = 'queued' and other.backend = this.backend and other.tenant_id = $2
                   and (other.priority > this.priority or (other.priority = this.priority and (other.created_at, other.id) < (this.created_at, this.id)))
               limit 100) as before"#,
        id.uuid(),
        tenant.uuid()
    )
    .fetch_one(db)
    .await?)
}

struct RunResultRow {
    text: String,
    truncated: bool,
}

/// The state and revision of a run of the tenant, for those who wait.
pub async fn state(db: &PgPool, tenant: TenantId, id: RunId) -> Result<(RunState, i64)> {
    let row = sqlx::query!("select state, revision from run where id = $1 and tenant_id = $2", id.uuid(), tenant.uuid())
        .fetch_optional(db)
        .await?
        .ok_or_else(|| crate::apply::no_such_run(id))?;
    Ok((word(&row.state)?, row.revision))
}

pub(crate) async fn for_delivery(db: &mut PgConnection, id: RunId) -> Result<ForDelivery> {
    let sql = format!("select {COLUMNS} from run where id = $1");
    let row = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(id.uuid()).fetch_one(&mut *db).await?;
    let result =
        sqlx::query_as!(RunResultRow, "select text, truncated from run_result where run_id = $1", id.uuid()).fetch_optional(db).await?;
    Ok(ForDelivery {
        run: run_of(&row)?,
        result: result.map(|row| RunResult { text: row.text, truncated: row.truncated }),
        traceparent: row.try_get("traceparent")?,
    })
}

/// A page of the tenant's runs, newest first.
pub async fn list(db: &PgPool, tenant: TenantId, filter: &Filter) -> Result<Page<Run>> {
    let after = filter.cursor.as_deref().map(parse_cursor).transpose()?;
    // Only what was asked for stands in the query, and the limit as a number: with `or null` and a bound limit the planner sorts all of a tenant's runs for one page.
    let mut query = QueryBuilder::<Postgres>::new(format!("select {COLUMNS} from run where tenant_id = "));
    query.push_bind(tenant.uuid());
    if let Some(agent) = &filter.agent {
        query.push(" and agent_name = ").push_bind(agent);
    }
    if let Some(state) = filter.state {
        query.push(" and state = ").push_bind(state.word());
    }
    if let Some(session) = filter.session {
        query.push(" and session_id = ").push_bind(session.uuid());
    }
    if let Some(label) = &filter.label {
        match label.split_once('=') {
            Some((key, value)) => query.push(" and labels ->> ").push_bind(key).push(" = ").push_bind(value),
            None => query.push(" and labels ? ").push_bind(label),
        };
    }
    if let Some((at, id)) = after {
        query.push(" and (created_at, id) < (").push_bind(at).push(", ").push_bind(id.uuid()).push(")");
    }
    query.push(format!(" order by created_at desc, id desc limit {}", PAGE_ROWS + 1));
    let rows = query.build().fetch_all(db).await?;
    let mut items = rows.iter().map(run_of).collect::<Result<Vec<_>>>()?;
    let more = items.len() as i64 > PAGE_ROWS;
    items.truncate(usize::try_from(PAGE_ROWS).unwrap_or(usize::MAX));
    let cursor = items.last().filter(|_| more).map(|run| format!("{}_{}", run.created_at.timestamp_micros(), run.id));
    Ok(Page { items, cursor })
}

fn parse_cursor(cursor: &str) -> Result<(DateTime<Utc>, RunId)> {
    let refuse = || Error::refused(ErrorCode::BadRequest, "cursor: use the one that the last page gave");
    let (at, id) = cursor.split_once('_').ok_or_else(refuse)?;
    let at = at.parse().ok().and_then(DateTime::from_timestamp_micros).ok_or_else(refuse)?;
    Ok((at, id.parse().map_err(|_| refuse())?))
}

/// Runs that have not ended, by state; states without any too.
pub async fn by_state(db: &PgPool) -> Result<Vec<(RunState, i64)>> {
    let open = [RunState::Queued, RunState::Starting, RunState::Running, RunState::Stopping, RunState::Finishing];
    let rows = sqlx::query!(
        r#"select state, count(*) as "count!" from run where state in ('queued', 'starting', 'running', 'stopping', 'finishing') group by state"#
    )
    .fetch_all(db)
    .await?;
    Ok(open.into_iter().map(|state| (state, rows.iter().find(|row| row.state == state.word()).map_or(0, |row| row.count))).collect())
}

/// Rows of a run's history read at a time.
pub const HISTORY_ROWS: usize = 1000;

/// The run's history after `after` (a revision), in order.
pub async fn history(db: &PgPool, tenant: TenantId, id: RunId, after: i64) -> Result<Vec<HistoryEntry>> {
    let rows = sqlx::query!(
        "select revision, at, from_state, to_state, cause, actor, epoch, reason, detail from run_history
         where run_id = $1 and tenant_id = $2 and revision > $3 order by revision limit $4",
        id.uuid(),
        tenant.uuid(),
        after,
        HISTORY_ROWS as i64
    )
    .fetch_all(db)
    .await?;
    rows.into_iter()
        .map(|row| {
            Ok(HistoryEntry {
                revision: row.revision,
                at: row.at,
                from: row.from_state.as_deref().map(word).transpose()?,
                to: word(&row.to_state)?,
                on: row.cause,
                actor: row.actor,
                epoch: row.epoch,
                reason: row.reason,
                detail: row.detail,
            })
        })
        .collect()
}

/// Who started the run, in which session, of which agent and version: what the gateway builds a start order from.
#[derive(Debug, Clone)]
pub struct Origin {
    pub tenant: TenantId,
    pub session: SessionId,
    pub principal: PrincipalId,
    pub agent: Uuid,
    pub agent_name: String,
    pub agent_version: i32,
    pub prompt: String,
    pub mode: Mode,
    pub grace_s: i32,
}

/// What these runs were made from. Those that do not exist are left out.
pub async fn origins(db: &PgPool, runs: &[RunId]) -> Result<HashMap<RunId, Origin>> {
    let ids: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    let rows = sqlx::query!(
        "select id, tenant_id, session_id, principal_id, agent_id, agent_name, agent_version, prompt, mode, grace_s from run where id = any($1)",
        &ids
    )
    .fetch_all(db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let origin = Origin {
                tenant: row.tenant_id.into(),
                session: row.session_id.into(),
                principal: row.principal_id.into(),
                agent: row.agent_id,
                agent_name: row.agent_name,
                agent_version: row.agent_version,
                prompt: row.prompt,
                mode: mode(&row.mode),
                grace_s: row.grace_s,
            };
            (row.id.into(), origin)
        })
        .collect())
}

/// The live run and the number of runs of each session.
pub async fn of_sessions(
    db: &PgPool,
    tenant: TenantId,
    sessions: &[SessionId],
) -> Result<Vec<(SessionId, Option<RunId>, i64, Option<String>)>> {
    let ids: Vec<Uuid> = sessions.iter().map(|session| session.uuid()).collect();
    let rows = sqlx::query!(
        r#"select session as "session!", (select id from run where session_id = session and state in ('queued', 'starting', 'running', 'stopping', 'finishing')) as live,
                  (select count(*) from run where session_id = session and tenant_id = $2) as "runs!", (select pool from workspace where session_id = session) as pool
           from unnest($1::uuid[]) as session"#,
        &ids,
        tenant.uuid()
    )
    .fetch_all(db)
    .await?;
    Ok(rows.into_iter().map(|row| (row.session.into(), row.live.map(RunId), row.runs, row.pool)).collect())
}

pub(crate) async fn standings(db: &PgPool, connected: &[(RunId, i32)]) -> Result<Vec<crate::report::Standing>> {
    let (runs, epochs): (Vec<Uuid>, Vec<i32>) = connected.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    let rows = sqlx::query!(
        r#"select run.id as "id!", live.epoch as "live_epoch!", run.epoch as "epoch!", run.active as "active!", run.wanted, run.reason, run.grace_s as "grace_s!", run.state as "state!",
                  coalesce(transcript.state = 'closed', false) as "closed!", sandbox.unwanted as "unwanted!"
           from unnest($1::uuid[], $2::int[]) as live (run, epoch) join run on run.id = live.run
                join sandbox on sandbox.run_id = live.run and sandbox.epoch = live.epoch
                left join transcript on transcript.run_id = live.run and transcript.epoch = live.epoch"#,
        &runs,
        &epochs
    )
    .fetch_all(db)
    .await?;
    rows.into_iter()
        .map(|row| {
            let current = row.epoch == row.live_epoch;
            // Whether a state of a newer release means that nothing executes, only that release can tell (UNSURE).
            let executing = RunState::from_word(&row.state)
                .is_none_or(|state| matches!(state, RunState::Starting | RunState::Running | RunState::Stopping));
            let stop = row.wanted.filter(|_| current && row.active).map(|wanted| crate::report::Stop {
                grace_s: u32::try_from(row.grace_s).unwrap_or(0),
                reason: row.reason.clone().unwrap_or(wanted),
            });
            Ok(crate::report::Standing {
                run: row.id.into(),
                epoch: row.live_epoch,
                fenced: !current || row.unwanted,
                stop,
                release: current && row.closed && !executing,
            })
        })
        .collect()
}

/// Epochs whose sandbox is gone while their run counts on it, and those whose record is closed while their run waits for it.
pub(crate) async fn untold(db: &PgPool) -> Result<(Vec<(RunId, i32)>, Vec<(RunId, i32)>)> {
    let gone = sqlx::query!(
        "select run.id, run.epoch from run join sandbox on run_id = run.id and sandbox.epoch = run.epoch
         where run.active and sandbox.state = 'gone' order by run.id limit 1000"
    )
    .fetch_all(db)
    .await?;
    let open = sqlx::query!(
        "select run.id, run.epoch from run join sandbox on sandbox.run_id = run.id and sandbox.epoch = run.epoch
             join transcript on transcript.run_id = run.id and transcript.epoch = run.epoch
         where transcript.state = 'open' and sandbox.state = 'gone' order by run.id limit 1000"
    )
    .fetch_all(db)
    .await?;
    let sealed = sqlx::query!(
        "select run.id, run.epoch from run join transcript on transcript.run_id = run.id and transcript.epoch = run.epoch
         where run.state = 'finishing' and transcript.state = 'closed' order by run.id limit 1000"
    )
    .fetch_all(db)
    .await?;
    let mut observed: Vec<(RunId, i32)> = gone.into_iter().map(|row| (row.id.into(), row.epoch)).collect();
    observed.extend(open.into_iter().map(|row| (RunId(row.id), row.epoch)));
    Ok((observed, sealed.into_iter().map(|row| (row.id.into(), row.epoch)).collect()))
}
