//! All SQL of `thread`, `thread_message`, `inbound` and `inbound_file`.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use towpath_chassis::{Chassis, Error, Result, Work, clock};
use towpath_schemas::{
    ErrorCode,
    body::Inbound,
    channel::ChannelDefinition,
    command::Command,
    id::{ChannelId, FileId, InboundId, PrincipalId, RunId, TenantId, ThreadId},
    limit::{INBOUND_DAYS, PAGE_ROWS},
};
use uuid::Uuid;

use crate::{message::Head, table::read_definition};

/// A worker that has not recorded what became of a message by then is taken for dead, and the message is taken in again under the same ids.
const CLAIM: Duration = Duration::from_secs(60);

/// How a mail was handed to us; of nothing else is there more than the message.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Envelope {
    /// Empty for `<>`.
    pub from: String,
    pub to: Vec<String>,
}

/// A message to be kept.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub id: InboundId,
    pub channel: ChannelId,
    pub delivery_key: String,
    pub message_key: String,
    pub envelope: Envelope,
    pub raw: Vec<u8>,
    pub traceparent: Option<String>,
}

/// Keeps messages, each once. For each whether it was new.
pub(crate) async fn keep(chassis: &Chassis, batch: &[Incoming]) -> Result<Vec<bool>> {
    let mut work = chassis.begin().await?;
    let ids: Vec<Uuid> = batch.iter().map(|incoming| incoming.id.uuid()).collect();
    let channels: Vec<Uuid> = batch.iter().map(|incoming| incoming.channel.uuid()).collect();
    let delivery_keys: Vec<&str> = batch.iter().map(|incoming| incoming.delivery_key.as_str()).collect();
    let message_keys: Vec<&str> = batch.iter().map(|incoming| incoming.message_key.as_str()).collect();
    let envelopes: Vec<serde_json::Value> = batch
        .iter()
        .map(|incoming| serde_json::to_value(&incoming.envelope).map_err(|error| Error::broken(format!("envelope: {error}"))))
        .collect::<Result<_>>()?;
    let raws: Vec<&[u8]> = batch.iter().map(|incoming| incoming.raw.as_slice()).collect();
    let traceparents: Vec<Option<&str>> = batch.iter().map(|incoming| incoming.traceparent.as_deref()).collect();
    let kept = sqlx::query!(
        "insert into inbound (id, tenant_id, channel_id, delivery_key, message_key, envelope, raw, state, next_attempt_at, traceparent)
         select new.id, tenant_id, channel.id, new.delivery_key, new.message_key, new.envelope, new.raw, 'received', now(), new.traceparent
         from unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::jsonb[], $6::bytea[], $7::text[])
             as new (id, channel_id, delivery_key, message_key, envelope, raw, traceparent)
         join channel on channel.id = new.channel_id and deleted_at is null
         order by channel.id, new.message_key, new.delivery_key
         on conflict do nothing returning id, tenant_id",
        &ids,
        &channels,
        &delivery_keys as &[&str],
        &message_keys as &[&str],
        &envelopes,
        &raws as &[&[u8]],
        &traceparents as &[Option<&str>]
    )
    .fetch_all(work.db())
    .await?;
    for row in &kept {
        work.command(Command::Intake { tenant: row.tenant_id.into(), inbound: row.id.into() });
    }
    let is_new = |id: &Uuid| kept.iter().any(|row| row.id == *id);
    if kept.len() < batch.len() {
        let known: Vec<Uuid> = sqlx::query_scalar!(
            r#"select new.id as "id!" from unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[]) as new (id, channel_id, delivery_key, message_key)
               where exists (select 1 from inbound where inbound.channel_id = new.channel_id
                   and (inbound.delivery_key = new.delivery_key or inbound.message_key = new.message_key))"#,
            &ids,
            &channels,
            &delivery_keys as &[&str],
            &message_keys as &[&str]
        )
        .fetch_all(work.db())
        .await?;
        // Nothing was kept of a message to a channel that was deleted meanwhile, and nobody may believe so.
        if let Some(lost) = batch.iter().find(|incoming| !is_new(&incoming.id.uuid()) && !known.contains(&incoming.id.uuid())) {
            return Err(Error::refused(ErrorCode::NotFound, format!("there is no channel {}", lost.channel)));
        }
    }
    work.commit().await?;
    Ok(ids.iter().map(is_new).collect())
}

