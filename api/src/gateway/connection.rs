//! One sandbox's connection, from hello to the last word.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use axum::extract::ws::{CloseFrame, Message, WebSocket};
use futures::{SinkExt, StreamExt, stream::SplitSink};
use tokio::{
    sync::mpsc,
    task::{JoinError, JoinSet},
};
use towpath_chassis::{Error, Result, telemetry::limit_reached};
use towpath_run::report::{Greeting, Report, Reporter, Stop};
use towpath_schemas::{
    event,
    guest::{FromGuest, Hello, Phase, SteerEnd, SteerOrder, ToGuest, ViewerHeard, binary},
    id::SteerId,
    subject,
    viewer::Said,
};

use super::{
    Gateway, Nudge,
    frames::{Frames, Told},
    order,
    uploads::{self, Uploads},
};

/// How long the first message may take.
const HELLO: Duration = Duration::from_secs(10);
/// A connection that is silent for this long is given up; the supervisor pings every 10 s.
const SILENCE: Duration = Duration::from_secs(30);
/// Messages that wait to be sent to one sandbox.
const OUTBOUND: usize = 64;
/// Outputs of one connection on their way into the store at a time; beyond it the connection is not read.
const KEEPING: usize = 4;
/// Viewers of one terminal whose answers have a way.
const VIEWERS: usize = 10_000;
/// Wait before frames that JetStream refused are asked for again.
const AGAIN: Duration = Duration::from_millis(500);

pub(super) async fn run(gateway: Gateway, mut socket: WebSocket) {
    let Some(hello) = first_message(&mut socket).await else { return };
    let (run, epoch) = (hello.run, hello.epoch);
    let phase = hello.phase;
    let greeting = match gateway.reports.hello(hello).await {
        Ok(greeting) => greeting,
        Err(error) => {
            tracing::warn!(%run, epoch, error = error.chain(), "a supervisor is asked to come again");
            farewell(socket, &ToGuest::Later { detail: error.problem().detail }).await;
            return;
        }
    };
    match greeting {
        Greeting::Fenced(why) => {
            tracing::info!(%run, epoch, why, "fenced");
            farewell(socket, &ToGuest::Fenced).await;
        }
        Greeting::Welcome { reporter, sealed, stop } => {
            let key = (run, epoch);
            let (number, nudges) = gateway.enter(key);
            let (writer, reader) = socket.split();
            let (outbound, messages) = mpsc::channel(OUTBOUND);
            gateway.chassis.tasks.spawn(write(writer, messages));
            let connection = Connection {
                gateway: gateway.clone(),
                number,
                leased: false,
                frames: Frames::new(gateway.chassis.clone(), reporter.clone()),
                uploads: Uploads::new(gateway.chassis.clone(), reporter.clone()),
                keeping: JoinSet::new(),
                reporter,
                outbound,
                sealed,
                stored: sealed,
                stalled_looks: 0,
                refusal: None,
                stop_sent: false,
                steered: HashSet::new(),
                viewers: HashMap::new(),
            };
            if let Err(error) = connection.go(phase, stop, reader, nudges).await {
                tracing::info!(%run, epoch, error = error.chain(), "a sandbox's connection ended");
            }
            gateway.leave(key, number);
        }
    }
}

async fn first_message(socket: &mut WebSocket) -> Option<Hello> {
    match tokio::time::timeout(HELLO, socket.recv()).await {
        Ok(Some(Ok(Message::Text(text)))) => match serde_json::from_str(&text) {
            Ok(FromGuest::Hello(hello)) => Some(hello),
            Ok(_) | Err(_) => None,
        },
        Ok(_) | Err(_) => None,
    }
}

async fn farewell(mut socket: WebSocket, message: &ToGuest) {
    let Ok(text) = serde_json::to_string(message) else { return };
    // Whoever does not listen comes again.
    if socket.send(Message::Text(text.into())).await.is_ok() {
        let _ = socket.send(Message::Close(Some(CloseFrame { code: 1000, reason: "".into() }))).await;
    }
}

