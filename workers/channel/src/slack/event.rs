//! What a Slack app posts to us: events, slash commands, and what people press. Pure.
//!
//! All three are signed alike ("Verifying requests from Slack"), over the bytes as they came (field case A14). An event is known by `event_id`, its message by team,
//! channel and `ts`: a mention comes as `app_mention` and as `message`, each with an id of its own (A5), and on Enterprise Grid as `app_mention` alone (A6).

use chrono::{DateTime, Utc};
use hmac::{Hmac, KeyInit, Mac};
use serde::Deserialize;
use sha2::Sha256;
use towpath_chassis::secret;
use towpath_schemas::id::RunId;
use url::form_urlencoded;

use crate::{
    message::{Automatic, Head, Message, Remote},
    receive::Keys,
};

/// Seconds that a signature is good for.
const SIGNED_S: i64 = 300;
/// What our button that cancels a run is called.
pub const CANCEL: &str = "cancel";
/// Characters of a slash command's text that are repeated in the channel, where nobody else sees what was asked.
const ASKED_CHARS: usize = 300;

/// Err(what is wrong) unless Slack has sent it within the last five minutes.
pub fn verify(
    signing_secret: &str,
    now: DateTime<Utc>,
    timestamp: Option<&str>,
    signature: Option<&str>,
    raw: &[u8],
) -> Result<(), &'static str> {
    let (Some(timestamp), Some(signature)) = (timestamp, signature) else {
        return Err("X-Slack-Request-Timestamp or X-Slack-Signature is missing");
    };
    let at: i64 = timestamp.parse().map_err(|_| "X-Slack-Request-Timestamp is no number")?;
    if now.timestamp().abs_diff(at) > SIGNED_S.unsigned_abs() {
        return Err("it was signed more than five minutes ago, or the clocks differ");
    }
    let given = signature.strip_prefix("v0=").and_then(|given| hex::decode(given).ok()).ok_or("X-Slack-Signature is no `v0=` and hex")?;
    let mut mac = Hmac::<Sha256>::new_from_slice(signing_secret.as_bytes()).map_err(|_| "the channel's signing_secret is unusable")?;
    for piece in [b"v0:", timestamp.as_bytes(), b":", raw] {
        mac.update(piece);
    }
    mac.verify_slice(&given).map_err(|_| "the signature is not of the channel's signing_secret")
}

/// What a request that was verified is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Came {
    /// Slack asks whether this address is ours; it wants this back.
    Challenge(String),
    /// To be kept under these keys. `command`: somebody looks at an empty answer.
    Keep { keys: Keys, command: bool },
    /// Of no use to us: joins, edits, what programs write, messages that are meant for others.
    Nothing,
    /// Slack sends no events for a minute: there are more than 30,000 an hour in a workspace.
    Limited,
}

#[derive(Debug, Deserialize)]
struct Callback {
    #[serde(rename = "type")]
    kind: String,
    challenge: Option<String>,
    team_id: Option<String>,
    event_id: Option<String>,
    event: Option<Event>,
    #[serde(default)]
    authorizations: Vec<Authorization>,
}

#[derive(Debug, Deserialize)]
struct Authorization {
    user_id: Option<String>,
    #[serde(default)]
    is_bot: bool,
}

#[derive(Debug, Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    subtype: Option<String>,
    user: Option<String>,
    bot_id: Option<String>,
    #[serde(default)]
    text: String,
    ts: Option<String>,
    thread_ts: Option<String>,
    channel: Option<String>,
    channel_type: Option<String>,
    /// Where its author is from, in a channel that is shared between workspaces.
    user_team: Option<String>,
    #[serde(default)]
    files: Vec<File>,
}

