//! One reader for everybody: history from S3, then JetStream, then live frames. It listens first, then reads history, and drops what it has; whenever it meets a hole it goes back to
//! history. So a reader that drops or falls behind loses nothing, and costs no consumer.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::sync::{
    Semaphore,
    broadcast::{self, error::RecvError},
    mpsc,
};
use towpath_chassis::{Chassis, Error, Result, telemetry::limit_reached};
use towpath_schemas::{
    frame::{Frame, GapRecord},
    id::{RunId, TenantId},
};

use crate::{
    chunk,
    stream::{Epoch, Walk},
    table::{self, Record, State},
};

/// Pieces on their way to one reader, and bytes of output in each, one frame more at most; a slow one holds back only itself. Thousands may be slow.
const AHEAD: usize = 2;
const PIECE_BYTES: usize = 64 * 1024;
/// A reader that takes nothing for this long has the rest of the chunk read again once it goes on.
const STALLED: Duration = Duration::from_secs(1);
/// Chunks whose index rows are read at a time.
const CHUNKS: i64 = 64;

/// The last frame that a reader has: (epoch, seq). (0, 0) is the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Cursor {
    pub epoch: i32,
    pub seq: u64,
}

impl Cursor {
    /// `<epoch>.<seq>`
    pub fn parse(text: &str) -> Option<Self> {
        let (epoch, seq) = text.split_once('.')?;
        Some(Self {
            epoch: epoch.parse().ok().filter(|epoch| *epoch >= 0)?,
            seq: seq.parse().ok().filter(|seq| i64::try_from(*seq).is_ok())?,
        })
    }
}

/// Where somebody who wants to see a run's terminal as it is now begins to read: before the last screen that was recorded, so that coming late costs the same at
/// any hour.
pub async fn last_screen(chassis: &Chassis, tenant: TenantId, run: RunId) -> Result<Cursor> {
    let place = table::last_screen(&chassis.db, tenant, run).await?;
    Ok(place.map_or(Cursor::default(), |(epoch, seq)| Cursor { epoch, seq: seq.saturating_sub(1) }))
}

/// Where to begin so that everything from this moment on is read: at the first chunk that reaches beyond it. What is older is dropped by whoever reads.
pub async fn since(chassis: &Chassis, tenant: TenantId, run: RunId, at: chrono::DateTime<chrono::Utc>) -> Result<Cursor> {
    let place = table::last_before(&chassis.db, tenant, run, at).await?;
    Ok(place.map_or(Cursor::default(), |(epoch, seq)| Cursor { epoch, seq }))
}

/// What a reader gets, in order.
#[derive(Debug)]
pub enum Piece {
    Frames(Vec<Frame>),
    /// Something is missing at this place: up to and with frame `last_seq`, or whatever would have come next.
    Gap {
        epoch: i32,
        last_seq: Option<u64>,
        gap: GapRecord,
    },
    /// A chunk that is in the index cannot be read: it is damaged or gone. Reading goes on after it.
    Damaged {
        epoch: i32,
        first_seq: u64,
        last_seq: u64,
        reason: String,
    },
    /// Everything that exists was given; `closed`: and every record so far is closed.
    Tip {
        closed: bool,
    },
}

/// What is new of a run, told to all of its readers at once.
#[derive(Debug, Clone)]
pub enum Live {
    Frame(Arc<Frame>),
    /// The run's records as they are now.
    Records(Arc<Vec<Record>>),
}

/// Fetches of history at a time in one process. The others wait for their turn; one that waits for its reader holds none.
static FETCHES: Semaphore = Semaphore::const_new(32);

/// Reads a run's transcript after `after`, to its tip.
pub fn read(chassis: &Chassis, tenant: TenantId, run: RunId, after: Cursor) -> mpsc::Receiver<Result<Piece>> {
    start(chassis, tenant, run, after, None)
}

/// Reads it and goes on with what is new until the receiver is dropped. `live` was subscribed before.
pub fn follow(
    chassis: &Chassis,
    tenant: TenantId,
    run: RunId,
    after: Cursor,
    live: broadcast::Receiver<Live>,
) -> mpsc::Receiver<Result<Piece>> {
    start(chassis, tenant, run, after, Some(live))
}

