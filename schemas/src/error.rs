//! The error catalogue: what can go wrong, as data. Every refusal of the API is an RFC 9457 problem document made from one of these.

use serde::{Deserialize, Serialize};

macro_rules! catalogue {
    ($($(#[$doc:meta])* $name:ident, $code:literal, $status:literal, $retryable:literal, $help:literal;)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum ErrorCode { $($(#[$doc])* $name),* }

        impl ErrorCode {
            pub const ALL: &'static [ErrorCode] = &[$(ErrorCode::$name),*];

            /// The stable word that programs match on.
            pub fn code(self) -> &'static str {
                match self { $(ErrorCode::$name => $code),* }
            }
            /// The HTTP status.
            pub fn status(self) -> u16 {
                match self { $(ErrorCode::$name => $status),* }
            }
            /// Whether the same request may succeed later, unchanged.
            pub fn retryable(self) -> bool {
                match self { $(ErrorCode::$name => $retryable),* }
            }
            /// What to do, in one sentence.
            pub fn help(self) -> &'static str {
                match self { $(ErrorCode::$name => $help),* }
            }
        }
    };
}

catalogue! {
    BadRequest, "bad_request", 400, false, "Correct what the detail names and send it again.";
    InvalidUtf8, "invalid_utf8", 400, false, "Send the body as UTF-8.";
    NulCharacter, "nul_character", 400, false, "Remove U+0000 from the text: it cannot be stored.";
    Unauthorized, "unauthorized", 401, false, "Send `Authorization: Bearer <token>` with a token that has not expired.";
    Forbidden, "forbidden", 403, false, "Use a token whose scopes allow this.";
    NotFound, "not_found", 404, false, "Check the id and the tenant of your token.";
    UnknownAgent, "unknown_agent", 404, false, "Apply the agent first, or list agents to see its name.";
    UnknownSession, "unknown_session", 404, false, "Leave `session` out to open a new one.";
    UnknownFile, "unknown_file", 404, false, "Upload the file first and use the id that the answer gives.";
    MethodNotAllowed, "method_not_allowed", 405, false, "See /openapi.json for what this path takes.";
    SessionBusy, "session_busy", 409, true, "Steer the live run, or wait until it has ended.";
    InProgress, "in_progress", 409, true, "A request with this Idempotency-Key is still being answered; ask again in a moment.";
    RunEnding, "run_ending", 409, false, "The run is ending; start the next one in the same session once it has ended.";
    RunEnded, "run_ended", 409, false, "The run has ended; start the next one in the same session.";
    RunNotEnded, "run_not_ended", 409, true, "Wait until the run has ended, or cancel it.";
    SandboxPresent, "sandbox_present", 409, false, "The run's sandbox is known to be alive; cancel the run instead.";
    UploadOffset, "upload_offset", 409, false, "Ask where the upload is (HEAD) and go on from there.";
    NameTaken, "name_taken", 409, false, "Choose another name.";
    VersionMismatch, "version_mismatch", 412, false, "Fetch the newest version and send its ETag in If-Match.";
    TooLarge, "too_large", 413, false, "Send less; the detail names the limit.";
    PromptTooLong, "prompt_too_long", 413, false, "Keep the prompt within 1 MiB; put long material into a file.";
    SteerTooLong, "steer_too_long", 413, false, "Keep a steer within 32 KiB; put long material into a file.";
    UnsupportedMediaType, "unsupported_media_type", 415, false, "Send `Content-Type: application/json`.";
    Unprocessable, "unprocessable", 422, false, "Correct what the detail names and send it again.";
    IdempotencyMismatch, "idempotency_mismatch", 422, false, "This Idempotency-Key was used with another body; use a new key.";
    TooMany, "too_many", 429, true, "The detail names the limit that is reached; wait until something has ended.";
    Internal, "internal", 500, true, "Look for the request id in the server's log.";
    Unavailable, "unavailable", 503, true, "A server that Towpath stands on does not answer; send it again in a moment.";
    OutcomeUnknown, "outcome_unknown", 503, true, "Nobody can say whether it was stored; send it again with the same Idempotency-Key.";
    Draining, "draining", 503, true, "This process is shutting down; send it again.";
}

/// An RFC 9457 problem document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Problem {
    /// Always `about:blank#<code>`: the code tells the kind.
    #[serde(rename = "type")]
    pub kind: String,
    pub title: String,
    pub status: u16,
    pub detail: String,
    pub code: String,
    pub retryable: bool,
    /// What to do.
    pub help: String,
    /// The thing in the way, where there is one: the live run of a busy session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked_by: Option<String>,
}

impl Problem {
    pub fn new(code: ErrorCode, detail: impl Into<String>) -> Self {
        Self {
            kind: format!("about:blank#{}", code.code()),
            title: code.code().replace('_', " "),
            status: code.status(),
            detail: detail.into(),
            code: code.code().to_owned(),
            retryable: code.retryable(),
            help: code.help().to_owned(),
            blocked_by: None,
        }
    }

    pub fn blocked_by(mut self, what: impl ToString) -> Self {
        self.blocked_by = Some(what.to_string());
        self
    }
}
