//! One attempt to answer in a Slack thread. What is longer than a message goes in several, each noted before it is sent and stamped with the delivery's id and its
//! place, so that `unknown` is resolved by `readback`: the thread is looked through for the stamp before anything is sent again (field cases B13, B15).

use std::{collections::BTreeMap, time::Duration};

use serde_json::{Value, json};
use tokio::time::timeout;
use towpath_chassis::{Chassis, clock, kill};
use towpath_delivery::{
    About, Due,
    part::{self, Part},
    state::Answer,
};
use towpath_schemas::{
    channel::SlackChannel,
    id::{InboundId, RunId},
};

use super::{
    event::CANCEL,
    render,
    web::{Trouble, Web},
};
use crate::{
    circuit::Attempt,
    intake::table::{self, Answering},
    message::{Attachment, Said},
    notice,
};

/// Time limit of one attempt; shorter than a delivery's claim.
const ATTEMPT: Duration = Duration::from_secs(45);
/// UTF-16 units of one message. Slack advises at most 4,000 characters.
const MESSAGE_UNITS: usize = 3900;
/// Messages of one answer, and bytes of the Markdown for them; the whole of a longer one is a file.
const MESSAGES: usize = 5;
const TEXT_BYTES: [usize; 4] = [12_000, 6_000, 3_000, 1_500];
/// A message that nobody sees so long after it was sent was not posted.
const SETTLE: Duration = Duration::from_secs(20);
/// An answer that opens its thread waits so long for the acknowledgement that is under way and would open it too.
const BEHIND: Duration = Duration::from_secs(5);
/// Messages of one page and pages of a thread that are looked through, newest first being no order that Slack offers.
const PAGE: &str = "200";
const PAGES: usize = 50;
/// Seconds that Slack's clock may differ from ours.
const CLOCKS_S: i64 = 300;
/// What our stamps are called.
const STAMP: &str = "towpath_delivery";
/// Part numbers: the texts count from 0, those to the author instead of the thread from this.
const TO_AUTHOR: i32 = 1000;
const FILES: i32 = 500;
const NO_FILES: i32 = 501;

type Sent<T> = std::result::Result<T, Trouble>;

pub(crate) async fn attempt(
    chassis: &Chassis,
    due: &Due,
    answering: &Answering,
    slack: &SlackChannel,
    secrets: &BTreeMap<String, String>,
    said: Said,
) -> towpath_chassis::Result<Attempt> {
    let Some(token) = secrets.get("bot_token") else { return Ok(Attempt::broken("the secret bot_token is missing".to_owned(), true)) };
    let is_rootless = answering.head.root.is_none();
    if is_rootless && !due.is_about(About::Accepted) && towpath_delivery::acknowledging(&chassis.db, answering.message).await? {
        return Ok(Attempt::of(Answer::Held { after: clock::scaled(BEHIND), why: "its thread is being opened".to_owned() }));
    }
    let answer = Speech {
        chassis,
        due,
        answering,
        web: Web::new(chassis, &slack.api, token)?,
        place: Place { channel: answering.head.to.clone(), thread: answering.head.root.as_deref().map(time_of), first: 0 },
    };
    match timeout(clock::scaled(ATTEMPT), answer.say(said)).await {
        Ok(Ok(words)) => Ok(Attempt::of(Answer::Taken(words))),
        Ok(Err(trouble)) => outcome(trouble),
        // What was sent is noted, and the next attempt goes on behind it.
        Err(_) => Ok(Attempt::of(Answer::NoAnswer(format!("not through within {} s", ATTEMPT.as_secs())))),
    }
}

fn outcome(trouble: Trouble) -> towpath_chassis::Result<Attempt> {
    Ok(match trouble {
        Trouble::Unknown(why) => Attempt::of(Answer::NoAnswer(why)),
        Trouble::NotTaken { why, retry_after } => Attempt::of(Answer::NotTaken { why, retry_after }),
        Trouble::Gone(why) | Trouble::TooLong(why) => Attempt::of(Answer::Refused(why)),
        Trouble::Broken { why, lasting } => Attempt::broken(why, lasting),
        Trouble::Lost => Attempt::of(Answer::NotTaken { why: "another worker goes on with it".to_owned(), retry_after: None }),
        Trouble::Ours(error) => return Err(error),
    })
}

