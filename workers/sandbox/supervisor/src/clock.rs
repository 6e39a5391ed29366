//! The two clocks of a frame.

use rustix::time::{ClockId, clock_gettime};

fn micros(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    (now.tv_sec.max(0) as u64) * 1_000_000 + (now.tv_nsec.max(0) as u64) / 1_000
}

/// Microseconds since 1970.
pub fn wall_us() -> u64 {
    micros(ClockId::Realtime)
}

/// Microseconds of a clock that never goes back.
pub fn mono_us() -> u64 {
    micros(ClockId::Monotonic)
}
