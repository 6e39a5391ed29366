#![doc = include_str!("../README.md")]

pub mod name;
mod spool;
mod sweep;
mod table;
pub mod upload;

pub use spool::{Spool, Spooled};
pub use sweep::sweeps;
pub use table::*;

use towpath_chassis::{Chassis, Error, Result, kill};
use towpath_schemas::{
    ErrorCode,
    body::FileRef,
    id::{FileId, PrincipalId, RunId, TenantId},
    key,
    limit::FILE_PIECE_BYTES,
};
use uuid::Uuid;

/// A name that no object ever had.
#[allow(clippy::disallowed_methods, reason = "an object is no thing with an id of its own")]
pub fn unique() -> Uuid {
    Uuid::now_v7()
}

/// Puts what was spooled into the store as a new object. It is `writing` until a transaction refers to it ([`object_live`]).
async fn put(chassis: &Chassis, tenant: TenantId, spooled: &Spooled) -> Result<String> {
    let key = key::file(tenant, unique());
    table::object_begin(&chassis.db, tenant, &key).await?;
    kill::point("object begun").await;
    chassis.store.put_file(&key, spooled.path()).await?;
    Ok(key)
}

/// Keeps an uploaded file.
pub async fn store(
    chassis: &Chassis,
    tenant: TenantId,
    principal: PrincipalId,
    original_name: &str,
    media_type: &str,
    spooled: Spooled,
) -> Result<FileRef> {
    let name = name::safe(original_name);
    let object_key = put(chassis, tenant, &spooled).await?;
    let file = FileRef {
        id: FileId::mint(),
        name,
        media_type: media_type.to_owned(),
        size: spooled.size,
        status: "stored".to_owned(),
        reason: None,
    };
    let mut work = chassis.begin().await?;
    object_live(&mut work, &object_key, spooled.size).await?;
    table::insert_file(&mut work, tenant, principal, &file, original_name, &spooled.sha256, &object_key).await?;
    work.commit().await?;
    Ok(file)
}

/// A piece of one of the run's input files, for its sandbox. Files of other runs are not there (WALLED).
pub async fn read_piece(chassis: &Chassis, tenant: TenantId, run: RunId, file: FileId, offset: u64, length: u32) -> Result<bytes::Bytes> {
    let (object_key, size) = table::input_object(&chassis.db, tenant, run, file)
        .await?
        .ok_or_else(|| Error::refused(ErrorCode::UnknownFile, format!("{file} is no input of this run")))?;
    let length = u64::from(length).min(FILE_PIECE_BYTES as u64).min(size.saturating_sub(offset));
    chassis.store.get_range(&object_key, offset, length).await
}

/// Keeps an output of a run; the caller's transaction decides whether it still counts.
pub async fn put_output(chassis: &Chassis, tenant: TenantId, spooled: &Spooled) -> Result<String> {
    put(chassis, tenant, spooled).await
}