/// `ts` of `team/channel/ts`.
fn time_of(key: &str) -> String {
    key.rsplit('/').next().unwrap_or_default().to_owned()
}

/// Where something is posted.
#[derive(Debug, Clone)]
struct Place {
    channel: String,
    /// None: in the channel itself.
    thread: Option<String>,
    /// The number of the first part there.
    first: i32,
}

struct Speech<'a> {
    chassis: &'a Chassis,
    due: &'a Due,
    answering: &'a Answering,
    web: Web<'a>,
    place: Place,
}

impl Speech<'_> {
    /// Says it in the thread, or else to its author; in a few words where.
    async fn say(&self, said: Said) -> Sent<String> {
        match self.post_all(&self.place, &said).await {
            Ok(first) => {
                if self.due.is_about(About::Accepted) {
                    self.keep_up(&first).await?;
                } else if let Some(run) = self.due.run.filter(|_| self.due.is_about(About::RunEnded)) {
                    self.settle(run).await?;
                }
                Ok(format!("posted as {first} in {}", self.place.channel))
            }
            // The thread is no more; whoever asked may still be reached (B9).
            Err(Trouble::Gone(why)) if self.due.is_about(About::RunEnded) => {
                let Some(author) = &self.answering.author else { return Err(Trouble::Gone(why)) };
                let place = Place { channel: author.clone(), thread: None, first: TO_AUTHOR };
                let mut said = said;
                said.text = format!("This could not be posted where you asked ({why}).\n\n{}", said.text);
                match self.post_all(&place, &said).await {
                    Ok(first) => Ok(format!("posted as {first} to its author: {why}")),
                    Err(Trouble::Gone(_) | Trouble::Broken { lasting: true, .. }) => Err(Trouble::Gone(why)),
                    Err(trouble) => Err(trouble),
                }
            }
            Err(trouble) => Err(trouble),
        }
    }

    /// All of its messages, in order, and then its files; the `ts` of the first.
    async fn post_all(&self, place: &Place, said: &Said) -> Sent<String> {
        let (texts, mut files) =
            letters(self.answering.head.asked.as_deref().filter(|_| place.thread.is_none()), &self.answering.author, said);
        let mut place = place.clone();
        let mut first = None;
        for (n, text) in (place.first..).zip(&texts) {
            let ts = match self.post(&place, n, text).await {
                // Slack counts otherwise than it says (B1): nothing of it is lost.
                Err(Trouble::TooLong(_)) => {
                    files.push(Attachment {
                        name: format!("part-{}.txt", n - place.first + 1),
                        media_type: "text/plain".to_owned(),
                        content: text.clone().into_bytes(),
                    });
                    self.post(&place, n, &format!("[this part is in part-{}.txt]", n - place.first + 1)).await?
                }
                posted => posted?,
            };
            if place.thread.is_none() && place.first == 0 {
                self.root(&ts).await?;
                place.thread = Some(ts.clone());
            }
            first.get_or_insert(ts);
        }
        if !files.is_empty() {
            match self.share(&place, place.first + FILES, &files).await {
                Ok(()) => {}
                // What it says stands; of its files it is told where they are.
                Err(Trouble::Gone(why) | Trouble::TooLong(why) | Trouble::Broken { why, lasting: true }) => {
                    let names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
                    let text = format!("[not attached: {}; {why}. They are among the run's outputs.]", names.join(", "));
                    self.post(&place, place.first + NO_FILES, &render::parts(&text, MESSAGE_UNITS).swap_remove(0)).await?;
                }
                Err(trouble) => return Err(trouble),
            }
        }
        first.ok_or_else(|| Trouble::Gone("there is nothing to say".to_owned()))
    }

    /// The message that opened a thread which had none: replies to it are of this thread.
    async fn root(&self, ts: &str) -> Sent<()> {
        let (Some(thread), Some((team, _))) = (self.answering.thread, self.answering.head.message_id.split_once('/')) else {
            return Ok(());
        };
        let key = format!("{team}/{}/{ts}", self.answering.head.to);
        let mut work = self.chassis.begin().await?;
        table::root(&mut work, self.answering, self.due.tenant, thread, &key).await?;
        Ok(work.commit().await?)
    }

    /// One message, once; its `ts`.
    async fn post(&self, place: &Place, n: i32, text: &str) -> Sent<String> {
        match part::begin(self.chassis, self.due, n).await? {
            Part::Lost => return Err(Trouble::Lost),
            Part::Sent(ts) => return Ok(ts),
            Part::Fresh => {}
            Part::Unsure { ago, .. } => {
                let stamp = json!({ "delivery_id": self.due.id, "part": n });
                let is_it = |message: &Value| message["metadata"]["event_type"] == STAMP && message["metadata"]["event_payload"] == stamp;
                if let Some(ts) = self.look_for(place, &is_it).await? {
                    part::sent(self.chassis, self.due, n, &ts).await?;
                    return Ok(ts);
                }
                if ago < clock::scaled(SETTLE) {
                    return Err(Trouble::Unknown("not to be seen in the thread yet".to_owned()));
                }
                part::again(self.chassis, self.due, n).await?;
            }
        }
        let mut message = json!({
            "channel": place.channel, "text": text, "parse": "none", "link_names": false, "unfurl_links": false, "unfurl_media": false,
            "metadata": { "event_type": STAMP, "event_payload": { "delivery_id": self.due.id, "part": n } },
        });
        if let Some(thread) = &place.thread {
            message["thread_ts"] = json!(thread);
        }
        if let Some(run) = self.due.run.filter(|_| self.due.is_about(About::Accepted)) {
            message["blocks"] = with_button(text, run);
        }
        kill::point("send").await;
        let posted = self.web.call("chat.postMessage", &message).await;
        kill::point("sent").await;
        let ts = posted.and_then(|answer| {
            let ts = answer["ts"].as_str().filter(|ts| !ts.is_empty());
            ts.map(str::to_owned).ok_or_else(|| Trouble::Unknown("chat.postMessage: ok, but no ts".to_owned()))
        });
        match ts {
            Ok(ts) => {
                part::sent(self.chassis, self.due, n, &ts).await?;
                Ok(ts)
            }
            Err(trouble) => {
                if !trouble.is_unknown() {
                    part::unsent(self.chassis, self.due, n).await?;
                }
                Err(trouble)
            }
        }
    }

    /// All files as one message, once.
    async fn share(&self, place: &Place, n: i32, files: &[Attachment]) -> Sent<()> {
        match part::begin(self.chassis, self.due, n).await? {
            Part::Lost => return Err(Trouble::Lost),
            Part::Sent(_) => return Ok(()),
            Part::Fresh | Part::Unsure { name: None, .. } => {}
            Part::Unsure { ago, name: Some(ids) } => {
                let is_it = |message: &Value| {
                    let files = message["files"].as_array().map(Vec::as_slice).unwrap_or_default();
                    files.iter().filter_map(|file| file["id"].as_str()).any(|id| ids.split(',').any(|own| own == id))
                };
                if self.look_for(place, &is_it).await?.is_some() {
                    return Ok(part::sent(self.chassis, self.due, n, &ids).await?);
                }
                if ago < clock::scaled(SETTLE) {
                    return Err(Trouble::Unknown("not to be seen in the thread yet".to_owned()));
                }
            }
        }
        let shared = async {
            let mut named = Vec::new();
            for file in files {
                let length = file.content.len().to_string();
                let place = self.web.ask("files.getUploadURLExternal", &[("filename", &file.name), ("length", &length)]).await?;
                let (Some(url), Some(id)) = (place["upload_url"].as_str(), place["file_id"].as_str()) else {
                    return Err(Trouble::NotTaken { why: "files.getUploadURLExternal: no address".to_owned(), retry_after: None });
                };
                self.web.upload(url, file.content.clone()).await?;
                named.push(json!({ "id": id, "title": file.name }));
            }
            Ok(named)
        };
        // Until here nobody sees anything of it.
        let named = match shared.await {
            Ok(named) => named,
            Err(trouble) => {
                part::unsent(self.chassis, self.due, n).await?;
                return Err(if trouble.is_unknown() { Trouble::NotTaken { why: trouble.why(), retry_after: None } } else { trouble });
            }
        };
        let ids = named.iter().filter_map(|file| file["id"].as_str()).collect::<Vec<_>>().join(",");
        if !part::name(self.chassis, self.due, n, &ids).await? {
            return Err(Trouble::Lost);
        }
        // A user's id is a place to post to, but not to share at.
        let channel = self.channel_of(place).await?;
        let mut share = json!({ "files": named, "channel_id": channel });
        if let Some(thread) = &place.thread {
            share["thread_ts"] = json!(thread);
        }
        kill::point("send").await;
        let answer = self.web.call("files.completeUploadExternal", &share).await;
        kill::point("sent").await;
        match answer {
            Ok(_) => Ok(part::sent(self.chassis, self.due, n, &ids).await?),
            Err(trouble) => {
                if !trouble.is_unknown() {
                    part::unsent(self.chassis, self.due, n).await?;
                }
                Err(trouble)
            }
        }
    }

    async fn channel_of(&self, place: &Place) -> Sent<String> {
        if !place.channel.starts_with(['U', 'W']) {
            return Ok(place.channel.clone());
        }
        let opened = self.web.call("conversations.open", &json!({ "users": place.channel })).await?;
        let channel = opened["channel"]["id"].as_str().map(str::to_owned);
        channel.ok_or_else(|| Trouble::NotTaken { why: "conversations.open: no channel".to_owned(), retry_after: None })
    }

    /// The `ts` of the message of ours in the thread, or in the channel, that it is.
    async fn look_for(&self, place: &Place, is_it: &(dyn Fn(&Value) -> bool + Sync)) -> Sent<Option<String>> {
        let channel = match self.channel_of(place).await {
            Ok(channel) => channel,
            Err(Trouble::Gone(_)) => return Ok(None),
            Err(trouble) => return Err(trouble),
        };
        let owed = self.due.claimed_at.timestamp() - i64::try_from(self.due.age.as_secs()).unwrap_or_default() - CLOCKS_S;
        let oldest = owed.to_string();
        let mut cursor = String::new();
        for _ in 0..PAGES {
            let mut arguments = vec![("channel", channel.as_str()), ("limit", PAGE), ("include_all_metadata", "true"), ("oldest", &oldest)];
            let method = match &place.thread {
                Some(thread) => {
                    arguments.push(("ts", thread));
                    "conversations.replies"
                }
                None => "conversations.history",
            };
            if !cursor.is_empty() {
                arguments.push(("cursor", &cursor));
            }
            let page = match self.web.ask(method, &arguments).await {
                Ok(page) => page,
                // Nothing can be seen there, so it is as if nothing had been posted: at worst it is there twice, under one stamp.
                Err(Trouble::Gone(why)) => {
                    tracing::warn!(delivery = %self.due.id, why, "a thread cannot be read back");
                    return Ok(None);
                }
                Err(Trouble::Broken { why, lasting: true }) if why.ends_with("missing_scope") => {
                    tracing::warn!(delivery = %self.due.id, why, "a thread cannot be read back");
                    return Ok(None);
                }
                Err(trouble) => return Err(trouble),
            };
            let messages = page["messages"].as_array().map(Vec::as_slice).unwrap_or_default();
            if let Some(found) = messages.iter().find(|message| is_it(message)) {
                return Ok(found["ts"].as_str().map(str::to_owned));
            }
            page["response_metadata"]["next_cursor"].as_str().unwrap_or_default().clone_into(&mut cursor);
            if cursor.is_empty() {
                return Ok(None);
            }
        }
        Err(Trouble::Unknown(format!("the thread has more than {PAGES} pages")))
    }

    /// An acknowledgement whose run has ended meanwhile: nobody else says so there.
    async fn keep_up(&self, ts: &str) -> Sent<()> {
        let Some(run) = self.due.run else { return Ok(()) };
        let run = towpath_run::view::run(&self.chassis.db, self.due.tenant, run).await?;
        if run.ended_at.is_some() { self.edit(ts, &notice::status(&run)).await } else { Ok(()) }
    }

    /// The run has ended: its acknowledgement says how, and offers no more to cancel it.
    async fn settle(&self, run: RunId) -> Sent<()> {
        let Some(ts) = part::acknowledgement(&self.chassis.db, InboundId(run.uuid())).await? else { return Ok(()) };
        let run = towpath_run::view::run(&self.chassis.db, self.due.tenant, run).await?;
        self.edit(&ts, &notice::status(&run)).await
    }

    async fn edit(&self, ts: &str, text: &str) -> Sent<()> {
        let text = render::parts(text, MESSAGE_UNITS).into_iter().next().unwrap_or_default();
        let edited = json!({ "channel": self.place.channel, "ts": ts, "text": text, "parse": "none", "link_names": false, "blocks": [] });
        match self.web.call("chat.update", &edited).await {
            Ok(_) => Ok(()),
            // Whoever removed it wants no more of it.
            Err(Trouble::NotTaken { why, retry_after: None }) if !why.contains("rate") => {
                tracing::info!(delivery = %self.due.id, why, "an acknowledgement stays as it is");
                Ok(())
            }
            Err(Trouble::Gone(_)) => Ok(()),
            // It may be done again.
            Err(Trouble::Unknown(why)) => Err(Trouble::NotTaken { why, retry_after: None }),
            Err(trouble) => Err(trouble),
        }
    }
}

