//! The folder of one sandbox: who may touch which name, and how a fact is made durable.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use towpath_schemas::guest::Identity;

/// One sandbox's own folder, mode 0700.
#[derive(Debug, Clone)]
pub struct Folder(PathBuf);

/// What `identity.json` holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdentityRecord {
    #[serde(flatten)]
    pub identity: Identity,
    /// The PID namespace in which the numbers above are meant. Read in another one they say nothing.
    pub numbers_in: u64,
}

impl Folder {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Held by the supervisor for as long as it lives.
    pub fn lock_file(&self) -> PathBuf {
        self.0.join("lock")
    }

    /// What the sandbox is made from, written by the worker.
    pub fn spec(&self) -> PathBuf {
        self.0.join("spec.json")
    }

    pub fn identity(&self) -> PathBuf {
        self.0.join("identity.json")
    }

    /// Exists from before the command was executed.
    pub fn started(&self) -> PathBuf {
        self.0.join("started")
    }

    /// A tombstone: this sandbox was judged gone, and nothing may ever start here again.
    pub fn gone(&self) -> PathBuf {
        self.0.join("gone")
    }

    /// What the supervisor has to say for itself.
    pub fn log(&self) -> PathBuf {
        self.0.join("supervisor.log")
    }

    /// `/run/towpath` inside.
    pub fn control(&self) -> PathBuf {
        self.0.join("control")
    }

    /// The files of /etc that are made for the sandbox.
    pub fn etc(&self) -> PathBuf {
        self.0.join("etc")
    }

    pub fn spool(&self) -> PathBuf {
        self.0.join("spool")
    }

    /// Steers that wait, and the journal of what was begun.
    pub fn steers(&self) -> PathBuf {
        self.0.join("steers")
    }

    /// Takes the supervisor's lock; None when somebody holds it.
    pub fn try_lock(&self) -> io::Result<Option<File>> {
        let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(self.lock_file())?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Creates a folder that only its owner can enter; an existing one is left as it is.
pub fn make_private(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Writes the whole file beside the old one, makes it durable and then puts it in the old one's place.
pub fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().ok_or_else(|| io::Error::other("a file needs a folder"))?;
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    File::open(folder)?.sync_all()
}

pub fn write_json<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    write_durably(path, &serde_json::to_vec_pretty(value)?)
}

/// None when the file does not exist.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
