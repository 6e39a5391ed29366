//! A message as the room sees it, by whatever it came.

use serde::{Deserialize, Serialize};
use towpath_schemas::id::{DeliveryId, RunId, ThreadId};

/// What a person, or a program, wrote to us.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Message {
    /// Messages that it answers by the provider's ids, the nearest first.
    pub parents: Vec<String>,
    /// A thread that the address it went to proves.
    pub token: Option<ThreadId>,
    /// None when it has no author, or more than one.
    pub author: Option<String>,
    /// What the author belongs to: a domain, a Slack workspace.
    pub groups: Vec<String>,
    /// Where it was sent to: addresses, a Slack channel.
    pub to: Vec<String>,
    /// It is meant for us. One that is not is only taken into a thread that is ours already.
    pub calls: bool,
    pub text: String,
    /// What is new in `text`, where it quotes the rest.
    pub new: Option<String>,
    pub attachments: Vec<Attachment>,
    /// Attachments that are still with the provider.
    pub remote: Vec<Remote>,
    /// What could not be taken over, for whoever works with the rest.
    pub left_out: Vec<String>,
    /// It only asks that this run, and no other one of its thread, be canceled.
    pub cancels: Option<RunId>,
    pub automatic: Option<Automatic>,
    pub head: Head,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// As the sender wrote it; never a path to be used.
    pub name: String,
    pub media_type: String,
    pub content: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remote {
    pub name: String,
    pub media_type: String,
    pub size: u64,
    pub url: String,
}

/// Why no person stands behind a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Automatic {
    /// A report on deliveries of ours that came back, and why.
    Bounce { of: Vec<DeliveryId>, why: String },
    /// What tells so.
    Marked(String),
}

/// What an answer needs of the message that it answers.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Head {
    /// The provider's own id of the message.
    pub message_id: String,
    /// Of mail: its References.
    pub references: Vec<String>,
    /// Where the answer goes: an address, a Slack channel.
    pub to: String,
    pub subject: String,
    /// Where the provider keeps threads, what it knows this one by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<String>,
    /// What it said, where nobody else of the thread has seen it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
}

/// What we say in a thread.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Said {
    /// Markdown.
    pub text: String,
    pub attachments: Vec<Attachment>,
    /// A line for each thing that should go along and does not.
    pub left_out: Vec<String>,
    /// Who says it.
    pub footer: String,
}

impl Said {
    /// With a text of about `most` bytes; of a longer one only the beginning, and the whole in a file.
    pub fn fit(mut self, most: usize) -> Self {
        if let Some(head) = beginning(&self.text, most) {
            let whole = std::mem::replace(&mut self.text, head).into_bytes();
            self.attachments.insert(0, Attachment { name: "result.md".to_owned(), media_type: "text/markdown".to_owned(), content: whole });
        }
        for line in self.left_out.drain(..) {
            self.text.push_str("\n\n");
            self.text.push_str(&line);
        }
        self
    }
}

/// The beginning of a text that is too long, up to a paragraph's or a line's end.
fn beginning(text: &str, mut most: usize) -> Option<String> {
    if text.len() <= most {
        return None;
    }
    while !text.is_char_boundary(most) {
        most -= 1;
    }
    let head = text.get(..most)?;
    let end = ["\n\n", "\n"].iter().filter_map(|border| head.rfind(border)).find(|end| *end > most / 2).unwrap_or(most);
    let mut head = head.get(..end)?.to_owned();
    // A block of code that is cut is closed, or all that follows would be code (field case B3).
    if head.lines().filter(|line| line.trim_start().starts_with("```")).count() % 2 == 1 {
        head.push_str("\n```");
    }
    head.push_str("\n\n[the whole result is in result.md]");
    Some(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_very_long_result_is_a_beginning_and_a_file_and_its_code_stays_code_b3() {
        let said = |text: String| Said { text, left_out: vec!["`x` was not kept".to_owned()], ..Said::default() }.fit(1000);
        assert_eq!(said("short".to_owned()).text, "short\n\n`x` was not kept");
        let long = format!("# Head\n\n```rust\n{}```\n", "let x = 1; // é\n".repeat(1000));
        let cut = said(long.clone());
        assert!(cut.text.len() < 1100 && cut.text.starts_with("# Head"), "{}", cut.text.len());
        assert!(cut.text.ends_with("// é\n```\n\n[the whole result is in result.md]\n\n`x` was not kept"), "{}", cut.text);
        assert_eq!((cut.attachments[0].name.as_str(), cut.attachments[0].content.as_slice()), ("result.md", long.as_bytes()));
    }
}
