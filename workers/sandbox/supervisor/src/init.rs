//! The copy inside: process 1 of the sandbox (or, without isolation, the subreaper of what it starts).
//!
//! Executes the command at most once and only when told so, reaps everything, and passes the raw wait status out.
//! When its socket closes it ends everything and itself: nothing inside outlives the supervisor outside.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::PermissionsExt, net::UnixStream, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{DumpableBehavior, Pid, Signal, WaitOptions, set_dumpable_behavior};

use towpath_schemas::{frame::Size, guest::FENCE_RAN_OUT};

use crate::{
    clock,
    control::{FromInit, Go, LINE_BYTES, ToInit},
    host,
    pty::{self, Pty},
    sys,
};

/// Added to the command's chance of being chosen when memory runs out, so that process 1 lives to tell it.
const OOM_SCORE: &str = "500";
/// Without isolation: how long to try to end what is left once nobody listens any more.
const LAST_WAIT: Duration = Duration::from_secs(10);

pub struct InitArguments {
    socket: i32,
    stdout: i32,
    stderr: i32,
    /// Without a PID namespace of its own.
    subreaper: bool,
}

impl InitArguments {
    /// `--fds S,O,E [--subreaper]`.
    pub fn parse(words: &[String]) -> Option<Self> {
        let subreaper = match words.get(2).map(String::as_str) {
            None => false,
            Some("--subreaper") => true,
            Some(_) => return None,
        };
        if words.first()? != "--fds" {
            return None;
        }
        let numbers: Vec<i32> = words.get(1)?.split(',').map(|number| number.parse().ok()).collect::<Option<_>>()?;
        let [socket, stdout, stderr] = numbers.try_into().ok()?;
        Some(Self { socket, stdout, stderr, subreaper })
    }
}

pub fn run(arguments: InitArguments) -> ExitCode {
    match serve(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            crate::note!("process 1: {error}");
            ExitCode::from(crate::exit::FAILED)
        }
    }
}

/// Whom a signal goes to.
#[derive(Clone, Copy)]
enum Reach {
    Namespace,
    Descendants,
}

impl Reach {
    fn signal(self, signal: Signal) {
        match self {
            Reach::Namespace => sys::signal_all_in_namespace(signal.as_raw()),
            Reach::Descendants => {
                for pid in host::descendants(std::process::id() as i32).into_iter().filter_map(Pid::from_raw) {
                    // It may have ended since.
                    rustix::process::kill_process(pid, signal).ok();
                }
            }
        }
    }

    /// TERM (and, as a terminal that goes away does, HUP), grace, KILL. A stopped process is woken so that it can hear them.
    fn stop(self, grace: Duration) {
        if HAS_TERMINAL.load(Ordering::SeqCst) {
            self.signal(Signal::HUP);
        }
        self.signal(Signal::TERM);
        self.signal(Signal::CONT);
        thread::sleep(grace);
        self.signal(Signal::KILL);
    }
}

static STOPPING: AtomicBool = AtomicBool::new(false);
/// Only grows.
static LEASE_UNTIL_US: AtomicU64 = AtomicU64::new(0);
/// Between two attempts to kill what a lease that has run out leaves; the end of all ends this process.
const KILL_AGAIN: Duration = Duration::from_millis(20);
/// An interactive shell does not hear TERM.
static HAS_TERMINAL: AtomicBool = AtomicBool::new(false);

fn serve(arguments: InitArguments) -> io::Result<()> {
    // Opened now, because a process that is not dumpable may not open its own.
    let score = OpenOptions::new().write(true).open("/proc/self/oom_score_adj").ok();
    // Otherwise the command, being the same user, could read this process's memory and descriptors.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let socket = UnixStream::from(sys::inherited(arguments.socket)?);
    let (stdout, stderr) = (sys::inherited(arguments.stdout)?, sys::inherited(arguments.stderr)?);
    sys::close_at_exec_from(3);
    if arguments.subreaper {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    }
    let reach = if arguments.subreaper { Reach::Descendants } else { Reach::Namespace };
    let mut orders = BufReader::new(socket.try_clone()?);
    let Some(ToInit::Go(go)) = next_order(&mut orders) else { return Ok(()) };
    if let Some(until_us) = go.lease_until_us {
        if clock::boot_us() >= until_us {
            return say(
                &socket,
                &FromInit::Refused { code: FENCE_RAN_OUT.to_owned(), message: "its lease ran out before it began".to_owned() },
            );
        }
        LEASE_UNTIL_US.store(until_us, Ordering::SeqCst);
        thread::spawn(move || keep_lease(reach));
    }
    let main = match execute(&go, score, Ends { stdout, stderr }) {
        Ok(pid) => pid,
        Err(refusal) => return say(&socket, &refusal),
    };
    HAS_TERMINAL.store(go.terminal.is_some(), Ordering::SeqCst);
    say(&socket, &FromInit::Started)?;
    thread::spawn(move || listen(orders, reach));
    reap(&socket, main, reach, Duration::from_millis(go.grace_ms))
}

/// None when the supervisor outside is gone or says what is not understood.
fn next_order(orders: &mut BufReader<UnixStream>) -> Option<ToInit> {
    let mut line = Vec::new();
    orders.take(LINE_BYTES as u64).read_until(b'\n', &mut line).ok()?;
    serde_json::from_slice(&line).ok()
}

fn say(mut socket: &UnixStream, message: &FromInit) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    socket.write_all(&line)
}

