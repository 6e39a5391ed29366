//! The one place that reads the wall clock. For display and for the clocks of others (signatures, frames) only: leases, due times and limits use
//! Postgres's `now()` (field case F22).

use std::{sync::OnceLock, time::Duration};

use chrono::{DateTime, Utc};

#[allow(clippy::disallowed_methods, reason = "the one place that reads the clock")]
pub fn wall() -> DateTime<Utc> {
    Utc::now()
}

/// How much shorter than usual this process's leases, claims and retries are: `TOWPATH_TIME_SCALE`, set once at start.
static SCALE: OnceLock<f64> = OnceLock::new();

/// The first one that is set counts, for the whole process.
pub(crate) fn set_scale(scale: f64) {
    SCALE.get_or_init(|| scale);
}

/// A wait or a lease as long as this process makes it: tests of faults shorten those that ask here by one setting.
pub fn scaled(wait: Duration) -> Duration {
    wait.mul_f64(SCALE.get().copied().unwrap_or(1.0))
}
