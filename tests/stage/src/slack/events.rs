//! What Slack posts to an app.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};
use url::form_urlencoded;

use super::{APP, BOT_USER, TEAM};

static NEXT: AtomicU64 = AtomicU64::new(1);

fn next(prefix: &str) -> String {
    format!("{prefix}{:010}", NEXT.fetch_add(1, Ordering::Relaxed))
}

#[derive(Debug, Clone)]
pub struct Event {
    pub id: String,
    pub body: String,
}

/// `app_mention`.
pub fn mention(channel: &str, user: &str, text: &str, ts: &str, thread: Option<&str>) -> Event {
    event(json!({ "type": "app_mention" }), channel, user, text, ts, thread)
}

/// `message` in a channel.
pub fn message(channel: &str, user: &str, text: &str, ts: &str, thread: Option<&str>) -> Event {
    event(json!({ "type": "message", "channel_type": "channel" }), channel, user, text, ts, thread)
}

/// `message` to the app alone.
pub fn direct(channel: &str, user: &str, text: &str, ts: &str, thread: Option<&str>) -> Event {
    event(json!({ "type": "message", "channel_type": "im" }), channel, user, text, ts, thread)
}

fn event(mut event: Value, channel: &str, user: &str, text: &str, ts: &str, thread: Option<&str>) -> Event {
    for (name, value) in [("channel", channel), ("user", user), ("text", text), ("ts", ts), ("event_ts", ts), ("team", TEAM)] {
        event[name] = json!(value);
    }
    if let Some(thread) = thread {
        event["thread_ts"] = json!(thread);
    }
    let id = next("Ev");
    let body = json!({
        "token": "verification", "team_id": TEAM, "api_app_id": APP, "event": event, "type": "event_callback", "event_id": id, "event_time": 1_700_000_000,
        "authorizations": [{ "enterprise_id": null, "team_id": TEAM, "user_id": BOT_USER, "is_bot": true, "is_enterprise_install": false }],
        "is_ext_shared_channel": false, "event_context": "4-context",
    });
    Event { id, body: body.to_string() }
}

impl Event {
    /// Changes the event within the envelope.
    pub fn change(&mut self, change: impl FnOnce(&mut Value)) {
        let mut body: Value = serde_json::from_str(&self.body).unwrap_or_default();
        change(&mut body["event"]);
        self.body = body.to_string();
    }

    pub fn with_files(&mut self, files: &[Value]) {
        self.change(|event| {
            event["files"] = json!(files);
            event["subtype"] = json!("file_share");
        });
    }
}

/// A slash command, as a form.
pub fn command(channel: &str, user: &str, text: &str) -> String {
    let trigger = next("trigger.");
    form_urlencoded::Serializer::new(String::new())
        .extend_pairs([
            ("token", "verification"),
            ("team_id", TEAM),
            ("team_domain", "team"),
            ("channel_id", channel),
            ("channel_name", "general"),
        ])
        .extend_pairs([("user_id", user), ("user_name", "name"), ("command", "/towpath"), ("text", text), ("api_app_id", APP)])
        .extend_pairs([("response_url", "https://hooks.slack.com/commands/x"), ("trigger_id", &trigger)])
        .finish()
}

/// Somebody presses a button of a message, as a form.
pub fn press(channel: &str, user: &str, message: &str, thread: &str, button: &Value) -> String {
    let payload = json!({
        "type": "block_actions", "api_app_id": APP, "token": "verification", "trigger_id": next("trigger."),
        "user": { "id": user, "username": "name", "team_id": TEAM }, "team": { "id": TEAM, "domain": "team" }, "channel": { "id": channel, "name": "general" },
        "container": { "type": "message", "message_ts": message, "thread_ts": thread, "channel_id": channel, "is_ephemeral": false },
        "response_url": "https://hooks.slack.com/actions/x",
        "actions": [{ "type": "button", "action_id": button["action_id"], "value": button["value"], "action_ts": next("17.") }],
    });
    form_urlencoded::Serializer::new(String::new()).append_pair("payload", &payload.to_string()).finish()
}
