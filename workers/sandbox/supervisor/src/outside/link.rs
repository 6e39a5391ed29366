//! The one connection to the gateway: opened again and again for as long as there is something to tell.

use std::{io, time::Duration};

use futures::{SinkExt, StreamExt, stream::SplitSink, stream::SplitStream};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep, timeout},
};
use tokio_tungstenite::{
    WebSocketStream, client_async_with_config,
    tungstenite::{Message, protocol::WebSocketConfig},
};
use towpath_schemas::{
    guest::{FromGuest, Hello, PROTOCOL, Phase, ToGuest, binary},
    limit::GUEST_MESSAGE_BYTES,
};

use super::{
    Secrets,
    desk::{Desk, Outgoing},
};

const CONNECT: Duration = Duration::from_secs(10);
const ANSWER: Duration = Duration::from_secs(20);
const PING: Duration = Duration::from_secs(10);
/// Nothing heard for this long: the connection is taken for dead.
const SILENCE: Duration = Duration::from_secs(30);
const BACKOFF_LEAST: Duration = Duration::from_millis(100);
const BACKOFF_MOST: Duration = Duration::from_secs(5);
/// A connection that lasted this long lets the wait begin anew.
const STEADY: Duration = Duration::from_secs(10);
/// A supervisor that was not told to start and hears from nobody for this long leaves.
const GIVE_UP: Duration = Duration::from_secs(600);
/// Buffers of the connection; small, because there may be many sandboxes on a host.
const BUFFER_BYTES: usize = 32 * 1024;

type Socket = WebSocketStream<TcpStream>;

