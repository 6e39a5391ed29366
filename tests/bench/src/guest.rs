//! A pretended supervisor: the protocol without a sandbox.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::{SinkExt, StreamExt};
use serde_json::from_str;
use tokio::net::TcpStream;
use tokio_tungstenite::{WebSocketStream, client_async, tungstenite::Message};
use towpath_schemas::{
    frame::{EndRecord, Frame, FrameKind},
    guest::{Exit, FromGuest, Hello, Identity, Phase, ToGuest, binary},
    id::RunId,
};

use crate::{ground::Ground, life::Until, streams::Printed};

/// How a pretended command ends.
const EXIT: Exit = Exit { code: Some(0), signal: None, oom: None };

/// Says hello for the first epoch of a run; when its start order came. Goes on to the end of its life when asked to.
pub async fn live(ground: &Ground, run: RunId, until: Until) -> Result<Instant> {
    let mut socket = hello(ground, run).await?;
    let mut started = None;
    while let Some(message) = socket.next().await {
        let Message::Text(message) = message? else { continue };
        match from_str::<ToGuest>(&message)? {
            ToGuest::Start(_) => {
                let now = Instant::now();
                if until == Until::Started {
                    return Ok(now);
                }
                started = Some(now);
                socket.feed(text(&FromGuest::Started)?).await?;
                let line = b"done\n";
                let frames = [frame(FrameKind::Stdout, 1, 0, line.to_vec()), end(2, line.len() as u64)?];
                finish(&mut socket, message_of(&frames)).await?;
            }
            ToGuest::Release => return started.context("released before it was started"),
            ToGuest::Fenced => bail!("{run} is fenced"),
            ToGuest::Later { detail } => bail!("{run} is asked to come later: {detail}"),
            _ => {}
        }
    }
    bail!("the gateway hung up on {run}")
}

async fn hello(ground: &Ground, run: RunId) -> Result<WebSocketStream<TcpStream>> {
    let stream = TcpStream::connect(&ground.listen).await?;
    // As the real one does.
    stream.set_nodelay(true)?;
    let (mut socket, _) = client_async(format!("ws://{}/sandbox", ground.listen), stream).await?;
    let incarnation = format!("{:032x}", run.uuid().as_u128());
    let hello = Hello {
        protocol: 1,
        run,
        epoch: 1,
        token: Some(ground.secrets.sandbox_token(run, 1)),
        key: incarnation.repeat(2),
        incarnation,
        phase: Phase::Fresh,
        identity: Identity::default(),
    };
    socket.send(text(&FromGuest::Hello(hello))?).await?;
    Ok(socket)
}

/// Says hello and starts what it is told to start.
async fn started(ground: &Ground, run: RunId) -> Result<WebSocketStream<TcpStream>> {
    let mut socket = hello(ground, run).await?;
    loop {
        let message = socket.next().await.context("the gateway hung up")??;
        let Message::Text(message) = message else { continue };
        match from_str::<ToGuest>(&message)? {
            ToGuest::Start(_) => break,
            ToGuest::Fenced => bail!("{run} is fenced"),
            ToGuest::Later { detail } => bail!("{run} is asked to come later: {detail}"),
            _ => {}
        }
    }
    socket.send(text(&FromGuest::Started)?).await?;
    Ok(socket)
}

fn text(message: &FromGuest) -> Result<Message> {
    Ok(Message::Text(serde_json::to_string(message)?.into()))
}

/// A supervisor that is connected, answers pings and says nothing.
pub struct Connected {
    _answering: tokio::task::JoinSet<()>,
}

/// Says hello, starts what it is told to start, and stays.
pub async fn connect(ground: &Ground, run: RunId) -> Result<Connected> {
    let mut socket = started(ground, run).await?;
    let mut answering = tokio::task::JoinSet::new();
    answering.spawn(async move { while let Some(Ok(_)) = socket.next().await {} });
    Ok(Connected { _answering: answering })
}

/// A supervisor whose command has started.
pub struct Printer {
    socket: WebSocketStream<TcpStream>,
}

pub async fn printer(ground: &Ground, run: RunId) -> Result<Printer> {
    Ok(Printer { socket: started(ground, run).await? })
}

impl Printer {
    /// Prints a frame at a time, ends well, and returns when it is released.
    pub async fn print(mut self, all: &[Printed], between: Duration) -> Result<()> {
        let mut tick = tokio::time::interval(between);
        let mut offset = 0;
        let mut sent: Vec<Message> = Vec::with_capacity(all.len() + 1);
        loop {
            tokio::select! {
                _ = tick.tick(), if sent.len() < all.len() => {
                    let seq = sent.len() as u64 + 1;
                    let printed = &all[sent.len()];
                    let message = message_of(&[frame(FrameKind::Stdout, seq, offset, printed.payload.clone())]);
                    offset += printed.payload.len() as u64;
                    sent.push(message.clone());
                    printed.at.get_or_init(Instant::now);
                    self.socket.send(message).await?;
                    if sent.len() == all.len() {
                        let message = message_of(&[end(seq + 1, offset)?]);
                        sent.push(message.clone());
                        finish(&mut self.socket, message).await?;
                    }
                }
                message = self.socket.next() => {
                    let Message::Text(message) = message.context("the gateway hung up")?? else { continue };
                    match from_str::<ToGuest>(&message)? {
                        ToGuest::Release => return Ok(()),
                        ToGuest::Resend { from } => {
                            for message in sent.iter().skip(usize::try_from(from)?.saturating_sub(1)) {
                                self.socket.feed(message.clone()).await?;
                            }
                            self.socket.flush().await?;
                        }
                        ToGuest::Fenced => bail!("the supervisor that prints is fenced"),
                        ToGuest::Later { detail } => bail!("the supervisor that prints is asked to come later: {detail}"),
                        _ => {}
                    }
                }
            }
        }
    }
}

/// Reports a good end; `last` carries the end record.
async fn finish(socket: &mut WebSocketStream<TcpStream>, last: Message) -> Result<()> {
    socket.feed(text(&FromGuest::Ended { exit: EXIT, reason: None })?).await?;
    socket.feed(text(&FromGuest::Result { text: "done".to_owned(), truncated: false })?).await?;
    socket.feed(last).await?;
    socket.feed(text(&FromGuest::Done)?).await?;
    Ok(socket.flush().await?)
}

fn frame(kind: FrameKind, seq: u64, offset: u64, payload: Vec<u8>) -> Frame {
    Frame { kind, epoch: 1, seq, offset, wall_us: seq, mono_us: seq, payload }
}

/// The end record after `bytes` of output.
fn end(seq: u64, bytes: u64) -> Result<Frame> {
    let record = serde_json::to_vec(&EndRecord { exit: EXIT, bytes, steers: Vec::new() })?;
    Ok(frame(FrameKind::End, seq, bytes, record))
}

fn message_of(frames: &[Frame]) -> Message {
    let mut bytes = vec![binary::FRAMES];
    frames.iter().for_each(|frame| frame.encode_into(&mut bytes));
    Message::Binary(bytes.into())
}
