//! Frames on their way into JetStream: published one after the other, acknowledged in order. What JetStream did not take is asked for again.

use std::{collections::VecDeque, time::Duration};

use async_nats::jetstream::context::PublishAckFuture;
use futures::{FutureExt, future::BoxFuture};
use towpath_chassis::{
    Chassis, Error, Result,
    streams::{self, Connected},
    telemetry::limit_reached,
};
use towpath_run::report::Reporter;
use towpath_schemas::{frame::Frame, subject};

/// Frames published and not yet acknowledged, for one connection; beyond it the connection is not read.
const IN_FLIGHT: usize = 256;
/// How long JetStream may take to acknowledge a frame.
const ACK: Duration = Duration::from_secs(5);

/// What to tell the supervisor.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Told {
    Stored(u64),
    /// JetStream did not take a frame: everything that is not sealed is wanted again.
    Refused(String),
}

pub(super) struct Frames {
    chassis: Chassis,
    reporter: Reporter,
    in_flight: VecDeque<(u64, BoxFuture<'static, std::result::Result<(), String>>)>,
}

impl Frames {
    pub fn new(chassis: Chassis, reporter: Reporter) -> Self {
        Self { chassis, reporter, in_flight: VecDeque::new() }
    }

    pub fn has_room(&self) -> bool {
        self.in_flight.len() < IN_FLIGHT
    }

    /// Publishes the frames of one message. Frames of another epoch are an error of the supervisor's.
    pub async fn publish(&mut self, message: &[u8]) -> Result<()> {
        let frames = Frame::decode_all(message).map_err(|error| Error::broken(format!("frames from the sandbox: {error}")))?;
        for frame in frames {
            if i64::from(frame.epoch) != i64::from(self.reporter.epoch) || frame.seq == 0 || frame.seq > i64::MAX as u64 {
                return Err(Error::broken(format!(
                    "a frame of epoch {} and sequence {} from epoch {}",
                    frame.epoch, frame.seq, self.reporter.epoch
                )));
            }
            if self.in_flight.len() == IN_FLIGHT {
                limit_reached("frames_in_flight");
            }
            let subject = subject::output(self.reporter.tenant, self.reporter.run, self.reporter.epoch, frame.seq);
            let mut connected = self.chassis.connected.clone();
            connected.mark_unchanged();
            let published = tokio::time::timeout(ACK, self.chassis.jetstream.publish(subject, frame.encode().into())).await;
            let acknowledged = match published {
                Ok(Ok(acknowledgement)) => acknowledge(acknowledgement, connected).boxed(),
                Ok(Err(error)) => futures::future::ready(Err(error.to_string())).boxed(),
                Err(_) => futures::future::ready(Err("NATS takes nothing".to_owned())).boxed(),
            };
            self.in_flight.push_back((frame.seq, acknowledged));
        }
        Ok(())
    }

    /// Waits for the oldest acknowledgement and takes those that came with it; pending for ever when nothing is on its way.
    pub async fn told(&mut self) -> Told {
        let Some((seq, first)) = self.in_flight.front_mut() else { return std::future::pending().await };
        let mut stored = *seq;
        let result = first.await;
        self.in_flight.pop_front();
        if let Err(why) = result {
            return self.refuse(why);
        }
        while let Some((seq, next)) = self.in_flight.front_mut() {
            match next.now_or_never() {
                Some(Ok(())) => stored = *seq,
                Some(Err(why)) => return self.refuse(why),
                None => break,
            }
            self.in_flight.pop_front();
        }
        Told::Stored(stored)
    }

    fn refuse(&mut self, why: String) -> Told {
        limit_reached("frames_refused");
        self.forget();
        Told::Refused(why)
    }

    /// What is on its way does not matter any more.
    pub fn forget(&mut self) {
        self.in_flight.clear();
    }

    /// Makes sure that there is a stream before frames are asked for again.
    pub async fn recover(&mut self) {
        if let Err(error) = streams::declare(&self.chassis.jetstream, &self.chassis.config).await {
            tracing::warn!(error = error.chain(), "the streams are not there yet");
        }
    }
}

async fn acknowledge(acknowledgement: PublishAckFuture, mut connected: Connected) -> std::result::Result<(), String> {
    tokio::select! {
        biased;
        acknowledged = tokio::time::timeout(ACK, acknowledgement) => match acknowledged {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("no acknowledgement".to_owned()),
        },
        // What was sent over the connection before may be lost with it.
        Ok(()) = connected.changed() => Err("the connection to NATS was made anew".to_owned()),
    }
}
