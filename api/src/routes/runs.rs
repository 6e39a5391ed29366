//! `/v1/runs`.

use std::time::Duration;

use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode, header},
};
use serde::Deserialize;
use towpath_agent::start::{Start, again};
use towpath_chassis::{Error, idempotency::Key, secret, telemetry};
use towpath_run::{accept, retention, view};
use towpath_schemas::{
    ErrorCode, Problem,
    body::{HistoryEntry, NewRun, Page, Rerun, Run, RunState},
    id::{RunId, SessionId, TenantId},
    limit::WAIT_S,
};
use towpath_tenant::Caller;
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    Api,
    answer::{Answer, Body, IdempotencyKey, Path, Query, replay_header},
    caller::Runs,
};

pub fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(get, remove))
        .routes(routes!(history))
        .routes(routes!(rerun))
        .routes(routes!(cancel))
        .routes(routes!(abandon))
}

/// Accepts a run: 201 once it is committed.
#[utoipa::path(post, path = "/v1/runs", request_body = NewRun,
    responses((status = 201, body = Run), (status = 404, body = Problem), (status = 409, body = Problem), (status = 422, body = Problem), (status = 503, body = Problem)))]
async fn create(
    State(api): State<Api>,
    Runs(caller): Runs,
    key: IdempotencyKey,
    body: Body<NewRun>,
) -> Answer<(StatusCode, HeaderMap, Json<Run>)> {
    let key = key.with_body(body.sha256)?;
    start(&api, &caller, body.value, key).await
}

/// Removes an ended run with its transcript, outputs, steers, history and deliveries. Done once it is answered.
#[utoipa::path(delete, path = "/v1/runs/{id}", responses((status = 204), (status = 404, body = Problem), (status = 409, body = Problem)))]
async fn remove(State(api): State<Api>, Runs(caller): Runs, Path(id): Path<RunId>) -> Answer<StatusCode> {
    retention::remove(&api.chassis, caller.tenant, id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Runs it again: the same prompt, files, labels and targets, by the agent's newest version, in a new session unless the body says otherwise.
#[utoipa::path(post, path = "/v1/runs/{id}/rerun", request_body = Rerun,
    responses((status = 201, body = Run), (status = 404, body = Problem), (status = 409, body = Problem), (status = 422, body = Problem), (status = 503, body = Problem)))]
async fn rerun(
    State(api): State<Api>,
    Runs(caller): Runs,
    Path(id): Path<RunId>,
    key: IdempotencyKey,
    body: Body<Rerun>,
) -> Answer<(StatusCode, HeaderMap, Json<Run>)> {
    // The same key for another run is another request.
    let key = key.with_body(secret::sha256(&[id.uuid().as_bytes().as_slice(), &body.sha256].concat()))?;
    let request = again(&api.chassis, caller.tenant, id, body.value).await?;
    start(&api, &caller, request, key).await
}

