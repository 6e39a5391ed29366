//! A mail as it came, taken apart. Pure. Nothing that a sender writes makes this fail: what cannot be read is told in `left_out`, and the raw
//! bytes are kept beside (field cases C1, C3, C4).

use mail_parser::{Address, Message, MessageParser, MessagePart, MimeHeaders, PartType};
use towpath_chassis::secret::sha256;
use towpath_schemas::limit::FILES_PER_RUN;

use super::header;
use crate::message::Attachment;

/// Parts that one mail may have; one with more is refused before it is parsed.
pub const PARTS: usize = 1000;
/// References of one mail that are looked at, the newest.
pub const REFERENCES: usize = 100;

/// Whether a header with this value does.
type SaysSo = fn(&str) -> bool;

/// Headers that tell automatic mail, in the order in which they are asked (RFC 3834 and what is seen besides; field cases C5, C6).
const MARKERS: [(&str, SaysSo); 6] = [
    ("X-Towpath-Loop", |_| true),
    ("Auto-Submitted", |value| !value.eq_ignore_ascii_case("no")),
    ("X-Auto-Response-Suppress", |_| true),
    ("Precedence", |value| ["bulk", "list", "junk", "auto_reply"].iter().any(|word| value.eq_ignore_ascii_case(word))),
    ("List-Id", |_| true),
    ("List-Unsubscribe", |_| true),
];
/// Whose mail is never a person's.
const NOBODIES: [&str; 6] = ["mailer-daemon", "postmaster", "no-reply", "noreply", "do-not-reply", "donotreply"];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mail {
    /// Without its brackets; made of the content when the mail has none.
    pub message_id: String,
    /// `In-Reply-To`, then `References` from right to left: what it may be an answer to, the likeliest first.
    pub parents: Vec<String>,
    /// `References` as they came, with the parent of a mail that has only `In-Reply-To`.
    pub references: Vec<String>,
    /// The one author; None when there is none, or more than one, or a group.
    pub from: Option<String>,
    pub reply_to: Option<String>,
    pub subject: String,
    pub text: String,
    pub attachments: Vec<Attachment>,
    /// What could not be taken over, for whoever works with the rest.
    pub left_out: Vec<String>,
    pub automatic: Option<Report>,
}

/// Why no person stands behind a mail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// A report on mails that could not be delivered (RFC 3464): their Message-IDs, and why.
    Bounce { of: Vec<String>, why: Option<String> },
    /// The header or address that says so.
    Marked(String),
}

/// A mail that is not read at all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    #[error("it has more than {PARTS} parts")]
    TooManyParts,
    #[error("it has no header")]
    NoHeader,
}

/// The Message-ID alone, for whoever only has to know a mail again; of one without, a digest of what it is made of (field case C3).
pub fn message_id(sender: &str, raw: &[u8]) -> String {
    header::first(raw, "Message-ID")
        .and_then(|value| header::message_ids(&value).into_iter().next())
        .unwrap_or_else(|| format!("{}@no-message-id.invalid", hex::encode(sha256(&[sender.as_bytes(), b"\n", raw].concat()))))
}

/// `sender` is the envelope's, empty for `<>`.
pub fn read(sender: &str, raw: &[u8]) -> Result<Mail, ReadError> {
    if header::count_lines(raw, "content-type:") > PARTS {
        return Err(ReadError::TooManyParts);
    }
    let message = MessageParser::default().parse(raw).ok_or(ReadError::NoHeader)?;
    let id_list = |name| header::first(raw, name).map(|value| header::message_ids(&value)).unwrap_or_default();
    let answered = id_list("In-Reply-To");
    let mut references = id_list("References");
    if references.is_empty() && answered.len() == 1 {
        references.clone_from(&answered);
    }
    let mut parents: Vec<String> = Vec::new();
    for id in answered.iter().chain(references.iter().rev()).take(REFERENCES) {
        if !parents.contains(id) {
            parents.push(id.clone());
        }
    }
    let from = match (header::all(raw, "From").len(), message.from()) {
        (1, Some(Address::List(list))) if list.len() == 1 => address(list.first().and_then(|author| author.address())),
        _ => None,
    };
    let reply_to = address(message.reply_to().and_then(Address::first).and_then(|to| to.address()));
    let mut left_out = Vec::new();
    let attachments = attachments(&message, &mut left_out);
    let automatic = automatic(sender, raw, &message, from.as_deref());
    Ok(Mail {
        message_id: message_id(sender, raw),
        parents,
        references,
        from,
        reply_to,
        subject: clean(message.subject().unwrap_or_default()),
        text: text(&message),
        attachments,
        left_out,
        automatic,
    })
}

