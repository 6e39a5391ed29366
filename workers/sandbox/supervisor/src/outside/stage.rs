//! Input files: fetched in pieces, written under `/workspace/files`, listed in the manifest.
//!
//! The workspace belongs to the agent, so nothing in it is trusted: every step goes through an open folder, no link is followed, no existing
//! file is written into.

use std::{
    cell::RefCell,
    collections::BTreeSet,
    fs::File,
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{AtFlags, Gid, Mode, OFlags, Uid, fchmod, fchown, mkdirat, openat, renameat, unlinkat},
    io::Errno,
};
use serde::Serialize;
use towpath_schemas::{guest::InputFile, limit::FILE_NAME_BYTES, limit::FILE_PIECE_BYTES};

use super::{desk::Desk, disk};

const FOLDER: &str = "files";
pub const MANIFEST: &str = "attachments.json";

/// One entry of the manifest.
#[derive(Debug, Clone, Serialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Staged {
    pub name: String,
    /// As the agent sees it; absent when the file is not there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    pub media_type: String,
    pub size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

pub struct Inputs {
    files: OwnedFd,
    control: OwnedFd,
    /// The folder's path as the agent sees it.
    shown: String,
    manifest: RefCell<Vec<Staged>>,
    taken: RefCell<BTreeSet<String>>,
}

