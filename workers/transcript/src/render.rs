//! A transcript as people and programs want it: `raw`, every byte; `text`, control codes carried out; `cast`, an asciicast v3 recording
//! (<https://docs.asciinema.org/manual/asciicast/v3/>); `ndjson`, a frame a line. Each stream has a parser of its own that remembers where a cut fell.

use std::collections::HashMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use chrono::{DateTime, SecondsFormat, Utc};
use serde_json::json;
use towpath_schemas::frame::{EndRecord, Frame, FrameKind, GapRecord, ScreenRecord, Size};
use towpath_terminal::{Lines, Text, Utf8};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Raw,
    Text,
    Cast,
    Ndjson,
}

impl Format {
    pub const NAMES: [&str; 4] = ["text", "raw", "cast", "ndjson"];

    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "raw" => Format::Raw,
            "text" => Format::Text,
            "cast" => Format::Cast,
            "ndjson" => Format::Ndjson,
            _ => return None,
        })
    }

    pub fn media_type(self) -> &'static str {
        match self {
            Format::Raw => "application/octet-stream",
            Format::Text => "text/plain; charset=utf-8",
            Format::Cast => "application/x-asciicast",
            Format::Ndjson => "application/x-ndjson",
        }
    }
}

/// Turns frames into what a reader of a format gets.
pub struct Renderer {
    format: Format,
    /// Only this stream, when one was asked for.
    only: Option<FrameKind>,
    lines: HashMap<FrameKind, Lines>,
    terminal: Option<Text>,
    cast: Cast,
}

impl Renderer {
    pub fn new(format: Format, only: Option<FrameKind>) -> Self {
        Self { format, only, lines: HashMap::new(), terminal: None, cast: Cast::default() }
    }

    pub fn frame(&mut self, frame: &Frame, out: &mut Vec<u8>) {
        if frame.kind.is_output() && self.only.is_some_and(|only| only != frame.kind) {
            return;
        }
        match self.format {
            Format::Raw if frame.kind.is_output() => out.extend_from_slice(&frame.payload),
            Format::Raw => {}
            Format::Text => self.text(frame, out),
            Format::Cast => self.cast.frame(frame, out),
            Format::Ndjson => line(out, &described(frame)),
        }
    }

    /// `raw` is bytes only: whoever wants the marks reads the run's `transcript.state` or the event stream.
    pub fn gap(&mut self, epoch: i32, gap: &GapRecord, out: &mut Vec<u8>) {
        match self.format {
            Format::Raw => {}
            Format::Text => {
                self.flush(out);
                out.extend_from_slice(format!("\n[gap: {}]\n", gap.reason).as_bytes());
            }
            Format::Cast => self.cast.marker(&format!("gap: {}", gap.reason), out),
            Format::Ndjson => line(out, &json!({ "epoch": epoch, "kind": "gap", "reason": gap.reason, "bytes": gap.bytes })),
        }
    }

    /// Text that was not given yet depends on no frame before: reading may begin anew here.
    pub fn is_at_line_start(&self) -> bool {
        self.terminal.is_none() && self.lines.values().all(Lines::is_empty)
    }

    /// Everything was given: what still stands on a screen or in a line.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        if self.format == Format::Text {
            self.flush(out);
        }
    }

    fn flush(&mut self, out: &mut Vec<u8>) {
        if let Some(terminal) = self.terminal.take() {
            put_lines(&terminal.finish(), out);
        }
        for kind in [FrameKind::Stdout, FrameKind::Stderr] {
            if let Some(lines) = self.lines.remove(&kind) {
                out.extend_from_slice(lines.finish().as_bytes());
            }
        }
    }

    fn text(&mut self, frame: &Frame, out: &mut Vec<u8>) {
        match frame.kind {
            FrameKind::Stdout | FrameKind::Stderr => {
                out.extend_from_slice(self.lines.entry(frame.kind).or_default().print(&frame.payload).as_bytes());
            }
            FrameKind::Terminal => {
                let terminal = self.terminal.get_or_insert_with(|| Text::new(Size::default()));
                put_lines(&terminal.print(&frame.payload), out);
            }
            FrameKind::Resize => {
                if let (Some(terminal), Ok(size)) = (&mut self.terminal, serde_json::from_slice(&frame.payload)) {
                    put_lines(&terminal.resize(size), out);
                }
            }
            // Where reading begins in the middle, the screen is what there is of everything before.
            FrameKind::Screen if self.terminal.is_none() => {
                if let Ok(record) = serde_json::from_slice::<ScreenRecord>(&frame.payload) {
                    let mut terminal = Text::new(record.size);
                    terminal.print(record.dump.as_bytes());
                    self.terminal = Some(terminal);
                }
            }
            FrameKind::Screen | FrameKind::Other(_) => {}
            // The next epoch begins with a screen of its own.
            FrameKind::Gap | FrameKind::End => self.flush(out),
        }
    }
}

