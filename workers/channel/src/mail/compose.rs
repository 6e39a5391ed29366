//! The mail that carries an answer back. Its Message-ID is fixed before it is sent, so sending it again sends the same mail.

use lettre::{
    Message,
    message::{
        Attachment as Enclosed, Mailbox, MultiPart, SinglePart,
        header::{ContentType, HeaderName, HeaderValue},
    },
};
use pulldown_cmark::{Event, Options, Parser, html};

use crate::message::Attachment;

/// References that an answer carries: the first, and the newest.
const REFERENCES: usize = 20;

/// An answer, ready to be written down.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Ours.
    pub from: String,
    /// The agent's name, before the address.
    pub name: String,
    /// Where an answer to this one is to go: the address with the thread's token.
    pub reply_to: String,
    pub to: String,
    pub subject: String,
    /// Without brackets.
    pub message_id: String,
    pub in_reply_to: String,
    pub references: Vec<String>,
    /// Markdown.
    pub text: String,
    pub attachments: Vec<Attachment>,
}

#[derive(Debug, thiserror::Error)]
pub enum ComposeError {
    #[error("`{0}` is no mail address")]
    Address(String),
    #[error("the mail cannot be written: {0}")]
    Mail(#[from] lettre::error::Error),
}

pub fn compose(answer: &Answer) -> Result<Message, ComposeError> {
    let address = |text: &str| text.parse::<lettre::Address>().map_err(|_| ComposeError::Address(text.to_owned()));
    let mut references: Vec<String> = answer.references.iter().filter(|id| **id != answer.in_reply_to).cloned().collect();
    references.push(answer.in_reply_to.clone());
    if references.len() > REFERENCES {
        references.drain(1..=references.len() - REFERENCES);
    }
    let bracketed = |id: &String| format!("<{id}>");
    let written = Message::builder()
        .from(Mailbox::new(Some(answer.name.clone()), address(&answer.from)?))
        .reply_to(Mailbox::new(Some(answer.name.clone()), address(&answer.reply_to)?))
        .to(Mailbox::new(None, address(&answer.to)?))
        .subject(reply_subject(&answer.subject))
        .message_id(Some(bracketed(&answer.message_id)))
        .in_reply_to(bracketed(&answer.in_reply_to))
        .references(references.iter().map(bracketed).collect::<Vec<_>>().join(" "))
        .raw_header(raw("Auto-Submitted", "auto-replied"))
        .raw_header(raw("X-Auto-Response-Suppress", "All"))
        .raw_header(raw("X-Towpath-Loop", "1"));
    let body = MultiPart::alternative_plain_html(answer.text.clone(), to_html(&answer.text));
    if answer.attachments.is_empty() {
        return Ok(written.multipart(body)?);
    }
    let mut mixed = MultiPart::mixed().multipart(body);
    for attachment in &answer.attachments {
        mixed = mixed.singlepart(enclosed(attachment));
    }
    Ok(written.multipart(mixed)?)
}

fn raw(name: &'static str, value: &str) -> HeaderValue {
    HeaderValue::new(HeaderName::new_from_ascii_str(name), value.to_owned())
}

fn enclosed(attachment: &Attachment) -> SinglePart {
    let kind = ContentType::parse(&attachment.media_type)
        .unwrap_or(ContentType::parse("application/octet-stream").unwrap_or(ContentType::TEXT_PLAIN));
    Enclosed::new(attachment.name.clone()).body(attachment.content.clone(), kind)
}

/// The subject as it was, with one `Re: ` (field case C15): threads are kept by some readers by the subject alone.
pub fn reply_subject(subject: &str) -> String {
    const MARKS: [&str; 4] = ["re", "aw", "sv", "antw"];
    let mut bare = subject.trim();
    while let Some((mark, rest)) = bare.split_once(':') {
        // `Re[2]:` is one too.
        let mark = mark.split('[').next().unwrap_or_default().trim();
        if !MARKS.iter().any(|known| mark.eq_ignore_ascii_case(known)) {
            break;
        }
        bare = rest.trim_start();
    }
    format!("Re: {bare}").replace(['\r', '\n'], " ")
}

/// Markdown as HTML. An agent's own HTML is shown as the text that it is: it may quote whatever it has read.
fn to_html(markdown: &str) -> String {
    let options = Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH | Options::ENABLE_TASKLISTS;
    let events = Parser::new_ext(markdown, options).map(|event| match event {
        Event::Html(text) | Event::InlineHtml(text) => Event::Text(text),
        // A picture would be fetched from wherever the text says, by the reader's own mail program.
        Event::Start(pulldown_cmark::Tag::Image { dest_url, .. }) => Event::Text(format!("[picture {dest_url}] ").into()),
        Event::End(pulldown_cmark::TagEnd::Image) => Event::Text("".into()),
        other => other,
    });
    let mut page = String::from("<!DOCTYPE html><html><body>");
    html::push_html(&mut page, events);
    page.push_str("</body></html>");
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mail::read;

    fn answer() -> Answer {
        Answer {
            from: "agent@example.org".to_owned(),
            name: "helper".to_owned(),
            reply_to: "agent+t.1@example.org".to_owned(),
            to: "ann@example.com".to_owned(),
            subject: "Re: RE[2]: AW: what is 2 * 3?".to_owned(),
            message_id: "dlv_1.1@example.org".to_owned(),
            in_reply_to: "c@x".to_owned(),
            references: vec!["a@x".to_owned(), "b@x".to_owned()],
            text: "**six** `rm -rf *` <script>alert(1)</script> [site](https://example.org) Grüße".to_owned(),
            attachments: vec![],
        }
    }

    #[test]
    fn an_answer_stands_in_its_thread_and_says_that_it_is_automatic_c7_c15_c16() {
        let raw = compose(&answer()).expect("mail").formatted();
        let mail = read::read("agent@example.org", &raw).expect("mail");
        assert_eq!(mail.message_id, "dlv_1.1@example.org");
        assert_eq!(mail.parents, ["c@x", "b@x", "a@x"]);
        assert_eq!(mail.subject, "Re: what is 2 * 3?");
        assert_eq!(mail.reply_to.as_deref(), Some("agent+t.1@example.org"));
        assert_eq!(mail.automatic, Some(read::Report::Marked("X-Towpath-Loop".to_owned())));
        assert!(mail.text.contains("Grüße"), "{}", mail.text);
    }

    #[test]
    fn markdown_becomes_html_and_an_agent_s_own_html_stays_text() {
        let page = to_html(&answer().text);
        assert!(page.contains("<strong>six</strong> <code>rm -rf *</code>"), "{page}");
        assert!(page.contains("&lt;script&gt;") && !page.contains("<script"), "{page}");
        assert!(!to_html("![x](https://tracker.example.org/1.gif)").contains("<img"));
    }

    #[test]
    fn a_long_thread_keeps_its_first_and_its_newest_references() {
        let mut long = answer();
        long.references = (0..50).map(|n| format!("{n}@x")).collect();
        let mail = read::read("a@x.org", &compose(&long).expect("mail").formatted()).expect("mail");
        assert_eq!(mail.references.len(), REFERENCES);
        assert_eq!((mail.references[0].as_str(), mail.references[19].as_str()), ("0@x", "c@x"));
    }

    #[test]
    fn a_subject_cannot_bring_a_header_of_its_own() {
        let mut crafted = answer();
        crafted.subject = "x\r\nBcc: everyone@example.org".to_owned();
        let raw = String::from_utf8(compose(&crafted).expect("mail").formatted()).expect("ascii");
        assert!(!raw.contains("\nBcc:"), "{raw}");
    }

    #[test]
    fn attachments_go_along() {
        let mut with = answer();
        with.attachments =
            vec![Attachment { name: "r é.bin".to_owned(), media_type: "application/x-thing".to_owned(), content: vec![0, 1, 2] }];
        let mail = read::read("a@x.org", &compose(&with).expect("mail").formatted()).expect("mail");
        assert_eq!(mail.attachments, with.attachments);
    }
}
