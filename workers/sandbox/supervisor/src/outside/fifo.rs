//! The steering FIFO: one writer, whole lines, never blocking.
//!
//! It is held open for reading and writing by us, so the agent never sees an end of file, we never get SIGPIPE, and whether the agent
//! reads, closes or removes it changes nothing here. What has left the pipe is what we wrote less what FIONREAD finds in it.

use std::{collections::VecDeque, io, os::fd::OwnedFd, path::Path, time::Duration};

use rustix::{
    fs::{FileType, Mode, OFlags},
    io::{Errno, ioctl_fionread, write},
};
use serde::Serialize;
use tokio::time::sleep;
use towpath_schemas::{
    agent::SteeringFormat,
    guest::{SteerOrder, SteerState},
    id::SteerId,
};

use super::{
    desk::Desk,
    disk,
    stage::{Inputs, Staged},
};

/// How often an unread message is looked after.
const LOOK: Duration = Duration::from_millis(50);

struct Writing {
    steer: SteerId,
    line: Vec<u8>,
    done: usize,
}

struct Mark {
    steer: SteerId,
    start: u64,
    end: u64,
}

pub struct Fifo {
    pipe: OwnedFd,
    written: u64,
    writing: Option<Writing>,
    unread: VecDeque<Mark>,
}

impl Fifo {
    /// Makes it at a path that does not exist yet.
    pub fn create(path: &Path, owner: Option<u32>) -> io::Result<Self> {
        rustix::fs::mknodat(rustix::fs::CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        super::give_to(path, owner)?;
        let pipe = rustix::fs::open(path, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())?;
        Ok(Self { pipe, written: 0, writing: None, unread: VecDeque::new() })
    }

    fn is_idle(&self) -> bool {
        self.writing.is_none() && self.unread.is_empty()
    }

    /// Bytes that have left the pipe. A reader that writes into it itself can only make this smaller.
    fn consumed(&self) -> u64 {
        self.written.saturating_sub(ioctl_fionread(&self.pipe).unwrap_or(u64::MAX))
    }

    fn look(&mut self, desk: &Desk) {
        let consumed = self.consumed();
        while self.unread.front().is_some_and(|mark| mark.end <= consumed) {
            let Some(mark) = self.unread.pop_front() else { return };
            desk.with_ledger(|ledger| ledger.set(mark.steer, SteerState::Read));
        }
    }

    fn write(&mut self, desk: &Desk) {
        let Some(writing) = self.writing.as_mut() else { return };
        while writing.done < writing.line.len() {
            match write(&self.pipe, &writing.line[writing.done..]) {
                Ok(bytes) => {
                    writing.done += bytes;
                    self.written += bytes as u64;
                }
                Err(Errno::INTR) => {}
                // Full: the agent does not read. The rest of the line is tried again.
                Err(_) => return,
            }
        }
        let end = self.written;
        let (steer, start) = (writing.steer, end - writing.line.len() as u64);
        self.unread.push_back(Mark { steer, start, end });
        self.writing = None;
        desk.with_ledger(|ledger| ledger.set(steer, SteerState::Written));
    }

    /// When nobody can read any more: wholly unread has expired, half-read is unknown.
    pub fn settle(&mut self, desk: &Desk) {
        self.look(desk);
        let consumed = self.consumed();
        if let Some(Writing { steer, done, .. }) = self.writing.take() {
            self.unread.push_back(Mark { steer, start: self.written - done as u64, end: u64::MAX });
        }
        for mark in self.unread.drain(..) {
            let state = if consumed <= mark.start { SteerState::Expired } else { SteerState::Unknown };
            desk.with_ledger(|ledger| ledger.set(mark.steer, state));
        }
    }
}

/// Gives steers to the agent in order, for as long as it is polled.
pub async fn pump(desk: &Desk, fifo: &mut Fifo, inputs: &Inputs, format: SteeringFormat) {
    loop {
        if fifo.is_idle() {
            desk.steer_waits().await;
        } else {
            sleep(LOOK).await;
        }
        fifo.look(desk);
        fifo.write(desk);
        while fifo.writing.is_none() {
            match desk.with_ledger(|ledger| ledger.pop()) {
                Ok(Some(order)) => {
                    begin(desk, fifo, inputs, format, order).await;
                    fifo.write(desk);
                }
                Ok(None) => break,
                // Stays `queued` here and so expires at the end.
                Err(error) => crate::note!("a steer cannot be read back: {error}"),
            }
        }
    }
}

async fn begin(desk: &Desk, fifo: &mut Fifo, inputs: &Inputs, format: SteeringFormat, order: SteerOrder) {
    let files = inputs.stage(desk, &order.files).await;
    let steer = order.steer;
    match disk::patiently(desk, || desk.with_ledger(|ledger| ledger.record_intent(steer))).await {
        Ok(()) => fifo.writing = Some(Writing { steer, line: line(format, &order, &files), done: 0 }),
        Err(error) => crate::note!("{steer} is not given to the agent, because the intent cannot be recorded: {error}"),
    }
}

fn line(format: SteeringFormat, order: &SteerOrder, files: &[Staged]) -> Vec<u8> {
    #[derive(Serialize)]
    struct Line<'a> {
        id: SteerId,
        message: &'a str,
        files: &'a [Staged],
    }
    let mut line = match format {
        SteeringFormat::Text => one_line(&order.message).into_bytes(),
        SteeringFormat::Json => serde_json::to_vec(&Line { id: order.steer, message: &order.message, files }).unwrap_or_default(),
    };
    line.push(b'\n');
    line
}

/// Every line break (Unicode's list, and CR LF as one) becomes a space.
fn one_line(text: &str) -> String {
    text.replace("\r\n", " ").replace(['\n', '\r', '\u{b}', '\u{c}', '\u{85}', '\u{2028}', '\u{2029}'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(message: &str) -> SteerOrder {
        SteerOrder { steer: SteerId::mint(), ordinal: 1, message: message.to_owned(), files: vec![] }
    }

    #[test]
    fn a_message_of_several_lines_is_one_line_in_either_format() {
        let order = order("one\r\ntwo\nthree\rfour\u{2028}five");
        assert_eq!(line(SteeringFormat::Text, &order, &[]), b"one two three four five\n");
        let json = line(SteeringFormat::Json, &order, &[]);
        assert_eq!(json.iter().filter(|byte| **byte == b'\n').count(), 1);
        let read: serde_json::Value = serde_json::from_slice(&json).expect("json");
        assert_eq!(read, serde_json::json!({ "id": order.steer, "message": order.message, "files": [] }));
    }
}
