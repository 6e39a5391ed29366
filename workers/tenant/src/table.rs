//! All SQL of `tenant`, `principal` and `token`.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use sqlx::PgPool;
use towpath_chassis::{Chassis, Error, Result, Work};
use towpath_schemas::{
    ErrorCode,
    body::{Retention, Tenant, Token},
    id::{PrincipalId, TenantId, TokenId},
    limit::PAGE_ROWS,
};

use crate::{Caller, Scope};

/// The callers behind these digests of tokens. Those that are unknown, expired or revoked are left out.
pub(crate) async fn callers(db: &PgPool, sha256: &[Vec<u8>]) -> Result<HashMap<Vec<u8>, Caller>> {
    let rows = sqlx::query!(
        "select sha256, id, tenant_id, principal_id, scopes from token where sha256 = any($1) and expires_at > now() and revoked_at is null",
        sha256
    )
    .fetch_all(db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let caller = Caller {
                tenant: row.tenant_id.into(),
                principal: row.principal_id.into(),
                token: row.id.into(),
                scopes: row.scopes.iter().filter_map(|word| Scope::from_word(word)).collect(),
            };
            (row.sha256, caller)
        })
        .collect())
}

/// The principal of that name; made when there is none.
pub async fn ensure_principal(work: &mut Work, tenant: TenantId, kind: &str, name: &str) -> Result<PrincipalId> {
    let id = sqlx::query_scalar!(
        "insert into principal (id, tenant_id, kind, name) values ($1, $2, $3, $4)
         on conflict (tenant_id, name) do update set name = excluded.name returning id",
        PrincipalId::mint().uuid(),
        tenant.uuid(),
        kind,
        name
    )
    .fetch_one(work.db())
    .await?;
    Ok(id.into())
}

pub(crate) async fn insert_token(
    work: &mut Work,
    id: TokenId,
    tenant: TenantId,
    principal: PrincipalId,
    sha256: &[u8],
    scopes: &[String],
    days: i32,
) -> Result<chrono::DateTime<chrono::Utc>> {
    Ok(sqlx::query_scalar!(
        "insert into token (id, tenant_id, principal_id, sha256, scopes, expires_at) values ($1, $2, $3, $4, $5, now() + make_interval(days => $6)) returning expires_at",
        id.uuid(),
        tenant.uuid(),
        principal.uuid(),
        sha256,
        scopes,
        days
    )
    .fetch_one(work.db())
    .await?)
}

pub async fn tokens(chassis: &Chassis, tenant: TenantId) -> Result<Vec<Token>> {
    let rows = sqlx::query!(
        "select token.id, principal_id, name, scopes, expires_at from token join principal on principal.id = principal_id
         where token.tenant_id = $1 and revoked_at is null order by token.created_at desc, token.id desc limit $2",
        tenant.uuid(),
        PAGE_ROWS
    )
    .fetch_all(&chassis.db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| Token {
            id: row.id.into(),
            tenant,
            principal: row.principal_id.into(),
            principal_name: row.name,
            scopes: row.scopes,
            expires_at: row.expires_at,
            secret: None,
        })
        .collect())
}

/// False when the tenant has no such token.
pub async fn revoke_token(chassis: &Chassis, tenant: TenantId, token: TokenId) -> Result<bool> {
    let done = sqlx::query!(
        "update token set revoked_at = coalesce(revoked_at, now()) where id = $1 and tenant_id = $2",
        token.uuid(),
        tenant.uuid()
    )
    .execute(&chassis.db)
    .await?;
    Ok(done.rows_affected() == 1)
}

pub async fn create_tenant(chassis: &Chassis, name: &str) -> Result<Tenant> {
    if name.is_empty() || name.len() > 255 || name.contains('\0') {
        return Err(Error::refused(ErrorCode::Unprocessable, "name: 1 to 255 bytes without U+0000"));
    }
    let id = TenantId::mint();
    let row =
        sqlx::query!("insert into tenant (id, name) values ($1, $2) on conflict (name) do nothing returning created_at, transcript_days, file_days, run_days, concurrent, paused_at", id.uuid(), name)
            .fetch_optional(&chassis.db)
            .await?;
    match row {
        Some(row) => {
            let retention = Retention { transcript_days: row.transcript_days, file_days: row.file_days, run_days: row.run_days };
            Ok(Tenant {
                id,
                name: name.to_owned(),
                retention,
                concurrent: row.concurrent,
                paused: row.paused_at.is_some(),
                created_at: row.created_at,
            })
        }
        None => Err(Error::refused(ErrorCode::NameTaken, format!("there is a tenant `{name}` already"))),
    }
}

/// The tenant of that name; made when there is none. For the first start.
pub async fn ensure_tenant(chassis: &Chassis, name: &str) -> Result<TenantId> {
    sqlx::query!("insert into tenant (id, name) values ($1, $2) on conflict (name) do nothing", TenantId::mint().uuid(), name)
        .execute(&chassis.db)
        .await?;
    Ok(sqlx::query_scalar!("select id from tenant where name = $1", name).fetch_one(&chassis.db).await?.into())
}