fn open_folder(at: impl AsFd, name: &str) -> rustix::io::Result<OwnedFd> {
    openat(at, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Opens `name` below a folder of the agent's, making it when it is missing and taking the place of anything that is no folder.
pub fn own_folder(at: impl AsFd, name: &str, owner: Option<u32>) -> io::Result<OwnedFd> {
    let at = at.as_fd();
    let folder = match open_folder(at, name) {
        Err(Errno::NOENT) => None,
        Err(Errno::LOOP | Errno::NOTDIR) => {
            unlinkat(at, name, AtFlags::empty())?;
            None
        }
        other => Some(other?),
    };
    let folder = match folder {
        Some(folder) => folder,
        None => {
            mkdirat(at, name, Mode::from_raw_mode(0o755))?;
            open_folder(at, name)?
        }
    };
    if rustix::process::geteuid().is_root() {
        let owner = owner.unwrap_or(0);
        fchown(&folder, Some(Uid::from_raw(owner)), Some(Gid::from_raw(owner)))?;
    }
    fchmod(&folder, Mode::from_raw_mode(0o755))?;
    Ok(folder)
}

impl Inputs {
    pub fn open(workspace: &Path, control: &Path, shown: String) -> io::Result<Self> {
        let workspace = open_folder(rustix::fs::CWD, &workspace.to_string_lossy())?;
        let files = own_folder(&workspace, FOLDER, None)?;
        let control = open_folder(rustix::fs::CWD, &control.to_string_lossy())?;
        Ok(Self { files, control, shown, manifest: RefCell::default(), taken: RefCell::default() })
    }

    /// Stages them one after the other. One that cannot be had is listed with its reason, and the rest goes on.
    pub async fn stage(&self, desk: &Desk, files: &[InputFile]) -> Vec<Staged> {
        let mut entries = Vec::with_capacity(files.len());
        for file in files {
            let mut entry = Staged {
                name: file.name.clone(),
                path: None,
                media_type: file.media_type.clone(),
                size: file.size,
                status: None,
                reason: None,
            };
            match self.stage_one(desk, file).await {
                Ok(name) => {
                    entry.path = Some(format!("{}/{name}", self.shown));
                    entry.name = name;
                }
                Err(reason) => {
                    crate::note!("input {} is unavailable: {reason}", file.file);
                    desk.step("inputs", Some(format!("{} is unavailable: {reason}", file.name)));
                    (entry.status, entry.reason) = (Some("unavailable"), Some(reason));
                }
            }
            entries.push(entry);
        }
        self.manifest.borrow_mut().extend(entries.iter().cloned());
        if let Err(error) = disk::patiently(desk, || self.write_manifest()).await {
            crate::note!("the manifest cannot be written: {error}");
        }
        entries
    }

    async fn stage_one(&self, desk: &Desk, input: &InputFile) -> Result<String, String> {
        if !is_one_component(&input.name) {
            return Err("its name is not safe as a file name".to_owned());
        }
        let name = self.free_name(&input.name);
        let mut file = create(&self.files, &name).map_err(|error| error.to_string())?;
        match fetch(desk, input, &mut file).await {
            Ok(()) => Ok(name),
            Err(reason) => {
                unlinkat(&self.files, &*name, AtFlags::empty())
                    .map_err(|error| format!("{reason}; and what was written stays: {error}"))?;
                Err(reason)
            }
        }
    }

    /// The wanted name, or one with a number when this run has already put a file there.
    fn free_name(&self, wanted: &str) -> String {
        let mut taken = self.taken.borrow_mut();
        let (stem, extension) = match wanted.rfind('.') {
            Some(at) if at > 0 => wanted.split_at(at),
            _ => (wanted, ""),
        };
        let mut name = wanted.to_owned();
        let mut number = 1;
        while !taken.insert(name.clone()) {
            number += 1;
            name = format!("{stem}-{number}{extension}");
        }
        name
    }

    fn write_manifest(&self) -> io::Result<()> {
        let temporary = ".attachments.json.new";
        let bytes = serde_json::to_vec_pretty(&*self.manifest.borrow())?;
        create(&self.control, temporary)?.write_all(&bytes)?;
        Ok(renameat(&self.control, temporary, &self.control, MANIFEST)?)
    }
}

/// Puts outputs back below the workspace's `outputs`; those that could not be had, and why.
pub async fn restore(desk: &Desk, workspace: &Path, owner: Option<u32>, files: &[InputFile]) -> Vec<(String, String)> {
    let mut failed = Vec::new();
    for file in files {
        if let Err(reason) = restore_one(desk, workspace, owner, file).await {
            crate::note!("output {} is not restored: {reason}", file.name);
            failed.push((file.name.clone(), reason));
        }
    }
    failed
}

async fn restore_one(desk: &Desk, workspace: &Path, owner: Option<u32>, output: &InputFile) -> Result<(), String> {
    let told = |error: &dyn std::fmt::Display| error.to_string();
    let mut parts: Vec<&str> = output.name.split('/').collect();
    if !parts.iter().all(|part| is_one_component(part)) {
        return Err("its name leaves the folder".to_owned());
    }
    let name = parts.pop().unwrap_or_default();
    let mut folder = open_folder(rustix::fs::CWD, &workspace.to_string_lossy()).map_err(|error| told(&error))?;
    for part in std::iter::once("outputs").chain(parts) {
        folder = own_folder(&folder, part, owner).map_err(|error| told(&error))?;
    }
    let mut file = create(&folder, name).map_err(|error| told(&error))?;
    if let Err(reason) = fetch(desk, output, &mut file).await {
        unlinkat(&folder, name, AtFlags::empty()).map_err(|error| format!("{reason}; and what was written stays: {error}"))?;
        return Err(reason);
    }
    // It is the agent's own, to be changed.
    fchmod(&file, Mode::from_raw_mode(0o644)).map_err(|error| told(&error))?;
    if rustix::process::geteuid().is_root() {
        let owner = owner.unwrap_or(0);
        fchown(&file, Some(Uid::from_raw(owner)), Some(Gid::from_raw(owner))).map_err(|error| told(&error))?;
    }
    Ok(())
}

fn is_one_component(name: &str) -> bool {
    !name.is_empty() && name.len() <= FILE_NAME_BYTES && !name.contains(['/', '\0']) && name != "." && name != ".."
}

/// A new read-only file in the place of whatever stood there.
fn create(folder: &OwnedFd, name: &str) -> io::Result<File> {
    match unlinkat(folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(folder, name, flags, Mode::from_raw_mode(0o444))?;
    // Whatever the umask took away.
    fchmod(&file, Mode::from_raw_mode(0o444))?;
    Ok(file.into())
}

async fn fetch(desk: &Desk, input: &InputFile, file: &mut File) -> Result<(), String> {
    let mut offset = 0;
    loop {
        let piece = desk.read_file(input.file, offset, FILE_PIECE_BYTES as u32).await?;
        file.write_all(&piece).map_err(|error| error.to_string())?;
        offset += piece.len() as u64;
        if offset > input.size {
            return Err(format!("it is longer than the {} bytes that were announced", input.size));
        }
        if piece.len() < FILE_PIECE_BYTES {
            break;
        }
    }
    if offset < input.size {
        return Err(format!("only {offset} of its {} bytes came", input.size));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_left_in_the_place_of_the_folder_is_replaced_and_not_followed() {
        let world = tempfile::tempdir().expect("folder");
        let (workspace, control, elsewhere) = (world.path().join("w"), world.path().join("c"), world.path().join("elsewhere"));
        for folder in [&workspace, &control, &elsewhere] {
            std::fs::create_dir(folder).expect("folder");
        }
        std::os::unix::fs::symlink(&elsewhere, workspace.join(FOLDER)).expect("link");
        let inputs = Inputs::open(&workspace, &control, "/workspace/files".to_owned()).expect("inputs");
        std::os::unix::fs::symlink(elsewhere.join("target"), workspace.join(FOLDER).join("a.txt")).expect("link");
        create(&inputs.files, "a.txt").expect("create").write_all(b"x").expect("write");
        assert_eq!(std::fs::read_dir(&elsewhere).expect("folder").count(), 0);
        assert!(std::fs::symlink_metadata(workspace.join(FOLDER).join("a.txt")).expect("file").is_file());
    }

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        for bad in ["", ".", "..", "a/b", "/etc/passwd", "a\0b"] {
            assert!(!is_one_component(bad), "{bad:?}");
        }
        assert!(is_one_component("..a b.tar.gz"));
    }
}
