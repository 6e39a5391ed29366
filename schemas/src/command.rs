//! What travels on the COMMAND stream. A command is a nudge: everything it needs is in Postgres, so losing one only delays the work until the
//! sweep (invariant SWEPT), and seeing one twice changes nothing (ONCE). A process that meets a kind it does not know leaves it to others.

use serde::{Deserialize, Serialize};

use crate::id::{DeliveryId, InboundId, RunId, TenantId};

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Command {
    /// Admit as many waiting runs as fit into the pool.
    Admit { pool: String },
    /// Bring the host's sandboxes of this run to what their rows ask for.
    Host { host: String, run: RunId },
    /// Seal what this epoch has printed, until it is closed.
    Seal { tenant: TenantId, run: RunId, epoch: i32 },
    /// This sandbox is gone, or its host can never start it.
    Observed { tenant: TenantId, run: RunId, epoch: i32 },
    /// This epoch's record is closed: its run may settle.
    Sealed { tenant: TenantId, run: RunId, epoch: i32 },
    /// Send this delivery.
    Deliver { tenant: TenantId, delivery: DeliveryId },
    /// Take in this message.
    Intake { tenant: TenantId, inbound: InboundId },
    /// A kind that a newer release knows.
    #[serde(other)]
    Unknown,
}
