//! A stand-in of Slack: the part of its Web API that is used, kept to what docs.slack.dev says of it, and misbehaving on request. What Slack would post to an app is
//! made here too ([`events`]); sending it is the test's.

mod api;
mod events;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
pub use events::{Event, command, direct, mention, message, press};
use hmac::{Hmac, KeyInit, Mac};
use serde_json::{Value, json};
use sha2::Sha256;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

pub const TEAM: &str = "T0TEAM";
pub const APP: &str = "A0APP";
pub const BOT_USER: &str = "U0BOT";
pub const BOT_ID: &str = "B0BOT";
pub const BOT_TOKEN: &str = "xoxb-test";
pub const SIGNING_SECRET: &str = "8f742231b10e8888abcd99yyyzzz85a5";

/// How long a request may take to arrive.
const REQUEST: Duration = Duration::from_secs(20);

/// What goes wrong with one call.
#[derive(Debug, Clone)]
pub enum Fault {
    /// 200 with `ok: false`.
    Error(&'static str),
    /// 429 and these seconds.
    RateLimited(u64),
    Status(u16),
    /// Done, and nobody hears of it.
    LostAnswer,
    /// The connection breaks at once, and so much later it is done.
    Late(Duration),
    /// The connection breaks, and nothing is done.
    Refused,
    /// `ok: true` without a `ts`, and nothing is done.
    NoTs,
    /// 200 with a page.
    Html,
}

pub struct Slack {
    /// Of its Web API.
    pub url: String,
    state: Arc<Mutex<State>>,
    _serving: JoinSet<()>,
}

#[derive(Default)]
struct State {
    /// Of this server.
    origin: String,
    /// Of the newest message or file.
    tick: u64,
    channels: BTreeMap<String, Channel>,
    files: BTreeMap<String, File>,
    faults: BTreeMap<String, VecDeque<Fault>>,
    calls: BTreeMap<String, usize>,
    revoked: bool,
}

#[derive(Default)]
struct Channel {
    messages: Vec<Value>,
    archived: bool,
    /// The app is not in it.
    kicked: bool,
}

struct File {
    name: String,
    length: usize,
    content: Option<Vec<u8>>,
    shared: bool,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn ts(&mut self) -> String {
        self.tick += 1;
        format!("1700000000.{:06}", self.tick)
    }
}

impl Slack {
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let origin = format!("http://{}", listener.local_addr()?);
        let state = Arc::new(Mutex::new(State { origin: origin.clone(), ..State::default() }));
        let own = state.clone();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                while connections.try_join_next().is_some() {}
                let state = own.clone();
                connections.spawn(async move {
                    // Whoever breaks off asks again.
                    serve(stream, &state).await.ok();
                });
            }
        });
        Ok(Self { url: format!("{origin}/api"), state, _serving: serving })
    }

    /// Forgets everything.
    pub fn clear(&self) {
        let mut state = lock(&self.state);
        *state = State { origin: std::mem::take(&mut state.origin), ..State::default() };
    }

    /// `X-Slack-Signature` of a body.
    pub fn sign(timestamp: i64, body: &str) -> String {
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(SIGNING_SECRET.as_bytes()) else { return String::new() };
        mac.update(format!("v0:{timestamp}:{body}").as_bytes());
        format!("v0={}", hex::encode(mac.finalize().into_bytes()))
    }

    /// Opens a channel, or opens it again.
    pub fn channel(&self, id: &str) {
        let mut state = lock(&self.state);
        let channel = state.channels.entry(id.to_owned()).or_default();
        (channel.archived, channel.kicked) = (false, false);
    }

    pub fn archive(&self, id: &str) {
        lock(&self.state).channels.entry(id.to_owned()).or_default().archived = true;
    }

    /// Takes the app out of a channel.
    pub fn kick(&self, id: &str) {
        lock(&self.state).channels.entry(id.to_owned()).or_default().kicked = true;
    }

    pub fn revoke(&self) {
        lock(&self.state).revoked = true;
    }

    pub fn restore(&self) {
        lock(&self.state).revoked = false;
    }

    /// A person's message; its `ts`.
    pub fn say(&self, channel: &str, user: &str, text: &str, thread: Option<&str>) -> String {
        let mut state = lock(&self.state);
        let ts = state.ts();
        let mut message = json!({ "type": "message", "user": user, "text": text, "ts": ts });
        if let Some(thread) = thread {
            message["thread_ts"] = json!(thread);
        }
        state.channels.entry(channel.to_owned()).or_default().messages.push(message);
        ts
    }

    /// A person's file, as an event tells of it.
    pub fn file(&self, name: &str, content: &[u8]) -> Value {
        let mut state = lock(&self.state);
        state.tick += 1;
        let id = format!("F{}", state.tick);
        let file = File { name: name.to_owned(), length: content.len(), content: Some(content.to_vec()), shared: true };
        let told = api::file(&state.origin, &id, &file);
        state.files.insert(id, file);
        told
    }

    /// All messages of a channel, oldest first, with what only their app may see.
    pub fn messages(&self, channel: &str) -> Vec<Value> {
        lock(&self.state).channels.get(channel).map(|channel| channel.messages.clone()).unwrap_or_default()
    }

    pub fn file_content(&self, id: &str) -> Option<Vec<u8>> {
        lock(&self.state).files.get(id)?.content.clone()
    }

    /// How often a method was called, whatever came of it.
    pub fn calls(&self, method: &str) -> usize {
        lock(&self.state).calls.get(method).copied().unwrap_or_default()
    }

    /// The next calls of a method go wrong. Beside the API's methods there are `upload` and `files-pri`.
    pub fn fail(&self, method: &str, fault: Fault, times: usize) {
        lock(&self.state).faults.entry(method.to_owned()).or_default().extend(std::iter::repeat_n(fault, times));
    }
}

