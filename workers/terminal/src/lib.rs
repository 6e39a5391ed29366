#![doc = include_str!("../README.md")]

mod lines;
mod modes;
mod paint;
mod utf8;

use avt::{
    Terminal,
    observer::{DirtyRows, Transcript},
};
use towpath_schemas::frame::{ScreenRecord, Size};

pub use lines::Lines;
pub use modes::Modes;
pub use paint::paint;
pub use utf8::Utf8;

/// Lines above the screen that are kept, for the text of it.
const SCROLLBACK: usize = 1000;

/// A terminal: what was printed on it decides what it shows.
pub struct Screen {
    terminal: Terminal,
    utf8: Utf8,
    modes: Modes,
    dirty: DirtyRows,
}

impl Screen {
    pub fn new(size: Size) -> Self {
        Self { terminal: terminal(size, SCROLLBACK), utf8: Utf8::default(), modes: Modes::default(), dirty: DirtyRows::new() }
    }

    /// The screen that a record shows.
    pub fn restore(record: &ScreenRecord) -> Self {
        let mut screen = Self::new(record.size);
        screen.print(record.dump.as_bytes());
        screen
    }

    /// Prints bytes; the rows that look otherwise now. Sequences and characters may be cut anywhere.
    pub fn print(&mut self, bytes: &[u8]) -> Vec<usize> {
        self.modes.look(bytes);
        self.terminal.feed_with(self.utf8.decode(bytes).as_str(), &mut self.dirty)
    }

    /// Prints bytes and answers what they ask of a terminal (device attributes, status, cursor position): what it would type into the command.
    pub fn print_and_answer(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut answers = Vec::new();
        let mut rest = bytes;
        // An answer may depend on where the cursor is at that very place.
        while !rest.is_empty() {
            let (taken, question) = self.modes.until_question(rest);
            self.terminal.feed_with(self.utf8.decode(&rest[..taken]).as_str(), &mut self.dirty);
            if let Some(question) = question {
                let cursor = self.terminal.cursor();
                answers.extend(question.answer(cursor.col, cursor.row));
            }
            rest = &rest[taken..];
        }
        answers
    }

    /// No character waits for its other half: only then a record is whole.
    pub fn is_whole(&self) -> bool {
        self.utf8.is_whole()
    }

    pub fn resize(&mut self, size: Size) {
        self.terminal.resize_with(size.cols.into(), size.rows.into(), &mut self.dirty);
    }

    pub fn size(&self) -> Size {
        let (cols, rows) = self.terminal.size();
        Size { cols: u16::try_from(cols).unwrap_or(u16::MAX), rows: u16::try_from(rows).unwrap_or(u16::MAX) }
    }

    /// What makes a new terminal of the same size show the same, and behave the same towards its keyboard and mouse. It may end in the middle of a sequence.
    pub fn record(&self) -> ScreenRecord {
        ScreenRecord { size: self.size(), dump: self.modes.dump() + &seven_bit(&self.terminal.dump()) }
    }

    pub fn terminal(&self) -> &Terminal {
        &self.terminal
    }

    pub fn modes(&self) -> &Modes {
        &self.modes
    }

    /// The visible rows as text, without the blanks at their ends.
    pub fn rows(&self) -> Vec<String> {
        self.terminal.screen().visible_lines().map(|line| line.text().trim_end().to_owned()).collect()
    }

    /// The last lines of the primary screen as text, at most as many as are kept; no blank ones at the end.
    pub fn text(&self) -> String {
        let mut text = self.terminal.primary_screen().text().join("\n");
        text.truncate(text.trim_end().len());
        text
    }
}

/// Control characters of one byte as the two-byte forms that every terminal knows (ECMA-48, 5.3): `ESC [` for CSI.
fn seven_bit(dump: &str) -> String {
    let mut out = String::with_capacity(dump.len());
    for character in dump.chars() {
        match u8::try_from(character) {
            Ok(control @ 0x80..=0x9f) => out.extend(['\x1b', char::from(control - 0x40)]),
            _ => out.push(character),
        }
    }
    out
}

fn terminal(size: Size, scrollback: usize) -> Terminal {
    let (cols, rows) = (usize::from(size.cols.max(1)), usize::from(size.rows.max(1)));
    match Terminal::with_scrollback(cols, rows, Some(scrollback)) {
        Ok(terminal) => terminal,
        Err(refused) => unreachable!("{refused}: both are at least 1"),
    }
}

