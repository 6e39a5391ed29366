//! All SQL of `delivery`.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::PgPool;
use towpath_chassis::{Chassis, Error, Result, Work, clock, timer};
use towpath_schemas::{
    ErrorCode,
    body::Delivery,
    command::Command,
    id::{DeliveryId, InboundId, RunId, TenantId},
    limit::PAGE_ROWS,
};
use uuid::Uuid;

use crate::{state::Next, sweep::TIMER};

/// A sender that has not recorded its answer by then is taken for dead, and the delivery is sent again under the same id.
const CLAIM: Duration = Duration::from_secs(60);

/// What a delivery tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum About {
    /// How a run ended.
    RunEnded,
    /// Nobody knows whether the run's sandbox is there; it goes on, or may.
    SandboxUnknown,
    /// A message started a run.
    Accepted,
    /// A message waits for a run to end.
    Waits,
    /// A message was not taken, and why.
    Refused,
    /// The answer to somebody who asked how it stands.
    Status,
    /// A run ended, and nobody knows whether it had read a message.
    Unread,
    /// To a channel's owner: what nobody else hears of.
    ChannelNotice,
    /// To a channel's owner: nothing can be sent by it any more.
    ChannelBroken,
}

impl About {
    /// The word in the row; the type of a body is `event`.
    fn word(self) -> &'static str {
        match self {
            About::RunEnded => "run_ended",
            About::SandboxUnknown => "sandbox_unknown",
            About::Accepted => "accepted",
            About::Waits => "waits",
            About::Refused => "refused",
            About::Status => "status",
            About::Unread => "unread",
            About::ChannelNotice => "channel_notice",
            About::ChannelBroken => "channel_broken",
        }
    }

    pub fn event(self) -> &'static str {
        match self {
            About::RunEnded => "run.ended",
            About::SandboxUnknown => "run.sandbox_unknown",
            About::Accepted => "message.accepted",
            About::Waits => "message.waits",
            About::Refused => "message.refused",
            About::Status => "message.status",
            About::Unread => "message.unread",
            About::ChannelNotice => "channel.notice",
            About::ChannelBroken => "channel.broken",
        }
    }
}

/// What a target is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetKind {
    Webhook,
    /// A thread of a channel.
    Thread,
}

impl TargetKind {
    /// The word in the row.
    pub fn word(self) -> &'static str {
        match self {
            TargetKind::Webhook => "webhook",
            TargetKind::Thread => "thread",
        }
    }

    fn words() -> Vec<String> {
        [TargetKind::Webhook, TargetKind::Thread].map(|kind| kind.word().to_owned()).into()
    }

    /// None for a kind that a newer release knows.
    pub fn of(word: &str) -> Option<Self> {
        [TargetKind::Webhook, TargetKind::Thread].into_iter().find(|kind| kind.word() == word)
    }
}

/// One result or notice owed to one target. It is about a run, or about a message of a channel, or both.
#[derive(Debug, Clone)]
pub struct Owed {
    pub tenant: TenantId,
    pub run: Option<RunId>,
    /// (inbound, about) is owed once.
    pub inbound: Option<InboundId>,
    /// The target's place among the run's; (run, n, about) is owed once.
    pub n: i32,
    /// How long it waits first: what it tells may have come to nothing by then.
    pub after: Duration,
    pub about: About,
    pub kind: TargetKind,
    pub url: String,
    pub secret: Option<Vec<u8>>,
    pub body: serde_json::Value,
    pub traceparent: Option<String>,
}

/// A delivery to be sent now.
#[derive(Debug, Clone)]
pub struct Due {
    pub id: DeliveryId,
    pub tenant: TenantId,
    pub run: Option<RunId>,
    pub inbound: Option<InboundId>,
    pub n: i32,
    pub kind: TargetKind,
    pub target: String,
    pub secret: Option<Vec<u8>>,
    pub body: serde_json::Value,
    pub attempts: i32,
    pub claim: i64,
    pub traceparent: Option<String>,
    /// Since it was owed.
    pub age: Duration,
    /// When it was claimed, by the database's clock: what its signature is dated with.
    pub claimed_at: DateTime<Utc>,
}

impl Due {
    pub fn is_about(&self, about: About) -> bool {
        self.body["type"] == about.event()
    }
}

