//! The methods of the Web API.

use std::sync::Mutex;

use serde_json::{Map, Value, json};
use url::form_urlencoded;

use super::{Answer, BOT_ID, BOT_TOKEN, BOT_USER, Channel, File, Request, State, TEAM, lock};

/// Characters of a message's text (chat.postMessage, "Truncating content"), of a section's, and of all blocks of a message.
const TEXT_CHARS: usize = 40_000;
const SECTION_CHARS: usize = 3000;
const BLOCKS_CHARS: usize = 13_200;
const PAGE: usize = 1000;

/// Does what is asked.
pub(super) fn answer(state: &Mutex<State>, method: &str, request: &Request) -> Answer {
    let mut state = lock(state);
    match method {
        "upload" => upload(&mut state, request),
        "files-pri" => download(&state, request),
        _ => match call(&mut state, method, request) {
            Ok(mut value) => {
                value["ok"] = json!(true);
                Answer::json(&value)
            }
            Err(word) => Answer::error(word),
        },
    }
}

fn id_of(request: &Request) -> &str {
    request.path.split('/').nth(2).unwrap_or_default()
}

fn upload(state: &mut State, request: &Request) -> Answer {
    let id = id_of(request);
    let (status, body) = match state.files.get_mut(id) {
        Some(file) if file.length == request.body.len() => {
            file.content = Some(request.body.clone());
            (200, format!("OK - {}", request.body.len()))
        }
        Some(_) => (400, "another length".to_owned()),
        None => (404, "no such file".to_owned()),
    };
    Answer { status, headers: Vec::new(), body: body.into_bytes() }
}

fn download(state: &State, request: &Request) -> Answer {
    if bearer(request) != Some(BOT_TOKEN) || state.revoked {
        return Answer { status: 302, headers: vec![("location", format!("{}/signin", state.origin))], body: Vec::new() };
    }
    match state.files.get(id_of(request)).and_then(|file| file.content.clone()) {
        Some(body) => Answer { status: 200, headers: vec![("content-type", "application/octet-stream".to_owned())], body },
        None => Answer { status: 404, headers: Vec::new(), body: Vec::new() },
    }
}

pub(super) fn file(origin: &str, id: &str, file: &File) -> Value {
    let url = format!("{origin}/files-pri/{id}/{}", file.name);
    json!({ "id": id, "name": file.name, "title": file.name, "mimetype": "text/plain", "size": file.length, "mode": "hosted",
        "url_private": url, "url_private_download": url })
}

fn bearer(request: &Request) -> Option<&str> {
    request.headers.get("authorization")?.strip_prefix("Bearer ")
}

/// Arguments as JSON or as a form, whose values may be JSON.
fn arguments(request: &Request) -> Map<String, Value> {
    if request.headers.get("content-type").is_some_and(|kind| kind.starts_with("application/json")) {
        return serde_json::from_slice(&request.body).unwrap_or_default();
    }
    let value = |text: &str| match text.chars().next() {
        Some('[' | '{') => serde_json::from_str(text).unwrap_or(json!(text)),
        _ => json!(text),
    };
    form_urlencoded::parse(&request.body).map(|(name, text)| (name.into_owned(), value(&text))).collect()
}

fn call(state: &mut State, method: &str, request: &Request) -> Result<Value, &'static str> {
    match bearer(request) {
        None => return Err("not_authed"),
        Some(token) if token != BOT_TOKEN => return Err("invalid_auth"),
        Some(_) if state.revoked => return Err("token_revoked"),
        Some(_) => {}
    }
    let given = arguments(request);
    let text = |name: &str| given.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    match method {
        "auth.test" => {
            Ok(json!({ "url": state.origin, "team": "Team", "user": "bot", "team_id": TEAM, "user_id": BOT_USER, "bot_id": BOT_ID }))
        }
        "chat.postMessage" => post(state, &given),
        "chat.update" => update(state, &given),
        "conversations.replies" => replies(state, &given),
        "conversations.history" => history(state, &given),
        "conversations.open" => Ok(json!({ "channel": { "id": place(state, &text("users")) } })),
        "files.getUploadURLExternal" => {
            let length = given.get("length").and_then(|length| length.as_str().map_or(length.as_u64(), |text| text.parse().ok()));
            let (Some(length), name) = (length.filter(|length| *length > 0), text("filename")) else { return Err("invalid_arguments") };
            state.tick += 1;
            let id = format!("F{}", state.tick);
            let length = usize::try_from(length).map_err(|_| "invalid_arguments")?;
            state.files.insert(id.clone(), File { name, length, content: None, shared: false });
            Ok(json!({ "upload_url": format!("{}/upload/{id}", state.origin), "file_id": id }))
        }
        "files.completeUploadExternal" => share(state, &given),
        _ => Err("unknown_method"),
    }
}

/// The channel's id; that of a person is their direct channel's.
fn place(state: &mut State, id: &str) -> String {
    match id.strip_prefix('U') {
        Some(rest) => {
            let direct = format!("D{rest}");
            state.channels.entry(direct.clone()).or_default();
            direct
        }
        None => id.to_owned(),
    }
}

fn open<'a>(state: &'a mut State, id: &str, thread: Option<&str>) -> Result<&'a mut Channel, &'static str> {
    let channel = state.channels.get_mut(id).ok_or("channel_not_found")?;
    if channel.archived {
        return Err("is_archived");
    }
    if channel.kicked {
        return Err("not_in_channel");
    }
    match thread {
        Some(thread) if !channel.messages.iter().any(|message| message["ts"] == thread) => Err("thread_not_found"),
        Some(_) | None => Ok(channel),
    }
}

