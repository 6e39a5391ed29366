//! The spool: frames on local disk until they are sealed. No frame that was not yet sent is kept in memory.
//!
//! Segment files named by their first sequence number hold encoded frames one behind the other. A whole segment is removed once
//! all of it is sealed. It needs no fsync: a supervisor that dies takes its incarnation, and so its frames' right to be stored, with it.

use std::{
    collections::VecDeque,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::PathBuf,
};

use towpath_schemas::{
    frame::{Frame, FrameKind, HEADER_BYTES},
    limit::FRAME_BYTES,
};

use crate::{clock, folder};

/// A segment is closed at this size, or at a quarter of a small spool.
const SEGMENT_BYTES: u64 = 1024 * 1024;
/// The spool is full when not even this many bytes are free: one frame gathered, one being read.
const ROOM_BYTES: u64 = 2 * (FRAME_BYTES + HEADER_BYTES) as u64;
/// Smallest spool that can work at all.
const LEAST_BYTES: u64 = 8 * ROOM_BYTES;

struct Segment {
    first: u64,
    /// `first - 1` while it is empty.
    last: u64,
    bytes: u64,
}

/// Where sending stands.
struct Cursor {
    seq: u64,
    /// The open segment (by its first sequence number) and how far it was read.
    reading: Option<(u64, File, u64)>,
}

pub struct Spool {
    folder: PathBuf,
    epoch: u32,
    limit: u64,
    lifted: bool,
    segments: VecDeque<Segment>,
    writing: Option<File>,
    next_seq: u64,
    /// Bytes printed so far.
    printed: u64,
    held: u64,
    sealed: u64,
    started_us: u64,
    cursor: Cursor,
}

impl Spool {
    pub fn create(folder: PathBuf, epoch: u32, limit: u64) -> io::Result<Self> {
        folder::make_private(&folder)?;
        Ok(Self {
            folder,
            epoch,
            limit: limit.max(LEAST_BYTES),
            lifted: false,
            segments: VecDeque::new(),
            writing: None,
            next_seq: 1,
            printed: 0,
            held: 0,
            sealed: 0,
            started_us: clock::mono_us(),
            cursor: Cursor { seq: 1, reading: None },
        })
    }

    pub fn printed(&self) -> u64 {
        self.printed
    }

    /// Whether one more frame may be gathered.
    pub fn has_room(&self) -> bool {
        self.lifted || self.held + ROOM_BYTES <= self.limit
    }

    /// The command has ended: what its pipes still hold is taken in any case, so that a full spool does not keep the end from being told.
    pub fn lift_limit(&mut self) {
        self.lifted = true;
    }

    /// Whether every frame was handed out for sending.
    pub fn is_drained(&self) -> bool {
        self.cursor.seq == self.next_seq
    }

    /// Appends one frame. After an error nothing of it is in the spool, and the caller may try again.
    pub fn append(&mut self, kind: FrameKind, payload: &[u8]) -> io::Result<()> {
        let frame = Frame {
            kind,
            epoch: self.epoch,
            seq: self.next_seq,
            offset: self.printed,
            wall_us: clock::wall_us(),
            mono_us: clock::mono_us().saturating_sub(self.started_us),
            payload: payload.to_vec(),
        };
        let bytes = frame.encode();
        self.open_segment()?;
        let (Some(file), Some(segment)) = (self.writing.as_ref(), self.segments.back_mut()) else {
            return Err(io::Error::other("the spool has no open segment"));
        };
        // Written at the known end: what a failed write left behind is overwritten by the next.
        file.write_all_at(&bytes, segment.bytes)?;
        segment.bytes += bytes.len() as u64;
        segment.last = frame.seq;
        self.held += bytes.len() as u64;
        self.next_seq += 1;
        if kind.is_output() {
            self.printed += payload.len() as u64;
        }
        Ok(())
    }

    fn open_segment(&mut self) -> io::Result<()> {
        let most = SEGMENT_BYTES.min(self.limit / 4);
        if self.writing.is_some() && self.segments.back().is_some_and(|segment| segment.bytes < most) {
            return Ok(());
        }
        let path = self.path(self.next_seq);
        self.writing = Some(OpenOptions::new().create(true).truncate(true).read(true).write(true).mode(0o600).open(path)?);
        self.segments.push_back(Segment { first: self.next_seq, last: self.next_seq - 1, bytes: 0 });
        Ok(())
    }

    fn path(&self, first: u64) -> PathBuf {
        self.folder.join(format!("{first:020}"))
    }

    /// Frees the segments that hold only what is sealed up to `seq`.
    pub fn sealed(&mut self, seq: u64) {
        self.sealed = self.sealed.max(seq.min(self.next_seq - 1));
        while let Some(segment) = self.segments.front() {
            if segment.last > self.sealed || segment.bytes == 0 {
                break;
            }
            let path = self.path(segment.first);
            if let Err(error) = fs::remove_file(&path) {
                crate::note!("{} cannot be removed: {error}", path.display());
            }
            self.held -= segment.bytes;
            if self.segments.len() == 1 {
                self.writing = None;
            }
            self.segments.pop_front();
        }
        if self.cursor.seq <= self.sealed {
            self.rewind(self.sealed + 1);
        }
    }

