//! Sessions whose runs are all gone.

use std::time::Duration;

use towpath_chassis::{Chassis, Result, sweep::Sweep};
use towpath_run::admission;

use crate::table;

pub fn sweeps() -> Vec<Sweep> {
    vec![Sweep::new("expired sessions", Duration::from_secs(60), expired)]
}

/// First their workspaces go, on the hosts that have them; at a later look the sessions.
async fn expired(chassis: Chassis) -> Result<u64> {
    let mut all = 0;
    for expiry in towpath_tenant::expiries(&chassis.db).await? {
        let Some(before) = expiry.runs_before else { continue };
        let sessions = table::without_runs(&chassis.db, expiry.tenant, before).await?;
        if sessions.is_empty() {
            continue;
        }
        let mut work = chassis.begin().await?;
        admission::unwant_workspaces(&mut work, &sessions).await?;
        all += table::forget(&mut work, &sessions).await?;
        work.commit().await?;
    }
    metrics::counter!("towpath_expired_total", "kind" => "sessions").increment(all);
    Ok(all)
}
