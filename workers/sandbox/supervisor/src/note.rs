//! The supervisor's log: its stderr, for the person who looks after the host.

use std::{
    fmt,
    io::Write,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Bytes that one process says in all; a fault that repeats itself must not fill the disk.
const MOST_BYTES: usize = 1024 * 1024;

static SAID: AtomicUsize = AtomicUsize::new(0);

/// Says one line. That it cannot be written (a full disk, a closed pipe) must never end a run, as `eprintln!` would.
pub fn line(text: fmt::Arguments<'_>) {
    let line = format!("{text}\n");
    if SAID.fetch_add(line.len(), Ordering::Relaxed) < MOST_BYTES {
        std::io::stderr().write_all(line.as_bytes()).ok();
    }
}

/// [`line`] with a format.
#[macro_export]
macro_rules! note {
    ($($words:tt)*) => {
        $crate::note::line(format_args!($($words)*))
    };
}
