//! A command came: send what is due. The claim is committed before the request, the answer after it; no transaction is open meanwhile.

use std::time::Duration;

use futures::{StreamExt, stream};
use towpath_chassis::{
    Chassis, Result,
    consume::{Handler, Outcome},
    telemetry, timer,
};
use towpath_schemas::{command::Command, id::DeliveryId, subject};
use tracing::Instrument;

use crate::{
    state::{Next, next, words},
    sweep::TIMER,
    table::{self, Due},
    webhook,
};

/// Requests of one batch that are under way at a time.
const AT_A_TIME: usize = 32;
/// Wait of those that did not fit.
const AGAIN: Duration = Duration::from_millis(200);

pub fn handler() -> Handler {
    Handler::new("deliver", subject::DELIVER_ALL, handle)
}

async fn handle(chassis: Chassis, batch: Vec<Command>) -> Result<Vec<Outcome>> {
    let ids: Vec<DeliveryId> = batch
        .iter()
        .filter_map(|command| match command {
            Command::Deliver { delivery, .. } => Some(*delivery),
            Command::Admit { .. }
            | Command::Host { .. }
            | Command::Seal { .. }
            | Command::Observed { .. }
            | Command::Sealed { .. }
            | Command::Unknown => None,
        })
        .collect();
    // Only what can be under way at once is claimed: an attempt that counts is one that is made.
    let now = &ids[..ids.len().min(AT_A_TIME)];
    let mut work = chassis.begin().await?;
    let due = table::claim(&mut work, now).await?;
    work.commit().await?;
    let results: Vec<Result<()>> = stream::iter(due).map(|due| send(chassis.clone(), due)).buffer_unordered(AT_A_TIME).collect().await;
    for result in results {
        // A claim whose answer was not recorded is due again by itself.
        if let Err(error) = result {
            tracing::warn!(error = error.chain(), "a delivery is sent again later");
        }
    }
    Ok((0..batch.len()).map(|index| if index < now.len() { Outcome::Done } else { Outcome::Later(AGAIN) }).collect())
}

async fn send(chassis: Chassis, due: Due) -> Result<()> {
    let span = telemetry::span_from("deliver", due.traceparent.as_deref());
    async move {
        let answer = webhook::attempt(&chassis, &due).await?;
        let next = next(due.attempts, &answer);
        let words = words(&answer);
        let mut work = chassis.begin().await?;
        let counted = table::record(&mut work, &due, &next, &words).await?;
        let outcome = match next {
            Next::Delivered => "delivered",
            Next::Dead => "dead",
            Next::Again { after, unknown } => {
                if counted {
                    timer::set(&mut work, &[(TIMER, due.id.to_string(), after)]).await?;
                }
                if unknown { "unknown" } else { "failed" }
            }
        };
        work.commit().await?;
        metrics::counter!("towpath_delivery_attempts_total", "outcome" => outcome).increment(1);
        tracing::info!(delivery = %due.id, run = %due.run, attempt = due.attempts, answer = words, outcome, "delivery attempt");
        Ok(())
    }
    .instrument(span)
    .await
}
