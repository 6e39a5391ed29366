#![doc = include_str!("../README.md")]

mod sweep;
mod table;

pub use sweep::sweeps;
pub use table::{NewRow, agents_of, by_id, list, open};
