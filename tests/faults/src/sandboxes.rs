//! Sandboxes that are only pretended: folders that tell the host what it would see if they were there.

use std::{fs, time::Duration};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use towpath_journeys::supervisors;
use towpath_schemas::{guest::Identity, id::RunId};
use towpath_supervisor::{
    folder::{self, Folder, IdentityRecord},
    host,
};

use crate::World;

/// How long a killed supervisor may take to be gone.
const SOON: Duration = Duration::from_secs(20);

impl World {
    fn folder(&self, run: RunId, epoch: i32) -> Folder {
        Folder::new(self.state.join("sandboxes").join(format!("{run}.{epoch}")))
    }

    /// From now on the host sees the sandbox alive: this very process stands in for its supervisor.
    pub fn pretend(&self, run: RunId, epoch: i32) -> Result<Identity> {
        let identity = identity()?;
        let folder = self.folder(run, epoch);
        fs::create_dir_all(folder.path())?;
        folder::write_json(&folder.identity(), &IdentityRecord { identity: identity.clone(), numbers_in: host::pid_namespace("self")? })?;
        Ok(identity)
    }

    /// From now on the host has proof that the sandbox is gone.
    pub fn vanish(&self, run: RunId, epoch: i32) -> Result<()> {
        let folder = self.folder(run, epoch);
        fs::create_dir_all(folder.path())?;
        folder::write_durably(&folder.gone(), b"it was pretended")?;
        Ok(())
    }

    /// Supervisors that really run.
    pub fn supervisors(&self) -> usize {
        supervisors(&self.state).len()
    }

    /// Kills the supervisors of this world, and waits until they are gone.
    pub async fn end_supervisors(&self) -> Result<()> {
        for pid in supervisors(&self.state) {
            if let Some(pid) = Pid::from_raw(pid) {
                // It may have left meanwhile.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        stage::wait_for("supervisors to be gone", SOON, async || supervisors(&self.state).is_empty().then_some(())).await
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for pid in supervisors(&self.state) {
            if let Some(pid) = Pid::from_raw(pid) {
                // It may have left meanwhile.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// Who this process is, as a supervisor would say it.
fn identity() -> Result<Identity> {
    let own = i32::try_from(std::process::id())?;
    let stat = host::process_stat(own)?.context("this process has no stat")?;
    ensure!(stat.start > 0, "a process starts after its host");
    Ok(Identity { boot_id: host::boot_id()?, supervisor_pid: own, supervisor_start: stat.start, ..Identity::default() })
}
