//! Mail: reading what came, judging who wrote it, writing the answer.

pub mod compose;
mod header;
pub mod read;
pub mod trust;
