//! Raises the walls with process 1 inside, and talks to it.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::net::UnixStream as StdUnixStream,
    },
    process::Stdio,
    time::Duration,
};

use rustix::{
    io::{FdFlags, fcntl_setfd},
    pipe::{PipeFlags, fcntl_setpipe_size, pipe_with},
    process::{Pid, Signal, kill_process},
};
use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf, pipe::Receiver},
    },
    process::{Child, ChildStderr, Command},
    time::timeout,
};

use towpath_schemas::agent::Terminal;

use crate::{
    cgroup::Cgroup,
    control::{FromInit, ToInit},
    host::{self, Alive},
    wall::WallOrder,
};

/// How long the walls may take to stand.
const RAISE: Duration = Duration::from_secs(20);
/// How long everything inside may take to be gone after KILL.
const GONE: Duration = Duration::from_secs(10);
/// Bytes that the command may print before we have read any; as much as the kernel gives without asking.
const PIPE_BYTES: usize = 256 * 1024;
/// What is kept of the walls' own complaints.
const COMPLAINT_BYTES: u64 = 4096;

/// Process 1 inside, by the numbers of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InitProcess {
    pub pid: i32,
    pub start: u64,
    pub pid_namespace: u64,
}

pub struct Sandbox {
    pub init: InitProcess,
    pub orders: Orders,
    pub events: Events,
    pub remains: Remains,
}

/// Where the command's output comes from.
pub enum Printed {
    Pipes {
        stdout: Receiver,
        stderr: Receiver,
    },
    /// The socket over which process 1 passes the command's terminal out.
    Terminal(OwnedFd),
}

pub struct Orders(OwnedWriteHalf);

pub struct Events(BufReader<OwnedReadHalf>);

/// What has to be gone in the end.
pub struct Remains {
    child: Child,
    complaints: Option<ChildStderr>,
    init: Option<InitProcess>,
    cgroup: Option<Cgroup>,
}

/// The descriptors that the walls hand through, open in the child only.
struct Passed([OwnedFd; 4]);

impl Passed {
    fn open(&self, flags: FdFlags) -> io::Result<()> {
        Ok(self.0.iter().try_for_each(|fd| fcntl_setfd(fd.as_fd(), flags))?)
    }
}

/// Raises the walls. `order`'s descriptors are filled in here.
pub async fn raise(mut order: WallOrder, cgroup: Option<Cgroup>, terminal: Terminal) -> Result<(Sandbox, Printed), String> {
    let (info, info_end) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| error.to_string())?;
    let (socket, socket_end) = StdUnixStream::pair().map_err(|error| error.to_string())?;
    let (stdout, stdout_end) = match terminal {
        Terminal::Pipes => output_pipe(),
        Terminal::Pty => StdUnixStream::pair().map(|(ours, theirs)| (ours.into(), theirs.into())),
    }
    .map_err(|error| error.to_string())?;
    let (stderr, stderr_end) = output_pipe().map_err(|error| error.to_string())?;
    let passed = Passed([info_end, socket_end.into(), stdout_end, stderr_end]);
    let [info_end, socket_end, stdout_end, stderr_end] = &passed.0;
    order.info_fd = info_end.as_raw_fd();
    order.init_fds = [socket_end.as_raw_fd(), stdout_end.as_raw_fd(), stderr_end.as_raw_fd()];
    let isolated = order.bubblewrap.is_some();
    let mut remains = spawn(&order, &passed, cgroup).await.map_err(|error| format!("the wall cannot be started: {error}"))?;
    drop(passed);
    let found = timeout(RAISE, find_init(isolated, info, &remains.child)).await;
    let init = match found {
        Ok(Ok(init)) => init,
        Ok(Err(error)) => return Err(remains.fall(&error.to_string()).await),
        Err(_) => return Err(remains.fall(&format!("it did not stand within {} s", RAISE.as_secs())).await),
    };
    remains.init = Some(init);
    let ends = connect(socket, stdout, stderr, terminal).map_err(|error| error.to_string())?;
    let (orders, events, printed) = ends;
    Ok((Sandbox { init, orders, events, remains }, printed))
}

fn output_pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    // A user over the kernel's soft limit for pipes keeps the small default.
    fcntl_setpipe_size(&read, PIPE_BYTES).ok();
    Ok((read, write))
}

