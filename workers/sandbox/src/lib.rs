#![doc = include_str!("../README.md")]

pub mod process;
mod stuck;
mod sweep;
mod table;
mod worker;

pub use stuck::stuck;
pub use table::{Asked, Binding, Credential, Fact, abandon, ask, bind, credentials, facts, heard, remove, unwant, wanted};
pub use worker::Host;
