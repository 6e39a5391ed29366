#![doc = include_str!("../README.md")]

mod table;

pub use table::*;
