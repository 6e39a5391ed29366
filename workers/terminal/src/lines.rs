//! The text of a stream that is no terminal: control codes are carried out within a line (progress that is drawn over shows what was drawn last) and left out
//! otherwise; tabs stay. Each line comes out at its end, so that lines of two streams keep their order.

use vte::{Params, Parser, Perform};

/// Characters of one line; a longer one comes out in pieces.
const LINE: usize = 64 * 1024;

/// Turns one stream's bytes into lines. Sequences and characters may be cut anywhere (field cases D1, D2).
#[derive(Default)]
pub struct Lines {
    parser: Parser,
    line: Line,
}

#[derive(Default)]
struct Line {
    cells: Vec<char>,
    at: usize,
    out: String,
}

impl Lines {
    /// The text that is final now.
    pub fn print(&mut self, bytes: &[u8]) -> String {
        self.parser.advance(&mut self.line, bytes);
        std::mem::take(&mut self.line.out)
    }

    /// Nothing waits for the end of its line.
    pub fn is_empty(&self) -> bool {
        self.line.cells.is_empty()
    }

    /// What stands in the last line, which has no end.
    pub fn finish(mut self) -> String {
        self.line.flush();
        self.line.out
    }
}

impl Line {
    fn flush(&mut self) {
        self.out.extend(self.cells.drain(..));
        self.at = 0;
    }
}

impl Perform for Line {
    fn print(&mut self, character: char) {
        if self.cells.len() >= LINE && self.at >= self.cells.len() {
            self.flush();
        }
        match self.cells.get_mut(self.at) {
            Some(cell) => *cell = character,
            None => {
                self.cells.resize(self.at.min(LINE), ' ');
                self.cells.push(character);
            }
        }
        self.at += 1;
    }

    fn execute(&mut self, byte: u8) {
        match byte {
            b'\n' => {
                self.flush();
                self.out.push('\n');
            }
            b'\t' => self.print('\t'),
            b'\r' => self.at = 0,
            0x08 => self.at = self.at.saturating_sub(1),
            _ => {}
        }
    }

    fn csi_dispatch(&mut self, params: &Params, intermediates: &[u8], ignore: bool, action: char) {
        if ignore || !intermediates.is_empty() {
            return;
        }
        let first = params.iter().next().and_then(|group| group.first().copied()).unwrap_or(0);
        let count = usize::from(first.max(1));
        match action {
            'K' if first == 0 => self.cells.truncate(self.at),
            'K' if first == 1 => self.cells.iter_mut().take(self.at + 1).for_each(|cell| *cell = ' '),
            'K' => self.cells.clear(),
            'C' => self.at = (self.at + count).min(LINE),
            'D' => self.at = self.at.saturating_sub(count),
            'G' => self.at = (count - 1).min(LINE),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(bytes: &[u8]) -> String {
        let mut lines = Lines::default();
        lines.print(bytes) + &lines.finish()
    }

    #[test]
    fn colours_titles_and_overwritten_progress_leave_only_the_text() {
        let printed =
            b"\x1b[1;32mdone\x1b[0m\r\n\x1b]0;title\x07 10 %\r 20 %\r100 %\nx\ty\xff\nlonger\rab\x1b[K\nabc\x08\x08X\nleft\x1b[2Kright";
        assert_eq!(plain(printed), "done\n100 %\nx\ty\u{fffd}\nab\naXc\n    right");
    }

    #[test]
    fn a_code_or_a_character_cut_anywhere_comes_out_whole() {
        let printed = "\x1b[1;37mwhite\x1b[0m ─ 🦀 \x1b]8;;https://x.example\x07link\x1b]8;;\x1b\\ end\n".as_bytes();
        for cut in 0..=printed.len() {
            let mut lines = Lines::default();
            let text = lines.print(&printed[..cut]) + &lines.print(&printed[cut..]) + &lines.finish();
            assert_eq!(text, "white ─ 🦀 link end\n", "cut at {cut}");
        }
    }

    #[test]
    fn a_line_without_an_end_is_not_kept_whole() {
        let mut lines = Lines::default();
        let printed = vec![b'x'; 10 * LINE];
        let first = lines.print(&printed).len();
        assert!(first >= 9 * LINE, "{first}");
        assert_eq!(first + lines.finish().len(), printed.len());
    }
}