/// A message that is being taken in.
#[derive(Debug, Clone)]
pub struct Claimed {
    pub id: InboundId,
    pub tenant: TenantId,
    pub channel: ChannelId,
    /// None when the channel was deleted.
    pub definition: Option<ChannelDefinition>,
    /// The channel's, sealed.
    pub secrets: Option<Vec<u8>>,
    /// The channel's system actor.
    pub actor: PrincipalId,
    pub envelope: Envelope,
    pub raw: Vec<u8>,
    pub attempts: i32,
    /// Its channel takes nothing now.
    pub paused: bool,
    /// How often it was a steer that its run did not take.
    pub steers: i32,
    /// An earlier attempt has opened a thread for it.
    pub opened: bool,
    pub traceparent: Option<String>,
    /// Since it came.
    pub age: Duration,
    claim: i64,
}

/// Takes those of `ids` that are due.
pub(crate) async fn claim(work: &mut Work, ids: &[InboundId]) -> Result<Vec<Claimed>> {
    let ids: Vec<Uuid> = ids.iter().map(|id| id.uuid()).collect();
    let rows = sqlx::query!(
        r#"update inbound set claim = claim + 1, next_attempt_at = now() + make_interval(secs => $2) from channel
           where channel.id = channel_id and inbound.id in
               (select id from inbound where id = any($1) and next_attempt_at <= now() order by id for update skip locked)
           returning inbound.id, inbound.tenant_id, channel_id, definition, secrets, deleted_at is not null as "deleted!", principal_id, envelope,
               raw as "raw!", attempts, paused_at is not null as "paused!", steers, coalesce(thread_id = inbound.id, false) as "opened!", traceparent,
               extract(epoch from now() - inbound.created_at)::float8 as "age!", claim"#,
        &ids,
        clock::scaled(CLAIM).as_secs_f64()
    )
    .fetch_all(work.db())
    .await?;
    rows.into_iter()
        .map(|row| {
            Ok(Claimed {
                id: row.id.into(),
                tenant: row.tenant_id.into(),
                channel: row.channel_id.into(),
                definition: (!row.deleted).then(|| read_definition(row.definition)).transpose()?,
                secrets: row.secrets,
                actor: row.principal_id.into(),
                envelope: serde_json::from_value(row.envelope).map_err(|error| Error::broken(format!("envelope: {error}")))?,
                raw: row.raw,
                attempts: row.attempts,
                paused: row.paused,
                steers: row.steers,
                opened: row.opened,
                traceparent: row.traceparent,
                age: Duration::try_from_secs_f64(row.age).unwrap_or_default(),
                claim: row.claim,
            })
        })
        .collect()
}

/// Where a message stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    Thread {
        thread: ThreadId,
        agent: String,
        /// It opened the thread.
        first: bool,
    },
    /// An earlier message, of its thread or one that it answers, is not through yet.
    Behind,
    /// So many of the thread were taken within the last hour.
    TooMany(i64),
    /// As many of the channel as it allows were taken within the last minute.
    TooManyOfChannel,
}

/// What places a message.
#[derive(Debug)]
pub(crate) struct Placing<'a> {
    pub head: &'a Head,
    /// A thread that the address proved.
    pub token: Option<ThreadId>,
    pub parents: &'a [String],
    pub agent: &'a str,
    pub most_an_hour: u32,
    pub most_a_minute: u32,
}

/// Notes who wrote a message and what an answer to it needs.
pub(crate) async fn know(work: &mut Work, claimed: &Claimed, head: &Head, author: Option<&str>) -> Result<()> {
    let head = serde_json::to_value(head).map_err(|error| Error::broken(format!("head: {error}")))?;
    sqlx::query!("update inbound set head = $2, author = $3 where id = $1", claimed.id.uuid(), head, author).execute(work.db()).await?;
    Ok(())
}

/// Whose thread a message belongs to that calls nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whose {
    Ours,
    /// One that it answers is not through yet.
    Open,
    /// No agent was called in it, as far as is known.
    Nobodys,
}

pub(crate) async fn whose(db: &PgPool, channel: ChannelId, message: InboundId, parents: &[String]) -> Result<Whose> {
    let row = sqlx::query!(
        r#"select exists (select 1 from thread_message where channel_id = $1 and message_id = any($2)) as "ours!",
                  exists (select 1 from inbound where channel_id = $1 and message_key = any($2) and id <> $3 and next_attempt_at is not null) as "open!""#,
        channel.uuid(),
        parents,
        message.uuid()
    )
    .fetch_one(db)
    .await?;
    Ok(if row.ours {
        Whose::Ours
    } else if row.open {
        Whose::Open
    } else {
        Whose::Nobodys
    })
}

