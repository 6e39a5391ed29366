//! Whether the author of a mail is who `From` says. Only a pass counts: "none" is a check that never ran (field cases C10, C14).
//!
//! The checks are those of the mail server in front of us, which writes them into an `Authentication-Results` field (RFC 8601) under its own
//! name. Only the topmost field of that name is believed: whatever stands below it may have come with the mail.

use super::header;

/// Whether the server named `authserv_id` found that the mail's author is at home in the domain of `from`: DMARC passed for that very domain, or
/// it was signed by that domain.
pub fn is_author(raw: &[u8], authserv_id: &str, from: &str) -> bool {
    let Some((_, domain)) = from.rsplit_once('@') else { return false };
    let mut results = None;
    for value in header::all(raw, "Authentication-Results") {
        match Results::parse(&value) {
            Some(parsed) if parsed.authserv_id.eq_ignore_ascii_case(authserv_id) => {
                results = Some(parsed);
                break;
            }
            Some(_) => {}
            // Nobody can say whose it is; it may be the very one that counts.
            None => return false,
        }
    }
    let Some(results) = results else { return false };
    // The first result of a method counts; a later one of the same name is somebody's addition.
    let first = |method: &str| results.clauses.iter().find(|clause| clause.method == method);
    let is_dmarc_pass = first("dmarc").is_some_and(|clause| clause.result == "pass" && clause.has("header.from", domain));
    let is_dkim_pass = first("dkim").is_some_and(|clause| clause.result == "pass" && clause.has("header.d", domain));
    // A DMARC check that ran and did not pass is an answer, which a signature does not overrule.
    is_dmarc_pass || (is_dkim_pass && first("dmarc").is_none_or(|clause| clause.result == "none"))
}

#[derive(Debug, PartialEq, Eq)]
struct Results {
    authserv_id: String,
    clauses: Vec<Clause>,
}

#[derive(Debug, PartialEq, Eq)]
struct Clause {
    method: String,
    result: String,
    properties: Vec<(String, String)>,
}

impl Clause {
    fn has(&self, property: &str, value: &str) -> bool {
        let mut given = self.properties.iter().filter(|(name, _)| name == property);
        // Twice is once too often.
        matches!((given.next(), given.next()), (Some((_, one)), None) if one.eq_ignore_ascii_case(value))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    /// Anything that is neither of the others; a quoted string is one word whatever it holds.
    Word {
        text: String,
        quoted: bool,
    },
    Semicolon,
    Equals,
}

impl Results {
    /// None for a field that does not keep to the grammar as far as it is used: such a field proves nothing.
    fn parse(value: &str) -> Option<Self> {
        let tokens = tokens(value)?;
        let mut parts = tokens.split(|token| *token == Token::Semicolon);
        let authserv_id = match parts.next()? {
            // The id, and perhaps the version.
            [Token::Word { text, .. }] | [Token::Word { text, .. }, Token::Word { quoted: false, .. }] => text.clone(),
            _ => return None,
        };
        let clauses = parts.filter(|part| !part.is_empty()).filter_map(Clause::parse).collect();
        Some(Self { authserv_id, clauses })
    }
}

impl Clause {
    /// `method[/version]=result`, then `name=value` as often as there are; None for `none` and for what is no clause.
    fn parse(tokens: &[Token]) -> Option<Self> {
        let mut pairs = tokens.chunks(3).map(|chunk| match chunk {
            [Token::Word { text: name, quoted: false }, Token::Equals, Token::Word { text: value, .. }] => {
                Some((name.to_ascii_lowercase(), value.clone()))
            }
            _ => None,
        });
        let (method, result) = pairs.next()??;
        let method = method.split('/').next().unwrap_or_default().trim().to_owned();
        Some(Self { method, result: result.to_ascii_lowercase(), properties: pairs.collect::<Option<_>>()? })
    }
}

/// None when a quoted string or a comment does not end.
fn tokens(value: &str) -> Option<Vec<Token>> {
    let mut tokens = Vec::new();
    let mut chars = value.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '(' => skip_comment(&mut chars)?,
            ';' => tokens.push(Token::Semicolon),
            '=' => tokens.push(Token::Equals),
            '"' => {
                let mut text = String::new();
                loop {
                    match chars.next()? {
                        '"' => break,
                        '\\' => text.push(chars.next()?),
                        other => text.push(other),
                    }
                }
                // `"local part"@domain` is one word.
                take_word(&mut chars, &mut text)?;
                tokens.push(Token::Word { text, quoted: true });
            }
            c if c.is_whitespace() => {}
            c => {
                let mut text = String::from(c);
                take_word(&mut chars, &mut text)?;
                tokens.push(Token::Word { text, quoted: false });
            }
        }
    }
    Some(tokens)
}