/// Owes results and notices, with the transaction that makes them true.
pub async fn create(work: &mut Work, owed: &[Owed]) -> Result<()> {
    for owed in owed {
        let created = sqlx::query_scalar!(
            "insert into delivery (id, tenant_id, run_id, n, about, kind, target, secret, body, state, next_attempt_at, traceparent, inbound_id)
             values ($1, $2, $3, $4, $9, $10, $5, $6, $7, 'pending', now() + make_interval(secs => $12), $8, $11) on conflict do nothing returning id",
            DeliveryId::mint().uuid(),
            owed.tenant.uuid(),
            owed.run.map(RunId::uuid),
            owed.n,
            owed.url,
            owed.secret,
            owed.body,
            owed.traceparent,
            owed.about.word(),
            owed.kind.word(),
            owed.inbound.map(InboundId::uuid),
            owed.after.as_secs_f64()
        )
        .fetch_optional(work.db())
        .await?;
        match created {
            Some(delivery) if owed.after.is_zero() => work.command(Command::Deliver { tenant: owed.tenant, delivery: delivery.into() }),
            Some(delivery) => timer::set(work, &[(TIMER, DeliveryId(delivery).to_string(), owed.after)]).await?,
            None => {}
        }
    }
    Ok(())
}

/// Takes those of `ids` that are due. What is taken is `sending` and due again when its sender does not come back.
pub(crate) async fn claim(work: &mut Work, ids: &[DeliveryId]) -> Result<Vec<Due>> {
    let ids: Vec<Uuid> = ids.iter().map(|id| id.uuid()).collect();
    let rows = sqlx::query!(
        r#"update delivery set state = 'sending', attempts = attempts + 1, claim = claim + 1, next_attempt_at = now() + make_interval(secs => $2)
           where id in (select id from delivery where id = any($1) and next_attempt_at <= now() and kind = any($3) order by id for update skip locked)
           returning id, run_id, inbound_id, tenant_id, n, kind, target, secret, body as "body!", attempts, claim, traceparent,
               extract(epoch from now() - created_at)::float8 as "age!", now() as "claimed_at!""#,
        &ids,
        clock::scaled(CLAIM).as_secs_f64(),
        &TargetKind::words()
    )
    .fetch_all(work.db())
    .await?;
    rows.into_iter()
        .map(|row| {
            Ok(Due {
                id: row.id.into(),
                tenant: row.tenant_id.into(),
                run: row.run_id.map(RunId),
                inbound: row.inbound_id.map(InboundId),
                n: row.n,
                kind: TargetKind::of(&row.kind).ok_or_else(|| Error::broken(format!("delivery: kind `{}`", row.kind)))?,
                target: row.target,
                secret: row.secret,
                body: row.body,
                attempts: row.attempts,
                claim: row.claim,
                traceparent: row.traceparent,
                age: Duration::try_from_secs_f64(row.age).unwrap_or_default(),
                claimed_at: row.claimed_at,
            })
        })
        .collect()
}

/// Whether the acknowledgement of a message is still owed.
pub async fn acknowledging(db: &PgPool, message: InboundId) -> Result<bool> {
    Ok(sqlx::query_scalar!(
        r#"select exists (select 1 from delivery where inbound_id = $1 and about = 'accepted' and ended_at is null) as "owed!""#,
        message.uuid()
    )
    .fetch_one(db)
    .await?)
}

/// Records what came of an attempt, unless the delivery was claimed anew meanwhile. A late answer of 2xx still counts: it did arrive.
pub(crate) async fn record(work: &mut Work, due: &Due, next: &Next, answer: &str) -> Result<bool> {
    let (state, after, unclaimed_too, uncounted) = match next {
        Next::Delivered => ("delivered", None, true, 0),
        Next::Again { after, unknown: false } => ("pending", Some(after.as_secs_f64()), false, 0),
        Next::Again { after, unknown: true } => ("unknown", Some(after.as_secs_f64()), false, 0),
        Next::Held { after } => ("pending", Some(after.as_secs_f64()), false, 1),
        Next::Dead => ("dead", None, false, 0),
    };
    let done = sqlx::query!(
        "update delivery set state = $3, answer = $4, attempts = attempts - $7, next_attempt_at = now() + make_interval(secs => $5),
             ended_at = case when $5::float8 is null then now() end, secret = case when $5::float8 is null then null else secret end
         where id = $1 and ended_at is null and (claim = $2 or $6)",
        due.id.uuid(),
        due.claim,
        state,
        answer,
        after,
        unclaimed_too,
        uncounted
    )
    .execute(work.db())
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Open deliveries that should have moved by now.
pub(crate) async fn overdue(db: &PgPool, by: Duration) -> Result<Vec<(TenantId, DeliveryId)>> {
    let rows = sqlx::query!(
        "select tenant_id, id from delivery where next_attempt_at < now() - make_interval(secs => $1) order by next_attempt_at limit 1000",
        by.as_secs_f64()
    )
    .fetch_all(db)
    .await?;
    Ok(rows.into_iter().map(|row| (row.tenant_id.into(), row.id.into())).collect())
}

pub(crate) async fn tenant_of(work: &mut Work, ids: &[DeliveryId]) -> Result<Vec<(TenantId, DeliveryId)>> {
    let ids: Vec<Uuid> = ids.iter().map(|id| id.uuid()).collect();
    let rows = sqlx::query!("select tenant_id, id from delivery where id = any($1) and next_attempt_at is not null", &ids)
        .fetch_all(work.db())
        .await?;
    Ok(rows.into_iter().map(|row| (row.tenant_id.into(), row.id.into())).collect())
}

pub async fn of_run(db: &PgPool, tenant: TenantId, run: RunId) -> Result<Vec<Delivery>> {
    let rows = sqlx::query!(
        "select id, kind, about, target, state, attempts, answer, next_attempt_at, created_at, ended_at from delivery where run_id = $1 and tenant_id = $2 order by n, created_at limit $3",
        run.uuid(),
        tenant.uuid(),
        PAGE_ROWS
    )
    .fetch_all(db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| Delivery {
            id: row.id.into(),
            run,
            kind: row.kind,
            about: row.about,
            target: row.target,
            state: row.state,
            attempts: row.attempts,
            answer: row.answer,
            next_attempt_at: row.next_attempt_at,
            created_at: row.created_at,
            ended_at: row.ended_at,
        })
        .collect())
}