#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error("{0}")]
    Address(String),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    WebSocket(#[from] Box<tokio_tungstenite::tungstenite::Error>),
    #[error("no answer within {} s", .0.as_secs())]
    Silent(Duration),
    #[error("the gateway said: not now: {0}")]
    Later(String),
    #[error("the gateway closed the connection")]
    Closed,
    #[error("what came is no message of this protocol: {0}")]
    Message(#[from] serde_json::Error),
}

fn websocket(error: tokio_tungstenite::tungstenite::Error) -> LinkError {
    LinkError::WebSocket(Box::new(error))
}

/// `host:port` of a `ws://` address.
pub fn host_and_port(url: &str) -> Result<String, String> {
    let Some(rest) = url.strip_prefix("ws://") else {
        return Err(format!("the gateway's address `{url}` does not begin with ws://, the only kind that this release speaks"));
    };
    let host = rest.split(['/', '?']).next().unwrap_or_default();
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    Ok(if has_port { host.to_owned() } else { format!("{host}:80") })
}

/// Ends when the gateway released or fenced us, or when nobody wants us.
pub async fn keep(desk: &Desk, secrets: &Secrets, gateway: &str) {
    let mut connection = 0;
    let mut backoff = BACKOFF_LEAST;
    let mut heard = Instant::now();
    let mut last_said = String::new();
    while !desk.is_over() {
        connection += 1;
        let (mut welcomed, begun) = (false, Instant::now());
        if let Err(error) = converse(desk, secrets, gateway, connection, &mut welcomed).await {
            let said = error.to_string();
            if said != last_said {
                crate::note!("connection {connection}: {said}");
                last_said = said;
            }
        }
        desk.connection_ended();
        if welcomed {
            heard = Instant::now();
            // A gateway that welcomes us and hangs up at once, again and again, is given more time each time.
            if begun.elapsed() >= STEADY {
                backoff = BACKOFF_LEAST;
            }
        }
        if desk.phase() == Phase::Fresh && heard.elapsed() > GIVE_UP {
            crate::note!("nobody told this sandbox to start for {} s", GIVE_UP.as_secs());
            return;
        }
        if !desk.is_over() {
            sleep(backoff.mul_f64(0.5 + secrets.jitter())).await;
            backoff = (backoff * 2).min(BACKOFF_MOST);
        }
    }
}

async fn converse(desk: &Desk, secrets: &Secrets, gateway: &str, connection: u64, welcomed: &mut bool) -> Result<(), LinkError> {
    let mut socket = timeout(CONNECT, connect(gateway)).await.map_err(|_| LinkError::Silent(CONNECT))??;
    send(&mut socket, &FromGuest::Hello(hello(desk, secrets))).await?;
    let answer = timeout(ANSWER, first_answer(&mut socket)).await.map_err(|_| LinkError::Silent(ANSWER))??;
    match answer {
        ToGuest::Welcome { .. } => {
            *welcomed = true;
            secrets.welcomed();
        }
        ToGuest::Later { detail } => return Err(LinkError::Later(detail)),
        ToGuest::Fenced => crate::note!("fenced: another incarnation or a newer epoch owns this run"),
        _ => {}
    }
    desk.hear(answer);
    if desk.is_over() {
        return Ok(());
    }
    let (sink, stream) = socket.split();
    tokio::select! {
        end = listen(desk, stream) => end,
        end = speak(desk, sink, connection) => end,
    }
}

async fn connect(gateway: &str) -> Result<Socket, LinkError> {
    let stream = TcpStream::connect(host_and_port(gateway).map_err(LinkError::Address)?).await?;
    stream.set_nodelay(true)?;
    let config = WebSocketConfig::default()
        .read_buffer_size(BUFFER_BYTES)
        .write_buffer_size(0)
        .max_message_size(Some(GUEST_MESSAGE_BYTES))
        .max_frame_size(Some(GUEST_MESSAGE_BYTES));
    Ok(client_async_with_config(gateway, stream, Some(config)).await.map_err(websocket)?.0)
}

fn hello(desk: &Desk, secrets: &Secrets) -> Hello {
    Hello {
        protocol: PROTOCOL,
        run: secrets.run,
        epoch: secrets.epoch,
        incarnation: secrets.incarnation.clone(),
        token: secrets.token(),
        key: secrets.key.clone(),
        phase: desk.phase(),
        identity: desk.identity(),
    }
}

async fn send(socket: &mut Socket, message: &FromGuest) -> Result<(), LinkError> {
    socket.send(Message::text(serde_json::to_string(message)?)).await.map_err(websocket)
}

async fn first_answer(socket: &mut Socket) -> Result<ToGuest, LinkError> {
    loop {
        match socket.next().await.ok_or(LinkError::Closed)?.map_err(websocket)? {
            Message::Text(text) => {
                if let answer @ (ToGuest::Welcome { .. } | ToGuest::Fenced | ToGuest::Later { .. }) = serde_json::from_str(&text)? {
                    return Ok(answer);
                }
            }
            Message::Close(_) => return Err(LinkError::Closed),
            _ => {}
        }
    }
}

async fn listen(desk: &Desk, mut stream: SplitStream<Socket>) -> Result<(), LinkError> {
    while !desk.is_over() {
        let message = timeout(SILENCE, stream.next()).await.map_err(|_| LinkError::Silent(SILENCE))?;
        match message.ok_or(LinkError::Closed)?.map_err(websocket)? {
            Message::Text(text) => match serde_json::from_str(&text) {
                Ok(ToGuest::Later { detail }) => return Err(LinkError::Later(detail)),
                Ok(told) => desk.hear(told),
                // It has a word of a newer release, and so is for a newer supervisor.
                Err(error) => crate::note!("not understood: {error}"),
            },
            Message::Binary(bytes) => {
                if let Some((&[binary::FILE_PIECE, ref number @ ..], piece)) = bytes.split_first_chunk::<9>() {
                    desk.hear_piece(u64::from_be_bytes(*number), piece.to_vec());
                }
            }
            Message::Close(_) => return Err(LinkError::Closed),
            _ => {}
        }
    }
    Ok(())
}

async fn speak(desk: &Desk, mut sink: SplitSink<Socket, Message>, connection: u64) -> Result<(), LinkError> {
    let mut pinged = Instant::now();
    loop {
        if pinged.elapsed() >= PING {
            sink.send(Message::Ping(Vec::new().into())).await.map_err(websocket)?;
            pinged = Instant::now();
        }
        match desk.next(connection)? {
            Some(Outgoing::Text(message)) => sink.send(Message::text(serde_json::to_string(&message)?)).await.map_err(websocket)?,
            Some(Outgoing::Binary(bytes)) => sink.send(Message::binary(bytes)).await.map_err(websocket)?,
            None => {
                // Running into the time-out is how the next ping or the next question for a lease comes.
                let idle = PING.saturating_sub(pinged.elapsed()).min(desk.lease_due_in(connection).unwrap_or(PING));
                timeout(idle, desk.something_to_send()).await.ok();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_web_socket_addresses_are_taken_and_others_are_told_why() {
        assert_eq!(host_and_port("ws://127.0.0.1:7800/sandbox"), Ok("127.0.0.1:7800".to_owned()));
        assert_eq!(host_and_port("ws://gateway/sandbox"), Ok("gateway:80".to_owned()));
        assert_eq!(host_and_port("ws://[::1]:7800/sandbox"), Ok("[::1]:7800".to_owned()));
        assert!(host_and_port("wss://gateway/sandbox").is_err_and(|why| why.contains("ws://")));
    }
}
