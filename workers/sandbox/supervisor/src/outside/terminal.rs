//! The command's terminal: what it prints becomes frames, its screen is kept and recorded, what viewers type goes in, and one viewer owns its size.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    os::fd::OwnedFd,
    time::Duration,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use tokio::{
    io::{Interest, unix::AsyncFd},
    time::{Instant, sleep, sleep_until},
};
use towpath_schemas::{
    frame::{FrameKind, RECORD_BYTES, Size},
    guest::{ViewerHeard, ViewerSays},
    limit::{FRAME_BYTES, FRAME_MS, SCREEN_EVERY_BYTES, TYPED_BYTES, VIEWER_S},
};
use towpath_terminal::Screen;

use super::{desk::Desk, gather::Tail};
use crate::{pty, sys};

/// Wait before the spool's disk is tried again.
const DISK_RETRY: Duration = Duration::from_secs(1);
/// A screen that changed is recorded anew after this long, however little was printed.
const SCREEN_AGE: Duration = Duration::from_secs(30);
/// How often viewers that are not heard any more are looked for.
const LOOK: Duration = Duration::from_secs(5);
/// Viewers of one terminal.
const VIEWERS: usize = 10_000;

/// Ends when the command and all that it started have let go of the terminal.
pub async fn tend(desk: &Desk, socket: &OwnedFd, tail: &mut Tail) -> io::Result<()> {
    let owner = pty::take(socket)?;
    rustix::io::ioctl_fionbio(&owner, true)?;
    let mut terminal = Terminal {
        desk,
        device: sys::watch(owner)?,
        screen: Screen::new(Size::default()),
        buffer: Vec::with_capacity(FRAME_BYTES),
        cut_at: Instant::now(),
        unrecorded: 0,
        recorded_at: Instant::now(),
        typed: VecDeque::new(),
        viewers: Viewers::default(),
    };
    terminal.record().await;
    terminal.go().await;
    desk.set_terminal(false);
    tail.replace(terminal.screen.text());
    Ok(())
}

/// Bytes on their way into the command.
struct Typed {
    bytes: Vec<u8>,
    /// Who is told once they are in.
    told: Option<(String, u64)>,
}

struct Terminal<'a> {
    desk: &'a Desk,
    device: AsyncFd<OwnedFd>,
    screen: Screen,
    buffer: Vec<u8>,
    /// When what was gathered becomes a frame; at once when nothing came for a while, so that an echo is not late.
    cut_at: Instant,
    /// Bytes printed since the screen was recorded.
    unrecorded: u64,
    recorded_at: Instant,
    typed: VecDeque<Typed>,
    viewers: Viewers,
}

