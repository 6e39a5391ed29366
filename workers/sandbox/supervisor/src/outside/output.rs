//! A run's outputs: the files below `/workspace/outputs` that were created or changed since it started, handed over while it works and at its end. No link is
//! followed.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use sha2::{Digest, Sha256};
use tokio::{task::yield_now, time::sleep};
use towpath_schemas::limit::{FILE_PIECE_BYTES, FILES_PER_RUN};

use super::{
    desk::Desk,
    upload::{Content, Output},
};

/// How often outputs are looked at while the run works.
const EVERY: Duration = Duration::from_secs(10);
/// Files and folders looked at.
const ENTRIES: usize = 20_000;
/// Folders within folders.
const DEPTH: usize = 32;

/// What a file's inode says of its last change; the agent cannot set it back.
type Stamp = (u64, i64, i64, u64);

fn stamp(meta: &fs::Metadata) -> Stamp {
    (meta.ino(), meta.ctime(), meta.ctime_nsec(), meta.size())
}

/// A run's outputs: what was there before it, what of them was sent.
pub struct Outputs {
    folder: PathBuf,
    most_bytes: u64,
    /// Each file as it was before the run, or when it was last handed over for sending.
    done: HashMap<PathBuf, Stamp>,
    /// Each file as it was at the last look: one that changes still is left for the next.
    seen: HashMap<PathBuf, Stamp>,
    /// Names that were handed over; a run keeps only so many.
    names: HashSet<PathBuf>,
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

impl Outputs {
    /// Looks at them before the run.
    pub fn before(folder: PathBuf, most_bytes: u64) -> Self {
        let done = walk(&folder).files.into_iter().map(|(path, meta)| (path, stamp(&meta))).collect();
        Self { folder, most_bytes, done, seen: HashMap::new(), names: HashSet::new() }
    }

    /// What is there now was there before the run.
    pub fn begin_anew(&mut self) {
        *self = Self::before(std::mem::take(&mut self.folder), self.most_bytes);
    }

    /// Hands over, now and then, what was created or changed and has come to rest.
    pub async fn keep_up(&mut self, desk: &Desk) {
        loop {
            sleep(EVERY).await;
            if !desk.with_uploads(|uploads| uploads.is_done()) {
                continue;
            }
            let walk = walk(&self.folder);
            let resting: Vec<(PathBuf, fs::Metadata)> = walk
                .files
                .iter()
                .filter(|(path, meta)| self.done.get(path) != Some(&stamp(meta)) && self.seen.get(path) == Some(&stamp(meta)))
                .filter(|(path, meta)| meta.size() <= self.most_bytes && (self.names.contains(path) || self.names.len() < FILES_PER_RUN))
                .cloned()
                .collect();
            self.seen = walk.files.into_iter().map(|(path, meta)| (path, stamp(&meta))).collect();
            for (path, meta) in resting {
                // What cannot be read now is told at the end, if it still cannot be then.
                if let (Some(name), Ok(content)) = (self.name(&path), open(&self.folder, &path, &meta).await) {
                    self.hand_over(desk, path, &meta, Output { name, size: meta.size(), content });
                }
            }
        }
    }

    fn hand_over(&mut self, desk: &Desk, path: PathBuf, meta: &fs::Metadata, output: Output) {
        self.done.insert(path.clone(), stamp(meta));
        self.names.insert(path);
        desk.with_uploads(|uploads| uploads.push(output));
    }

    /// None for a name that is not UTF-8.
    fn name(&self, path: &Path) -> Option<String> {
        path.strip_prefix(&self.folder).unwrap_or(path).to_str().map(str::to_owned)
    }

    /// At the end: hands over all that is left, and says of each that is not sent why.
    pub async fn collect(&mut self, desk: &Desk) {
        let walk = walk(&self.folder);
        let mut beyond = 0;
        for (path, meta) in walk.files {
            if self.done.get(&path) == Some(&stamp(&meta)) {
                continue;
            }
            let name = path.strip_prefix(&self.folder).unwrap_or(&path).to_string_lossy().into_owned();
            if self.names.len() >= FILES_PER_RUN && !self.names.contains(&path) {
                beyond += 1;
                if beyond <= FILES_PER_RUN {
                    skip(desk, name, meta.size(), format!("too_many: a run keeps {FILES_PER_RUN} outputs"));
                }
                continue;
            }
            let content = match () {
                () if meta.size() > self.most_bytes => Err(format!("too_large: at most {} bytes", self.most_bytes)),
                () if self.name(&path).is_none() => Err("name_not_utf8".to_owned()),
                () => open(&self.folder, &path, &meta).await.map_err(|error| format!("unreadable: {error}")),
            };
            match content {
                Ok(content) => self.hand_over(desk, path, &meta, Output { name, size: meta.size(), content }),
                Err(reason) => {
                    // It takes a place among those that a run keeps, told as it is.
                    self.names.insert(path);
                    skip(desk, name, meta.size(), reason);
                }
            }
        }
        if beyond > FILES_PER_RUN {
            skip(desk, format!("and {} more", beyond - FILES_PER_RUN), 0, "too_many".to_owned());
        }
        if walk.cut {
            skip(desk, "…".to_owned(), 0, format!("too_many: only {ENTRIES} entries and {DEPTH} levels are looked at"));
        }
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
