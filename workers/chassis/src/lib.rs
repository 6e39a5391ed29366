#![doc = include_str!("../README.md")]

pub mod clock;
pub mod config;
pub mod consume;
pub mod db;
pub mod dead;
pub mod error;
pub mod group;
pub mod idempotency;
pub mod kill;
pub mod lease;
pub mod outbox;
pub mod secret;
pub mod store;
pub mod stored;
pub mod streams;
pub mod stuck;
pub mod sweep;
pub mod task;
pub mod telemetry;
pub mod timer;
pub mod work;

use std::sync::Arc;

pub use config::Config;
pub use error::{Error, Result};
pub use work::Work;

/// What every role is given at start. Cheap to clone.
#[derive(Clone)]
pub struct Chassis {
    pub config: Arc<Config>,
    pub db: sqlx::PgPool,
    pub nats: async_nats::Client,
    pub connected: streams::Connected,
    pub jetstream: async_nats::jetstream::Context,
    pub store: store::Store,
    pub secrets: Arc<secret::Secrets>,
    pub publisher: outbox::Publisher,
    pub tasks: task::Tasks,
}

impl Chassis {
    /// Connects to everything, waiting for what is away and saying what it waits for, up to `config.start_wait`.
    pub async fn start(config: Config) -> Result<Self> {
        let config = Arc::new(config);
        let tasks = task::Tasks::default();
        let db = db::connect(&config).await?;
        let (nats, connected) = streams::connect(&config).await?;
        let jetstream = streams::context(&nats);
        streams::declare(&jetstream, &config).await?;
        let store = store::Store::connect(&config).await?;
        let secrets = Arc::new(secret::Secrets::new(&config.master_keys)?);
        let publisher = outbox::Publisher::start(db.clone(), jetstream.clone(), connected.clone(), &tasks);
        Ok(Self { config, db, nats, connected, jetstream, store, secrets, publisher, tasks })
    }

    /// Opens a transaction that carries commands and events out with its commit.
    pub async fn begin(&self) -> Result<Work> {
        Work::begin(self).await
    }
}
