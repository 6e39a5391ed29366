//! What a sandbox printed, made safe for a person's terminal: text, line breaks, tabs and colours stay; every other control sequence (titles,
//! clipboard, cursor, queries that make the terminal type) is left out. With colours off those go too.

use vte::{Params, Parser, Perform};

/// Filters a stream of bytes; sequences may be cut anywhere.
pub struct Filter {
    parser: Parser,
    text: Text,
}

struct Text {
    colors: bool,
    out: String,
}

impl Filter {
    pub fn new(colors: bool) -> Self {
        Self { parser: Parser::new(), text: Text { colors, out: String::new() } }
    }

    /// What is left of the next bytes.
    pub fn pass(&mut self, bytes: &[u8]) -> String {
        self.parser.advance(&mut self.text, bytes);
        std::mem::take(&mut self.text.out)
    }
}

impl Perform for Text {
    fn print(&mut self, character: char) {
        self.out.push(character);
    }

    fn execute(&mut self, byte: u8) {
        if matches!(byte, b'\n' | b'\r' | b'\t' | 0x08) {
            self.out.push(char::from(byte));
        }
    }

    fn csi_dispatch(&mut self, params: &Params, intermediates: &[u8], ignore: bool, action: char) {
        if self.colors && action == 'm' && intermediates.is_empty() && !ignore {
            let numbers = params.iter().map(|group| group.iter().map(u16::to_string).collect::<Vec<_>>().join(":"));
            self.out.push_str(&format!("\x1b[{}m", numbers.collect::<Vec<_>>().join(";")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "\x1b]0;title\x07\x1b[1;31mr\u{e9}d\x1b[0m\x1b[2J\x1b]52;c;aGk=\x07 \x1b[38:5:9mx\ttab\r\n";

    #[test]
    fn colours_pass_and_commands_to_the_terminal_do_not() {
        assert_eq!(Filter::new(true).pass(PRINTED.as_bytes()), "\x1b[1;31mr\u{e9}d\x1b[0m \x1b[38:5:9mx\ttab\r\n");
        assert_eq!(Filter::new(false).pass(PRINTED.as_bytes()), "r\u{e9}d x\ttab\r\n");
    }

    #[test]
    fn it_does_not_matter_where_the_bytes_are_cut() {
        let mut filter = Filter::new(true);
        let passed: String = PRINTED.as_bytes().chunks(1).map(|byte| filter.pass(byte)).collect();
        assert_eq!(passed, Filter::new(true).pass(PRINTED.as_bytes()));
    }
}
