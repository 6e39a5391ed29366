//! One task for each live epoch: gathers its frames in order, seals them, closes the record. It may be killed anywhere: what is not indexed is still in JetStream or in the supervisor's spool.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use async_nats::Subscriber;
use futures::StreamExt;
use towpath_chassis::{Chassis, Error, Result, clock, lease};
use towpath_schemas::{
    event,
    frame::{EndRecord, Frame, FrameKind, GapRecord},
    key, subject,
};
use uuid::Uuid;

use crate::{
    chunk,
    commit::{Commits, Committed, Piece},
    stream::{self, Epoch, Tip, Walk},
    table::{self, Closing, Record, State},
};

/// Payload bytes at which a chunk is sealed.
const CHUNK_BYTES: usize = 256 * 1024;
/// A capped record is kept and dropped by whole pieces: none is larger than this part of it, or its head would leave no room for its tail.
const PIECES: u64 = 16;
const SILENCE: Duration = Duration::from_secs(2);
const AGE: Duration = Duration::from_secs(30);
/// How often the lease is renewed and Postgres looked at.
const LOOK: Duration = Duration::from_secs(3);
const LEASE: Duration = Duration::from_secs(10);
/// The least time between two complaints about the same hole.
const COMPLAIN: Duration = Duration::from_secs(1);

/// How long an epoch is one sealer's.
pub fn lease_time() -> Duration {
    clock::scaled(LEASE)
}

/// Why a sealer stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    Closed,
    /// Somebody else has the lease, or there is no such record.
    NotOurs,
    Draining,
}

/// What came of sealing what was gathered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sealed {
    /// Nothing was gathered.
    Nothing,
    Indexed,
    /// That closed the record.
    Closed,
    /// Somebody else sealed these frames.
    NotNext,
}

/// How a pass over what JetStream holds ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refilled {
    /// It holds nothing more that could be next.
    Tip,
    /// What it sealed closed the record.
    Closed,
    /// Somebody else sealed meanwhile.
    BrokenOff,
}

struct Sealer {
    chassis: Chassis,
    commits: Commits,
    owner: Uuid,
    of: Epoch,
    /// Frames that follow the last sealed one.
    gathered: Vec<Frame>,
    gathered_bytes: usize,
    /// Sealed at once when so much was gathered, however far behind the sealer is.
    most_gathered: usize,
    sealed: u64,
    first_at: Option<Instant>,
    last_at: Instant,
    complained_at: Option<Instant>,
    /// The lease went back with the commit that closed the record.
    given_back: bool,
}

/// Seals the epoch until it is closed, the lease is lost or the process drains. The lease was just taken.
pub(crate) async fn run(chassis: Chassis, commits: Commits, of: Epoch, owner: Uuid) -> Result<Stopped> {
    let mut sealer = Sealer {
        chassis: chassis.clone(),
        commits,
        owner,
        of,
        gathered: Vec::new(),
        gathered_bytes: 0,
        most_gathered: usize::MAX,
        sealed: 0,
        first_at: None,
        last_at: Instant::now(),
        complained_at: None,
        given_back: false,
    };
    let result = sealing(&chassis, &mut sealer).await;
    // An expired lease is as good as a released one, only later.
    if !sealer.given_back
        && let Err(error) = lease::release(&chassis.db, &table::lease_name(of), owner).await
    {
        tracing::debug!(error = error.chain(), "the lease runs out by itself");
    }
    result
}

async fn sealing(chassis: &Chassis, sealer: &mut Sealer) -> Result<Stopped> {
    let of = sealer.of;
    let subscribe = |subject: String| async {
        chassis.nats.subscribe(subject).await.map_err(|error| Error::Nats { doing: "subscribe", detail: error.to_string() })
    };
    // Listen first, then read what is there: nothing falls between.
    let mut live = subscribe(subject::output_epoch(of.tenant, of.run, of.epoch)).await?;
    let mut events = subscribe(subject::event_run(of.tenant, of.run)).await?;
    let Some(record) = sealer.record().await? else { return Ok(Stopped::NotOurs) };
    let stop = chassis.tasks.stopping();
    let mut looked_at = Instant::now();
    let mut renewed_at = Instant::now();
    let mut look = false;
    if sealer.catch_up(record).await? == State::Closed {
        return Ok(Stopped::Closed);
    }
    loop {
        if renewed_at.elapsed() >= clock::scaled(LOOK) {
            if !sealer.renew().await? {
                return Ok(Stopped::NotOurs);
            }
            renewed_at = Instant::now();
        }
        if look {
            looked_at = Instant::now();
            let Some(record) = sealer.record().await? else { return Ok(Stopped::Closed) };
            if sealer.catch_up(record).await? == State::Closed {
                return Ok(Stopped::Closed);
            }
        }
        let due = sealer.due();
        if due.is_some_and(|due| due <= Instant::now()) && sealer.seal().await? == Sealed::Closed {
            return Ok(Stopped::Closed);
        }
        let wake = sealer.due().unwrap_or(looked_at + clock::scaled(LOOK)).min(looked_at + clock::scaled(LOOK));
        look = tokio::select! {
            () = stop.cancelled() => {
                sealer.seal().await?;
                return Ok(Stopped::Draining);
            }
            batch = next_frames(&mut live) => match sealer.take_live(batch?).await? {
                Refilled::Closed => return Ok(Stopped::Closed),
                Refilled::Tip | Refilled::BrokenOff => false,
            },
            event = events.next() => event.is_some_and(|message| calls_for_a_look(&message.payload)),
            () = tokio::time::sleep_until(wake.into()) => looked_at.elapsed() >= clock::scaled(LOOK),
        };
    }
}