fn connect(socket: StdUnixStream, stdout: OwnedFd, stderr: OwnedFd, terminal: Terminal) -> io::Result<(Orders, Events, Printed)> {
    socket.set_nonblocking(true)?;
    let (read, write) = UnixStream::from_std(socket)?.into_split();
    let printed = match terminal {
        Terminal::Pipes => Printed::Pipes { stdout: Receiver::from_owned_fd(stdout)?, stderr: Receiver::from_owned_fd(stderr)? },
        Terminal::Pty => Printed::Terminal(stdout),
    };
    Ok((Orders(write), Events(BufReader::new(read)), printed))
}

async fn spawn(order: &WallOrder, passed: &Passed, cgroup: Option<Cgroup>) -> io::Result<Remains> {
    let mut command = Command::new("/proc/self/exe");
    command.arg("wall").env_clear().current_dir("/").stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    passed.open(FdFlags::empty())?;
    let spawned = command.spawn();
    passed.open(FdFlags::CLOEXEC)?;
    let mut child = spawned?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(&serde_json::to_vec(order)?).await?;
    }
    let complaints = child.stderr.take();
    Ok(Remains { child, complaints, init: None, cgroup })
}

async fn find_init(isolated: bool, info: OwnedFd, child: &Child) -> io::Result<InitProcess> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Info {
        child_pid: i32,
        pid_namespace: u64,
    }
    let (pid, pid_namespace) = if isolated {
        let mut text = Vec::new();
        Receiver::from_owned_fd(info)?.read_to_end(&mut text).await?;
        let info: Info = serde_json::from_slice(&text).map_err(|_| io::Error::other("bubblewrap did not say what it made"))?;
        (info.child_pid, info.pid_namespace)
    } else {
        let pid = child.id().map(|id| id as i32).ok_or_else(|| io::Error::other("it ended at once"))?;
        (pid, host::pid_namespace(&pid.to_string())?)
    };
    let stat = host::process_stat(pid)?.ok_or_else(|| io::Error::other("process 1 ended at once"))?;
    Ok(InitProcess { pid, start: stat.start, pid_namespace })
}

impl Orders {
    pub async fn give(&mut self, order: &ToInit) -> io::Result<()> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        self.0.write_all(&line).await
    }
}

impl Events {
    /// None when process 1 is gone.
    pub async fn next(&mut self) -> Option<FromInit> {
        let mut line = Vec::new();
        match self.0.read_until(b'\n', &mut line).await {
            Ok(0) => None,
            Ok(_) => serde_json::from_slice(&line).inspect_err(|error| crate::note!("process 1 said what is not understood: {error}")).ok(),
            Err(error) => {
                crate::note!("process 1 cannot be heard: {error}");
                None
            }
        }
    }
}

impl InitProcess {
    fn kill(self) {
        if host::alive(self.pid, self.start) == Alive::Yes
            && let Some(pid) = Pid::from_raw(self.pid)
        {
            // It may have ended since.
            kill_process(pid, Signal::KILL).ok();
        }
    }
}

impl Remains {
    /// Ends everything and waits until it is gone.
    pub async fn end(&mut self) {
        if let Some(init) = self.init {
            init.kill();
        } else {
            self.child.start_kill().ok();
        }
        match timeout(GONE, self.child.wait()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => crate::note!("the wall cannot be waited for: {error}"),
            Err(_) => crate::note!("the wall is still there {} s after KILL", GONE.as_secs()),
        }
        if let Some(cgroup) = &self.cgroup
            && !cgroup.kill().unwrap_or(false)
        {
            crate::note!("cgroup {} is not empty", cgroup.relative());
        }
    }

    pub fn oom_kills(&self) -> Option<u64> {
        self.cgroup.as_ref().and_then(Cgroup::oom_kills)
    }

    pub fn remove_cgroup(&mut self) {
        if let Some(cgroup) = self.cgroup.take()
            && let Err(error) = cgroup.remove()
        {
            crate::note!("cgroup {} cannot be removed: {error}", cgroup.relative());
        }
    }

    /// What the walls had to say when they did not stand.
    pub async fn complaints(&mut self) -> String {
        let mut text = Vec::new();
        if let Some(stderr) = self.complaints.take() {
            // Whatever came is told; the rest is only detail.
            timeout(GONE, stderr.take(COMPLAINT_BYTES).read_to_end(&mut text)).await.ok();
        }
        String::from_utf8_lossy(&text).trim().to_owned()
    }

    async fn fall(mut self, why: &str) -> String {
        self.end().await;
        let complaints = self.complaints().await;
        self.remove_cgroup();
        if complaints.is_empty() { why.to_owned() } else { complaints }
    }
}

/// Kills process 1 of a sandbox that did not stop when it was told to.
pub fn kill_hard(init: InitProcess) {
    init.kill();
}
