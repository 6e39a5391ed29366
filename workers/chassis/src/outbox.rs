//! The outbox: commands leave with the transaction that makes them necessary, are published right after its commit, and again by the relay
//! when that failed. Rows are found by age, never by "greater than the last seen number": commits become visible out of order.

use std::time::Duration;

use async_nats::jetstream::Context;
use futures::{StreamExt, stream::FuturesUnordered};
use sqlx::{PgConnection, PgPool};
use tokio::sync::mpsc;
use towpath_schemas::{command::Command, event, subject};

use crate::{Chassis, Error, Result, kill, streams::Connected, task::Tasks};

/// Rows that wait in memory to be published; more are left to the relay.
const QUEUE_ROWS: usize = 20_000;
/// Rows deleted by one statement.
const DELETE_ROWS: usize = 1000;
/// How long JetStream may take to acknowledge one command.
const PUBLISH_WAIT: Duration = Duration::from_secs(5);
/// How long telling an event may hold up its caller.
const TELL_WAIT: Duration = Duration::from_millis(100);
/// Age at which the relay takes a row for missed.
const MISSED_S: f64 = 2.0;
/// Rows that the relay takes at a time.
const RELAY_ROWS: i64 = 1000;

/// One row of the outbox.
#[derive(Debug, Clone)]
pub struct Row {
    pub id: i64,
    pub subject: String,
    pub body: serde_json::Value,
    pub traceparent: Option<String>,
}

/// Where a command goes.
pub fn subject_of(command: &Command) -> Option<String> {
    Some(match command {
        Command::Admit { pool } => subject::admit(pool),
        Command::Host { host, run } => subject::host(host, *run),
        Command::Seal { tenant, run, epoch } => subject::seal(*tenant, *run, *epoch),
        Command::Observed { tenant, run, epoch } => subject::observed(*tenant, *run, *epoch),
        Command::Sealed { tenant, run, epoch } => subject::sealed(*tenant, *run, *epoch),
        Command::Deliver { tenant, delivery } => subject::deliver(*tenant, *delivery),
        Command::Intake { tenant, inbound } => subject::intake(*tenant, *inbound),
        Command::Unknown => return None,
    })
}

pub(crate) async fn insert(
    db: &mut PgConnection,
    commands: impl Iterator<Item = Command>,
    traceparent: Option<String>,
) -> Result<Vec<Row>> {
    let mut subjects = Vec::new();
    let mut bodies = Vec::new();
    for command in commands {
        if let Some(subject) = subject_of(&command) {
            subjects.push(subject);
            bodies.push(serde_json::to_value(&command).map_err(|error| Error::broken(format!("command: {error}")))?);
        }
    }
    if subjects.is_empty() {
        return Ok(Vec::new());
    }
    let ids = sqlx::query_scalar!(
        r#"insert into outbox (subject, body, traceparent)
           select subject, body, $3 from unnest($1::text[], $2::jsonb[]) with ordinality as t (subject, body, n) order by n
           returning id"#,
        &subjects,
        &bodies,
        traceparent
    )
    .fetch_all(db)
    .await?;
    Ok(ids
        .into_iter()
        .zip(subjects.into_iter().zip(bodies))
        .map(|(id, (subject, body))| Row { id, subject, body, traceparent: traceparent.clone() })
        .collect())
}

/// Tells listeners a fact, at most once.
pub(crate) async fn tell(nats: &async_nats::Client, subject: String, kind: &event::Kind) {
    // While the connection is away its queue fills up, and waiting for room would hold up the caller.
    if nats.connection_state() != async_nats::connection::State::Connected {
        return;
    }
    let Ok(body) = serde_json::to_vec(kind) else { return };
    match tokio::time::timeout(TELL_WAIT, nats.publish(subject, body.into())).await {
        Ok(Ok(())) => {}
        Ok(Err(_)) | Err(_) => tracing::debug!("an event was not told; its listeners look by themselves"),
    }
}

/// Publishes rows after their commit, in the background.
#[derive(Clone)]
pub struct Publisher(mpsc::Sender<Row>);

