//! Names made safe. The result is one path component that means the same on every file system: NFC (field case N1), no separator of any
//! system, no control characters, not reserved, at most 255 bytes. The name as it came stays in the database.

use towpath_schemas::limit::FILE_NAME_BYTES;
use unicode_normalization::UnicodeNormalization;

/// Names that Windows reserves, with or without an extension.
const RESERVED: [&str; 22] = [
    "con", "prn", "aux", "nul", "com1", "com2", "com3", "com4", "com5", "com6", "com7", "com8", "com9", "lpt1", "lpt2", "lpt3", "lpt4",
    "lpt5", "lpt6", "lpt7", "lpt8", "lpt9",
];

/// A safe name for `original`; never empty.
pub fn safe(original: &str) -> String {
    // What comes before a separator is a path that nobody may choose.
    let last = original.rsplit(['/', '\\']).find(|part| !part.trim_matches(['.', ' ']).is_empty()).unwrap_or_default();
    let cleaned: String =
        last.nfc().filter(|c| !c.is_control() && !is_bidi_control(*c)).map(|c| if "<>:\"|?*".contains(c) { '_' } else { c }).collect();
    let trimmed = cleaned.trim_matches(' ').trim_end_matches('.');
    let mut name = if trimmed.trim_matches('.').is_empty() { "file".to_owned() } else { trimmed.to_owned() };
    let stem = name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    if RESERVED.contains(&stem.as_str()) {
        name.insert(0, '_');
    }
    shorten(name, FILE_NAME_BYTES)
}

/// `name`, or the first of `name (2)`, `name (3)`, … that none of `taken` equals when case is ignored.
pub fn distinct(name: &str, taken: &[String]) -> String {
    let is_taken = |candidate: &str| taken.iter().any(|other| other.to_lowercase() == candidate.to_lowercase());
    if !is_taken(name) {
        return name.to_owned();
    }
    let (stem, extension) = match name.rfind('.') {
        Some(dot) if dot > 0 => name.split_at(dot),
        _ => (name, ""),
    };
    (2..)
        .map(|n| {
            let ending = format!(" ({n}){extension}");
            format!("{}{ending}", shorten(stem.to_owned(), FILE_NAME_BYTES.saturating_sub(ending.len())))
        })
        .find(|candidate| !is_taken(candidate))
        .unwrap_or_else(|| name.to_owned())
}

/// Controls that make a name look like another one.
fn is_bidi_control(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

fn shorten(mut name: String, most: usize) -> String {
    if name.len() <= most {
        return name;
    }
    let extension = name.rfind('.').map(|dot| name[dot..].to_owned()).filter(|extension| extension.len() <= 16).unwrap_or_default();
    let mut cut = most.saturating_sub(extension.len());
    while !name.is_char_boundary(cut) {
        cut -= 1;
    }
    name.truncate(cut);
    name + &extension
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_leaves_its_folder() {
        for (original, safe_name) in [
            ("../../../etc/cron.d/x", "x"),
            ("..\\..\\x", "x"),
            ("C:\\Users\\me\\report.pdf", "report.pdf"),
            ("/etc/passwd", "passwd"),
            ("..", "file"),
            ("", "file"),
            ("a/..", "a"),
            ("a\0b\nc", "abc"),
            ("con.txt", "_con.txt"),
            ("trailing. ", "trailing"),
            (".bashrc", ".bashrc"),
        ] {
            assert_eq!(safe(original), safe_name, "{original:?}");
        }
    }

    #[test]
    fn a_decomposed_name_is_composed() {
        assert_eq!(safe("Abscha\u{308}tzung.pdf"), "Absch\u{e4}tzung.pdf");
    }

    #[test]
    fn a_long_name_keeps_its_extension_and_its_characters_whole() {
        let name = safe(&format!("{}.tar", "ü".repeat(300)));
        assert!(name.len() <= FILE_NAME_BYTES && name.ends_with(".tar"), "{name}");
    }

    #[test]
    fn names_that_differ_in_case_only_are_told_apart() {
        let taken = ["Report.pdf".to_owned(), "report (2).pdf".to_owned()];
        assert_eq!(distinct("REPORT.pdf", &taken), "REPORT (3).pdf");
        assert_eq!(distinct("other", &taken), "other");
    }
}