async fn write(mut writer: SplitSink<WebSocket, Message>, mut messages: mpsc::Receiver<Message>) {
    while let Some(message) = messages.recv().await {
        match tokio::time::timeout(SILENCE, writer.send(message)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => return,
        }
    }
    // The reader is gone already; the close is a courtesy.
    let _ = writer.close().await;
}

struct Connection {
    gateway: Gateway,
    /// Among the connections of the gateway.
    number: u64,
    /// A lease was asked for before; only the first one is hurried.
    leased: bool,
    reporter: Reporter,
    frames: Frames,
    uploads: Uploads,
    /// Outputs on their way into the store: it may take longer than a silence.
    keeping: JoinSet<Result<ToGuest>>,
    outbound: mpsc::Sender<Message>,
    sealed: u64,
    stored: u64,
    /// Looks in a row at which something stored was not sealed.
    stalled_looks: u32,
    /// Why the command could not be run at all: (code, message).
    refusal: Option<(String, String)>,
    stop_sent: bool,
    /// Steers that went out on this connection.
    steered: HashSet<SteerId>,
    /// Where the answers to viewers of the terminal go.
    viewers: HashMap<String, async_nats::Subject>,
}

/// Looks without progress after which stored frames are taken for lost: longer than a chunk may age.
const STALLED_LOOKS: u32 = 9;

type Reader = futures::stream::SplitStream<WebSocket>;

impl Connection {
    async fn go(mut self, phase: Phase, stop: Option<Stop>, mut reader: Reader, mut nudges: mpsc::Receiver<Nudge>) -> Result<()> {
        let mut events = self.listen(subject::event_run(self.reporter.tenant, self.reporter.run)).await?;
        let mut said = self.listen(subject::terminal(self.reporter.tenant, self.reporter.run)).await?;
        self.tell(&ToGuest::Welcome { sealed: self.sealed }).await?;
        if let Some(stop) = stop {
            self.stop(stop).await?;
        }
        // One that is to stop gets the order too: it executes nothing and goes through its end, which frees what the run holds.
        if phase == Phase::Fresh {
            let order = self.gateway.start_order(&self.reporter).await?;
            self.tell(&ToGuest::Start(Box::new(order))).await?;
        }
        // What was sent on an earlier connection may not have come.
        if phase != Phase::Fresh {
            self.send_steers(true).await?;
        }
        self.look_soon();
        let draining = self.gateway.chassis.tasks.stopping();
        let mut heard = tokio::time::Instant::now();
        loop {
            tokio::select! {
                () = draining.cancelled() => {
                    self.tell(&ToGuest::Later { detail: "this gateway is shutting down".to_owned() }).await?;
                    return Ok(());
                }
                () = tokio::time::sleep_until(heard + SILENCE) => return Err(Error::Nats { doing: "hear from the sandbox", detail: format!("nothing for {SILENCE:?}") }),
                told = self.frames.told() => self.told(told).await?,
                Some(kept) = self.keeping.join_next() => self.kept(kept).await?,
                nudge = nudges.recv() => match nudge {
                    Some(nudge) => self.nudged(nudge).await?,
                    // A newer connection of the same sandbox took this one's place.
                    None => return Ok(()),
                },
                event = events.next() => match event {
                    Some(message) => self.event(&message.payload).await?,
                    None => return Err(Error::Nats { doing: "listen", detail: "the subscription was closed".to_owned() }),
                },
                message = said.next() => match message {
                    Some(message) => self.viewer(message).await?,
                    None => return Err(Error::Nats { doing: "listen", detail: "the subscription was closed".to_owned() }),
                },
                message = reader.next(), if self.frames.has_room() && self.keeping.len() < KEEPING => {
                    heard = tokio::time::Instant::now();
                    match message {
                        Some(Ok(message)) => self.message(message).await?,
                        Some(Err(_)) | None => return Ok(()),
                    }
                }
            }
        }
    }

    async fn listen(&mut self, subject: String) -> Result<async_nats::Subscriber> {
        let nats = self.gateway.chassis.nats.clone();
        nats.subscribe(subject).await.map_err(|error| Error::Nats { doing: "subscribe", detail: error.to_string() })
    }

