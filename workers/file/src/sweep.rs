//! Objects whose write was never finished.

use std::time::Duration;

use towpath_chassis::{Chassis, Result, sweep::Sweep};

use crate::table;

pub fn sweeps() -> Vec<Sweep> {
    vec![Sweep::new("unfinished objects", Duration::from_secs(600), unfinished)]
}

async fn unfinished(chassis: Chassis) -> Result<u64> {
    let stale = table::stale_objects(&chassis.db).await?;
    for key in &stale {
        chassis.store.delete(key).await?;
        table::object_gone(&chassis.db, key).await?;
        tracing::info!(key, "an object whose write was never finished is gone");
    }
    Ok(stale.len() as u64)
}
