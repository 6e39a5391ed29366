//! The three JetStream streams and their consumers, declared in one place.

use std::time::{Duration, Instant};

use async_nats::{
    Client, ConnectOptions, Event,
    jetstream::{
        self, Context,
        consumer::{AckPolicy, PullConsumer, pull},
        stream::{Config as StreamConfig, DiscardPolicy, RetentionPolicy, StorageType},
    },
};
use tokio::sync::watch;
use towpath_schemas::subject;

use crate::{Config, Error, Result, clock};

/// Bytes of commands that JetStream may hold; beyond it a publish fails and the row stays in the outbox.
const COMMAND_BYTES: i64 = 256 << 20;
/// How long facts stay on the EVENT stream for a curious operator.
const EVENT_AGE: Duration = Duration::from_secs(3600);
const EVENT_BYTES: i64 = 64 << 20;
/// Unacknowledged messages that one consumer may have out.
pub const ACK_PENDING: i64 = 4096;

/// Messages that wait for one subscriber in this process; what comes on top is dropped, and the subscriber finds the hole and reads it back.
const SUBSCRIPTION_MESSAGES: usize = 512;

fn nats_error(doing: &'static str, error: impl std::fmt::Display) -> Error {
    Error::Nats { doing, detail: error.to_string() }
}

/// Changes whenever a connection is there. What was asked over the one before may be lost, and the client does not ask again: its caller would wait in vain.
pub type Connected = watch::Receiver<()>;

/// Connects, waiting for a server that is away up to `start_wait`; afterwards the client reconnects by itself for ever.
pub async fn connect(config: &Config) -> Result<(Client, Connected)> {
    let url: url::Url = config.nats_url.0.parse().map_err(|_| Error::Config("TOWPATH_NATS_URL is no nats:// URL".to_owned()))?;
    let (user, password) = (url.username().to_owned(), url.password().unwrap_or_default().to_owned());
    let mut address = url.clone();
    let _ = address.set_username("").and_then(|()| address.set_password(None));
    let started = Instant::now();
    let (tell, connected) = watch::channel(());
    loop {
        let tell = tell.clone();
        let mut options = ConnectOptions::new()
            .name("towpath")
            .event_callback(move |event| {
                if event == Event::Connected {
                    tell.send_replace(());
                }
                std::future::ready(())
            })
            .ping_interval(Duration::from_secs(5))
            .connection_timeout(Duration::from_secs(3))
            .request_timeout(Some(Duration::from_secs(5)))
            .subscription_capacity(SUBSCRIPTION_MESSAGES)
            .reconnect_delay_callback(|attempts| Duration::from_millis((50 * attempts as u64).min(1000)));
        if !user.is_empty() {
            options = options.user_and_password(user.clone(), password.clone());
        }
        match options.connect(address.as_str()).await {
            Ok(client) => return Ok((client, connected)),
            Err(error) => {
                tracing::warn!(%error, "waiting for NATS");
                if started.elapsed() >= config.limits.start_wait {
                    return Err(nats_error("connect", error));
                }
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        }
    }
}

pub fn context(client: &Client) -> Context {
    jetstream::new(client.clone())
}

/// For how many seconds the oldest message of a stream has been there; 0 when it holds none. By the wall clock, for display.
pub async fn oldest_s(jetstream: &Context, stream: &str) -> Result<f64> {
    let info = jetstream.get_stream(stream).await.map_err(|error| nats_error("look at a stream", error))?.cached_info().clone();
    if info.state.messages == 0 {
        return Ok(0.0);
    }
    let since = clock::wall().timestamp_millis() as f64 / 1000.0 - info.state.first_timestamp.unix_timestamp_nanos() as f64 / 1e9;
    Ok(since.max(0.0))
}

/// Makes the streams when they are not there. Also called whenever one turns out to be gone: losing all of NATS loses nothing.
pub async fn declare(jetstream: &Context, config: &Config) -> Result<()> {
    let started = Instant::now();
    loop {
        match declare_once(jetstream, config).await {
            Ok(()) => return Ok(()),
            Err(error) => {
                tracing::warn!(error = %error, "waiting for JetStream");
                if started.elapsed() >= config.limits.start_wait {
                    return Err(error);
                }
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        }
    }
}

async fn declare_once(jetstream: &Context, config: &Config) -> Result<()> {
    let base = StreamConfig { storage: StorageType::File, discard: DiscardPolicy::New, allow_direct: true, ..StreamConfig::default() };
    let streams = [
        StreamConfig {
            name: subject::COMMAND.to_owned(),
            subjects: vec![subject::COMMAND_ALL.to_owned()],
            retention: RetentionPolicy::WorkQueue,
            max_bytes: COMMAND_BYTES,
            // A newer equal nudge takes the place of one that waits, so repeating them never fills the stream.
            max_messages_per_subject: 1,
            ..base.clone()
        },
        StreamConfig {
            name: subject::OUTPUT.to_owned(),
            subjects: vec![subject::OUTPUT_ALL.to_owned()],
            max_bytes: config.limits.output_stream_bytes,
            // What no purge took. The record and the spool are the truth; a run waits at most `seal_max` for its record.
            max_age: config.limits.seal_max * 2,
            ..base.clone()
        },
        StreamConfig {
            name: subject::EVENT.to_owned(),
            subjects: vec![subject::EVENT_ALL.to_owned()],
            discard: DiscardPolicy::Old,
            max_age: EVENT_AGE,
            max_bytes: EVENT_BYTES,
            ..base
        },
    ];
    for stream in streams {
        jetstream.get_or_create_stream(stream).await.map_err(|error| nats_error("declare stream", error))?;
    }
    Ok(())
}

/// The durable pull consumer of a role; made again when it has vanished.
pub async fn consumer(jetstream: &Context, name: &str, filter: &str, config: &Config) -> Result<PullConsumer> {
    let stream = jetstream.get_stream(subject::COMMAND).await.map_err(|error| nats_error("find stream", error))?;
    stream
        .get_or_create_consumer(
            name,
            pull::Config {
                durable_name: Some(name.to_owned()),
                filter_subject: filter.to_owned(),
                ack_policy: AckPolicy::Explicit,
                ack_wait: config.limits.ack_wait,
                max_ack_pending: ACK_PENDING,
                max_deliver: -1,
                ..pull::Config::default()
            },
        )
        .await
        .map_err(|error| nats_error("declare consumer", error))
}

/// Does JetStream answer, with the streams there?
pub async fn ping(jetstream: &Context) -> Result<()> {
    jetstream.get_stream(subject::COMMAND).await.map(|_| ()).map_err(|error| nats_error("find stream", error))
}
