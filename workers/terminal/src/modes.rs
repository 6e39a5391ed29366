//! What a screen does not show and a keyboard or a mouse must know: private modes (xterm, "CSI ? Pm h"), and the questions that a command asks its terminal.

use std::collections::BTreeSet;

use vte::{Params, Parser, Perform};

/// Modes that concern input: application keypad and cursor keys are the screen's own; mouse, focus and bracketed paste are kept here.
const KEPT: [u16; 10] = [9, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1015, 2004];

/// The private modes that are set.
#[derive(Default)]
pub struct Modes {
    parser: Parser,
    state: State,
}

#[derive(Default)]
struct State {
    set: BTreeSet<u16>,
    asked: Option<Question>,
}

/// A question to the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Question {
    /// DA1: what are you?
    Attributes,
    /// DA2: which version?
    SecondaryAttributes,
    /// DSR 5: are you well?
    Status,
    /// DSR 6: where is the cursor?
    Cursor,
}

impl Question {
    pub(crate) fn answer(self, col: usize, row: usize) -> Vec<u8> {
        match self {
            // A VT220 with colours.
            Question::Attributes => b"\x1b[?62;22c".to_vec(),
            Question::SecondaryAttributes => b"\x1b[>1;10;0c".to_vec(),
            Question::Status => b"\x1b[0n".to_vec(),
            Question::Cursor => format!("\x1b[{};{}R", row + 1, col + 1).into_bytes(),
        }
    }
}

impl Perform for State {
    fn csi_dispatch(&mut self, params: &Params, intermediates: &[u8], ignore: bool, action: char) {
        let first = params.iter().next().and_then(|group| group.first().copied()).unwrap_or(0);
        match (intermediates, action) {
            _ if ignore => {}
            (b"?", 'h' | 'l') => {
                for mode in params.iter().filter_map(|group| group.first().copied()).filter(|mode| KEPT.contains(mode)) {
                    if action == 'h' {
                        self.set.insert(mode);
                    } else {
                        self.set.remove(&mode);
                    }
                }
            }
            (b"", 'c') if first == 0 => self.asked = Some(Question::Attributes),
            (b">", 'c') if first == 0 => self.asked = Some(Question::SecondaryAttributes),
            (b"", 'n') if first == 5 => self.asked = Some(Question::Status),
            (b"", 'n') if first == 6 => self.asked = Some(Question::Cursor),
            // Soft reset (DECSTR).
            (b"!", 'p') => self.set.clear(),
            _ => {}
        }
    }

    fn esc_dispatch(&mut self, intermediates: &[u8], _ignore: bool, byte: u8) {
        // Full reset (RIS).
        if intermediates.is_empty() && byte == b'c' {
            self.set.clear();
        }
    }

    fn terminated(&self) -> bool {
        self.asked.is_some()
    }
}

impl Modes {
    pub(crate) fn look(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            rest = &rest[self.until_question(rest).0..];
        }
    }

    /// Looks at bytes up to the end of the first question among them: how many, and the question.
    pub(crate) fn until_question(&mut self, bytes: &[u8]) -> (usize, Option<Question>) {
        let taken = self.parser.advance_until_terminated(&mut self.state, bytes);
        (taken.max(1), self.state.asked.take())
    }

    pub fn is_set(&self, mode: u16) -> bool {
        self.state.set.contains(&mode)
    }

    pub fn all(&self) -> impl Iterator<Item = u16> + '_ {
        self.state.set.iter().copied()
    }

    /// Sequences that set them in a new terminal.
    pub fn dump(&self) -> String {
        self.all().map(|mode| format!("\x1b[?{mode}h")).collect()
    }
}

impl PartialEq for Modes {
    fn eq(&self, other: &Self) -> bool {
        self.state.set == other.state.set
    }
}

impl std::fmt::Debug for Modes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.all()).finish()
    }
}
