//! All SQL of `transcript` and `chunk`.

use chrono::{DateTime, Utc};
use sqlx::PgPool;
use towpath_chassis::{Error, Result, Work};
use towpath_schemas::{
    command::Command,
    event,
    frame::{EndRecord, GapRecord},
    id::{RunId, TenantId},
};
use uuid::Uuid;

use crate::{chunk::Sealed, stream::Epoch};

/// The record of one epoch, as its row says.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    pub run: RunId,
    pub epoch: i32,
    pub tenant: TenantId,
    pub state: State,
    pub last_seq: u64,
    pub bytes: u64,
    pub gap: Option<GapRecord>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// More may come.
    Open,
    /// The epoch is over and its end record may never come: take what there is.
    Lost,
    Closed,
}

/// Opens the records of epochs that were just bound.
pub async fn open(work: &mut Work, epochs: &[(RunId, i32, TenantId)]) -> Result<()> {
    if epochs.is_empty() {
        return Ok(());
    }
    let (runs, numbers, tenants) = columns(epochs);
    sqlx::query!(
        "insert into transcript (run_id, epoch, tenant_id, state)
         select run, epoch, tenant, 'open' from unnest($1::uuid[], $2::int[], $3::uuid[]) as new (run, epoch, tenant) order by run, epoch on conflict do nothing",
        &runs,
        &numbers,
        &tenants
    )
    .execute(work.db())
    .await?;
    for (run, epoch, tenant) in epochs {
        work.command(Command::Seal { tenant: *tenant, run: *run, epoch: *epoch });
    }
    Ok(())
}

/// Marks the records of lost epochs: the sealer closes them with a gap marker.
pub async fn lose(work: &mut Work, epochs: &[(RunId, i32, TenantId)]) -> Result<()> {
    if epochs.is_empty() {
        return Ok(());
    }
    let (runs, numbers, _) = columns(epochs);
    let marked = sqlx::query!(
        "update transcript set state = 'lost' from unnest($1::uuid[], $2::int[]) as lost (run, epoch)
         where run_id = lost.run and transcript.epoch = lost.epoch and state = 'open' returning run_id, transcript.epoch, tenant_id",
        &runs,
        &numbers
    )
    .fetch_all(work.db())
    .await?;
    for row in marked {
        work.command(Command::Seal { tenant: row.tenant_id.into(), run: row.run_id.into(), epoch: row.epoch });
    }
    Ok(())
}

fn columns(epochs: &[(RunId, i32, TenantId)]) -> (Vec<Uuid>, Vec<i32>, Vec<Uuid>) {
    (
        epochs.iter().map(|(run, ..)| run.uuid()).collect(),
        epochs.iter().map(|(_, epoch, _)| *epoch).collect(),
        epochs.iter().map(|(.., tenant)| tenant.uuid()).collect(),
    )
}

fn state_of(word: &str) -> Result<State> {
    match word {
        "open" => Ok(State::Open),
        "lost" => Ok(State::Lost),
        "closed" => Ok(State::Closed),
        other => Err(Error::broken(format!("transcript state `{other}` is not known"))),
    }
}

struct RecordRow {
    run_id: Uuid,
    epoch: i32,
    tenant_id: Uuid,
    state: String,
    last_seq: i64,
    bytes: i64,
    gap: Option<serde_json::Value>,
}

impl TryFrom<RecordRow> for Record {
    type Error = Error;

    fn try_from(row: RecordRow) -> Result<Self> {
        Ok(Record {
            run: row.run_id.into(),
            epoch: row.epoch,
            tenant: row.tenant_id.into(),
            state: state_of(&row.state)?,
            last_seq: row.last_seq as u64,
            bytes: row.bytes as u64,
            gap: row.gap.map(serde_json::from_value).transpose().map_err(|error| Error::broken(format!("gap record: {error}")))?,
        })
    }
}

/// The record of one epoch, once it was bound.
pub async fn record(db: &PgPool, run: RunId, epoch: i32) -> Result<Option<Record>> {
    sqlx::query_as!(
        RecordRow,
        "select run_id, epoch, tenant_id, state, last_seq, bytes, gap from transcript where run_id = $1 and epoch = $2",
        run.uuid(),
        epoch
    )
    .fetch_optional(db)
    .await?
    .map(Record::try_from)
    .transpose()
}

/// The records of a run, in order of epoch.
pub async fn records(db: &PgPool, tenant: TenantId, run: RunId) -> Result<Vec<Record>> {
    sqlx::query_as!(
        RecordRow,
        "select run_id, epoch, tenant_id, state, last_seq, bytes, gap from transcript where run_id = $1 and tenant_id = $2 order by epoch",
        run.uuid(),
        tenant.uuid()
    )
    .fetch_all(db)
    .await?
    .into_iter()
    .map(Record::try_from)
    .collect()
}

/// Sealed marks of these epochs, for gateways that look by themselves: (run, epoch, last sealed).
pub async fn marks(db: &PgPool, epochs: &[(RunId, i32)]) -> Result<Vec<(RunId, i32, u64)>> {
    let (runs, numbers): (Vec<Uuid>, Vec<i32>) = epochs.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    let rows = sqlx::query!(
        "select run_id, transcript.epoch, last_seq from transcript join unnest($1::uuid[], $2::int[]) as live (run, epoch) on run_id = live.run and transcript.epoch = live.epoch",
        &runs,
        &numbers
    )
    .fetch_all(db)
    .await?;
    Ok(rows.into_iter().map(|row| (row.run_id.into(), row.epoch, row.last_seq as u64)).collect())
}