/// Somebody said that the run moved: its record may be lost now.
fn calls_for_a_look(payload: &[u8]) -> bool {
    matches!(serde_json::from_slice(payload), Ok(event::Kind::Moved { .. }))
}

/// All frames that have arrived, at least one.
async fn next_frames(live: &mut Subscriber) -> Result<Vec<Frame>> {
    use futures::FutureExt;
    let closed = || Error::Nats { doing: "listen", detail: "the subscription was closed".to_owned() };
    let mut message = live.next().await.ok_or_else(closed)?;
    let mut frames = Vec::new();
    loop {
        match Frame::decode(&message.payload) {
            Ok((frame, _)) => frames.push(frame),
            Err(error) => tracing::warn!(%error, "OUTPUT carries no frame"),
        }
        if frames.len() >= 64 {
            return Ok(frames);
        }
        match live.next().now_or_never() {
            Some(Some(next)) => message = next,
            Some(None) | None => return Ok(frames),
        }
    }
}

impl Sealer {
    fn next(&self) -> u64 {
        self.sealed + self.gathered.len() as u64 + 1
    }

    /// Takes the next frame; an end when what had to be sealed for it ends the pass.
    async fn push(&mut self, frame: Frame) -> Result<Option<Refilled>> {
        self.gathered_bytes += frame.payload.len();
        self.last_at = Instant::now();
        self.first_at.get_or_insert(self.last_at);
        self.gathered.push(frame);
        if self.gathered_bytes < self.most_gathered {
            return Ok(None);
        }
        self.seal_and_go_on().await
    }

    async fn seal_and_go_on(&mut self) -> Result<Option<Refilled>> {
        Ok(match self.seal().await? {
            Sealed::Closed => Some(Refilled::Closed),
            Sealed::NotNext => Some(Refilled::BrokenOff),
            Sealed::Indexed | Sealed::Nothing => None,
        })
    }

    fn has_end(&self) -> bool {
        self.gathered.last().is_some_and(|frame| frame.kind == FrameKind::End)
    }

    /// When what was gathered is to be sealed.
    fn due(&self) -> Option<Instant> {
        let first = self.first_at?;
        if self.has_end() || self.gathered_bytes >= CHUNK_BYTES {
            return Some(first);
        }
        Some((self.last_at + SILENCE).min(first + AGE))
    }

    /// Takes frames as they come.
    async fn take_live(&mut self, frames: Vec<Frame>) -> Result<Refilled> {
        let mut hole = false;
        for frame in frames {
            match frame.seq.cmp(&self.next()) {
                std::cmp::Ordering::Equal => {
                    if let Some(end) = self.push(frame).await? {
                        return Ok(end);
                    }
                }
                std::cmp::Ordering::Less => {}
                std::cmp::Ordering::Greater => hole = true,
            }
        }
        if hole { self.refill().await } else { Ok(Refilled::Tip) }
    }

    /// Reads what JetStream holds after the gathered frames, sealing as it goes.
    async fn refill(&mut self) -> Result<Refilled> {
        let chassis = self.chassis.clone();
        let mut walk = Walk::new(&chassis, self.of, self.next());
        loop {
            let (frames, tip) = walk.step().await?;
            for frame in frames {
                // Somebody else sealed meanwhile: these frames are not the next ones any more.
                if frame.seq != self.next() {
                    return Ok(Refilled::BrokenOff);
                }
                if let Some(end) = self.push(frame).await? {
                    return Ok(end);
                }
            }
            if self.gathered_bytes >= CHUNK_BYTES
                && let Some(end) = self.seal_and_go_on().await?
            {
                return Ok(end);
            }
            if let Some(tip) = tip {
                if tip == Tip::Hole {
                    self.complain();
                }
                return Ok(Refilled::Tip);
            }
        }
    }

    /// Statements of a sealer's own end within its lease: a connection that went away without a word must not keep it.
    async fn within<T>(&self, statement: impl Future<Output = Result<T>>) -> Result<T> {
        let late = || Error::Database(sqlx::Error::PoolTimedOut);
        tokio::time::timeout(lease_time(), statement).await.unwrap_or_else(|_| Err(late()))
    }

    async fn record(&self) -> Result<Option<Record>> {
        self.within(table::record(&self.chassis.db, self.of.run, self.of.epoch)).await
    }

    /// False when the lease is somebody else's.
    async fn renew(&mut self) -> Result<bool> {
        self.given_back = false;
        self.within(lease::take(&self.chassis.db, &table::lease_name(self.of), self.owner, lease_time())).await
    }

