#![doc = include_str!("../README.md")]

mod deliver;
mod intake;
pub mod mail;
mod smtp;
mod state;
mod stuck;
mod sweep;
mod table;
mod token;

use std::sync::Arc;

use towpath_chassis::{Chassis, Error, Result, secret, telemetry};
use towpath_delivery::ToThread;
use towpath_schemas::{ErrorCode, id::ChannelId, limit::INBOUND_BYTES};

pub use intake::{
    handler,
    table::{Envelope, due, inbound, replay},
};
pub use stuck::stuck;
pub use sweep::{sweeps, timers};
pub use table::{by_name, delete, hook_password, list, put};

/// How the delivery room reaches a thread.
pub fn to_thread() -> ToThread {
    Arc::new(|chassis, due| Box::pin(deliver::attempt(chassis, due)))
}

/// Keeps a mail of a channel as it came; false when it was kept before. Answers within [`towpath_chassis::config::Limits::database_wait`] or with an error that
/// lets the sender send it again.
pub async fn receive(chassis: &Chassis, channel: ChannelId, envelope: &Envelope, raw: &[u8]) -> Result<bool> {
    if raw.len() > INBOUND_BYTES {
        return Err(Error::refused(ErrorCode::TooLarge, format!("a message may hold at most {INBOUND_BYTES} bytes")));
    }
    let incoming = intake::table::Incoming {
        channel,
        delivery_key: hex::encode(secret::sha256(&[envelope.from.as_bytes(), b"\n", raw].concat())),
        message_key: mail::read::message_id(&envelope.from, raw),
        envelope,
        raw,
        traceparent: telemetry::traceparent(),
    };
    let kept = tokio::time::timeout(chassis.config.limits.database_wait, intake::table::keep(chassis, &incoming)).await;
    kept.map_err(|_| Error::Database(sqlx::Error::PoolTimedOut))?
}

/// The channels that take mail for these recipients, each with those that are its own.
pub async fn recipients(chassis: &Chassis, to: &[String]) -> Result<Vec<(ChannelId, Vec<String>)>> {
    let bare: Vec<String> = to.iter().map(|address| token::split(&chassis.secrets, address).0).collect();
    let found = tokio::time::timeout(chassis.config.limits.database_wait, table::channels_of(&chassis.db, &bare)).await;
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
