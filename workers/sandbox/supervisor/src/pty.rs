//! The command's terminal: made inside, where its name means something, and passed out.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg},
    pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt},
    termios::{InputModes, OptionalActions, Winsize, tcgetattr, tcsetattr, tcsetwinsize},
};
use towpath_schemas::frame::Size;

/// A new terminal: whoever owns it, and what the command gets.
pub struct Pty {
    pub owner: OwnedFd,
    pub command: OwnedFd,
}

impl Pty {
    pub fn open(size: Size) -> io::Result<Self> {
        let owner = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&owner)?;
        unlockpt(&owner)?;
        let command = ioctl_tiocgptpeer(&owner, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        resize(&owner, size)?;
        let mut modes = tcgetattr(&command)?;
        // So that the line editor of the kernel deletes characters and not bytes.
        modes.input_modes |= InputModes::IUTF8;
        tcsetattr(&command, OptionalActions::Now, &modes)?;
        Ok(Self { owner, command })
    }
}

/// The kernel tells the command (SIGWINCH).
pub fn resize(owner: impl AsFd, size: Size) -> io::Result<()> {
    Ok(tcsetwinsize(owner, Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 })?)
}

/// Passes a descriptor over a Unix socket.
pub fn pass(socket: impl AsFd, fd: BorrowedFd<'_>) -> io::Result<()> {
    let fds = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(socket, &[IoSlice::new(b"t")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Takes the descriptor that was passed before.
pub fn take(socket: impl AsFd) -> io::Result<OwnedFd> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC)?;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    fd.ok_or_else(|| io::Error::other("no terminal was passed out"))
}
