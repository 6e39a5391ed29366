//! A run's outputs: the files below `/workspace/outputs` that were created or changed since it started. No link is followed.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use sha2::{Digest, Sha256};
use tokio::task::yield_now;
use towpath_schemas::limit::{FILE_PIECE_BYTES, FILES_PER_RUN};

use super::{
    desk::Desk,
    upload::{Content, Output},
};

/// Files and folders looked at.
const ENTRIES: usize = 20_000;
/// Folders within folders.
const DEPTH: usize = 32;

/// What a file's inode says of its last change; the agent cannot set it back.
type Stamp = (u64, i64, i64, u64);

fn stamp(meta: &fs::Metadata) -> Stamp {
    (meta.ino(), meta.ctime(), meta.ctime_nsec(), meta.size())
}

/// The outputs as they were before the run.
pub struct Before {
    folder: PathBuf,
    stamps: HashMap<PathBuf, Stamp>,
}

pub fn look_before(folder: PathBuf) -> Before {
    let stamps = walk(&folder).files.into_iter().map(|(path, meta)| (path, stamp(&meta))).collect();
    Before { folder, stamps }
}

struct Walk {
    files: Vec<(PathBuf, fs::Metadata)>,
    cut: bool,
}

fn walk(root: &Path) -> Walk {
    let mut walk = Walk { files: Vec::new(), cut: false };
    let mut folders = vec![(root.to_owned(), 0)];
    let mut looked = 0;
    while let Some((folder, depth)) = folders.pop() {
        if !fs::symlink_metadata(&folder).is_ok_and(|meta| meta.is_dir()) {
            continue;
        }
        let mut entries: Vec<_> = fs::read_dir(&folder).into_iter().flatten().flatten().take(ENTRIES).collect();
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            looked += 1;
            if looked > ENTRIES {
                walk.cut = true;
                return walk;
            }
            match entry.metadata() {
                Ok(meta) if meta.is_dir() && depth < DEPTH => folders.push((entry.path(), depth + 1)),
                Ok(meta) if meta.is_dir() => walk.cut = true,
                Ok(meta) if meta.is_file() => walk.files.push((entry.path(), meta)),
                Ok(_) | Err(_) => {}
            }
        }
    }
    walk.files.sort_by(|(one, _), (other, _)| one.cmp(other));
    walk
}

/// Hands the changed ones over for sending, and says of each that is not sent why.
pub async fn collect(desk: &Desk, before: &Before, most_bytes: u64) {
    let walk = walk(&before.folder);
    let changed = walk.files.into_iter().filter(|(path, meta)| before.stamps.get(path) != Some(&stamp(meta)));
    let mut beyond = 0;
    for (number, (path, meta)) in changed.enumerate() {
        let name = path.strip_prefix(&before.folder).unwrap_or(&path).to_string_lossy().into_owned();
        if number >= FILES_PER_RUN {
            beyond += 1;
            if beyond > FILES_PER_RUN {
                continue;
            }
            skip(desk, name, meta.size(), format!("too_many: a run keeps {FILES_PER_RUN} outputs"));
            continue;
        }
        let is_text = path.to_str().is_some();
        let content = match () {
            () if meta.size() > most_bytes => Err(format!("too_large: at most {most_bytes} bytes")),
            () if !is_text => Err("name_not_utf8".to_owned()),
            () => open(&before.folder, &path, &meta).await.map_err(|error| format!("unreadable: {error}")),
        };
        match content {
            Ok(content) => desk.with_uploads(|uploads| uploads.push(Output { name, size: meta.size(), content })),
            Err(reason) => skip(desk, name, meta.size(), reason),
        }
    }
    if beyond > FILES_PER_RUN {
        skip(desk, format!("and {} more", beyond - FILES_PER_RUN), 0, "too_many".to_owned());
    }
    if walk.cut {
        skip(desk, "…".to_owned(), 0, format!("too_many: only {ENTRIES} entries and {DEPTH} levels are looked at"));
    }
}

fn skip(desk: &Desk, name: String, size: u64, reason: String) {
    desk.with_uploads(|uploads| uploads.push(Output { name, size, content: Content::Skipped { reason } }));
}

/// Opens what was walked, and nothing else: the next run of the session may already change the tree, so no link on the way is followed, none leads
/// out of the folder, and the file is the one that was seen.
async fn open(folder: &Path, path: &Path, seen: &fs::Metadata) -> io::Result<Content> {
    let beneath = path.strip_prefix(folder).map_err(|_| io::Error::other("it is outside of the outputs"))?;
    let root = rustix::fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat2(&root, beneath, flags, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)?);
    let found = file.metadata()?;
    if !found.is_file() || (found.dev(), found.ino()) != (seen.dev(), seen.ino()) {
        return Err(io::Error::other("it is not what it was"));
    }
    let sha256 = digest(&file, seen.size()).await?;
    Ok(Content::File { file, sha256 })
}

async fn digest(mut file: &File, size: u64) -> io::Result<String> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; FILE_PIECE_BYTES];
    let mut left = size;
    while left > 0 {
        let want = left.min(buffer.len() as u64) as usize;
        file.read_exact(&mut buffer[..want])?;
        hash.update(&buffer[..want]);
        left -= want as u64;
        // The connection has to stay alive meanwhile.
        yield_now().await;
    }
    Ok(hex::encode(hash.finalize()))
}
