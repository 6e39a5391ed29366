//! The other end of the protocol, keeping everything it hears.

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread,
    time::{Duration, Instant},
};

use futures::{SinkExt, StreamExt};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
};
use tokio_tungstenite::{WebSocketStream, accept_async, tungstenite::Message};
use towpath_schemas::{
    frame::{EndRecord, Frame, FrameKind},
    guest::{Exit, FromGuest, Hello, Phase, StartOrder, SteerState, ToGuest, binary},
    id::{FileId, SteerId},
};

/// Longest wait for anything.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// What the gateway does by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sealing {
    AtOnce,
    Never,
}

#[derive(Default)]
pub struct Heard {
    pub hellos: Vec<Hello>,
    pub messages: Vec<FromGuest>,
    pub frames: BTreeMap<u64, Frame>,
    /// Frames that came again.
    pub again: u64,
    pub outputs: BTreeMap<String, Vec<u8>>,
    pub skipped: BTreeMap<String, String>,
    /// Drop the connection once, when so many frames are there.
    cut_at: Option<usize>,
    uploading: Option<(u64, String, u64, Vec<u8>)>,
    files: HashMap<FileId, Vec<u8>>,
    order: Option<StartOrder>,
    /// Gives the start order twice.
    pub start_twice: bool,
    sealing: Option<Sealing>,
    silent: bool,
    /// Questions for an input file that are put off.
    not_yet: usize,
    /// Grants leases.
    pub leases: bool,
    pub connections: u64,
}

impl Heard {
    /// Last sequence number before the first hole.
    fn contiguous(&self) -> u64 {
        (1..).find(|seq| !self.frames.contains_key(seq)).unwrap_or(1) - 1
    }

    pub fn printed(&self, kind: FrameKind) -> Vec<u8> {
        self.frames.values().filter(|frame| frame.kind == kind).flat_map(|frame| frame.payload.clone()).collect()
    }

    pub fn end(&self) -> Option<EndRecord> {
        let frame = self.frames.values().find(|frame| frame.kind == FrameKind::End)?;
        Some(serde_json::from_slice(&frame.payload).expect("end record"))
    }

    pub fn ended(&self) -> Option<(Exit, Option<String>)> {
        self.messages.iter().find_map(|message| match message {
            FromGuest::Ended { exit, reason } => Some((exit.clone(), reason.clone())),
            _ => None,
        })
    }

    pub fn refused(&self) -> Option<(String, String)> {
        self.messages.iter().find_map(|message| match message {
            FromGuest::Refused { code, message } => Some((code.clone(), message.clone())),
            _ => None,
        })
    }

    pub fn result(&self) -> Option<(String, bool)> {
        self.messages.iter().find_map(|message| match message {
            FromGuest::Result { text, truncated } => Some((text.clone(), *truncated)),
            _ => None,
        })
    }

    pub fn has(&self, wanted: &FromGuest) -> bool {
        self.messages.contains(wanted)
    }

    pub fn steer(&self, id: SteerId) -> Vec<SteerState> {
        let states = self.messages.iter().filter_map(|message| match message {
            FromGuest::Steer { steer, state } if *steer == id => Some(*state),
            _ => None,
        });
        states.collect()
    }
}

enum Do {
    Say(ToGuest),
    Cut,
}

#[derive(Clone)]
pub struct Gateway {
    pub address: SocketAddr,
    heard: Arc<(Mutex<Heard>, Condvar)>,
    acts: UnboundedSender<Do>,
}

impl Gateway {
    pub fn start(order: StartOrder, sealing: Sealing) -> Self {
        let heard =
            Arc::new((Mutex::new(Heard { order: Some(order), sealing: Some(sealing), leases: true, ..Heard::default() }), Condvar::new()));
        let (acts, received) = unbounded_channel();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
        listener.set_nonblocking(true).expect("nonblocking");
        let gateway = Self { address: listener.local_addr().expect("address"), heard, acts };
        let serving = gateway.clone();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
            runtime.block_on(serving.serve(listener, received));
        });
        gateway
    }

    pub fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.0.lock().expect("lock")
    }

    pub fn say(&self, message: ToGuest) {
        self.acts.send(Do::Say(message)).ok();
    }

    pub fn cut(&self) {
        self.acts.send(Do::Cut).ok();
    }

    pub fn cut_at_frames(&self, frames: usize) {
        self.heard().cut_at = Some(frames);
    }

    pub fn put_file(&self, id: FileId, bytes: &[u8]) {
        self.heard().files.insert(id, bytes.to_vec());
    }

    pub fn add_file(&self, bytes: &[u8]) -> FileId {
        let id = FileId::mint();
        self.put_file(id, bytes);
        id
    }

    /// Answers no question for an input file.
    pub fn keep_files_back(&self) {
        self.heard().silent = true;
    }

    /// Puts off the first so many questions for an input file.
    pub fn put_files_off(&self, questions: usize) {
        self.heard().not_yet = questions;
    }

    /// Waits until `found` finds something, or fails the test.
    pub fn wait<T>(&self, what: &str, mut found: impl FnMut(&mut Heard) -> Option<T>) -> T {
        let until = Instant::now() + DEADLINE;
        let mut heard = self.heard();
        loop {
            if let Some(value) = found(&mut heard) {
                return value;
            }
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "waited in vain for {what}; heard {:?}", heard.messages);
            heard = self.heard.1.wait_timeout(heard, left).expect("wait").0;
        }
    }

    async fn serve(self, listener: std::net::TcpListener, mut acts: UnboundedReceiver<Do>) {
        let listener = TcpListener::from_std(listener).expect("listener");
        while let Ok((stream, _)) = listener.accept().await {
            self.heard().connections += 1;
            if let Ok(socket) = accept_async(stream).await {
                // A broken connection is what many tests want; the supervisor comes again.
                self.converse(socket, &mut acts).await;
            }
            self.heard.1.notify_all();
        }
    }

    async fn converse(&self, mut socket: WebSocketStream<TcpStream>, acts: &mut UnboundedReceiver<Do>) {
        loop {
            tokio::select! {
                message = socket.next() => {
                    let Some(Ok(message)) = message else { return };
                    let Some(answers) = self.take(message) else { return };
                    for answer in answers {
                        if socket.send(answer).await.is_err() {
                            return;
                        }
                    }
                }
                act = acts.recv() => match act {
                    Some(Do::Say(message)) => if socket.send(text(&message)).await.is_err() { return },
                    Some(Do::Cut) | None => return,
                }
            }
        }
    }

    /// None drops the connection.
    fn take(&self, message: Message) -> Option<Vec<Message>> {
        let mut heard = self.heard();
        let answers = match message {
            Message::Text(text) => heard.take_text(serde_json::from_str(&text).expect("message")),
            Message::Binary(bytes) if bytes[0] == binary::FRAMES => heard.take_frames(&bytes[1..])?,
            Message::Binary(bytes) if bytes[0] == binary::OUTPUT_PIECE => heard.take_piece(&bytes[1..]),
            _ => vec![],
        };
        drop(heard);
        self.heard.1.notify_all();
        Some(answers)
    }
}