    /// Tells the gateway that frames are missing; it asks the supervisor for them.
    fn complain(&mut self) {
        if self.complained_at.is_some_and(|at| at.elapsed() < COMPLAIN) {
            return;
        }
        self.complained_at = Some(Instant::now());
        metrics::counter!("towpath_transcript_holes_total").increment(1);
        let kind = event::Kind::Hole { epoch: self.of.epoch, seq: self.next() as i64 };
        let (nats, subject) = (self.chassis.nats.clone(), subject::event(self.of.tenant, self.of.run, kind.token()));
        self.chassis.tasks.spawn(async move {
            let Ok(body) = serde_json::to_vec(&kind) else { return };
            if let Err(error) = nats.publish(subject, body.into()).await {
                tracing::debug!(%error, "the hole is told again at the next look");
            }
        });
    }

    /// Takes note of the record's row and looks into JetStream: live messages may have been missed, the epoch may be lost.
    async fn catch_up(&mut self, mut record: Record) -> Result<State> {
        self.most_gathered = usize::try_from(record.most_bytes / PIECES).unwrap_or(usize::MAX);
        loop {
            if record.last_seq != self.sealed {
                self.start_over(record.last_seq);
            }
            if record.state == State::Closed {
                self.purge(self.sealed, true).await;
                return Ok(State::Closed);
            }
            let refilled = self.refill().await?;
            if refilled == Refilled::Closed {
                return Ok(State::Closed);
            }
            let lost = record.state == State::Lost;
            let sealed = if lost || self.has_end() { self.seal().await? } else { Sealed::Nothing };
            match sealed {
                Sealed::Closed => return Ok(State::Closed),
                _ if !lost => return Ok(State::Open),
                // Only a whole pass that finds nothing new says that nothing more is to be had; and the lease says that nobody else is about to find something.
                Sealed::Nothing if refilled == Refilled::Tip => {
                    if !self.renew().await? {
                        return Ok(State::Open);
                    }
                    if self.close_with_gap().await? {
                        return Ok(State::Closed);
                    }
                }
                Sealed::Nothing | Sealed::Indexed | Sealed::NotNext => {}
            }
            if self.chassis.tasks.is_stopping() {
                return Ok(State::Open);
            }
            let Some(now) = self.record().await? else { return Ok(State::Closed) };
            record = now;
        }
    }

    fn start_over(&mut self, sealed: u64) {
        self.sealed = sealed;
        self.gathered.clear();
        self.gathered_bytes = 0;
        self.first_at = None;
    }

    /// Seals what was gathered.
    async fn seal(&mut self) -> Result<Sealed> {
        let Some(chunk) = chunk::pack(&self.gathered)? else { return Ok(Sealed::Nothing) };
        let end = match self.gathered.last() {
            Some(frame) if frame.kind == FrameKind::End => {
                Some(serde_json::from_slice::<EndRecord>(&frame.payload).map_err(|error| Error::broken(format!("end record: {error}")))?)
            }
            Some(_) | None => None,
        };
        let object_key = key::chunk(self.of.tenant, self.of.run, self.of.epoch, towpath_file::unique());
        self.commits.begin(self.of.tenant, object_key.clone()).await?;
        self.chassis.store.put(&object_key, chunk.body.clone().into()).await?;
        let (last_seq, bytes) = (chunk.last_seq, chunk.bytes);
        let committed = self.commits.commit(Piece { of: self.of, chunk, object_key, end, owner: self.owner }).await?;
        if committed == Committed::NotNext {
            // Another sealer was first; its object counts and ours is swept.
            let sealed = self.record().await?.map_or(self.sealed, |record| record.last_seq);
            self.start_over(sealed);
            return Ok(Sealed::NotNext);
        }
        metrics::counter!("towpath_sealed_bytes_total").increment(bytes);
        let closed = committed == Committed::Closed;
        self.given_back = closed;
        let before = self.sealed;
        self.start_over(last_seq);
        self.purge(before, closed).await;
        Ok(if closed { Sealed::Closed } else { Sealed::Indexed })
    }

    /// The epoch is lost and nothing more is to be had: marks the gap. What it cost nobody can know.
    async fn close_with_gap(&mut self) -> Result<bool> {
        let gap = GapRecord { reason: "the sandbox was lost before its end record was kept".to_owned(), bytes: None };
        let mut work = self.chassis.begin().await?;
        let closed = !table::close(&mut work, &[(self.of, self.sealed, Closing::Gap(&gap))]).await?.is_empty();
        work.commit().await?;
        if closed {
            metrics::counter!("towpath_transcript_gaps_total").increment(1);
            self.purge(self.sealed, true).await;
        }
        Ok(closed)
    }

    async fn purge(&self, before: u64, closed: bool) {
        // What stays is dropped when it is read, and again at the record's end.
        if let Err(error) = stream::purge(&self.chassis, self.of, before, self.sealed, closed).await {
            tracing::debug!(error = error.chain(), "sealed frames stay in JetStream a while");
        }
    }
}