type Chars<'a> = std::iter::Peekable<std::str::Chars<'a>>;

/// What follows without a break. A `=` inside a value (base64) belongs to it only in quotes, as the grammar has it.
fn take_word(chars: &mut Chars<'_>, text: &mut String) -> Option<()> {
    while let Some(c) = chars.peek().copied() {
        if c.is_whitespace() || matches!(c, ';' | '=' | '(' | '"') {
            return Some(());
        }
        text.push(c);
        chars.next();
    }
    Some(())
}

fn skip_comment(chars: &mut Chars<'_>) -> Option<()> {
    let mut depth = 1_u32;
    while depth > 0 {
        match chars.next()? {
            '(' => depth += 1,
            ')' => depth -= 1,
            '\\' => {
                chars.next()?;
            }
            _ => {}
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVER: &str = "mx.example.org";

    fn trusted(results: &str) -> bool {
        is_author(format!("{results}\r\nFrom: boss@corp.org\r\n\r\nx").as_bytes(), SERVER, "boss@corp.org")
    }

    #[test]
    fn only_a_pass_for_the_very_domain_of_the_author_counts_c10_c14() {
        assert!(trusted("Authentication-Results: mx.example.org; dmarc=pass (p=none dis=none) header.from=corp.org"));
        assert!(trusted("Authentication-Results: mx.example.org; dkim=pass header.d=corp.org header.b=\"ab=c\""));
        for forged in [
            "X-Nothing: here",
            "Authentication-Results: mx.example.org; none",
            "Authentication-Results: mx.example.org; dmarc=none header.from=corp.org",
            "Authentication-Results: mx.example.org; dmarc=fail header.from=corp.org",
            "Authentication-Results: mx.example.org; dmarc=pass header.from=other.org",
            "Authentication-Results: mx.example.org; dmarc=pass",
            "Authentication-Results: mx.example.org; spf=pass smtp.mailfrom=corp.org",
            "Authentication-Results: mx.example.org; dkim=pass header.d=other.org",
            "Authentication-Results: mx.example.org; dmarc=fail header.from=corp.org; dkim=pass header.d=corp.org",
            "Authentication-Results: evil.org; dmarc=pass header.from=corp.org",
            "ARC-Authentication-Results: i=1; mx.example.org; dmarc=pass header.from=corp.org",
        ] {
            assert!(!trusted(forged), "{forged}");
        }
    }

    #[test]
    fn a_result_that_came_with_the_mail_is_not_believed() {
        let broken = "Authentication-Results: mx.example.org; dmarc=fail (\r\n\
                      Authentication-Results: mx.example.org; dmarc=pass header.from=corp.org";
        assert!(!trusted(broken));
        let below = "Authentication-Results: mx.example.org; dmarc=fail header.from=corp.org\r\n\
                     Authentication-Results: mx.example.org; dmarc=pass header.from=corp.org";
        assert!(!trusted(below));
    }

    #[test]
    fn text_inside_quotes_and_comments_is_no_result_c12() {
        for crafted in [
            "Authentication-Results: mx.example.org; spf=fail smtp.mailfrom=\"a) dmarc=pass (b\"@evil.org header.from=corp.org",
            "Authentication-Results: mx.example.org; spf=fail (outer (dmarc=pass header.from=corp.org) inner) smtp.mailfrom=evil.org",
            "Authentication-Results: mx.example.org; spf=fail smtp.mailfrom=\"x; dmarc=pass header.from=corp.org\"@evil.org",
            "Authentication-Results: mx.example.org; dmarc=fail header.from=corp.org; dmarc=pass header.from=corp.org",
            "Authentication-Results: mx.example.org; dkim=fail header.d=corp.org; spf=pass header.d=corp.org",
            "Authentication-Results: mx.example.org; dmarc=pass header.from=evil.org header.from=corp.org",
            "Authentication-Results: mx.example.org; dmarc=pass (never closed header.from=corp.org",
            "Authentication-Results: \"mx.example.org; dmarc=pass header.from=corp.org\" ; dmarc=fail",
        ] {
            assert!(!trusted(crafted), "{crafted}");
        }
    }

    #[test]
    fn comments_versions_and_folding_between_the_words_change_nothing() {
        assert!(trusted(
            "Authentication-Results: (hi) mx.example.org 1;\r\n\tspf=none (no policy) smtp.mailfrom=x;\r\n dmarc/1 = pass (ok) header.from = CORP.org"
        ));
    }
}