fn start(
    chassis: &Chassis,
    tenant: TenantId,
    run: RunId,
    after: Cursor,
    live: Option<broadcast::Receiver<Live>>,
) -> mpsc::Receiver<Result<Piece>> {
    let (sender, receiver) = mpsc::channel(AHEAD);
    let task = Reading { chassis: chassis.clone(), tenant, run, at: after, sender: sender.clone() };
    let stop = chassis.tasks.stopping();
    chassis.tasks.spawn(async move {
        let result = tokio::select! {
            () = stop.cancelled() => return,
            () = sender.closed() => return,
            result = task.go(live) => result,
        };
        if let Err(error) = result {
            // A receiver that has gone away does not want to know.
            let _ = sender.send(Err(error)).await;
        }
    });
    receiver
}

struct Reading {
    chassis: Chassis,
    tenant: TenantId,
    run: RunId,
    at: Cursor,
    sender: mpsc::Sender<Result<Piece>>,
}

/// One fetch of history, in its turn: thousands may come at once, and none of them shall take the database from the others.
pub async fn fetch<T>(fetching: impl Future<Output = Result<T>>) -> Result<T> {
    let _turn = FETCHES.acquire().await.map_err(|_| Error::broken("nobody may fetch"))?;
    fetching.await
}

impl Reading {
    async fn go(mut self, mut live: Option<broadcast::Receiver<Live>>) -> Result<()> {
        loop {
            let closed = self.catch_up().await?;
            self.give(Piece::Tip { closed }).await?;
            let Some(live) = &mut live else { return Ok(()) };
            self.live(live).await?;
        }
    }

    async fn give(&self, piece: Piece) -> Result<()> {
        self.sender.send(Ok(piece)).await.map_err(|_| gone())
    }

    /// Gives everything that exists; true when every record is closed.
    async fn catch_up(&mut self) -> Result<bool> {
        loop {
            let records = fetch(table::records(&self.chassis.db, self.tenant, self.run)).await?;
            let Some(record) =
                records.iter().find(|record| record.epoch > self.at.epoch || (record.epoch == self.at.epoch && !self.has_all_of(record)))
            else {
                return Ok(records.iter().all(|record| record.state == State::Closed));
            };
            if record.epoch > self.at.epoch {
                self.at = Cursor { epoch: record.epoch, seq: 0 };
            }
            let of = Epoch { tenant: self.tenant, run: self.run, epoch: record.epoch };
            self.sealed(of).await?;
            if record.state == State::Closed && self.at.seq >= record.last_seq {
                if let Some(gap) = &record.gap {
                    self.give(Piece::Gap { epoch: record.epoch, last_seq: None, gap: gap.clone() }).await?;
                }
                self.at.seq = u64::MAX;
                continue;
            }
            if self.unsealed(of).await? {
                return Ok(false);
            }
        }
    }

    /// `u64::MAX` stands for "all of it, and the gap marker too".
    fn has_all_of(&self, record: &Record) -> bool {
        record.state == State::Closed && self.at.seq == u64::MAX
    }

    async fn sealed(&mut self, of: Epoch) -> Result<()> {
        loop {
            let chunks = fetch(table::chunks_after(&self.chassis.db, of, self.at.seq, CHUNKS)).await?;
            if chunks.is_empty() {
                return self.cut(of, u64::MAX).await;
            }
            for row in chunks {
                // The index has no holes but what was cut.
                if row.first_seq > self.at.seq + 1 {
                    self.cut(of, row.first_seq).await?;
                }
                match fetch(self.chunk(&row)).await {
                    Ok(frames) => {
                        if !self.give_new(frames).await? {
                            break;
                        }
                    }
                    Err(error) if error.is_passing() => return Err(error),
                    // Whoever reads slowly may come when it is cut already.
                    Err(_) if !self.is_indexed(of, &row).await? => break,
                    Err(error) => {
                        tracing::error!(run = %self.run, epoch = of.epoch, key = row.object_key, error = error.chain(), "a chunk cannot be read");
                        metrics::counter!("towpath_damaged_chunks_total").increment(1);
                        let reason = error.to_string();
                        self.give(Piece::Damaged { epoch: of.epoch, first_seq: row.first_seq, last_seq: row.last_seq, reason }).await?;
                        self.at.seq = row.last_seq;
                    }
                }
            }
        }
    }

    /// Tells what was cut between where the reader is and `until`.
    async fn cut(&mut self, of: Epoch, until: u64) -> Result<()> {
        let record = fetch(table::record(&self.chassis.db, of.run, of.epoch)).await?;
        let Some(cut) = record.and_then(|record| record.cut).filter(|cut| cut.last_seq > self.at.seq && cut.first_seq < until) else {
            return Ok(());
        };
        self.give(Piece::Gap { epoch: of.epoch, last_seq: Some(cut.last_seq), gap: cut.gap }).await?;
        self.at.seq = cut.last_seq;
        Ok(())
    }