    /// Somebody who sees the terminal says something; the answers go to the subject that they listen at.
    async fn viewer(&mut self, message: async_nats::Message) -> Result<()> {
        let (Some(reply), Ok(said)) = (message.reply, serde_json::from_slice::<Said>(&message.payload)) else { return Ok(()) };
        if self.viewers.len() >= VIEWERS && !self.viewers.contains_key(&said.viewer) {
            // Those that are still there say so again within seconds.
            self.viewers.clear();
        }
        self.viewers.insert(said.viewer.clone(), reply);
        self.tell(&ToGuest::Viewer { viewer: said.viewer, says: said.says }).await
    }

    async fn answer_viewer(&mut self, viewer: &str, heard: &ViewerHeard) -> Result<()> {
        let Some(subject) = self.viewers.get(viewer) else { return Ok(()) };
        let body = serde_json::to_vec(heard).map_err(|error| Error::broken(format!("answer: {error}")))?;
        if let Err(error) = self.gateway.chassis.nats.publish(subject.clone(), body.into()).await {
            tracing::debug!(%error, "a viewer was not answered");
        }
        Ok(())
    }

    async fn send(&mut self, message: Message) -> Result<()> {
        self.outbound
            .send(message)
            .await
            .map_err(|_| Error::Nats { doing: "write to the sandbox", detail: "the connection is closed".to_owned() })
    }

    async fn tell(&mut self, message: &ToGuest) -> Result<()> {
        let text = serde_json::to_string(message).map_err(|error| Error::broken(format!("message: {error}")))?;
        self.send(Message::Text(text.into())).await
    }

    fn look_soon(&self) {
        self.gateway.look_soon((self.reporter.run, self.reporter.epoch));
    }

    /// Returns once it is committed. One whose word does not count any more is told so at the next look.
    async fn report(&mut self, report: Report) -> Result<()> {
        self.gateway.reports.tell(&self.reporter, report).await.map(|_| ())
    }

    async fn message(&mut self, message: Message) -> Result<()> {
        match message {
            Message::Binary(bytes) => match bytes.split_first() {
                Some((&binary::FRAMES, frames)) => self.frames.publish(frames).await,
                Some((&binary::OUTPUT_PIECE, piece)) => {
                    let number = piece.first_chunk::<8>().map_or(0, |bytes| u64::from_be_bytes(*bytes));
                    let whole = self.uploads.piece(piece).await;
                    self.uploaded(number, whole).await
                }
                // Of a newer release, as below.
                Some(_) | None => Ok(()),
            },
            Message::Text(text) => match serde_json::from_str(&text) {
                Ok(message) => self.guest(message).await,
                // It has a word of a newer release. What must be answered is said again to a gateway that knows it.
                Err(error) => {
                    tracing::info!(run = %self.reporter.run, %error, "a message of a sandbox is not understood");
                    Ok(())
                }
            },
            // Pings are answered by the library.
            Message::Ping(_) | Message::Pong(_) => Ok(()),
            Message::Close(_) => Ok(()),
        }
    }

