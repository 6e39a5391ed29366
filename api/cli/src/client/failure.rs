//! Why a command did not do what it was asked for, and the exit code that says so.

use std::process::ExitCode;

use towpath_schemas::{Problem, body::RunState};

#[derive(Debug)]
pub enum Failure {
    /// Something about the call or a local file; nothing was sent, or nothing came of it.
    Use(String),
    /// The API said no.
    Refused(Box<Problem>),
    /// The run that was waited for ended otherwise than well.
    Ended(RunState),
    /// Nobody answers, or not in a way that makes sense.
    Unreachable(String),
    /// A person pressed Ctrl-C.
    Interrupted,
    /// `doctor` found something, and has told it.
    Unwell,
}

impl Failure {
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Failure::Ended(RunState::Canceled) => 3,
            Failure::Ended(RunState::TimedOut) => 4,
            Failure::Ended(_) | Failure::Unwell => 1,
            Failure::Use(_) => 2,
            Failure::Refused(_) => 5,
            Failure::Unreachable(_) => 6,
            Failure::Interrupted => 130,
        })
    }

    /// A local file or stream that fails.
    pub fn local(what: impl std::fmt::Display, error: &std::io::Error) -> Self {
        Failure::Use(format!("{what}: {error}"))
    }
}
