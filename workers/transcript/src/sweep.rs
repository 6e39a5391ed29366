//! Nobody told us: records that are not closed and that nobody attends to.

use std::time::Duration;

use towpath_chassis::{Chassis, Result, sweep::Sweep};
use towpath_schemas::command::Command;

use crate::table;

pub fn sweeps() -> Vec<Sweep> {
    vec![Sweep::new("unattended transcripts", Duration::from_secs(3), unattended)]
}

async fn unattended(chassis: Chassis) -> Result<u64> {
    let epochs = table::unattended(&chassis.db).await?;
    let found = epochs.len() as u64;
    if found > 0 {
        let mut work = chassis.begin().await?;
        for of in epochs {
            work.command(Command::Seal { tenant: of.tenant, run: of.run, epoch: of.epoch });
        }
        work.commit().await?;
    }
    Ok(found)
}