fn text(message: &ToGuest) -> Message {
    Message::text(serde_json::to_string(message).expect("json"))
}

impl Heard {
    fn take_text(&mut self, message: FromGuest) -> Vec<Message> {
        self.messages.push(message.clone());
        let answers = match message {
            FromGuest::Hello(hello) => {
                let first = self.hellos.first().is_none_or(|first| first.incarnation == hello.incarnation);
                let fresh = hello.phase == Phase::Fresh;
                self.hellos.push(hello);
                let start = self.order.clone().filter(|_| fresh).map(|order| ToGuest::Start(Box::new(order)));
                let sealed = if self.sealing == Some(Sealing::AtOnce) { self.contiguous() } else { 0 };
                match (first, start) {
                    (false, _) => vec![ToGuest::Fenced],
                    (true, Some(start)) if self.start_twice => vec![ToGuest::Welcome { sealed }, start.clone(), start],
                    (true, start) => std::iter::once(ToGuest::Welcome { sealed }).chain(start).collect(),
                }
            }
            FromGuest::ReadFile { .. } if self.silent => vec![],
            FromGuest::ReadFile { request, .. } if self.not_yet > 0 => {
                self.not_yet -= 1;
                vec![ToGuest::FileRefused { request, code: "unavailable".to_owned(), detail: "S3 does not answer".to_owned(), again: true }]
            }
            FromGuest::ReadFile { request, file, offset, length } => match self.files.get(&file) {
                None => {
                    vec![ToGuest::FileRefused { request, code: "not_found".to_owned(), detail: "no such file".to_owned(), again: false }]
                }
                Some(bytes) => {
                    let rest = &bytes[(offset as usize).min(bytes.len())..];
                    let mut piece = vec![binary::FILE_PIECE];
                    piece.extend_from_slice(&request.to_be_bytes());
                    piece.extend_from_slice(&rest[..rest.len().min(length as usize)]);
                    return vec![Message::binary(piece)];
                }
            },
            FromGuest::Lease { number } if self.leases => vec![ToGuest::Leased { number }],
            FromGuest::Ended { .. } => vec![ToGuest::EndedStored],
            FromGuest::Result { .. } => vec![ToGuest::ResultStored],
            FromGuest::Output { upload, name, size: 0, .. } => {
                self.outputs.insert(name, vec![]);
                vec![ToGuest::OutputStored { upload }]
            }
            FromGuest::Output { upload, name, size, .. } => {
                self.uploading = Some((upload, name, size, vec![]));
                vec![]
            }
            FromGuest::OutputSkipped { upload, name, reason, .. } => {
                self.skipped.insert(name, reason);
                vec![ToGuest::OutputStored { upload }]
            }
            FromGuest::Done if self.sealing == Some(Sealing::AtOnce) => {
                vec![ToGuest::Release]
            }
            _ => vec![],
        };
        answers.iter().map(text).collect()
    }

    fn take_frames(&mut self, bytes: &[u8]) -> Option<Vec<Message>> {
        for frame in Frame::decode_all(bytes).expect("whole frames") {
            let seq = frame.seq;
            if let Some(before) = self.frames.insert(seq, frame) {
                self.again += 1;
                assert_eq!(Some(&before), self.frames.get(&seq), "a frame that comes again is the same");
            }
        }
        if self.cut_at.is_some_and(|frames| self.frames.len() >= frames) {
            self.cut_at = None;
            // As if the last of it had never come.
            let lost = self.contiguous();
            self.frames.remove(&lost);
            return None;
        }
        let seq = self.contiguous();
        let stored = text(&ToGuest::Stored { seq });
        Some(match self.sealing {
            Some(Sealing::AtOnce) => vec![stored, text(&ToGuest::Sealed { seq })],
            _ => vec![],
        })
    }

    fn take_piece(&mut self, bytes: &[u8]) -> Vec<Message> {
        let (upload, name, size, mut content) = self.uploading.take().expect("announced before");
        assert_eq!(upload.to_be_bytes(), bytes[..8]);
        content.extend_from_slice(&bytes[8..]);
        if (content.len() as u64) < size {
            self.uploading = Some((upload, name, size, content));
            return vec![];
        }
        self.outputs.insert(name, content);
        vec![text(&ToGuest::OutputStored { upload })]
    }
}
