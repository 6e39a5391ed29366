//! All SQL of `channel` and `channel_address`. What comes in by them is in `intake/table.rs`.

use std::{collections::BTreeMap, time::Duration};

use chrono::{DateTime, Utc};
use sqlx::PgPool;
use towpath_chassis::{Chassis, Error, Result, Work, clock, stored};
use towpath_schemas::{
    ErrorCode,
    body::{Channel, WebhookTarget},
    channel::{ChannelDefinition, SecretText},
    id::{ChannelId, InboundId, TenantId},
    limit::PAGE_ROWS,
};

use crate::circuit::{LONGEST, SHORTEST};

/// Where a channel's secrets are sealed for.
fn secret_place(channel: ChannelId) -> String {
    format!("channel {channel}")
}

pub(crate) fn read_definition(value: serde_json::Value) -> Result<ChannelDefinition> {
    stored::read(value).map_err(|error| Error::broken(format!("channel: {error}")))
}

pub(crate) fn open_secrets(chassis: &Chassis, channel: ChannelId, sealed: Option<&[u8]>) -> Result<BTreeMap<String, String>> {
    let Some(sealed) = sealed else { return Ok(BTreeMap::new()) };
    let text = chassis.secrets.unseal(&secret_place(channel), sealed)?;
    serde_json::from_slice(&text).map_err(|_| Error::broken(format!("the secrets of {channel} are no JSON object")))
}

fn shown(
    chassis: &Chassis,
    id: ChannelId,
    definition: serde_json::Value,
    sealed: Option<&[u8]>,
    created_at: DateTime<Utc>,
) -> Result<Channel> {
    Ok(Channel {
        id,
        hook: format!("/hooks/{id}"),
        secrets: open_secrets(chassis, id, sealed)?.into_keys().collect(),
        definition: read_definition(definition)?,
        created_at,
    })
}

/// Stores a channel; whether it is a new one. Secrets that the definition leaves out stay as they were.
pub async fn put(chassis: &Chassis, tenant: TenantId, mut definition: ChannelDefinition) -> Result<(Channel, bool)> {
    definition.check().map_err(|help| Error::refused(ErrorCode::Unprocessable, help))?;
    if let Some(url) = &definition.notify {
        let secret = definition.secrets.get("notify_secret").map(|secret| secret.0.clone());
        towpath_delivery::check_target(chassis, &WebhookTarget { url: url.clone(), secret })?;
    }
    let given = std::mem::take(&mut definition.secrets);
    let mut work = chassis.begin().await?;
    let actor = towpath_tenant::ensure_principal(&mut work, tenant, "system", &format!("channel/{}", definition.name)).await?;
    let stored = serde_json::to_value(&definition).map_err(|error| Error::broken(format!("channel: {error}")))?;
    let fresh = ChannelId::mint();
    let row = sqlx::query!(
        r#"insert into channel (id, tenant_id, name, definition, principal_id) values ($1, $2, $3, $4, $5)
           on conflict (tenant_id, name) where deleted_at is null do update set definition = excluded.definition, changed_at = now(), broken_at = null, broken_why = null, probe_at = null
           returning id, secrets, created_at"#,
        fresh.uuid(),
        tenant.uuid(),
        definition.name,
        stored,
        actor.uuid()
    )
    .fetch_one(work.db())
    .await?;
    let id = ChannelId(row.id);
    let mut secrets = open_secrets(chassis, id, row.secrets.as_deref())?;
    secrets.extend(given.into_iter().map(|(name, SecretText(secret))| (name, secret)));
    let (names, needed) = definition.secret_names();
    // Those of another kind than it is now are of no use to anybody.
    secrets.retain(|name, _| names.contains(&name.as_str()));
    if let Some(missing) = needed.iter().find(|name| !secrets.contains_key(**name)) {
        return Err(Error::refused(ErrorCode::Unprocessable, format!("secrets: `{missing}` is missing")));
    }
    let text = serde_json::to_vec(&secrets).map_err(|error| Error::broken(format!("secrets: {error}")))?;
    let sealed = chassis.secrets.seal(&secret_place(id), &text)?;
    sqlx::query!("update channel set secrets = $2 where id = $1", id.uuid(), sealed).execute(work.db()).await?;
    sqlx::query!("delete from channel_address where channel_id = $1 and address <> all($2)", id.uuid(), definition.addresses())
        .execute(work.db())
        .await?;
    let taken = sqlx::query_scalar!(
        "with mine as (insert into channel_address (address, channel_id, tenant_id) select address, $1, $2 from unnest($3::text[]) as t (address)
             on conflict (address) do nothing)
         select address from channel_address where address = any($3) and channel_id <> $1 limit 1",
        id.uuid(),
        tenant.uuid(),
        definition.addresses()
    )
    .fetch_optional(work.db())
    .await?;
    if let Some(address) = taken {
        return Err(Error::refused(ErrorCode::Unprocessable, format!("mail.addresses: another channel takes mail for {address}")));
    }
    let channel =
        Channel { id, hook: format!("/hooks/{id}"), secrets: secrets.into_keys().collect(), definition, created_at: row.created_at };
    work.commit().await?;
    Ok((channel, id == fresh))
}

