//! All SQL of `session`.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, PgPool};
use towpath_chassis::{Error, Result, Work};
use towpath_schemas::{
    ErrorCode,
    body::Session,
    id::{PrincipalId, SessionId, TenantId},
    limit::PAGE_ROWS,
};
use uuid::Uuid;

/// A session about to be opened.
#[derive(Debug, Clone)]
pub struct NewRow {
    pub id: SessionId,
    pub tenant: TenantId,
    pub agent: Uuid,
    pub agent_name: String,
    pub principal: PrincipalId,
}

/// Opens sessions; one that is there already stays as it is.
pub async fn open(work: &mut Work, rows: &[NewRow]) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = rows.iter().map(|row| row.id.uuid()).collect();
    let tenants: Vec<Uuid> = rows.iter().map(|row| row.tenant.uuid()).collect();
    let agents: Vec<Uuid> = rows.iter().map(|row| row.agent).collect();
    let names: Vec<String> = rows.iter().map(|row| row.agent_name.clone()).collect();
    let principals: Vec<Uuid> = rows.iter().map(|row| row.principal.uuid()).collect();
    sqlx::query!(
        "insert into session (id, tenant_id, agent_id, agent_name, principal_id)
         select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::uuid[]) on conflict do nothing",
        &ids,
        &tenants,
        &agents,
        &names,
        &principals
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// Which agent each of these sessions of a tenant talks to: (session, tenant, agent).
pub async fn agents_of(db: &mut PgConnection, sessions: &[SessionId]) -> Result<Vec<(SessionId, TenantId, Uuid)>> {
    if sessions.is_empty() {
        return Ok(Vec::new());
    }
    let ids: Vec<Uuid> = sessions.iter().map(|session| session.uuid()).collect();
    let rows = sqlx::query!("select id, tenant_id, agent_id from session where id = any($1)", &ids).fetch_all(db).await?;
    Ok(rows.into_iter().map(|row| (row.id.into(), row.tenant_id.into(), row.agent_id)).collect())
}

/// One session of the tenant.
pub async fn by_id(db: &PgPool, tenant: TenantId, id: SessionId) -> Result<Session> {
    let found = select(db, tenant, Some(id)).await?.pop();
    found.ok_or_else(|| Error::refused(ErrorCode::NotFound, format!("there is no session {id}")))
}

/// The tenant's newest sessions.
pub async fn list(db: &PgPool, tenant: TenantId) -> Result<Vec<Session>> {
    select(db, tenant, None).await
}

async fn select(db: &PgPool, tenant: TenantId, only: Option<SessionId>) -> Result<Vec<Session>> {
    let rows = sqlx::query!(
        "select id, agent_name, principal_id, created_at from session where tenant_id = $1 and ($2::uuid is null or id = $2) order by created_at desc, id desc limit $3",
        tenant.uuid(),
        only.map(SessionId::uuid),
        PAGE_ROWS
    )
    .fetch_all(db)
    .await?;
    let ids: Vec<SessionId> = rows.iter().map(|row| row.id.into()).collect();
    let runs = towpath_run::view::of_sessions(db, tenant, &ids).await?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let of = runs.iter().find(|(session, ..)| session.uuid() == row.id);
            Session {
                id: row.id.into(),
                agent: row.agent_name,
                principal: row.principal_id.into(),
                place: of.and_then(|(.., place)| place.clone()),
                live_run: of.and_then(|(_, live, ..)| *live),
                runs: of.map_or(0, |(_, _, runs, _)| *runs),
                created_at: row.created_at,
            }
        })
        .collect())
}

/// Sessions of the tenant that were opened before and have no run.
pub(crate) async fn without_runs(db: &PgPool, tenant: TenantId, before: DateTime<Utc>) -> Result<Vec<SessionId>> {
    let ids = sqlx::query_scalar!(
        "select id from session where tenant_id = $1 and created_at < $2 and not exists (select 1 from run where session_id = session.id) order by created_at limit 100",
        tenant.uuid(),
        before
    )
    .fetch_all(db)
    .await?;
    Ok(ids.into_iter().map(SessionId).collect())
}

/// Forgets those of these sessions that have neither a run nor a workspace; how many.
pub(crate) async fn forget(work: &mut Work, sessions: &[SessionId]) -> Result<u64> {
    let ids: Vec<Uuid> = sessions.iter().map(|session| session.uuid()).collect();
    let done = sqlx::query!(
        "delete from session where id = any($1) and not exists (select 1 from run where session_id = session.id)
             and not exists (select 1 from workspace where session_id = session.id)",
        &ids
    )
    .execute(work.db())
    .await?;
    Ok(done.rows_affected())
}
