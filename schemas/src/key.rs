//! The only builder of S3 object keys. Every key ends in a fresh UUID, so no key is ever written twice, and holds ASCII ids only
//! (names that people chose live in Postgres: field case F18).

use uuid::Uuid;

use crate::id::{RunId, TenantId};

/// A sealed piece of a run's transcript.
pub fn chunk(tenant: TenantId, run: RunId, epoch: i32, unique: Uuid) -> String {
    format!("{tenant}/transcript/{run}/{epoch}/{}", unique.as_simple())
}

/// The content of an input file or of an output.
pub fn file(tenant: TenantId, unique: Uuid) -> String {
    format!("{tenant}/file/{}", unique.as_simple())
}
