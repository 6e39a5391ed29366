//! Request and answer bodies of `/v1`. What people send is refused when it holds unknown keys; what we answer may grow.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::{
    agent::{AgentDefinition, Mode},
    channel::ChannelDefinition,
    guest::{Exit, SteerState, Step},
    id::{ChannelId, DeliveryId, FileId, InboundId, PrincipalId, RunId, SessionId, SteerId, TenantId, ThreadId, TokenId},
};

#[cfg(feature = "openapi")]
use utoipa::ToSchema;

/// Body of `POST /v1/runs`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct NewRun {
    pub agent: String,
    /// At most 1 MiB of UTF-8 without U+0000.
    pub prompt: String,
    /// Continue this session; absent opens a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionId>,
    /// Files uploaded before by `POST /v1/files`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// Where the result goes besides this API.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deliver: Vec<Target>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Higher goes first; 0 when absent, from -100 to 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<i16>,
    /// When it is ended at the latest, waiting or not: a time (RFC 3339), or how long from now (`2h`, `90s`, at most `365d`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<String>,
}

/// A line of a transcript that holds what was looked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Found {
    /// The frame at which the line was complete.
    pub epoch: i32,
    pub seq: u64,
    pub at: DateTime<Utc>,
    /// The line without control codes, at most 1 KiB of it.
    pub text: String,
}

/// What of an earlier run is to be otherwise when it is run again.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Rerun {
    /// Another prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// In the same session, with the workspace as it is now; otherwise in a new one.
    #[serde(default)]
    pub same_session: bool,
}

/// One place that a result goes to: exactly one of the keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub enum Target {
    Webhook(WebhookTarget),
}

/// A receiver by Standard Webhooks.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct WebhookTarget {
    /// http or https; private, loopback and metadata addresses are refused unless the operator allows them.
    pub url: String,
    /// `whsec_` and the base64 of 24 to 64 bytes. Stored encrypted and never shown again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
}

impl std::fmt::Debug for WebhookTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WebhookTarget").field("url", &self.url).field("secret", &self.secret.as_ref().map(|_| "…")).finish()
    }
}

/// Where a run is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub enum RunState {
    Queued,
    Starting,
    Running,
    Stopping,
    Finishing,
    Succeeded,
    Failed,
    Canceled,
    TimedOut,
}

impl RunState {
    pub const ALL: [RunState; 9] = [
        RunState::Queued,
        RunState::Starting,
        RunState::Running,
        RunState::Stopping,
        RunState::Finishing,
        RunState::Succeeded,
        RunState::Failed,
        RunState::Canceled,
        RunState::TimedOut,
    ];

    pub fn ended(self) -> bool {
        matches!(self, RunState::Succeeded | RunState::Failed | RunState::Canceled | RunState::TimedOut)
    }

    /// The word on every wire and in the database.
    pub fn word(self) -> &'static str {
        match self {
            RunState::Queued => "queued",
            RunState::Starting => "starting",
            RunState::Running => "running",
            RunState::Stopping => "stopping",
            RunState::Finishing => "finishing",
            RunState::Succeeded => "succeeded",
            RunState::Failed => "failed",
            RunState::Canceled => "canceled",
            RunState::TimedOut => "timed_out",
        }
    }

    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.word() == word)
    }
}

impl std::fmt::Display for RunState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.word())
    }
}

