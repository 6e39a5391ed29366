//! `Idempotency-Key`: the key's row is inserted by the transaction that creates the thing, and holds the body's SHA-256 and the thing's id, never an answer.

use sqlx::PgConnection;
use towpath_schemas::{
    ErrorCode, Problem,
    id::TenantId,
    limit::{IDEMPOTENCY_HOURS, IDEMPOTENCY_KEY_BYTES},
};
use uuid::Uuid;

use crate::{Chassis, Error, Result};

/// A caller's key and the body it came with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    pub key: String,
    pub sha256: Vec<u8>,
}

impl Key {
    pub fn new(key: &str, sha256: Vec<u8>) -> Result<Self> {
        if key.is_empty() || key.len() > IDEMPOTENCY_KEY_BYTES || !key.bytes().all(|b| b.is_ascii_graphic() || b == b' ') {
            return Err(Error::refused(
                ErrorCode::BadRequest,
                format!("Idempotency-Key: use 1 to {IDEMPOTENCY_KEY_BYTES} printable ASCII characters"),
            ));
        }
        Ok(Self { key: key.to_owned(), sha256 })
    }
}

/// One key about to be claimed for a thing.
pub struct Claim<'a> {
    pub tenant: TenantId,
    pub key: &'a Key,
    pub thing: Uuid,
}

/// What a claim met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claimed {
    New,
    /// The key made this thing before.
    Replay(Uuid),
    /// The key came with another body.
    Mismatch,
}

impl Claimed {
    pub fn refuse_mismatch(&self) -> Option<Problem> {
        (*self == Claimed::Mismatch)
            .then(|| Problem::new(ErrorCode::IdempotencyMismatch, "the body differs from the first one sent with this key"))
    }
}

/// Claims keys for a route, in the callers' order. Rows are inserted in key order, so that two batches never wait for each other in a ring.
pub async fn claim(db: &mut PgConnection, route: &str, claims: &[Claim<'_>]) -> Result<Vec<Claimed>> {
    if claims.is_empty() {
        return Ok(Vec::new());
    }
    let tenants: Vec<Uuid> = claims.iter().map(|claim| claim.tenant.uuid()).collect();
    let keys: Vec<String> = claims.iter().map(|claim| claim.key.key.clone()).collect();
    let digests: Vec<Vec<u8>> = claims.iter().map(|claim| claim.key.sha256.clone()).collect();
    let things: Vec<Uuid> = claims.iter().map(|claim| claim.thing).collect();
    let inserted: Vec<Uuid> = sqlx::query_scalar!(
        "insert into idempotency (tenant_id, route, key, sha256, thing)
         select tenant_id, $1, key, sha256, thing from unnest($2::uuid[], $3::text[], $4::bytea[], $5::uuid[]) as t (tenant_id, key, sha256, thing)
         order by tenant_id, key
         on conflict (tenant_id, route, key) do nothing returning thing",
        route,
        &tenants,
        &keys,
        &digests,
        &things
    )
    .fetch_all(&mut *db)
    .await?;
    let mut found = Vec::with_capacity(claims.len());
    for claim in claims {
        if inserted.contains(&claim.thing) {
            found.push(Claimed::New);
            continue;
        }
        let row = sqlx::query!(
            "select sha256, thing from idempotency where tenant_id = $1 and route = $2 and key = $3",
            claim.tenant.uuid(),
            route,
            claim.key.key
        )
        .fetch_optional(&mut *db)
        .await?;
        found.push(match row {
            Some(row) if row.sha256 == claim.key.sha256 => Claimed::Replay(row.thing),
            Some(_) => Claimed::Mismatch,
            None => return Err(Error::refused(ErrorCode::InProgress, "a request with this Idempotency-Key is still being answered")),
        });
    }
    Ok(found)
}

/// Refusals are not kept.
pub async fn forget(db: &mut PgConnection, route: &str, things: &[Uuid]) -> Result<()> {
    if !things.is_empty() {
        sqlx::query!("delete from idempotency where route = $1 and thing = any($2)", route, things).execute(db).await?;
    }
    Ok(())
}

/// Sweep: keys older than a day are forgotten.
pub async fn sweep(chassis: Chassis) -> Result<u64> {
    let deleted = sqlx::query!(
        "delete from idempotency where (tenant_id, route, key) in
             (select tenant_id, route, key from idempotency where created_at < now() - make_interval(hours => $1) order by created_at limit 10000)",
        IDEMPOTENCY_HOURS
    )
    .execute(&chassis.db)
    .await?;
    Ok(deleted.rows_affected())
}
