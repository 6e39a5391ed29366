//! `/healthz`, `/readyz`, `/metrics`: they need no token and tell nothing of any tenant.

use std::time::Duration;

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::{FutureExt, future::BoxFuture};
use towpath_chassis::{Chassis, outbox, streams};
use towpath_schemas::subject;

use crate::Api;

/// How long one look at a server may take.
const LOOK: Duration = Duration::from_secs(3);

/// The process runs.
pub async fn alive() -> &'static str {
    "ok\n"
}

/// 200 when everything that this process stands on answers, else 503; either way says how each is, and in `oldest_s` for how many seconds the oldest thing of each kind has waited
/// to be moved on, and in `channels_broken` by how many channels nothing goes out (null when nobody can tell). Those are no reason for a 503: what is accepted here is kept, however slow the workers are.
pub async fn ready(State(api): State<Api>) -> Response {
    let chassis = &api.chassis;
    let database = async { outbox::oldest_s(&chassis.db).await.map(|age| format!("ok, oldest unpublished command {age:.1} s")) };
    let nats = async { towpath_chassis::streams::ping(&chassis.jetstream).await.map(|()| "ok".to_owned()) };
    let store = async { chassis.store.ping().await.map(|()| "ok".to_owned()) };
    let broken = tokio::time::timeout(LOOK, towpath_channel::broken(&chassis.db));
    let (database, nats, store, oldest, broken) = tokio::join!(look(database), look(nats), look(store), oldest(chassis), broken);
    let draining = chassis.tasks.is_stopping();
    let ready = database.is_ok() && nats.is_ok() && store.is_ok() && !draining;
    let word = |result: Result<String, String>| result.unwrap_or_else(|why| format!("away: {why}"));
    let body = serde_json::json!({
        "ready": ready, "draining": draining, "postgres": word(database), "nats": word(nats), "s3": word(store), "sandboxes_connected": api.gateway.connected(),
        "channels_broken": broken.ok().and_then(Result::ok), "oldest_s": oldest.into_iter().collect::<serde_json::Map<_, _>>(),
    });
    (if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, Json(body)).into_response()
}

/// The age of the oldest unpublished command, of the oldest command and frame that JetStream holds, of the oldest delivery and of the oldest message that are due.
async fn oldest(chassis: &Chassis) -> [(String, serde_json::Value); 5] {
    let of_stream = async |name| tokio::time::timeout(LOOK, streams::oldest_s(&chassis.jetstream, name)).await.ok()?.ok();
    let of_rows =
        async |rows: BoxFuture<'_, towpath_chassis::Result<(i64, f64)>>| Some(tokio::time::timeout(LOOK, rows).await.ok()?.ok()?.1);
    let (outbox, command, frame, delivery, inbound) = tokio::join!(
        of_rows(outbox::waiting(&chassis.db).boxed()),
        of_stream(subject::COMMAND),
        of_stream(subject::OUTPUT),
        of_rows(towpath_delivery::due(&chassis.db).boxed()),
        of_rows(towpath_channel::due(&chassis.db).boxed()),
    );
    [("outbox", outbox), ("command", command), ("frame", frame), ("delivery", delivery), ("inbound", inbound)]
        .map(|(what, age)| (what.to_owned(), age.into()))
}

async fn look(what: impl Future<Output = towpath_chassis::Result<String>>) -> Result<String, String> {
    match tokio::time::timeout(LOOK, what).await {
        Ok(Ok(word)) => Ok(word),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {LOOK:?}")),
    }
}

/// Prometheus text. Gauges of what waits are read from Postgres at the moment of asking.
pub async fn metrics(State(api): State<Api>) -> Response {
    let Some(handle) = &api.metrics else { return StatusCode::NOT_FOUND.into_response() };
    let db = &api.chassis.db;
    let ready = [
        ("provision", towpath_run::admission::ready(db).await),
        ("transcript", towpath_transcript::unsealed(db).await),
        ("deliver", towpath_delivery::due(db).await),
        ("intake", towpath_channel::due(db).await),
        ("clock", outbox::waiting(db).await),
    ];
    for (role, found) in ready {
        // What cannot be read is left as it was, not shown as zero (UNSURE).
        let Ok((count, age)) = found else { continue };
        metrics::gauge!("towpath_ready", "role" => role).set(count as f64);
        metrics::gauge!("towpath_ready_age_seconds", "role" => role).set(age);
    }
    for stuck in super::stuck::all(&api.chassis).await.unwrap_or_default() {
        metrics::gauge!("towpath_stuck", "kind" => stuck.kind.clone()).set(stuck.count as f64);
        metrics::gauge!("towpath_stuck_age_seconds", "kind" => stuck.kind).set(stuck.oldest_s);
    }
    for (state, count) in towpath_run::view::by_state(db).await.unwrap_or_default() {
        metrics::gauge!("towpath_runs", "state" => state.word()).set(count as f64);
    }
    if let Ok(slots) = towpath_run::admission::slots_held(db).await {
        metrics::gauge!("towpath_slots_held").set(slots as f64);
    }
    if let Ok(broken) = towpath_channel::broken(db).await {
        metrics::gauge!("towpath_channels_broken").set(broken as f64);
    }
    for (what, age) in oldest(&api.chassis).await {
        if let Some(age) = age.as_f64() {
            metrics::gauge!("towpath_oldest_seconds", "what" => what).set(age);
        }
    }
    metrics::gauge!("towpath_streams_open").set(api.streams.count() as f64);
    metrics::gauge!("towpath_sandboxes_connected").set(api.gateway.connected() as f64);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], handle.render()).into_response()
}