/// Commits a sealed chunk to the index: one guarded statement. False when it does not follow the last one, because somebody else sealed these frames.
pub(crate) async fn index(work: &mut Work, of: Epoch, chunk: &Sealed, object_key: &str) -> Result<bool> {
    let inserted = sqlx::query!(
        "with grown as (
             update transcript set last_seq = $4, bytes = bytes + $6
             where run_id = $1 and epoch = $2 and state <> 'closed' and last_seq = $3 - 1 returning tenant_id)
         insert into chunk (run_id, epoch, first_seq, last_seq, tenant_id, first_byte, bytes, object_key, size, sha256, first_at, last_at)
         select $1, $2, $3, $4, tenant_id, $5, $6, $7, $8, $9, $10, $11 from grown",
        of.run.uuid(),
        of.epoch,
        chunk.first_seq as i64,
        chunk.last_seq as i64,
        chunk.first_byte as i64,
        chunk.bytes as i64,
        object_key,
        chunk.body.len() as i64,
        &chunk.sha256[..],
        at(chunk.first_us),
        at(chunk.last_us)
    )
    .execute(work.db())
    .await?;
    Ok(inserted.rows_affected() == 1)
}

fn at(microseconds: u64) -> DateTime<Utc> {
    i64::try_from(microseconds).ok().and_then(DateTime::from_timestamp_micros).unwrap_or(DateTime::UNIX_EPOCH)
}

/// How a record ends.
pub(crate) enum Closing<'a> {
    End(&'a EndRecord),
    Gap(&'a GapRecord),
}

/// Closes a record after `last_seq`, and says so to the run.
pub(crate) async fn close(work: &mut Work, of: Epoch, last_seq: u64, closing: Closing<'_>) -> Result<bool> {
    let json = |value: serde_json::Result<serde_json::Value>| value.map_err(|error| Error::broken(format!("record: {error}")));
    let (end, gap) = match closing {
        Closing::End(end) => (Some(json(serde_json::to_value(end))?), None),
        Closing::Gap(gap) => (None, Some(json(serde_json::to_value(gap))?)),
    };
    let closed = sqlx::query!(
        "update transcript set state = 'closed', closed_at = now(), end_record = $4, gap = $5 where run_id = $1 and epoch = $2 and last_seq = $3 and state <> 'closed'",
        of.run.uuid(),
        of.epoch,
        last_seq as i64,
        end,
        gap
    )
    .execute(work.db())
    .await?;
    if closed.rows_affected() == 0 {
        return Ok(false);
    }
    work.command(Command::Sealed { tenant: of.tenant, run: of.run, epoch: of.epoch });
    work.event(of.tenant, of.run, event::Kind::Closed { epoch: of.epoch });
    Ok(true)
}

/// One sealed piece, as its index row says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkRow {
    pub first_seq: u64,
    pub last_seq: u64,
    pub object_key: String,
    pub sha256: Vec<u8>,
}

/// The chunks that hold frames after `seq`, in order.
pub(crate) async fn chunks_after(db: &PgPool, of: Epoch, seq: u64, most: i64) -> Result<Vec<ChunkRow>> {
    let rows = sqlx::query!(
        "select first_seq, last_seq, object_key, sha256 from chunk where run_id = $1 and epoch = $2 and tenant_id = $3 and last_seq > $4 order by first_seq limit $5",
        of.run.uuid(),
        of.epoch,
        of.tenant.uuid(),
        seq as i64,
        most
    )
    .fetch_all(db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| ChunkRow {
            first_seq: row.first_seq as u64,
            last_seq: row.last_seq as u64,
            object_key: row.object_key,
            sha256: row.sha256,
        })
        .collect())
}

/// Records that nobody may be sealing: unfinished, and not under a lease.
pub(crate) async fn unattended(db: &PgPool) -> Result<Vec<Epoch>> {
    let rows = sqlx::query!(
        "select run_id, epoch, tenant_id from transcript where state <> 'closed'
             and not exists (select 1 from lease where name = 'seal ' || run_id::text || ' ' || epoch::text and until > now())
         order by opened_at limit 1000"
    )
    .fetch_all(db)
    .await?;
    Ok(rows.into_iter().map(|row| Epoch { tenant: row.tenant_id.into(), run: row.run_id.into(), epoch: row.epoch }).collect())
}

pub(crate) fn lease_name(of: Epoch) -> String {
    format!("seal {} {}", of.run.uuid(), of.epoch)
}

/// Epochs that are not sealed to their end, and the age of the oldest in seconds: what autoscaling reads for `transcript`.
pub async fn unsealed(db: &PgPool) -> Result<(i64, f64)> {
    let row = sqlx::query!(
        r#"select count(*) as "count!", coalesce(extract(epoch from now() - min(opened_at)), 0)::float8 as "age!" from transcript where state <> 'closed'"#
    )
    .fetch_one(db)
    .await?;
    Ok((row.count, row.age))
}
