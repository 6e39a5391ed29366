//! The run's terminal, drawn in ours. Nothing that a sandbox prints goes to our terminal as it is: a screen is kept and its rows are painted, so that no
//! sequence of the run's commands it, and none of its questions is answered twice.

use std::{
    collections::BTreeSet,
    io::{self, Write},
};

use rustix::termios::tcgetwinsize;
use towpath_schemas::frame::{Frame, FrameKind, ScreenRecord, Size};
use towpath_terminal::{Screen, paint};

/// Alternate screen on, cleared.
const OPEN: &str = "\x1b[?1049h\x1b[2J\x1b[H";
/// Everything that we may have changed, back.
const CLOSE: &str = "\x1b[0m\x1b[?9l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1004l\x1b[?1006l\x1b[?2004l\x1b[?1l\x1b[?25h\x1b[?1049l";

pub struct Mirror {
    window: Size,
    screen: Option<Screen>,
    /// Epoch and sequence number of the last frame.
    last: Option<(u32, u64)>,
    modes: BTreeSet<u16>,
    /// First column and row of the screen that is shown.
    corner: (usize, usize),
    /// A sentence on the last row, until something is drawn there.
    said: bool,
}

impl Mirror {
    pub fn open() -> io::Result<Self> {
        let mut mirror = Self { window: Size::default(), screen: None, last: None, modes: BTreeSet::new(), corner: (0, 0), said: false };
        mirror.window = measured();
        mirror.put(OPEN);
        Ok(mirror)
    }

    pub fn window(&self) -> Size {
        self.window
    }

    pub fn last(&self) -> Option<(u32, u64)> {
        self.last
    }

    /// Our window has another size.
    pub fn measure(&mut self) {
        self.window = measured();
        self.put("\x1b[0m\x1b[2J");
        self.draw(None);
    }

    pub fn ring(&self) {
        self.put("\x07");
    }

    /// Shows a sentence of our own.
    pub fn say(&mut self, text: &str) {
        let text: String = text.chars().filter(|c| !c.is_control()).take(self.window.cols.into()).collect();
        self.put(&format!("\x1b7\x1b[{};1H\x1b[0;7m{text}\x1b[0m\x1b[K\x1b8", self.window.rows));
        self.said = true;
    }

    pub fn frames(&mut self, frames: &[Frame]) {
        let mut rows = BTreeSet::new();
        let mut all = false;
        for frame in frames {
            let place = (frame.epoch, frame.seq);
            if self.last.is_some_and(|last| place <= last) {
                continue;
            }
            let another_epoch = self.last.is_some_and(|(epoch, _)| epoch != frame.epoch);
            self.last = Some(place);
            match frame.kind {
                // Whoever has a screen already has seen everything that made this one.
                FrameKind::Screen if self.screen.is_none() || another_epoch => {
                    self.screen = serde_json::from_slice::<ScreenRecord>(&frame.payload).ok().map(|record| Screen::restore(&record));
                    all = true;
                }
                FrameKind::Resize => {
                    if let (Some(screen), Ok(size)) = (&mut self.screen, serde_json::from_slice(&frame.payload)) {
                        screen.resize(size);
                        all = true;
                    }
                }
                FrameKind::Terminal => rows.extend(self.screen().print(&frame.payload)),
                // A run on pipes has no terminal: its lines come as a terminal would show them.
                FrameKind::Stdout | FrameKind::Stderr => rows.extend(self.screen().print(&with_returns(&frame.payload))),
                FrameKind::Screen | FrameKind::Gap | FrameKind::End | FrameKind::Other(_) => {}
            }
        }
        if all {
            self.put("\x1b[0m\x1b[2J");
        }
        self.draw((!all).then_some(rows));
    }

    fn screen(&mut self) -> &mut Screen {
        self.screen.get_or_insert_with(|| Screen::new(Size::default()))
    }

    /// Draws these rows, or all.
    fn draw(&mut self, rows: Option<BTreeSet<usize>>) {
        let Some(screen) = &self.screen else { return };
        let (cols, lines) = (usize::from(self.window.cols), usize::from(self.window.rows));
        let cursor = screen.terminal().cursor();
        let size = screen.size();
        let corner =
            (corner(self.corner.0, cursor.col, cols, size.cols.into()), corner(self.corner.1, cursor.row, lines, size.rows.into()));
        let rows = rows.filter(|_| corner == self.corner && !self.said);
        (self.corner, self.said) = (corner, false);
        // A terminal that knows synchronised updates shows all of it at once; others do not mind.
        let mut out = String::from("\x1b[?2026h\x1b[?25l");
        for (row, line) in screen.terminal().screen().visible_lines().enumerate().skip(corner.1).take(lines) {
            if rows.as_ref().is_none_or(|rows| rows.contains(&row)) {
                out.push_str(&format!("\x1b[{};1H{}", row - corner.1 + 1, paint(line, corner.0, cols)));
            }
        }
        out.push_str(&format!("\x1b[{};{}H", cursor.row - corner.1 + 1, (cursor.col - corner.0).min(cols.saturating_sub(1)) + 1));
        let mut modes: BTreeSet<u16> = screen.modes().all().collect();
        if screen.terminal().cursor_key_app_mode() {
            modes.insert(1);
        }
        out.extend(modes.difference(&self.modes).map(|mode| format!("\x1b[?{mode}h")));
        out.extend(self.modes.difference(&modes).map(|mode| format!("\x1b[?{mode}l")));
        if cursor.visible {
            out.push_str("\x1b[?25h");
        }
        out.push_str("\x1b[?2026l");
        self.modes = modes;
        self.put(&out);
    }

    fn put(&self, text: &str) {
        let mut stdout = io::stdout().lock();
        // A terminal that is gone ends us by its hangup.
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).ok();
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.put(CLOSE);
    }
}

/// Where the part begins that is shown, so that the cursor is in it; it moves no further than it must, and nothing beyond the screen is shown while there is more of it.
fn corner(before: usize, cursor: usize, window: usize, screen: usize) -> usize {
    // Behind the last column a cursor waits for the next character.
    let cursor = cursor.min(screen.saturating_sub(1));
    before.min(cursor).max((cursor + 1).saturating_sub(window)).min(screen.saturating_sub(window))
}

fn measured() -> Size {
    match tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => Size { cols: size.ws_col, rows: size.ws_row },
        Ok(_) | Err(_) => Size::default(),
    }
}

fn with_returns(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    for byte in bytes {
        if *byte == b'\n' {
            out.push(b'\r');
        }
        out.push(*byte);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::corner;

    #[test]
    fn the_part_that_is_shown_follows_the_cursor_and_moves_no_further_than_it_must() {
        assert_eq!(corner(0, 5, 10, 40), 0);
        assert_eq!(corner(0, 12, 10, 40), 3);
        assert_eq!(corner(3, 5, 10, 40), 3);
        assert_eq!(corner(3, 1, 10, 40), 1);
        assert_eq!(corner(0, 40, 40, 40), 0);
        assert_eq!(corner(30, 35, 20, 40), 20);
        assert_eq!(corner(5, 3, 50, 40), 0);
    }
}
