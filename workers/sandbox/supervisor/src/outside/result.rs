//! The result: what the agent left in its result file, else the end of what it printed, without control codes.

use std::{fs::OpenOptions, io::Read, os::unix::fs::OpenOptionsExt, path::Path};

use rustix::fs::OFlags;
use towpath_schemas::limit::RESULT_BYTES;
use towpath_terminal::Lines;

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
    let mut lines = Lines::default();
    kept(&(lines.print(whole_lines) + &lines.finish()), tail.cut)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_over_the_limit_is_cut_at_a_character_and_says_so() {
        let result = kept(&"é".repeat(RESULT_BYTES), false);
        assert!(result.truncated && result.text.len() <= RESULT_BYTES && result.text.ends_with('é'));
        assert_eq!(kept("a\0b", false).text, "a\u{fffd}b");
    }
}