/// A run as `/v1` shows it. Lists leave out `prompt`, `result` and `files`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Run {
    pub id: RunId,
    pub session: SessionId,
    pub agent: String,
    pub agent_version: i32,
    pub principal: PrincipalId,
    pub mode: Mode,
    pub state: RunState,
    /// The end that was asked for and is being worked on.
    pub wanted: Option<RunState>,
    /// One word for why it is as it is, for programs.
    pub reason: Option<String>,
    /// The same for people.
    pub message: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    pub labels: BTreeMap<String, String>,
    pub priority: i16,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Vec<FileRef>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<RunResult>,
    pub exit: Option<Exit>,
    /// How many sandboxes were started for it; the newest one's number.
    pub epoch: i32,
    /// Grows with every move of the run or its steers.
    pub revision: i64,
    pub startup: Vec<Step>,
    pub waiting_for: Option<String>,
    pub transcript: Transcript,
    /// Runs of the tenant that go before it while it is queued, counted up to 100; left out of lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ahead: Option<i64>,
    pub deadline: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub ended_at: Option<DateTime<Utc>>,
    pub deliveries: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct RunResult {
    pub text: String,
    pub truncated: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct FileRef {
    pub id: FileId,
    pub name: String,
    pub media_type: String,
    pub size: u64,
    /// `stored`, or `unavailable` with the reason.
    pub status: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A file that a run left in its outputs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Output {
    /// A path relative to the outputs' folder.
    pub name: String,
    pub size: u64,
    /// Of the content, in hex; absent when it was not kept.
    pub sha256: Option<String>,
    /// `stored`, or `unavailable` with the reason.
    pub status: String,
    pub reason: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Transcript {
    /// `live`, `sealing`, `complete` or `gap`.
    pub state: String,
    /// Bytes that were sealed, with those that are kept no longer.
    pub bytes: i64,
    /// Bytes known to be missing; null with state `gap` when nobody can know.
    pub missing: Option<i64>,
}

/// One page of a list; `cursor` is absent on the last.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Page<T> {
    pub items: Vec<T>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

/// One row of a run's history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct HistoryEntry {
    pub revision: i64,
    pub at: DateTime<Utc>,
    pub from: Option<RunState>,
    pub to: RunState,
    /// What happened: `accept`, `admitted`, `bound`, `cancel`, `steer`, …
    pub on: String,
    /// Who or what did it: a principal's id, or the name of a role.
    pub actor: String,
    pub epoch: i32,
    pub reason: Option<String>,
    /// Particulars, by kind of entry.
    pub detail: Option<serde_json::Value>,
}

/// Body of `POST /v1/runs/{id}/steers`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct NewSteer {
    /// At most 32 KiB of UTF-8 without U+0000.
    pub message: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileId>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Steer {
    pub id: SteerId,
    pub run: RunId,
    /// Its place among the run's steers, from 1.
    pub ordinal: i64,
    pub message: String,
    /// `read` means that it left the pipe, and not more than that.
    pub state: SteerState,
    pub reason: Option<String>,
    pub principal: PrincipalId,
    pub created_at: DateTime<Utc>,
    pub changed_at: DateTime<Utc>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Session {
    pub id: SessionId,
    pub agent: String,
    pub principal: PrincipalId,
    /// The pool whose host holds the workspace, once there is one.
    pub place: Option<String>,
    pub live_run: Option<RunId>,
    pub runs: i64,
    pub created_at: DateTime<Utc>,
}

/// An agent as `/v1` shows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Agent {
    pub name: String,
    pub version: i32,
    pub paused: bool,
    pub created_at: DateTime<Utc>,
    pub definition: AgentDefinition,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Delivery {
    pub id: DeliveryId,
    pub run: RunId,
    /// `webhook`.
    pub kind: String,
    /// What it tells: `run_ended`, or `sandbox_unknown` when nobody has known for 15 minutes whether the run's sandbox is there.
    pub about: String,
    /// Where it goes, without secrets.
    pub target: String,
    /// `pending`, `sending`, `unknown`, `delivered` or `dead`.
    pub state: String,
    pub attempts: i32,
    /// What the receiver last said.
    pub answer: Option<String>,
    pub next_attempt_at: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
    pub ended_at: Option<DateTime<Utc>>,
}

/// Body of `POST /v1/tokens`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct NewToken {
    /// The principal's name; it is made if there is none of that name.
    pub principal: String,
    /// Of `runs`, `terminal`, `admin`.
    pub scopes: Vec<String>,
    /// Days until it expires, 1 to 3650.
    pub days: i32,
}

/// A token; `secret` is in the answer that made it and nowhere else.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Token {
    pub id: TokenId,
    pub tenant: TenantId,
    pub principal: PrincipalId,
    pub principal_name: String,
    pub scopes: Vec<String>,
    pub expires_at: DateTime<Utc>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
}

/// Body of `POST /v1/tenants`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct NewTenant {
    pub name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Tenant {
    pub id: TenantId,
    pub name: String,
    pub retention: Retention,
    /// Runs at a time; null: as many as there is room for.
    pub concurrent: Option<i32>,
    pub paused: bool,
    pub created_at: DateTime<Utc>,
}

/// Body of `PUT /v1/tenants/{id}/limits`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct TenantLimits {
    /// Runs at a time; null: as many as there is room for.
    pub concurrent: Option<i32>,
}

/// Something that has not moved for longer than it should, and what would move it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Stuck {
    /// One word; also the label `kind` of the metric `towpath_stuck`.
    pub kind: String,
    pub count: i64,
    /// How long the oldest has not moved, in seconds.
    pub oldest_s: f64,
    /// One of them: a run, a delivery, a message.
    pub example: Option<String>,
    pub told: String,
    pub cure: String,
}

/// A message that was laid aside.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Dead {
    pub id: i64,
    /// The consumer that could not do it.
    pub role: String,
    pub subject: String,
    /// The command; left out of lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<serde_json::Value>,
    pub reason: String,
    pub attempts: i32,
    pub created_at: DateTime<Utc>,
}

/// Days that a tenant's things are kept: transcripts and runs after the run's end, uploaded files after their last run's end, outputs after their run's end.
/// `null`: for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Retention {
    pub transcript_days: Option<i32>,
    pub file_days: Option<i32>,
    pub run_days: Option<i32>,
}

/// Data of an `output` event of an event stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct OutputEvent {
    pub epoch: i32,
    pub seq: u64,
    /// `stdout`, `stderr` or `terminal`.
    pub stream: String,
    /// The bytes as printed, base64.
    pub b64: String,
}

/// A channel as it is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Channel {
    pub id: ChannelId,
    /// The path that webhooks go to.
    pub hook: String,
    /// Names of the secrets that it has.
    pub secrets: Vec<String>,
    pub definition: ChannelDefinition,
    pub created_at: DateTime<Utc>,
}

/// A message that came in, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Inbound {
    pub id: InboundId,
    pub channel: String,
    /// `received`, `waiting`, `started`, `steered`, `answered`, `ignored`, `refused` or `dead`.
    pub state: String,
    /// Why it is in this state, in words.
    pub reason: Option<String>,
    pub author: Option<String>,
    pub subject: Option<String>,
    pub thread: Option<ThreadId>,
    /// The run that it started or steered.
    pub run: Option<RunId>,
    /// Attempts that failed.
    pub attempts: i32,
    pub created_at: DateTime<Utc>,
    pub handled_at: Option<DateTime<Utc>>,
}
