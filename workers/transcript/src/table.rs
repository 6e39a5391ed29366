//! All SQL of `transcript` and `chunk`.

use std::collections::HashSet;

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

use crate::{chunk::Sealed, commit::Piece, stream::Epoch};

/// The record of one epoch, as its row says.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    pub run: RunId,
    pub epoch: i32,
    pub tenant: TenantId,
    pub state: State,
    pub last_seq: u64,
    pub bytes: u64,
    /// Bytes of it that are kept.
    pub most_bytes: u64,
    pub gap: Option<GapRecord>,
    pub cut: Option<Cut>,
}

/// Frames that were sealed and are kept no longer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    pub first_seq: u64,
    pub last_seq: u64,
    pub gap: GapRecord,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// More may come.
    Open,
    /// The epoch is over and its end record may never come: take what there is.
    Lost,
    Closed,
}

/// An epoch whose record begins.
#[derive(Debug, Clone)]
pub struct Opened {
    pub run: RunId,
    pub epoch: i32,
    pub tenant: TenantId,
    /// Bytes of it that are kept.
    pub most_bytes: i64,
}

/// Opens the records of epochs that were just bound.
pub async fn open(work: &mut Work, opened: &[Opened]) -> Result<()> {
    if opened.is_empty() {
        return Ok(());
    }
    let epochs: Vec<(RunId, i32, TenantId)> = opened.iter().map(|one| (one.run, one.epoch, one.tenant)).collect();
    let (runs, numbers, tenants) = columns(&epochs);
    let caps: Vec<i64> = opened.iter().map(|one| one.most_bytes).collect();
    sqlx::query!(
        "insert into transcript (run_id, epoch, tenant_id, state, most_bytes)
         select run, epoch, tenant, 'open', most from unnest($1::uuid[], $2::int[], $3::uuid[], $4::bigint[]) as new (run, epoch, tenant, most) order by run, epoch
         on conflict do nothing",
        &runs,
        &numbers,
        &tenants,
        &caps
    )
    .execute(work.db())
    .await?;
    for (run, epoch, tenant) in epochs {
        work.command(Command::Seal { tenant, run, epoch });
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
        "with lost as (
             select run_id, transcript.epoch from transcript join unnest($1::uuid[], $2::int[]) as lost (run, epoch) on run_id = lost.run and transcript.epoch = lost.epoch
             order by run_id, transcript.epoch for update of transcript)
         update transcript set state = 'lost' from lost
         where transcript.run_id = lost.run_id and transcript.epoch = lost.epoch and state = 'open' returning transcript.run_id, transcript.epoch, tenant_id",
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
    most_bytes: i64,
    cut_first: Option<i64>,
    cut_last: Option<i64>,
    cut_bytes: i64,
    cut_reason: Option<String>,
}

impl RecordRow {
    fn cut(&self) -> Option<Cut> {
        let reason = match self.cut_reason.as_deref()? {
            "cap" => format!("more than {} bytes were printed; the middle is not kept", self.most_bytes),
            _ => "its time to be kept is over".to_owned(),
        };
        let gap = GapRecord { reason, bytes: Some(self.cut_bytes as u64) };
        Some(Cut { first_seq: self.cut_first? as u64, last_seq: self.cut_last? as u64, gap })
    }
}

impl TryFrom<RecordRow> for Record {
    type Error = Error;

    fn try_from(row: RecordRow) -> Result<Self> {
        let cut = row.cut();
        Ok(Record {
            cut,
            run: row.run_id.into(),
            epoch: row.epoch,
            tenant: row.tenant_id.into(),
            state: state_of(&row.state)?,
            last_seq: row.last_seq as u64,
            bytes: row.bytes as u64,
            most_bytes: row.most_bytes as u64,
            gap: row.gap.map(serde_json::from_value).transpose().map_err(|error| Error::broken(format!("gap record: {error}")))?,
        })
    }
}

/// The record of one epoch, once it was bound.
pub async fn record(db: &PgPool, run: RunId, epoch: i32) -> Result<Option<Record>> {
    sqlx::query_as!(
        RecordRow,
        "select run_id, epoch, tenant_id, state, last_seq, bytes, gap, most_bytes, cut_first, cut_last, cut_bytes, cut_reason from transcript where run_id = $1 and epoch = $2",
        run.uuid(),
        epoch
    )
    .fetch_optional(db)
    .await?
    .map(Record::try_from)
    .transpose()
}

