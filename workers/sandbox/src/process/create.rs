//! Creation, the same however often it is asked for.

use std::{
    fs, io,
    process::{Output, Stdio},
    time::Duration,
};

use tokio::{
    process::Command,
    task::spawn_blocking,
    time::{sleep, timeout},
};
use towpath_schemas::guest::SandboxSpec;
use towpath_supervisor::{
    exit,
    folder::{self, Folder},
};

use super::{CreateError, ProcessBackend, make_passage};

/// How long the supervisor may take to hold its lock and to have recorded who it is.
pub(super) const LAUNCH: Duration = Duration::from_secs(20);
/// Launches that may find the folder locked, and the wait between them.
const LAUNCHES: usize = 10;
const LOOKING: Duration = Duration::from_millis(50);

fn unsure(error: impl ToString) -> CreateError {
    CreateError::Unsure(error.to_string())
}

impl ProcessBackend {
    /// Creates the sandbox unless there is, or was, one for this run and epoch: then there is nothing more to create, and
    /// [`ProcessBackend::observe`] tells how it is.
    pub async fn create(&self, spec: &SandboxSpec) -> Result<(), CreateError> {
        self.check(&spec.walls).map_err(CreateError::Refused)?;
        make_passage(&self.state_dir.join("sandboxes")).map_err(unsure)?;
        let folder = self.folder(spec.run, spec.epoch);
        let (preparing, spec) = (folder.clone(), spec.clone());
        if !spawn_blocking(move || prepare(&preparing, &spec)).await.map_err(unsure)?.map_err(unsure)? {
            return Ok(());
        }
        self.launch(&folder).await
    }

    async fn launch(&self, folder: &Folder) -> Result<(), CreateError> {
        for _ in 0..LAUNCHES {
            let output = self.launch_once(folder).await?;
            match output.status.code().map(u8::try_from) {
                Some(Ok(0 | exit::SPENT)) => return Ok(()),
                // Another supervisor holds the lock, or somebody who only looks; the latter is over at once.
                Some(Ok(exit::HELD)) if folder.identity().exists() => return Ok(()),
                Some(Ok(exit::HELD)) => sleep(LOOKING).await,
                _ => return Err(unsure(format!("{} {}", String::from_utf8_lossy(&output.stderr).trim(), last_words(folder)))),
            }
        }
        Err(unsure("its folder stays locked, and no supervisor shows itself"))
    }

    async fn launch_once(&self, folder: &Folder) -> Result<Output, CreateError> {
        // Ends by itself as soon as the supervisor, which is no child of ours, is up; so it is always reaped here.
        let mut command = Command::new(&self.supervisor);
        command.args(["launch", "--dir"]).arg(folder.path()).env_clear().current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
        let child = command.spawn().map_err(unsure)?;
        timeout(LAUNCH, child.wait_with_output()).await.map_err(|_| unsure("the supervisor did not answer"))?.map_err(unsure)
    }
}

/// Whether a supervisor is to be launched.
fn prepare(folder: &Folder, spec: &SandboxSpec) -> io::Result<bool> {
    folder::make_private(folder.path())?;
    // Under the lock, so that no supervisor reads the order while it changes.
    let Some(_lock) = folder.try_lock()? else { return Ok(false) };
    for trace in [folder.gone(), folder.started(), folder.identity()] {
        if trace.try_exists()? {
            return Ok(false);
        }
    }
    folder::write_json(&folder.spec(), spec)?;
    Ok(true)
}

fn last_words(folder: &Folder) -> String {
    let log = fs::read_to_string(folder.log()).unwrap_or_default();
    log.lines().last().unwrap_or_default().to_owned()
}
