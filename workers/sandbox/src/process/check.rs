//! What this host can enforce, found by trying it. What it cannot refuses the agent with the reason; nothing is silently left out.

use std::{
    collections::HashMap,
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Command, Stdio},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use towpath_schemas::{agent::Isolation, guest::Walls};
use towpath_supervisor::{
    cgroup::{Cgroup, CgroupLimits, Controllers},
    outside::program,
};

use super::{FIRST_UID, ProcessBackend, Refused};

/// A wall that stood is not tried again for this long, one that did not for much less.
const GOOD_FOR: Duration = Duration::from_secs(600);
const BAD_FOR: Duration = Duration::from_secs(10);
/// Longest wait for a program that is tried.
const TRY: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Wall {
    Bubblewrap,
    Cgroup,
    Memory,
    Pids,
    Network,
}

/// When a wall was tried, and what came of it.
#[derive(Debug)]
struct Tried {
    at: Instant,
    result: Result<(), String>,
}

#[derive(Debug, Default)]
pub(super) struct Probes(Mutex<HashMap<Wall, Tried>>);

impl Probes {
    fn ask(&self, wall: Wall) -> Result<(), String> {
        let mut known = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(Tried { at, result }) = known.get(&wall)
            && at.elapsed() < if result.is_ok() { GOOD_FOR } else { BAD_FOR }
        {
            return result.clone();
        }
        let result = wall.attempt();
        known.insert(wall, Tried { at: Instant::now(), result: result.clone() });
        result
    }
}

impl ProcessBackend {
    /// Whether this host can put these walls up.
    pub fn check(&self, walls: &Walls) -> Result<(), Refused> {
        self.check_supervisor().and_then(|()| self.check_walls(walls)).map_err(|reason| Refused { reason })
    }

    fn check_supervisor(&self) -> Result<(), String> {
        let path = self.supervisor.display();
        match fs::metadata(&self.supervisor) {
            Ok(meta) if meta.is_file() && meta.permissions().mode() & 0o111 != 0 => Ok(()),
            Ok(_) => Err(format!("the supervisor {path} is not executable")),
            Err(error) => Err(format!("the supervisor {path} cannot be found: {error}")),
        }
    }

    fn check_walls(&self, walls: &Walls) -> Result<(), String> {
        match walls.isolation {
            Isolation::Bubblewrap => self.probes.ask(Wall::Bubblewrap)?,
            // Its cgroup is the only proof that everything without walls has ended.
            Isolation::None => {
                self.probes.ask(Wall::Cgroup)?;
                self.check_passage()?;
            }
        }
        if walls.memory_bytes.is_some() {
            self.probes.ask(Wall::Memory)?;
        }
        if walls.pids.is_some() {
            self.probes.ask(Wall::Pids)?;
        }
        if walls.egress && walls.isolation == Isolation::Bubblewrap {
            self.probes.ask(Wall::Network)?;
        }
        Ok(())
    }

    /// Without isolation a command of another user walks the host's own paths.
    fn check_passage(&self) -> Result<(), String> {
        if !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        for folder in self.state_dir.ancestors() {
            let closed = fs::metadata(folder).is_ok_and(|meta| meta.permissions().mode() & 0o001 == 0);
            if closed {
                let (state, folder) = (self.state_dir.display(), folder.display());
                return Err(format!(
                    "isolation = \"none\" needs a way to {state} for an unprivileged user, and {folder} is closed to others"
                ));
            }
        }
        Ok(())
    }
}

impl Wall {
    fn attempt(self) -> Result<(), String> {
        match self {
            Wall::Bubblewrap => bubblewrap(),
            Wall::Cgroup => cgroup("isolation = \"none\"", CgroupLimits::default()),
            Wall::Memory => cgroup("memory_bytes", CgroupLimits { memory_bytes: Some(64 * 1024 * 1024), pids: None }),
            Wall::Pids => cgroup("pids", CgroupLimits { memory_bytes: None, pids: Some(64) }),
            Wall::Network => network(),
        }
    }
}

fn bubblewrap() -> Result<(), String> {
    let path = program("bwrap").ok_or("bubblewrap is not installed: install the package `bubblewrap`, or write isolation = \"none\"")?;
    let mut command = Command::new(path);
    command.args(["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000", "--ro-bind", "/usr", "/usr"]);
    for name in ["bin", "lib", "lib64"] {
        let link = format!("/{name}");
        match fs::read_link(&link) {
            Ok(target) => command.arg("--symlink").arg(target).arg(&link),
            Err(_) => command.args(["--ro-bind-try", &link, &link]),
        };
    }
    command.args(["--proc", "/proc", "--dev", "/dev", "/usr/bin/true"]);
    if rustix::process::geteuid().is_root() {
        // Also gives up the supplementary groups.
        command.uid(FIRST_UID).gid(FIRST_UID);
    }
    attempt(command.env_clear().current_dir("/"))
        .map_err(|why| format!("bubblewrap cannot make its walls here (are user namespaces allowed?): {why}"))
}

fn attempt(command: &mut Command) -> Result<(), String> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
    let until = Instant::now() + TRY;
    loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => {
                let mut said = Vec::new();
                if let Some(stderr) = child.stderr.take() {
                    std::io::Read::read_to_end(&mut std::io::Read::take(stderr, 4096), &mut said).map_err(|error| error.to_string())?;
                }
                return Err(format!("{} ({status})", String::from_utf8_lossy(&said).trim()));
            }
            None if Instant::now() > until => {
                child.kill().and_then(|()| child.wait()).map_err(|error| error.to_string())?;
                return Err(format!("no answer within {} s", TRY.as_secs()));
            }
            None => thread::sleep(Duration::from_millis(2)),
        }
    }
}

fn cgroup(key: &str, limits: CgroupLimits) -> Result<(), String> {
    let controllers = Controllers::find().map_err(|error| format!("{key} needs cgroups, and they cannot be found: {error}"))?;
    let cgroup = Cgroup::named(controllers, &format!("probe-{}", std::process::id()));
    let made = cgroup.create(limits);
    let removed = cgroup.remove();
    made.map_err(|error| format!("{key} needs a cgroup that this process may make: {error}: {}", error.source))?;
    removed.map_err(|error| format!("{key} needs a cgroup that this process may remove: {error}"))
}

fn network() -> Result<(), String> {
    program("slirp4netns").ok_or("egress needs slirp4netns: install the package `slirp4netns`")?;
    fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(Path::new("/dev/net/tun"))
        .map_err(|error| format!("egress needs /dev/net/tun: {error}"))?;
    Ok(())
}
