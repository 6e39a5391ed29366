//! All SQL of `upload` and `upload_part`.

use sqlx::PgPool;
use towpath_chassis::{Result, Work};
use towpath_schemas::{
    id::{FileId, PrincipalId, TenantId, UploadId},
    limit::UPLOAD_PARTS,
};

use crate::table::objects_unused;

/// An upload as its row says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upload {
    pub principal: PrincipalId,
    pub name: String,
    pub media_type: String,
    pub length: Option<u64>,
    pub received: u64,
    pub completed: bool,
    pub file: Option<FileId>,
}

pub(super) struct Part {
    pub bytes: u64,
    pub object_key: String,
}

pub(super) enum Grown {
    Here,
    Elsewhere(u64),
    TooMany,
    Gone,
}

pub(super) async fn open(db: &PgPool, tenant: TenantId) -> Result<i64> {
    Ok(sqlx::query_scalar!(r#"select count(*) as "count!" from upload where tenant_id = $1 and completed_at is null"#, tenant.uuid())
        .fetch_one(db)
        .await?)
}

pub(super) async fn insert(
    db: &PgPool,
    id: UploadId,
    tenant: TenantId,
    principal: PrincipalId,
    name: &str,
    media_type: &str,
    length: Option<u64>,
) -> Result<()> {
    sqlx::query!(
        "insert into upload (id, tenant_id, principal_id, name, media_type, length) values ($1, $2, $3, $4, $5, $6)",
        id.uuid(),
        tenant.uuid(),
        principal.uuid(),
        name.replace('\0', "\u{fffd}"),
        media_type,
        length.map(|length| length as i64)
    )
    .execute(db)
    .await?;
    Ok(())
}

pub(super) async fn by_id(db: &PgPool, tenant: TenantId, id: UploadId) -> Result<Option<Upload>> {
    let row = sqlx::query!(
        "select principal_id, name, media_type, length, received, completed_at, file_id from upload where id = $1 and tenant_id = $2",
        id.uuid(),
        tenant.uuid()
    )
    .fetch_optional(db)
    .await?;
    Ok(row.map(|row| Upload {
        principal: row.principal_id.into(),
        name: row.name,
        media_type: row.media_type,
        length: row.length.map(|length| length as u64),
        received: row.received as u64,
        completed: row.completed_at.is_some(),
        file: row.file_id.map(FileId),
    }))
}

/// Takes note of a part, if it follows what is here.
pub(super) async fn grow(work: &mut Work, tenant: TenantId, id: UploadId, first_byte: u64, bytes: u64) -> Result<Grown> {
    let row = sqlx::query!(
        "select received, parts, completed_at from upload where id = $1 and tenant_id = $2 for update",
        id.uuid(),
        tenant.uuid()
    )
    .fetch_optional(work.db())
    .await?;
    let Some(row) = row else { return Ok(Grown::Gone) };
    if row.completed_at.is_some() || row.received as u64 != first_byte {
        return Ok(Grown::Elsewhere(row.received as u64));
    }
    if row.parts >= UPLOAD_PARTS {
        return Ok(Grown::TooMany);
    }
    sqlx::query!(
        "update upload set received = received + $2, parts = parts + 1, changed_at = now() where id = $1",
        id.uuid(),
        bytes as i64
    )
    .execute(work.db())
    .await?;
    Ok(Grown::Here)
}

pub(super) async fn insert_part(
    work: &mut Work,
    tenant: TenantId,
    id: UploadId,
    first_byte: u64,
    bytes: u64,
    object_key: &str,
) -> Result<()> {
    sqlx::query!(
        "insert into upload_part (upload_id, first_byte, bytes, tenant_id, object_key) values ($1, $2, $3, $4, $5)",
        id.uuid(),
        first_byte as i64,
        bytes as i64,
        tenant.uuid(),
        object_key
    )
    .execute(work.db())
    .await?;
    Ok(())
}

pub(super) async fn parts(db: &PgPool, id: UploadId) -> Result<Vec<Part>> {
    let rows =
        sqlx::query!("select bytes, object_key from upload_part where upload_id = $1 order by first_byte", id.uuid()).fetch_all(db).await?;
    Ok(rows.into_iter().map(|row| Part { bytes: row.bytes as u64, object_key: row.object_key }).collect())
}

/// Locks an upload that is open and has exactly so many bytes.
pub(super) async fn lock_open(work: &mut Work, id: UploadId, received: u64) -> Result<bool> {
    let row = sqlx::query_scalar!(
        r#"select 1 as "one!" from upload where id = $1 and received = $2 and completed_at is null for update"#,
        id.uuid(),
        received as i64
    )
    .fetch_optional(work.db())
    .await?;
    Ok(row.is_some())
}

/// The upload has become a file; its parts are needed no longer.
pub(super) async fn finished(work: &mut Work, id: UploadId, file: FileId) -> Result<()> {
    sqlx::query!("update upload set file_id = $2, completed_at = now(), changed_at = now() where id = $1", id.uuid(), file.uuid())
        .execute(work.db())
        .await?;
    let keys =
        sqlx::query_scalar!("delete from upload_part where upload_id = $1 returning object_key", id.uuid()).fetch_all(work.db()).await?;
    objects_unused(work, &keys).await
}

/// Forgets an upload and gives up its parts; false when there is none.
pub(super) async fn forget(work: &mut Work, tenant: TenantId, id: UploadId) -> Result<bool> {
    let found = sqlx::query!("select id from upload where id = $1 and tenant_id = $2 for update", id.uuid(), tenant.uuid())
        .fetch_optional(work.db())
        .await?;
    if found.is_none() {
        return Ok(false);
    }
    forget_all(work, &[id.uuid()]).await?;
    Ok(true)
}

/// Forgets uploads that nobody touched for a day; how many.
pub(crate) async fn forget_old(work: &mut Work) -> Result<u64> {
    let old = sqlx::query_scalar!(
        "select id from upload where changed_at < now() - interval '24 hours' order by changed_at limit 100 for update skip locked"
    )
    .fetch_all(work.db())
    .await?;
    forget_all(work, &old).await?;
    Ok(old.len() as u64)
}

async fn forget_all(work: &mut Work, ids: &[uuid::Uuid]) -> Result<()> {
    let keys =
        sqlx::query_scalar!("delete from upload_part where upload_id = any($1) returning object_key", ids).fetch_all(work.db()).await?;
    sqlx::query!("delete from upload where id = any($1)", ids).execute(work.db()).await?;
    objects_unused(work, &keys).await
}
