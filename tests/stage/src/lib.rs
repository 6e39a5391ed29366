#![doc = include_str!("../README.md")]

pub mod dns;
mod http;
mod keeper;
pub mod mail;
mod nats;
mod port;
mod postgres;
mod probe;
mod process;
mod proxy;
mod record;
mod s3;
mod servers;
mod shared;
pub mod slack;
mod tool;

pub use nats::{Nats, NatsLease, connect as connect_nats};
pub use port::free_port;
pub use postgres::Postgres;
pub use probe::wait_for;
pub use proxy::{Mode, Proxy};
pub use s3::{S3, S3Access};
pub use servers::{Options, Servers, Status, Which, stop_recorded};
pub use shared::{Shared, fresh_bucket, fresh_database, fresh_nats, shared};
pub use tool::postgres_bin;

/// A file of the checkout whose tests run. The folder is asked for when they run, not when they were built: several checkouts may share what cargo built.
pub fn checkout(file: &str) -> std::path::PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), std::path::PathBuf::from);
    package.ancestors().find(|folder| folder.join("Cargo.lock").exists()).unwrap_or(&package).join(file)
}
