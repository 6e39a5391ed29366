//! Sweeps: level-triggered twins of every message (invariant SWEPT). A sweep takes no input, looks at Postgres, and does what was missed. They run beside
//! each other; one that fails is tried again at its next turn and says so.

use std::{future::Future, sync::Arc, time::Duration};

use futures::future::BoxFuture;

use crate::{Chassis, Result};

type Run = dyn Fn(Chassis) -> BoxFuture<'static, Result<u64>> + Send + Sync;

#[derive(Clone)]
pub struct Sweep {
    pub name: &'static str,
    pub every: Duration,
    run: Arc<Run>,
}

impl Sweep {
    /// `run` answers how many things it found to do.
    pub fn new<F, Fut>(name: &'static str, every: Duration, run: F) -> Self
    where
        F: Fn(Chassis) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<u64>> + Send + 'static,
    {
        Self { name, every, run: Arc::new(move |chassis| Box::pin(run(chassis))) }
    }

    pub async fn once(&self, chassis: &Chassis) -> Result<u64> {
        (self.run)(chassis.clone()).await
    }
}

/// Runs one sweep for ever.
pub async fn run(chassis: Chassis, sweep: Sweep) {
    loop {
        match sweep.once(&chassis).await {
            Ok(found) => metrics::counter!("towpath_swept_total", "sweep" => sweep.name).increment(found),
            Err(error) => tracing::warn!(sweep = sweep.name, error = error.chain(), "swept again later"),
        }
        if !chassis.tasks.sleep(sweep.every).await {
            return;
        }
    }
}
