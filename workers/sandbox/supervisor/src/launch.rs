//! Starts the supervisor outside so that it outlives whoever asked for it, and tells whether it came up.
//!
//! The supervisor gets a session of its own and no parent that waits for it; the caller reaps only this short-lived process.

use std::{
    fs::OpenOptions,
    io::Read,
    os::unix::{fs::OpenOptionsExt, process::CommandExt},
    path::Path,
    process::{Command, ExitCode, Stdio},
};

use crate::{exit, folder::Folder};

/// What the supervisor writes on its stdout once it holds the lock and has recorded who it is.
pub const READY: &str = "ready\n";

pub fn run(dir: &Path) -> ExitCode {
    match start(dir) {
        Ok(code) => code,
        Err(error) => {
            crate::note!("the supervisor of {} cannot be started: {error}", dir.display());
            ExitCode::from(exit::FAILED)
        }
    }
}

fn start(dir: &Path) -> std::io::Result<ExitCode> {
    crate::sys::close_at_exec_from(3);
    let folder = Folder::new(dir);
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(folder.log())?;
    // A group of its own, so that a signal to the worker's group does not reach it before it has made itself a session.
    let mut child = Command::new("/proc/self/exe")
        .arg0("towpath-supervisor")
        .args(["outside", "--dir"])
        .arg(dir)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .process_group(0)
        .spawn()?;
    let mut said = String::new();
    if let Some(stdout) = child.stdout.as_mut() {
        stdout.take(READY.len() as u64).read_to_string(&mut said)?;
    }
    if said == READY {
        return Ok(ExitCode::SUCCESS);
    }
    let status = child.wait()?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).filter(|code| *code != 0).unwrap_or(exit::FAILED);
    crate::note!("the supervisor ended at once ({status}); {} tells more", folder.log().display());
    Ok(ExitCode::from(code))
}