/// Sends an open delivery now, whatever wait it is in. The secret of one that has ended is gone with it, so an ended one stays as it is.
pub async fn retry(chassis: &Chassis, tenant: TenantId, delivery: DeliveryId) -> Result<()> {
    let mut work = chassis.begin().await?;
    let found = sqlx::query!(
        "update delivery set next_attempt_at = case when state in ('pending', 'unknown') then now() else next_attempt_at end where id = $1 and tenant_id = $2 returning state",
        delivery.uuid(),
        tenant.uuid()
    )
    .fetch_optional(work.db())
    .await?;
    match found.as_ref().map(|row| row.state.as_str()) {
        None => Err(Error::refused(ErrorCode::NotFound, format!("there is no delivery {delivery}"))),
        Some(state @ ("delivered" | "dead")) => Err(Error::refused(ErrorCode::Unprocessable, format!("the delivery has ended: {state}"))),
        Some(_) => {
            work.command(Command::Deliver { tenant, delivery });
            work.commit().await
        }
    }
}

/// Deliveries that are due, and for how many seconds the oldest has been.
pub async fn due(db: &PgPool) -> Result<(i64, f64)> {
    let row = sqlx::query!(
        r#"select count(*) as "count!", coalesce(extract(epoch from now() - min(next_attempt_at)), 0)::float8 as "age!" from delivery where next_attempt_at <= now()"#
    )
    .fetch_one(db)
    .await?;
    Ok((row.count, row.age))
}

/// A delivery came back after it had been taken: it did not arrive after all, and its owner reads why.
pub async fn bounced(work: &mut Work, tenant: TenantId, delivery: DeliveryId, answer: &str) -> Result<bool> {
    let done = sqlx::query!(
        "update delivery set state = 'dead', answer = $3, next_attempt_at = null, ended_at = coalesce(ended_at, now()), secret = null where id = $1 and tenant_id = $2",
        delivery.uuid(),
        tenant.uuid(),
        answer
    )
    .execute(work.db())
    .await?;
    Ok(done.rows_affected() == 1)
}

/// An answer that was given up.
#[derive(Debug, Clone)]
pub struct GivenUp {
    pub id: DeliveryId,
    pub tenant: TenantId,
    /// The message that it answers.
    pub inbound: InboundId,
    pub run: Option<RunId>,
    pub answer: String,
}

/// Answers to threads that were given up since, up to `most`: each is handed out once, with the transaction that tells somebody. The message that started a run has
/// the run's uuid.
pub async fn given_up(work: &mut Work, most: i64) -> Result<Vec<GivenUp>> {
    let rows = sqlx::query!(
        r#"update delivery set told_at = now() where id in (select id from delivery where state = 'dead' and kind = 'thread' and told_at is null
               order by ended_at limit $1 for update skip locked)
           returning id, tenant_id, run_id, coalesce(inbound_id, run_id) as "inbound!", coalesce(answer, '') as "answer!""#,
        most
    )
    .fetch_all(work.db())
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| GivenUp {
            id: row.id.into(),
            tenant: row.tenant_id.into(),
            inbound: row.inbound.into(),
            run: row.run_id.map(RunId),
            answer: row.answer,
        })
        .collect())
}

/// Forgets what was owed for removed runs.
pub async fn remove(work: &mut Work, runs: &[RunId]) -> Result<()> {
    let runs: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    sqlx::query!("delete from delivery where run_id = any($1)", &runs).execute(work.db()).await?;
    Ok(())
}