/// In lower case: the part before the @ is, in practice, nowhere told apart by case.
fn address(given: Option<&str>) -> Option<String> {
    let given = given?.trim().to_lowercase();
    let (local, domain) = given.rsplit_once('@')?;
    let is_plain = |text: &str| !text.is_empty() && !text.chars().any(|c| c.is_whitespace() || c.is_control() || "<>,;".contains(c));
    (is_plain(local) && is_plain(domain)).then_some(given)
}

/// U+0000 is no text anywhere behind this.
fn clean(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

fn text(message: &Message<'_>) -> String {
    let bodies: Vec<String> =
        (0..message.text_body_count()).filter_map(|n| message.body_text(n)).map(|text| clean(text.trim_end())).collect();
    bodies.join("\n\n").replace("\r\n", "\n").trim_matches('\n').to_owned()
}

fn attachments(message: &Message<'_>, left_out: &mut Vec<String>) -> Vec<Attachment> {
    let mut taken = Vec::new();
    for part in message.attachments() {
        let given = part.attachment_name().map(clean);
        let media_type = part.content_type().map_or_else(
            || "application/octet-stream".to_owned(),
            |kind| format!("{}/{}", kind.ctype(), kind.subtype().unwrap_or("octet-stream")).to_lowercase(),
        );
        let fallback = if matches!(part.body, PartType::Message(_)) { "message.eml" } else { "attachment" };
        let name = given.unwrap_or_else(|| fallback.to_owned());
        if taken.len() == FILES_PER_RUN {
            left_out.push(format!("{name}: more than {FILES_PER_RUN} attachments"));
            continue;
        }
        let content = match &part.body {
            PartType::Message(inner) => inner.raw_message().to_vec(),
            PartType::Multipart(_) => continue,
            PartType::Text(_) | PartType::Html(_) | PartType::Binary(_) | PartType::InlineBinary(_) => part.contents().to_vec(),
        };
        let is_plain = media_type.len() <= 255 && media_type.is_ascii() && !media_type.contains('\0');
        let media_type = if is_plain { media_type } else { "application/octet-stream".to_owned() };
        taken.push(Attachment { name, media_type, content });
    }
    taken
}

fn automatic(sender: &str, raw: &[u8], message: &Message<'_>, from: Option<&str>) -> Option<Report> {
    let kind = message.content_type();
    let is_report = kind.is_some_and(|kind| {
        kind.ctype().eq_ignore_ascii_case("multipart") && kind.subtype().is_some_and(|subtype| subtype.eq_ignore_ascii_case("report"))
    });
    let report_type = kind.and_then(|kind| kind.attribute("report-type")).unwrap_or_default();
    if is_report && (report_type.eq_ignore_ascii_case("delivery-status") || sender.is_empty()) {
        return Some(Report::Bounce { of: reported(message), why: diagnostic(message) });
    }
    for (name, says_so) in MARKERS {
        if let Some(value) = header::first(raw, name)
            && says_so(value.split([';', ' ']).next().unwrap_or_default().trim())
        {
            return Some(Report::Marked(name.to_owned()));
        }
    }
    if is_report {
        return Some(Report::Marked("multipart/report".to_owned()));
    }
    if sender.is_empty() {
        return Some(Report::Marked("MAIL FROM:<>".to_owned()));
    }
    let local = from.and_then(|from| from.rsplit_once('@')).map(|(local, _)| local)?;
    NOBODIES.contains(&local).then(|| Report::Marked(format!("From: {local}@")))
}

/// The Message-IDs of the mails that a report brings back, whole or their headers only.
fn reported(message: &Message<'_>) -> Vec<String> {
    let mut found = Vec::new();
    for part in &message.parts {
        let inner = match &part.body {
            PartType::Message(inner) => inner.raw_message().to_vec(),
            PartType::Text(text) if part.content_type().and_then(|kind| kind.subtype()).is_some_and(|kind| kind == "rfc822-headers") => {
                text.as_bytes().to_vec()
            }
            _ => continue,
        };
        found.extend(header::first(&inner, "Message-ID").into_iter().flat_map(|value| header::message_ids(&value)));
    }
    found
}

/// The first reason that a report gives, without its type.
fn diagnostic(message: &Message<'_>) -> Option<String> {
    let is_status =
        |part: &&MessagePart<'_>| part.content_type().and_then(|kind| kind.subtype()).is_some_and(|kind| kind == "delivery-status");
    let text = String::from_utf8_lossy(message.parts.iter().find(is_status)?.contents()).replace("\r\n", "\n");
    let code = text.split("\n\n").find_map(|fields| header::first(fields.as_bytes(), "Diagnostic-Code"))?;
    Some(clean(code.split_once(';').map_or(code.as_str(), |(_, why)| why).trim()))
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    fn mail(headers: &str, body: &str) -> Mail {
        read("a@example.org", format!("From: a@example.org\r\n{headers}\r\n{body}").as_bytes()).expect("a mail")
    }

    #[test]
    fn a_body_in_a_charset_that_nobody_knows_is_still_read_c1() {
        let mail = mail("Content-Type: text/plain; charset=x-nope\r\n", "caf\u{e9} ok\r\n");
        assert!(mail.text.ends_with("ok"), "{}", mail.text);
    }

    #[test]
    fn a_mail_without_a_message_id_has_one_that_stays_the_same_c3() {
        let raw = b"From: a@example.org\r\nDate: Tue, 1 Dec 2026 10:00:00 +0000\r\n\r\nHello\r\n";
        let id = read("a@example.org", raw).expect("mail").message_id;
        assert_eq!(id, read("a@example.org", raw).expect("mail").message_id);
        assert_ne!(id, read("b@example.org", raw).expect("mail").message_id);
        assert_eq!(id, message_id("a@example.org", raw));
    }

    #[test]
    fn message_ids_are_opaque_and_none_is_judged_c4() {
        let cases = [
            ("Message-ID: plain@example.org\r\n", "plain@example.org"),
            ("Message-ID: <\"quoted part\"@example.org>\r\n", "\"quoted part\"@example.org"),
            ("Message-ID: <ACME20191226@423549219_ACME20191226@>\r\n", "ACME20191226@423549219_ACME20191226@"),
            ("Message-ID: <glued@example.org>X-Mailer: mine\r\n", "glued@example.org"),
            ("Message-ID: (comment) <folded\r\n @example.org>\r\n", "folded@example.org"),
        ];
        for (headers, expected) in cases {
            assert_eq!(mail(headers, "x").message_id, expected);
        }
    }

    #[test]
    fn automatic_mail_is_told_by_its_first_marker_c5_c6() {
        let marked = |headers: &str, name: &str| {
            assert_eq!(mail(headers, "x").automatic, Some(Report::Marked(name.to_owned())), "{headers}");
        };
        marked("Auto-Submitted: auto-replied\r\n", "Auto-Submitted");
        marked("Auto-Submitted: auto-generated; owner-email=\"x@y\"\r\n", "Auto-Submitted");
        marked("X-Auto-Response-Suppress: All\r\n", "X-Auto-Response-Suppress");
        marked("Precedence: Auto_Reply\r\n", "Precedence");
        marked("List-Id: <l.example.org>\r\n", "List-Id");
        marked("X-Towpath-Loop: 1\r\nAuto-Submitted: auto-replied\r\n", "X-Towpath-Loop");
        assert_eq!(mail("Auto-Submitted: no\r\nPrecedence: normal\r\n", "x").automatic, None);
        let from_nobody = read("x@example.org", b"From: Mail Delivery <MAILER-DAEMON@example.org>\r\n\r\nx").expect("mail");
        assert!(matches!(from_nobody.automatic, Some(Report::Marked(_))));
        let bare = read("", b"From: a@example.org\r\n\r\nx").expect("mail");
        assert_eq!(bare.automatic, Some(Report::Marked("MAIL FROM:<>".to_owned())));
    }

    #[test]
    fn a_bounce_names_the_mail_that_came_back() {
        let raw = "From: mailer-daemon@example.org\r\nContent-Type: multipart/report; report-type=delivery-status; boundary=b\r\n\r\n\
                   --b\r\n\r\nIt failed.\r\n--b\r\nContent-Type: message/delivery-status\r\n\r\nReporting-MTA: dns; mx.example.org\r\n\r\n\
                   Action: failed\r\nDiagnostic-Code: smtp; 550 no such\r\n mailbox\r\n\
                   --b\r\nContent-Type: message/rfc822\r\n\r\nFrom: us@example.org\r\nMessage-ID: <dlv_1.1@example.org>\r\n\r\nours\r\n--b--\r\n";
        let bounce = Report::Bounce { of: vec!["dlv_1.1@example.org".to_owned()], why: Some("550 no such mailbox".to_owned()) };
        assert_eq!(read("", raw.as_bytes()).expect("mail").automatic.as_ref(), Some(&bounce));
        let headers_only = raw.replace("message/rfc822", "text/rfc822-headers");
        assert_eq!(read("", headers_only.as_bytes()).expect("mail").automatic, Some(bounce));
    }

    #[test]
    fn what_it_answers_is_looked_for_in_in_reply_to_and_then_references_from_the_right_c16() {
        let both = mail("In-Reply-To: <c@x>\r\nReferences: <a@x>\r\n <b@x> <c@x>\r\n", "x");
        assert_eq!(both.parents, ["c@x", "b@x", "a@x"]);
        let only_in_reply_to = mail("In-Reply-To: <c@x> from somebody\r\n", "x");
        assert_eq!(only_in_reply_to.parents.first().map(String::as_str), Some("c@x"));
        let broken = mail("References: <a@x> <b@x\r\n", "x");
        assert_eq!(broken.parents, ["b@x", "a@x"]);
        assert_eq!(mail("", "x").parents, [] as [&str; 0]);
    }

    #[test]
    fn an_author_is_one_address_or_nobody() {
        let from = |header: &str| read("s@x.org", format!("{header}\r\n\r\nx").as_bytes()).expect("mail").from;
        assert_eq!(from("From: \"boss@corp.org\" <Evil@Elsewhere.org>"), Some("evil@elsewhere.org".to_owned()));
        assert_eq!(from("From: a@x.org, b@x.org"), None);
        assert_eq!(from("From: a@x.org\r\nFrom: b@x.org"), None);
        assert_eq!(from("From: friends: a@x.org;"), None);
        assert_eq!(from("Subject: nobody"), None);
    }

    #[test]
    fn attachments_keep_their_name_as_it_came_and_their_bytes() {
        let body = "--b\r\nContent-Type: text/plain\r\n\r\nsee there\r\n--b\r\nContent-Type: application/pdf\r\n\
                    Content-Disposition: attachment; filename=\"../../../etc/cron.d/x\"\r\nContent-Transfer-Encoding: base64\r\n\r\nAAECAw==\r\n\
                    --b\r\nContent-Type: message/rfc822\r\n\r\nSubject: inner\r\n\r\nforwarded\r\n--b--\r\n";
        let mail = mail("Content-Type: multipart/mixed; boundary=b\r\n", body);
        assert_eq!(mail.text, "see there");
        assert_eq!(mail.attachments.len(), 2);
        assert_eq!(mail.attachments[0].content, [0, 1, 2, 3]);
        assert_eq!(mail.attachments[0].name, "../../../etc/cron.d/x");
        // What becomes a file's name is the file room's to say (C8).
        assert_eq!(towpath_file::name::safe(&mail.attachments[0].name), "x");
        assert_eq!(mail.attachments[1].name, "message.eml");
        assert!(mail.attachments[1].content.ends_with(b"forwarded"));
    }

    #[test]
    fn a_mail_of_very_many_parts_is_refused_before_it_is_parsed() {
        let bomb = format!(
            "From: a@x.org\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n{}",
            "--b\r\nContent-Type: a/b\r\n\r\n".repeat(PARTS)
        );
        assert_eq!(read("a@x.org", bomb.as_bytes()), Err(ReadError::TooManyParts));
    }

    #[test]
    fn real_mails_of_every_shape_are_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mail");
        let mut seen = 0;
        for entry in fs::read_dir(folder).expect("fixtures") {
            let path = entry.expect("entry").path();
            let raw = fs::read(&path).expect("file");
            let mail = read("sender@example.org", &raw).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(!mail.message_id.is_empty() && !mail.text.contains('\0') && !mail.subject.contains('\0'), "{}", path.display());
            seen += 1;
        }
        assert!(seen >= 70, "{seen} fixtures");
    }
}
