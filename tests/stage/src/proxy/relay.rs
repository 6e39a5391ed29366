//! One proxied connection: two pumps, each carrying bytes in one direction under the present mode.

use std::{
    io::{Error, ErrorKind, Result},
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    sync::watch,
};

use super::{
    Control, Mode, Speaks,
    conversation::{Conversation, Faults, Verdict},
    etag,
    websocket::Messages,
};

const PIECE_BYTES: usize = 64 * 1024;
/// A throttled pump moves a twentieth of a second's worth at a time.
const PIECES_PER_S: u32 = 20;

#[derive(Clone, Copy)]
enum Direction {
    ToServer,
    ToClient,
}

struct Pump {
    control: watch::Receiver<Control>,
    conversation: Option<Arc<Mutex<Conversation>>>,
    messages: Option<Messages>,
    direction: Direction,
    faults: Arc<Faults>,
}

/// Carries bytes until either side ends or a fault does. How it ended is the peers' to notice, not ours to report.
pub(super) async fn connection(
    client: TcpStream,
    upstream: SocketAddr,
    control: watch::Receiver<Control>,
    speaks: Speaks,
    faults: Arc<Faults>,
) {
    let conversation = (speaks == Speaks::Postgres).then(|| Arc::new(Mutex::new(Conversation::new(faults.clone()))));
    let pump = |direction| Pump {
        control: control.clone(),
        conversation: conversation.clone(),
        messages: (speaks == Speaks::WebSocket).then(Messages::default),
        direction,
        faults: faults.clone(),
    };
    let (mut up, mut down) = (pump(Direction::ToServer), pump(Direction::ToClient));
    let carry = async {
        if let Mode::Answer(text) = up.passing().await? {
            return answer(client, text).await;
        }
        let server = TcpStream::connect(upstream).await?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
        tokio::try_join!(up.run(from_client, to_server), down.run(from_server, to_client)).map(drop)
    };
    carry.await.ok();
}

/// Reads a request's head and answers it.
async fn answer(mut client: TcpStream, text: &str) -> Result<()> {
    let mut head = Vec::new();
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        if client.read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    }
    client.write_all(text.as_bytes()).await?;
    client.shutdown().await
}

impl Pump {
    async fn run(&mut self, mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) -> Result<()> {
        let mut buffer = vec![0; PIECE_BYTES];
        loop {
            let room = match self.control.borrow().mode {
                Mode::Throttle { bytes_per_s } => usize::try_from(bytes_per_s / PIECES_PER_S).map_or(1, |room| room.clamp(1, PIECE_BYTES)),
                Mode::Pass
                | Mode::Refuse
                | Mode::BlackHole
                | Mode::Delay(_)
                | Mode::Answer(_)
                | Mode::Etag(_)
                | Mode::LoseAnswers
                | Mode::Duplicate => PIECE_BYTES,
            };
            let length = from.read(&mut buffer[..room]).await?;
            let mode = self.passing().await?;
            match mode {
                Mode::Delay(delay) => tokio::time::sleep(delay).await,
                Mode::Throttle { bytes_per_s } => tokio::time::sleep(seconds_for(length, bytes_per_s)).await,
                Mode::Answer(_) => return Err(Error::new(ErrorKind::ConnectionAborted, "cut: others are answered by the proxy")),
                Mode::LoseAnswers if matches!(self.direction, Direction::ToClient) => {
                    return Err(Error::new(ErrorKind::ConnectionAborted, "the answer is lost"));
                }
                Mode::Pass | Mode::Refuse | Mode::BlackHole | Mode::Etag(_) | Mode::LoseAnswers | Mode::Duplicate => {}
            }
            if length == 0 {
                return to.shutdown().await;
            }
            if let (Mode::Etag(text), Direction::ToClient) = (mode, self.direction)
                && let Some(answer) = etag::changed(&buffer[..length], text)
            {
                self.faults.etag_changed();
                to.write_all(&answer).await?;
                continue;
            }
            if let Some(messages) = &mut self.messages {
                to.write_all(&messages.pass(&buffer[..length], mode == Mode::Duplicate)).await?;
                continue;
            }
            let verdict = self.judge(&buffer[..length]);
            if let Verdict::Relay(bytes) = verdict {
                to.write_all(&buffer[..bytes]).await?;
            } else {
                return Err(Error::new(ErrorKind::ConnectionAborted, "cut at a COMMIT"));
            }
        }
    }

    /// Waits while the mode is a black hole; the mode that holds then.
    async fn passing(&mut self) -> Result<Mode> {
        let control = self.control.wait_for(|control| control.mode != Mode::BlackHole).await;
        control.map(|control| control.mode).map_err(|_| Error::new(ErrorKind::ConnectionAborted, "the proxy is gone"))
    }

    fn judge(&self, bytes: &[u8]) -> Verdict {
        let Some(conversation) = &self.conversation else { return Verdict::Relay(bytes.len()) };
        let mut conversation = conversation.lock().expect("conversation");
        match self.direction {
            Direction::ToServer => conversation.client_sent(bytes),
            Direction::ToClient => conversation.server_sent(bytes),
        }
    }
}

fn seconds_for(bytes: usize, bytes_per_s: u32) -> Duration {
    Duration::from_secs_f64(bytes as f64 / f64::from(bytes_per_s.max(1)))
}