#[derive(Debug, Deserialize)]
struct File {
    name: Option<String>,
    mimetype: Option<String>,
    #[serde(default)]
    size: u64,
    mode: Option<String>,
    file_access: Option<String>,
    url_private_download: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Pressed {
    #[serde(rename = "type")]
    kind: String,
    user: Named,
    team: Option<Named>,
    channel: Option<Named>,
    container: Option<Container>,
    #[serde(default)]
    actions: Vec<Action>,
}

#[derive(Debug, Deserialize)]
struct Named {
    id: String,
    team_id: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Container {
    message_ts: Option<String>,
    thread_ts: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Action {
    action_id: String,
    value: Option<String>,
    action_ts: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Command {
    team_id: String,
    channel_id: String,
    user_id: String,
    #[serde(default)]
    text: String,
    trigger_id: String,
}

/// The three forms of what is posted.
enum Posted {
    Event(Box<Callback>),
    Command(Command),
    Pressed(Box<Pressed>),
}

fn posted(raw: &[u8]) -> Result<Posted, String> {
    let wrong = |error: serde_json::Error| format!("it is nothing that Slack documents: {error}");
    if raw.trim_ascii_start().first() == Some(&b'{') {
        let callback: Callback = serde_json::from_slice(raw).map_err(wrong)?;
        return Ok(Posted::Event(Box::new(callback)));
    }
    let fields: serde_json::Map<String, serde_json::Value> =
        form_urlencoded::parse(raw).map(|(name, value)| (name.into_owned(), value.into_owned().into())).collect();
    match fields.get("payload").and_then(|payload| payload.as_str()) {
        Some(payload) => Ok(Posted::Pressed(Box::new(serde_json::from_str(payload).map_err(wrong)?))),
        None => Ok(Posted::Command(serde_json::from_value(fields.into()).map_err(wrong)?)),
    }
}

/// What to do with a request, before it is answered.
pub fn came(raw: &[u8]) -> Came {
    let keep = |delivery: &str, message: String, command| Came::Keep { keys: Keys { delivery: delivery.to_owned(), message }, command };
    let callback = match posted(raw) {
        Ok(Posted::Event(callback)) => callback,
        Ok(Posted::Command(command)) => return keep(&command.trigger_id, command.key(), true),
        Ok(Posted::Pressed(pressed)) => {
            return match pressed.key() {
                Some(key) => keep(&key.clone(), key, false),
                None => Came::Nothing,
            };
        }
        // Kept and shown, so that somebody finds out why.
        Err(_) => {
            let digest = hex::encode(secret::sha256(raw));
            return keep(&digest.clone(), digest, false);
        }
    };
    match callback.kind.as_str() {
        "url_verification" => Came::Challenge(callback.challenge.unwrap_or_default()),
        "app_rate_limited" => Came::Limited,
        "event_callback" => match (callback.is_for_us(), callback.key(), callback.event_id.as_deref()) {
            (true, Some(key), Some(event)) => keep(event, key, false),
            _ => Came::Nothing,
        },
        _ => Came::Nothing,
    }
}

impl Callback {
    fn key(&self) -> Option<String> {
        let event = self.event.as_ref()?;
        Some(format!("{}/{}/{}", self.team_id.as_ref()?, event.channel.as_ref()?, event.ts.as_ref()?))
    }

    fn bots(&self) -> impl Iterator<Item = &str> {
        self.authorizations.iter().filter(|one| one.is_bot).filter_map(|one| one.user_id.as_deref())
    }

    /// It speaks to the agent, and not only in a thread where the agent may be.
    fn calls(&self, event: &Event) -> bool {
        event.kind == "app_mention"
            || event.channel_type.as_deref() == Some("im")
            || self.bots().any(|bot| ["<@{bot}>", "<@{bot}|"].iter().any(|form| event.text.contains(&form.replace("{bot}", bot))))
    }

    fn is_for_us(&self) -> bool {
        let Some(event) = &self.event else { return false };
        let is_text = matches!(event.subtype.as_deref(), None | Some("file_share" | "thread_broadcast" | "me_message" | "bot_message"));
        let is_own = event.user.as_deref().is_some_and(|user| self.bots().any(|bot| bot == user));
        let is_program = event.bot_id.is_some() || event.subtype.as_deref() == Some("bot_message");
        match event.kind.as_str() {
            _ if !is_text || is_own => false,
            "app_mention" => true,
            // A channel's own messages that mention the agent come as `app_mention` too.
            "message" => !is_program && (self.calls(event) || event.thread_ts.is_some()),
            _ => false,
        }
    }
}

impl Command {
    fn key(&self) -> String {
        format!("{}/{}/command {}", self.team_id, self.channel_id, self.trigger_id)
    }
}

impl Pressed {
    fn action(&self) -> Option<&Action> {
        self.actions.iter().find(|action| self.kind == "block_actions" && action.action_id == CANCEL)
    }

    fn place(&self) -> Option<(&str, &str)> {
        let team = self.team.as_ref().map(|team| team.id.as_str()).or(self.user.team_id.as_deref())?;
        Some((team, &self.channel.as_ref()?.id))
    }

    fn key(&self) -> Option<String> {
        let (team, channel) = self.place()?;
        Some(format!("{team}/{channel}/press {} {}", self.action()?.action_ts.as_ref()?, self.user.id))
    }
}

/// The message that was posted; Err(why) for one that nobody can take.
pub fn message(raw: &[u8]) -> Result<Message, String> {
    match posted(raw)? {
        Posted::Event(callback) => of_event(&callback).ok_or_else(|| "it is an event without team, channel, time or author".to_owned()),
        Posted::Command(command) => Ok(of_command(&command)),
        Posted::Pressed(pressed) => of_press(&pressed).ok_or_else(|| "nothing of ours was pressed".to_owned()),
    }
}

fn of_event(callback: &Callback) -> Option<Message> {
    let event = callback.event.as_ref()?;
    let (team, channel, ts) = (callback.team_id.as_ref()?, event.channel.as_ref()?, event.ts.as_ref()?);
    let key = |ts: &str| format!("{team}/{channel}/{ts}");
    let parent = event.thread_ts.as_deref().filter(|root| root != ts).map(key);
    let (mut remote, mut left_out) = (Vec::new(), Vec::new());
    for file in &event.files {
        let name = file.name.clone().unwrap_or_else(|| "file".to_owned());
        match (&file.url_private_download, file.mode.as_deref(), file.file_access.as_deref()) {
            (_, Some("external"), _) => left_out.push(format!("{name}: it is kept outside Slack")),
            (_, Some("tombstone" | "hidden_by_limit"), _) => left_out.push(format!("{name}: Slack keeps it no longer")),
            (Some(url), _, None | Some("visible")) => remote.push(Remote {
                name,
                media_type: file.mimetype.clone().unwrap_or_else(|| "application/octet-stream".to_owned()),
                size: file.size,
                url: url.clone(),
            }),
            _ => left_out.push(format!("{name}: Slack does not let the app see it")),
        }
    }
    let is_program = event.bot_id.is_some() || event.subtype.as_deref() == Some("bot_message");
    let mut text = event.text.clone();
    for bot in callback.bots() {
        text = text.replace(&format!("<@{bot}>"), "");
    }
    Some(Message {
        author: event.user.clone(),
        groups: vec![event.user_team.clone().unwrap_or_else(|| team.clone())],
        to: vec![channel.clone()],
        calls: callback.calls(event),
        text: readable(text.trim()),
        remote,
        left_out,
        automatic: is_program.then(|| Automatic::Marked("a program wrote it".to_owned())),
        head: Head { message_id: key(ts), to: channel.clone(), root: Some(parent.clone().unwrap_or_else(|| key(ts))), ..Head::default() },
        parents: parent.into_iter().collect(),
        ..Message::default()
    })
}

fn of_command(command: &Command) -> Message {
    let text = readable(command.text.trim());
    let asked: String = text.chars().take(ASKED_CHARS).collect();
    Message {
        author: Some(command.user_id.clone()),
        groups: vec![command.team_id.clone()],
        to: vec![command.channel_id.clone()],
        calls: true,
        head: Head {
            message_id: command.key(),
            to: command.channel_id.clone(),
            asked: Some(if asked.len() < text.len() { format!("{asked} …") } else { asked }),
            ..Head::default()
        },
        text,
        ..Message::default()
    }
}

fn of_press(pressed: &Pressed) -> Option<Message> {
    let (team, channel) = pressed.place()?;
    let container = pressed.container.as_ref()?;
    let root = format!("{team}/{channel}/{}", container.thread_ts.as_ref().or(container.message_ts.as_ref())?);
    Some(Message {
        author: Some(pressed.user.id.clone()),
        groups: vec![pressed.user.team_id.clone().unwrap_or_else(|| team.to_owned())],
        to: vec![channel.to_owned()],
        calls: true,
        text: "stop".to_owned(),
        cancels: Some(pressed.action()?.value.as_ref()?.parse::<RunId>().ok()?),
        head: Head { message_id: pressed.key()?, to: channel.to_owned(), root: Some(root.clone()), ..Head::default() },
        parents: vec![root],
        ..Message::default()
    })
}

/// Slack's text for a reader who does not know its form: links and mentions in words, `&amp;`, `&lt;` and `&gt;` as characters. All else stays as it was
/// written, for its marks are not Markdown's (field case B8).
fn readable(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, tail)) = rest.split_once('<') {
        out.push_str(before);
        let Some((inner, after)) = tail.split_once('>') else {
            out.push('<');
            rest = tail;
            continue;
        };
        let (what, label) =
            inner.split_once('|').map_or((inner, None), |(what, label)| (what, Some(label).filter(|label| !label.is_empty())));
        match (what.chars().next(), label) {
            (Some('@' | '!'), Some(label)) => out.push_str(&format!("@{}", label.trim_start_matches('@'))),
            (Some('#'), Some(label)) => out.push_str(&format!("#{label}")),
            (Some('@' | '#'), None) => out.push_str(what),
            (Some('!'), None) => out.push_str(&what.replacen('!', "@", 1)),
            (_, Some(label)) if label != what && what.strip_prefix("mailto:") != Some(label) => out.push_str(&format!("{label} ({what})")),
            (_, Some(label)) => out.push_str(label),
            (_, None) => out.push_str(what),
        }
        rest = after;
    }
    out.push_str(rest);
    out.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const SECRET: &str = "8f742231b10e8888abcd99yyyzzz85a5";
    /// The request of Slack's own example ("Verifying requests from Slack").
    const EXAMPLE: &str = "token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c";
    const SIGNATURE: &str = "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503";

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_531_420_618 + seconds, 0).expect("time")
    }

