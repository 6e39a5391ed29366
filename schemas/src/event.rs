//! What travels on the EVENT stream: facts for listeners (gateways, event streams, sealers). Never the record; a lost one is made good by
//! the listener's own periodic look at Postgres.

use serde::{Deserialize, Serialize};

/// What happened to a run; the body of an event is this, as JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Kind {
    /// The run or one of its steers moved; `revision` is the run's newest.
    Moved { revision: i64 },
    /// Frames up to `seq` of `epoch` are in S3 and indexed.
    Sealed { epoch: i32, seq: i64 },
    /// The epoch will get no more frames.
    Closed { epoch: i32 },
    /// The sealer misses frames from `seq` on.
    Hole { epoch: i32, seq: i64 },
    #[serde(other)]
    Unknown,
}

impl Kind {
    /// The subject's last token.
    pub fn token(&self) -> &'static str {
        match self {
            Kind::Moved { .. } => "moved",
            Kind::Sealed { .. } => "sealed",
            Kind::Closed { .. } => "closed",
            Kind::Hole { .. } => "hole",
            Kind::Unknown => "unknown",
        }
    }
}
