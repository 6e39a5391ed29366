//! What a room's function can answer instead of a value.

use towpath_schemas::{ErrorCode, Problem};

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The asker did something that is not possible; final.
    #[error("refused: {}", .0.detail)]
    Refused(Box<Problem>),
    #[error("the database could not do it")]
    Database(#[source] sqlx::Error),
    /// COMMIT was sent and its answer never came (invariant UNSURE).
    #[error("nobody can say whether it was committed")]
    OutcomeUnknown(#[source] sqlx::Error),
    #[error("NATS: {doing}: {detail}")]
    Nats { doing: &'static str, detail: String },
    #[error("object store: {doing} {key}: {detail}")]
    Store { doing: &'static str, key: String, detail: String, found: Found },
    #[error("configuration: {0}")]
    Config(String),
    /// Stored data that this release cannot read, or a rule of our own that does not hold.
    #[error("broken: {0}")]
    Broken(String),
}

/// Whether the object store said that the object is not there, or said nothing that tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    Missing,
    Unsure,
}

impl Error {
    pub fn refused(code: ErrorCode, detail: impl Into<String>) -> Self {
        Problem::new(code, detail).into()
    }

    pub fn broken(detail: impl Into<String>) -> Self {
        Self::Broken(detail.into())
    }

    /// May the same thing succeed later, unchanged? Passing trouble of a server never counts against a message (field case F21).
    pub fn is_passing(&self) -> bool {
        match self {
            Error::Refused(problem) => problem.retryable,
            Error::Database(error) | Error::OutcomeUnknown(error) => database_is_away(error),
            Error::Nats { .. } | Error::Store { found: Found::Unsure, .. } => true,
            Error::Store { found: Found::Missing, .. } | Error::Config(_) | Error::Broken(_) => false,
        }
    }

    /// Somebody else had a row for too long, or two waited for each other: a smaller batch may well succeed.
    pub fn is_contention(&self) -> bool {
        match self {
            Error::Database(error) => {
                error.as_database_error().and_then(|refusal| refusal.code()).is_some_and(|code| code.starts_with("40") || code == "55P03")
            }
            _ => false,
        }
    }

    /// The problem document for the asker. Particulars of our own insides stay in the log.
    pub fn problem(&self) -> Problem {
        match self {
            Error::Refused(problem) => (**problem).clone(),
            Error::OutcomeUnknown(_) => Problem::new(ErrorCode::OutcomeUnknown, "the connection to the database broke during the commit"),
            Error::Database(error) if database_is_away(error) => Problem::new(ErrorCode::Unavailable, "the database does not answer"),
            Error::Nats { .. } => Problem::new(ErrorCode::Unavailable, "NATS does not answer"),
            Error::Store { found: Found::Unsure, .. } => Problem::new(ErrorCode::Unavailable, "the object store does not answer"),
            Error::Database(_) | Error::Store { .. } | Error::Config(_) | Error::Broken(_) => {
                Problem::new(ErrorCode::Internal, "something is wrong inside Towpath")
            }
        }
    }

    /// The named constraint that refused a row.
    pub fn constraint(&self) -> Option<&str> {
        match self {
            Error::Database(sqlx::Error::Database(error)) => error.constraint(),
            _ => None,
        }
    }

    /// The whole chain in one line, for the log.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            text.push_str(": ");
            text.push_str(&error.to_string());
            source = error.source();
        }
        text
    }
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Self {
        Error::Refused(Box::new(problem))
    }
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        if error.as_database_error().and_then(|refusal| refusal.code()).is_some_and(|code| code == "25006") {
            crate::db::suspect();
        }
        Error::Database(error)
    }
}

/// Connection trouble, fail-over and contention: nothing is wrong with what was asked (field case F1).
pub fn database_is_away(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::Protocol(_) => true,
        sqlx::Error::Database(error) => {
            let code = error.code().unwrap_or_default();
            // 08 connection, 25006 read only, 40 serialisation and deadlock, 53 resources, 55P03 lock wait, 57 shutdown and timeouts
            code.starts_with("08")
                || code.starts_with("40")
                || code.starts_with("53")
                || code.starts_with("57")
                || code == "25006"
                || code == "55P03"
        }
        _ => false,
    }
}