    #[test]
    fn slack_s_own_example_is_verified_and_nothing_beside_it_a14() {
        let verify = |secret: &str, now, timestamp, signature, raw: &str| verify(secret, now, timestamp, signature, raw.as_bytes());
        let stamp = Some("1531420618");
        assert_eq!(verify(SECRET, at(0), stamp, Some(SIGNATURE), EXAMPLE), Ok(()));
        assert_eq!(verify(SECRET, at(300), stamp, Some(SIGNATURE), EXAMPLE), Ok(()));
        for (secret, now, timestamp, signature, raw) in [
            (SECRET, at(301), stamp, Some(SIGNATURE), EXAMPLE),
            (SECRET, at(-301), stamp, Some(SIGNATURE), EXAMPLE),
            ("other", at(0), stamp, Some(SIGNATURE), EXAMPLE),
            (SECRET, at(0), Some("1531420619"), Some(SIGNATURE), EXAMPLE),
            (SECRET, at(0), Some("soon"), Some(SIGNATURE), EXAMPLE),
            (SECRET, at(0), None, Some(SIGNATURE), EXAMPLE),
            (SECRET, at(0), stamp, None, EXAMPLE),
            (SECRET, at(0), stamp, Some("v0=00"), EXAMPLE),
            (SECRET, at(0), stamp, SIGNATURE.strip_prefix("v0="), EXAMPLE),
            (SECRET, at(0), stamp, Some(SIGNATURE), &EXAMPLE[1..]),
        ] {
            assert!(verify(secret, now, timestamp, signature, raw).is_err());
        }
    }

