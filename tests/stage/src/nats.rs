//! NATS with JetStream: one account for Towpath, and for tests as many more as asked for, since subjects and stream names are fixed.

use std::{fmt::Write, fs, path::PathBuf, process::Command, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use async_nats::{Client, ConnectOptions, ServerAddr};
use rustix::process::Signal;

use crate::{probe, process::Slot, record::write_private, servers::Home, tool};

const READY: Duration = Duration::from_secs(30);
const STOP: Duration = Duration::from_secs(10);
const CONNECT: Duration = Duration::from_secs(5);

/// A NATS server of ours.
pub struct Nats {
    home: Arc<Home>,
    pub(crate) slot: Slot,
}

/// An account of the shared server for one test, empty at first; it is free again when this is dropped.
pub struct NatsLease {
    /// With user and password.
    pub url: String,
    /// The account's and the user's name.
    pub account: String,
    pub(crate) _lock: fs::File,
}

/// Connects with the user and password that the URL carries (async-nats itself leaves those in a URL alone).
pub async fn connect(url: &str) -> Result<Client> {
    let address: ServerAddr = url.parse().context("parse the NATS URL")?;
    let options = match (address.username(), address.password()) {
        (Some(user), Some(password)) => ConnectOptions::with_user_and_password(user.to_owned(), password.to_owned()),
        _ => ConnectOptions::new(),
    };
    options.connection_timeout(CONNECT).connect(address).await.context("connect to NATS")
}

impl Nats {
    pub(crate) fn new(home: Arc<Home>) -> Self {
        let slot = Slot::new("nats", home.log("nats"), home.detached, home.record().running.nats.clone());
        Self { home, slot }
    }

    /// Of the account `towpath`, with user and password.
    pub fn url(&self) -> String {
        url(&self.home, "towpath")
    }

    /// Starts it unless it runs, on the same port and store as before, and returns once JetStream answers.
    pub async fn start(&self) -> Result<()> {
        if !self.slot.alive() {
            let program = tool::find("nats-server", "TOWPATH_NATS_SERVER")?;
            let config = self.home.dir.join("nats.conf");
            write_private(&config, self.config()?.as_bytes())?;
            let mut command = Command::new(program);
            command.arg("--config").arg(config);
            self.slot.spawn(command)?;
            self.home.update(|record| record.running.nats = self.slot.identity())?;
        }
        probe::ready(&self.slot, READY, async || {
            let client = connect(&self.url()).await?;
            let answer = client.request("$JS.API.INFO", "".into()).await?;
            anyhow::ensure!(!answer.payload.windows(7).any(|part| part == b"\"error\""), "JetStream is not up yet");
            Ok(())
        })
        .await
    }

    /// SIGKILL.
    pub fn kill9(&self) -> Result<()> {
        self.slot.kill9()?;
        self.home.update(|record| record.running.nats = None)
    }

    /// An orderly stop.
    pub async fn stop(&self) -> Result<()> {
        self.slot.stop(Signal::TERM, STOP).await?;
        self.home.update(|record| record.running.nats = None)
    }

    /// Kills it if it runs and throws its store away: every stream, message and consumer of every account is lost. `start` brings it back empty.
    pub fn wipe(&self) -> Result<()> {
        self.kill9()?;
        let store = self.store();
        match fs::remove_dir_all(&store) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).with_context(|| format!("remove {}", store.display())),
            _ => Ok(()),
        }
    }

    fn store(&self) -> PathBuf {
        self.home.dir.join("nats")
    }

    fn config(&self) -> Result<String> {
        let record = self.home.record();
        let mut text = String::new();
        writeln!(text, "listen: \"127.0.0.1:{}\"", record.nats_port)?;
        writeln!(text, "server_name: towpath-stage")?;
        // Streams reserve their greatest size, and many tests' streams stand beside each other: the server must not count that against the disk.
        let limit = if record.accounts > 0 { ", max_file_store: 1PB" } else { "" };
        writeln!(text, "jetstream {{ store_dir: {:?}{limit} }}", self.store())?;
        writeln!(text, "accounts {{")?;
        let names = std::iter::once("towpath".to_owned()).chain((0..record.accounts).map(account));
        for name in names {
            writeln!(text, "  {name}: {{ jetstream: enabled, users: [ {{ user: {name}, password: {:?} }} ] }}", record.nats_password)?;
        }
        writeln!(text, "}}")?;
        Ok(text)
    }
}

/// The URL of an account.
pub(crate) fn url(home: &Home, account: &str) -> String {
    let record = home.record();
    format!("nats://{account}:{}@127.0.0.1:{}", record.nats_password, record.nats_port)
}

/// The name of a test account.
pub(crate) fn account(number: usize) -> String {
    format!("acc{number}")
}
