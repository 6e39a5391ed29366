//! One transcript frame, byte for byte. All integers are big-endian.
//!
//! | bytes | field |
//! |---|---|
//! | 1 | version, 1 |
//! | 1 | kind: 1 stdout, 2 stderr, 3 terminal, 4 gap, 5 end, 6 screen, 7 resize |
//! | 4 | epoch, from 1 |
//! | 8 | sequence number, from 1 in each epoch, without holes |
//! | 8 | offset: bytes printed in this epoch before this frame, stdout and stderr together |
//! | 8 | wall clock, microseconds since 1970 |
//! | 8 | monotonic clock of the sandbox, microseconds since its supervisor started |
//! | 4 | length of the payload |
//! | n | payload: the bytes as printed; for the other kinds a JSON record |

use serde::{Deserialize, Serialize};

use crate::{
    guest::{Exit, SteerEnd},
    limit::{FRAME_BYTES, TERMINAL_COLS, TERMINAL_ROWS},
};

pub const VERSION: u8 = 1;
pub const HEADER_BYTES: usize = 42;
/// Gap and end records may be larger than a frame of output, but not without end.
pub const RECORD_BYTES: usize = 512 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FrameKind {
    Stdout,
    Stderr,
    Terminal,
    Gap,
    End,
    /// What the terminal shows at this place: whoever comes late begins here.
    Screen,
    /// The terminal has another size from here on.
    Resize,
    /// A record of a newer release: kept and carried on, and shown by nobody here.
    Other(u8),
}

impl FrameKind {
    /// Bytes that the agent printed, as opposed to a record about them.
    pub fn is_output(self) -> bool {
        matches!(self, FrameKind::Stdout | FrameKind::Stderr | FrameKind::Terminal)
    }

    pub fn name(self) -> &'static str {
        match self {
            FrameKind::Stdout => "stdout",
            FrameKind::Stderr => "stderr",
            FrameKind::Terminal => "terminal",
            FrameKind::Gap => "gap",
            FrameKind::End => "end",
            FrameKind::Screen => "screen",
            FrameKind::Resize => "resize",
            FrameKind::Other(_) => "other",
        }
    }
}

impl FrameKind {
    pub fn byte(self) -> u8 {
        match self {
            FrameKind::Stdout => 1,
            FrameKind::Stderr => 2,
            FrameKind::Terminal => 3,
            FrameKind::Gap => 4,
            FrameKind::End => 5,
            FrameKind::Screen => 6,
            FrameKind::Resize => 7,
            FrameKind::Other(byte) => byte,
        }
    }
}

impl From<u8> for FrameKind {
    fn from(byte: u8) -> Self {
        match byte {
            1 => FrameKind::Stdout,
            2 => FrameKind::Stderr,
            3 => FrameKind::Terminal,
            4 => FrameKind::Gap,
            5 => FrameKind::End,
            6 => FrameKind::Screen,
            7 => FrameKind::Resize,
            other => FrameKind::Other(other),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub kind: FrameKind,
    pub epoch: u32,
    pub seq: u64,
    pub offset: u64,
    pub wall_us: u64,
    pub mono_us: u64,
    pub payload: Vec<u8>,
}

/// Bytes that are no frame. Nothing is guessed from them.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FrameError {
    #[error("frame is cut short: {have} of {want} bytes")]
    Short { have: usize, want: usize },
    #[error("frame version {0} is not known")]
    Version(u8),
    #[error("frame of {0} bytes is over the limit")]
    Long(usize),
}

impl Frame {
    pub fn encoded_len(&self) -> usize {
        HEADER_BYTES + self.payload.len()
    }

    pub fn encode_into(&self, out: &mut Vec<u8>) {
        out.reserve(self.encoded_len());
        out.push(VERSION);
        out.push(self.kind.byte());
        out.extend_from_slice(&self.epoch.to_be_bytes());
        out.extend_from_slice(&self.seq.to_be_bytes());
        out.extend_from_slice(&self.offset.to_be_bytes());
        out.extend_from_slice(&self.wall_us.to_be_bytes());
        out.extend_from_slice(&self.mono_us.to_be_bytes());
        out.extend_from_slice(&(self.payload.len() as u32).to_be_bytes());
        out.extend_from_slice(&self.payload);
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.encoded_len());
        self.encode_into(&mut out);
        out
    }

