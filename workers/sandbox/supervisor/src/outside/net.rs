//! Egress: a user-mode network attached to the sandbox's own network namespace, without the host's loopback.

use std::{
    io::{self, Read},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::Path,
    process::Stdio,
    time::Duration,
};

use rustix::{
    io::{FdFlags, fcntl_setfd},
    pipe::{PipeFlags, pipe_with},
};
use tokio::{process::Child, task::spawn_blocking, time::timeout};

/// How long the network may take to come up.
const READY: Duration = Duration::from_secs(10);
/// slirp4netns answers DNS here.
pub const NAME_SERVER: &str = "10.0.2.3";

/// Ends with this value, or with the process that holds it.
pub struct Network {
    _exit: OwnedFd,
    _child: Child,
}

pub async fn attach(slirp: &Path, init: i32) -> io::Result<Network> {
    let (ready, ready_end) = pipe_with(PipeFlags::CLOEXEC)?;
    let (exit_end, exit) = pipe_with(PipeFlags::CLOEXEC)?;
    for end in [ready_end.as_fd(), exit_end.as_fd()] {
        fcntl_setfd(end, FdFlags::empty())?;
    }
    let mut command = tokio::process::Command::new(slirp);
    command.args(["--configure", "--mtu=65520", "--disable-host-loopback"]);
    if rustix::process::geteuid().is_root() {
        command.arg("--enable-sandbox");
    }
    command.args(["--ready-fd", &ready_end.as_raw_fd().to_string(), "--exit-fd", &exit_end.as_raw_fd().to_string()]);
    let namespace = |kind: &str| format!("/proc/{init}/ns/{kind}");
    if !rustix::process::geteuid().is_root() {
        command.args(["--userns-path", &namespace("user")]);
    }
    // By path, because by number it would enter the innermost user namespace, which does not own the network.
    command.args(["--netns-type=path", &namespace("net"), "tap0"]);
    let child = command.env_clear().stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true).spawn()?;
    drop((ready_end, exit_end));
    let mut ready = std::fs::File::from(ready);
    let told = timeout(
        READY,
        spawn_blocking(move || {
            let mut byte = [0];
            ready.read_exact(&mut byte)
        }),
    );
    match told.await {
        Ok(Ok(Ok(()))) => Ok(Network { _exit: exit, _child: child }),
        Ok(_) => Err(io::Error::other("slirp4netns ended before the network was there")),
        Err(_) => Err(io::Error::other(format!("slirp4netns did not get ready within {} s", READY.as_secs()))),
    }
}
