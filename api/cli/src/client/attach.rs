//! `towpath attach`: sit at a run's terminal. The run goes on when we leave.

mod keyboard;
mod mirror;

use std::{
    collections::VecDeque,
    io::IsTerminal,
    time::{Duration, Instant},
};

use clap::Args;
use futures::{SinkExt, StreamExt};
use reqwest::Upgraded;
use tokio::signal::unix::{SignalKind, signal};
use tokio_tungstenite::{WebSocketStream, tungstenite::Message};
use towpath_schemas::{
    body::RunState,
    frame::Frame,
    limit::TYPED_BYTES,
    viewer::{FromViewer, ToViewer},
};

use super::{
    api::Api,
    failure::Failure,
    follow::{self, Patience},
    print::Printer,
};
use keyboard::{Key, Keyboard, Typed};
use mirror::Mirror;

/// Bytes that were typed and not yet taken; beyond it the keyboard waits.
const AHEAD: usize = TYPED_BYTES / 2;
/// A server that says nothing for this long is taken for away; it pings every few seconds.
const SILENCE: Duration = Duration::from_secs(30);

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct AttachArgs {
    run: String,
    /// The key that leaves: `ctrl-` and a letter or one of ] \ ^ _
    #[arg(long, default_value_t, value_name = "KEY")]
    detach_key: Key,
    /// Look on and type nothing.
    #[arg(long)]
    watch: bool,
    /// Give the terminal the size of this window, whoever decides it now.
    #[arg(long, conflicts_with = "watch")]
    own: bool,
}

impl AttachArgs {
    /// As a person would who wants nothing special.
    pub fn new(run: String) -> Self {
        Self { run, detach_key: Key::default(), watch: false, own: false }
    }
}

const EXAMPLES: &str = "\
Examples:
  towpath attach RUN
  towpath attach RUN --watch
  towpath run shell --attach

The first one who attaches and may type decides the terminal's size; a smaller window shows the part around the cursor. Typing needs the principal that started the
run and a token with the scope `terminal`. A connection that breaks is made again and misses nothing.";

/// There must be a terminal to show another in.
pub fn has_terminal() -> Result<(), Failure> {
    if std::io::stdout().is_terminal() {
        return Ok(());
    }
    Err(Failure::Use("attach needs a terminal; without one use `towpath logs -f`".to_owned()))
}

pub async fn attach(api: &Api, printer: &Printer, args: AttachArgs) -> Result<(), Failure> {
    has_terminal()?;
    let watch = args.watch || !std::io::stdin().is_terminal();
    let mut attached = Attached {
        api,
        run: args.run,
        keyboard: Keyboard::take(args.detach_key, watch).map_err(|error| Failure::local("the terminal", &error))?,
        mirror: Mirror::open().map_err(|error| Failure::local("the terminal", &error))?,
        own: args.own,
        watch,
        typed: VecDeque::new(),
        number: 0,
        may_type: false,
    };
    let left = attached.until_left().await;
    let Attached { run, keyboard, mirror, .. } = attached;
    drop((mirror, keyboard));
    match left? {
        Left::Detached => {
            printer.note(&format!("detached; the run goes on: towpath attach {run}"));
            Ok(())
        }
        Left::Ended(_) => follow::conclude(printer, api.get(&["v1", "runs", &run], &[]).await?),
    }
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    Detached,
    Ended(RunState),
}

type Socket = WebSocketStream<Upgraded>;

struct Attached<'a> {
    api: &'a Api,
    run: String,
    keyboard: Keyboard,
    mirror: Mirror,
    own: bool,
    /// Who only looks on types nothing, and has no window that the terminal's size could follow.
    watch: bool,
    /// Bytes of each number that is on its way.
    typed: VecDeque<(u64, usize)>,
    number: u64,
    may_type: bool,
}

