//! A run's event stream: its history (moves of the run and its steers, ordered by revision) and its transcript (ordered by epoch and sequence), each without a gap or a repeat from any id on.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::response::sse::Event;
use base64::{Engine, engine::general_purpose::STANDARD};
use futures::{Stream, StreamExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use towpath_chassis::{Chassis, Error, Result};
use towpath_run::view;
use towpath_schemas::{
    ErrorCode,
    body::{HistoryEntry, OutputEvent, RunState},
    frame::Frame,
    id::{RunId, TenantId},
};
use towpath_transcript::{
    State,
    reader::{self, Cursor, Piece},
};

use crate::feed::Feed;

/// A comment on a stream that is silent for this long keeps it open.
pub const COMMENT: Duration = Duration::from_secs(15);
/// Events on their way to one listener; each may hold a whole frame, and thousands of listeners may stop to read.
const AHEAD: usize = 8;
/// How long an ended run's stream waits for a record that is still being sealed.
const SEALING: Duration = Duration::from_secs(10);

/// Where a listener is: the newest revision and the last frame that it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Place {
    pub revision: i64,
    pub frame: Cursor,
}

impl Place {
    /// `<run>.<revision>.<epoch>.<seq>`
    fn id(&self, run: RunId) -> String {
        format!("{run}.{}.{}.{}", self.revision, self.frame.epoch, self.frame.seq)
    }

    pub fn parse(run: RunId, text: &str) -> Result<Self> {
        let refuse = || {
            Error::refused(
                ErrorCode::BadRequest,
                format!("Last-Event-ID: `{}` is no id of this run's events", text.chars().take(120).collect::<String>()),
            )
        };
        let mut parts = text.split('.');
        let same_run = parts.next().and_then(|part| part.parse::<RunId>().ok()) == Some(run);
        let revision = parts.next().and_then(|part| part.parse::<i64>().ok());
        let epoch = parts.next().and_then(|part| part.parse::<i32>().ok());
        let seq = parts.next().and_then(|part| part.parse::<i64>().ok());
        match (same_run, revision, epoch, seq, parts.next()) {
            (true, Some(revision @ 0..), Some(epoch @ 0..), Some(seq @ 0..), None) => {
                Ok(Self { revision, frame: Cursor { epoch, seq: seq as u64 } })
            }
            _ => Err(refuse()),
        }
    }
}

/// Follows a run from a place to its end.
pub fn follow(
    chassis: &Chassis,
    feed: Arc<Feed>,
    tenant: TenantId,
    run: RunId,
    from: Place,
) -> impl Stream<Item = std::result::Result<Event, Infallible>> + use<> {
    let (sender, receiver) = mpsc::channel(AHEAD);
    let follower = Follower { chassis: chassis.clone(), feed, tenant, run, at: from, sender: sender.clone(), look_at: None, closed: false };
    let stop = chassis.tasks.stopping();
    chassis.tasks.spawn(async move {
        let result = tokio::select! {
            () = stop.cancelled() => return,
            () = sender.closed() => return,
            result = follower.go() => result,
        };
        if let Err(error) = result {
            // The listener reconnects with its last id and goes on from there.
            tracing::debug!(error = error.chain(), "an event stream broke off");
        }
    });
    ReceiverStream::new(receiver).map(Ok)
}

struct Follower {
    chassis: Chassis,
    feed: Arc<Feed>,
    tenant: TenantId,
    run: RunId,
    at: Place,
    sender: mpsc::Sender<Event>,
    /// Since the run has ended: when to look whether everything was given.
    look_at: Option<tokio::time::Instant>,
    closed: bool,
}

impl Follower {
    async fn go(mut self) -> Result<()> {
        let mut state = self.feed.state();
        let mut pieces = reader::follow(&self.chassis, self.tenant, self.run, self.at.frame, self.feed.live());
        let now = *state.borrow_and_update();
        self.history(now).await?;
        loop {
            let over = self.is_over().await?;
            if over {
                let state = reader::fetch(view::state(&self.chassis.db, self.tenant, self.run)).await?;
                self.history(state).await?;
                return self.end(state.0).await;
            }
            tokio::select! {
                piece = pieces.recv() => match piece {
                    Some(piece) => self.piece(piece?).await?,
                    None => return Err(Error::broken("the reader ended")),
                },
                moved = state.changed() => {
                    moved.map_err(|_| Error::broken("the run is not followed any more"))?;
                    let now = *state.borrow_and_update();
                    self.history(now).await?;
                }
                () = tokio::time::sleep(SEALING), if self.look_at.is_some() => {}
            }
        }
    }