/// The messages and files of an answer. `asked`: what a slash command said, which nobody else has seen.
fn letters(asked: Option<&str>, author: &Option<String>, said: &Said) -> (Vec<String>, Vec<Attachment>) {
    let mut said = said.clone();
    // Slack takes no empty file.
    let (empty, files): (Vec<_>, Vec<_>) = said.attachments.drain(..).partition(|file| file.content.is_empty());
    said.attachments = files;
    said.left_out.extend(empty.iter().map(|file| format!("`{}` is empty", file.name)));
    let mut letters = (Vec::new(), Vec::new());
    for most in TEXT_BYTES {
        let fitted = said.clone().fit(most);
        let mut texts = render::parts(&format!("{}\n\n— {}", fitted.text, fitted.footer), MESSAGE_UNITS);
        if let (Some(asked), Some(first)) = (asked, texts.first_mut()) {
            let who = author.as_ref().map_or_else(String::new, |author| format!("<@{author}> asked:\n"));
            let asked = render::parts(&format!("> {}", asked.replace('\n', " ")), 2000).into_iter().next().unwrap_or_default();
            *first = format!("{who}{asked}\n\n{first}");
        }
        letters = (texts, fitted.attachments);
        if letters.0.len() <= MESSAGES {
            break;
        }
    }
    letters
}

