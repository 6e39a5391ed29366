//! `/v1/sessions`.

use axum::{Json, extract::State};
use towpath_schemas::{
    Problem,
    body::{Page, Session},
    id::SessionId,
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    Api,
    answer::{Answer, Path},
    caller::Runs,
};

pub fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(get))
}

/// The tenant's newest sessions.
#[utoipa::path(get, path = "/v1/sessions", responses((status = 200, body = Page<Session>)))]
async fn list(State(api): State<Api>, Runs(caller): Runs) -> Answer<Json<Page<Session>>> {
    Ok(Json(Page { items: towpath_session::list(&api.chassis.db, caller.tenant).await?, cursor: None }))
}

/// One session.
#[utoipa::path(get, path = "/v1/sessions/{id}", responses((status = 200, body = Session), (status = 404, body = Problem)))]
async fn get(State(api): State<Api>, Runs(caller): Runs, Path(id): Path<SessionId>) -> Answer<Json<Session>> {
    Ok(Json(towpath_session::by_id(&api.chassis.db, caller.tenant, id).await?))
}
