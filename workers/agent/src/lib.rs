#![doc = include_str!("../README.md")]

pub mod start;
mod table;

pub use table::*;
