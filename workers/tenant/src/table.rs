//! All SQL of `tenant`, `principal` and `token`.

use std::collections::HashMap;

use sqlx::PgPool;
use towpath_chassis::{Chassis, Error, Result, Work};
use towpath_schemas::{
    ErrorCode,
    body::{Tenant, Token},
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
        sqlx::query!("insert into tenant (id, name) values ($1, $2) on conflict (name) do nothing returning created_at", id.uuid(), name)
            .fetch_optional(&chassis.db)
            .await?;
    match row {
        Some(row) => Ok(Tenant { id, name: name.to_owned(), created_at: row.created_at }),
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
    let rows = sqlx::query!("select id, name, created_at from tenant order by created_at desc, id desc limit $1", PAGE_ROWS)
        .fetch_all(&chassis.db)
        .await?;
    Ok(rows.into_iter().map(|row| Tenant { id: row.id.into(), name: row.name, created_at: row.created_at }).collect())
}

/// Is this the first tenant, the operator's own?
pub async fn is_operator(chassis: &Chassis, tenant: TenantId) -> Result<bool> {
    let first = sqlx::query_scalar!("select id from tenant order by created_at, id limit 1").fetch_optional(&chassis.db).await?;
    Ok(first == Some(tenant.uuid()))
}
