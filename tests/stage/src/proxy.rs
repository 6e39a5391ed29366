//! A TCP proxy that tests break at run time: before Postgres, NATS, S3 or the gateway.

mod conversation;
mod etag;
mod relay;
mod websocket;

use std::{
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use tokio::{
    net::TcpListener,
    sync::watch,
    task::{AbortHandle, JoinSet},
};
use url::Url;

use crate::{free_port, wait_for};
use conversation::{CommitFault, Faults};

/// What the proxy does with connections and bytes. Every mode but `Refuse` applies to the connections that exist, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Pass,
    /// New connections are refused by the kernel, as if nobody listened. Those that exist go on; [`Proxy::cut`] ends them.
    Refuse,
    /// Connections are accepted and stay open; no byte moves in either direction. What was sent meanwhile arrives, late, once the mode is
    /// another: as on a network that was split and heals.
    BlackHole,
    /// At most so many bytes a second in each direction of each connection.
    Throttle {
        bytes_per_s: u32,
    },
    /// Every piece of data arrives so much later.
    Delay(Duration),
    /// Every connection is answered with this text and ended; those that exist are cut at their next byte. For servers that speak HTTP.
    Answer(&'static str),
    /// The `ETag` of each answer is this text, quotes and all; none when it is empty. For servers that speak HTTP.
    Etag(&'static str),
    /// What clients send arrives; the connection ends instead of the answer.
    LoseAnswers,
    /// Every message comes twice, in both directions. Only of a proxy before a WebSocket server ([`Proxy::websocket`]).
    Duplicate,
}

/// What is followed of what passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Speaks {
    Anything,
    Postgres,
    WebSocket,
}

/// A proxy on a loopback port of its own. Gone with this value, and all its connections too.
pub struct Proxy {
    port: u16,
    control: watch::Sender<Control>,
    applied: watch::Receiver<u64>,
    faults: Arc<Faults>,
    _accepting: JoinSet<()>,
}

#[derive(Debug, Clone, Copy)]
struct Control {
    mode: Mode,
    /// Grows with every change.
    change: u64,
    /// The change that last asked for all connections to be cut.
    cut: u64,
}

impl Proxy {
    /// Before anything that speaks TCP.
    pub async fn tcp(upstream: SocketAddr) -> Result<Self> {
        Self::start(upstream, Speaks::Anything).await
    }

    /// Before a server whose clients speak nothing but WebSocket: also able to send messages twice.
    pub async fn websocket(upstream: SocketAddr) -> Result<Self> {
        Self::start(upstream, Speaks::WebSocket).await
    }

    /// Before a Postgres server without TLS: also able to break connections at a COMMIT.
    pub async fn postgres(upstream: SocketAddr) -> Result<Self> {
        Self::start(upstream, Speaks::Postgres).await
    }

    async fn start(upstream: SocketAddr, speaks: Speaks) -> Result<Self> {
        let port = free_port()?;
        let listener = bind(port).await?;
        let (control, watched) = watch::channel(Control { mode: Mode::Pass, change: 0, cut: 0 });
        let (report, applied) = watch::channel(0);
        let faults = Arc::new(Faults::default());
        let accept = Accept { port, upstream, control: watched, report, speaks, faults: faults.clone() };
        let mut accepting = JoinSet::new();
        accepting.spawn(accept.run(listener));
        Ok(Self { port, control, applied, faults, _accepting: accepting })
    }

    /// Where clients connect to.
    pub fn address(&self) -> SocketAddr {
        SocketAddrV4::new(Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// The same URL with this proxy as its host and port.
    pub fn through(&self, url: &str) -> Result<String> {
        let mut url = Url::parse(url).context("parse the URL")?;
        url.set_host(Some("127.0.0.1")).context("set the host")?;
        url.set_port(Some(self.port)).ok().context("set the port")?;
        Ok(url.to_string().trim_end_matches('/').to_owned())
    }

    /// Changes the mode. It holds when this returns.
    pub async fn set(&self, mode: Mode) {
        self.change(|control| control.mode = mode).await;
    }

    /// Ends every connection that exists. They are gone when this returns.
    pub async fn cut(&self) {
        self.change(|control| control.cut = control.change).await;
    }

    /// Ends every connection and refuses new ones: the server is down.
    pub async fn down(&self) {
        self.change(|control| (control.mode, control.cut) = (Mode::Refuse, control.change)).await;
    }

    /// Back to passing everything on.
    pub async fn up(&self) {
        self.set(Mode::Pass).await;
    }

    /// The `nth` COMMIT from now on (1 is the next), over all connections, is carried out by the server, and then its connection ends without the
    /// answer: the client cannot know. Sees COMMIT as a simple query, which is how sqlx sends it.
    pub fn cut_after_commit(&self, nth: u64) {
        self.faults.arm(CommitFault::After, nth);
    }

    /// The `nth` COMMIT from now on never reaches the server and its connection ends: to the client the same as [`Self::cut_after_commit`].
    pub fn cut_before_commit(&self, nth: u64) {
        self.faults.arm(CommitFault::Before, nth);
    }

    /// How many connections were ended at a COMMIT so far.
    pub fn commits_cut(&self) -> u64 {
        self.faults.done()
    }

    /// How many answers came with another `ETag` than the server gave.
    pub fn etags_changed(&self) -> u64 {
        self.faults.etags()
    }

    /// Waits until one more connection was ended at a COMMIT than `before` says.
    pub async fn commit_was_cut(&self, before: u64, deadline: Duration) -> Result<()> {
        wait_for("a connection to be cut at a COMMIT", deadline, async || (self.commits_cut() > before).then_some(())).await
    }

    async fn change(&self, change: impl FnOnce(&mut Control)) {
        let mut number = 0;
        self.control.send_modify(|control| {
            control.change += 1;
            number = control.change;
            change(control);
        });
        let mut applied = self.applied.clone();
        // An error means that the accepting task is gone, and with it every connection.
        applied.wait_for(|applied| *applied >= number).await.ok();
    }
}

async fn bind(port: u16) -> Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.with_context(|| format!("listen on 127.0.0.1:{port}"))
}

/// The task that accepts connections and owns those that exist.
struct Accept {
    port: u16,
    upstream: SocketAddr,
    control: watch::Receiver<Control>,
    report: watch::Sender<u64>,
    speaks: Speaks,
    faults: Arc<Faults>,
}

impl Accept {
    async fn run(mut self, listener: TcpListener) {
        let mut listener = Some(listener);
        let mut connections = JoinSet::new();
        loop {
            let now = *self.control.borrow_and_update();
            if now.cut > *self.report.borrow() {
                connections.shutdown().await;
            }
            if now.mode == Mode::Refuse {
                listener = None;
            } else if listener.is_none() {
                listener = Some(self.bind_again().await);
            }
            self.report.send_replace(now.change);
            if self.accept_until_changed(listener.as_ref(), &mut connections).await.is_break() {
                return;
            }
        }
    }

    async fn accept_until_changed(&mut self, listener: Option<&TcpListener>, connections: &mut JoinSet<()>) -> std::ops::ControlFlow<()> {
        loop {
            let accepted = async {
                match listener {
                    Some(listener) => listener.accept().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                changed = self.control.changed() => {
                    return if changed.is_ok() { std::ops::ControlFlow::Continue(()) } else { std::ops::ControlFlow::Break(()) };
                }
                Some(_) = connections.join_next() => {}
                Ok((client, _)) = accepted => {
                    let (control, faults) = (self.control.clone(), self.faults.clone());
                    let _: AbortHandle = connections.spawn(relay::connection(client, self.upstream, control, self.speaks, faults));
                }
            }
        }
    }

    /// The port was ours a moment ago; whoever has it for an instant lets go of it.
    async fn bind_again(&self) -> TcpListener {
        let deadline = Duration::from_secs(10);
        let bound = wait_for("the proxy's port", deadline, async || bind(self.port).await.ok()).await;
        bound.unwrap_or_else(|error| panic!("127.0.0.1:{}: {error:#}", self.port))
    }
}
