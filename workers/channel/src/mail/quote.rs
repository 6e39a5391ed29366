//! What of a reply is new. Only what is surely quoted counts as quoted: a block of `>` lines at the end, with the line that introduces it, or all that follows a
//! separator which mail programs write. Text between and below quotations is an answer to them and keeps them. The reader is given the whole beside it (field case C18).

/// How the words that introduce a quotation end, in the languages of common mail programs.
const INTRODUCES: [&str; 9] =
    ["wrote:", "schrieb:", "a écrit :", "a écrit:", "escribió:", "ha scritto:", "escreveu:", "schreef:", "написал:"];
/// Between their parts German programs put the name: `Am … schrieb Ann:`.
const INSIDE: [(&str, &str); 2] = [("am ", " schrieb "), ("op ", " schreef ")];
/// Lines that an introduction may be broken into.
const INTRODUCTION_LINES: usize = 3;
const SEPARATORS: [&str; 4] = ["original message", "ursprüngliche nachricht", "message d'origine", "mensaje original"];

/// The new part of a reply; None when nothing of it is surely quoted, or nothing would be left.
pub fn new_part(text: &str) -> Option<&str> {
    let lines: Vec<&str> = text.split('\n').collect();
    let end = lines.iter().position(|line| is_separator(line)).or_else(|| trailing_quotation(&lines))?;
    let bytes: usize = lines.get(..end)?.iter().map(|line| line.len() + 1).sum();
    let new = text.get(..bytes.saturating_sub(1))?.trim_end();
    (!new.trim().is_empty()).then_some(new)
}

/// `-----Original Message-----`
fn is_separator(line: &str) -> bool {
    let line = line.trim();
    let Some(inner) = line.strip_prefix("--").and_then(|rest| rest.strip_suffix("--")) else { return false };
    let words = inner.trim_matches(['-', ' ']).to_lowercase();
    SEPARATORS.contains(&words.as_str())
}

/// Where the quotation at the end begins, with its introduction.
fn trailing_quotation(lines: &[&str]) -> Option<usize> {
    let is_blank = |line: &str| line.trim().is_empty();
    let begin = lines.iter().rposition(|line| !line.starts_with('>') && !is_blank(line)).map_or(0, |last| last + 1);
    if !lines.get(begin..)?.iter().any(|line| line.starts_with('>')) {
        return None;
    }
    // `begin` stands behind the last line that is not quoted, which may end the introduction.
    let mut nearest = None;
    for from in (begin.saturating_sub(INTRODUCTION_LINES)..begin).rev() {
        let candidate = lines.get(from..begin)?;
        if candidate.iter().any(|line| is_blank(line)) {
            break;
        }
        match introduces(&candidate.join(" ")) {
            Introduces::Whole => return Some(from),
            Introduces::Perhaps => nearest = nearest.or(Some(from)),
            Introduces::Not => {}
        }
    }
    Some(nearest.unwrap_or(begin))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Introduces {
    /// From its first word to its last.
    Whole,
    /// It ends as one does; the line before may belong to it.
    Perhaps,
    Not,
}

fn introduces(text: &str) -> Introduces {
    let text = text.trim().to_lowercase();
    // A date, or an address: a sentence of the author's own has neither, as a rule.
    if !text.chars().any(|c| c.is_ascii_digit() || c == '@') {
        return Introduces::Not;
    }
    let starts = ["on ", "am ", "le ", "el ", "il ", "em ", "op "].iter().any(|word| text.starts_with(word));
    let ends = INTRODUCES.iter().any(|end| text.ends_with(end));
    let around = INSIDE.iter().any(|(start, inside)| text.starts_with(start) && text.contains(inside) && text.ends_with(':'));
    match (around || (starts && ends), ends && text.contains(['@', '<'])) {
        (true, _) => Introduces::Whole,
        (false, true) => Introduces::Perhaps,
        (false, false) => Introduces::Not,
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    #[test]
    fn a_quotation_at_the_end_goes_with_the_line_that_introduces_it() {
        let on = "Yes, do.\n\nOn Tue, 1 Dec 2026 at 10:00, Helper <helper@agents.test> wrote:\n\n> Shall I?\n>> really\n";
        assert_eq!(new_part(on), Some("Yes, do."));
        let broken = "Yes.\n\nOn Tue, 1 Dec 2026 at 10:00, Helper\n<helper+very-long-address@agents.test>\nwrote:\n> Shall I?";
        assert_eq!(new_part(broken), Some("Yes."));
        let unspaced = "Yes.\nHelper <helper@agents.test> wrote:\n> Shall I?";
        assert_eq!(new_part(unspaced), Some("Yes."));
        assert_eq!(new_part("Ja.\n\nAm 01.12.26 um 10:00 schrieb Helper:\n> Soll ich?"), Some("Ja."));
        assert_eq!(new_part("Yes.\n\n> Shall I?"), Some("Yes."));
        assert_eq!(new_part("Yes.\n\n-----Original Message-----\nFrom: helper\n\nShall I?"), Some("Yes."));
    }

    #[test]
    fn what_somebody_wrote_is_never_taken_for_a_quotation_c18() {
        // An answer below or between quotations.
        assert_eq!(new_part("> Shall I?\nYes.\n> Now?\nLater."), None);
        assert_eq!(new_part("On Tue, 1 Dec 2026 Helper wrote:\n> Shall I?\n\nYes, do."), None);
        // A line with a colon.
        let visa = "These are the cards:\nVisa 4 of 5:\n\n> the list";
        assert_eq!(new_part(visa), Some("These are the cards:\nVisa 4 of 5:"));
        assert_eq!(new_part("Visa: yes\nMaster: no"), None);
        assert_eq!(new_part("On reflection I wrote:\nnothing"), None);
        // Nothing but a quotation: then the quotation is what is meant.
        assert_eq!(new_part("> forwarded"), None);
        assert_eq!(new_part(""), None);
    }

    #[test]
    fn replies_of_real_programs_keep_every_line_that_is_not_quoted() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/replies");
        let mut cut = 0;
        for entry in fs::read_dir(folder).expect("fixtures") {
            let path = entry.expect("entry").path();
            let text = fs::read_to_string(&path).expect("file").replace("\r\n", "\n");
            let Some(new) = new_part(&text) else { continue };
            cut += 1;
            assert!(text.starts_with(new), "{}", path.display());
            let rest = &text[new.len()..];
            let is_separated = rest.lines().any(is_separator);
            let own = rest.lines().filter(|line| !line.starts_with('>') && !line.trim().is_empty()).count();
            assert!(is_separated || own <= INTRODUCTION_LINES, "{}: {rest}", path.display());
        }
        assert!(cut >= 4, "only {cut} replies were recognised");
    }
}
