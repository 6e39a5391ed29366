//! Uploads that come in parts and go on after a break. Each part is an object of its own as soon as it is here; the last one makes a file of them.

use towpath_chassis::{Chassis, Error, Result, kill};
use towpath_schemas::{
    ErrorCode,
    body::FileRef,
    id::{FileId, PrincipalId, TenantId, UploadId},
    limit::{UPLOAD_PARTS, UPLOADS_OPEN},
};

use crate::{Spool, Spooled, name, put, table as files};

mod table;

pub use table::Upload;
pub(crate) use table::forget_old;

/// Bytes read back at a time.
const PIECE: u64 = 1 << 20;

/// What came of a part.
#[derive(Debug)]
pub enum Appended {
    /// Bytes that are here now.
    Here(u64),
    /// It does not follow what is here, which is this many bytes; nothing of it was taken.
    Elsewhere(u64),
}

/// Begins an upload, of `length` bytes if that is known.
pub async fn begin(
    chassis: &Chassis,
    tenant: TenantId,
    principal: PrincipalId,
    name: &str,
    media_type: &str,
    length: Option<u64>,
) -> Result<UploadId> {
    check_length(chassis, length.unwrap_or(0))?;
    if table::open(&chassis.db, tenant).await? >= UPLOADS_OPEN {
        return Err(Error::refused(ErrorCode::TooMany, format!("{UPLOADS_OPEN} uploads are open; finish or cancel some")));
    }
    let id = UploadId::mint();
    table::insert(&chassis.db, id, tenant, principal, name, media_type, length).await?;
    Ok(id)
}

fn check_length(chassis: &Chassis, length: u64) -> Result<()> {
    let most = chassis.config.limits.file_bytes;
    if length > most {
        return Err(Error::refused(ErrorCode::TooLarge, format!("a file may hold at most {most} bytes")));
    }
    Ok(())
}

/// An upload of the tenant.
pub async fn by_id(chassis: &Chassis, tenant: TenantId, id: UploadId) -> Result<Upload> {
    let upload = table::by_id(&chassis.db, tenant, id).await?;
    upload.ok_or_else(|| gone(id))
}

fn gone(id: UploadId) -> Error {
    Error::refused(ErrorCode::NotFound, format!("there is no upload {id}, or it was left alone for a day"))
}

/// Bytes that the next part may have.
pub fn room(chassis: &Chassis, upload: &Upload) -> u64 {
    upload.length.unwrap_or(chassis.config.limits.file_bytes).saturating_sub(upload.received)
}

/// Keeps a part that begins at `first_byte`.
pub async fn append(chassis: &Chassis, tenant: TenantId, id: UploadId, first_byte: u64, part: Spooled) -> Result<Appended> {
    if part.size == 0 {
        return Ok(Appended::Here(by_id(chassis, tenant, id).await?.received));
    }
    let object_key = put(chassis, tenant, &part).await?;
    let mut work = chassis.begin().await?;
    match table::grow(&mut work, tenant, id, first_byte, part.size).await? {
        table::Grown::Here => {}
        table::Grown::Gone => return Err(gone(id)),
        table::Grown::Elsewhere(received) => return Ok(Appended::Elsewhere(received)),
        table::Grown::TooMany => {
            return Err(Error::refused(ErrorCode::TooMany, format!("an upload has at most {UPLOAD_PARTS} parts; send larger ones")));
        }
    }
    files::object_live(&mut work, &object_key, part.size).await?;
    table::insert_part(&mut work, tenant, id, first_byte, part.size, &object_key).await?;
    work.commit().await?;
    Ok(Appended::Here(first_byte + part.size))
}

/// Makes a file of what is here. Asked again, it answers with the same file.
pub async fn finish(chassis: &Chassis, tenant: TenantId, id: UploadId) -> Result<FileRef> {
    let upload = by_id(chassis, tenant, id).await?;
    if let Some(file) = upload.file {
        return known(chassis, tenant, file).await;
    }
    if let Some(length) = upload.length.filter(|length| *length != upload.received) {
        return Err(Error::refused(ErrorCode::Unprocessable, format!("{} of the announced {length} bytes are here", upload.received)));
    }
    let mut spool = Spool::new(upload.received)?;
    for part in table::parts(&chassis.db, id).await? {
        let mut at = 0;
        while at < part.bytes {
            let piece = chassis.store.get_range(&part.object_key, at, PIECE.min(part.bytes - at)).await?;
            if piece.is_empty() {
                return Err(Error::broken(format!("part {} of {id} is shorter than its row says", part.object_key)));
            }
            spool.write(&piece).await?;
            at += piece.len() as u64;
        }
    }
    let whole = spool.finish().await?;
    let object_key = put(chassis, tenant, &whole).await?;
    let file = FileRef {
        id: FileId::mint(),
        name: name::safe(&upload.name),
        media_type: upload.media_type,
        size: whole.size,
        status: "stored".to_owned(),
        reason: None,
    };
    let mut work = chassis.begin().await?;
    if !table::lock_open(&mut work, id, whole.size).await? {
        // Somebody else finished it, or more came meanwhile.
        drop(work);
        return match by_id(chassis, tenant, id).await?.file {
            Some(file) => known(chassis, tenant, file).await,
            None => Err(Error::refused(ErrorCode::InProgress, "more of it came meanwhile; ask for its offset")),
        };
    }
    files::object_live(&mut work, &object_key, whole.size).await?;
    files::insert_file(&mut work, tenant, upload.principal, &file, &upload.name, &whole.sha256, &object_key).await?;
    table::finished(&mut work, id, file.id).await?;
    work.commit().await?;
    kill::point("upload finished").await;
    Ok(file)
}

async fn known(chassis: &Chassis, tenant: TenantId, file: FileId) -> Result<FileRef> {
    let found = files::object_of(&chassis.db, tenant, file).await?;
    found.map(|(_, file)| file).ok_or_else(|| Error::refused(ErrorCode::UnknownFile, format!("{file} is kept no longer")))
}

/// Gives an upload up; false when there is none.
pub async fn cancel(chassis: &Chassis, tenant: TenantId, id: UploadId) -> Result<bool> {
    let mut work = chassis.begin().await?;
    let found = table::forget(&mut work, tenant, id).await?;
    work.commit().await?;
    Ok(found)
}