pub async fn by_name(chassis: &Chassis, tenant: TenantId, name: &str) -> Result<Channel> {
    let row = sqlx::query!(
        "select id, definition, secrets, created_at from channel where tenant_id = $1 and name = $2 and deleted_at is null",
        tenant.uuid(),
        name
    )
    .fetch_optional(&chassis.db)
    .await?
    .ok_or_else(|| no_such_channel(name))?;
    shown(chassis, row.id.into(), row.definition, row.secrets.as_deref(), row.created_at)
}

fn no_such_channel(name: &str) -> Error {
    Error::refused(ErrorCode::NotFound, format!("there is no channel `{name}`"))
}

/// The tenant's channels by name.
pub async fn list(chassis: &Chassis, tenant: TenantId) -> Result<Vec<Channel>> {
    let rows = sqlx::query!(
        "select id, definition, secrets, created_at from channel where tenant_id = $1 and deleted_at is null order by name limit $2",
        tenant.uuid(),
        PAGE_ROWS
    )
    .fetch_all(&chassis.db)
    .await?;
    rows.into_iter().map(|row| shown(chassis, row.id.into(), row.definition, row.secrets.as_deref(), row.created_at)).collect()
}

/// Takes nothing more in, and forgets the channel's secrets. What it has started goes on; answers to its threads cannot be sent any more.
pub async fn delete(chassis: &Chassis, tenant: TenantId, name: &str) -> Result<()> {
    let mut work = chassis.begin().await?;
    let id = sqlx::query_scalar!(
        "update channel set deleted_at = now(), secrets = null where tenant_id = $1 and name = $2 and deleted_at is null returning id",
        tenant.uuid(),
        name
    )
    .fetch_optional(work.db())
    .await?
    .ok_or_else(|| no_such_channel(name))?;
    sqlx::query!("delete from channel_address where channel_id = $1", id).execute(work.db()).await?;
    work.commit().await
}

/// What a request to a channel's hook is judged by.
#[derive(Debug)]
pub struct Hook {
    pub channel: ChannelId,
    pub definition: ChannelDefinition,
    /// By the database's clock.
    pub now: DateTime<Utc>,
    secrets: BTreeMap<String, String>,
}

impl Hook {
    pub fn secret(&self, name: &str) -> Option<&str> {
        self.secrets.get(name).map(String::as_str)
    }
}