    async fn is_indexed(&self, of: Epoch, row: &table::ChunkRow) -> Result<bool> {
        let now = fetch(table::chunks_after(&self.chassis.db, of, self.at.seq, 1)).await?;
        Ok(now.first().is_some_and(|first| first.object_key == row.object_key))
    }

    async fn chunk(&self, row: &table::ChunkRow) -> Result<Vec<Frame>> {
        let body = self.chassis.store.get(&row.object_key).await?;
        let frames = chunk::unpack(&body, &row.sha256)?;
        let whole =
            frames.first().map(|frame| frame.seq) == Some(row.first_seq) && frames.last().map(|frame| frame.seq) == Some(row.last_seq);
        if whole { Ok(frames) } else { Err(Error::broken(format!("{} holds other frames than its index row says", row.object_key))) }
    }

    /// Gives what JetStream holds; true when nothing more is there, false when it is to be looked for anew.
    async fn unsealed(&mut self, of: Epoch) -> Result<bool> {
        let chassis = self.chassis.clone();
        let mut walk = Walk::new(&chassis, of, self.at.seq + 1);
        loop {
            let (frames, tip) = fetch(walk.step()).await?;
            if !self.give_new(frames).await? {
                return Ok(false);
            }
            // With a hole and nothing sealed either, the frames are on their way again: wait for live ones.
            if tip.is_some() {
                let sealed_meanwhile = !fetch(table::chunks_after(&chassis.db, of, self.at.seq, 1)).await?.is_empty();
                let closed = fetch(table::record(&chassis.db, of.run, of.epoch)).await?.is_some_and(|record| record.state == State::Closed);
                return Ok(!sealed_meanwhile && !closed);
            }
        }
    }

    /// Gives the frames that the reader does not have, a few at a time. False when it stalls: then those that are left are dropped, and it is waited until it goes on.
    async fn give_new(&mut self, frames: Vec<Frame>) -> Result<bool> {
        let at = self.at.seq;
        let mut frames = frames.into_iter().filter(|frame| frame.seq > at).peekable();
        while frames.peek().is_some() {
            let Ok(place) = tokio::time::timeout(STALLED, self.sender.reserve()).await else {
                drop(frames);
                limit_reached("output_ahead_of_a_reader");
                self.sender.reserve().await.map_err(|_| gone())?;
                return Ok(false);
            };
            let mut piece = Vec::new();
            let mut bytes = 0;
            while bytes < PIECE_BYTES
                && let Some(frame) = frames.next()
            {
                bytes += frame.payload.len();
                self.at.seq = frame.seq;
                piece.push(frame);
            }
            place.map_err(|_| gone())?.send(Ok(Piece::Frames(piece)));
        }
        Ok(true)
    }

    /// Gives live frames until there is a hole, another epoch, or more in the records than it has: then history is read again. So one that is too slow and misses
    /// some loses nothing.
    async fn live(&mut self, live: &mut broadcast::Receiver<Live>) -> Result<()> {
        loop {
            let frame = match live.recv().await {
                Ok(Live::Frame(frame)) => frame,
                Ok(Live::Records(records)) if self.has_all(&records) => continue,
                Ok(Live::Records(_)) => return Ok(()),
                Err(RecvError::Lagged(_)) => {
                    limit_reached("frames_ahead_of_a_reader");
                    return Ok(());
                }
                Err(RecvError::Closed) => return Err(closed()),
            };
            let cursor = Cursor { epoch: i32::try_from(frame.epoch).unwrap_or(i32::MAX), seq: frame.seq };
            if cursor <= self.at {
                continue;
            }
            if cursor.epoch != self.at.epoch || self.at.seq == u64::MAX || cursor.seq != self.at.seq + 1 {
                return Ok(());
            }
            if !self.give_new(vec![Frame::clone(&frame)]).await? {
                return Ok(());
            }
        }
    }

    /// Nothing is sealed that was not given, and no record was closed since.
    fn has_all(&self, records: &[Record]) -> bool {
        records.iter().all(|record| match record.epoch.cmp(&self.at.epoch) {
            std::cmp::Ordering::Less => true,
            std::cmp::Ordering::Equal => self.at.seq == u64::MAX || (record.state != State::Closed && record.last_seq <= self.at.seq),
            std::cmp::Ordering::Greater => false,
        })
    }
}

fn gone() -> Error {
    Error::broken("the reader has gone away")
}

fn closed() -> Error {
    Error::Nats { doing: "listen", detail: "the subscription was closed".to_owned() }
}
