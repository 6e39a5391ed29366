//! What comes in is kept as it came, before it is answered for (invariant KEPT). Messages that arrive together share a commit.

use futures::FutureExt;
use tokio::time::timeout;
use towpath_chassis::{
    Chassis, Error, Result,
    group::{Answer, Group, Lanes, halving},
    secret, telemetry,
};
use towpath_schemas::{
    ErrorCode,
    id::{ChannelId, InboundId},
    limit::INBOUND_BYTES,
};

use crate::{
    intake::table::{self, Envelope, Incoming},
    mail::read::message_id,
    table as channels, token,
};

/// Batches at a time, and messages of one.
const LANES: usize = 2;
const TOGETHER: usize = 16;
/// Bytes of a message that shares a commit. A larger one has its own, so that many large ones at once cannot take longer together than a sender waits.
const SHARES_BYTES: usize = 256 * 1024;

/// What a message is known by: the provider's id of its sending, and what says that two sendings are one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    pub delivery: String,
    pub message: String,
}

/// The way in. Cheap to clone.
#[derive(Clone)]
pub struct Inbox {
    chassis: Chassis,
    group: Group<Incoming, Answer<bool>>,
}

impl Inbox {
    pub fn start(chassis: &Chassis) -> Self {
        let own = chassis.clone();
        let lanes = Lanes { lanes: LANES, most: TOGETHER, limit: chassis.config.limits.database_wait };
        let group = Group::start(&chassis.tasks, lanes, move |batch: Vec<Incoming>| {
            let chassis = own.clone();
            async move { halving(&batch, |part| table::keep(&chassis, part).boxed()).await }
        });
        Self { chassis: chassis.clone(), group }
    }

    /// Keeps a mail of a channel; false when it was kept before.
    pub async fn mail(&self, channel: ChannelId, envelope: Envelope, raw: Vec<u8>) -> Result<bool> {
        let keys = Keys {
            delivery: hex::encode(secret::sha256(&[envelope.from.as_bytes(), b"\n", &raw].concat())),
            message: message_id(&envelope.from, &raw),
        };
        self.keep(channel, keys, envelope, raw).await
    }

    /// Keeps a message of a channel; false when it was kept before. Answers within [`towpath_chassis::config::Limits::database_wait`] or with an error that lets
    /// the sender send it again.
    pub async fn keep(&self, channel: ChannelId, keys: Keys, envelope: Envelope, raw: Vec<u8>) -> Result<bool> {
        if raw.len() > INBOUND_BYTES {
            return Err(Error::refused(ErrorCode::TooLarge, format!("a message may hold at most {INBOUND_BYTES} bytes")));
        }
        let incoming = Incoming {
            id: InboundId::mint(),
            channel,
            delivery_key: keys.delivery,
            message_key: keys.message,
            envelope,
            raw,
            traceparent: telemetry::traceparent(),
        };
        let kept = async {
            if incoming.raw.len() <= SHARES_BYTES {
                return self.group.submit(incoming).await?.map_err(Error::from);
            }
            Ok(table::keep(&self.chassis, &[incoming]).await? == [true])
        };
        timeout(self.chassis.config.limits.database_wait, kept).await.map_err(|_| Error::Database(sqlx::Error::PoolTimedOut))?
    }

    /// The channels that take mail for these recipients, each with those that are its own.
    pub async fn recipients(&self, to: &[String]) -> Result<Vec<(ChannelId, Vec<String>)>> {
        let chassis = &self.chassis;
        let bare: Vec<String> = to.iter().map(|address| token::split(&chassis.secrets, address).0).collect();
        let found = timeout(chassis.config.limits.database_wait, channels::channels_of(&chassis.db, &bare)).await;
        let found = found.map_err(|_| Error::Database(sqlx::Error::PoolTimedOut))??;
        let mut channels: Vec<(ChannelId, Vec<String>)> = Vec::new();
        for (address, bare) in to.iter().zip(&bare) {
            let Some((_, channel)) = found.iter().find(|(known, _)| known == bare) else { continue };
            match channels.iter_mut().find(|(known, _)| known == channel) {
                Some((_, addresses)) => addresses.push(address.clone()),
                None => channels.push((*channel, vec![address.clone()])),
            }
        }
        Ok(channels)
    }
}