    fn event(more: Value) -> Vec<u8> {
        let mut event =
            json!({ "type": "message", "user": "U1", "text": "hello", "ts": "1.2", "channel": "C1", "channel_type": "channel" });
        event.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
        let body = json!({ "type": "event_callback", "team_id": "T1", "event_id": "Ev1", "event": event,
            "authorizations": [{ "user_id": "U0BOT", "is_bot": true }] });
        serde_json::to_vec(&body).expect("JSON")
    }

    fn kept(more: Value) -> bool {
        matches!(came(&event(more)), Came::Keep { .. })
    }

    #[test]
    fn a_mention_and_its_twin_have_one_key_and_a_mention_alone_is_enough_a5_a6() {
        let mention = came(&event(json!({ "type": "app_mention", "text": "<@U0BOT> hello", "thread_ts": "1.0" })));
        let Came::Keep { keys, command: false } = mention else { panic!("{mention:?}") };
        assert_eq!((keys.delivery.as_str(), keys.message.as_str()), ("Ev1", "T1/C1/1.2"));
        let twin = came(&event(json!({ "text": "<@U0BOT> hello", "thread_ts": "1.0" })));
        assert!(matches!(twin, Came::Keep { keys: twin, .. } if twin.message == keys.message));
        // Whichever comes first says all that the other would.
        let of = |kind: &str| message(&event(json!({ "type": kind, "text": "<@U0BOT> hello", "thread_ts": "1.0" }))).expect("message");
        assert_eq!(of("app_mention"), of("message"));
        assert!(of("message").calls);
    }