impl Terminal<'_> {
    async fn go(&mut self) {
        let mut look = Instant::now() + LOOK;
        loop {
            tokio::select! {
                end = readable(self.desk, &self.device) => match end {
                    Ok(()) => if self.read().await { break },
                    Err(_) => break,
                },
                _ = self.device.writable(), if !self.typed.is_empty() => self.write(),
                (viewer, says) = self.desk.viewer_says() => self.viewer(viewer, says).await,
                () = sleep_until(self.cut_at), if !self.buffer.is_empty() => self.cut().await,
                () = sleep_until(look) => {
                    look = Instant::now() + LOOK;
                    if let Some(size) = self.viewers.expire() {
                        self.resize(size).await;
                    }
                }
            }
        }
        self.cut().await;
    }

    /// True at the end: the last one has closed the terminal (EIO, Linux).
    async fn read(&mut self) -> bool {
        let before = self.buffer.len();
        self.buffer.resize(FRAME_BYTES, 0);
        let read = self.device.try_io(Interest::READABLE, |device| Ok(rustix::io::read(device, &mut self.buffer[before..])?));
        self.buffer.truncate(before + read.as_ref().copied().unwrap_or(0));
        match read {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) => {
                if error.raw_os_error() != Some(libc::EIO) {
                    crate::note!("the terminal cannot be read: {error}");
                }
                return true;
            }
        }
        let answers = self.screen.print_and_answer(&self.buffer[before..]);
        if !answers.is_empty() && self.waiting() < TYPED_BYTES {
            self.typed.push_back(Typed { bytes: answers, told: None });
            self.write();
        }
        if self.buffer.len() == FRAME_BYTES || Instant::now() >= self.cut_at {
            self.cut().await;
        }
        false
    }

    /// Not a byte is dropped: while the disk refuses, the command blocks.
    async fn cut(&mut self) {
        if self.buffer.is_empty() {
            return;
        }
        let bytes = std::mem::take(&mut self.buffer);
        self.append(FrameKind::Terminal, &bytes).await;
        self.unrecorded += bytes.len() as u64;
        self.buffer = bytes;
        self.buffer.clear();
        self.cut_at = Instant::now() + Duration::from_millis(FRAME_MS);
        if self.unrecorded >= SCREEN_EVERY_BYTES || self.recorded_at.elapsed() >= SCREEN_AGE {
            self.record().await;
        }
    }

    async fn append(&self, kind: FrameKind, payload: &[u8]) {
        while let Err(error) = self.desk.append(kind, payload) {
            crate::note!("the spool cannot be written: {error}");
            sleep(DISK_RETRY).await;
        }
    }

    /// Records what the terminal shows after everything that was cut so far.
    async fn record(&mut self) {
        if !self.buffer.is_empty() || !self.screen.is_whole() {
            return;
        }
        let record = serde_json::to_vec(&self.screen.record()).unwrap_or_default();
        if record.len() > RECORD_BYTES {
            crate::note!("the screen is not recorded: it takes {} bytes", record.len());
        } else {
            self.append(FrameKind::Screen, &record).await;
        }
        self.unrecorded = 0;
        self.recorded_at = Instant::now();
    }

    async fn resize(&mut self, size: Size) {
        if size == self.screen.size() {
            return;
        }
        self.cut().await;
        if let Err(error) = pty::resize(self.device.get_ref(), size) {
            crate::note!("the terminal cannot be resized: {error}");
            return;
        }
        self.screen.resize(size);
        let record = serde_json::to_vec(&size).unwrap_or_default();
        self.append(FrameKind::Resize, &record).await;
        for (viewer, owner) in self.viewers.all() {
            self.desk.tell_viewer(viewer, ViewerHeard::Size { size, owner });
        }
    }

    fn waiting(&self) -> usize {
        self.typed.iter().map(|typed| typed.bytes.len()).sum()
    }

    fn write(&mut self) {
        while let Some(typed) = self.typed.front_mut() {
            match self.device.try_io(Interest::WRITABLE, |device| Ok(rustix::io::write(device, &typed.bytes)?)) {
                Ok(written) if written < typed.bytes.len() => drop(typed.bytes.drain(..written)),
                Ok(_) => {
                    if let Some((viewer, number)) = &typed.told {
                        self.desk.tell_viewer(viewer, ViewerHeard::Typed { number: *number });
                    }
                    self.typed.pop_front();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    crate::note!("nothing can be typed: {error}");
                    self.typed.clear();
                }
            }
        }
    }

    async fn viewer(&mut self, viewer: String, says: ViewerSays) {
        match says {
            ViewerSays::Here { size, may_resize } => {
                let wanted = self.viewers.here(&viewer, size.bounded(), may_resize);
                if let Some(size) = wanted {
                    self.resize(size).await;
                }
                let answer = ViewerHeard::Size { size: self.screen.size(), owner: self.viewers.owns(&viewer) };
                self.desk.tell_viewer(&viewer, answer);
            }
            ViewerSays::Own { size } => {
                self.viewers.own(&viewer, size.bounded());
                self.resize(size.bounded()).await;
                for (viewer, owner) in self.viewers.all() {
                    self.desk.tell_viewer(viewer, ViewerHeard::Size { size: self.screen.size(), owner });
                }
            }
            ViewerSays::Type { number, b64 } => {
                let refuse = |reason: &str| self.desk.tell_viewer(&viewer, ViewerHeard::Refused { number, reason: reason.to_owned() });
                match BASE64_STANDARD.decode(b64) {
                    Err(_) => refuse("it is not base64"),
                    Ok(bytes) if self.waiting() + bytes.len() > TYPED_BYTES => refuse("the command does not read what is typed"),
                    Ok(bytes) => {
                        self.desk.note_activity();
                        self.typed.push_back(Typed { bytes, told: Some((viewer, number)) });
                        self.write();
                    }
                }
            }
            ViewerSays::Leave => {
                if let Some(size) = self.viewers.leave(&viewer) {
                    self.resize(size).await;
                }
            }
        }
    }
}

/// Readable, and with room for what will be read.
async fn readable(desk: &Desk, device: &AsyncFd<OwnedFd>) -> io::Result<()> {
    desk.spool_room().await;
    device.readable().await.map(|mut ready| ready.retain_ready())
}

/// Who looks on, and whose window the terminal has the size of.
#[derive(Default)]
struct Viewers {
    seen: BTreeMap<String, Seen>,
    owner: Option<String>,
}

struct Seen {
    at: Instant,
    size: Size,
    may_resize: bool,
}

impl Viewers {
    /// The size to take, when this viewer owns it now.
    fn here(&mut self, viewer: &str, size: Size, may_resize: bool) -> Option<Size> {
        if self.seen.len() >= VIEWERS && !self.seen.contains_key(viewer) {
            return None;
        }
        self.seen.insert(viewer.to_owned(), Seen { at: Instant::now(), size, may_resize });
        if self.owner.is_none() && may_resize {
            self.owner = Some(viewer.to_owned());
        }
        self.owns(viewer).then_some(size)
    }

    fn own(&mut self, viewer: &str, size: Size) {
        self.seen.insert(viewer.to_owned(), Seen { at: Instant::now(), size, may_resize: true });
        self.owner = Some(viewer.to_owned());
    }

    fn owns(&self, viewer: &str) -> bool {
        self.owner.as_deref() == Some(viewer)
    }

    /// The next owner's size, when the owner has gone and there is one.
    fn leave(&mut self, viewer: &str) -> Option<Size> {
        self.seen.remove(viewer);
        if !self.owns(viewer) {
            return None;
        }
        let next = self.seen.iter().find(|(_, seen)| seen.may_resize);
        self.owner = next.map(|(viewer, _)| viewer.clone());
        next.map(|(_, seen)| seen.size)
    }

    /// Those that were not heard for too long have left.
    fn expire(&mut self) -> Option<Size> {
        let silent = |seen: &Seen| seen.at.elapsed() > Duration::from_secs(VIEWER_S);
        let gone: Vec<String> = self.seen.iter().filter(|(_, seen)| silent(seen)).map(|(viewer, _)| viewer.clone()).collect();
        gone.iter().filter_map(|viewer| self.leave(viewer)).last()
    }

    fn all(&self) -> impl Iterator<Item = (&str, bool)> {
        self.seen.keys().map(|viewer| (viewer.as_str(), self.owns(viewer)))
    }
}
