//! Lines of a transcript that hold a text, each with the frame at which it was complete.

use chrono::{DateTime, Utc};
use towpath_schemas::{body::Found, frame::Frame, limit::FOUND_BYTES};

use crate::render::{Format, Renderer};

/// Looks for a text in what a reader of `text` would get, line by line.
pub struct Search {
    wanted: String,
    ignore_case: bool,
    renderer: Renderer,
    rest: String,
    last: Option<(i32, u64, DateTime<Utc>)>,
}

impl Search {
    pub fn new(wanted: &str, ignore_case: bool) -> Self {
        let wanted = if ignore_case { wanted.to_lowercase() } else { wanted.to_owned() };
        Self { wanted, ignore_case, renderer: Renderer::new(Format::Text, None), rest: String::new(), last: None }
    }

    /// The lines that this frame completes.
    pub fn frame(&mut self, frame: &Frame) -> Vec<Found> {
        let at = i64::try_from(frame.wall_us).ok().and_then(DateTime::from_timestamp_micros).unwrap_or_default();
        self.last = Some((i32::try_from(frame.epoch).unwrap_or(i32::MAX), frame.seq, at));
        let mut out = Vec::new();
        self.renderer.frame(frame, &mut out);
        self.lines(&out, false)
    }

    /// Another search may go on after this frame and miss nothing.
    pub fn may_pause(&self) -> bool {
        self.rest.is_empty() && self.renderer.is_at_line_start()
    }

    /// What still stands on a screen or in a line.
    pub fn finish(&mut self) -> Vec<Found> {
        let mut out = Vec::new();
        self.renderer.finish(&mut out);
        self.lines(&out, true)
    }

    fn lines(&mut self, text: &[u8], all: bool) -> Vec<Found> {
        self.rest.push_str(&String::from_utf8_lossy(text));
        let end = if all { self.rest.len() } else { self.rest.rfind('\n').map_or(0, |at| at + 1) };
        let complete: String = self.rest.drain(..end).collect();
        let Some((epoch, seq, at)) = self.last else { return Vec::new() };
        complete.lines().filter(|line| self.holds(line)).map(|line| Found { epoch, seq, at, text: cut(line) }).collect()
    }

    fn holds(&self, line: &str) -> bool {
        if self.ignore_case { line.to_lowercase().contains(&self.wanted) } else { line.contains(&self.wanted) }
    }
}

fn cut(line: &str) -> String {
    let mut end = line.len().min(FOUND_BYTES);
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    line[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use towpath_schemas::frame::FrameKind;

    use super::*;

    fn frame(seq: u64, payload: &[u8]) -> Frame {
        Frame { kind: FrameKind::Stdout, epoch: 1, seq, offset: 0, wall_us: seq * 1_000_000, mono_us: 0, payload: payload.to_vec() }
    }

    #[test]
    fn a_line_is_found_where_it_was_complete_whatever_its_colours_and_cuts() {
        let mut search = Search::new("Needle ─", true);
        let frames = [
            frame(1, b"hay\n\x1b[1mnee"),
            frame(2, b"dle \xe2\x94"),
            frame(3, b"\x80\x1b[0m here\nhay\n"),
            frame(4, b"NEEDLE \xe2\x94\x80 last"),
        ];
        let mut found: Vec<Found> = frames.iter().flat_map(|frame| search.frame(frame)).collect();
        found.extend(search.finish());
        let told: Vec<(u64, &str)> = found.iter().map(|found| (found.seq, found.text.as_str())).collect();
        assert_eq!(told, [(3, "needle ─ here"), (4, "NEEDLE ─ last")]);
    }
}