/// One request as it came.
struct Request {
    path: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Answer {
    fn json(body: &Value) -> Self {
        let media_type = ("content-type", "application/json; charset=utf-8".to_owned());
        Self { status: 200, headers: vec![media_type], body: body.to_string().into_bytes() }
    }

    fn error(word: &str) -> Self {
        Self::json(&json!({ "ok": false, "error": word }))
    }
}

impl Request {
    async fn read(stream: &mut TcpStream) -> Result<Self> {
        let mut bytes = Vec::new();
        let end = loop {
            let mut piece = [0; 8192];
            let read = stream.read(&mut piece).await?;
            ensure!(read > 0, "cut short");
            bytes.extend_from_slice(piece.get(..read).unwrap_or_default());
            if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
                break end;
            }
        };
        let mut body = bytes.split_off(end + 4);
        let head = String::from_utf8_lossy(&bytes).into_owned();
        let path = head.split(' ').nth(1).context("a path")?.to_owned();
        let headers: BTreeMap<String, String> = head
            .lines()
            .skip(1)
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.trim().to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        let length: usize = headers.get("content-length").and_then(|value| value.parse().ok()).unwrap_or_default();
        let missing = u64::try_from(length.saturating_sub(body.len()))?;
        (&mut *stream).take(missing).read_to_end(&mut body).await?;
        ensure!(body.len() == length, "cut short");
        Ok(Self { path, headers, body })
    }

    /// What the call is named in [`Slack::fail`] and [`Slack::calls`].
    fn method(&self) -> String {
        let path = self.path.split('?').next().unwrap_or_default();
        match path.strip_prefix("/api/") {
            Some(method) => method.to_owned(),
            None => path.split('/').nth(1).unwrap_or_default().to_owned(),
        }
    }
}

async fn serve(mut stream: TcpStream, state: &Mutex<State>) -> Result<()> {
    let request = tokio::time::timeout(REQUEST, Request::read(&mut stream)).await??;
    let method = request.method();
    let fault = {
        let mut state = lock(state);
        *state.calls.entry(method.clone()).or_default() += 1;
        state.faults.get_mut(&method).and_then(VecDeque::pop_front)
    };
    let answer = match fault {
        None => api::answer(state, &method, &request),
        Some(Fault::Error(word)) => Answer::error(word),
        Some(Fault::RateLimited(seconds)) => {
            let mut answer = Answer::error("ratelimited");
            answer.status = 429;
            answer.headers.push(("retry-after", seconds.to_string()));
            answer
        }
        Some(Fault::Status(status)) => Answer { status, headers: Vec::new(), body: Vec::new() },
        Some(Fault::NoTs) => Answer::json(&json!({ "ok": true })),
        Some(Fault::Html) => {
            Answer { status: 200, headers: vec![("content-type", "text/html".to_owned())], body: b"<html>a page</html>".to_vec() }
        }
        Some(Fault::Refused) => return Ok(()),
        Some(Fault::LostAnswer) => {
            api::answer(state, &method, &request);
            return Ok(());
        }
        Some(Fault::Late(wait)) => {
            drop(stream);
            tokio::time::sleep(wait).await;
            api::answer(state, &method, &request);
            return Ok(());
        }
    };
    let mut head = format!("HTTP/1.1 {} x\r\ncontent-length: {}\r\nconnection: close\r\n", answer.status, answer.body.len());
    for (name, value) in &answer.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(&answer.body).await?;
    Ok(())
}
