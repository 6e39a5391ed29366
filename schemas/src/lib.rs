#![doc = include_str!("../README.md")]

pub mod agent;
pub mod body;
pub mod channel;
pub mod command;
pub mod error;
pub mod event;
pub mod frame;
pub mod guest;
pub mod id;
pub mod key;
pub mod limit;
pub mod subject;
pub mod viewer;

pub use error::{ErrorCode, Problem};
pub use id::*;
