//! Output files on their way in, and input files on their way out. Content is spooled to local disk, never whole in memory.

use std::collections::HashMap;

use towpath_chassis::{Chassis, Error, Result};
use towpath_file::{Spool, Spooled};
use towpath_run::report::{Report, Reporter};
use towpath_schemas::{
    ErrorCode,
    guest::{ToGuest, binary},
    id::FileId,
    limit::FILES_PER_RUN,
};

use super::Gateway;

/// Uploads of one connection at a time.
const OPEN: usize = 4;
/// Bytes of an output's name, folders included.
const NAME_BYTES: usize = 1024;

struct Upload {
    name: String,
    size: u64,
    sha256: String,
    spool: Spool,
}

pub(super) struct Uploads {
    chassis: Chassis,
    reporter: Reporter,
    open: HashMap<u64, Upload>,
}

/// An upload that is all here.
pub(super) struct Whole {
    upload: u64,
    name: String,
    sha256: String,
    spooled: Spooled,
}

impl Uploads {
    pub fn new(chassis: Chassis, reporter: Reporter) -> Self {
        Self { chassis, reporter, open: HashMap::new() }
    }

    /// An upload begins; one of no bytes is whole at once.
    pub async fn begin(&mut self, upload: u64, name: String, size: u64, sha256: String) -> Result<Option<Whole>> {
        check_name(&name)?;
        if self.open.len() >= OPEN && !self.open.contains_key(&upload) {
            return Err(Error::refused(ErrorCode::TooMany, format!("{OPEN} uploads are open")));
        }
        let most = self.chassis.config.limits.file_bytes;
        if size > most {
            return Err(Error::refused(ErrorCode::TooLarge, format!("`{name}` has {size} bytes, at most {most} are kept")));
        }
        let kept = towpath_file::outputs(&self.chassis.db, self.reporter.tenant, self.reporter.run).await?;
        if kept.len() >= FILES_PER_RUN && !kept.iter().any(|output| output.name == name) {
            return Err(Error::refused(ErrorCode::TooMany, format!("the run has {FILES_PER_RUN} outputs already")));
        }
        self.open.insert(upload, Upload { name, size, sha256, spool: Spool::new(size)? });
        if size == 0 { self.finish(upload).await } else { Ok(None) }
    }

    /// A piece came.
    pub async fn piece(&mut self, message: &[u8]) -> Result<Option<Whole>> {
        let (number, bytes) = message.split_first_chunk::<8>().ok_or_else(|| Error::broken("a piece of an output without a number"))?;
        let number = u64::from_be_bytes(*number);
        // A piece of an upload that was refused.
        let Some(upload) = self.open.get_mut(&number) else { return Ok(None) };
        upload.spool.write(bytes).await?;
        if upload.spool.size() == upload.size { self.finish(number).await } else { Ok(None) }
    }

    async fn finish(&mut self, number: u64) -> Result<Option<Whole>> {
        let Some(upload) = self.open.remove(&number) else { return Ok(None) };
        let spooled = upload.spool.finish().await?;
        Ok(Some(Whole { upload: number, name: upload.name, sha256: upload.sha256, spooled }))
    }

    pub fn drop_upload(&mut self, number: u64) {
        self.open.remove(&number);
    }
}

fn check_name(name: &str) -> Result<()> {
    let bad_part = |part: &str| part.is_empty() || part == "." || part == "..";
    if name.is_empty() || name.len() > NAME_BYTES || name.contains(['\0', '\\']) || name.split('/').any(bad_part) {
        return Err(Error::refused(
            ErrorCode::Unprocessable,
            "an output's name is a relative path without `.`, `..`, backslashes and U+0000",
        ));
    }
    Ok(())
}

/// Keeps a whole upload; the answer for the supervisor.
pub(super) async fn keep(gateway: &Gateway, reporter: &Reporter, whole: Whole) -> Result<ToGuest> {
    let Whole { upload, name, sha256, spooled } = whole;
    if hex::encode(spooled.sha256) != sha256 {
        let reason = "it changed while it was read";
        gateway.reports.tell(reporter, Report::OutputUnavailable { name, size: spooled.size, reason: reason.to_owned() }).await?;
        return Ok(ToGuest::OutputRefused { upload, code: "changed".to_owned(), detail: reason.to_owned() });
    }
    let object_key = towpath_file::put_output(&gateway.chassis, reporter.tenant, &spooled).await?;
    gateway.reports.tell(reporter, Report::Output { name, size: spooled.size, sha256: spooled.sha256, object_key }).await?;
    Ok(ToGuest::OutputStored { upload })
}

/// A piece of an input file as a binary message, or why not.
pub(super) async fn read(
    chassis: &Chassis,
    reporter: &Reporter,
    request: u64,
    file: FileId,
    offset: u64,
    length: u32,
) -> std::result::Result<Vec<u8>, ToGuest> {
    match towpath_file::read_piece(chassis, reporter.tenant, reporter.run, file, offset, length).await {
        Ok(bytes) => {
            let mut message = Vec::with_capacity(9 + bytes.len());
            message.push(binary::FILE_PIECE);
            message.extend_from_slice(&request.to_be_bytes());
            message.extend_from_slice(&bytes);
            Ok(message)
        }
        Err(error) => {
            let problem = error.problem();
            Err(ToGuest::FileRefused { request, code: problem.code, detail: problem.detail, again: error.is_passing() })
        }
    }
}