/// Finds the thread of a message, or opens one.
pub(crate) async fn place(work: &mut Work, claimed: &Claimed, placing: &Placing<'_>) -> Result<Place> {
    let (id, channel) = (claimed.id.uuid(), claimed.channel.uuid());
    let found = sqlx::query_scalar!(
        r#"select coalesce((select thread_id from inbound where id = $1),
                  (select id from thread where id = $2 and channel_id = $3),
                  (select thread_id from thread_message where channel_id = $3 and message_id = any($4) order by array_position($4, message_id) limit 1))"#,
        id,
        placing.token.map(ThreadId::uuid),
        channel,
        placing.parents
    )
    .fetch_one(work.db())
    .await?;
    let thread = match found {
        Some(thread) => thread,
        None => {
            let is_open = sqlx::query_scalar!(
                r#"select exists (select 1 from inbound where channel_id = $1 and message_key = any($2) and next_attempt_at is not null
                       and (created_at, id) < (select created_at, id from inbound where id = $3)) as "open!""#,
                channel,
                placing.parents,
                id
            )
            .fetch_one(work.db())
            .await?;
            if is_open {
                return Ok(Place::Behind);
            }
            sqlx::query!(
                "insert into thread (id, tenant_id, channel_id, agent_name) values ($1, $2, $3, $4) on conflict do nothing",
                id,
                claimed.tenant.uuid(),
                channel,
                placing.agent
            )
            .execute(work.db())
            .await?;
            if let Some(root) = &placing.head.root {
                insert_message(work, claimed.channel, root, claimed.id.uuid().into(), claimed.tenant).await?;
                wake_replies(work, claimed, root).await?;
            }
            id
        }
    };
    let agent = sqlx::query_scalar!("select agent_name from thread where id = $1 for update", thread).fetch_one(work.db()).await?;
    insert_message(work, claimed.channel, &placing.head.message_id, thread.into(), claimed.tenant).await?;
    sqlx::query!("update inbound set thread_id = $2 where id = $1", id, thread).execute(work.db()).await?;
    let counts = sqlx::query!(
        r#"select exists (select 1 from inbound where thread_id = $1 and next_attempt_at is not null
                          and (created_at, id) < (select created_at, id from inbound where id = $2)) as "behind!",
                  (select count(*) from inbound where thread_id = $1 and state in ('started', 'steered', 'answered') and handled_at > now() - interval '1 hour') as "taken!",
                  (select count(*) from inbound where channel_id = $3 and state in ('started', 'steered') and handled_at > now() - interval '1 minute') as "of_channel!""#,
        thread,
        id,
        channel
    )
    .fetch_one(work.db())
    .await?;
    Ok(if counts.behind {
        Place::Behind
    } else if counts.taken >= i64::from(placing.most_an_hour) {
        Place::TooMany(counts.taken)
    } else if counts.of_channel >= i64::from(placing.most_a_minute) {
        Place::TooManyOfChannel
    } else {
        Place::Thread { thread: thread.into(), agent, first: thread == id }
    })
}

/// Replies to a root that came before it was known to be ours.
async fn wake_replies(work: &mut Work, claimed: &Claimed, root: &str) -> Result<()> {
    let rows = sqlx::query!(
        "update inbound set next_attempt_at = now() where channel_id = $1 and state = 'waiting' and head->>'root' = $2 and id <> $3 returning id, tenant_id",
        claimed.channel.uuid(),
        root,
        claimed.id.uuid()
    )
    .fetch_all(work.db())
    .await?;
    for row in rows {
        work.command(Command::Intake { tenant: row.tenant_id.into(), inbound: row.id.into() });
    }
    Ok(())
}

/// The message that opened a thread by a message of ours: what the provider knows it by.
pub(crate) async fn root(work: &mut Work, answering: &Answering, tenant: TenantId, thread: ThreadId, root: &str) -> Result<()> {
    sqlx::query!(
        "update inbound set head = jsonb_set(head, '{root}', to_jsonb($2::text)) where id = $1 and head->>'root' is null",
        answering.message.uuid(),
        root
    )
    .execute(work.db())
    .await?;
    insert_message(work, answering.channel, root, thread, tenant).await
}

