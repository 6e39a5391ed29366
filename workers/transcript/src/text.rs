//! What was printed, as bytes (`raw`) or as text without control codes (`text`). Each stream has a parser of its own that remembers where a cut fell, so an escape sequence or a
//! character that two frames share comes out whole (field cases D1, D2).

use std::collections::HashMap;

use towpath_schemas::frame::{Frame, FrameKind, GapRecord};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Raw,
    Text,
}

/// Turns frames into what a reader of `format` gets.
pub struct Renderer {
    format: Format,
    /// Only this stream, when one was asked for.
    only: Option<FrameKind>,
    streams: HashMap<FrameKind, Stream>,
}

/// One stream's parser and what it has let through.
#[derive(Default)]
struct Stream {
    parser: vte::Parser,
    plain: Plain,
}

#[derive(Default)]
struct Plain(String);

impl vte::Perform for Plain {
    fn print(&mut self, c: char) {
        self.0.push(c);
    }

    fn execute(&mut self, byte: u8) {
        if matches!(byte, b'\n' | b'\t') {
            self.0.push(char::from(byte));
        }
    }
}

impl Renderer {
    pub fn new(format: Format, only: Option<FrameKind>) -> Self {
        Self { format, only, streams: HashMap::new() }
    }

    pub fn frame(&mut self, frame: &Frame, out: &mut Vec<u8>) {
        if !frame.kind.is_output() || self.only.is_some_and(|only| only != frame.kind) {
            return;
        }
        match self.format {
            Format::Raw => out.extend_from_slice(&frame.payload),
            Format::Text => {
                let stream = self.streams.entry(frame.kind).or_default();
                stream.parser.advance(&mut stream.plain, &frame.payload);
                out.extend_from_slice(stream.plain.0.as_bytes());
                stream.plain.0.clear();
            }
        }
    }

    /// `raw` is bytes only: whoever wants the marks reads the run's `transcript.state` or the event stream.
    pub fn gap(&mut self, gap: &GapRecord, out: &mut Vec<u8>) {
        if self.format == Format::Text {
            out.extend_from_slice(format!("\n[gap: {}]\n", gap.reason).as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: FrameKind, payload: &[u8]) -> Frame {
        Frame { kind, epoch: 1, seq: 1, offset: 0, wall_us: 0, mono_us: 0, payload: payload.to_vec() }
    }

    #[test]
    fn a_code_or_a_character_cut_anywhere_comes_out_whole() {
        let printed = "\x1b[1;37mwhite\x1b[0m ─ 🦀 \x1b]8;;https://x.example\x07link\x1b]8;;\x1b\\ end\n".as_bytes();
        for cut in 0..=printed.len() {
            let mut renderer = Renderer::new(Format::Text, None);
            let mut out = Vec::new();
            renderer.frame(&frame(FrameKind::Stdout, &printed[..cut]), &mut out);
            renderer.frame(&frame(FrameKind::Stderr, b"other"), &mut Vec::new());
            renderer.frame(&frame(FrameKind::Stdout, &printed[cut..]), &mut out);
            assert_eq!(String::from_utf8_lossy(&out), "white ─ 🦀 link end\n", "cut at {cut}");
        }
    }

    #[test]
    fn raw_is_every_byte_and_records_are_none() {
        let mut renderer = Renderer::new(Format::Raw, None);
        let mut out = Vec::new();
        renderer.frame(&frame(FrameKind::Stdout, b"\xff\x1b[1m"), &mut out);
        renderer.frame(&frame(FrameKind::End, b"{}"), &mut out);
        assert_eq!(out, b"\xff\x1b[1m");
    }
}
