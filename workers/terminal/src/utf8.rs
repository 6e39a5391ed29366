//! Bytes to characters, however they are cut (field case D1).

/// Decodes a stream of UTF-8. What is invalid becomes U+FFFD at once; a character that is not whole yet waits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Utf8 {
    /// The beginning of a character, at most three bytes.
    pending: Vec<u8>,
}

impl Utf8 {
    pub fn decode(&mut self, bytes: &[u8]) -> String {
        let mut all = std::mem::take(&mut self.pending);
        all.extend_from_slice(bytes);
        let mut text = String::with_capacity(all.len());
        let mut chunks = all.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            match chunk.invalid() {
                [] => {}
                rest if chunks.peek().is_none() && is_beginning(rest) => self.pending = rest.to_vec(),
                _ => text.push(char::REPLACEMENT_CHARACTER),
            }
        }
        text
    }

    /// Nothing waits for its other half.
    pub fn is_whole(&self) -> bool {
        self.pending.is_empty()
    }

    /// The stream ends: what waits will not become whole any more.
    pub fn finish(&mut self) -> String {
        if std::mem::take(&mut self.pending).is_empty() { String::new() } else { char::REPLACEMENT_CHARACTER.to_string() }
    }
}

/// Could more bytes make this a character?
fn is_beginning(rest: &[u8]) -> bool {
    let length = match rest.first() {
        Some(0xc2..=0xdf) => 2,
        Some(0xe0..=0xef) => 3,
        Some(0xf0..=0xf4) => 4,
        _ => return false,
    };
    rest.len() < length
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_cut_anywhere_comes_out_whole_and_what_is_none_is_replaced_at_once() {
        let printed = "a─🦀é".as_bytes();
        for cut in 0..=printed.len() {
            let mut utf8 = Utf8::default();
            let text = utf8.decode(&printed[..cut]) + &utf8.decode(&printed[cut..]) + &utf8.finish();
            assert_eq!(text, "a─🦀é", "cut at {cut}");
        }
        let mut utf8 = Utf8::default();
        assert_eq!(utf8.decode(b"\xffx\xe2\x94"), "\u{fffd}x");
        assert_eq!(utf8.decode(b"y"), "\u{fffd}y");
        assert_eq!(utf8.decode(b"\xf0\x9f"), "");
        assert_eq!(utf8.finish(), "\u{fffd}");
    }
}
