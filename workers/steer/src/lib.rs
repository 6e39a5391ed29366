#![doc = include_str!("../README.md")]

pub mod state;
mod table;

pub use table::*;
