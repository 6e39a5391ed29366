//! Header fields of a mail as they stand, unfolded, found without judging the rest of it.

/// Bytes of the header that are looked at.
const HEADER_BYTES: usize = 256 * 1024;

/// Every field of that name, from the top.
pub fn all(raw: &[u8], name: &str) -> Vec<String> {
    fields(raw).filter(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect()
}

/// The topmost field of that name.
pub fn first(raw: &[u8], name: &str) -> Option<String> {
    fields(raw).find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value)
}

fn fields(raw: &[u8]) -> impl Iterator<Item = (String, String)> {
    let text = String::from_utf8_lossy(&raw[..raw.len().min(HEADER_BYTES)]).into_owned();
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in text.split('\n').map(|line| line.strip_suffix('\r').unwrap_or(line)) {
        if line.is_empty() {
            break;
        }
        match (line.starts_with([' ', '\t']), fields.last_mut()) {
            (true, Some((_, value))) => value.push_str(line),
            _ => {
                if let Some((name, value)) = line.split_once(':') {
                    fields.push((name.trim_end().to_owned(), value.trim_start().to_owned()));
                }
            }
        }
    }
    fields.into_iter()
}

/// Bytes of a Message-ID; a longer one is none (RFC 5322 allows a line 998).
const ID_BYTES: usize = 900;

/// Message-IDs of a field as opaque text: without brackets, comments and the white space of folding. Broken ones are taken as far as they go
/// (field case C4).
pub fn message_ids(value: &str) -> Vec<String> {
    let mut ids = Vec::new();
    let mut rest = value;
    loop {
        rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
        if rest.is_empty() {
            return ids;
        }
        if rest.starts_with('(') {
            rest = after_comment(rest);
            continue;
        }
        let (id, after) = match rest.strip_prefix('<') {
            Some(inner) => bracketed(inner),
            None => rest.split_at(rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len())),
        };
        let bare = id.trim();
        let is_quoted = bare.contains('"');
        let id: String = if is_quoted { bare.to_owned() } else { bare.split_whitespace().collect() };
        // Words around an id ("from somebody") are none.
        let fits = id.len() <= ID_BYTES;
        if fits && (id.contains('@') || ids.is_empty() && after.trim().is_empty() && !id.is_empty()) {
            ids.push(id.replace('\0', "\u{fffd}"));
        }
        rest = after;
    }
}

/// Up to the closing bracket outside quotes; to the next id or the end where it is missing.
fn bracketed(inner: &str) -> (&str, &str) {
    let mut quoted = false;
    for (at, c) in inner.char_indices() {
        match c {
            '"' => quoted = !quoted,
            '>' if !quoted => return (&inner[..at], &inner[at + 1..]),
            '<' if !quoted => return inner.split_at(at),
            _ => {}
        }
    }
    (inner, "")
}

fn after_comment(text: &str) -> &str {
    let mut depth = 0_u32;
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' if depth == 1 => return &text[at + 1..],
            ')' => depth -= 1,
            _ => {}
        }
    }
    ""
}

/// Lines of the whole mail that begin so, in lower case.
pub fn count_lines(raw: &[u8], beginning: &str) -> usize {
    let beginning = beginning.as_bytes();
    raw.split(|byte| *byte == b'\n')
        .filter(|line| line.get(..beginning.len()).is_some_and(|start| start.eq_ignore_ascii_case(beginning)))
        .count()
}
