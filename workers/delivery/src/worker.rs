//! A command came: send what is due. The claim is committed before the request, the answer after it; no transaction is open meanwhile.

use std::{sync::Arc, time::Duration};

use futures::{StreamExt, future::BoxFuture, stream};
use towpath_chassis::{
    Chassis, Result,
    consume::{Handler, Outcome},
    telemetry, timer,
};
use towpath_schemas::{command::Command, id::DeliveryId, subject};
use tracing::Instrument;

use crate::{
    state::{Answer, Next, Tried, next, words},
    sweep::TIMER,
    table::{self, Due, TargetKind},
    webhook,
};

/// Requests of one batch that are under way at a time.
const AT_A_TIME: usize = 32;
/// Wait of those that did not fit.
const AGAIN: Duration = Duration::from_millis(200);

/// One attempt at a thread, made by the room that knows channels.
pub type ToThread = Arc<dyn Fn(Chassis, Due) -> BoxFuture<'static, Result<Answer>> + Send + Sync>;

pub fn handler(to_thread: ToThread) -> Handler {
    Handler::new("deliver", subject::DELIVER_ALL, move |chassis, batch| handle(chassis, batch, to_thread.clone()))
}

async fn handle(chassis: Chassis, batch: Vec<Command>, to_thread: ToThread) -> Result<Vec<Outcome>> {
    let ids: Vec<DeliveryId> = batch
        .iter()
        .filter_map(|command| match command {
            Command::Deliver { delivery, .. } => Some(*delivery),
            Command::Admit { .. }
            | Command::Host { .. }
            | Command::Seal { .. }
            | Command::Observed { .. }
            | Command::Sealed { .. }
            | Command::Intake { .. }
            | Command::Unknown => None,
        })
        .collect();
    // Only what can be under way at once is claimed: an attempt that counts is one that is made.
    let now = &ids[..ids.len().min(AT_A_TIME)];
    let mut work = chassis.begin().await?;
    let due = table::claim(&mut work, now).await?;
    work.commit().await?;
    let results: Vec<Result<()>> =
        stream::iter(due).map(|due| send(chassis.clone(), due, &to_thread)).buffer_unordered(AT_A_TIME).collect().await;
    for result in results {
        // A claim whose answer was not recorded is due again by itself.
        if let Err(error) = result {
            tracing::warn!(error = error.chain(), "a delivery is sent again later");
        }
    }
    Ok((0..batch.len()).map(|index| if index < now.len() { Outcome::Done } else { Outcome::Later(AGAIN) }).collect())
}

async fn send(chassis: Chassis, due: Due, to_thread: &ToThread) -> Result<()> {
    let span = telemetry::span_from("deliver", due.traceparent.as_deref());
    async move {
        let answer = match due.kind {
            TargetKind::Webhook => webhook::attempt(&chassis, &due).await?,
            TargetKind::Thread => to_thread(chassis.clone(), due.clone()).await?,
        };
        let next = next(Tried { kind: due.kind, attempts: due.attempts, age: due.age }, &answer);
        let words = words(&answer);
        let mut work = chassis.begin().await?;
        let counted = table::record(&mut work, &due, &next, &words).await?;
        let outcome = match next {
            Next::Delivered => "delivered",
            Next::Dead => "dead",
            Next::Held { after } => {
                if counted {
                    timer::set(&mut work, &[(TIMER, due.id.to_string(), after)]).await?;
                }
                "held"
            }
            Next::Again { after, unknown } => {
                if counted {
                    timer::set(&mut work, &[(TIMER, due.id.to_string(), after)]).await?;
                }
                if unknown { "unknown" } else { "failed" }
            }
        };
        work.commit().await?;
        metrics::counter!("towpath_delivery_attempts_total", "outcome" => outcome).increment(1);
        tracing::info!(delivery = %due.id, run = due.run.map(tracing::field::display), attempt = due.attempts, answer = words, outcome, "delivery attempt");
        Ok(())
    }
    .instrument(span)
    .await
}
