//! What the supervisor outside and its copy inside say to each other: one JSON value a line over a socket pair.
//! The end of the socket is a message too: the copy inside then ends everything, itself last.

use serde::{Deserialize, Serialize};
use towpath_schemas::frame::Size;

/// Longest line.
pub const LINE_BYTES: usize = 8 * 1024 * 1024;

/// From outside to inside.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToInit {
    /// Execute the command. Given at most once, after who we are was recorded durably.
    Go(Go),
    /// TERM to everything, then KILL after the grace.
    Stop { grace_ms: u64 },
    /// The lease lasts until then, in microseconds of [`crate::clock::boot_us`].
    Lease { until_us: u64 },
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Go {
    pub command: Vec<String>,
    /// The whole environment.
    pub env: Vec<(String, String)>,
    pub folder: String,
    /// A terminal of this size instead of the two pipes; its other end is passed out over the descriptor for stdout.
    pub terminal: Option<Size>,
    /// For what remains when the main command has ended.
    pub grace_ms: u64,
    /// Under a fence: everything is killed at this moment of [`crate::clock::boot_us`] unless a later one is given before.
    pub lease_until_us: Option<u64>,
}

/// From inside to outside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromInit {
    Started,
    /// Nothing was executed.
    Refused {
        code: String,
        message: String,
    },
    /// The main command ended; the status as wait(2) gives it.
    Main {
        status: i32,
    },
    /// So has everything that it started.
    Ended,
}
