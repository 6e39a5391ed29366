//! `/v1/dead`: messages that were laid aside. The operator's.

use axum::{Json, extract::State, http::StatusCode};
use serde::Deserialize;
use towpath_chassis::{Error, dead};
use towpath_schemas::{
    ErrorCode, Problem,
    body::{Dead, Page},
    limit::PAGE_ROWS,
};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::tenants::operator;
use crate::{
    Api,
    answer::{Answer, Path, Query},
    caller::Admin,
};

pub fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(get, forget)).routes(routes!(redrive))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Older {
    cursor: Option<String>,
}

/// Dead letters, newest first, each with the reason why it was laid aside.
#[utoipa::path(get, path = "/v1/dead", responses((status = 200, body = Page<Dead>), (status = 403, body = Problem)))]
async fn list(State(api): State<Api>, Admin(caller): Admin, Query(query): Query<Older>) -> Answer<Json<Page<Dead>>> {
    operator(&api, caller.tenant).await?;
    let refuse = || Error::refused(ErrorCode::BadRequest, "cursor: use the one that the last page gave");
    let before = query.cursor.map(|text| text.parse().map_err(|_| refuse())).transpose()?;
    let items = dead::list(&api.chassis.db, before).await?;
    let cursor = items.last().filter(|_| items.len() as i64 == PAGE_ROWS).map(|last| last.id.to_string());
    Ok(Json(Page { items, cursor }))
}

/// One with its command.
#[utoipa::path(get, path = "/v1/dead/{id}", responses((status = 200, body = Dead), (status = 404, body = Problem)))]
async fn get(State(api): State<Api>, Admin(caller): Admin, Path(id): Path<i64>) -> Answer<Json<Dead>> {
    operator(&api, caller.tenant).await?;
    Ok(Json(dead::get(&api.chassis.db, id).await?))
}

/// Gives it back to be handled again.
#[utoipa::path(post, path = "/v1/dead/{id}/redrive", responses((status = 204), (status = 404, body = Problem), (status = 422, body = Problem)))]
async fn redrive(State(api): State<Api>, Admin(caller): Admin, Path(id): Path<i64>) -> Answer<StatusCode> {
    operator(&api, caller.tenant).await?;
    dead::redrive(&api.chassis, id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Forgets it.
#[utoipa::path(delete, path = "/v1/dead/{id}", responses((status = 204), (status = 404, body = Problem)))]
async fn forget(State(api): State<Api>, Admin(caller): Admin, Path(id): Path<i64>) -> Answer<StatusCode> {
    operator(&api, caller.tenant).await?;
    dead::forget(&api.chassis.db, id).await?;
    Ok(StatusCode::NO_CONTENT)
}
