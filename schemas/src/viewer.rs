//! The conversation at `GET /v1/runs/{id}/terminal`, one WebSocket for each viewer.
//!
//! The server sends binary messages, frames of the transcript one behind the other ([`crate::frame`]), and text messages, one [`ToViewer`] each as JSON. Without
//! `?after=<epoch>.<seq>` the first frame of an epoch that has a terminal is its last recorded `screen`; a viewer that comes again names the last frame that it
//! has and misses none. A viewer sends text messages, one [`FromViewer`] each, and what is typed as binary messages: 8 bytes number (big-endian), then the bytes.

use serde::{Deserialize, Serialize};

use crate::{body::RunState, frame::Size, id::RunId};

/// Server to viewer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToViewer {
    /// The first message. `may_type`: this token may type and resize.
    Hello { run: RunId, state: RunState, may_type: bool },
    /// The terminal's size, and whether this viewer's window decides it.
    Size { size: Size, owner: bool },
    /// The command's terminal has taken everything up to this number.
    Typed { number: u64 },
    /// This was not taken, and why.
    Refused { number: u64, reason: String },
    /// Nobody said what became of this: it may have been taken. It is not sent again.
    Unheard { number: u64 },
    /// Something is missing in what was printed.
    Gap { epoch: i32, reason: String },
    /// The run has ended and all of its transcript was sent.
    End { state: RunState },
    #[serde(other)]
    Unknown,
}

/// Viewer to server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromViewer {
    /// The window has this size. The first viewer that may type owns the terminal's size until it leaves.
    Window { size: Size },
    /// Takes the ownership of the size.
    Own,
    #[serde(other)]
    Unknown,
}

/// What a viewer's server tells the gateway that the sandbox is connected to ([`crate::subject::terminal`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Said {
    pub viewer: String,
    pub says: crate::guest::ViewerSays,
}