    /// Reads one frame from the head of `bytes`; the second value is how many bytes it took.
    pub fn decode(bytes: &[u8]) -> Result<(Frame, usize), FrameError> {
        let header: &[u8; HEADER_BYTES] = bytes.first_chunk().ok_or(FrameError::Short { have: bytes.len(), want: HEADER_BYTES })?;
        if header[0] != VERSION {
            return Err(FrameError::Version(header[0]));
        }
        let kind = FrameKind::from(header[1]);
        let u32_at = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) << 32 | u64::from(u32_at(at + 4));
        let length = u32_at(38) as usize;
        let most = if kind.is_output() { FRAME_BYTES } else { RECORD_BYTES };
        if length > most {
            return Err(FrameError::Long(length));
        }
        let want = HEADER_BYTES + length;
        let payload = bytes.get(HEADER_BYTES..want).ok_or(FrameError::Short { have: bytes.len(), want })?.to_vec();
        let frame = Frame { kind, epoch: u32_at(2), seq: u64_at(6), offset: u64_at(14), wall_us: u64_at(22), mono_us: u64_at(30), payload };
        Ok((frame, want))
    }

    /// Reads frames that stand one behind the other, to the last byte.
    pub fn decode_all(mut bytes: &[u8]) -> Result<Vec<Frame>, FrameError> {
        let mut frames = Vec::new();
        while !bytes.is_empty() {
            let (frame, taken) = Frame::decode(bytes)?;
            frames.push(frame);
            bytes = &bytes[taken..];
        }
        Ok(frames)
    }
}

/// Payload of an `end` frame: the last thing an epoch says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EndRecord {
    pub exit: Exit,
    /// Bytes printed in this epoch.
    pub bytes: u64,
    /// What became of every steer that this epoch was sent.
    pub steers: Vec<SteerEnd>,
}

/// Size of a terminal in character cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Size {
    pub cols: u16,
    pub rows: u16,
}

impl Default for Size {
    fn default() -> Self {
        Self { cols: 120, rows: 40 }
    }
}

impl Size {
    /// The nearest size that a terminal may have.
    pub fn bounded(self) -> Self {
        Self { cols: self.cols.clamp(2, TERMINAL_COLS), rows: self.rows.clamp(2, TERMINAL_ROWS) }
    }
}

/// Payload of a `screen` frame. A terminal of that size, newly made, shows the same after it was fed `dump`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScreenRecord {
    #[serde(flatten)]
    pub size: Size,
    /// Control sequences and text.
    pub dump: String,
}

/// Payload of a `gap` frame: what is missing, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GapRecord {
    pub reason: String,
    /// Bytes known to be missing; absent when nobody can know.
    pub bytes: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(payload: &[u8]) -> Frame {
        Frame {
            kind: FrameKind::Stderr,
            epoch: 7,
            seq: u64::MAX - 1,
            offset: 1 << 40,
            wall_us: 1_800_000_000_000_000,
            mono_us: 12,
            payload: payload.to_vec(),
        }
    }

    #[test]
    fn frames_behind_one_another_read_back_whole() {
        let frames = vec![frame(b"one"), frame(b""), frame(&[0xff; 4096])];
        let mut bytes = Vec::new();
        frames.iter().for_each(|f| f.encode_into(&mut bytes));
        assert_eq!(Frame::decode_all(&bytes), Ok(frames));
    }

    #[test]
    fn a_frame_cut_anywhere_is_an_error_and_never_a_shorter_frame() {
        let bytes = frame(b"payload").encode();
        for cut in 1..bytes.len() {
            assert!(matches!(Frame::decode_all(&bytes[..cut]), Err(FrameError::Short { .. })), "cut at {cut}");
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_it_is_allocated() {
        let mut bytes = frame(b"x").encode();
        bytes[38..42].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(Frame::decode(&bytes), Err(FrameError::Long(u32::MAX as usize)));
    }
}