async fn start(api: &Api, caller: &Caller, request: NewRun, key: Option<Key>) -> Answer<(StatusCode, HeaderMap, Json<Run>)> {
    let start = Start::new(&api.chassis, caller.tenant, caller.principal, request, key, telemetry::traceparent())?;
    let started = api.starts.start(start).await?;
    let run = match started.shown {
        Some(run) => *run,
        None => view::run(&api.chassis.db, caller.tenant, started.run).await?,
    };
    let mut headers = replay_header(started.replay);
    if let Ok(location) = format!("/v1/runs/{}", run.id).parse() {
        headers.insert(header::LOCATION, location);
    }
    Ok((StatusCode::CREATED, headers, Json(run)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Filter {
    agent: Option<String>,
    state: Option<String>,
    session: Option<SessionId>,
    label: Option<String>,
    cursor: Option<String>,
}

/// The tenant's runs, newest first, without prompt, result and files.
#[utoipa::path(get, path = "/v1/runs", responses((status = 200, body = Page<Run>), (status = 400, body = Problem)))]
async fn list(State(api): State<Api>, Runs(caller): Runs, Query(query): Query<Filter>) -> Answer<Json<Page<Run>>> {
    let state = query
        .state
        .map(|word| {
            RunState::from_word(&word).ok_or_else(|| {
                Error::refused(
                    ErrorCode::BadRequest,
                    format!("state: `{word}` is none of {}", RunState::ALL.map(RunState::word).join(", ")),
                )
            })
        })
        .transpose()?;
    let filter = view::Filter { agent: query.agent, state, session: query.session, label: query.label, cursor: query.cursor };
    Ok(Json(view::list(&api.chassis.db, caller.tenant, &filter).await?))
}

#[derive(Deserialize)]
struct Wait {
    wait: Option<String>,
}

/// One run; with `?wait=30s` the answer comes when it has ended, or after that time, 200 either way.
#[utoipa::path(get, path = "/v1/runs/{id}", responses((status = 200, body = Run), (status = 404, body = Problem)))]
async fn get(State(api): State<Api>, Runs(caller): Runs, Path(id): Path<RunId>, Query(query): Query<Wait>) -> Answer<Json<Run>> {
    if let Some(wait) = query.wait {
        let wait = humantime::parse_duration(&wait)
            .map_err(|error| Error::refused(ErrorCode::BadRequest, format!("wait: {error}; for example 30s")))?;
        until_ended(&api, caller.tenant, id, wait.min(Duration::from_secs(WAIT_S))).await?;
    }
    Ok(Json(view::run(&api.chassis.db, caller.tenant, id).await?))
}

async fn until_ended(api: &Api, tenant: TenantId, run: RunId, wait: Duration) -> Answer<()> {
    let feed = api.feeds.of(tenant, run).await?;
    let mut state = feed.state();
    tokio::select! {
        // A feed that ends does so because the process drains: the answer is what is known by then.
        _ = state.wait_for(|(state, _)| state.ended()) => {}
        () = tokio::time::sleep(wait) => {}
        () = api.chassis.tasks.stopping().cancelled_owned() => {}
    }
    Ok(())
}

#[derive(Deserialize)]
struct After {
    after: Option<i64>,
}

/// Every move of the run and its steers, with who made it.
#[utoipa::path(get, path = "/v1/runs/{id}/history", responses((status = 200, body = Page<HistoryEntry>), (status = 404, body = Problem)))]
async fn history(
    State(api): State<Api>,
    Runs(caller): Runs,
    Path(id): Path<RunId>,
    Query(query): Query<After>,
) -> Answer<Json<Page<HistoryEntry>>> {
    view::state(&api.chassis.db, caller.tenant, id).await?;
    Ok(Json(Page { items: view::history(&api.chassis.db, caller.tenant, id, query.after.unwrap_or(0)).await?, cursor: None }))
}

/// 202 while it has to stop yet, 200 once it has ended.
fn settled(state: RunState) -> StatusCode {
    if state.ended() { StatusCode::OK } else { StatusCode::ACCEPTED }
}

/// Asks the run to stop; asking again changes nothing.
#[utoipa::path(post, path = "/v1/runs/{id}/cancel", responses((status = 202, body = Run), (status = 200, body = Run), (status = 404, body = Problem)))]
async fn cancel(State(api): State<Api>, Runs(caller): Runs, Path(id): Path<RunId>) -> Answer<(StatusCode, Json<Run>)> {
    let state = accept::cancel(&api.chassis, caller.tenant, caller.principal, id).await?;
    Ok((settled(state), Json(view::run(&api.chassis.db, caller.tenant, id).await?)))
}

/// A person's word that the run's sandbox is gone.
#[utoipa::path(post, path = "/v1/runs/{id}/abandon", responses((status = 202, body = Run), (status = 200, body = Run), (status = 409, body = Problem)))]
async fn abandon(State(api): State<Api>, Runs(caller): Runs, Path(id): Path<RunId>) -> Answer<(StatusCode, Json<Run>)> {
    let state = accept::abandon(&api.chassis, caller.tenant, caller.principal, id).await?;
    Ok((settled(state), Json(view::run(&api.chassis.db, caller.tenant, id).await?)))
}
