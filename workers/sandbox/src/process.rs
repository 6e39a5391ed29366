//! The `process` backend: one sandbox is one supervisor process on this host, with bubblewrap's walls below it.
//!
//! Everything about a sandbox is in its folder, `<state>/sandboxes/<run>.<epoch>/`; no other host can judge it. Whether it is there is
//! asked of the kernel, never of our own memory, so a worker that was just started knows as much as the one before it.

mod check;
mod create;
mod observe;
#[cfg(test)]
mod tests;

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use towpath_schemas::{
    guest::Identity,
    id::{RunId, SessionId},
};
use towpath_supervisor::folder::Folder;

/// First of the users that commands run as when the worker is root: one for each session, by the last 28 bits of its id. The range up to
/// 2147483647 is unused by distributions and by systemd (<https://systemd.io/UIDS-GIDS/>). Two sessions that share one are still apart
/// by their namespaces.
pub const FIRST_UID: u32 = 0x7000_0000;
const UID_BITS: u32 = 28;

/// What this host cannot do, in plain words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refused {
    pub reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CreateError {
    /// Nothing was created, and trying again changes nothing until the host is changed.
    #[error(transparent)]
    Refused(Refused),
    /// Perhaps something was created; [`ProcessBackend::observe`] tells.
    #[error("the sandbox may or may not have been created: {0}")]
    Unsure(String),
}

/// What is known of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed {
    /// Its supervisor or its process 1 lives.
    Present(Identity),
    /// Both are gone and can never come back.
    Absent { proof: String },
    /// Nobody can tell. Never to be read as absent.
    Unknown { why: String },
    /// There is no trace of it on this host.
    NeverCreated,
}

#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    #[error("it is not gone: {0:?}")]
    NotGone(Observed),
    #[error("{path}: {source}")]
    Io {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("the removal did not finish")]
    Interrupted,
}

/// Sandboxes on this host.
#[derive(Debug)]
pub struct ProcessBackend {
    state_dir: PathBuf,
    supervisor: PathBuf,
    probes: check::Probes,
}

impl ProcessBackend {
    /// `state_dir` holds workspaces and sandboxes' folders, `supervisor` is the `towpath-supervisor` binary.
    pub fn new(state_dir: impl AsRef<Path>, supervisor: impl AsRef<Path>) -> io::Result<Self> {
        Ok(Self {
            state_dir: std::path::absolute(state_dir)?,
            supervisor: std::path::absolute(supervisor)?,
            probes: check::Probes::default(),
        })
    }

    fn folder(&self, run: RunId, epoch: i32) -> Folder {
        Folder::new(self.state_dir.join("sandboxes").join(format!("{run}.{epoch}")))
    }

    /// The user that a session's commands run as; None when this process cannot switch users and they run as itself.
    pub fn uid_for(&self, session: SessionId) -> Option<u32> {
        let low = session.uuid().as_u128() as u32 & ((1 << UID_BITS) - 1);
        rustix::process::geteuid().is_root().then_some(FIRST_UID | low)
    }

    /// The session's file tree, made when it is missing.
    pub fn workspace(&self, session: SessionId) -> io::Result<PathBuf> {
        let parent = self.state_dir.join("workspaces");
        make_passage(&parent)?;
        let path = parent.join(session.to_string());
        match fs::DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let meta = fs::symlink_metadata(&path)?;
        if !meta.is_dir() {
            return Err(io::Error::other(format!("{} is no folder", path.display())));
        }
        if let Some(uid) = self.uid_for(session)
            && meta.uid() != uid
        {
            std::os::unix::fs::lchown(&path, Some(uid), Some(uid))?;
        }
        Ok(path)
    }

    /// Every sandbox that has a folder on this host.
    pub async fn folders(&self) -> io::Result<Vec<(RunId, i32)>> {
        let path = self.state_dir.join("sandboxes");
        tokio::task::spawn_blocking(move || match fs::read_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
            Ok(entries) => {
                let named = |entry: io::Result<fs::DirEntry>| {
                    let name = entry?.file_name();
                    Ok(name
                        .to_str()
                        .and_then(|name| name.rsplit_once('.'))
                        .and_then(|(run, epoch)| Some((run.parse().ok()?, epoch.parse().ok()?))))
                };
                entries.map(named).filter_map(io::Result::transpose).collect()
            }
        })
        .await
        .map_err(io::Error::other)?
    }

    /// Removes a session's file tree; fine when there is none.
    pub async fn remove_workspace(&self, session: SessionId) -> io::Result<()> {
        let path = self.state_dir.join("workspaces").join(session.to_string());
        let removed = tokio::task::spawn_blocking(move || fs::remove_dir_all(path)).await.map_err(io::Error::other)?;
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// A folder that others may walk through to what is theirs, but not list.
fn make_passage(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o711).create(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o711))
}