/// Notes that a message belongs to a thread.
pub(crate) async fn insert_message(
    work: &mut Work,
    channel: ChannelId,
    message_id: &str,
    thread: ThreadId,
    tenant: TenantId,
) -> Result<()> {
    sqlx::query!(
        "insert into thread_message (channel_id, message_id, thread_id, tenant_id) values ($1, $2, $3, $4) on conflict do nothing",
        channel.uuid(),
        message_id,
        thread.uuid(),
        tenant.uuid()
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// What became of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Started(RunId),
    Steered(RunId, Option<String>),
    /// It asked something; this is the answer.
    Answered(String),
    Ignored(String),
    /// It calls nobody, in a thread that is not ours: nothing of it is kept.
    Elsewhere,
    Refused(String),
    /// Its thread takes nothing more for now.
    Stopped(String),
    /// Not yet. `failed` counts against it; `told`: its author is to hear of it.
    Waiting {
        after: Duration,
        reason: String,
        failed: bool,
        told: bool,
    },
    /// It cannot be taken in; kept and shown.
    Dead(String),
}

/// Records it, unless the message was claimed anew meanwhile.
pub(crate) async fn record(work: &mut Work, claimed: &Claimed, outcome: &Outcome) -> Result<bool> {
    let (state, run, reason, after, failed) = match outcome {
        Outcome::Started(run) => ("started", Some(run.uuid()), None, None, false),
        Outcome::Steered(run, note) => ("steered", Some(run.uuid()), note.as_deref(), None, false),
        Outcome::Answered(text) => ("answered", None, Some(text.as_str()), None, false),
        Outcome::Ignored(reason) => ("ignored", None, Some(reason.as_str()), None, false),
        Outcome::Refused(reason) | Outcome::Stopped(reason) => ("refused", None, Some(reason.as_str()), None, false),
        Outcome::Waiting { after, reason, failed, .. } => ("waiting", None, Some(reason.as_str()), Some(after.as_secs_f64()), *failed),
        Outcome::Dead(reason) => ("dead", None, Some(reason.as_str()), None, true),
        Outcome::Elsewhere => return forget(work, claimed).await,
    };
    let done = sqlx::query!(
        "update inbound set state = $3, run_id = $4, reason = $5, next_attempt_at = now() + make_interval(secs => $6), attempts = attempts + $7,
             handled_at = case when $6::float8 is null then now() end, steer_looked_at = case when $8 then now() end
         where id = $1 and claim = $2 and next_attempt_at is not null",
        claimed.id.uuid(),
        claimed.claim,
        state,
        run,
        reason.map(|reason| reason.replace('\0', "\u{fffd}")),
        after,
        i32::from(failed),
        matches!(outcome, Outcome::Steered(_, None))
    )
    .execute(work.db())
    .await?;
    Ok(done.rows_affected() == 1)
}

async fn forget(work: &mut Work, claimed: &Claimed) -> Result<bool> {
    let done = sqlx::query!("delete from inbound where id = $1 and claim = $2 and thread_id is null", claimed.id.uuid(), claimed.claim)
        .execute(work.db())
        .await?;
    Ok(done.rows_affected() == 1)
}

/// Whether it is not through yet.
pub(crate) async fn waits(db: &PgPool, message: InboundId) -> Result<bool> {
    Ok(sqlx::query_scalar!(
        r#"select exists (select 1 from inbound where id = $1 and next_attempt_at is not null) as "waits!""#,
        message.uuid()
    )
    .fetch_one(db)
    .await?)
}

/// A message that became a steer, of which it is not known yet whether its run takes it.
#[derive(Debug)]
pub(crate) struct Steering {
    pub message: InboundId,
    pub tenant: TenantId,
    pub run: RunId,
    pub steers: i32,
}

/// Those that were looked at longest ago.
pub(crate) async fn steering(work: &mut Work, most: i64) -> Result<Vec<Steering>> {
    let rows = sqlx::query!(
        r#"update inbound set steer_looked_at = now() where id in
               (select id from inbound where steer_looked_at is not null order by steer_looked_at, id limit $1 for update skip locked)
           returning id, tenant_id, run_id as "run_id!", steers"#,
        most
    )
    .fetch_all(work.db())
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| Steering { message: row.id.into(), tenant: row.tenant_id.into(), run: row.run_id.into(), steers: row.steers })
        .collect())
}

