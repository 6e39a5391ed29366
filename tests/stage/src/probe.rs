//! Waiting for a condition with a deadline: the only way that anything here waits.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::process::Slot;

const POLL: Duration = Duration::from_millis(20);
const ONE_PROBE: Duration = Duration::from_secs(5);

/// Asks again and again until the answer is `Some`; an error that names `what` after the deadline.
pub async fn wait_for<T, F: Future<Output = Option<T>>>(what: &str, deadline: Duration, mut ask: impl FnMut() -> F) -> Result<T> {
    let began = Instant::now();
    loop {
        if let Ok(Some(answer)) = tokio::time::timeout(deadline, ask()).await {
            return Ok(answer);
        }
        if began.elapsed() > deadline {
            anyhow::bail!("waited {deadline:?} for {what}");
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Asks a starting server until it answers well. Ends early when its process ends; errors carry the log's tail.
pub(crate) async fn ready<T>(slot: &Slot, deadline: Duration, mut ask: impl AsyncFnMut() -> Result<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        slot.check()?;
        let error = match tokio::time::timeout(ONE_PROBE, ask()).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => error,
            Err(_) => anyhow::anyhow!("no answer within {ONE_PROBE:?}"),
        };
        if began.elapsed() > deadline {
            return Err(error).with_context(|| format!("{} is not ready after {deadline:?}{}", slot.name, slot.log_tail()));
        }
        tokio::time::sleep(POLL).await;
    }
}