impl Publisher {
    pub(crate) fn start(db: PgPool, jetstream: Context, connected: Connected, tasks: &Tasks) -> Self {
        let (sender, receiver) = mpsc::channel(QUEUE_ROWS);
        let stop = tasks.stopping();
        tasks.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = publish_all(receiver, db, jetstream, connected) => {}
            }
        });
        Self(sender)
    }

    pub(crate) fn publish(&self, rows: Vec<Row>) {
        for row in rows {
            if self.0.try_send(row).is_err() {
                metrics::counter!("towpath_outbox_left_to_relay_total").increment(1);
            }
        }
    }
}

async fn publish_all(mut rows: mpsc::Receiver<Row>, db: PgPool, jetstream: Context, connected: Connected) {
    let mut acks = FuturesUnordered::new();
    let mut done = Vec::new();
    loop {
        tokio::select! {
            biased;
            Some(id) = acks.next(), if !acks.is_empty() => {
                done.extend(id);
                if done.len() >= DELETE_ROWS || acks.is_empty() {
                    delete(&db, &mut done).await;
                }
            }
            row = rows.recv(), if acks.len() < DELETE_ROWS => match row {
                Some(row) => acks.push(publish(&jetstream, connected.clone(), row)),
                None => return,
            },
        }
    }
}

/// The row's id once JetStream holds it.
async fn publish(jetstream: &Context, mut connected: Connected, row: Row) -> Option<i64> {
    kill::point("publish").await;
    let mut headers = async_nats::HeaderMap::new();
    if let Some(traceparent) = &row.traceparent {
        headers.insert("traceparent", traceparent.as_str());
    }
    let body = bytes::Bytes::from(serde_json::to_vec(&row.body).ok()?);
    let stored = async {
        loop {
            connected.mark_unchanged();
            let once = async { jetstream.publish_with_headers(row.subject.clone(), headers.clone(), body.clone()).await?.await };
            tokio::select! {
                stored = once => return stored,
                // It may have been lost with the connection before; a second copy changes nothing.
                Ok(()) = connected.changed() => {}
            }
        }
    };
    match tokio::time::timeout(PUBLISH_WAIT, stored).await {
        Ok(Ok(_)) => Some(row.id),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a command was not published; the relay will");
            None
        }
        Err(_) => None,
    }
}

async fn delete(db: &PgPool, ids: &mut Vec<i64>) {
    let taken = std::mem::take(ids);
    if let Err(error) = sqlx::query!("delete from outbox where id = any($1)", &taken).execute(db).await {
        tracing::debug!(%error, "published rows stay in the outbox; the relay publishes them again");
    }
}

/// Publishes what was missed. Several relays at a time only publish twice, which changes nothing.
pub async fn relay(chassis: Chassis) -> Result<u64> {
    let rows = sqlx::query_as!(
        Row,
        "select id, subject, body, traceparent from outbox where created_at < now() - make_interval(secs => $1) order by id limit $2",
        MISSED_S,
        RELAY_ROWS
    )
    .fetch_all(&chassis.db)
    .await?;
    let missed = rows.len() as u64;
    let mut acks: FuturesUnordered<_> = rows.into_iter().map(|row| publish(&chassis.jetstream, chassis.connected.clone(), row)).collect();
    let mut done = Vec::new();
    while let Some(id) = acks.next().await {
        done.extend(id);
    }
    if !done.is_empty() {
        delete(&chassis.db, &mut done).await;
    }
    Ok(missed)
}

/// Age of the oldest row in seconds; 0 when there is none.
pub async fn oldest_s(db: &PgPool) -> Result<f64> {
    Ok(waiting(db).await?.1)
}

/// Puts a message that came from the stream back, for the relay to publish a while later.
pub(crate) async fn put_later(db: &PgPool, subject: &str, body: &serde_json::Value, after: Duration) -> Result<()> {
    sqlx::query!(
        "insert into outbox (subject, body, created_at) values ($1, $2, now() + make_interval(secs => $3))",
        subject,
        body,
        after.as_secs_f64()
    )
    .execute(db)
    .await?;
    Ok(())
}

/// Unpublished commands and the age of the oldest in seconds.
pub async fn waiting(db: &PgPool) -> Result<(i64, f64)> {
    let row = sqlx::query!(
        r#"select count(*) as "count!", coalesce(extract(epoch from now() - min(created_at)), 0)::float8 as "age!" from outbox"#
    )
    .fetch_one(db)
    .await?;
    Ok((row.count, row.age))
}