    /// Hands frames out again from `seq`, or from the first that is not sealed.
    pub fn rewind(&mut self, seq: u64) {
        self.cursor = Cursor { seq: seq.clamp(self.sealed + 1, self.next_seq), reading: None };
    }

    /// The next frames to send, encoded, and the last one's sequence number: as many whole ones as fit, at least one.
    pub fn read(&mut self, most: usize) -> io::Result<Option<(Vec<u8>, u64)>> {
        let Some(segment) = self.segments.iter().find(|segment| segment.last >= self.cursor.seq && segment.bytes > 0) else {
            return Ok(None);
        };
        let (first, bytes) = (segment.first, segment.bytes);
        let (file, position) = match self.cursor.reading.take() {
            Some((open, file, position)) if open == first => (file, position),
            _ => {
                let file = File::open(self.path(first))?;
                let position = position_of(&file, first, self.cursor.seq)?;
                (file, position)
            }
        };
        let mut buffer = vec![0; usize::try_from(bytes - position).unwrap_or(usize::MAX).min(most)];
        file.read_exact_at(&mut buffer, position)?;
        let mut whole = 0;
        let mut frames = 0;
        while let Some(length) = frame_length(&buffer[whole..]) {
            if whole + length > buffer.len() {
                if whole == 0 {
                    // One record larger than asked for.
                    buffer.resize(length, 0);
                    file.read_exact_at(&mut buffer, position)?;
                    continue;
                }
                break;
            }
            whole += length;
            frames += 1;
        }
        buffer.truncate(whole);
        let last = self.cursor.seq + frames - 1;
        self.cursor = Cursor { seq: last + 1, reading: Some((first, file, position + whole as u64)) };
        Ok(Some((buffer, last)))
    }
}

/// Length of the frame at the head of `bytes`; None when not even its header is there.
fn frame_length(bytes: &[u8]) -> Option<usize> {
    let header: &[u8; HEADER_BYTES] = bytes.first_chunk()?;
    Some(HEADER_BYTES + u32::from_be_bytes([header[38], header[39], header[40], header[41]]) as usize)
}

fn position_of(file: &File, first: u64, wanted: u64) -> io::Result<u64> {
    let mut position = 0;
    let mut header = [0; HEADER_BYTES];
    for _ in first..wanted {
        file.read_exact_at(&mut header, position)?;
        position += frame_length(&header).unwrap_or(HEADER_BYTES) as u64;
    }
    Ok(position)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spool(limit: u64) -> (tempfile::TempDir, Spool) {
        let folder = tempfile::tempdir().expect("folder");
        let spool = Spool::create(folder.path().join("spool"), 1, limit).expect("spool");
        (folder, spool)
    }

    fn drain(spool: &mut Spool) -> Vec<Frame> {
        let mut frames = Vec::new();
        while let Some((bytes, last)) = spool.read(100_000).expect("read") {
            frames.extend(Frame::decode_all(&bytes).expect("whole frames"));
            assert_eq!(frames.last().map(|frame| frame.seq), Some(last));
        }
        frames
    }

    #[test]
    fn what_is_not_sealed_can_be_sent_again_and_what_is_sealed_is_freed() {
        let (_folder, mut spool) = spool(64 * 1024 * 1024);
        for number in 0..200_u32 {
            spool.append(FrameKind::Stdout, &vec![number as u8; FRAME_BYTES - (number as usize % 7)]).expect("append");
        }
        assert_eq!(drain(&mut spool).len(), 200);
        spool.sealed(150);
        assert!(fs::read_dir(&spool.folder).expect("folder").count() < 4);
        spool.rewind(1);
        let again = drain(&mut spool);
        assert_eq!((again[0].seq, again.len()), (151, 50));
        spool.sealed(200);
        assert_eq!((spool.held, fs::read_dir(&spool.folder).expect("folder").count()), (0, 0));
        spool.append(FrameKind::Stderr, b"later").expect("append");
        let later = drain(&mut spool);
        assert_eq!((later[0].seq, later[0].offset), (201, spool.printed() - 5));
    }

    #[test]
    fn a_full_spool_has_no_room_until_something_is_sealed() {
        let (_folder, mut spool) = spool(0);
        let mut frames = 0;
        while spool.has_room() {
            spool.append(FrameKind::Stdout, &[b'x'; FRAME_BYTES]).expect("append");
            frames += 1;
        }
        assert!(spool.held <= spool.limit);
        spool.sealed(frames / 2);
        assert!(spool.has_room());
    }

    #[test]
    fn a_record_larger_than_a_batch_comes_whole() {
        let (_folder, mut spool) = spool(64 * 1024 * 1024);
        spool.append(FrameKind::Stdout, b"before").expect("append");
        spool.append(FrameKind::End, &vec![b'x'; 300_000]).expect("append");
        assert_eq!(drain(&mut spool).iter().map(|frame| frame.payload.len()).collect::<Vec<_>>(), [6, 300_000]);
    }
}
