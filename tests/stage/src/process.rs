//! One server process: started, watched and ended by its pid and nothing else.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Mutex,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::keeper;

const POLL: Duration = Duration::from_millis(5);
const KILL_DEADLINE: Duration = Duration::from_secs(10);
const LOG_TAIL_BYTES: usize = 4000;

/// A process that can be told from every other one: a pid alone may have been given to another since.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub pid: i32,
    /// Start time in clock ticks since boot: field 22 of proc_pid_stat(5).
    pub start_ticks: u64,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot: String,
}

struct Stat {
    state: char,
    parent: i32,
    start_ticks: u64,
}

fn stat(pid: i32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    Some(Stat { state: fields.first()?.chars().next()?, parent: fields.get(1)?.parse().ok()?, start_ticks: fields.get(19)?.parse().ok()? })
}

fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

impl Identity {
    fn of(pid: i32) -> Option<Self> {
        Some(Self { pid, start_ticks: stat(pid)?.start_ticks, boot: boot() })
    }

    /// Whether this very process still runs; one that waits to be reaped does not.
    pub fn alive(&self) -> bool {
        stat(self.pid).is_some_and(|now| now.start_ticks == self.start_ticks && !matches!(now.state, 'Z' | 'X')) && boot() == self.boot
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.pid).filter(|_| self.alive()) {
            // It may end between the look and the signal: then there is nothing left to do.
            kill_process(pid, signal).ok();
        }
    }

    /// Itself and all that it started, at any depth.
    fn family(&self) -> Vec<Identity> {
        let all: Vec<(i32, Stat)> = fs::read_dir("/proc")
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter_map(|pid| Some((pid, stat(pid)?)))
            .collect();
        let mut family = vec![self.clone()];
        let mut next = 0;
        while let Some(parent) = family.get(next).map(|member| member.pid) {
            let children = all.iter().filter(|(_, stat)| stat.parent == parent);
            family.extend(children.map(|(pid, stat)| Identity { pid: *pid, start_ticks: stat.start_ticks, boot: self.boot.clone() }));
            next += 1;
        }
        family
    }
}

/// Where one server's process lives, started or not.
pub(crate) struct Slot {
    pub name: &'static str,
    log: PathBuf,
    /// Outlives this process, in a process group of its own.
    detached: bool,
    process: Mutex<Option<(Identity, Option<Child>)>>,
}

impl Slot {
    pub fn new(name: &'static str, log: PathBuf, detached: bool, running: Option<Identity>) -> Self {
        Self { name, log, detached, process: Mutex::new(running.filter(Identity::alive).map(|identity| (identity, None))) }
    }

    pub fn identity(&self) -> Option<Identity> {
        self.process.lock().expect("slot").as_ref().map(|(identity, _)| identity.clone())
    }

    pub fn alive(&self) -> bool {
        self.identity().is_some_and(|identity| identity.alive())
    }

    /// Starts the command with its output appended to the log.
    pub fn spawn(&self, mut command: Command) -> Result<()> {
        let log = File::options().create(true).append(true).open(&self.log).with_context(|| format!("open {}", self.log.display()))?;
        if self.detached {
            command.process_group(0);
        } else {
            command = dying_with_us(&command);
        }
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = keeper::spawn(command).with_context(|| format!("start {}", self.name))?;
        let pid = i32::try_from(child.id())?;
        let identity = Identity::of(pid).with_context(|| format!("{} ended at once", self.name))?;
        *self.process.lock().expect("slot") = Some((identity, Some(child)));
        Ok(())
    }

    /// An error with the log's tail when the process is no longer there.
    pub fn check(&self) -> Result<()> {
        self.reap();
        if !self.alive() {
            bail!("{} ended while it started{}", self.name, self.log_tail());
        }
        Ok(())
    }

    /// SIGKILL to the server and to every process it started, and waits until they are gone.
    pub fn kill9(&self) -> Result<()> {
        let Some(identity) = self.identity() else { return Ok(()) };
        identity.signal(Signal::STOP);
        let family = identity.family();
        for member in &family {
            member.signal(Signal::KILL);
        }
        let began = Instant::now();
        while family.iter().any(Identity::alive) {
            if began.elapsed() > KILL_DEADLINE {
                bail!("{} (pid {}) survives SIGKILL", self.name, identity.pid);
            }
            self.reap();
            std::thread::sleep(POLL);
        }
        self.forget();
        Ok(())
    }

    /// Asks the server to end; SIGKILL after the deadline.
    pub async fn stop(&self, signal: Signal, deadline: Duration) -> Result<()> {
        let Some(identity) = self.identity() else { return Ok(()) };
        identity.signal(signal);
        let began = Instant::now();
        while identity.alive() {
            if began.elapsed() > deadline {
                return self.kill9();
            }
            self.reap();
            tokio::time::sleep(POLL).await;
        }
        self.forget();
        Ok(())
    }

    /// The end of the server's log, for error messages.
    pub fn log_tail(&self) -> String {
        let bytes = fs::read(&self.log).unwrap_or_default();
        let tail = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(LOG_TAIL_BYTES)..]).into_owned();
        format!("\n--- end of {} ---\n{}", self.log.display(), tail.trim_end())
    }

    fn reap(&self) {
        if let Some((_, Some(child))) = self.process.lock().expect("slot").as_mut() {
            child.try_wait().ok();
        }
    }

    fn forget(&self) {
        self.reap();
        *self.process.lock().expect("slot") = None;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if !self.detached
            && let Err(error) = self.kill9()
        {
            eprintln!("stage: {error:#}");
        }
    }
}

/// The same command behind `setpriv --pdeathsig KILL`, which execs it: same pid, and the kernel ends it when this process ends in any way.
fn dying_with_us(command: &Command) -> Command {
    let mut wrapped = Command::new("setpriv");
    let already_setpriv = Path::new(command.get_program()).file_name().is_some_and(|name| name == "setpriv");
    wrapped.args(["--pdeathsig", "KILL"]);
    if !already_setpriv {
        wrapped.arg("--").arg(command.get_program());
    }
    wrapped.args(command.get_args());
    for (key, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(key, value),
            None => wrapped.env_remove(key),
        };
    }
    if let Some(dir) = command.get_current_dir() {
        wrapped.current_dir(dir);
    }
    wrapped
}
