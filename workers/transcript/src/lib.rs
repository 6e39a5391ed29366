#![doc = include_str!("../README.md")]

pub mod chunk;
mod commit;
pub mod reader;
mod seal;
mod stream;
mod sweep;
mod table;
pub mod text;
mod worker;

pub use sweep::sweeps;
pub use table::{Record, State, lose, marks, open, record, records, unsealed};
pub use worker::Sealers;
