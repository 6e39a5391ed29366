//! Deliveries.

use axum::{Json, extract::State, http::StatusCode};
use towpath_run::view;
use towpath_schemas::{
    Problem,
    body::{Delivery, Page},
    id::{DeliveryId, RunId},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    Api,
    answer::{Answer, Path},
    caller::Runs,
};

pub fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::new().routes(routes!(of_run)).routes(routes!(retry))
}

/// What the run's result is owed to, and how that goes.
#[utoipa::path(get, path = "/v1/runs/{id}/deliveries", responses((status = 200, body = Page<Delivery>), (status = 404, body = Problem)))]
async fn of_run(State(api): State<Api>, Runs(caller): Runs, Path(run): Path<RunId>) -> Answer<Json<Page<Delivery>>> {
    view::state(&api.chassis.db, caller.tenant, run).await?;
    Ok(Json(Page { items: towpath_delivery::of_run(&api.chassis.db, caller.tenant, run).await?, cursor: None }))
}

/// Sends an open delivery now, whatever wait it is in.
#[utoipa::path(post, path = "/v1/deliveries/{id}/retry", responses((status = 202), (status = 404, body = Problem), (status = 422, body = Problem)))]
async fn retry(State(api): State<Api>, Runs(caller): Runs, Path(id): Path<DeliveryId>) -> Answer<StatusCode> {
    towpath_delivery::retry(&api.chassis, caller.tenant, id).await?;
    Ok(StatusCode::ACCEPTED)
}
