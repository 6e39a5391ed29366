//! Objects whose write was never finished, and those that nothing refers to any more.

use std::time::Duration;

use towpath_chassis::{Chassis, Result, sweep::Sweep};

use crate::{table, upload};

pub fn sweeps() -> Vec<Sweep> {
    vec![
        Sweep::new("abandoned uploads", Duration::from_secs(600), abandoned),
        Sweep::new("unfinished objects", Duration::from_secs(600), unfinished),
        Sweep::new("unused objects", Duration::from_secs(30), unused),
    ]
}

async fn unfinished(chassis: Chassis) -> Result<u64> {
    table::stale_writes(&chassis.db).await
}

async fn abandoned(chassis: Chassis) -> Result<u64> {
    let mut work = chassis.begin().await?;
    let found = upload::forget_old(&mut work).await?;
    work.commit().await?;
    Ok(found)
}

/// The object goes first, then its row: whatever happens between, it is done again.
async fn unused(chassis: Chassis) -> Result<u64> {
    let keys = table::unused_objects(&chassis.db).await?;
    if !keys.is_empty() {
        chassis.store.delete_all(&keys).await?;
        table::objects_gone(&chassis.db, &keys).await?;
        metrics::counter!("towpath_deleted_objects_total").increment(keys.len() as u64);
    }
    Ok(keys.len() as u64)
}
