#![doc = include_str!("../README.md")]

pub mod accept;
pub mod admission;
pub mod apply;
pub mod recover;
pub mod report;
pub mod retention;
mod settle;
pub mod state;
mod stuck;
pub mod sweep;
mod table;
pub mod view;
mod worker;

pub use stuck::stuck;
pub use table::{Deadline, NewRow, TargetRow, existing, live_run, targets};
pub use worker::handlers;
