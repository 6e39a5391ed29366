//! Gone or not: the rule of the design for `process`, and what may be done once it is gone.

use std::{fs, io, time::Duration};

use tokio::task::spawn_blocking;
use towpath_schemas::{
    agent::Isolation,
    guest::{Identity, SandboxSpec},
    id::RunId,
};
use towpath_supervisor::{
    cgroup::{Cgroup, Controllers},
    folder::{self, Folder, IdentityRecord},
    host::{self, Alive},
};

use super::{Observed, ProcessBackend, RemoveError, create::LAUNCH};

/// A folder without a supervisor that is younger than this is being created. Longer than a launch may take.
const BEING_CREATED: Duration = LAUNCH.saturating_mul(2);

fn unknown(why: impl ToString) -> Observed {
    Observed::Unknown { why: why.to_string() }
}

impl ProcessBackend {
    pub async fn observe(&self, run: RunId, epoch: i32) -> Observed {
        let folder = self.folder(run, epoch);
        match spawn_blocking(move || observe(&folder)).await {
            Ok(Ok(observed)) => observed,
            Ok(Err(error)) => unknown(error),
            Err(error) => unknown(error),
        }
    }

    /// Removes what is left of a sandbox that is gone. Fine when nothing is left.
    pub async fn remove(&self, run: RunId, epoch: i32) -> Result<(), RemoveError> {
        match self.observe(run, epoch).await {
            Observed::NeverCreated | Observed::Absent { .. } => {}
            there => return Err(RemoveError::NotGone(there)),
        }
        let folder = self.folder(run, epoch);
        let path = folder.path().display().to_string();
        let removed = spawn_blocking(move || remove(&folder)).await.map_err(|_| RemoveError::Interrupted)?;
        removed.map_err(|source| RemoveError::Io { path, source })
    }
}

fn observe(folder: &Folder) -> io::Result<Observed> {
    if !folder.path().try_exists()? {
        return Ok(Observed::NeverCreated);
    }
    if let Ok(proof) = fs::read_to_string(folder.gone()) {
        return Ok(Observed::Absent { proof });
    }
    // Held for the rest of this look: no supervisor can come up while it is judged.
    let lock = folder.try_lock()?;
    let record: Option<IdentityRecord> = folder::read_json(&folder.identity())?;
    let Some(_lock) = lock else {
        return Ok(record.map_or_else(|| unknown("it is being created"), |record| Observed::Present(record.identity)));
    };
    let judged = match record {
        Some(record) => judge(folder, &record)?,
        None => judge_unborn(folder)?,
    };
    if let Observed::Absent { proof } = &judged {
        folder::write_durably(&folder.gone(), proof.as_bytes())?;
    }
    Ok(judged)
}

/// No supervisor ever recorded itself here, and none holds the lock.
fn judge_unborn(folder: &Folder) -> io::Result<Observed> {
    match fs::metadata(folder.spec()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Observed::NeverCreated),
        Err(error) => Err(error),
        Ok(meta) => match meta.modified()?.elapsed() {
            Ok(age) if age > BEING_CREATED => Ok(Observed::Absent { proof: "no supervisor ever came up".to_owned() }),
            Ok(_) => Ok(unknown("it is being created")),
            // The clock went back; it will pass that moment again.
            Err(_) => Ok(unknown("its order is dated in the future")),
        },
    }
}

/// The supervisor does not hold its lock any more.
fn judge(folder: &Folder, record: &IdentityRecord) -> io::Result<Observed> {
    let identity = &record.identity;
    let boot_id = host::boot_id()?;
    if identity.boot_id != boot_id {
        return Ok(Observed::Absent { proof: format!("it ran in boot {}, this is boot {boot_id}", identity.boot_id) });
    }
    if record.numbers_in != host::pid_namespace("self")? {
        return Ok(unknown("its process numbers are those of another PID namespace; run the worker on the host itself"));
    }
    let supervisor = match host::alive(identity.supervisor_pid, identity.supervisor_start) {
        Alive::Yes => return Ok(Observed::Present(identity.clone())),
        Alive::Unknown(why) => return Ok(unknown(why)),
        Alive::No(proof) => proof,
    };
    let (Some(init), Some(start)) = (identity.init_pid, identity.init_start) else {
        if !clear(folder)? {
            return Ok(unknown("walls that were being raised are still there after KILL"));
        }
        return Ok(Observed::Absent {
            proof: format!("supervisor: {supervisor}; no process 1 was recorded, so the command was never started"),
        });
    };
    match host::alive(init, start) {
        Alive::Yes => Ok(Observed::Present(identity.clone())),
        Alive::Unknown(why) => Ok(unknown(why)),
        Alive::No(inside) => judge_rest(folder, identity, format!("supervisor: {supervisor}; process 1: {inside}")),
    }
}

/// Ends what a supervisor left that died while it raised the walls. Returns whether nothing is there any more.
fn clear(folder: &Folder) -> io::Result<bool> {
    let controllers = Controllers::find()?;
    Ok(controllers == Controllers::default() || Cgroup::of_folder(controllers, folder.path()).kill()?)
}

/// Process 1 is dead. Its namespace died with it; without isolation there is none, and only an empty cgroup tells.
fn judge_rest(folder: &Folder, identity: &Identity, proof: String) -> io::Result<Observed> {
    let spec: SandboxSpec = folder::read_json(&folder.spec())?.ok_or_else(|| io::Error::other("its spec.json is missing"))?;
    match spec.walls.isolation {
        Isolation::Bubblewrap => Ok(Observed::Absent { proof }),
        Isolation::None => {
            let cgroup =
                cgroup_of(identity)?.ok_or_else(|| io::Error::other("without isolation only a cgroup could tell, and none is recorded"))?;
            match cgroup.processes()?.len() {
                0 => Ok(Observed::Absent { proof: format!("{proof}; cgroup {} is empty", cgroup.relative()) }),
                _ => Ok(Observed::Present(identity.clone())),
            }
        }
    }
}

fn cgroup_of(identity: &Identity) -> io::Result<Option<Cgroup>> {
    let controllers = Controllers::find()?;
    Ok(identity.cgroup.as_deref().and_then(|relative| Cgroup::at(controllers, relative)))
}

fn remove(folder: &Folder) -> io::Result<()> {
    // By its name, because a supervisor that died early has made it and recorded nothing.
    Cgroup::of_folder(Controllers::find()?, folder.path()).remove()?;
    match fs::remove_dir_all(folder.path()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