fn put_lines(lines: &[String], out: &mut Vec<u8>) {
    for line in lines {
        out.extend_from_slice(line.as_bytes());
        out.push(b'\n');
    }
}

fn line(out: &mut Vec<u8>, value: &serde_json::Value) {
    out.extend_from_slice(value.to_string().as_bytes());
    out.push(b'\n');
}

fn time(microseconds: u64) -> Option<DateTime<Utc>> {
    DateTime::from_timestamp_micros(i64::try_from(microseconds).ok()?)
}

fn described(frame: &Frame) -> serde_json::Value {
    let mut value = json!({
        "epoch": frame.epoch, "seq": frame.seq, "kind": frame.kind.name(), "offset": frame.offset, "mono_us": frame.mono_us,
        "at": time(frame.wall_us).map(|at| at.to_rfc3339_opts(SecondsFormat::Micros, true)),
    });
    if frame.kind.is_output() {
        value["b64"] = STANDARD.encode(&frame.payload).into();
    } else {
        value["record"] = serde_json::from_slice(&frame.payload).unwrap_or_default();
    }
    value
}

/// An asciicast v3: a header, then events with the time since the one before.
#[derive(Default)]
struct Cast {
    size: Option<Size>,
    /// Epoch, and monotonic and wall clock of the last event.
    last: Option<(u32, u64, u64)>,
    /// Something is missing: the next recorded screen is drawn.
    torn: bool,
    streams: HashMap<FrameKind, Utf8>,
}

impl Cast {
    fn frame(&mut self, frame: &Frame, out: &mut Vec<u8>) {
        let record = (frame.kind == FrameKind::Screen).then(|| serde_json::from_slice::<ScreenRecord>(&frame.payload).ok()).flatten();
        let first = self.size.is_none();
        if first {
            self.begin(frame, record.as_ref().map(|record| record.size).unwrap_or_default(), out);
        }
        let next_epoch = self.last.is_some_and(|(epoch, ..)| epoch != frame.epoch);
        match frame.kind {
            FrameKind::Stdout | FrameKind::Stderr | FrameKind::Terminal => {
                let text = self.streams.entry(frame.kind).or_default().decode(&frame.payload);
                // What came over a pipe has no carriage returns; a player's terminal wants them.
                let text = if frame.kind == FrameKind::Terminal { text } else { text.replace('\n', "\r\n") };
                if !text.is_empty() {
                    self.event(frame, "o", &text, out);
                }
            }
            FrameKind::Resize => {
                if let Ok(size) = serde_json::from_slice::<Size>(&frame.payload) {
                    self.resize(frame, size, out);
                }
            }
            FrameKind::Screen if first || next_epoch || self.torn => {
                self.torn = false;
                if let Some(record) = record {
                    self.resize(frame, record.size, out);
                    self.event(frame, "o", &format!("\x1bc{}", record.dump), out);
                }
            }
            FrameKind::End => {
                let exit = serde_json::from_slice::<EndRecord>(&frame.payload).ok().map(|end| end.exit);
                if let Some(code) = exit.and_then(|exit| exit.code.or(exit.signal.map(|signal| 128 + signal))) {
                    self.event(frame, "x", &code.to_string(), out);
                }
            }
            FrameKind::Screen | FrameKind::Gap | FrameKind::Other(_) => {}
        }
    }

    fn begin(&mut self, frame: &Frame, size: Size, out: &mut Vec<u8>) {
        self.size = Some(size);
        line(
            out,
            &json!({
                "version": 3, "term": { "cols": size.cols, "rows": size.rows, "type": "xterm-256color" }, "timestamp": frame.wall_us / 1_000_000,
            }),
        );
        self.last = Some((frame.epoch, frame.mono_us, frame.wall_us));
    }

    fn resize(&mut self, frame: &Frame, size: Size, out: &mut Vec<u8>) {
        if self.size.replace(size) != Some(size) {
            self.event(frame, "r", &format!("{}x{}", size.cols, size.rows), out);
        }
    }

    fn event(&mut self, frame: &Frame, code: &str, data: &str, out: &mut Vec<u8>) {
        // Within an epoch the sandbox's monotonic clock tells how long it took, between two of them the wall clock does.
        let passed_us = match self.last {
            Some((epoch, mono_us, _)) if epoch == frame.epoch => frame.mono_us.saturating_sub(mono_us),
            Some((_, _, wall_us)) => frame.wall_us.saturating_sub(wall_us),
            None => 0,
        };
        self.last = Some((frame.epoch, frame.mono_us, frame.wall_us));
        line(out, &json!([passed_us as f64 / 1e6, code, data]));
    }

    fn marker(&mut self, label: &str, out: &mut Vec<u8>) {
        if self.size.is_some() {
            line(out, &json!([0.0, "m", label]));
        }
        self.torn = true;
    }
}