    async fn guest(&mut self, message: FromGuest) -> Result<()> {
        match message {
            FromGuest::Step { step, detail } => self.report(Report::Step { step, detail }).await,
            FromGuest::Started => self.report(Report::Step { step: "started".to_owned(), detail: None }).await,
            FromGuest::Refused { code, message } => {
                self.report(Report::Step { step: "refused".to_owned(), detail: Some(message.clone()) }).await?;
                self.refusal = Some((code, message));
                Ok(())
            }
            FromGuest::Steer { steer, state } => self.report(Report::Steers(vec![SteerEnd { steer, state }])).await,
            FromGuest::Ended { exit, reason } => {
                let cause = match (reason, self.refusal.clone()) {
                    (Some(reason), Some((code, message))) if reason == code => Some((code, Some(message))),
                    (Some(reason), _) => Some((reason, None)),
                    (None, Some((code, message))) => Some((code, Some(message))),
                    (None, None) => None,
                };
                self.report(Report::Ended { exit, cause }).await?;
                self.tell(&ToGuest::EndedStored).await
            }
            FromGuest::Result { text, truncated } => {
                self.report(Report::Result { text, truncated }).await?;
                self.tell(&ToGuest::ResultStored).await
            }
            FromGuest::ReadFile { request, file, offset, length } => {
                let (chassis, reporter, outbound) = (self.gateway.chassis.clone(), self.reporter.clone(), self.outbound.clone());
                self.gateway.chassis.tasks.spawn(async move {
                    let message = match uploads::read(&chassis, &reporter, request, file, offset, length).await {
                        Ok(piece) => Message::Binary(piece.into()),
                        Err(refusal) => match serde_json::to_string(&refusal) {
                            Ok(text) => Message::Text(text.into()),
                            Err(_) => return,
                        },
                    };
                    // A connection that has gone asks again on the next one.
                    let _ = outbound.send(message).await;
                });
                Ok(())
            }
            FromGuest::Output { upload, name, size, sha256 } => {
                let begun = self.uploads.begin(upload, name.clone(), size, sha256).await;
                if let Err(Error::Refused(problem)) = &begun
                    && !problem.retryable
                {
                    self.not_kept(&name, size, &problem.detail).await?;
                }
                self.uploaded(upload, begun).await
            }
            FromGuest::OutputSkipped { upload, name, size, reason } => {
                // It may have begun.
                self.uploads.drop_upload(upload);
                self.report(Report::OutputUnavailable { name, size, reason }).await?;
                self.tell(&ToGuest::OutputStored { upload }).await
            }
            FromGuest::Lease { number } => {
                self.gateway.ask_lease((self.reporter.run, self.reporter.epoch), self.number, number);
                if !std::mem::replace(&mut self.leased, true) {
                    self.look_soon();
                }
                Ok(())
            }
            FromGuest::Done => {
                self.look_soon();
                Ok(())
            }
            FromGuest::Viewer { viewer, heard } => self.answer_viewer(&viewer, &heard).await,
            FromGuest::Hello(_) => Err(Error::broken("a second hello on one connection")),
            FromGuest::Unknown => Ok(()),
        }
    }

    /// What came of a step of an upload. Trouble of the store breaks the connection; the supervisor sends the file again on the next.
    async fn uploaded(&mut self, upload: u64, step: Result<Option<uploads::Whole>>) -> Result<()> {
        let whole = match step {
            Ok(None) => return Ok(()),
            Ok(Some(whole)) => whole,
            Err(Error::Refused(problem)) if !problem.retryable => {
                self.uploads.drop_upload(upload);
                return self.tell(&ToGuest::OutputRefused { upload, code: problem.code, detail: problem.detail }).await;
            }
            Err(error) => return Err(error),
        };
        let (gateway, reporter) = (self.gateway.clone(), self.reporter.clone());
        self.keeping.spawn(async move { uploads::keep(&gateway, &reporter, whole).await });
        if self.keeping.len() == KEEPING {
            limit_reached("outputs_in_flight");
        }
        Ok(())
    }

    async fn kept(&mut self, kept: std::result::Result<Result<ToGuest>, JoinError>) -> Result<()> {
        let answer = kept.map_err(|error| Error::broken(format!("keeping an output: {error}")))??;
        self.tell(&answer).await
    }

    /// Tells the owner of an output that it was not kept.
    async fn not_kept(&mut self, name: &str, size: u64, reason: &str) -> Result<()> {
        self.report(Report::OutputUnavailable { name: name.to_owned(), size, reason: reason.to_owned() }).await
    }

    async fn told(&mut self, told: Told) -> Result<()> {
        match told {
            Told::Stored(seq) => {
                self.stored = self.stored.max(seq);
                self.tell(&ToGuest::Stored { seq }).await
            }
            Told::Refused(why) => {
                tracing::warn!(run = %self.reporter.run, why, "JetStream did not take a frame; it is asked for again");
                tokio::time::sleep(AGAIN).await;
                self.frames.recover().await;
                self.ask_again().await
            }
        }
    }

