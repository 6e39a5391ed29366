//! Mail: reading what came, judging who wrote it, writing the answer.

pub mod compose;
pub mod dmarc;
mod header;
pub mod quote;
pub mod read;
pub mod trust;