fn with_button(text: &str, run: RunId) -> Value {
    json!([
        { "type": "section", "text": { "type": "mrkdwn", "text": text, "verbatim": true } },
        { "type": "actions", "elements": [{
            "type": "button", "action_id": CANCEL, "value": run, "style": "danger",
            "text": { "type": "plain_text", "text": "Cancel" },
            "confirm": {
                "title": { "type": "plain_text", "text": "Cancel the run?" }, "text": { "type": "plain_text", "text": "What it has done so far stays." },
                "confirm": { "type": "plain_text", "text": "Cancel it" }, "deny": { "type": "plain_text", "text": "Let it work" },
            },
        }] },
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_very_long_answer_is_a_few_messages_and_a_file_b2() {
        let said = Said { text: "line & more\n".repeat(20_000), footer: "helper".to_owned(), ..Said::default() };
        let (texts, files) = letters(None, &None, &said);
        assert!((2..=MESSAGES).contains(&texts.len()), "{}", texts.len());
        assert_eq!(files[0].content, said.text.as_bytes());
        assert!(texts.last().is_some_and(|last| last.ends_with("— helper")));
        // Escaping makes five characters of one.
        let (texts, _) = letters(None, &None, &Said { text: "&".repeat(50_000), ..Said::default() });
        assert!(texts.len() <= MESSAGES, "{}", texts.len());
    }

    #[test]
    fn an_empty_file_is_named_and_not_sent() {
        let empty = Attachment { name: "log".to_owned(), media_type: String::new(), content: Vec::new() };
        let (texts, files) = letters(None, &None, &Said { text: "done".to_owned(), attachments: vec![empty], ..Said::default() });
        assert_eq!((texts.as_slice(), files.as_slice()), (&["done\n\n`log` is empty\n\n—".to_owned()][..], &[][..]));
    }

    #[test]
    fn what_a_slash_command_asked_is_shown_and_mentions_only_who_asked() {
        let (texts, _) = letters(Some("ping <!channel>"), &Some("U1".to_owned()), &Said { text: "ok".to_owned(), ..Said::default() });
        assert!(texts[0].starts_with("<@U1> asked:\n> ping &lt;!channel&gt;\n\nok"), "{}", texts[0]);
    }
}