impl Attached<'_> {
    async fn until_left(&mut self) -> Result<Left, Failure> {
        let mut patience = Patience::new();
        loop {
            let begun = Instant::now();
            let failure = match self.one_connection().await {
                Ok(Some(left)) => return Ok(left),
                Ok(None) => Failure::Unreachable("the terminal's connection breaks off again and again".to_owned()),
                Err(failure) => failure,
            };
            if begun.elapsed() > SILENCE {
                patience = Patience::new();
            }
            patience.bear(failure).await?;
        }
    }

    /// None when the connection broke.
    async fn one_connection(&mut self) -> Result<Option<Left>, Failure> {
        let after = self.mirror.last().map(|(epoch, seq)| format!("{epoch}.{seq}"));
        let mut socket = self.api.terminal(&self.run, after.as_deref()).await?;
        // What was on its way may have been typed: it is not typed again.
        if !std::mem::take(&mut self.typed).is_empty() {
            self.mirror.say("the connection broke; the last keys may not have been typed");
        }
        self.tell_window(&mut socket).await?;
        if std::mem::take(&mut self.own) {
            self.tell(&mut socket, &FromViewer::Own).await?;
        }
        let mut resized = signal(SignalKind::window_change()).map_err(|error| Failure::local("SIGWINCH", &error))?;
        loop {
            let may_read = self.typed.iter().map(|(_, bytes)| bytes).sum::<usize>() < AHEAD;
            tokio::select! {
                message = tokio::time::timeout(SILENCE, socket.next()) => match message {
                    Ok(Some(Ok(message))) => if let Some(left) = self.message(message)? { return Ok(Some(left)) },
                    Ok(Some(Err(_)) | None) | Err(_) => return Ok(None),
                },
                typed = self.keyboard.next(), if may_read => match typed {
                    Typed::Detach => return Ok(Some(Left::Detached)),
                    Typed::Bytes(bytes) if self.may_type => {
                        self.number += 1;
                        let mut message = self.number.to_be_bytes().to_vec();
                        message.extend_from_slice(&bytes);
                        self.typed.push_back((self.number, bytes.len()));
                        if socket.send(Message::binary(message)).await.is_err() {
                            return Ok(None);
                        }
                    }
                    Typed::Bytes(_) => self.mirror.ring(),
                },
                _ = resized.recv() => {
                    self.mirror.measure();
                    self.tell_window(&mut socket).await?;
                }
            }
        }
    }

    async fn tell_window(&self, socket: &mut Socket) -> Result<(), Failure> {
        if self.watch { Ok(()) } else { self.tell(socket, &FromViewer::Window { size: self.mirror.window() }).await }
    }

    async fn tell(&self, socket: &mut Socket, message: &FromViewer) -> Result<(), Failure> {
        let text = serde_json::to_string(message).map_err(|error| Failure::Use(error.to_string()))?;
        socket.send(Message::text(text)).await.map_err(|error| Failure::Unreachable(format!("the connection broke: {error}")))
    }

    fn message(&mut self, message: Message) -> Result<Option<Left>, Failure> {
        match message {
            Message::Binary(bytes) => {
                let frames =
                    Frame::decode_all(&bytes).map_err(|error| Failure::Unreachable(format!("the transcript comes damaged: {error}")))?;
                self.mirror.frames(&frames);
                Ok(None)
            }
            Message::Text(text) => match serde_json::from_str(&text) {
                Ok(told) => Ok(self.told(told)),
                // A newer server's word; what matters comes in words that are known.
                Err(_) => Ok(None),
            },
            _ => Ok(None),
        }
    }

    fn told(&mut self, told: ToViewer) -> Option<Left> {
        match told {
            ToViewer::Hello { may_type, .. } => self.may_type = may_type && !self.watch,
            ToViewer::Typed { number } => self.typed.retain(|(of, _)| *of > number),
            ToViewer::Refused { number, reason } => {
                self.typed.retain(|(of, _)| *of != number);
                self.mirror.say(&reason);
            }
            ToViewer::Unheard { number } => {
                self.typed.retain(|(of, _)| *of != number);
                self.mirror.say("nobody said whether that was typed; look before you type it again");
            }
            ToViewer::Gap { reason, .. } => self.mirror.say(&format!("something is missing here: {reason}")),
            ToViewer::End { state } => return Some(Left::Ended(state)),
            ToViewer::Size { .. } | ToViewer::Unknown => {}
        }
        None
    }
}
