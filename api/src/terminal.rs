//! One viewer of a run's terminal: frames go out as the reader gives them, what is typed goes to the gateway that the sandbox is connected to. Nothing of it is kept here.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use async_nats::Subscriber;
use axum::extract::ws::{CloseFrame, Message, WebSocket};
use base64::{Engine, engine::general_purpose::STANDARD};
use futures::StreamExt;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use towpath_chassis::{Chassis, Error, Result};
use towpath_schemas::{
    body::RunState,
    frame::{Frame, Size},
    guest::{ViewerHeard, ViewerSays},
    id::{RunId, TenantId},
    limit::{TYPED_BYTES, VIEWER_S},
    subject,
    viewer::{FromViewer, Said, ToViewer},
};
use towpath_transcript::reader::{self, Cursor, Piece};
use uuid::Uuid;

use crate::feed::Feed;

/// How often a viewer's window is told again, and the run looked at.
const LOOK: Duration = Duration::from_secs(VIEWER_S / 3);
/// How long what was typed may go unanswered, or wait for a sandbox that is not connected.
const UNHEARD: Duration = Duration::from_secs(5);
/// Wait before it is tried again while nobody is there to take it.
const AGAIN: Duration = Duration::from_millis(200);
/// A viewer that takes nothing for this long is hung up on; it comes again and misses nothing.
const STALLED: Duration = Duration::from_secs(60);
/// Bytes of frames in one message.
const MESSAGE_BYTES: usize = 256 * 1024;
/// Bytes of a message from a viewer.
pub const FROM_VIEWER_BYTES: usize = TYPED_BYTES + 1024;

/// Who sees what.
pub struct Viewing {
    pub tenant: TenantId,
    pub run: RunId,
    pub feed: Arc<Feed>,
    pub after: Cursor,
    pub may_type: bool,
}

pub async fn view(chassis: Chassis, socket: WebSocket, viewing: Viewing) {
    let run = viewing.run;
    let viewer = Uuid::new_v4().simple().to_string();
    let mut viewer = match Viewer::new(chassis, socket, viewing, viewer).await {
        Ok(viewer) => viewer,
        Err(error) => {
            tracing::info!(%run, error = error.chain(), "a terminal cannot be shown");
            return;
        }
    };
    let result = viewer.go().await;
    viewer.say(ViewerSays::Leave).await;
    if let Err(error) = result {
        tracing::debug!(%run, error = error.chain(), "a viewer has gone");
    }
    // It may be gone already.
    let _ = viewer.socket.send(Message::Close(Some(CloseFrame { code: 1000, reason: "".into() }))).await;
}

struct Typing {
    number: u64,
    bytes: Vec<u8>,
    since: Instant,
    /// Certainly nobody has got it; when to try again.
    again_at: Option<Instant>,
}

impl Typing {
    fn wakes_at(&self) -> Instant {
        self.again_at.unwrap_or(self.since + UNHEARD)
    }
}

struct Viewer {
    chassis: Chassis,
    socket: WebSocket,
    of: Viewing,
    id: String,
    pieces: mpsc::Receiver<Result<Piece>>,
    answers: Subscriber,
    inbox: String,
    window: Option<Size>,
    /// What is on its way into the command; one after the other, so that what could not be typed yet is not overtaken.
    typing: Option<Typing>,
    /// What waits behind it.
    typed: VecDeque<(u64, Vec<u8>)>,
    state: watch::Receiver<(RunState, i64)>,
    /// Every record that exists was given to its end.
    closed: bool,
    /// Frames have come.
    begun: bool,
}

impl Viewer {
    async fn new(chassis: Chassis, socket: WebSocket, of: Viewing, id: String) -> Result<Self> {
        let inbox = chassis.nats.new_inbox();
        let answers = chassis
            .nats
            .subscribe(format!("{inbox}.>"))
            .await
            .map_err(|error| Error::Nats { doing: "subscribe", detail: error.to_string() })?;
        let pieces = reader::follow(&chassis, of.tenant, of.run, of.after, of.feed.live());
        let state = of.feed.state();
        Ok(Self {
            chassis,
            socket,
            of,
            id,
            pieces,
            answers,
            inbox,
            state,
            window: None,
            typing: None,
            typed: VecDeque::new(),
            closed: false,
            begun: false,
        })
    }

