//! Viewers of a run's terminal: one that speaks the protocol, and the real client in a terminal of ours.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::OwnedFd,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use futures::{SinkExt, StreamExt};
use rustix::{
    pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use stage::wait_for;
use tokio::net::TcpStream;
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, connect_async,
    tungstenite::{Message, client::IntoClientRequest},
};
use towpath_schemas::{
    frame::{Frame, FrameKind, ScreenRecord, Size},
    viewer::{FromViewer, ToViewer},
};
use towpath_terminal::Screen;

use crate::{SOON, World};

/// What a viewer has when its connection is gone.
#[derive(Default)]
pub struct Remembered {
    screen: Option<Screen>,
    last: Option<(u32, u64)>,
}

/// Somebody at `GET /v1/runs/{id}/terminal`.
pub struct Viewer {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    pub screen: Option<Screen>,
    /// Epoch and sequence number of the last frame, and how many frames came.
    pub last: Option<(u32, u64)>,
    pub frames: usize,
    pub told: Vec<ToViewer>,
    number: u64,
}

impl Viewer {
    pub async fn join(world: &World, run: &str) -> Result<Self> {
        Self::begin(world, run, Remembered::default(), &world.token).await
    }

    /// Goes on after the last frame that it has.
    pub async fn join_again(world: &World, run: &str, had: Remembered) -> Result<Self> {
        Self::begin(world, run, had, &world.token).await
    }

    pub async fn join_as(world: &World, run: &str, token: &str) -> Result<Self> {
        Self::begin(world, run, Remembered::default(), token).await
    }

    async fn begin(world: &World, run: &str, had: Remembered, token: &str) -> Result<Self> {
        let place = had.last.map(|(epoch, seq)| format!("?after={epoch}.{seq}")).unwrap_or_default();
        let mut request = format!("{}/v1/runs/{run}/terminal{place}", world.url.replacen("http", "ws", 1)).into_client_request()?;
        request.headers_mut().insert("authorization", format!("Bearer {token}").parse()?);
        let (socket, _) = connect_async(request).await?;
        Ok(Self { socket, screen: had.screen, last: had.last, frames: 0, told: Vec::new(), number: 0 })
    }

    pub fn hang_up(self) -> Remembered {
        Remembered { screen: self.screen, last: self.last }
    }

    pub async fn window(&mut self, cols: u16, rows: u16) -> Result<()> {
        self.tell(&FromViewer::Window { size: Size { cols, rows } }).await
    }

    pub async fn tell(&mut self, message: &FromViewer) -> Result<()> {
        Ok(self.socket.send(Message::text(serde_json::to_string(message)?)).await?)
    }

    pub async fn type_in(&mut self, text: &str) -> Result<u64> {
        self.number += 1;
        let mut message = self.number.to_be_bytes().to_vec();
        message.extend_from_slice(text.as_bytes());
        self.socket.send(Message::binary(message)).await?;
        Ok(self.number)
    }

    pub fn rows(&self) -> Vec<String> {
        self.screen.as_ref().map(Screen::rows).unwrap_or_default()
    }

    /// Takes what comes until the viewer is as wanted.
    pub async fn until(&mut self, what: &str, wanted: impl Fn(&Self) -> bool) -> Result<()> {
        let deadline = tokio::time::Instant::now() + SOON;
        while !wanted(self) {
            match tokio::time::timeout_at(deadline, self.socket.next()).await {
                Ok(Some(message)) => self.take(message?)?,
                Ok(None) => bail!("the terminal hung up before {what}: {:?}", self.told),
                Err(_) => bail!("waited in vain for {what}; told {:?}; it shows\n{}", self.told, self.rows().join("\n")),
            }
        }
        Ok(())
    }

    pub async fn shows(&mut self, text: &str) -> Result<()> {
        self.until(text, |viewer| viewer.rows().iter().any(|row| row.contains(text))).await
    }

