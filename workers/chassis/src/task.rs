//! Background tasks that a drain waits for. Cancellation is a value that is passed in; nothing is detached.

use std::{future::Future, panic::AssertUnwindSafe, time::Duration};

use futures::FutureExt;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::kill;

/// Wait before a loop that broke down is begun anew.
const ANEW: Duration = Duration::from_secs(1);

#[derive(Clone, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    stop: CancellationToken,
}

impl Tasks {
    #[allow(clippy::disallowed_methods, reason = "the one place that spawns")]
    pub fn spawn<F>(&self, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.tracker.spawn(kill::inherit(future));
    }

    /// Spawns what a drain does not wait for, because it ends by itself once nobody needs it.
    #[allow(clippy::disallowed_methods, reason = "the other place that spawns")]
    pub fn spawn_unwaited<F>(&self, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        tokio::spawn(future);
    }

    /// Spawns a loop that has to run as long as the process does: one that breaks down is begun anew (field case F17).
    pub fn keep<F, Fut>(&self, name: &'static str, begin: F)
    where
        F: Fn() -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send,
    {
        let tasks = self.clone();
        self.spawn(async move {
            while AssertUnwindSafe(begin()).catch_unwind().await.is_err() {
                metrics::counter!("towpath_broken_loops_total", "loop" => name).increment(1);
                tracing::error!(name, "a loop broke down; it is begun anew");
                if !tasks.sleep(ANEW).await {
                    return;
                }
            }
        });
    }

    /// Is done once the process shall drain.
    pub fn stopping(&self) -> CancellationToken {
        self.stop.clone()
    }

    pub fn is_stopping(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Sleeps unless the process drains; false when it does.
    pub async fn sleep(&self, duration: Duration) -> bool {
        tokio::select! {
            () = self.stop.cancelled() => false,
            () = tokio::time::sleep(duration) => true,
        }
    }

    /// Asks every task to hand over what it holds, and waits at most `limit`. False when some did not make it: what they held is taken up
    /// by others once its lease or acknowledgement wait is over.
    pub async fn drain(&self, limit: Duration) -> bool {
        self.stop.cancel();
        self.tracker.close();
        tokio::time::timeout(limit, self.tracker.wait()).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_breaks_down_is_begun_anew() {
        let tasks = Tasks::default();
        let begun = std::sync::Arc::new(AtomicUsize::new(0));
        let counted = begun.clone();
        let stop = tasks.stopping();
        tasks.keep("test", move || {
            let (number, stop) = (counted.fetch_add(1, Ordering::SeqCst), stop.clone());
            async move {
                assert!(number >= 2, "this one breaks down");
                stop.cancelled().await;
            }
        });
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(begun.load(Ordering::SeqCst), 3);
        assert!(tasks.drain(Duration::from_secs(1)).await);
    }
}
