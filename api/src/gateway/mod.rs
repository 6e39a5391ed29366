//! The other end of the supervisors' connections. A gateway holds no truth: what it is told it writes to Postgres or JetStream before it acknowledges, and what it tells it reads
//! from there. Events only say when to look; a look round at all connections, in batches, finds what they missed.

mod connection;
mod frames;
mod order;
mod uploads;

use std::{
    collections::{HashMap, HashSet},
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
use tokio::sync::{Notify, mpsc};
use towpath_chassis::{
    Chassis, Result,
    group::{Answer, Group, Lanes},
    streams,
};
use towpath_run::report::{self, Reporter, Reports};
use towpath_schemas::{guest::StartOrder, id::RunId, limit::GUEST_MESSAGE_BYTES, subject};

use crate::Api;

/// How often all connections are looked at.
const LOOK: Duration = Duration::from_secs(5);
/// Connections that one statement asks about.
const LOOK_KEYS: usize = 1000;
/// How long one look may take.
const LOOK_LIMIT: Duration = Duration::from_secs(10);
/// Batches of start orders at a time, and orders in each: an order may carry two texts of a MiB.
const ORDERS: Lanes = Lanes { lanes: 2, most: 32, limit: Duration::from_secs(10) };
/// How often the OUTPUT stream's identity is looked at.
const STREAM_LOOK: Duration = Duration::from_secs(2);
/// Nudges that wait for one connection.
const NUDGES: usize = 64;

/// Which sandbox a connection is of.
pub(crate) type Key = (RunId, i32);

/// The newest connection of each sandbox.
type Connections = HashMap<Key, Entered>;

struct Entered {
    /// For leaving.
    number: u64,
    nudges: mpsc::Sender<Nudge>,
    /// The lease that was asked for and not granted yet.
    lease: Option<u64>,
}

/// What a connection is told by its gateway.
#[derive(Debug, Clone)]
pub(crate) enum Nudge {
    /// What Postgres says of it.
    Standing(report::Standing),
    /// Frames up to here are sealed.
    Sealed(u64),
    /// Steers wait for it.
    Steers,
    /// It is committed that it got the lease that it asked for.
    Leased(u64),
    /// JetStream has forgotten what it held.
    StreamReset,
}

/// The connections of this process.
#[derive(Clone)]
pub struct Gateway {
    pub(crate) chassis: Chassis,
    pub(crate) reports: Reports,
    starts: Group<Reporter, Answer<StartOrder>>,
    connections: Arc<Mutex<Connections>>,
    entered: Arc<AtomicU64>,
    due: Arc<Due>,
}

/// Connections to look at before the next round, because something happened to their runs.
#[derive(Default)]
struct Due {
    keys: Mutex<HashSet<Key>>,
    wake: Notify,
}

impl Gateway {
    pub fn start(chassis: &Chassis) -> Self {
        let own = chassis.clone();
        let starts = Group::start(&chassis.tasks, ORDERS, move |reporters: Vec<Reporter>| {
            let chassis = own.clone();
            async move { order::starts(&chassis, &reporters).await }
        });
        let gateway = Self {
            chassis: chassis.clone(),
            reports: Reports::start(chassis),
            starts,
            connections: Arc::default(),
            entered: Arc::default(),
            due: Arc::default(),
        };
        let (looker, watcher) = (gateway.clone(), gateway.clone());
        chassis.tasks.keep("look at connections", move || {
            let looker = looker.clone();
            async move { looker.look_round().await }
        });
        chassis.tasks.keep("watch OUTPUT", move || {
            let watcher = watcher.clone();
            async move { watcher.watch_stream().await }
        });
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
        connections.insert(key, Entered { number, nudges: sender, lease: None });
        (number, receiver)
    }

    pub(crate) fn leave(&self, key: Key, number: u64) {
        let mut connections = self.lock();
        if connections.get(&key).is_some_and(|entered| entered.number == number) {
            connections.remove(&key);
        }
    }

    fn keys(&self) -> Vec<Key> {
        self.lock().keys().copied().collect()
    }

    fn nudge(&self, key: Key, nudge: Nudge) {
        if let Some(entered) = self.lock().get(&key) {
            // A full queue is being worked off; the next look comes soon.
            let _ = entered.nudges.try_send(nudge);
        }
    }

    /// A connection asks for a lease; the next look grants it.
    pub(crate) fn ask_lease(&self, key: Key, number: u64, lease: u64) {
        if let Some(entered) = self.lock().get_mut(&key).filter(|entered| entered.number == number) {
            entered.lease = Some(lease);
        }
    }

    /// The leases that these connections ask for.
    fn leases(&self, keys: &[Key]) -> Vec<(Key, u64)> {
        let connections = self.lock();
        keys.iter().filter_map(|key| Some((*key, connections.get(key)?.lease?))).collect()
    }

    /// Tells a connection of a lease. One that was asked for meanwhile waits for the next look.
    fn grant(&self, key: Key, lease: u64) {
        if let Some(entered) = self.lock().get_mut(&key) {
            entered.lease = entered.lease.filter(|asked| *asked != lease);
        }
        self.nudge(key, Nudge::Leased(lease));
    }

    /// Everything that a supervisor needs to run its command.
    pub(crate) async fn start_order(&self, reporter: &Reporter) -> Result<StartOrder> {
        Ok(self.starts.submit(reporter.clone()).await??)
    }

    /// Has this connection looked at without waiting for the next round. What many ask for at once is one look.
    pub(crate) fn look_soon(&self, key: Key) {
        self.due.keys.lock().unwrap_or_else(PoisonError::into_inner).insert(key);
        self.due.wake.notify_one();
    }

    async fn look_round(&self) {
        let stop = self.chassis.tasks.stopping();
        let mut round = tokio::time::Instant::now() + LOOK;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.due.wake.notified() => {}
                () = tokio::time::sleep_until(round) => {}
            }
            let due = std::mem::take(&mut *self.due.keys.lock().unwrap_or_else(PoisonError::into_inner));
            let everybody = tokio::time::Instant::now() >= round;
            let keys = if everybody { self.keys() } else { due.into_iter().collect() };
            for keys in keys.chunks(LOOK_KEYS) {
                match tokio::time::timeout(LOOK_LIMIT, self.look(keys, everybody)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::warn!(error = error.chain(), "the connections are looked at again later"),
                    Err(_) => tracing::warn!(limit = ?LOOK_LIMIT, "a look at the connections took too long"),
                }
            }
            if everybody {
                round = tokio::time::Instant::now() + LOOK;
            }
        }
    }

    async fn look(&self, keys: &[Key], everybody: bool) -> Result<()> {
        // Only what was asked for before it is committed that they get it.
        let leases = self.leases(keys);
        if !leases.is_empty() {
            let asking: Vec<Key> = leases.iter().map(|(key, _)| *key).collect();
            let leased = towpath_sandbox::lease(&self.chassis.db, &asking).await?;
            for (key, lease) in leases.into_iter().filter(|(key, _)| leased.contains(key)) {
                self.grant(key, lease);
            }
        }
        if everybody {
            towpath_sandbox::heard(&self.chassis.db, keys).await?;
            for (run, epoch, sealed) in towpath_transcript::marks(&self.chassis.db, keys).await? {
                self.nudge((run, epoch), Nudge::Sealed(sealed));
            }
        }
        for standing in report::standings(&self.chassis, keys).await? {
            self.nudge((standing.run, standing.epoch), Nudge::Standing(standing));
        }
        let runs: Vec<RunId> = keys.iter().map(|(run, _)| *run).collect();
        let waiting = towpath_steer::waiting(&self.chassis.db, &runs).await?;
        for key in keys.iter().filter(|(run, _)| waiting.contains(run)) {
            self.nudge(*key, Nudge::Steers);
        }
        Ok(())
    }

    /// A stream that was made anew holds nothing of what was stored in the old one. The first look comes before the first connection.
    async fn watch_stream(&self) {
        let mut known = None;
        let mut connected = self.chassis.connected.clone();
        loop {
            connected.mark_unchanged();
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
            tokio::select! {
                go_on = self.chassis.tasks.sleep(STREAM_LOOK) => if !go_on { return },
                // A server that is back may have come back empty.
                Ok(()) = connected.changed() => {}
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
