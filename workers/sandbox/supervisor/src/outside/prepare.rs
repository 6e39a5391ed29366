//! What the command finds: its control files, its users file, its environment.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use towpath_schemas::{
    agent::Isolation,
    guest::{SandboxSpec, StartOrder},
    limit::ENV_VALUE_BYTES,
};

use super::{fifo::Fifo, net, result, stage};
use crate::{
    folder::Folder,
    wall::{INSIDE_CONTROL, INSIDE_ID, INSIDE_WORKSPACE},
};

const TASK: &str = "task.txt";
const SYSTEM_PROMPT: &str = "system_prompt.txt";
const STEER: &str = "steer";
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Where the command sees what.
pub struct Places {
    pub workspace: String,
    pub control: String,
}

impl Places {
    pub fn of(spec: &SandboxSpec, folder: &Folder) -> Self {
        match spec.walls.isolation {
            Isolation::Bubblewrap => Self { workspace: INSIDE_WORKSPACE.to_owned(), control: INSIDE_CONTROL.to_owned() },
            Isolation::None => Self { workspace: spec.workspace.clone(), control: folder.control().to_string_lossy().into_owned() },
        }
    }

    pub fn files(&self) -> String {
        format!("{}/files", self.workspace)
    }
}

/// Makes the control folder with the task files, and the steering FIFO in it.
pub fn control_folder(folder: &Folder, spec: &SandboxSpec, order: &StartOrder) -> io::Result<Fifo> {
    let control = folder.control();
    begin_anew(&control)?;
    fs::DirBuilder::new().mode(0o700).create(&control)?;
    for (name, text) in [(TASK, &order.prompt), (SYSTEM_PROMPT, &order.instructions), (stage::MANIFEST, &"[]".to_owned())] {
        read_only(&control.join(name), text)?;
    }
    let fifo = Fifo::create(&control.join(STEER), spec.walls.uid)?;
    super::give_to(&control, spec.walls.uid)?;
    if spec.walls.isolation == Isolation::None && spec.walls.uid.is_some() {
        // The command has to walk through to its control folder; it cannot list, and everything else here is its owner's alone.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o711))?;
    }
    Ok(fifo)
}

/// The files of /etc that are made for the sandbox.
pub fn etc_folder(path: &Path, egress: bool) -> io::Result<()> {
    begin_anew(path)?;
    fs::DirBuilder::new().recursive(true).mode(0o755).create(path)?;
    // Whatever the umask took away: bubblewrap reads it as the unprivileged user.
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    let id = INSIDE_ID;
    let mut files = vec![
        (
            "passwd",
            format!(
                "root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:{id}:{id}:agent:{INSIDE_WORKSPACE}:/bin/sh\n\
                 nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
            ),
        ),
        ("group", format!("root:x:0:\nagent:x:{id}:\nnogroup:x:65534:\n")),
        ("hosts", "127.0.0.1 localhost towpath\n::1 localhost\n".to_owned()),
        ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n".to_owned()),
    ];
    if egress {
        files.push(("resolv.conf", format!("nameserver {}\n", net::NAME_SERVER)));
    }
    for (name, text) in files {
        read_only(&path.join(name), &text)?;
    }
    Ok(())
}

/// Removes what an attempt before this one left, as on a full disk.
fn begin_anew(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn read_only(path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().create_new(true).write(true).mode(0o444).open(path)?;
    file.set_permissions(fs::Permissions::from_mode(0o444))?;
    file.write_all(text.as_bytes())
}

/// The whole environment of the command.
pub fn environment(order: &StartOrder, places: &Places) -> Vec<(String, String)> {
    let Places { workspace, control } = places;
    let below = |name: &str| format!("{control}/{name}");
    let mut all: BTreeMap<&str, String> = BTreeMap::from([
        ("PATH", PATH.to_owned()),
        ("HOME", workspace.clone()),
        ("USER", "agent".to_owned()),
        ("LOGNAME", "agent".to_owned()),
        ("SHELL", "/bin/sh".to_owned()),
        ("LANG", "C.UTF-8".to_owned()),
        ("TERM", "xterm-256color".to_owned()),
    ]);
    all.extend(order.env.iter().map(|(key, value)| (key.as_str(), value.clone())));
    all.extend([
        ("TOWPATH_RUN_ID", order.run.to_string()),
        ("TOWPATH_SESSION_ID", order.session.to_string()),
        ("TOWPATH_EPOCH", order.epoch.to_string()),
        ("TOWPATH_AGENT", order.agent.clone()),
        ("TOWPATH_TASK_FILE", below(TASK)),
        ("TOWPATH_SYSTEM_PROMPT_FILE", below(SYSTEM_PROMPT)),
        ("TOWPATH_MODE", order.mode.clone()),
        ("TOWPATH_WORKSPACE", workspace.clone()),
        ("TOWPATH_STEER_FIFO", below(STEER)),
        ("TOWPATH_ATTACHMENTS_DIR", places.files()),
        ("TOWPATH_ATTACHMENTS_MANIFEST", below(stage::MANIFEST)),
        ("TOWPATH_OUTPUTS_DIR", format!("{workspace}/outputs")),
        ("TOWPATH_RESULT_FILE", below(result::FILE)),
        ("TOWPATH_IDLE_TIMEOUT_SECONDS", order.idle_s.unwrap_or(0).to_string()),
    ]);
    // Linux allows 128 KiB for one value; longer texts are in the files only.
    for (name, text) in [("TOWPATH_TASK", &order.prompt), ("TOWPATH_SYSTEM_PROMPT", &order.instructions)] {
        if text.len() <= ENV_VALUE_BYTES {
            all.insert(name, text.clone());
        }
    }
    all.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// The first file of that name in the folders where programs of the system are.
pub fn program(name: &str) -> Option<PathBuf> {
    PATH.split(':').map(|folder| Path::new(folder).join(name)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_an_earlier_attempt_left_half_made_is_made_anew() {
        let root = tempfile::tempdir().expect("folder");
        let etc = root.path().join("etc");
        fs::create_dir(&etc).expect("etc");
        fs::write(etc.join("passwd"), "").expect("what was left");
        etc_folder(&etc, false).expect("made anew");
        assert!(fs::read_to_string(etc.join("passwd")).expect("passwd").contains("agent"));
    }
}
