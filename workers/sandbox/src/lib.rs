#![doc = include_str!("../README.md")]

pub mod process;
mod sweep;
mod table;
mod worker;

pub use table::{Asked, Binding, Credential, Fact, abandon, ask, bind, credentials, facts, heard, remove, unwant, wanted};
pub use worker::Host;