/// Those of these epochs whose records are closed.
pub async fn closed(work: &mut Work, epochs: &[(RunId, i32)]) -> Result<Vec<(RunId, i32)>> {
    let (runs, numbers): (Vec<Uuid>, Vec<i32>) = epochs.iter().map(|(run, epoch)| (run.uuid(), *epoch)).unzip();
    let rows = sqlx::query!(
        "select run_id, transcript.epoch from transcript join unnest($1::uuid[], $2::int[]) as asked (run, epoch)
             on run_id = asked.run and transcript.epoch = asked.epoch where state = 'closed'",
        &runs,
        &numbers
    )
    .fetch_all(work.db())
    .await?;
    Ok(rows.into_iter().map(|row| (row.run_id.into(), row.epoch)).collect())
}

/// The records of a run, in order of epoch.
pub async fn records(db: &PgPool, tenant: TenantId, run: RunId) -> Result<Vec<Record>> {
    sqlx::query_as!(
        RecordRow,
        "select run_id, epoch, tenant_id, state, last_seq, bytes, gap, most_bytes, cut_first, cut_last, cut_bytes, cut_reason from transcript where run_id = $1 and tenant_id = $2 order by epoch",
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

/// Commits sealed pieces to the index, at most one of each epoch. Those that do not follow their last one were sealed by somebody else.
pub(crate) async fn index(work: &mut Work, pieces: &[Piece]) -> Result<Indexed> {
    let epochs: Vec<(RunId, i32, TenantId)> = pieces.iter().map(|piece| (piece.of.run, piece.of.epoch, piece.of.tenant)).collect();
    let (runs, numbers, _) = columns(&epochs);
    let numbers_of = |f: &dyn Fn(&Sealed) -> u64| -> Vec<i64> { pieces.iter().map(|piece| f(&piece.chunk) as i64).collect() };
    let times = |f: &dyn Fn(&Sealed) -> u64| -> Vec<DateTime<Utc>> { pieces.iter().map(|piece| at(f(&piece.chunk))).collect() };
    let keys: Vec<String> = pieces.iter().map(|piece| piece.object_key.clone()).collect();
    let digests: Vec<Vec<u8>> = pieces.iter().map(|piece| piece.chunk.sha256.to_vec()).collect();
    let screens: Vec<Option<i64>> = pieces.iter().map(|piece| piece.chunk.screen_seq.map(|seq| seq as i64)).collect();
    let inserted = sqlx::query!(
        r#"with new as (
               select * from unnest($1::uuid[], $2::int[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::text[], $8::bigint[], $9::bytea[],
                                    $10::timestamptz[], $11::timestamptz[], $12::bigint[])
                   as new (run, epoch, first_seq, last_seq, first_byte, bytes, object_key, size, sha256, first_at, last_at, screen_seq)),
           locked as (
               select run_id, transcript.epoch from transcript join new on run_id = new.run and transcript.epoch = new.epoch
               where state <> 'closed' and transcript.last_seq = new.first_seq - 1 order by run_id, transcript.epoch for update of transcript),
           grown as (
               update transcript set last_seq = new.last_seq, bytes = transcript.bytes + new.bytes
               from new join locked on locked.run_id = new.run and locked.epoch = new.epoch
               where transcript.run_id = new.run and transcript.epoch = new.epoch and state <> 'closed' and transcript.last_seq = new.first_seq - 1
               returning transcript.run_id, transcript.epoch, tenant_id, transcript.bytes - cut_bytes > most_bytes as over)
           insert into chunk (run_id, epoch, first_seq, last_seq, tenant_id, first_byte, bytes, object_key, size, sha256, first_at, last_at, screen_seq)
           select new.run, new.epoch, first_seq, last_seq, tenant_id, first_byte, bytes, object_key, size, sha256, first_at, last_at, screen_seq
           from new join grown on grown.run_id = new.run and grown.epoch = new.epoch
           returning run_id, epoch, tenant_id, (select over from grown where grown.run_id = chunk.run_id and grown.epoch = chunk.epoch) as "over!""#,
        &runs,
        &numbers,
        &numbers_of(&|chunk| chunk.first_seq),
        &numbers_of(&|chunk| chunk.last_seq),
        &numbers_of(&|chunk| chunk.first_byte),
        &numbers_of(&|chunk| chunk.bytes),
        &keys,
        &numbers_of(&|chunk| chunk.body.len() as u64),
        &digests,
        &times(&|chunk| chunk.first_us),
        &times(&|chunk| chunk.last_us),
        &screens as &[Option<i64>]
    )
    .fetch_all(work.db())
    .await?;
    let mut indexed = Indexed::default();
    for row in inserted {
        let of = Epoch { tenant: row.tenant_id.into(), run: row.run_id.into(), epoch: row.epoch };
        indexed.all.insert(of);
        if row.over {
            indexed.over.push(of);
        }
    }
    Ok(indexed)
}

/// What became of sealed pieces.
#[derive(Debug, Default)]
pub(crate) struct Indexed {
    /// The epochs of those that followed their last one.
    pub all: HashSet<Epoch>,
    /// Those that keep more than they may.
    pub over: Vec<Epoch>,
}

/// Drops so much of the middle of these records that they keep what they may, and a sixteenth less, so that it is not done at every piece. Their rows are locked.
pub(crate) async fn cut_middle(work: &mut Work, over: &[Epoch]) -> Result<()> {
    for of in over {
        let chunks = sqlx::query!(
            r#"with record as (
                   select run_id, epoch, last_seq, most_bytes / 4 as head, coalesce(cut_last, 0) as cut_last, bytes - cut_bytes - most_bytes + most_bytes / 16 as excess
                   from transcript where run_id = $1 and epoch = $2),
               middle as (
                   select chunk.run_id, chunk.epoch, first_seq, sum(bytes) over (order by first_seq) - bytes as before
                   from chunk join record on record.run_id = chunk.run_id and record.epoch = chunk.epoch
                   where first_byte >= head and first_seq > cut_last and chunk.last_seq < record.last_seq)
               delete from chunk using middle, record
               where chunk.run_id = middle.run_id and chunk.epoch = middle.epoch and chunk.first_seq = middle.first_seq and before < excess
               returning chunk.first_seq, chunk.last_seq, chunk.bytes, chunk.object_key"#,
            of.run.uuid(),
            of.epoch
        )
        .fetch_all(work.db())
        .await?;
        let rows = chunks.into_iter().map(|row| Dropped {
            first_seq: row.first_seq,
            last_seq: row.last_seq,
            bytes: row.bytes,
            object_key: row.object_key,
        });
        note_cut(work, of.run, of.epoch, rows.collect(), "cap").await?;
    }
    Ok(())
}

/// A chunk that is in the index no longer.
struct Dropped {
    first_seq: i64,
    last_seq: i64,
    bytes: i64,
    object_key: String,
}

/// Widens an epoch's cut by what was dropped, and gives up its objects.
async fn note_cut(work: &mut Work, run: RunId, epoch: i32, dropped: Vec<Dropped>, reason: &str) -> Result<()> {
    let (Some(first), Some(last)) = (dropped.iter().map(|one| one.first_seq).min(), dropped.iter().map(|one| one.last_seq).max()) else {
        return Ok(());
    };
    sqlx::query!(
        "update transcript set cut_first = least(cut_first, $3), cut_last = greatest(cut_last, $4), cut_bytes = cut_bytes + $5, cut_reason = $6
         where run_id = $1 and epoch = $2",
        run.uuid(),
        epoch,
        first,
        last,
        dropped.iter().map(|one| one.bytes).sum::<i64>(),
        reason
    )
    .execute(work.db())
    .await?;
    let keys: Vec<String> = dropped.into_iter().map(|one| one.object_key).collect();
    towpath_file::objects_unused(work, &keys).await
}

/// Chunks that are given up in one transaction.
const EXPIRE_CHUNKS: i64 = 1000;

/// Gives up some of what is kept of a run's records, oldest first; how many chunks, 0 when nothing is left.
pub async fn expire(work: &mut Work, run: RunId) -> Result<usize> {
    let locked = sqlx::query_scalar!("select epoch from transcript where run_id = $1 order by epoch for update", run.uuid())
        .fetch_all(work.db())
        .await?;
    let chunks = sqlx::query!(
        "delete from chunk where run_id = $1 and (epoch, first_seq) in
             (select epoch, first_seq from chunk where run_id = $1 and epoch = any($2) order by epoch, first_seq limit $3)
         returning epoch, first_seq, last_seq, bytes, object_key",
        run.uuid(),
        &locked,
        EXPIRE_CHUNKS
    )
    .fetch_all(work.db())
    .await?;
    let dropped_all = chunks.len();
    let mut by_epoch: std::collections::BTreeMap<i32, Vec<Dropped>> = std::collections::BTreeMap::new();
    for row in chunks {
        let dropped = Dropped { first_seq: row.first_seq, last_seq: row.last_seq, bytes: row.bytes, object_key: row.object_key };
        by_epoch.entry(row.epoch).or_default().push(dropped);
    }
    for (epoch, dropped) in by_epoch {
        note_cut(work, run, epoch, dropped, "retention").await?;
    }
    Ok(dropped_all)
}

/// Forgets the records of runs that are removed; what they kept was given up before.
pub async fn remove(work: &mut Work, runs: &[RunId]) -> Result<()> {
    let runs: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    sqlx::query!("delete from transcript where run_id = any($1)", &runs).execute(work.db()).await?;
    Ok(())
}

fn at(microseconds: u64) -> DateTime<Utc> {
    i64::try_from(microseconds).ok().and_then(DateTime::from_timestamp_micros).unwrap_or(DateTime::UNIX_EPOCH)
}

/// How a record ends.
pub(crate) enum Closing<'a> {
    End(&'a EndRecord),
    Gap(&'a GapRecord),
}

/// Closes records, each after its last sealed frame, and says so to their runs; the ones that were open.
pub(crate) async fn close(work: &mut Work, endings: &[(Epoch, u64, Closing<'_>)]) -> Result<HashSet<Epoch>> {
    if endings.is_empty() {
        return Ok(HashSet::new());
    }
    let json = |value: serde_json::Result<serde_json::Value>| value.map_err(|error| Error::broken(format!("record: {error}")));
    let epochs: Vec<(RunId, i32, TenantId)> = endings.iter().map(|(of, ..)| (of.run, of.epoch, of.tenant)).collect();
    let (runs, numbers, _) = columns(&epochs);
    let last: Vec<i64> = endings.iter().map(|(_, last, _)| *last as i64).collect();
    let mut ends: Vec<Option<serde_json::Value>> = Vec::new();
    let mut gaps: Vec<Option<serde_json::Value>> = Vec::new();
    for (.., closing) in endings {
        ends.push(if let Closing::End(end) = closing { Some(json(serde_json::to_value(end))?) } else { None });
        gaps.push(if let Closing::Gap(gap) = closing { Some(json(serde_json::to_value(gap))?) } else { None });
    }
    let closed = sqlx::query!(
        "update transcript set state = 'closed', closed_at = now(), end_record = new.end_record, gap = new.gap
         from unnest($1::uuid[], $2::int[], $3::bigint[], $4::jsonb[], $5::jsonb[]) as new (run, epoch, last_seq, end_record, gap)
         where run_id = new.run and transcript.epoch = new.epoch and transcript.last_seq = new.last_seq and state <> 'closed'
         returning run_id, transcript.epoch, tenant_id",
        &runs,
        &numbers,
        &last,
        &ends as &[Option<serde_json::Value>],
        &gaps as &[Option<serde_json::Value>]
    )
    .fetch_all(work.db())
    .await?;
    let closed: HashSet<Epoch> =
        closed.into_iter().map(|row| Epoch { tenant: row.tenant_id.into(), run: row.run_id.into(), epoch: row.epoch }).collect();
    for of in &closed {
        work.command(Command::Sealed { tenant: of.tenant, run: of.run, epoch: of.epoch });
        work.event(of.tenant, of.run, event::Kind::Closed { epoch: of.epoch });
    }
    Ok(closed)
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

/// The newest epoch of a run, and the last screen of its terminal that is in a chunk; 0 when none is.
pub(crate) async fn last_screen(db: &PgPool, tenant: TenantId, run: RunId) -> Result<Option<(i32, u64)>> {
    let row = sqlx::query!(
        r#"select epoch, (select max(screen_seq) from chunk where chunk.run_id = transcript.run_id and chunk.epoch = transcript.epoch and screen_seq is not null) as screen
           from transcript where run_id = $1 and tenant_id = $2 order by epoch desc limit 1"#,
        run.uuid(),
        tenant.uuid()
    )
    .fetch_optional(db)
    .await?;
    Ok(row.map(|row| (row.epoch, row.screen.unwrap_or(0) as u64)))
}

/// The last frame of the last chunk that ends before this moment.
pub(crate) async fn last_before(db: &PgPool, tenant: TenantId, run: RunId, at: DateTime<Utc>) -> Result<Option<(i32, u64)>> {
    let row = sqlx::query!(
        "select epoch, last_seq from chunk where run_id = $1 and tenant_id = $2 and last_at < $3 order by epoch desc, last_seq desc limit 1",
        run.uuid(),
        tenant.uuid(),
        at
    )
    .fetch_optional(db)
    .await?;
    Ok(row.map(|row| (row.epoch, row.last_seq as u64)))
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
