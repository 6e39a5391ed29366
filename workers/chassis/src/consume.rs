//! The one pull loop. A handler gets a batch and says of each message `Done`, `Later` or `Dead`. A whole batch that fails is halved until the bad message
//! stands alone; passing trouble never counts against a message, trouble of its own is counted in Postgres and at last laid aside with its reason
//! (field cases F20, F21).

use std::{future::Future, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use async_nats::jetstream::{
    self, AckKind,
    consumer::{PullConsumer, pull},
};
use futures::{FutureExt, StreamExt, future::BoxFuture};
use towpath_schemas::command::Command;
use tracing::Instrument;

use crate::{
    Chassis, Error, Result, kill, outbox,
    streams::{self, Connected},
    telemetry,
};

/// What becomes of one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All effects are committed.
    Done,
    /// Again after a wait of at most [`LATER_MAX`]; longer waits are timers in Postgres and an acknowledgement.
    Later(Duration),
    /// Never: laid aside with this reason.
    Dead(String),
}

/// A delayed message keeps its place among the unacknowledged ones, so a long delay would block ready ones.
pub const LATER_MAX: Duration = Duration::from_secs(5);
/// Messages in one batch.
const BATCH: usize = 256;
/// How long one fetch waits for a first message.
const FETCH_WAIT: Duration = Duration::from_secs(2);
/// How long a fetch may take beyond its own wait until it is taken for lost.
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// How long a command that nobody here knows stays away.
const HANDED_ON: Duration = Duration::from_secs(30);
/// Batches that one consumer works on at a time.
const LANES: usize = 2;

type Run = dyn Fn(Chassis, Vec<Command>) -> BoxFuture<'static, Result<Vec<Outcome>>> + Send + Sync;

/// One consumer of the COMMAND stream and what handles its messages.
#[derive(Clone)]
pub struct Handler {
    /// Also the durable consumer's name.
    pub name: String,
    pub filter: String,
    run: Arc<Run>,
}

