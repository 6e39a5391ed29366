//! The watch over what a run keeps on disk, which ends the run and cannot stop a single write; and what is done while the host's own disk is full.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep},
};

use super::desk::Desk;

/// Least time between two looks.
const LEAST_WAIT: Duration = Duration::from_secs(1);
/// A look that takes long is repeated less often: it may cost at most this share of a core.
const SHARE: u32 = 10;

/// Returns how many bytes there are once they are more than `most`.
pub async fn over(folders: Vec<PathBuf>, most: u64) -> u64 {
    loop {
        let began = Instant::now();
        let looking = folders.clone();
        let used = spawn_blocking(move || looking.iter().map(|folder| used(folder, most)).sum()).await.unwrap_or(0);
        if used > most {
            return used;
        }
        sleep(LEAST_WAIT.max(began.elapsed() * SHARE)).await;
    }
}

/// Bytes allocated below a folder; stops counting once it is over.
fn used(root: &Path, most: u64) -> u64 {
    let mut bytes = 0;
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            // A file with several names is counted in shares.
            bytes += meta.blocks() * 512 / meta.nlink().max(1);
            if bytes > most {
                return bytes;
            }
            if meta.is_dir() {
                folders.push(entry.path());
            }
        }
    }
    bytes
}

/// Wait before a disk that refused is tried again.
pub const RETRY: Duration = Duration::from_secs(1);

/// Nothing is wrong but that somebody has to make room.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Tries again while the disk is full, for as long as nobody asks for an end: the run waits, and its owner is told for what.
pub async fn patiently<T>(desk: &Desk, mut act: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut told = false;
    loop {
        match act() {
            Err(error) if is_full(&error) && desk.stop_asked().is_none() => {
                if !std::mem::replace(&mut told, true) {
                    crate::note!("waiting for room on the disk: {error}");
                    desk.step("disk", Some("the host's disk is full; it goes on when there is room".to_owned()));
                }
                sleep(RETRY).await;
            }
            result => return result,
        }
    }
}
