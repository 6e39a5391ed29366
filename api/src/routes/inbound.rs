//! `/v1/inbound`: messages that came in, and what became of them.

use axum::{Json, extract::State, http::StatusCode};
use serde::Deserialize;
use towpath_schemas::{
    Problem,
    body::{Inbound, Page},
    id::InboundId,
    limit::PAGE_ROWS,
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    Api,
    answer::{Answer, Path, Query},
    caller::Admin,
};

pub fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(replay))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Older {
    cursor: Option<InboundId>,
}

/// The tenant's messages, newest first.
#[utoipa::path(get, path = "/v1/inbound", responses((status = 200, body = Page<Inbound>)))]
async fn list(State(api): State<Api>, Admin(caller): Admin, Query(query): Query<Older>) -> Answer<Json<Page<Inbound>>> {
    let items = towpath_channel::inbound(&api.chassis.db, caller.tenant, query.cursor).await?;
    let cursor = items.last().filter(|_| items.len() as i64 == PAGE_ROWS).map(|last| last.id.to_string());
    Ok(Json(Page { items, cursor }))
}

/// Takes in once more what was refused, ignored or given up.
#[utoipa::path(post, path = "/v1/inbound/{id}/replay", responses((status = 202), (status = 404, body = Problem), (status = 422, body = Problem)))]
async fn replay(State(api): State<Api>, Admin(caller): Admin, Path(id): Path<InboundId>) -> Answer<StatusCode> {
    towpath_channel::replay(&api.chassis, caller.tenant, id).await?;
    Ok(StatusCode::ACCEPTED)
}