    async fn go(&mut self) -> Result<()> {
        let state = self.state.borrow_and_update().0;
        self.tell(&ToViewer::Hello { run: self.of.run, state, may_type: self.of.may_type }).await?;
        let stop = self.chassis.tasks.stopping();
        let mut look = tokio::time::interval(LOOK);
        loop {
            let state = self.state.borrow_and_update().0;
            if self.closed && state.ended() {
                self.tell(&ToViewer::End { state }).await?;
                return Ok(());
            }
            let wakes_at = self.typing.as_ref().map(Typing::wakes_at);
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                piece = self.pieces.recv() => {
                    let piece = piece.ok_or_else(|| Error::broken("the reader ended"))??;
                    self.piece(piece).await?;
                }
                moved = self.state.changed() => moved.map_err(|_| Error::broken("the run is not followed any more"))?,
                answer = self.answers.next() => {
                    let answer = answer.ok_or_else(|| Error::broken("the subscription was closed"))?;
                    self.answer(&answer).await?;
                }
                message = self.socket.recv() => match message {
                    Some(Ok(message)) => self.message(message).await?,
                    Some(Err(_)) | None => return Ok(()),
                },
                () = tokio::time::sleep_until(wakes_at.unwrap_or_else(Instant::now)), if wakes_at.is_some() => self.unheard().await?,
                _ = look.tick() => {
                    self.here().await;
                    // A dead connection shows itself at this.
                    self.send(Message::Ping(Vec::new().into())).await?;
                }
            }
        }
    }

    async fn send(&mut self, message: Message) -> Result<()> {
        let gone = |detail: &str| Error::Nats { doing: "write to a viewer", detail: detail.to_owned() };
        match tokio::time::timeout(STALLED, self.socket.send(message)).await {
            Ok(sent) => sent.map_err(|error| gone(&error.to_string())),
            Err(_) => Err(gone("it takes nothing")),
        }
    }

    async fn tell(&mut self, message: &ToViewer) -> Result<()> {
        let text = serde_json::to_string(message).map_err(|error| Error::broken(format!("message: {error}")))?;
        self.send(Message::Text(text.into())).await
    }

    async fn piece(&mut self, piece: Piece) -> Result<()> {
        self.closed = matches!(piece, Piece::Tip { closed: true });
        match piece {
            Piece::Frames(frames) => {
                // Whatever the gateway was told before the sandbox was there has got lost.
                if !std::mem::replace(&mut self.begun, true) {
                    self.here().await;
                }
                let mut bytes = Vec::new();
                for frame in &frames {
                    Frame::encode_into(frame, &mut bytes);
                    if bytes.len() >= MESSAGE_BYTES {
                        self.send(Message::Binary(std::mem::take(&mut bytes).into())).await?;
                    }
                }
                if bytes.is_empty() { Ok(()) } else { self.send(Message::Binary(bytes.into())).await }
            }
            Piece::Gap { epoch, gap, .. } => self.tell(&ToViewer::Gap { epoch, reason: gap.reason }).await,
            Piece::Damaged { epoch, reason, .. } => self.tell(&ToViewer::Gap { epoch, reason }).await,
            Piece::Tip { .. } => Ok(()),
        }
    }

    /// Tells the gateway, at most once. The reply subject says what the answer is about, so that "nobody is there" is not taken for an answer to something else.
    async fn say(&mut self, says: ViewerSays) -> bool {
        let reply = match &says {
            ViewerSays::Type { number, .. } => format!("{}.{number}", self.inbox),
            ViewerSays::Here { .. } | ViewerSays::Own { .. } | ViewerSays::Leave => format!("{}.window", self.inbox),
        };
        let said = Said { viewer: self.id.clone(), says };
        let Ok(body) = serde_json::to_vec(&said) else { return false };
        let subject = subject::terminal(self.of.tenant, self.of.run);
        self.chassis.nats.publish_with_reply(subject, reply, body.into()).await.is_ok()
    }

    async fn here(&mut self) {
        if let Some(size) = self.window {
            self.say(ViewerSays::Here { size, may_resize: self.of.may_type }).await;
        }
    }

    async fn message(&mut self, message: Message) -> Result<()> {
        match message {
            Message::Binary(bytes) => {
                let Some((number, typed)) = bytes.split_first_chunk::<8>() else { return Ok(()) };
                self.type_in(u64::from_be_bytes(*number), typed).await
            }
            Message::Text(text) => match serde_json::from_str(&text) {
                Ok(FromViewer::Window { size }) => {
                    self.window = Some(size.bounded());
                    self.here().await;
                    Ok(())
                }
                Ok(FromViewer::Own) if self.of.may_type => {
                    if let Some(size) = self.window {
                        self.say(ViewerSays::Own { size }).await;
                    }
                    Ok(())
                }
                Ok(FromViewer::Own) => self.tell(&ToViewer::Refused { number: 0, reason: self.why_not().to_owned() }).await,
                Ok(FromViewer::Unknown) => Ok(()),
                Err(error) => self.tell(&ToViewer::Refused { number: 0, reason: format!("not a message of a viewer: {error}") }).await,
            },
            Message::Ping(_) | Message::Pong(_) => Ok(()),
            Message::Close(_) => Err(Error::broken("closed")),
        }
    }

    fn why_not(&self) -> &'static str {
        "typing and resizing need the principal that started the run and a token with the scope `terminal`"
    }

    async fn type_in(&mut self, number: u64, typed: &[u8]) -> Result<()> {
        if !self.of.may_type {
            return self.tell(&ToViewer::Refused { number, reason: self.why_not().to_owned() }).await;
        }
        let waiting: usize = self.typed.iter().map(|(_, bytes)| bytes.len()).sum();
        if waiting + typed.len() > TYPED_BYTES {
            return self.tell(&ToViewer::Refused { number, reason: format!("at most {TYPED_BYTES} bytes may wait to be typed") }).await;
        }
        self.typed.push_back((number, typed.to_vec()));
        self.type_next().await;
        Ok(())
    }

    async fn type_next(&mut self) {
        if self.typing.is_none()
            && let Some((number, bytes)) = self.typed.pop_front()
        {
            self.typing = Some(Typing { number, bytes, since: Instant::now(), again_at: None });
            self.try_typing().await;
        }
    }

    async fn try_typing(&mut self) {
        let Some((number, b64)) = self.typing.as_ref().map(|typing| (typing.number, STANDARD.encode(&typing.bytes))) else { return };
        let gone = self.say(ViewerSays::Type { number, b64 }).await;
        if let Some(typing) = &mut self.typing {
            typing.again_at = (!gone).then(|| Instant::now() + AGAIN);
        }
    }

    /// What is on its way has come to an end.
    async fn typed(&mut self, number: u64) {
        if self.typing.as_ref().is_some_and(|typing| typing.number == number) {
            self.typing = None;
            self.type_next().await;
        }
    }

    async fn answer(&mut self, answer: &async_nats::Message) -> Result<()> {
        if answer.status == Some(async_nats::StatusCode::NO_RESPONDERS) {
            // Nobody has got it, so it may be tried again: no sandbox of this run is connected now.
            let number = answer.subject.rsplit('.').next().and_then(|token| token.parse::<u64>().ok());
            if let Some(typing) = self.typing.as_mut().filter(|typing| Some(typing.number) == number) {
                typing.again_at = Some(Instant::now() + AGAIN);
            }
            return Ok(());
        }
        match serde_json::from_slice(&answer.payload) {
            Ok(ViewerHeard::Size { size, owner }) => self.tell(&ToViewer::Size { size, owner }).await,
            Ok(ViewerHeard::Typed { number }) => {
                self.typed(number).await;
                self.tell(&ToViewer::Typed { number }).await
            }
            Ok(ViewerHeard::Refused { number, reason }) => {
                self.typed(number).await;
                self.tell(&ToViewer::Refused { number, reason }).await
            }
            Err(_) => Ok(()),
        }
    }

    async fn unheard(&mut self) -> Result<()> {
        let Some(typing) = &self.typing else { return Ok(()) };
        let (number, over, nobody) = (typing.number, typing.since.elapsed() >= UNHEARD, typing.again_at.is_some());
        match (over, nobody) {
            (false, true) => self.try_typing().await,
            (false, false) => {}
            (true, true) => {
                self.tell(&ToViewer::Refused { number, reason: "the sandbox is not connected; nothing was typed".to_owned() }).await?;
                self.typed(number).await;
            }
            (true, false) => {
                self.tell(&ToViewer::Unheard { number }).await?;
                self.typed(number).await;
            }
        }
        Ok(())
    }
}