impl Handler {
    pub fn new<F, Fut>(name: impl Into<String>, filter: impl Into<String>, run: F) -> Self
    where
        F: Fn(Chassis, Vec<Command>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<Outcome>>> + Send + 'static,
    {
        Self { name: name.into(), filter: filter.into(), run: Arc::new(move |chassis, batch| Box::pin(run(chassis, batch))) }
    }

    /// Handles a batch, halving it on an error. Errors of single messages come back beside the outcomes of the others.
    pub fn handle<'a>(&'a self, chassis: &'a Chassis, batch: Vec<Command>) -> BoxFuture<'a, Vec<Result<Outcome>>> {
        Box::pin(async move {
            let size = batch.len();
            let limit = chassis.config.limits.handler;
            let handled = AssertUnwindSafe((self.run)(chassis.clone(), batch.clone())).catch_unwind();
            let result = match tokio::time::timeout(limit, handled).await {
                Ok(Ok(result)) => result,
                // A message that makes a handler panic is as bad as one that makes it fail.
                Ok(Err(_)) => Err(Error::broken(format!("{} panicked", self.name))),
                Err(_) => Err(Error::Nats { doing: "handle", detail: format!("took longer than {limit:?}") }),
            };
            match result {
                Ok(outcomes) if outcomes.len() == size => outcomes.into_iter().map(Ok).collect(),
                Ok(outcomes) => vec![Err(Error::broken(format!("{} answered {} of {size} messages", self.name, outcomes.len())))],
                Err(error) if size == 1 => vec![Err(error)],
                // The trouble is everybody's: no use in trying each by itself.
                Err(error) if error.is_passing() => (0..size).map(|_| Ok(Outcome::Later(Duration::from_millis(500)))).collect(),
                Err(_) => {
                    let mut left = batch;
                    let right = left.split_off(size / 2);
                    let mut outcomes = self.handle(chassis, left).await;
                    outcomes.extend(self.handle(chassis, right).await);
                    outcomes
                }
            }
        })
    }
}

/// Pulls and handles until the process drains. A consumer that vanished or stalls is made again.
pub async fn run(chassis: Chassis, handler: Handler) {
    let stop = chassis.tasks.stopping();
    while !chassis.tasks.is_stopping() {
        let consumer = match streams::consumer(&chassis.jetstream, &handler.name, &handler.filter, &chassis.config).await {
            Ok(consumer) => consumer,
            Err(error) => {
                tracing::warn!(consumer = handler.name, error = error.chain(), "no consumer yet");
                let _ = streams::declare(&chassis.jetstream, &chassis.config).await;
                chassis.tasks.sleep(Duration::from_millis(500)).await;
                continue;
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            result = pull(&chassis, &handler, &consumer) => {
                if let Err(error) = result {
                    tracing::warn!(consumer = handler.name, error = error.chain(), "pulling again");
                    chassis.tasks.sleep(Duration::from_millis(200)).await;
                }
            }
        }
    }
}

async fn pull(chassis: &Chassis, handler: &Handler, consumer: &PullConsumer) -> Result<()> {
    let lanes = Arc::new(tokio::sync::Semaphore::new(LANES));
    let mut connected = chassis.connected.clone();
    let mut idle = 0_u32;
    loop {
        let permit = lanes.clone().acquire_owned().await.map_err(|_| Error::broken("lanes closed"))?;
        let messages = fetch(consumer, &mut connected).await?;
        if messages.is_empty() {
            // A consumer that was deleted answers a fetch with silence (field case F7): ask for it by name now and then.
            idle += 1;
            if idle.is_multiple_of(3) {
                consumer.clone().info().await.map_err(|error| Error::Nats { doing: "look at consumer", detail: error.to_string() })?;
            }
            continue;
        }
        idle = 0;
        let (chassis, handler) = (chassis.clone(), handler.clone());
        chassis.tasks.clone().spawn(async move {
            work(&chassis, &handler, messages).await;
            drop(permit);
        });
    }
}

async fn fetch(consumer: &PullConsumer, connected: &mut Connected) -> Result<Vec<jetstream::Message>> {
    connected.mark_unchanged();
    // First what is there, at once; only when there is nothing wait for one.
    let batch = consumer.fetch().max_messages(BATCH).messages().await.map_err(not_fetched)?;
    let messages = take(batch, ANSWER_WAIT, connected).await?;
    if !messages.is_empty() {
        return Ok(messages);
    }
    let batch = consumer.batch().max_messages(1).expires(FETCH_WAIT).messages().await.map_err(not_fetched)?;
    take(batch, FETCH_WAIT + ANSWER_WAIT, connected).await
}

/// What a fetch brings. The client waits 5 s longer than the server does, and for ever where there is nothing to wait for; but over a new connection
/// nothing comes any more.
async fn take(mut batch: pull::Batch, most: Duration, connected: &mut Connected) -> Result<Vec<jetstream::Message>> {
    let mut messages = Vec::new();
    let late = tokio::time::sleep(most);
    tokio::pin!(late);
    loop {
        tokio::select! {
            biased;
            message = batch.next() => match message {
                Some(message) => messages.push(message.map_err(not_fetched)?),
                None => return Ok(messages),
            },
            Ok(()) = connected.changed() => return Ok(messages),
            () = &mut late => return Ok(messages),
        }
    }
}

fn not_fetched(error: impl std::fmt::Display) -> Error {
    Error::Nats { doing: "fetch", detail: error.to_string() }
}

async fn work(chassis: &Chassis, handler: &Handler, messages: Vec<jetstream::Message>) {
    metrics::counter!("towpath_messages_total", "consumer" => handler.name.clone()).increment(messages.len() as u64);
    let span = telemetry::span_from(
        "handle",
        messages.first().and_then(|m| m.headers.as_ref()?.get("traceparent")).map(ToString::to_string).as_deref(),
    );
    let mut commands = Vec::new();
    let mut known = Vec::new();
    for message in messages {
        match serde_json::from_slice::<Command>(&message.payload) {
            Ok(Command::Unknown) => hand_on(chassis, &message).await,
            Ok(command) => {
                commands.push(command);
                known.push(message);
            }
            Err(error) => {
                let aside = lay_aside(chassis, handler, &message, &format!("not a command: {error}"), 1).await;
                answer(&message, if aside.is_ok() { AckKind::Term } else { AckKind::Nak(Some(LATER_MAX)) }).await;
            }
        }
    }
    if commands.is_empty() {
        return;
    }
    let outcomes = handler.handle(chassis, commands).instrument(span).await;
    kill::point("acknowledge").await;
    for (message, outcome) in known.iter().zip(outcomes) {
        let kind = match outcome {
            Ok(Outcome::Done) => AckKind::Ack,
            Ok(Outcome::Later(wait)) => AckKind::Nak(Some(wait.min(LATER_MAX))),
            Ok(Outcome::Dead(reason)) => match lay_aside(chassis, handler, message, &reason, 1).await {
                Ok(()) => AckKind::Term,
                Err(_) => AckKind::Nak(Some(LATER_MAX)),
            },
            Err(error) => failed(chassis, handler, message, &error).await,
        };
        answer(message, kind).await;
    }
}

/// A command of a newer release goes back into the outbox, to come again when another process may be there: given back it would keep a place among the unacknowledged ones.
async fn hand_on(chassis: &Chassis, message: &jetstream::Message) {
    let put = match serde_json::from_slice(&message.payload) {
        Ok(body) => outbox::put_later(&chassis.db, message.subject.as_str(), &body, HANDED_ON).await,
        Err(error) => Err(Error::broken(error.to_string())),
    };
    answer(message, if put.is_ok() { AckKind::Ack } else { AckKind::Nak(Some(LATER_MAX)) }).await;
}

async fn answer(message: &jetstream::Message, kind: AckKind) {
    if let Err(error) = message.ack_with(kind).await {
        tracing::debug!(%error, "not acknowledged; it will come again and change nothing");
    }
}

/// Counts an attempt that failed for the message's own reason; the last one lays it aside.
async fn failed(chassis: &Chassis, handler: &Handler, message: &jetstream::Message, error: &Error) -> AckKind {
    let wait = AckKind::Nak(Some(LATER_MAX));
    tracing::warn!(consumer = handler.name, subject = %message.subject, error = error.chain(), "a message failed");
    if error.is_passing() {
        return wait;
    }
    let counted = sqlx::query_scalar!(
        "insert into attempt (role, message, count, error) values ($1, $2, 1, $3)
         on conflict (role, message) do update set count = attempt.count + 1, error = excluded.error, at = now() returning count",
        handler.name,
        message.subject.as_str(),
        error.chain()
    )
    .fetch_one(&chassis.db)
    .await;
    match counted {
        Ok(count) if count >= chassis.config.limits.attempts => match lay_aside(chassis, handler, message, &error.chain(), count).await {
            Ok(()) => AckKind::Term,
            Err(_) => wait,
        },
        Ok(_) | Err(_) => wait,
    }
}

async fn lay_aside(chassis: &Chassis, handler: &Handler, message: &jetstream::Message, reason: &str, attempts: i32) -> Result<()> {
    let body = serde_json::from_slice(&message.payload).unwrap_or(serde_json::Value::Null);
    let mut work = chassis.begin().await?;
    sqlx::query!(
        "insert into dead (role, subject, body, reason, attempts) values ($1, $2, $3, $4, $5)",
        handler.name,
        message.subject.as_str(),
        body,
        reason,
        attempts
    )
    .execute(work.db())
    .await?;
    sqlx::query!("delete from attempt where role = $1 and message = $2", handler.name, message.subject.as_str()).execute(work.db()).await?;
    metrics::counter!("towpath_dead_letters_total", "consumer" => handler.name.clone()).increment(1);
    tracing::error!(consumer = handler.name, subject = %message.subject, reason, attempts, "laid aside");
    work.commit().await
}
