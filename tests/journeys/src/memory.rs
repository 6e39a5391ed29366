//! How much memory each process took at most, while processes come and are killed.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Result, ensure};

use crate::{Process, peak_memory, supervisors};

/// Shorter than any process here lives.
const LOOK: Duration = Duration::from_millis(20);

/// Bytes by name of the process; all supervisors are one name.
type Peaks = Arc<Mutex<BTreeMap<String, u64>>>;

pub struct Memory {
    peaks: Peaks,
    done: Arc<AtomicBool>,
}

impl Memory {
    pub(crate) fn watch(processes: Arc<Mutex<BTreeMap<String, Process>>>, state: PathBuf) -> Self {
        let memory = Self { peaks: Arc::default(), done: Arc::default() };
        let (peaks, done) = (memory.peaks.clone(), memory.done.clone());
        // A thread of its own: the test's runtime may be busy reading a transcript.
        std::thread::spawn(move || {
            while !done.load(Ordering::Relaxed) {
                let mut seen: Vec<(String, u64)> = supervisors(&state)
                    .into_iter()
                    .filter_map(|pid| Some(("supervisor".to_owned(), peak_memory(u32::try_from(pid).ok()?))))
                    .collect();
                let processes = processes.lock().unwrap_or_else(PoisonError::into_inner);
                seen.extend(processes.iter().map(|(name, process)| (name.clone(), process.peak_memory())));
                drop(processes);
                let mut peaks = peaks.lock().unwrap_or_else(PoisonError::into_inner);
                for (name, bytes) in seen {
                    let peak = peaks.entry(name).or_default();
                    *peak = bytes.max(*peak);
                }
                drop(peaks);
                std::thread::sleep(LOOK);
            }
        });
        memory
    }

    /// Every process was seen, no supervisor took over 64 MiB and no other over 400 MiB.
    pub fn stayed_flat(&self) -> Result<()> {
        let peaks = self.peaks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let figures: Vec<String> = peaks.iter().map(|(name, bytes)| format!("{name} {:.1} MB", *bytes as f64 / 1e6)).collect();
        println!("peak memory: {}", figures.join(", "));
        ensure!(peaks.contains_key("supervisor"), "no supervisor was seen");
        for (name, bytes) in peaks {
            let most: u64 = if name == "supervisor" { 64 << 20 } else { 400 << 20 };
            ensure!((1..most).contains(&bytes), "{name} took {bytes} bytes");
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
    }
}
