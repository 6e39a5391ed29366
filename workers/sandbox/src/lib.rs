#![doc = include_str!("../README.md")]

pub mod process;
mod sweep;
mod table;
mod worker;

pub use table::{Asked, Credential, Fact, abandon, ask, bind, credential, facts, heard, is_wanted, unwant};
pub use worker::Host;