#[cfg(test)]
mod tests {
    use towpath_schemas::guest::Exit;

    use super::*;

    fn frame(kind: FrameKind, seq: u64, mono_us: u64, payload: &[u8]) -> Frame {
        Frame { kind, epoch: 1, seq, offset: 0, wall_us: 1_800_000_000_000_000 + mono_us, mono_us, payload: payload.to_vec() }
    }

    fn rendered(format: Format, frames: &[Frame]) -> String {
        let (mut renderer, mut out) = (Renderer::new(format, None), Vec::new());
        frames.iter().for_each(|frame| renderer.frame(frame, &mut out));
        renderer.finish(&mut out);
        String::from_utf8_lossy(&out).into_owned()
    }

    fn record(size: Size, dump: &str) -> Vec<u8> {
        serde_json::to_vec(&ScreenRecord { size, dump: dump.to_owned() }).expect("record")
    }

    fn end() -> Vec<u8> {
        serde_json::to_vec(&EndRecord { exit: Exit { code: Some(3), signal: None, oom: None }, bytes: 1, steers: Vec::new() }).expect("end")
    }

    #[test]
    fn raw_is_every_byte_and_records_are_none() {
        let frames = [
            frame(FrameKind::Stdout, 1, 0, b"\xff\x1b[1m"),
            frame(FrameKind::Screen, 2, 0, &record(Size::default(), "x")),
            frame(FrameKind::End, 3, 0, &end()),
        ];
        let (mut renderer, mut out) = (Renderer::new(Format::Raw, None), Vec::new());
        frames.iter().for_each(|frame| renderer.frame(frame, &mut out));
        assert_eq!(out, b"\xff\x1b[1m");
    }

    #[test]
    fn text_of_a_terminal_is_what_stayed_on_it_and_of_pipes_what_was_written_last() {
        let terminal = [
            frame(FrameKind::Screen, 1, 0, &record(Size { cols: 20, rows: 3 }, "")),
            frame(FrameKind::Terminal, 2, 1, b"$ vim\r\n\x1b[?1049h\x1b[Hdrawn\x1b[?1049l$ \xe2\x94"),
            frame(FrameKind::Terminal, 3, 2, b"\x80\r\n10 %\r99 %"),
            frame(FrameKind::End, 4, 3, &end()),
        ];
        assert_eq!(rendered(Format::Text, &terminal), "$ vim\n$ ─\n99 %\n");
        let pipes = [
            frame(FrameKind::Stdout, 1, 0, b"a\tb\n10 %\r"),
            frame(FrameKind::Stderr, 2, 0, b"oh\n"),
            frame(FrameKind::Stdout, 3, 0, b"99 %\n"),
        ];
        assert_eq!(rendered(Format::Text, &pipes), "a\tb\noh\n99 %\n");
    }

    #[test]
    fn a_cast_is_what_asciinema_plays() {
        let frames = [
            frame(FrameKind::Screen, 1, 0, &record(Size { cols: 80, rows: 24 }, "")),
            frame(FrameKind::Terminal, 2, 500_000, b"hello \xe2\x94"),
            frame(FrameKind::Terminal, 3, 750_000, b"\x80"),
            frame(FrameKind::Resize, 4, 1_000_000, br#"{"cols":100,"rows":30}"#),
            frame(FrameKind::Screen, 5, 1_000_000, &record(Size { cols: 100, rows: 30 }, "hello")),
            frame(FrameKind::End, 6, 2_000_000, &end()),
        ];
        let text = rendered(Format::Cast, &frames);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                r#"{"term":{"cols":80,"rows":24,"type":"xterm-256color"},"timestamp":1800000000,"version":3}"#,
                r#"[0.0,"o","\u001bc"]"#,
                r#"[0.5,"o","hello "]"#,
                r#"[0.25,"o","─"]"#,
                r#"[0.25,"r","100x30"]"#,
                r#"[1.0,"x","3"]"#,
            ]
        );
        let pipes = rendered(Format::Cast, &[frame(FrameKind::Stdout, 1, 0, b"a\nb\n")]);
        assert!(pipes.ends_with("[0.0,\"o\",\"a\\r\\nb\\r\\n\"]\n"), "{pipes}");
    }

    #[test]
    fn a_line_of_ndjson_is_a_whole_frame() {
        let text = rendered(Format::Ndjson, &[frame(FrameKind::Stderr, 7, 5, b"\xff"), frame(FrameKind::End, 8, 6, &end())]);
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).expect("json")).collect();
        assert_eq!(
            (lines[0]["seq"].as_u64(), lines[0]["kind"].as_str(), lines[0]["b64"].as_str()),
            (Some(7), Some("stderr"), Some("/w=="))
        );
        assert_eq!((lines[0]["at"].as_str(), lines[1]["record"]["exit"]["code"].as_i64()), (Some("2027-01-15T08:00:00.000005Z"), Some(3)));
    }
}
