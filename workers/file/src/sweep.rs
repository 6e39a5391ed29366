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
    if keys.is_empty() {
        return Ok(0);
    }
    let gone = chassis.store.delete_all(&keys).await?;
    table::objects_gone(&chassis.db, &gone).await?;
    metrics::counter!("towpath_deleted_objects_total").increment(gone.len() as u64);
    let stay: Vec<String> = keys.into_iter().filter(|key| !gone.contains(key)).collect();
    table::put_off(&chassis.db, &stay).await?;
    Ok(gone.len() as u64)
}
