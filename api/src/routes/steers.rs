//! `/v1/runs/{id}/steers`.

use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode},
};
use serde::Deserialize;
use towpath_chassis::Error;
use towpath_run::{
    accept::{NewSteerRow, steer},
    view,
};
use towpath_schemas::{
    ErrorCode, Problem,
    body::{NewSteer, Page, Steer},
    id::{RunId, SteerId},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    Api,
    answer::{Answer, Body, IdempotencyKey, Path, Query, replay_header},
    caller::Runs,
};

pub fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::new().routes(routes!(create, list))
}

/// Accepts a follow-up message for a live run.
#[utoipa::path(post, path = "/v1/runs/{id}/steers", request_body = NewSteer,
    responses((status = 201, body = Steer), (status = 404, body = Problem), (status = 409, body = Problem), (status = 413, body = Problem)))]
async fn create(
    State(api): State<Api>,
    Runs(caller): Runs,
    Path(run): Path<RunId>,
    key: IdempotencyKey,
    body: Body<NewSteer>,
) -> Answer<(StatusCode, HeaderMap, Json<Steer>)> {
    let key = key.with_body(body.sha256)?;
    let new = NewSteerRow {
        id: SteerId::mint(),
        tenant: caller.tenant,
        run,
        principal: caller.principal,
        message: body.value.message,
        files: body.value.files,
        key,
    };
    let (id, replay) = steer(&api.chassis, &new).await?;
    let steer = towpath_steer::by_id(&api.chassis.db, caller.tenant, id)
        .await?
        .ok_or_else(|| Error::refused(ErrorCode::NotFound, format!("there is no steer {id}")))?;
    Ok((StatusCode::CREATED, replay_header(replay), Json(steer)))
}

#[derive(Deserialize)]
struct After {
    after: Option<i64>,
}

/// The run's steers in order, those after the ordinal `?after=`.
#[utoipa::path(get, path = "/v1/runs/{id}/steers", responses((status = 200, body = Page<Steer>), (status = 404, body = Problem)))]
async fn list(State(api): State<Api>, Runs(caller): Runs, Path(run): Path<RunId>, Query(query): Query<After>) -> Answer<Json<Page<Steer>>> {
    view::state(&api.chassis.db, caller.tenant, run).await?;
    let items = towpath_steer::of_run(&api.chassis.db, caller.tenant, run, query.after.unwrap_or(0)).await?;
    Ok(Json(Page { items, cursor: None }))
}
