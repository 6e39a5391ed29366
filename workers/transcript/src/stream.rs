//! Reading frames back from JetStream without a consumer: batched direct get (NATS ADR-31, server 2.11). Stream sequence numbers are used within one call only, so all of this
//! means the same in any incarnation of the stream.

use std::time::Duration;

use futures::StreamExt;
use towpath_chassis::{Chassis, Error, Result};
use towpath_schemas::{
    frame::Frame,
    id::{RunId, TenantId},
    subject,
};

/// Messages asked for at a time.
const BATCH: usize = 256;
/// Bytes asked for at a time.
const BATCH_BYTES: usize = 1 << 20;
const ANSWER: Duration = Duration::from_secs(5);

/// Which epoch of which run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Epoch {
    pub tenant: TenantId,
    pub run: RunId,
    pub epoch: i32,
}

/// Where a read ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tip {
    /// JetStream holds nothing more.
    Reached,
    /// The next frame that JetStream holds is a later one.
    Hole,
}

/// One pass over the frames that JetStream holds from `next` on, a batch at a time.
pub struct Walk<'a> {
    chassis: &'a Chassis,
    of: Epoch,
    next: u64,
    /// Stream sequence to go on from within the block of `next`.
    from: u64,
    /// A later frame than the wanted one was seen in this block.
    later: bool,
}

impl<'a> Walk<'a> {
    pub fn new(chassis: &'a Chassis, of: Epoch, next: u64) -> Self {
        Self { chassis, of, next, from: 1, later: false }
    }

    /// The next batch of frames without a hole, and where the pass ended, if it did.
    pub async fn step(&mut self) -> Result<(Vec<Frame>, Option<Tip>)> {
        let block = subject::block(self.next);
        let filter = subject::output_block(self.of.tenant, self.of.run, self.of.epoch, block);
        let (messages, pending) = direct_get(self.chassis, &filter, self.from).await?;
        let mut frames = Vec::new();
        for (sequence, payload) in messages {
            self.from = sequence + 1;
            let (frame, _) = Frame::decode(&payload).map_err(|error| Error::broken(format!("OUTPUT holds no frame: {error}")))?;
            match frame.seq.cmp(&self.next) {
                std::cmp::Ordering::Less => {}
                std::cmp::Ordering::Equal => {
                    self.next += 1;
                    frames.push(frame);
                }
                // Frames that were asked for again stand behind later ones.
                std::cmp::Ordering::Greater => self.later = true,
            }
        }
        if subject::block(self.next) != block {
            (self.from, self.later) = (1, false);
            return Ok((frames, None));
        }
        if pending > 0 {
            return Ok((frames, None));
        }
        if self.later {
            return Ok((frames, Some(Tip::Hole)));
        }
        // Nothing more in this block. Something in the next one means that frames of this one are missing.
        let later = subject::output_block(self.of.tenant, self.of.run, self.of.epoch, block + 1);
        let hole = !direct_get(self.chassis, &later, 1).await?.0.is_empty();
        Ok((frames, Some(if hole { Tip::Hole } else { Tip::Reached })))
    }
}

/// Messages of `filter` from stream sequence `from` on, each with its sequence, and how many are left after them.
async fn direct_get(chassis: &Chassis, filter: &str, from: u64) -> Result<(Vec<(u64, bytes::Bytes)>, u64)> {
    let failed = |detail: String| Error::Nats { doing: "direct get", detail };
    let inbox = chassis.nats.new_inbox();
    let mut answers = chassis.nats.subscribe(inbox.clone()).await.map_err(|error| failed(error.to_string()))?;
    let request = serde_json::json!({ "seq": from, "next_by_subj": filter, "batch": BATCH, "max_bytes": BATCH_BYTES }).to_string();
    chassis
        .nats
        .publish_with_reply(format!("$JS.API.DIRECT.GET.{}", subject::OUTPUT), inbox, request.into())
        .await
        .map_err(|error| failed(error.to_string()))?;
    let mut messages = Vec::new();
    loop {
        let message = match tokio::time::timeout(ANSWER, answers.next()).await {
            Ok(Some(message)) => message,
            Ok(None) => return Err(failed("the connection was closed".to_owned())),
            Err(_) => return Err(failed("no answer".to_owned())),
        };
        let header = |name: &str| message.headers.as_ref().and_then(|headers| headers.get(name)).map(|value| value.as_str().to_owned());
        let number = |name: &str| header(name).and_then(|value| value.parse::<u64>().ok());
        match message.status.map(|status| status.as_u16()) {
            None | Some(200) => {
                let sequence = number("Nats-Sequence").ok_or_else(|| failed("an answer without Nats-Sequence".to_owned()))?;
                messages.push((sequence, message.payload));
            }
            // End of the batch.
            Some(204) => return Ok((messages, number("Nats-Num-Pending").unwrap_or(0))),
            Some(404) => return Ok((messages, 0)),
            Some(503) => return Err(failed("the OUTPUT stream is away".to_owned())),
            Some(status) => return Err(failed(format!("status {status} {}", message.description.as_deref().unwrap_or_default()))),
        }
    }
}

/// Removes whole sealed blocks, those below the block of `sealed + 1`; with `closed` that one too.
pub async fn purge(chassis: &Chassis, of: Epoch, sealed_before: u64, sealed: u64, closed: bool) -> Result<()> {
    let failed = |detail: String| Error::Nats { doing: "purge", detail };
    let (from, to) = (subject::block(sealed_before + 1), subject::block(sealed + 1));
    if from == to && !closed {
        return Ok(());
    }
    let stream = chassis.jetstream.get_stream_no_info(subject::OUTPUT).await.map_err(|error| failed(error.to_string()))?;
    if closed {
        stream.purge().filter(subject::output_epoch(of.tenant, of.run, of.epoch)).await.map_err(|error| failed(error.to_string()))?;
        return Ok(());
    }
    for block in from..to {
        stream
            .purge()
            .filter(subject::output_block(of.tenant, of.run, of.epoch, block))
            .await
            .map_err(|error| failed(error.to_string()))?;
    }
    Ok(())
}