    fn take(&mut self, message: Message) -> Result<()> {
        match message {
            Message::Text(text) => self.told.push(serde_json::from_str(&text)?),
            Message::Binary(bytes) => {
                for frame in Frame::decode_all(&bytes)? {
                    self.frame(&frame)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn frame(&mut self, frame: &Frame) -> Result<()> {
        let place = (frame.epoch, frame.seq);
        if let Some((epoch, seq)) = self.last {
            ensure!(epoch != frame.epoch || frame.seq == seq + 1, "frame {place:?} after {:?}: a gap or a repeat", self.last);
        }
        self.last = Some(place);
        self.frames += 1;
        match (frame.kind, &mut self.screen) {
            (FrameKind::Screen, None) => self.screen = Some(Screen::restore(&serde_json::from_slice::<ScreenRecord>(&frame.payload)?)),
            (FrameKind::Terminal, Some(screen)) => drop(screen.print(&frame.payload)),
            (FrameKind::Resize, Some(screen)) => screen.resize(serde_json::from_slice(&frame.payload)?),
            (FrameKind::Terminal, None) => bail!("the first frame is {place:?} and no screen"),
            _ => {}
        }
        Ok(())
    }
}

/// The client in a terminal of ours.
pub struct AtTerminal {
    child: Child,
    owner: OwnedFd,
    screen: Arc<Mutex<Screen>>,
}

impl AtTerminal {
    pub fn start(world: &World, arguments: &[&str], size: Size) -> Result<Self> {
        let owner = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&owner)?;
        unlockpt(&owner)?;
        let end = ioctl_tiocgptpeer(&owner, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        tcsetwinsize(&owner, Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 })?;
        let binary = std::env::var("TOWPATH_BIN").context("TOWPATH_BIN is not set: run tests by `./dev test`")?;
        // setsid gives the client a session, and its first terminal becomes the controlling one.
        let child = Command::new("setsid")
            .args(["--ctty", "--wait", &binary])
            .args(arguments)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("TERM", "xterm-256color")
            .env("TOWPATH_URL", &world.url)
            .env("TOWPATH_TOKEN", &world.token)
            .stdin(Stdio::from(end.try_clone()?))
            .stdout(Stdio::from(end.try_clone()?))
            .stderr(Stdio::from(end))
            .spawn()?;
        let screen = Arc::new(Mutex::new(Screen::new(size)));
        let (shown, mut output) = (screen.clone(), File::from(owner.try_clone()?));
        std::thread::spawn(move || {
            let mut buffer = [0; 65536];
            while let Ok(read @ 1..) = output.read(&mut buffer) {
                shown.lock().unwrap_or_else(PoisonError::into_inner).print(&buffer[..read]);
            }
        });
        Ok(Self { child, owner, screen })
    }

    pub fn type_in(&self, text: &str) -> Result<()> {
        Ok(File::from(self.owner.try_clone()?).write_all(text.as_bytes())?)
    }

    pub fn resize(&self, size: Size) -> Result<()> {
        self.screen.lock().unwrap_or_else(PoisonError::into_inner).resize(size);
        Ok(tcsetwinsize(&self.owner, Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 })?)
    }

    pub fn rows(&self) -> Vec<String> {
        self.screen.lock().unwrap_or_else(PoisonError::into_inner).rows()
    }

    pub async fn shows(&self, text: &str) -> Result<()> {
        wait_for(text, SOON, async || self.rows().iter().any(|row| row.contains(text)).then_some(()))
            .await
            .with_context(|| format!("it shows\n{}", self.rows().join("\n")))
    }

    /// The exit status once the client has ended by itself.
    pub async fn left(&mut self) -> Result<ExitStatus> {
        wait_for("the client to end", SOON, || std::future::ready(self.child.try_wait().ok().flatten())).await
    }
}

impl Drop for AtTerminal {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Until both show the same, cell by cell.
pub async fn same_screen(one: &mut Viewer, other: &mut Viewer) -> Result<()> {
    let last = one.last.max(other.last);
    for viewer in [&mut *one, &mut *other] {
        viewer.until("the same frame", |viewer| viewer.last >= last).await?;
    }
    ensure!(one.last == other.last, "they are at {:?} and {:?}", one.last, other.last);
    let dump = |viewer: &Viewer| viewer.screen.as_ref().map(|screen| screen.record());
    ensure!(dump(one) == dump(other), "they show\n{}\n--- and\n{}", one.rows().join("\n"), other.rows().join("\n"));
    Ok(())
}

/// A while in which nothing is taken.
pub async fn pause(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}
