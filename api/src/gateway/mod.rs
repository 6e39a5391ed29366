//! The other end of the supervisors' connections. A gateway holds no truth: what it is told it writes to Postgres or JetStream before it acknowledges, and what it tells it reads
//! from there. Events only say when to look; a look round at all connections, in batches, finds what they missed.

mod connection;
mod frames;
mod order;
mod uploads;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    extract::{State, WebSocketUpgrade},
    response::Response,
};
use tokio::sync::mpsc;
use towpath_chassis::{Chassis, Result, streams};
use towpath_run::report;
use towpath_schemas::{id::RunId, limit::GUEST_MESSAGE_BYTES, subject};

use crate::Api;

/// How often all connections are looked at: one batch of each query, however many there are.
const LOOK: Duration = Duration::from_secs(5);
/// How often the OUTPUT stream's identity is looked at.
const STREAM_LOOK: Duration = Duration::from_secs(2);
/// Nudges that wait for one connection.
const NUDGES: usize = 64;

/// Which sandbox a connection is of.
pub(crate) type Key = (RunId, i32);

/// The newest connection of each sandbox, with a number for leaving.
type Connections = HashMap<Key, (u64, mpsc::Sender<Nudge>)>;

/// What a connection is told by its gateway.
#[derive(Debug, Clone)]
pub(crate) enum Nudge {
    /// What Postgres says of it.
    Standing(report::Standing),
    /// Frames up to here are sealed.
    Sealed(u64),
    /// Steers wait for it.
    Steers,
    /// JetStream has forgotten what it held.
    StreamReset,
}

/// The connections of this process.
#[derive(Clone)]
pub struct Gateway {
    pub(crate) chassis: Chassis,
    connections: Arc<Mutex<Connections>>,
    entered: Arc<AtomicU64>,
}

impl Gateway {
    pub fn start(chassis: &Chassis) -> Self {
        let gateway = Self { chassis: chassis.clone(), connections: Arc::default(), entered: Arc::default() };
        let (looker, watcher) = (gateway.clone(), gateway.clone());
        chassis.tasks.spawn(async move { looker.look_round().await });
        chassis.tasks.spawn(async move { watcher.watch_stream().await });
        gateway
    }

    /// Connected sandboxes.
    pub fn connected(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a connection in the place of an older one of the same sandbox; the number is for leaving.
    pub(crate) fn enter(&self, key: Key) -> (u64, mpsc::Receiver<Nudge>) {
        let (sender, receiver) = mpsc::channel(NUDGES);
        let mut connections = self.lock();
        let number = self.entered.fetch_add(1, Ordering::Relaxed);
        connections.insert(key, (number, sender));
        (number, receiver)
    }

    pub(crate) fn leave(&self, key: Key, number: u64) {
        let mut connections = self.lock();
        if connections.get(&key).is_some_and(|(current, _)| *current == number) {
            connections.remove(&key);
        }
    }

    fn keys(&self) -> Vec<Key> {
        self.lock().keys().copied().collect()
    }

    fn nudge(&self, key: Key, nudge: Nudge) {
        if let Some((_, sender)) = self.lock().get(&key) {
            // A full queue is being worked off; the next look comes soon.
            let _ = sender.try_send(nudge);
        }
    }

    async fn look_round(&self) {
        while self.chassis.tasks.sleep(LOOK).await {
            let keys = self.keys();
            if keys.is_empty() {
                continue;
            }
            if let Err(error) = self.look(&keys).await {
                tracing::warn!(error = error.chain(), "the connections are looked at again later");
            }
        }
    }

    async fn look(&self, keys: &[Key]) -> Result<()> {
        towpath_sandbox::heard(&self.chassis.db, keys).await?;
        for standing in report::standings(&self.chassis, keys).await? {
            self.nudge((standing.run, standing.epoch), Nudge::Standing(standing));
        }
        for (run, epoch, sealed) in towpath_transcript::marks(&self.chassis.db, keys).await? {
            self.nudge((run, epoch), Nudge::Sealed(sealed));
        }
        let mut waiting: Vec<RunId> = towpath_steer::to_send(&self.chassis.db, keys).await?.into_iter().map(|(run, _)| run).collect();
        waiting.dedup();
        for key in keys.iter().filter(|(run, _)| waiting.contains(run)) {
            self.nudge(*key, Nudge::Steers);
        }
        Ok(())
    }

    /// A stream that was made anew holds nothing of what was stored in the old one. The first look comes before the first connection.
    async fn watch_stream(&self) {
        let mut known = None;
        loop {
            match self.chassis.jetstream.get_stream(subject::OUTPUT).await {
                Ok(stream) => {
                    let created = stream.cached_info().created;
                    if known.is_some_and(|known| known != created) {
                        tracing::warn!("the OUTPUT stream was made anew; unsealed frames are asked for again");
                        for key in self.keys() {
                            self.nudge(key, Nudge::StreamReset);
                        }
                    }
                    known = Some(created);
                }
                Err(error) => {
                    tracing::warn!(%error, "the OUTPUT stream is away");
                    if let Err(error) = streams::declare(&self.chassis.jetstream, &self.chassis.config).await {
                        tracing::warn!(error = error.chain(), "the streams cannot be made yet");
                    }
                }
            }
            if !self.chassis.tasks.sleep(STREAM_LOOK).await {
                return;
            }
        }
    }
}

/// `GET /sandbox`: one WebSocket for each sandbox; its first message proves who speaks.
pub async fn connect(State(api): State<Api>, upgrade: WebSocketUpgrade) -> Response {
    upgrade
        .max_message_size(GUEST_MESSAGE_BYTES)
        .max_frame_size(GUEST_MESSAGE_BYTES)
        .on_upgrade(move |socket| connection::run(api.gateway, socket))
}
