//! A pretended supervisor: the protocol without a sandbox.

use std::time::Instant;

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

use crate::{ground::Ground, life::Until};

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
                let exit = Exit { code: Some(0), signal: None, oom: None };
                socket.feed(text(&FromGuest::Started)?).await?;
                socket.feed(text(&FromGuest::Ended { exit: exit.clone(), reason: None })?).await?;
                socket.feed(text(&FromGuest::Result { text: "done".to_owned(), truncated: false })?).await?;
                socket.feed(Message::Binary(frames(exit)?.into())).await?;
                socket.feed(text(&FromGuest::Done)?).await?;
                socket.flush().await?;
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

fn text(message: &FromGuest) -> Result<Message> {
    Ok(Message::Text(serde_json::to_string(message)?.into()))
}

/// A supervisor that is connected, answers pings and says nothing.
pub struct Connected {
    _answering: tokio::task::JoinSet<()>,
}

/// Says hello, starts what it is told to start, and stays.
pub async fn connect(ground: &Ground, run: RunId) -> Result<Connected> {
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
    let mut answering = tokio::task::JoinSet::new();
    answering.spawn(async move { while let Some(Ok(_)) = socket.next().await {} });
    Ok(Connected { _answering: answering })
}

/// A line of output and the end record.
fn frames(exit: Exit) -> Result<Vec<u8>> {
    let end = serde_json::to_vec(&EndRecord { exit, bytes: 5, steers: Vec::new() })?;
    let frame = |kind, seq, offset, payload| Frame { kind, epoch: 1, seq, offset, wall_us: seq, mono_us: seq, payload };
    let mut bytes = vec![binary::FRAMES];
    frame(FrameKind::Stdout, 1, 0, b"done\n".to_vec()).encode_into(&mut bytes);
    frame(FrameKind::End, 2, 5, end).encode_into(&mut bytes);
    Ok(bytes)
}