fn check_text(given: &Map<String, Value>) -> Result<(), &'static str> {
    let text = given.get("text").and_then(Value::as_str).unwrap_or_default();
    let blocks = given.get("blocks").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    if text.is_empty() && blocks.is_empty() {
        return Err("no_text");
    }
    if text.chars().count() > TEXT_CHARS {
        return Err("msg_too_long");
    }
    let sizes = || blocks.iter().map(|block| block["text"]["text"].as_str().unwrap_or_default().chars().count());
    if sizes().any(|size| size > SECTION_CHARS) {
        return Err("invalid_blocks");
    }
    if sizes().sum::<usize>() > BLOCKS_CHARS {
        return Err("msg_blocks_too_long");
    }
    Ok(())
}

fn post(state: &mut State, given: &Map<String, Value>) -> Result<Value, &'static str> {
    let id = place(state, given.get("channel").and_then(Value::as_str).unwrap_or_default());
    let thread = given.get("thread_ts").and_then(Value::as_str);
    open(state, &id, thread)?;
    check_text(given)?;
    let ts = state.ts();
    let mut message = json!({ "type": "message", "user": BOT_USER, "bot_id": BOT_ID, "ts": ts, "team": TEAM });
    for name in ["text", "thread_ts", "blocks", "metadata"] {
        if let Some(value) = given.get(name) {
            message[name] = value.clone();
        }
    }
    open(state, &id, thread)?.messages.push(message.clone());
    Ok(json!({ "channel": id, "ts": ts, "message": message }))
}

fn update(state: &mut State, given: &Map<String, Value>) -> Result<Value, &'static str> {
    let id = given.get("channel").and_then(Value::as_str).unwrap_or_default();
    check_text(given)?;
    let channel = open(state, id, None)?;
    let ts = given.get("ts").cloned().unwrap_or_default();
    let message = channel.messages.iter_mut().find(|message| message["ts"] == ts).ok_or("message_not_found")?;
    if message["bot_id"] != BOT_ID {
        return Err("cant_update_message");
    }
    for name in ["text", "blocks"] {
        if let Some(value) = given.get(name) {
            message[name] = value.clone();
        }
    }
    Ok(json!({ "channel": id, "ts": ts, "text": message["text"] }))
}

fn share(state: &mut State, given: &Map<String, Value>) -> Result<Value, &'static str> {
    let id = given.get("channel_id").and_then(Value::as_str).unwrap_or_default().to_owned();
    let thread = given.get("thread_ts").and_then(Value::as_str);
    open(state, &id, thread)?;
    let ids: Vec<String> = given
        .get("files")
        .and_then(Value::as_array)
        .map(|files| files.iter().filter_map(|file| file["id"].as_str().map(str::to_owned)).collect())
        .unwrap_or_default();
    if ids.is_empty() || !ids.iter().all(|id| state.files.get(id).is_some_and(|file| file.content.is_some() && !file.shared)) {
        return Err("file_not_found");
    }
    let mut shared = Vec::new();
    for id in &ids {
        if let Some(known) = state.files.get_mut(id) {
            known.shared = true;
            shared.push(file(&state.origin, id, known));
        }
    }
    let ts = state.ts();
    let mut message =
        json!({ "type": "message", "subtype": "file_share", "user": BOT_USER, "bot_id": BOT_ID, "ts": ts, "text": "", "files": shared });
    if let Some(thread) = thread {
        message["thread_ts"] = json!(thread);
    }
    open(state, &id, thread)?.messages.push(message);
    Ok(json!({ "files": ids.iter().map(|id| json!({ "id": id })).collect::<Vec<_>>() }))
}

fn replies(state: &mut State, given: &Map<String, Value>) -> Result<Value, &'static str> {
    let id = given.get("channel").and_then(Value::as_str).unwrap_or_default();
    let root = given.get("ts").and_then(Value::as_str).unwrap_or_default();
    let messages = &state.channels.get(id).ok_or("channel_not_found")?.messages;
    let thread: Vec<&Value> = messages.iter().filter(|message| message["ts"] == root || message["thread_ts"] == root).collect();
    if thread.is_empty() {
        return Err("thread_not_found");
    }
    page(&thread, given)
}

fn history(state: &mut State, given: &Map<String, Value>) -> Result<Value, &'static str> {
    let id = given.get("channel").and_then(Value::as_str).unwrap_or_default();
    let messages = &state.channels.get(id).ok_or("channel_not_found")?.messages;
    // The newest first, and no replies.
    let top: Vec<&Value> =
        messages.iter().rev().filter(|message| message["thread_ts"].is_null() || message["thread_ts"] == message["ts"]).collect();
    page(&top, given)
}

fn page(messages: &[&Value], given: &Map<String, Value>) -> Result<Value, &'static str> {
    let number = |name: &str| given.get(name).and_then(|value| value.as_str().map_or(value.as_u64(), |text| text.parse().ok()));
    let limit = number("limit").and_then(|limit| usize::try_from(limit).ok()).unwrap_or(PAGE).clamp(1, PAGE);
    let from = number("cursor").and_then(|from| usize::try_from(from).ok()).unwrap_or_default();
    let with_metadata = given.get("include_all_metadata").is_some_and(|value| value == true || value == "true");
    let shown: Vec<Value> = messages
        .iter()
        .skip(from)
        .take(limit)
        .map(|message| {
            let mut message = (*message).clone();
            if let Some(message) = message.as_object_mut().filter(|_| !with_metadata) {
                message.remove("metadata");
            }
            message
        })
        .collect();
    let more = from + limit < messages.len();
    let cursor = if more { (from + limit).to_string() } else { String::new() };
    Ok(json!({ "messages": shown, "has_more": more, "response_metadata": { "next_cursor": cursor } }))
}
