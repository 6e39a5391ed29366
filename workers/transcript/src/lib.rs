#![doc = include_str!("../README.md")]

pub mod chunk;
mod commit;
pub mod reader;
pub mod render;
mod seal;
pub mod search;
mod stream;
mod stuck;
mod sweep;
mod table;
mod worker;

pub use stuck::stuck;
pub use sweep::sweeps;
pub use table::{Cut, Opened, Record, State, closed, expire, lose, marks, open, record, records, remove, unsealed};
pub use worker::Sealers;
