#![doc = include_str!("../README.md")]

pub mod address;
pub mod http;
pub mod part;
pub mod state;
mod stuck;
mod sweep;
mod table;
mod webhook;
mod worker;

pub use stuck::stuck;
pub use sweep::{sweeps, timers};
pub use table::{About, Due, GivenUp, Owed, TargetKind, acknowledging, bounced, create, due, given_up, of_run, remove, retry};
pub use webhook::{check_target, notice_place, secret_place};
pub use worker::{ToThread, handler};
