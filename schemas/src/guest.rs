//! The conversation between a supervisor and the gateway, and what a sandbox is created from.
//!
//! One WebSocket for each sandbox, opened by the supervisor at `GET /sandbox`. Text messages are JSON, one [`FromGuest`] or [`ToGuest`] each.
//! A binary message starts with one byte that tells what follows ([`binary`]). The first message is `hello`; the gateway answers `welcome`
//! (then, once the incarnation is bound and committed, `start`), `fenced` or `later`.
//!
//! The supervisor keeps every report until its answer came and sends it again after a reconnect: `started`, `steer`, `ended`, `result`, output files.
//! Each is applied under epoch and incarnation, and applying it twice changes nothing.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::{
    agent::{Contract, SteeringFormat, Terminal},
    frame::Size,
    id::{FileId, RunId, SessionId, SteerId},
};

/// The version of this conversation; a gateway speaks every live one.
pub const PROTOCOL: u32 = 1;

/// First byte of a binary message.
pub mod binary {
    /// Frames, one behind the other, to the end of the message (supervisor to gateway).
    pub const FRAMES: u8 = 1;
    /// A piece of an input file: 8 bytes request number (big-endian), then the bytes (gateway to supervisor).
    pub const FILE_PIECE: u8 = 2;
    /// A piece of an output file: 8 bytes upload number (big-endian), then the bytes (supervisor to gateway).
    pub const OUTPUT_PIECE: u8 = 3;
}

/// How a command ended, as the kernel told it: never folded into 128 + n.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Exit {
    /// Exit code, when it exited by itself.
    pub code: Option<i32>,
    /// Signal number, when a signal ended it.
    pub signal: Option<i32>,
    /// Whether it ran out of memory; null when that cannot be known.
    pub oom: Option<bool>,
}

/// What became of a steer, as the supervisor knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SteerState {
    /// Accepted, not yet with a supervisor.
    Queued,
    /// On its way to the supervisor.
    Sent,
    /// Wholly in the pipe.
    Written,
    /// Left the pipe: somebody read it. Not more than that.
    Read,
    /// Surely not taken.
    Expired,
    /// Nobody can know whether it was taken.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteerEnd {
    pub steer: SteerId,
    pub state: SteerState,
}

/// Supervisor to gateway.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromGuest {
    Hello(Hello),
    /// A step of the start, for the person who waits: `inputs`, `command`, …
    Step {
        step: String,
        detail: Option<String>,
    },
    /// The command runs; recorded durably before exec.
    Started,
    /// The command cannot run at all (`command_not_found`, `command_not_executable`, `wall_failed`); nothing was executed. `ended` follows
    /// with neither code nor signal.
    Refused {
        code: String,
        message: String,
    },
    Steer {
        steer: SteerId,
        state: SteerState,
    },
    /// The main command and all that it started have ended. Answered `ended_stored`.
    Ended {
        exit: Exit,
        reason: Option<String>,
    },
    /// The result text: lossy UTF-8, at most [`crate::limit::RESULT_BYTES`]. Answered `result_stored`.
    Result {
        text: String,
        truncated: bool,
    },
    /// Asks for a piece of an input file; answered by a binary `FILE_PIECE` or by `file_refused`. A piece shorter than asked for is the last.
    ReadFile {
        request: u64,
        file: FileId,
        offset: u64,
        length: u32,
    },
    /// An output file follows as binary `OUTPUT_PIECE`s, `size` bytes in all. Answered `output_stored` or `output_refused`.
    Output {
        upload: u64,
        name: String,
        size: u64,
        sha256: String,
    },
    /// An output that is not sent, and why (`too_large`, `unreadable`, …), so that its owner is told. Answered `output_stored`.
    OutputSkipped {
        upload: u64,
        name: String,
        size: u64,
        reason: String,
    },
    /// An answer to a viewer of the terminal; lost ones are not sent again.
    Viewer {
        viewer: String,
        heard: ViewerHeard,
    },
    /// Asks for the lease of a fence, numbered by the supervisor; answered `leased` once it is committed that this sandbox has it. The lease counts from when it was asked for.
    Lease {
        number: u64,
    },
    /// Everything was sent: result, outputs, end record. The gateway answers `release` once all of it is committed and sealed.
    Done,
    #[serde(other)]
    Unknown,
}

/// What somebody who sees a run's terminal wants of it. Who may want what is decided before it comes here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ViewerSays {
    /// Is there, with a window of this size; said again every few seconds. The first one that may resize owns the size until it leaves.
    Here {
        size: Size,
        may_resize: bool,
    },
    /// Takes the ownership of the size from whoever has it.
    Own {
        size: Size,
    },
    /// Typed bytes, in base64, numbered by the viewer.
    Type {
        number: u64,
        b64: String,
    },
    Leave,
}

/// What a viewer is answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ViewerHeard {
    /// The terminal's size, and whether this viewer owns it.
    Size { size: Size, owner: bool },
    /// The command's terminal has taken everything up to this number.
    Typed { number: u64 },
    /// Not taken, for good: (number, why).
    Refused { number: u64, reason: String },
}

/// Opens every connection.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    pub protocol: u32,
    pub run: RunId,
    pub epoch: i32,
    /// 32 hex digits drawn by this supervisor process.
    pub incarnation: String,
    /// The token that the sandbox was created with; sent until `welcome` came once.
    pub token: Option<String>,
    /// 64 hex digits drawn by this supervisor process, never written anywhere. The first hello exchanges the token for it.
    pub key: String,
    pub phase: Phase,
    /// What a person or a sweep can find this sandbox by.
    pub identity: Identity,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Has not started the command and waits for `start`.
    Fresh,
    /// Has recorded `started`, and never starts again.
    Started,
    /// The command has ended.
    Ended,
}