/// It is known what became of these steers.
pub(crate) async fn steered(work: &mut Work, messages: &[InboundId]) -> Result<()> {
    let ids: Vec<Uuid> = messages.iter().map(|message| message.uuid()).collect();
    sqlx::query!("update inbound set steer_looked_at = null where id = any($1)", &ids).execute(work.db()).await?;
    Ok(())
}

/// Takes messages in once more: the run that they steered ended without them.
pub(crate) async fn reopen(work: &mut Work, messages: &[(TenantId, InboundId)]) -> Result<()> {
    let ids: Vec<Uuid> = messages.iter().map(|(_, message)| message.uuid()).collect();
    sqlx::query!(
        "update inbound set state = 'received', next_attempt_at = now(), reason = 'the run before it ended without reading it', run_id = null, handled_at = null,
             steers = steers + 1, steer_looked_at = null, claim = claim + 1
         where id = any($1) and state = 'steered' and raw is not null",
        &ids
    )
    .execute(work.db())
    .await?;
    for (tenant, inbound) in messages {
        work.command(Command::Intake { tenant: *tenant, inbound: *inbound });
    }
    Ok(())
}

/// Messages that are told of at once when a channel is taken up again; the sweep finds the others.
const WOKEN: usize = 1000;

/// The messages that wait for a channel that is taken up again.
pub(crate) async fn wake(work: &mut Work, channel: ChannelId) -> Result<()> {
    let rows = sqlx::query!(
        "update inbound set next_attempt_at = now() where channel_id = $1 and state = 'waiting' returning id, tenant_id",
        channel.uuid()
    )
    .fetch_all(work.db())
    .await?;
    for row in rows.into_iter().take(WOKEN) {
        work.command(Command::Intake { tenant: row.tenant_id.into(), inbound: row.id.into() });
    }
    Ok(())
}

pub(crate) async fn files(db: &PgPool, inbound: InboundId) -> Result<Vec<FileId>> {
    let files =
        sqlx::query_scalar!("select file_id from inbound_file where inbound_id = $1 order by n", inbound.uuid()).fetch_all(db).await?;
    Ok(files.into_iter().map(FileId).collect())
}

pub(crate) async fn insert_file(db: &PgPool, claimed: &Claimed, n: i32, file: FileId) -> Result<()> {
    sqlx::query!(
        "insert into inbound_file (inbound_id, n, tenant_id, file_id) values ($1, $2, $3, $4) on conflict do nothing",
        claimed.id.uuid(),
        n,
        claimed.tenant.uuid(),
        file.uuid()
    )
    .execute(db)
    .await?;
    Ok(())
}

/// Messages that are due, and for how many seconds the oldest has been.
pub async fn due(db: &PgPool) -> Result<(i64, f64)> {
    let row = sqlx::query!(
        r#"select count(*) as "count!", coalesce(extract(epoch from now() - min(next_attempt_at)), 0)::float8 as "age!" from inbound where next_attempt_at <= now()"#
    )
    .fetch_one(db)
    .await?;
    Ok((row.count, row.age))
}

/// Messages that should have been taken in by now.
pub(crate) async fn overdue(db: &PgPool, by: Duration) -> Result<Vec<(TenantId, InboundId)>> {
    let rows = sqlx::query!(
        "select tenant_id, id from inbound where next_attempt_at < now() - make_interval(secs => $1) order by next_attempt_at limit 1000",
        by.as_secs_f64()
    )
    .fetch_all(db)
    .await?;
    Ok(rows.into_iter().map(|row| (row.tenant_id.into(), row.id.into())).collect())
}

pub(crate) async fn tenant_of(work: &mut Work, ids: &[InboundId]) -> Result<Vec<(TenantId, InboundId)>> {
    let ids: Vec<Uuid> = ids.iter().map(|id| id.uuid()).collect();
    let rows = sqlx::query!("select tenant_id, id from inbound where id = any($1) and next_attempt_at is not null", &ids)
        .fetch_all(work.db())
        .await?;
    Ok(rows.into_iter().map(|row| (row.tenant_id.into(), row.id.into())).collect())
}

/// Forgets the bytes of old messages that are through and cannot be taken in once more by themselves; the row stays, so that one that comes again is still known.
pub(crate) async fn forget_raw(db: &PgPool) -> Result<u64> {
    let done = sqlx::query!(
        "update inbound set raw = null where id in (select id from inbound where raw is not null and next_attempt_at is null and steer_looked_at is null
             and created_at < now() - make_interval(days => $1) order by created_at limit 500)",
        INBOUND_DAYS
    )
    .execute(db)
    .await?;
    Ok(done.rows_affected())
}

