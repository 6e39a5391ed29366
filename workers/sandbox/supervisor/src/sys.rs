//! The few calls that the safe wrappers do not have.
#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{FromRawFd, OwnedFd, RawFd},
};

/// Takes a descriptor that the parent left open for us under this number.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl only looks whether the number is open.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and the parent named it for this purpose alone, so nobody else in this process owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
    Ok(fd)
}

/// Signals every process that this one may signal, itself and process 1 of its PID namespace left out (kill(2), pid -1).
/// Only for process 1 of a namespace of its own: anywhere else it would reach the host.
pub fn signal_all_in_namespace(signal: i32) {
    if std::process::id() == 1 {
        // SAFETY: no memory is involved. ESRCH (nobody there) is the wanted end, so the answer does not matter.
        unsafe { libc::kill(-1, signal) };
    }
}

/// Marks every descriptor from `first` up as closing at exec, so that nothing a careless starter left open reaches a command.
pub fn close_at_exec_from(first: u32) {
    // SAFETY: no memory is involved; a kernel without the call (before 5.9) answers ENOSYS, and Rust opens everything CLOEXEC anyway.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
}

/// Makes what will be the command's stdin its controlling terminal, in a session of its own.
pub fn with_terminal(command: &mut std::process::Command) {
    use std::os::unix::process::CommandExt;
    let take_terminal = || {
        rustix::process::setsid()?;
        rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
        Ok(())
    };
    // SAFETY: both are plain system calls, which are async-signal-safe; nothing is allocated and no lock is taken.
    unsafe { command.pre_exec(take_terminal) };
}

/// Waits for a descriptor to become readable and writable.
pub fn watch(fd: OwnedFd) -> io::Result<tokio::io::unix::AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is an open descriptor that always tells the same number, and it is given up here: nobody can close it before the AsyncFd is dropped.
    unsafe { tokio::io::unix::AsyncFd::register(fd) }.map_err(Into::into)
}

/// Gives this process a mount namespace of its own.
pub fn own_mounts() -> io::Result<()> {
    // SAFETY: NEWNS alone shares no descriptor table and no memory with anyone.
    Ok(unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }?)
}
