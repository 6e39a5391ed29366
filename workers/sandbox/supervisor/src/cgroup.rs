//! A cgroup of its own for each sandbox, by files: v1 (a folder below each controller) and v2 (one folder).

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

/// All sandboxes' cgroups are folders in this one.
pub const PARENT: &str = "towpath";
/// How long `kill` and `remove` try.
const KILL_WAIT: Duration = Duration::from_secs(10);

/// Where this host's controllers are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Controllers {
    pub memory: Option<PathBuf>,
    pub pids: Option<PathBuf>,
    /// Whether these are the one v2 tree.
    pub unified: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("cgroup {path}: {doing}")]
pub struct CgroupError {
    pub path: String,
    pub doing: &'static str,
    #[source]
    pub source: io::Error,
}

fn failed(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> CgroupError {
    let path = path.display().to_string();
    move |source| CgroupError { path, doing, source }
}

impl Controllers {
    /// Reads /proc/self/mountinfo. A v1 controller is preferred where both exist, because a controller is only ever in one of them.
    pub fn find() -> io::Result<Self> {
        let mut found = Self::default();
        let mut unified = None;
        for line in fs::read_to_string("/proc/self/mountinfo")?.lines() {
            let Some((mount, system)) = line.split_once(" - ") else { continue };
            let (Some(target), mut system) = (mount.split(' ').nth(4), system.split(' ')) else { continue };
            let (kind, options) = (system.next(), system.next_back().unwrap_or_default());
            let has = |name: &str| options.split(',').any(|option| option == name);
            match kind {
                Some("cgroup") if has("memory") => found.memory = Some(target.into()),
                Some("cgroup") if has("pids") => found.pids = Some(target.into()),
                Some("cgroup2") => unified = Some(PathBuf::from(target)),
                _ => {}
            }
        }
        if let Some(root) = unified.filter(|_| found.memory.is_none() && found.pids.is_none()) {
            let controllers = fs::read_to_string(root.join("cgroup.controllers"))?;
            let has = |name: &str| controllers.split_whitespace().any(|controller| controller == name);
            found.unified = true;
            found.memory = has("memory").then(|| root.clone());
            found.pids = has("pids").then_some(root);
        }
        Ok(found)
    }

    fn roots(&self) -> Vec<&PathBuf> {
        let mut roots: Vec<&PathBuf> = self.memory.iter().chain(&self.pids).collect();
        roots.dedup();
        roots
    }
}

/// A sandbox's cgroup.
#[derive(Debug, Clone)]
pub struct Cgroup {
    controllers: Controllers,
    /// Path below each controller, beginning with a slash.
    relative: String,
}

#[derive(Debug, Clone, Copy, Default)]
pub struct CgroupLimits {
    pub memory_bytes: Option<u64>,
    pub pids: Option<u64>,
}

impl Cgroup {
    /// The cgroup of that name, whether it exists or not.
    pub fn named(controllers: Controllers, name: &str) -> Self {
        Self { controllers, relative: format!("/{PARENT}/{name}") }
    }

    /// The cgroup of the sandbox with this folder.
    pub fn of_folder(controllers: Controllers, folder: &Path) -> Self {
        Self::named(controllers, &folder.file_name().map(|name| name.to_string_lossy()).unwrap_or_default())
    }

    /// The cgroup at the path that an identity holds; None for a path that cannot be one of ours.
    pub fn at(controllers: Controllers, relative: &str) -> Option<Self> {
        let name = relative.strip_prefix('/')?.strip_prefix(PARENT)?.strip_prefix('/')?;
        (!name.is_empty() && !name.contains('/') && name != "..").then(|| Self::named(controllers, name))
    }

    pub fn relative(&self) -> &str {
        &self.relative
    }

    fn folder_below(&self, root: &Path) -> PathBuf {
        root.join(self.relative.trim_start_matches('/'))
    }

    fn folders(&self) -> Vec<PathBuf> {
        self.controllers.roots().into_iter().map(|root| self.folder_below(root)).collect()
    }

    /// Creates it with its limits. A limit whose controller is missing is an error, never ignored.
    pub fn create(&self, limits: CgroupLimits) -> Result<(), CgroupError> {
        let roots = self.controllers.roots();
        if roots.is_empty() {
            return Err(failed(Path::new(&self.relative), "no memory or pids controller is mounted")(io::ErrorKind::NotFound.into()));
        }
        for root in roots {
            let parent = root.join(PARENT);
            fs::create_dir_all(&parent).map_err(failed(&parent, "create"))?;
            if self.controllers.unified {
                for folder in [root.as_path(), &parent] {
                    let file = folder.join("cgroup.subtree_control");
                    fs::write(&file, "+memory +pids").map_err(failed(&file, "hand the controllers down"))?;
                }
            }
            let folder = self.folder_below(root);
            fs::create_dir_all(&folder).map_err(failed(&folder, "create"))?;
        }
        if let Some(bytes) = limits.memory_bytes {
            self.limit_memory(bytes)?;
        }
        if let Some(pids) = limits.pids {
            self.set(self.controllers.pids.as_deref(), "pids.max", pids)?;
        }
        Ok(())
    }

    fn limit_memory(&self, bytes: u64) -> Result<(), CgroupError> {
        let memory = self.controllers.memory.as_deref();
        if self.controllers.unified {
            self.set(memory, "memory.max", bytes)?;
            self.set_if_there(memory, "memory.swap.max", 0)
        } else {
            self.set(memory, "memory.limit_in_bytes", bytes)?;
            self.set_if_there(memory, "memory.memsw.limit_in_bytes", bytes)
        }
    }

    fn set(&self, root: Option<&Path>, name: &str, value: u64) -> Result<(), CgroupError> {
        let root = root.ok_or_else(|| failed(Path::new(name), "the controller is not mounted")(io::ErrorKind::NotFound.into()))?;
        let file = self.folder_below(root).join(name);
        fs::write(&file, value.to_string()).map_err(failed(&file, "set the limit"))
    }

    /// Swap accounting is a boot option of the kernel; without it there is no file, and nothing to limit when the host has no swap.
    fn set_if_there(&self, root: Option<&Path>, name: &str, value: u64) -> Result<(), CgroupError> {
        match self.set(root, name, value) {
            Err(error) if error.source.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// The files that a process writes `0` to in order to join.
    pub fn join_files(&self) -> Vec<PathBuf> {
        self.folders().into_iter().map(|folder| folder.join("cgroup.procs")).collect()
    }

    /// How many processes the kernel killed here for want of memory; None when it cannot be known.
    pub fn oom_kills(&self) -> Option<u64> {
        let file = if self.controllers.unified { "memory.events" } else { "memory.oom_control" };
        let text = fs::read_to_string(self.folder_below(self.controllers.memory.as_deref()?).join(file)).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    }

    /// The processes in it. A folder that does not exist under a mounted controller holds none, because only an empty one can be removed.
    pub fn processes(&self) -> io::Result<Vec<i32>> {
        let roots = self.controllers.roots();
        if roots.is_empty() {
            return Err(io::Error::other("no memory or pids controller is mounted"));
        }
        let mut found = Vec::new();
        for root in roots {
            fs::metadata(root.join("cgroup.procs"))?;
            match fs::read_to_string(self.folder_below(root).join("cgroup.procs")) {
                Ok(text) => found.extend(text.lines().filter_map(|line| line.trim().parse::<i32>().ok())),
                Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV) => {}
                Err(error) => return Err(error),
            }
        }
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// KILL to everything in it until it is empty. Returns whether it is.
    pub fn kill(&self) -> io::Result<bool> {
        let until = Instant::now() + KILL_WAIT;
        loop {
            let processes = self.processes()?;
            if processes.is_empty() {
                return Ok(true);
            }
            if Instant::now() > until {
                return Ok(false);
            }
            let at_once =
                self.controllers.unified && self.folders().iter().all(|folder| fs::write(folder.join("cgroup.kill"), "1").is_ok());
            if !at_once {
                for pid in processes.into_iter().filter_map(Pid::from_raw) {
                    // It may have ended since; what remains is in the next list.
                    kill_process(pid, Signal::KILL).ok();
                }
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Removes it; a missing one is fine.
    pub fn remove(&self) -> io::Result<()> {
        for folder in self.folders() {
            let until = Instant::now() + KILL_WAIT;
            loop {
                match fs::remove_dir(&folder) {
                    Ok(()) => break,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                    // The last process may still be on its way out.
                    Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < until => {
                        thread::sleep(Duration::from_millis(5));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_folder_of_ours_is_taken_from_an_identity() {
        let at = |path| Cgroup::at(Controllers::default(), path).map(|cgroup| cgroup.relative);
        assert_eq!(at("/towpath/run_1.1").as_deref(), Some("/towpath/run_1.1"));
        for bad in ["/", "/towpath", "/towpath/", "/towpath/..", "/towpath/a/b", "/system.slice/x", "towpath/x"] {
            assert_eq!(at(bad), None, "{bad}");
        }
    }
}
