//! The two clocks of a frame, and the one of a lease.

use rustix::time::{ClockId, clock_gettime};

fn micros(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    (now.tv_sec.max(0) as u64) * 1_000_000 + (now.tv_nsec.max(0) as u64) / 1_000
}

/// Microseconds since 1970.
pub fn wall_us() -> u64 {
    micros(ClockId::Realtime)
}

/// Microseconds of a clock that also counts while the machine sleeps: what leases are counted by.
pub fn boot_us() -> u64 {
    micros(ClockId::Boottime)
}

/// Blocks this thread until that moment of [`boot_us`], or a little less: a signal may wake it.
pub fn sleep_until_boot_us(until_us: u64) {
    let until = rustix::time::Timespec {
        tv_sec: i64::try_from(until_us / 1_000_000).unwrap_or(i64::MAX),
        tv_nsec: (until_us % 1_000_000 * 1_000) as _,
    };
    // The caller looks at the clock again, whatever woke it.
    rustix::thread::clock_nanosleep_absolute(rustix::thread::ClockId::Boottime, &until).ok();
}

/// Microseconds of a clock that never goes back.
pub fn mono_us() -> u64 {
    micros(ClockId::Monotonic)
}