/// The text that a stream leaves behind: lines come out once nothing can change them any more.
pub struct Text {
    terminal: Terminal,
    utf8: Utf8,
    transcript: Transcript,
}

impl Text {
    pub fn new(size: Size) -> Self {
        Self { terminal: terminal(size, 0), utf8: Utf8::default(), transcript: Transcript::new() }
    }

    /// The lines that are final now.
    pub fn print(&mut self, bytes: &[u8]) -> Vec<String> {
        self.terminal.feed_with(self.utf8.decode(bytes).as_str(), &mut self.transcript)
    }

    pub fn resize(&mut self, size: Size) -> Vec<String> {
        self.terminal.resize_with(size.cols.into(), size.rows.into(), &mut self.transcript)
    }

    /// What is still on the screen.
    pub fn finish(mut self) -> Vec<String> {
        let rest = self.utf8.finish();
        let mut lines = self.terminal.feed_with(rest.as_str(), &mut self.transcript);
        lines.extend(self.transcript.finish(&self.terminal));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Colours, an alternate screen, a saved cursor, margins, wide characters, modes.
    const SHOW: &str = "$ vim\r\n\x1b[1;31mred\x1b[0m \u{2500}\u{1f980}\x1b7\x1b[?1049h\x1b[?1h\x1b[?2004h\x1b[?1002h\x1b[?1006h\x1b[2;5r\x1b[H\x1b[38;5;208mTitle\x1b[0m\x1b[3;10Hthere\x1b[?25l";

    fn size(cols: u16, rows: u16) -> Size {
        Size { cols, rows }
    }

    fn same(one: &Screen, other: &Screen) {
        assert_eq!(one.rows(), other.rows());
        assert_eq!(one.terminal().dump(), other.terminal().dump());
        assert_eq!(one.modes(), other.modes());
    }

    #[test]
    fn a_late_one_sees_what_the_first_one_sees_wherever_it_comes_in() {
        let bytes = format!("{SHOW}\x1b[4;1Hmore\x1b[?1049l\x1b8 back").into_bytes();
        let mut first = Screen::new(size(40, 10));
        let mut late: Vec<Screen> = Vec::new();
        for byte in &bytes {
            first.print(&[*byte]);
            late.iter_mut().for_each(|screen| {
                screen.print(&[*byte]);
            });
            // A character that is cut in half is no place to record a screen at; the supervisor cuts there neither.
            if first.is_whole() {
                late.push(Screen::restore(&first.record()));
            }
        }
        assert!(late.len() > 100);
        late.iter().for_each(|screen| same(&first, screen));
    }

    #[test]
    fn questions_are_answered_from_where_the_cursor_is_and_however_they_are_cut() {
        let printed = b"ab\x1b[6n\r\n\x1b[c\x1b[>c\x1b[5nx\x1b[6n\x1b]11;?\x07";
        let whole = Screen::new(size(40, 10)).print_and_answer(printed);
        assert_eq!(String::from_utf8_lossy(&whole), "\x1b[1;3R\x1b[?62;22c\x1b[>1;10;0c\x1b[0n\x1b[2;2R");
        let mut screen = Screen::new(size(40, 10));
        let pieces: Vec<u8> = printed.iter().flat_map(|byte| screen.print_and_answer(&[*byte])).collect();
        assert_eq!(pieces, whole);
    }

    #[test]
    fn text_is_what_stays_when_everything_was_drawn_over() {
        let mut text = Text::new(size(20, 3));
        let mut lines = text.print(b" 10 %\r100 %\r\n\x1b[32mok\x1b[0m\r\nthree\r\nfour\x08\x08\x08\x08FOUR\r\nfive");
        lines.extend(text.finish());
        assert_eq!(lines, ["100 %", "ok", "three", "FOUR", "five"]);
    }

    #[test]
    fn a_size_changes_for_those_who_came_before_and_after_alike() {
        let mut first = Screen::new(size(40, 10));
        first.print(SHOW.as_bytes());
        let mut late = Screen::restore(&first.record());
        for screen in [&mut first, &mut late] {
            screen.resize(size(60, 12));
            screen.print(b"\x1b[12;50Hcorner");
        }
        assert_eq!(first.rows(), late.rows());
        assert_eq!(first.size(), size(60, 12));
    }
}
