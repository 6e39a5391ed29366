//! The watch over what a run keeps on disk. It ends the run; it cannot stop a single write.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep},
};

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