    /// Asks for everything that is not sealed.
    async fn ask_again(&mut self) -> Result<()> {
        self.frames.forget();
        if let Some(record) = towpath_transcript::record(&self.gateway.chassis.db, self.reporter.run, self.reporter.epoch).await? {
            self.sealed = self.sealed.max(record.last_seq);
        }
        self.stored = self.sealed;
        self.tell(&ToGuest::Resend { from: self.sealed + 1 }).await
    }

    async fn sealed(&mut self, seq: u64) -> Result<()> {
        if seq <= self.sealed {
            return Ok(());
        }
        self.sealed = seq;
        self.stalled_looks = 0;
        self.tell(&ToGuest::Sealed { seq }).await
    }

    async fn nudged(&mut self, nudge: Nudge) -> Result<()> {
        match nudge {
            Nudge::Leased(number) => self.tell(&ToGuest::Leased { number }).await,
            Nudge::Sealed(seq) if seq > self.sealed => self.sealed(seq).await,
            Nudge::Sealed(_) => {
                self.stalled_looks = if self.stored > self.sealed { self.stalled_looks + 1 } else { 0 };
                if self.stalled_looks < STALLED_LOOKS {
                    return Ok(());
                }
                self.stalled_looks = 0;
                self.ask_again().await
            }
            Nudge::Steers => self.send_steers(false).await,
            Nudge::StreamReset => self.ask_again().await,
            Nudge::Standing(standing) => {
                if standing.fenced {
                    self.tell(&ToGuest::Fenced).await?;
                    return Err(Error::broken("the epoch is fenced"));
                }
                if standing.release {
                    self.tell(&ToGuest::Release).await?;
                }
                match standing.stop {
                    Some(stop) => self.stop(stop).await,
                    None => Ok(()),
                }
            }
        }
    }

    async fn stop(&mut self, stop: Stop) -> Result<()> {
        if self.stop_sent {
            return Ok(());
        }
        self.stop_sent = true;
        self.tell(&ToGuest::Cancel { grace_s: stop.grace_s, reason: stop.reason }).await
    }

    async fn event(&mut self, payload: &[u8]) -> Result<()> {
        let own = self.reporter.epoch;
        match serde_json::from_slice(payload) {
            Ok(event::Kind::Sealed { epoch, seq }) if epoch == own => self.sealed(u64::try_from(seq).unwrap_or(0)).await,
            Ok(event::Kind::Hole { epoch, seq }) if epoch == own => {
                // Frames on their way may fill it; what is missing after them is asked for.
                let from = u64::try_from(seq).unwrap_or(1);
                if self.stored >= from { self.tell(&ToGuest::Resend { from }).await } else { Ok(()) }
            }
            Ok(event::Kind::Moved { .. } | event::Kind::Closed { .. }) => {
                self.look_soon();
                Ok(())
            }
            Ok(event::Kind::Sealed { .. } | event::Kind::Hole { .. } | event::Kind::Unknown) | Err(_) => Ok(()),
        }
    }

    /// Sends open steers in order, each marked as sent before it goes; with `again` those too that were sent before. The supervisor drops ids that it knows.
    async fn send_steers(&mut self, again: bool) -> Result<()> {
        let mut after = 0;
        loop {
            let open = order::steers(&self.gateway.chassis, &self.reporter, again, after).await?;
            let Some(last) = open.last() else { return Ok(()) };
            after = last.ordinal;
            let steers: Vec<SteerOrder> = open.into_iter().filter(|steer| !self.steered.contains(&steer.steer)).collect();
            if steers.is_empty() {
                continue;
            }
            let ids = steers.iter().map(|steer| steer.steer).collect();
            if !self.gateway.reports.tell(&self.reporter, Report::SteersSent(ids)).await? {
                return Ok(());
            }
            for steer in steers {
                self.steered.insert(steer.steer);
                self.tell(&ToGuest::Steer(steer)).await?;
            }
        }
    }
}
