#![doc = include_str!("../README.md")]

pub mod process;
mod stuck;
mod sweep;
mod table;
mod worker;

pub use stuck::stuck;
pub use sweep::sweeps;
pub use table::{
    Asked, Binding, Credential, Fact, abandon, ask, bind, credentials, distrust_leases, doubted, facts, heard, lease, lift_fence, remove,
    tell_doubt, unwant, wanted,
};
pub use worker::Host;