/// None when there is no such channel.
pub async fn hook(chassis: &Chassis, channel: ChannelId) -> Result<Option<Hook>> {
    let row =
        sqlx::query!(r#"select definition, secrets, now() as "now!" from channel where id = $1 and deleted_at is null"#, channel.uuid())
            .fetch_optional(&chassis.db)
            .await?;
    row.map(|row| {
        Ok(Hook {
            channel,
            definition: read_definition(row.definition)?,
            now: row.now,
            secrets: open_secrets(chassis, channel, row.secrets.as_deref())?,
        })
    })
    .transpose()
}

/// The channel that takes mail for each of these addresses, where there is one.
pub async fn channels_of(db: &PgPool, addresses: &[String]) -> Result<Vec<(String, ChannelId)>> {
    let rows = sqlx::query!("select address, channel_id from channel_address where address = any($1)", addresses).fetch_all(db).await?;
    Ok(rows.into_iter().map(|row| (row.address, row.channel_id.into())).collect())
}

/// Takes nothing more from a channel until it is taken up again; what comes meanwhile is kept and waits.
pub async fn pause(chassis: &Chassis, tenant: TenantId, name: &str, paused: bool) -> Result<()> {
    let mut work = chassis.begin().await?;
    let id = sqlx::query_scalar!(
        "update channel set paused_at = case when $3 then coalesce(paused_at, now()) end where tenant_id = $1 and name = $2 and deleted_at is null returning id",
        tenant.uuid(),
        name,
        paused
    )
    .fetch_optional(work.db())
    .await?
    .ok_or_else(|| no_such_channel(name))?;
    if !paused {
        crate::intake::table::wake(&mut work, id.into()).await?;
    }
    work.commit().await
}

/// The channel of a message, for whoever tells its owner.
#[derive(Debug)]
pub(crate) struct Owner {
    pub tenant: TenantId,
    pub definition: ChannelDefinition,
    channel: ChannelId,
    secrets: Option<Vec<u8>>,
}

impl Owner {
    pub fn secret(&self, chassis: &Chassis, name: &str) -> Result<Option<String>> {
        Ok(open_secrets(chassis, self.channel, self.secrets.as_deref())?.remove(name))
    }
}

/// None when it is gone.
pub(crate) async fn owner_of(work: &mut Work, message: InboundId) -> Result<Option<Owner>> {
    let row = sqlx::query!(
        "select channel.id, channel.tenant_id, definition, secrets from inbound join channel on channel.id = channel_id where inbound.id = $1 and deleted_at is null",
        message.uuid()
    )
    .fetch_optional(work.db())
    .await?;
    row.map(|row| {
        Ok(Owner {
            tenant: row.tenant_id.into(),
            definition: read_definition(row.definition)?,
            channel: row.id.into(),
            secrets: row.secrets,
        })
    })
    .transpose()
}

/// Lets one try a way that is out of order; everybody else, for how long to wait.
pub(crate) async fn probe(db: &PgPool, channel: ChannelId) -> Result<Option<Duration>> {
    let row = sqlx::query!(
        r#"with mine as (update channel set probe_at = now() + make_interval(secs => greatest($2, least($3, extract(epoch from now() - broken_at)::float8)))
               where id = $1 and probe_at <= now() returning id)
           select exists (select 1 from mine) as "mine!", extract(epoch from probe_at - now())::float8 as wait from channel where id = $1"#,
        channel.uuid(),
        clock::scaled(SHORTEST).as_secs_f64(),
        clock::scaled(LONGEST).as_secs_f64()
    )
    .fetch_one(db)
    .await?;
    // Without a time for the next try it works again.
    let wait = row.wait.filter(|_| !row.mine);
    Ok(wait.map(|wait| Duration::try_from_secs_f64(wait).unwrap_or_default().max(clock::scaled(SHORTEST / 5))))
}

/// Nothing goes out by this channel; whether that is news.
pub(crate) async fn trip(work: &mut Work, channel: ChannelId, why: &str, wait: Duration) -> Result<bool> {
    let done = sqlx::query!(
        "update channel set broken_at = now(), broken_why = $2, probe_at = now() + make_interval(secs => $3) where id = $1 and broken_at is null",
        channel.uuid(),
        why,
        wait.as_secs_f64()
    )
    .execute(work.db())
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Something went out by it.
pub(crate) async fn mend(db: &PgPool, channel: ChannelId) -> Result<()> {
    sqlx::query!("update channel set broken_at = null, broken_why = null, probe_at = null where id = $1", channel.uuid())
        .execute(db)
        .await?;
    Ok(())
}

/// Channels by which nothing goes out.
pub async fn broken(db: &PgPool) -> Result<i64> {
    Ok(sqlx::query_scalar!(r#"select count(*) as "count!" from channel where broken_at is not null and deleted_at is null"#)
        .fetch_one(db)
        .await?)
}
