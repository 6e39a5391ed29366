//! Background tasks that a drain waits for. Cancellation is a value that is passed in; nothing is detached.

use std::{future::Future, time::Duration};

use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::kill;

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
