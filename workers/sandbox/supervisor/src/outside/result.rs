//! The result: what the agent left in its result file, else the end of what it printed, without control codes.

use std::{fs::OpenOptions, io::Read, os::unix::fs::OpenOptionsExt, path::Path};

use rustix::fs::OFlags;
use towpath_schemas::limit::RESULT_BYTES;

use super::gather::Tail;

pub const FILE: &str = "result.md";

pub struct RunResult {
    pub text: String,
    pub truncated: bool,
}

pub fn read(control: &Path, tail: &mut Tail) -> RunResult {
    from_file(&control.join(FILE)).unwrap_or_else(|| from_tail(tail))
}

/// None when there is none, when it is empty, or when it is no plain file.
fn from_file(path: &Path) -> Option<RunResult> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(RESULT_BYTES as u64 + 1).read_to_end(&mut bytes).ok()?;
    (!bytes.is_empty()).then(|| kept(&String::from_utf8_lossy(&bytes), bytes.len() > RESULT_BYTES))
}

fn from_tail(tail: &mut Tail) -> RunResult {
    let bytes = tail.last().to_vec();
    let whole_lines = match bytes.iter().position(|byte| *byte == b'\n') {
        Some(at) if tail.cut => &bytes[at + 1..],
        _ => &bytes[..],
    };
    kept(&plain(whole_lines), tail.cut)
}

/// Cut to the limit at a character, and without U+0000, which Postgres refuses.
fn kept(text: &str, truncated: bool) -> RunResult {
    let mut text = text.replace('\0', "\u{fffd}");
    let truncated = truncated || text.len() > RESULT_BYTES;
    let mut end = RESULT_BYTES.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    RunResult { text, truncated }
}

/// The text without control codes. A line that was written over (a progress bar) shows only what was written last.
pub fn plain(bytes: &[u8]) -> String {
    #[derive(Default)]
    struct Plain {
        text: String,
        line: usize,
        returned: bool,
    }
    impl vte::Perform for Plain {
        fn print(&mut self, character: char) {
            if std::mem::take(&mut self.returned) {
                self.text.truncate(self.line);
            }
            self.text.push(character);
        }

        fn execute(&mut self, byte: u8) {
            match byte {
                b'\n' => {
                    self.text.push('\n');
                    self.line = self.text.len();
                    self.returned = false;
                }
                b'\t' => self.print('\t'),
                b'\r' => self.returned = true,
                _ => {}
            }
        }
    }
    let mut plain = Plain::default();
    vte::Parser::new().advance(&mut plain, bytes);
    plain.text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_titles_and_overwritten_progress_leave_only_the_text() {
        let printed = b"\x1b[1;32mdone\x1b[0m\r\n\x1b]0;title\x07 10 %\r 20 %\r100 %\nx\ty\xff\n";
        assert_eq!(plain(printed), "done\n100 %\nx\ty\u{fffd}\n");
    }

    #[test]
    fn a_result_over_the_limit_is_cut_at_a_character_and_says_so() {
        let result = kept(&"é".repeat(RESULT_BYTES), false);
        assert!(result.truncated && result.text.len() <= RESULT_BYTES && result.text.ends_with('é'));
        assert_eq!(kept("a\0b", false).text, "a\u{fffd}b");
    }
}