pub async fn tenants(chassis: &Chassis) -> Result<Vec<Tenant>> {
    let rows = sqlx::query!(
        "select id, name, created_at, transcript_days, file_days, run_days, concurrent, paused_at from tenant order by created_at desc, id desc limit $1",
        PAGE_ROWS
    )
    .fetch_all(&chassis.db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let retention = Retention { transcript_days: row.transcript_days, file_days: row.file_days, run_days: row.run_days };
            Tenant {
                id: row.id.into(),
                name: row.name,
                retention,
                concurrent: row.concurrent,
                paused: row.paused_at.is_some(),
                created_at: row.created_at,
            }
        })
        .collect())
}

/// Says how long a tenant's things are kept; false when there is no such tenant.
pub async fn keep(chassis: &Chassis, tenant: TenantId, retention: Retention) -> Result<bool> {
    let days = [retention.transcript_days, retention.file_days, retention.run_days];
    if days.iter().flatten().any(|days| !(1..=36_500).contains(days)) {
        return Err(Error::refused(ErrorCode::Unprocessable, "days: from 1 to 36500, or null for ever"));
    }
    let done = sqlx::query!(
        "update tenant set transcript_days = $2, file_days = $3, run_days = $4 where id = $1",
        tenant.uuid(),
        retention.transcript_days,
        retention.file_days,
        retention.run_days
    )
    .execute(&chassis.db)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Says how many runs a tenant may have at a time; false when there is no such tenant. The caller wakes whoever waits.
pub async fn limit(work: &mut Work, tenant: TenantId, concurrent: Option<i32>) -> Result<bool> {
    if concurrent.is_some_and(|limit| limit < 1) {
        return Err(Error::refused(ErrorCode::Unprocessable, "concurrent: at least 1, or null for no limit"));
    }
    let done = sqlx::query!("update tenant set concurrent = $2 where id = $1", tenant.uuid(), concurrent).execute(work.db()).await?;
    Ok(done.rows_affected() == 1)
}

/// Pauses a tenant or lets it go on; false when there is no such tenant.
pub async fn pause(work: &mut Work, tenant: TenantId, paused: bool) -> Result<bool> {
    let done =
        sqlx::query!("update tenant set paused_at = case when $2 then coalesce(paused_at, now()) end where id = $1", tenant.uuid(), paused)
            .execute(work.db())
            .await?;
    Ok(done.rows_affected() == 1)
}

/// Pauses everything or lets it go on.
pub async fn pause_all(work: &mut Work, paused: bool) -> Result<()> {
    sqlx::query!("update installation set paused_at = case when $1 then coalesce(paused_at, now()) end", paused).execute(work.db()).await?;
    Ok(())
}

/// What of a tenant's is kept no longer, and how far that was carried out.
#[derive(Debug, Clone)]
pub struct Expiry {
    pub tenant: TenantId,
    /// Of runs that ended before, transcripts and outputs are kept no longer.
    pub transcripts_before: Option<DateTime<Utc>>,
    pub transcripts_done: DateTime<Utc>,
    pub outputs_before: Option<DateTime<Utc>>,
    pub outputs_done: DateTime<Utc>,
    pub runs_before: Option<DateTime<Utc>>,
}

pub async fn expiries(db: &PgPool) -> Result<Vec<Expiry>> {
    let rows = sqlx::query!(
        "select id, transcripts_kept_from, outputs_kept_from, now() - make_interval(days => transcript_days) as transcripts_before,
             now() - make_interval(days => file_days) as outputs_before, now() - make_interval(days => run_days) as runs_before
         from tenant order by id"
    )
    .fetch_all(db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| Expiry {
            tenant: row.id.into(),
            transcripts_before: row.transcripts_before,
            transcripts_done: row.transcripts_kept_from,
            outputs_before: row.outputs_before,
            outputs_done: row.outputs_kept_from,
            runs_before: row.runs_before,
        })
        .collect())
}

/// Notes that nothing is left of transcripts, or outputs, of runs that ended before.
pub async fn expired(db: &PgPool, tenant: TenantId, transcripts: Option<DateTime<Utc>>, outputs: Option<DateTime<Utc>>) -> Result<()> {
    sqlx::query!(
        "update tenant set transcripts_kept_from = greatest(transcripts_kept_from, $2), outputs_kept_from = greatest(outputs_kept_from, $3) where id = $1",
        tenant.uuid(),
        transcripts,
        outputs
    )
    .execute(db)
    .await?;
    Ok(())
}

/// Is this the first tenant, the operator's own?
pub async fn is_operator(chassis: &Chassis, tenant: TenantId) -> Result<bool> {
    let first = sqlx::query_scalar!("select id from tenant order by created_at, id limit 1").fetch_optional(&chassis.db).await?;
    Ok(first == Some(tenant.uuid()))
}
