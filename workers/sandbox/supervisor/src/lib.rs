#![doc = include_str!("../README.md")]

pub mod cgroup;
pub mod control;
pub mod folder;
pub mod host;
pub mod init;
pub mod launch;
pub mod note;
pub mod outside;

pub mod wall;

mod clock;
mod pty;
mod sys;

/// Exit codes of `launch` and `outside`, so that a worker can tell them apart.
pub mod exit {
    /// Could not start; the reason is on stderr.
    pub const FAILED: u8 = 1;
    /// Another supervisor holds the lock of this folder.
    pub const HELD: u8 = 3;
    /// The folder says that its sandbox is gone, or that its command was started already: nothing is ever started here again.
    pub const SPENT: u8 = 4;
}
