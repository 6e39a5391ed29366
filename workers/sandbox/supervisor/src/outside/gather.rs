//! Reads the command's two pipes as fast as the spool allows and cuts frames: at most `FRAME_BYTES`, or what `FRAME_MS` brought together.

use std::{future::pending, io, time::Duration};

use tokio::{
    net::unix::pipe::Receiver,
    time::{Instant, sleep, sleep_until},
};
use towpath_schemas::{
    frame::FrameKind,
    limit::{FRAME_BYTES, FRAME_MS, RESULT_TAIL_BYTES},
};

use super::{desk::Desk, disk};

/// The end of stdout, in case there is no result file. Never more than twice what is wanted.
#[derive(Default)]
pub struct Tail {
    bytes: Vec<u8>,
    pub cut: bool,
}

impl Tail {
    fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        if self.bytes.len() > 2 * RESULT_TAIL_BYTES {
            self.shorten();
        }
    }

    fn shorten(&mut self) {
        if self.bytes.len() > RESULT_TAIL_BYTES {
            self.bytes.drain(..self.bytes.len() - RESULT_TAIL_BYTES);
            self.cut = true;
        }
    }

    /// What stays of a terminal stands for what was printed on it.
    pub fn replace(&mut self, text: String) {
        self.bytes = text.into_bytes();
        self.shorten();
    }

    pub fn last(&mut self) -> &[u8] {
        self.shorten();
        &self.bytes
    }
}

struct Frames<'a> {
    desk: &'a Desk,
    tail: &'a mut Tail,
    kind: FrameKind,
    buffer: Vec<u8>,
    cut_at: Instant,
}

/// Ends when both pipes have ended.
pub async fn gather(desk: &Desk, stdout: Receiver, stderr: Receiver, tail: &mut Tail) {
    let (mut stdout, mut stderr) = (Some(stdout), Some(stderr));
    let mut frames = Frames { desk, tail, kind: FrameKind::Stdout, buffer: Vec::with_capacity(FRAME_BYTES), cut_at: Instant::now() };
    while stdout.is_some() || stderr.is_some() {
        desk.spool_room().await;
        tokio::select! {
            () = readable(stdout.as_ref()) => frames.read(FrameKind::Stdout, &mut stdout).await,
            () = readable(stderr.as_ref()) => frames.read(FrameKind::Stderr, &mut stderr).await,
            () = sleep_until(frames.cut_at), if !frames.buffer.is_empty() => frames.cut().await,
        }
    }
    frames.cut().await;
}

/// An error shows itself at the read that follows.
async fn readable(pipe: Option<&Receiver>) {
    match pipe {
        Some(pipe) => drop(pipe.readable().await),
        None => pending().await,
    }
}

impl Frames<'_> {
    async fn read(&mut self, kind: FrameKind, pipe: &mut Option<Receiver>) {
        if kind != self.kind {
            self.cut().await;
            self.kind = kind;
        }
        let Some(open) = pipe.as_ref() else { return };
        let before = self.buffer.len();
        self.buffer.resize(FRAME_BYTES, 0);
        let read = open.try_read(&mut self.buffer[before..]);
        self.buffer.truncate(before + read.as_ref().copied().unwrap_or(0));
        match read {
            Ok(0) => *pipe = None,
            Ok(_) if before == 0 => self.cut_at = Instant::now() + Duration::from_millis(FRAME_MS),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                crate::note!("the command's output cannot be read: {error}");
                *pipe = None;
            }
        }
        if self.buffer.len() == FRAME_BYTES {
            self.cut().await;
        }
    }

    /// Not a byte is dropped: while the disk refuses, the command blocks.
    async fn cut(&mut self) {
        if self.buffer.is_empty() {
            return;
        }
        while let Err(error) = self.desk.append(self.kind, &self.buffer) {
            crate::note!("the spool cannot be written: {error}");
            sleep(disk::RETRY).await;
        }
        if self.kind == FrameKind::Stdout {
            self.tail.add(&self.buffer);
        }
        self.buffer.clear();
    }
}
