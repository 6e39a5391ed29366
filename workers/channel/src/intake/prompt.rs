//! What the agent is told of a message, and the files beside it.

use towpath_chassis::{Chassis, Result};
use towpath_file::Spool;
use towpath_schemas::id::{FileId, PrincipalId};

use super::table::{self, Claimed};
use crate::message::{Attachment, Message};

/// The whole text, where the agent is not told all of it.
const MESSAGE_FILE: &str = "message.txt";
/// What is added to a text that was cut, and to one without what it quoted.
const CUT: &str = "\n\n[cut here; the whole text is in message.txt]";
const QUOTED: &str = "\n\n[the quoted text is left out; the whole message is in message.txt]";

/// What the agent is told, and the files beside it. Nothing of the message is left out: what is too long for its place is a file.
pub fn prompt(message: &Message, first: bool, most: usize) -> (String, Vec<Attachment>) {
    let mut text = String::new();
    if first && !message.head.subject.is_empty() {
        text = format!("Subject: {}\n\n", message.head.subject);
    }
    let mut attachments = message.attachments.clone();
    match message.new.as_ref().filter(|_| !first) {
        // The thread knows what is quoted; whoever doubts that finds the whole beside it (C18).
        Some(new) => {
            text.push_str(new);
            text.push_str(QUOTED);
            attachments.insert(0, message_file(&message.text));
        }
        None => text.push_str(&message.text),
    }
    for left_out in &message.left_out {
        text.push_str(&format!("\n[not taken over: {left_out}]"));
    }
    if text.trim().is_empty() {
        text = if message.attachments.is_empty() { "(an empty message)".to_owned() } else { "(see the attached files)".to_owned() };
    }
    if text.len() > most {
        if attachments.first().is_none_or(|first| first.name != MESSAGE_FILE) {
            attachments.insert(0, message_file(&text));
        }
        let mut keep = most - CUT.len();
        while !text.is_char_boundary(keep) {
            keep -= 1;
        }
        text.truncate(keep);
        text.push_str(CUT);
    }
    (text, attachments)
}

fn message_file(text: &str) -> Attachment {
    Attachment { name: MESSAGE_FILE.to_owned(), media_type: "text/plain".to_owned(), content: text.to_owned().into_bytes() }
}

/// Keeps attachments as files; those that an earlier attempt has kept stay.
pub async fn keep(chassis: &Chassis, claimed: &Claimed, principal: PrincipalId, attachments: &[Attachment]) -> Result<Vec<FileId>> {
    let mut files = table::files(&chassis.db, claimed.id).await?;
    for (n, attachment) in attachments.iter().enumerate().skip(files.len()) {
        let mut spool = Spool::new(attachment.content.len() as u64)?;
        spool.write(&attachment.content).await?;
        let spooled = spool.finish().await?;
        let file = towpath_file::store(chassis, claimed.tenant, principal, &attachment.name, &attachment.media_type, spooled).await?;
        table::insert_file(&chassis.db, claimed, i32::try_from(n).unwrap_or(i32::MAX), file.id).await?;
        files.push(file.id);
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mail;

    fn message(text: &str) -> Message {
        let raw = format!("From: a@x.org\r\nSubject: hi\r\n\r\n{text}");
        let settings = serde_json::from_str(r#"{"addresses": ["agent@example.org"], "smtp": {"host": "mx"}}"#).expect("settings");
        mail::of(&settings, mail::read::read("a@x.org", raw.as_bytes()).expect("mail"), Vec::new(), None)
    }

    #[test]
    fn the_agent_is_told_everything_and_what_is_too_long_is_a_file() {
        assert_eq!(prompt(&message("hello"), true, 1000).0, "Subject: hi\n\nhello");
        assert_eq!(prompt(&message("hello"), false, 1000).0, "hello");
        assert_eq!(prompt(&message(""), false, 1000).0, "(an empty message)");
        let long = "é".repeat(1000);
        let (text, files) = prompt(&message(&long), false, 1000);
        assert!(text.len() <= 1000 && text.ends_with(CUT), "{text}");
        assert_eq!((files[0].name.as_str(), files[0].content.as_slice()), ("message.txt", long.as_bytes()));
    }

    #[test]
    fn a_reply_is_told_without_what_it_quotes_and_the_whole_goes_along_c18() {
        let reply = message("Yes.\n\nOn Tue, 1 Dec 2026 at 10:00, Helper wrote:\n> Shall I?");
        let (text, files) = prompt(&reply, false, 1000);
        assert_eq!(text, format!("Yes.{QUOTED}"));
        assert!(files[0].content.ends_with(b"> Shall I?"));
        // A first message may forward what it is about.
        assert!(prompt(&reply, true, 1000).0.ends_with("> Shall I?"));
    }
}
