//! What is new of a run, for everybody in this process who follows it: one subscription and one look at Postgres, however many they are. A follower who does not
//! keep up costs nothing here; it reads again from where it was.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use async_nats::Subscriber;
use futures::StreamExt;
use tokio::sync::{Mutex, broadcast, watch};
use tokio_util::sync::{CancellationToken, DropGuard};
use towpath_chassis::{Chassis, Error, Result};
use towpath_run::view;
use towpath_schemas::{
    body::RunState,
    event,
    frame::Frame,
    id::{RunId, TenantId},
    subject,
};
use towpath_transcript::reader::Live;

/// Frames that a follower may be behind before it reads history again.
const AHEAD: usize = 256;
/// How often a run is looked at without an event.
const LOOK: Duration = Duration::from_secs(5);

type Key = (TenantId, RunId);

/// The feeds of this process, each for as long as somebody follows.
#[derive(Clone)]
pub struct Feeds {
    chassis: Chassis,
    feeds: Arc<Mutex<HashMap<Key, Weak<Feed>>>>,
}

/// One run's.
pub struct Feed {
    live: broadcast::Sender<Live>,
    state: watch::Receiver<(RunState, i64)>,
    _ends: DropGuard,
}

impl Feed {
    /// What is new from now on.
    pub fn live(&self) -> broadcast::Receiver<Live> {
        self.live.subscribe()
    }

    /// The run's state and revision.
    pub fn state(&self) -> watch::Receiver<(RunState, i64)> {
        self.state.clone()
    }
}

impl Feeds {
    pub fn new(chassis: &Chassis) -> Self {
        Self { chassis: chassis.clone(), feeds: Arc::default() }
    }

    pub async fn of(&self, tenant: TenantId, run: RunId) -> Result<Arc<Feed>> {
        let mut feeds = self.feeds.lock().await;
        if let Some(feed) = feeds.get(&(tenant, run)).and_then(Weak::upgrade) {
            return Ok(feed);
        }
        let feed = Arc::new(self.begin(tenant, run).await?);
        feeds.retain(|_, feed| feed.strong_count() > 0);
        feeds.insert((tenant, run), Arc::downgrade(&feed));
        Ok(feed)
    }

    async fn begin(&self, tenant: TenantId, run: RunId) -> Result<Feed> {
        let listen = async |subject: String| {
            self.chassis.nats.subscribe(subject).await.map_err(|error| Error::Nats { doing: "subscribe", detail: error.to_string() })
        };
        // Listened to before anybody reads history: nothing falls between.
        let (frames, events) = (listen(subject::output_run(tenant, run)).await?, listen(subject::event_run(tenant, run)).await?);
        let (live, _) = broadcast::channel(AHEAD);
        let (told, state) = watch::channel(view::state(&self.chassis.db, tenant, run).await?);
        let ends = CancellationToken::new();
        let feeding = Feeding { chassis: self.chassis.clone(), tenant, run, live: live.clone(), told };
        let (stop, end) = (self.chassis.tasks.stopping(), ends.clone());
        self.chassis.tasks.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = end.cancelled() => {}
                () = feeding.go(frames, events) => {}
            }
        });
        Ok(Feed { live, state, _ends: ends.drop_guard() })
    }
}

struct Feeding {
    chassis: Chassis,
    tenant: TenantId,
    run: RunId,
    live: broadcast::Sender<Live>,
    told: watch::Sender<(RunState, i64)>,
}

impl Feeding {
    async fn go(self, mut frames: Subscriber, mut events: Subscriber) {
        let mut look = tokio::time::interval(LOOK);
        look.tick().await;
        loop {
            tokio::select! {
                message = frames.next() => {
                    let Some(message) = message else { return };
                    if let Ok((frame, _)) = Frame::decode(&message.payload) {
                        self.tell(Live::Frame(Arc::new(frame)));
                    }
                }
                event = events.next() => {
                    let Some(event) = event else { return };
                    match serde_json::from_slice(&event.payload) {
                        Ok(event::Kind::Moved { .. } | event::Kind::Closed { .. }) => self.look().await,
                        Ok(event::Kind::Sealed { .. } | event::Kind::Hole { .. } | event::Kind::Unknown) | Err(_) => {}
                    }
                }
                _ = look.tick() => self.look().await,
            }
        }
    }

    /// Nobody may listen at the moment.
    fn tell(&self, live: Live) {
        let _ = self.live.send(live);
    }

    async fn look(&self) {
        if let Err(error) = self.try_look().await {
            tracing::debug!(run = %self.run, error = error.chain(), "the run is looked at again later");
        }
    }

    async fn try_look(&self) -> Result<()> {
        let state = view::state(&self.chassis.db, self.tenant, self.run).await?;
        self.told.send_if_modified(|told| std::mem::replace(told, state) != state);
        self.tell(Live::Records(Arc::new(towpath_transcript::records(&self.chassis.db, self.tenant, self.run).await?)));
        Ok(())
    }
}