fn listen(mut orders: BufReader<UnixStream>, reach: Reach) {
    while let Some(order) = next_order(&mut orders) {
        match order {
            ToInit::Stop { grace_ms } => {
                STOPPING.store(true, Ordering::SeqCst);
                // A later order with a shorter grace must not wait for this one.
                thread::spawn(move || reach.stop(Duration::from_millis(grace_ms)));
            }
            ToInit::Lease { until_us } => {
                LEASE_UNTIL_US.fetch_max(until_us, Ordering::SeqCst);
            }
            ToInit::Go(_) => {}
        }
    }
    match reach {
        // The kernel ends everything in the namespace with its process 1.
        Reach::Namespace => {}
        Reach::Descendants => {
            let until = Instant::now() + LAST_WAIT;
            while Instant::now() < until && !host::descendants(std::process::id() as i32).is_empty() {
                reach.signal(Signal::KILL);
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
    std::process::exit(1);
}

/// Kills everything when the lease has run out, also while the supervisor outside sleeps or is stopped. Nothing extends a lease that has run out.
fn keep_lease(reach: Reach) {
    loop {
        let until_us = LEASE_UNTIL_US.load(Ordering::SeqCst);
        if clock::boot_us() >= until_us {
            break;
        }
        clock::sleep_until_boot_us(until_us);
    }
    STOPPING.store(true, Ordering::SeqCst);
    loop {
        reach.signal(Signal::KILL);
        thread::sleep(KILL_AGAIN);
    }
}

fn reap(socket: &UnixStream, main: u32, reach: Reach, grace: Duration) -> io::Result<()> {
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid.as_raw_nonzero().get() as u32 == main => {
                // When nobody listens any more, `listen` is ending everything and then this process; to leave before would let the rest live.
                say(socket, &FromInit::Main { status: status.as_raw() }).ok();
                if !STOPPING.swap(true, Ordering::SeqCst) {
                    thread::spawn(move || reach.stop(grace));
                }
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // No child is left, and every orphan is a child of ours.
            Err(rustix::io::Errno::CHILD) => return say(socket, &FromInit::Ended),
            Err(error) => return Err(error.into()),
        }
    }
}

/// The descriptors that were left open for the command's output.
struct Ends {
    stdout: OwnedFd,
    stderr: OwnedFd,
}

impl Ends {
    /// Gives them to the command; with a terminal that, passed out over the first.
    fn give(self, command: &mut Command, terminal: Option<Size>) -> io::Result<()> {
        let Some(size) = terminal else {
            command.process_group(0).stdin(Stdio::null()).stdout(self.stdout).stderr(self.stderr);
            return Ok(());
        };
        let pty = Pty::open(size)?;
        pty::pass(&self.stdout, pty.owner.as_fd())?;
        command.stdin(pty.command.try_clone()?).stdout(pty.command.try_clone()?).stderr(pty.command);
        sys::with_terminal(command);
        Ok(())
    }
}

fn execute(go: &Go, score: Option<File>, ends: Ends) -> Result<u32, FromInit> {
    let program = find(go)?;
    let name = go.command.first().cloned().unwrap_or_default();
    let set_score = |value: &str| {
        if let Some(mut file) = score.as_ref() {
            // Only shifts the kernel's choice; without it the end is still told, as one without a status.
            file.write_all(value.as_bytes()).ok();
        }
    };
    set_score(OOM_SCORE);
    let mut command = Command::new(&program);
    command.arg0(&name).args(&go.command[1..]).env_clear().envs(go.env.iter().map(|(key, value)| (key, value)));
    command.current_dir(&go.folder);
    ends.give(&mut command, go.terminal)
        .map_err(|error| FromInit::Refused { code: "wall_failed".to_owned(), message: format!("no terminal: {error}") })?;
    // The error of exec comes back over a close-on-exec pipe, so it cannot be taken for an exit code of the command.
    let child = command.spawn();
    // The last end of the terminal that is not the command's: its end is told by the kernel once the command has let go of it.
    drop(command);
    set_score("0");
    child.map(|child| child.id()).map_err(|error| {
        let reason = match error.raw_os_error() {
            Some(libc::ENOENT) => "the interpreter that it names does not exist".to_owned(),
            Some(libc::ENOEXEC) => "it is neither a program of this machine nor a script that begins with #!".to_owned(),
            _ => error.to_string(),
        };
        not_executable(&name, &reason)
    })
}

fn not_executable(name: &str, reason: &str) -> FromInit {
    FromInit::Refused { code: "command_not_executable".to_owned(), message: format!("`{name}` cannot be executed: {reason}") }
}

/// Looks a name without a slash up in the command's own PATH, as a shell would.
fn find(go: &Go) -> Result<PathBuf, FromInit> {
    let name = go.command.first().cloned().unwrap_or_default();
    let not_found =
        |why: &str| FromInit::Refused { code: "command_not_found".to_owned(), message: format!("`{name}` does not exist{why}") };
    if name.is_empty() {
        return Err(not_found(": the command is empty"));
    }
    let candidates: Vec<PathBuf> = if name.contains('/') {
        vec![Path::new(&go.folder).join(&name)]
    } else {
        let path = go.env.iter().find(|(key, _)| key == "PATH").map(|(_, value)| value.as_str()).unwrap_or_default();
        path.split(':').filter(|folder| !folder.is_empty()).map(|folder| Path::new(folder).join(&name)).collect()
    };
    let mut refusal = not_found(" inside the sandbox");
    for candidate in candidates {
        match fs::metadata(&candidate) {
            Ok(meta) if meta.is_file() && meta.permissions().mode() & 0o111 != 0 => return Ok(candidate),
            Ok(meta) if meta.is_file() => refusal = not_executable(&name, "its file has no execute permission"),
            Ok(_) => refusal = not_executable(&name, "it is not a file"),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => refusal = not_executable(&name, "it may not be reached"),
            Err(_) => {}
        }
    }
    Err(refusal)
}
