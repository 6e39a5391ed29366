#![doc = include_str!("../README.md")]

pub mod start;
mod stored;
mod table;

pub use table::*;