/// Where the processes of a `process` sandbox are, so that `absent` can be proved for that very object.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Identity {
    /// /proc/sys/kernel/random/boot_id of the host.
    pub boot_id: String,
    /// The supervisor outside, and its start time in clock ticks since boot (proc(5), stat field 22).
    pub supervisor_pid: i32,
    pub supervisor_start: u64,
    /// Process 1 inside as the host sees it; absent before it exists.
    pub init_pid: Option<i32>,
    pub init_start: Option<u64>,
    /// Inode of its PID namespace.
    pub pid_namespace: Option<u64>,
    /// The cgroup's path below each controller.
    pub cgroup: Option<String>,
}

/// Gateway to supervisor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToGuest {
    /// The hello was accepted. Frames from `sealed + 1` on are wanted again; the spool frees up to `sealed`.
    Welcome {
        sealed: u64,
    },
    /// Start the command. Sent only after the incarnation is bound; again if the same incarnation says `fresh` again.
    Start(Box<StartOrder>),
    /// Another incarnation or a newer epoch owns the run: start nothing, stop what runs, exit.
    Fenced,
    /// Not now (the database is away, the server drains): reconnect after a wait.
    Later {
        detail: String,
    },
    /// JetStream holds frames up to here.
    Stored {
        seq: u64,
    },
    /// Frames up to here are in S3 and indexed: the spool may free them.
    Sealed {
        seq: u64,
    },
    /// Send frames again from here.
    Resend {
        from: u64,
    },
    Steer(SteerOrder),
    /// End the command: TERM to its process group, then KILL after `grace_s`.
    Cancel {
        grace_s: u32,
        reason: String,
    },
    /// A viewer of the terminal says something. Sent once: what nobody answers may or may not have arrived.
    Viewer {
        viewer: String,
        says: ViewerSays,
    },
    /// The lease that was asked for under this number is granted.
    Leased {
        number: u64,
    },
    EndedStored,
    ResultStored,
    FileRefused {
        request: u64,
        code: String,
        detail: String,
        /// It may be had a while later: a server that it comes from does not answer.
        #[serde(default)]
        again: bool,
    },
    OutputStored {
        upload: u64,
    },
    OutputRefused {
        upload: u64,
        code: String,
        detail: String,
    },
    /// Everything is kept: leave.
    Release,
    #[serde(other)]
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteerOrder {
    pub steer: SteerId,
    pub ordinal: i64,
    pub message: String,
    #[serde(default)]
    pub files: Vec<InputFile>,
}

/// A file to be staged under `/workspace/files` before the command (or the steer's line) is given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFile {
    pub file: FileId,
    /// Safe as one path component: NFC, no separators, not reserved.
    pub name: String,
    pub media_type: String,
    pub size: u64,
}

/// Everything the supervisor needs to run the command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StartOrder {
    pub run: RunId,
    pub session: SessionId,
    pub epoch: i32,
    pub agent: String,
    pub mode: String,
    pub command: Vec<String>,
    /// The agent's own environment, beside the `TOWPATH_*` values that the supervisor sets.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    pub prompt: String,
    pub instructions: String,
    pub files: Vec<InputFile>,
    /// The session's outputs so far, for an empty workspace; names are relative paths below its `outputs`.
    #[serde(default)]
    pub restore: Vec<InputFile>,
    pub terminal: Terminal,
    pub steering: SteeringFormat,
    pub contract: Contract,
    /// Largest output file that is taken, in bytes.
    pub output_bytes: u64,
    pub grace_s: u32,
    pub idle_s: Option<u32>,
    /// The command may be executed only under a lease, and ends when it runs out: so many seconds after it was asked for.
    #[serde(default)]
    pub fence_s: Option<u32>,
}

/// The reason that a supervisor gives for a command that it ended because its lease ran out.
pub const FENCE_RAN_OUT: &str = "fence";

/// What the host's worker writes for the supervisor it starts: `spec.json` in the sandbox's own folder, readable by its owner only.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SandboxSpec {
    pub run: RunId,
    pub session: SessionId,
    pub epoch: i32,
    /// `ws://…/sandbox` or `wss://…/sandbox`.
    pub gateway: String,
    /// Good for this sandbox and epoch, and for the first hello only.
    pub token: String,
    /// The session's file tree on this host.
    pub workspace: String,
    pub walls: Walls,
    /// Longest time to stay for `release` after the end, in seconds (`linger_max`).
    pub linger_s: u64,
    /// Most bytes the spool may hold on disk; when it is full the supervisor stops reading and the agent blocks.
    pub spool_bytes: u64,
}

/// The walls around a process sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Walls {
    pub isolation: crate::agent::Isolation,
    pub egress: bool,
    pub memory_bytes: Option<u64>,
    pub pids: Option<u64>,
    pub disk_bytes: Option<u64>,
    /// The unprivileged host user and group that the command runs as, when the worker may switch users.
    pub uid: Option<u32>,
}

/// A moment with a name, shown while one waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Step {
    pub step: String,
    pub at: DateTime<Utc>,
    pub detail: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_message_of_a_newer_release_reads_as_unknown() {
        let read: ToGuest = serde_json::from_str(r#"{"type":"teleport","to":"mars"}"#).expect("parse");
        assert_eq!(read, ToGuest::Unknown);
        let read: FromGuest = serde_json::from_str(r#"{"type":"started","extra":1}"#).expect("parse");
        assert_eq!(read, FromGuest::Started);
    }
}