    #[test]
    fn only_what_is_meant_for_us_or_stands_in_a_thread_is_kept() {
        assert!(kept(json!({ "channel_type": "im" })));
        assert!(kept(json!({ "thread_ts": "1.0" })));
        assert!(kept(json!({ "thread_ts": "1.0", "subtype": "file_share" })));
        assert!(!kept(json!({})));
        assert!(!kept(json!({ "subtype": "message_changed", "channel_type": "im" })));
        assert!(!kept(json!({ "subtype": "channel_join" })));
        assert!(!kept(json!({ "type": "reaction_added" })));
        assert_eq!(came(br#"{"type":"url_verification","challenge":"abc","token":"x"}"#), Came::Challenge("abc".to_owned()));
        assert_eq!(came(br#"{"type":"app_rate_limited","team_id":"T1","minute_rate_limited":1518467820}"#), Came::Limited);
    }

    #[test]
    fn our_own_messages_and_those_of_programs_start_nothing_a7() {
        assert!(!kept(json!({ "user": "U0BOT", "thread_ts": "1.0" })));
        assert!(!kept(json!({ "user": "U0BOT", "type": "app_mention" })));
        assert!(!kept(json!({ "bot_id": "B2", "thread_ts": "1.0" })));
        assert!(!kept(json!({ "subtype": "bot_message", "channel_type": "im" })));
        // A program that calls us by name is shown to whoever asks why nothing came of it.
        let raw = event(json!({ "type": "app_mention", "bot_id": "B2" }));
        assert!(matches!(came(&raw), Came::Keep { .. }));
        assert!(message(&raw).expect("message").automatic.is_some());
    }

    #[test]
    fn a_reply_belongs_to_its_root_and_never_to_another_reply() {
        let reply = message(&event(json!({ "thread_ts": "1.0" }))).expect("message");
        assert_eq!(
            (reply.parents.as_slice(), reply.head.root.as_deref(), reply.calls),
            (&["T1/C1/1.0".to_owned()][..], Some("T1/C1/1.0"), false)
        );
        let root = message(&event(json!({ "thread_ts": "1.2", "type": "app_mention" }))).expect("message");
        assert_eq!((root.parents.as_slice(), root.head.root.as_deref(), root.calls), (&[][..], Some("T1/C1/1.2"), true));
        assert_eq!(root.head.message_id, "T1/C1/1.2");
    }

    #[test]
    fn an_author_of_another_workspace_is_of_that_one() {
        assert_eq!(message(&event(json!({ "user_team": "T9" }))).expect("message").groups, ["T9"]);
        assert_eq!(message(&event(json!({}))).expect("message").groups, ["T1"]);
    }

    #[test]
    fn text_is_made_readable_and_its_marks_are_left_alone_b8() {
        for (slack, read) in [
            ("2 * 3 * 4 and `rm -rf *`", "2 * 3 * 4 and `rm -rf *`"),
            ("a &lt;b&gt; &amp;amp; c", "a <b> &amp; c"),
            ("<https://x.org/?a=1&amp;b|the page> <https://x.org>", "the page (https://x.org/?a=1&b) https://x.org"),
            ("<mailto:ann@x.org|ann@x.org> <mailto:ann@x.org|Ann>", "ann@x.org Ann (mailto:ann@x.org)"),
            ("<@U2|ben> <@U2> <#C1|general> <!here> <!subteam^S1|@team>", "@ben @U2 #general @here @team"),
            ("1 < 2", "1 < 2"),
        ] {
            assert_eq!(readable(slack), read);
        }
        let mention = message(&event(json!({ "text": "<@U0BOT> please" }))).expect("message");
        assert_eq!(mention.text, "please");
    }

    #[test]
    fn files_are_named_and_those_that_cannot_be_had_are_told() {
        let files = json!([
            { "name": "a.txt", "mimetype": "text/plain", "size": 3, "mode": "hosted", "url_private_download": "https://files.slack.com/a.txt" },
            { "name": "doc", "mode": "external", "url_private_download": "https://docs.example.org/x" },
            { "name": "b", "file_access": "check_file_info" },
        ]);
        let message = message(&event(json!({ "files": files }))).expect("message");
        assert_eq!(message.remote.iter().map(|file| file.name.as_str()).collect::<Vec<_>>(), ["a.txt"]);
        assert_eq!(message.left_out.len(), 2);
    }

    #[test]
    fn a_slash_command_opens_a_thread_that_has_no_root_yet() {
        let raw = EXAMPLE.replace("text=&", "text=do+it+%26+more&");
        assert!(matches!(came(raw.as_bytes()), Came::Keep { command: true, .. }));
        let command = message(raw.as_bytes()).expect("message");
        assert_eq!(
            (command.text.as_str(), command.author.as_deref(), command.head.root.as_deref()),
            ("do it & more", Some("U2CERLKJA"), None)
        );
        assert_eq!(command.head.asked.as_deref(), Some("do it & more"));
    }

    #[test]
    fn the_cancel_button_means_its_own_run() {
        let run = RunId::mint();
        let payload = |action: &str| {
            let payload = json!({ "type": "block_actions", "user": { "id": "U1", "team_id": "T1" }, "team": { "id": "T1" }, "channel": { "id": "C1" },
                "container": { "type": "message", "message_ts": "1.3", "thread_ts": "1.2", "channel_id": "C1" },
                "actions": [{ "action_id": action, "value": run.to_string(), "action_ts": "9.1" }] });
            form_urlencoded::Serializer::new(String::new()).append_pair("payload", &payload.to_string()).finish()
        };
        let pressed = message(payload(CANCEL).as_bytes()).expect("message");
        assert_eq!((pressed.cancels, pressed.parents.as_slice()), (Some(run), &["T1/C1/1.2".to_owned()][..]));
        assert_eq!(came(payload("other").as_bytes()), Came::Nothing);
    }

    #[test]
    fn what_nobody_can_read_is_kept_and_says_why() {
        for raw in [&b"{"[..], b"hello", b"", b"payload=%7B", b"{\"type\":1}"] {
            assert!(matches!(came(raw), Came::Keep { .. }), "{raw:?}");
            assert!(message(raw).is_err());
        }
    }
}
