#![doc = include_str!("../README.md")]

mod answer;
mod circuit;
mod intake;
pub mod mail;
mod message;
mod notice;
mod receive;
pub mod slack;
mod state;
mod stuck;
mod sweep;
mod table;
mod token;

use std::sync::Arc;

use towpath_delivery::ToThread;

pub use intake::{
    handler,
    table::{Envelope, due, inbound, replay},
};
pub use receive::{Inbox, Keys};
pub use stuck::stuck;
pub use sweep::{sweeps, timers};
pub use table::{Hook, broken, by_name, delete, hook, list, pause, put};

/// How the delivery room reaches a thread.
pub fn to_thread() -> ToThread {
    Arc::new(|chassis, due| Box::pin(answer::attempt(chassis, due)))
}
