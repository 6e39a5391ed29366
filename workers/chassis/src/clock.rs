//! The one place that reads the wall clock. For display and for the clocks of others (signatures, frames) only: leases, due times and limits use
//! Postgres's `now()` (field case F22).

use chrono::{DateTime, Utc};

#[allow(clippy::disallowed_methods, reason = "the one place that reads the clock")]
pub fn wall() -> DateTime<Utc> {
    Utc::now()
}