    /// The run has ended and everything was given, or a record is still being sealed after [`SEALING`]. Who is only slow is waited for.
    async fn is_over(&mut self) -> Result<bool> {
        let Some(look_at) = self.look_at else { return Ok(false) };
        let now = tokio::time::Instant::now();
        let late = now >= look_at;
        if !self.closed && !late {
            return Ok(false);
        }
        if late {
            self.look_at = Some(now + SEALING);
        }
        let records = reader::fetch(towpath_transcript::records(&self.chassis.db, self.tenant, self.run)).await?;
        let all_closed = records.iter().all(|record| record.state == State::Closed);
        let given = records.last().is_none_or(|last| self.at.frame >= Cursor { epoch: last.epoch, seq: last.last_seq });
        self.closed = all_closed && given;
        Ok(self.closed || (late && !all_closed))
    }

    async fn send(&self, kind: &str, data: &impl serde::Serialize) -> Result<()> {
        let event = Event::default()
            .event(kind)
            .id(self.at.id(self.run))
            .json_data(data)
            .map_err(|error| Error::broken(format!("event: {error}")))?;
        self.sender.send(event).await.map_err(|_| Error::broken("the listener has gone away"))
    }

    /// Gives what the history has beyond what was given, when it has anything.
    async fn history(&mut self, (state, revision): (RunState, i64)) -> Result<()> {
        while self.at.revision < revision {
            let entries = reader::fetch(view::history(&self.chassis.db, self.tenant, self.run, self.at.revision)).await?;
            for entry in &entries {
                self.at.revision = entry.revision;
                self.entry(entry).await?;
            }
            if entries.len() < view::HISTORY_ROWS {
                break;
            }
        }
        if self.look_at.is_none() && state.ended() {
            self.look_at = Some(tokio::time::Instant::now() + SEALING);
        }
        Ok(())
    }

    async fn entry(&self, entry: &HistoryEntry) -> Result<()> {
        self.send(if entry.on == "steer" { "steer" } else { "state" }, entry).await
    }

    async fn piece(&mut self, piece: Piece) -> Result<()> {
        match piece {
            Piece::Frames(frames) => {
                for frame in frames {
                    self.frame(&frame).await?;
                }
                Ok(())
            }
            Piece::Gap { epoch, last_seq, gap } => {
                if let Some(seq) = last_seq {
                    self.at.frame = Cursor { epoch, seq };
                }
                self.send("gap", &serde_json::json!({ "epoch": epoch, "reason": gap.reason, "bytes": gap.bytes })).await
            }
            Piece::Damaged { epoch, first_seq, last_seq, reason } => {
                self.at.frame = Cursor { epoch, seq: last_seq };
                self.send("gap", &serde_json::json!({ "epoch": epoch, "reason": reason, "first_seq": first_seq, "last_seq": last_seq }))
                    .await
            }
            Piece::Tip { closed } => {
                self.closed = closed;
                Ok(())
            }
        }
    }

    async fn frame(&mut self, frame: &Frame) -> Result<()> {
        let epoch = i32::try_from(frame.epoch).unwrap_or(i32::MAX);
        self.at.frame = Cursor { epoch, seq: frame.seq };
        if !frame.kind.is_output() {
            return Ok(());
        }
        self.send(
            "output",
            &OutputEvent { epoch, seq: frame.seq, stream: frame.kind.name().to_owned(), b64: STANDARD.encode(&frame.payload) },
        )
        .await
    }

    async fn end(&self, state: RunState) -> Result<()> {
        self.send("end", &serde_json::json!({ "state": state, "transcript": if self.closed { "closed" } else { "sealing" } })).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_reads_back_and_another_run_s_is_refused() {
        let run = RunId::mint();
        let place = Place { revision: 7, frame: Cursor { epoch: 2, seq: 40 } };
        assert_eq!(Place::parse(run, &place.id(run)).expect("parse"), place);
        for bad in [place.id(RunId::mint()), format!("{run}.1.1"), format!("{run}.1.1.1.1"), format!("{run}.-1.1.1"), String::new()] {
            assert!(Place::parse(run, &bad).is_err(), "{bad}");
        }
    }
}