/// The tenant's newest messages, or those before one of them.
pub async fn inbound(db: &PgPool, tenant: TenantId, before: Option<InboundId>) -> Result<Vec<Inbound>> {
    let rows = sqlx::query!(
        r#"select inbound.id, channel.name, state, reason, author, head->>'subject' as subject, thread_id, run_id, attempts, inbound.created_at, handled_at
           from inbound join channel on channel.id = channel_id
           where inbound.tenant_id = $1 and ($2::uuid is null or (inbound.created_at, inbound.id) < (select created_at, id from inbound where id = $2 and tenant_id = $1))
           order by inbound.created_at desc, inbound.id desc limit $3"#,
        tenant.uuid(),
        before.map(InboundId::uuid),
        PAGE_ROWS
    )
    .fetch_all(db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| Inbound {
            id: row.id.into(),
            channel: row.name,
            state: row.state,
            reason: row.reason,
            author: row.author,
            subject: row.subject,
            thread: row.thread_id.map(ThreadId),
            run: row.run_id.map(RunId),
            attempts: row.attempts,
            created_at: row.created_at,
            handled_at: row.handled_at,
        })
        .collect())
}

/// Takes in once more what was refused, ignored or given up; for what started or steered a run it is refused.
pub async fn replay(chassis: &Chassis, tenant: TenantId, id: InboundId) -> Result<()> {
    let mut work = chassis.begin().await?;
    let row = sqlx::query!(
        r#"select state, raw is not null as "kept!" from inbound where id = $1 and tenant_id = $2 for update"#,
        id.uuid(),
        tenant.uuid()
    )
    .fetch_optional(work.db())
    .await?
    .ok_or_else(|| Error::refused(ErrorCode::NotFound, format!("there is no inbound message {id}")))?;
    let refuse = |detail: String| Err(Error::refused(ErrorCode::Unprocessable, detail));
    match (row.state.as_str(), row.kept) {
        ("started" | "steered", _) => return refuse(format!("{id} has {} a run already", row.state)),
        (_, false) => return refuse(format!("{id} is kept no longer as it came ({INBOUND_DAYS} days)")),
        _ => {}
    }
    sqlx::query!(
        "update inbound set state = 'received', next_attempt_at = now(), attempts = 0, reason = null, handled_at = null, claim = claim + 1 where id = $1",
        id.uuid()
    )
    .execute(work.db())
    .await?;
    work.command(Command::Intake { tenant, inbound: id });
    work.commit().await
}

/// What is needed to answer a message.
#[derive(Debug)]
pub(crate) struct Answering {
    /// The message that is answered.
    pub message: InboundId,
    pub author: Option<String>,
    pub channel: ChannelId,
    pub definition: ChannelDefinition,
    pub secrets: Option<Vec<u8>>,
    /// None for a message that was not let into any.
    pub thread: Option<ThreadId>,
    pub agent: String,
    pub head: Head,
    /// Why nothing goes out by the channel now.
    pub broken: Option<String>,
}

/// None when the message or its channel is gone. The message that started a run has the run's uuid.
pub(crate) async fn answering(db: &PgPool, tenant: TenantId, message: InboundId) -> Result<Option<Answering>> {
    let row = sqlx::query!(
        r#"select channel.id, definition, secrets, thread.id as "thread_id?", agent_name as "agent_name?", head as "head!", author, broken_why
           from inbound join channel on channel.id = inbound.channel_id left join thread on thread.id = thread_id
           where inbound.id = $2 and inbound.tenant_id = $1 and deleted_at is null and head is not null"#,
        tenant.uuid(),
        message.uuid()
    )
    .fetch_optional(db)
    .await?;
    row.map(|row| {
        let definition = read_definition(row.definition)?;
        Ok(Answering {
            message,
            author: row.author,
            channel: row.id.into(),
            secrets: row.secrets,
            thread: row.thread_id.map(ThreadId),
            agent: row.agent_name.unwrap_or_else(|| definition.agent.clone()),
            head: serde_json::from_value(row.head).map_err(|error| Error::broken(format!("head: {error}")))?,
            definition,
            broken: row.broken_why,
        })
    })
    .transpose()
}
