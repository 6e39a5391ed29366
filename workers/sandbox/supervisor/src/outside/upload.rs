//! Output files on their way to the gateway: one at a time, in pieces, from the beginning again after a reconnect.

use std::{collections::VecDeque, fs::File, io, os::unix::fs::FileExt};

use towpath_schemas::{
    guest::{FromGuest, binary},
    limit::FILE_PIECE_BYTES,
};

use super::desk::Outgoing;

/// An output file that is to be sent, opened before it is announced.
pub struct Output {
    pub name: String,
    pub size: u64,
    pub content: Content,
}

pub enum Content {
    File { file: File, sha256: String },
    Skipped { reason: String },
}

#[derive(Default)]
pub struct Uploads {
    /// The first one is under way; its number is `number`.
    queue: VecDeque<Output>,
    number: u64,
    /// The connection on which the first one was announced, and how much of it was sent there.
    announced_on: u64,
    sent: u64,
}

impl Uploads {
    pub fn push(&mut self, output: Output) {
        self.queue.push_back(output);
    }

    pub fn is_done(&self) -> bool {
        self.queue.is_empty()
    }

    pub fn answered(&mut self, upload: u64) {
        if upload == self.number && self.queue.pop_front().is_some() {
            self.number += 1;
            self.announced_on = 0;
        }
    }

    pub fn next(&mut self, connection: u64) -> io::Result<Option<Outgoing>> {
        let (upload, Some(output)) = (self.number, self.queue.front_mut()) else { return Ok(None) };
        let (name, size) = (output.name.clone(), output.size);
        if self.announced_on != connection {
            (self.announced_on, self.sent) = (connection, 0);
            return Ok(Some(Outgoing::Text(match &output.content {
                Content::File { sha256, .. } => FromGuest::Output { upload, name, size, sha256: sha256.clone() },
                Content::Skipped { reason } => FromGuest::OutputSkipped { upload, name, size, reason: reason.clone() },
            })));
        }
        let Content::File { file, .. } = &output.content else { return Ok(None) };
        let bytes = (size - self.sent).min(FILE_PIECE_BYTES as u64) as usize;
        if bytes == 0 {
            return Ok(None);
        }
        let mut message = vec![0; 9 + bytes];
        message[0] = binary::OUTPUT_PIECE;
        message[1..9].copy_from_slice(&upload.to_be_bytes());
        if let Err(error) = file.read_exact_at(&mut message[9..], self.sent) {
            // Its command has written into it meanwhile; it is looked at again later.
            let reason = format!("it changed while it was read: {error}");
            output.content = Content::Skipped { reason: reason.clone() };
            return Ok(Some(Outgoing::Text(FromGuest::OutputSkipped { upload, name, size, reason })));
        }
        self.sent += bytes as u64;
        Ok(Some(Outgoing::Binary(message)))
    }
}
