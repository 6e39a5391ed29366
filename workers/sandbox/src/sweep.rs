//! Nobody told us: each host looks at all of its own sandboxes, and the clock at those that nobody hears from.

use std::time::Duration;

use towpath_chassis::{Chassis, Result, sweep::Sweep};

use crate::{table, worker::Host};

/// How often a host looks.
const LOOK: Duration = Duration::from_secs(3);
/// How often a host looks for sandboxes that have no row.
const STRANGERS: Duration = Duration::from_secs(60);
/// How often the clock looks for leases that have run out and for hosts that have fallen silent.
const SILENT: Duration = Duration::from_secs(5);
/// Sandboxes that one look takes.
const BATCH: i64 = 1000;

/// The sweeps of the role `clock`: what no host has to judge.
pub fn sweeps() -> Vec<Sweep> {
    vec![Sweep::new("leases that have run out", SILENT, run_out), Sweep::new("unobserved sandboxes", SILENT, unobserved)]
}

async fn run_out(chassis: Chassis) -> Result<u64> {
    let mut work = chassis.begin().await?;
    let gone = table::run_out(&mut work, BATCH).await?;
    work.commit().await?;
    Ok(gone)
}

async fn unobserved(chassis: Chassis) -> Result<u64> {
    table::unobserved(&chassis.db, BATCH).await
}

impl Host {
    /// Runs on the host itself, not in the clock: no other host can judge its sandboxes.
    pub fn sweeps(&self) -> Vec<Sweep> {
        let (host, own) = (self.clone(), self.clone());
        vec![
            Sweep::new("sandboxes of this host", LOOK, move |chassis| {
                let host = host.clone();
                async move { host.attend(&chassis, None).await }
            }),
            Sweep::new("sandboxes without a row", STRANGERS, move |chassis| {
                let host = own.clone();
                async move { host.report_strangers(&chassis).await }
            }),
        ]
    }
}
