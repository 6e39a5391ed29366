//! `/v1/agents`.

use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode, header},
};
use serde::Deserialize;
use towpath_chassis::Error;
use towpath_schemas::{
    ErrorCode, Problem,
    agent::AgentDefinition,
    body::{Agent, Page},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    Api,
    answer::{Answer, Body, Path, Query},
    caller::{Admin, Runs},
};

pub fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::new()
        .routes(routes!(put, get, delete))
        .routes(routes!(list))
        .routes(routes!(versions))
        .routes(routes!(pause))
        .routes(routes!(resume))
}

fn etag(version: i32) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Ok(value) = format!("\"{version}\"").parse() {
        headers.insert(header::ETAG, value);
    }
    headers
}

/// The version in `If-Match`; 0 for one that no agent has.
fn if_match(headers: &HeaderMap) -> Answer<Option<i32>> {
    let Some(value) = headers.get(header::IF_MATCH) else { return Ok(None) };
    let version = value.to_str().ok().and_then(|text| text.trim().trim_matches('"').parse().ok());
    match version {
        Some(version) => Ok(Some(version)),
        None => Err(Error::refused(ErrorCode::BadRequest, "If-Match: use the ETag of the version that you saw, for example \"3\"").into()),
    }
}

/// Stores a definition: a new version unless it equals the newest.
#[utoipa::path(put, path = "/v1/agents/{name}", request_body = AgentDefinition, responses((status = 200, body = Agent), (status = 201, body = Agent), (status = 422, body = Problem)))]
async fn put(
    State(api): State<Api>,
    Admin(caller): Admin,
    Path(name): Path<String>,
    headers: HeaderMap,
    body: Body<AgentDefinition>,
) -> Answer<(StatusCode, HeaderMap, Json<Agent>)> {
    if body.value.name != name {
        return Err(
            Error::refused(ErrorCode::Unprocessable, format!("name: the path says `{name}`, the body `{}`", body.value.name)).into()
        );
    }
    let (agent, created) = towpath_agent::put(&api.chassis, caller.tenant, caller.principal, &body.value, if_match(&headers)?).await?;
    let status = if created { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, etag(agent.version), Json(agent)))
}

#[derive(Deserialize)]
struct Version {
    version: Option<i32>,
}

/// One agent, its newest version or `?version=`.
#[utoipa::path(get, path = "/v1/agents/{name}", responses((status = 200, body = Agent), (status = 404, body = Problem)))]
async fn get(
    State(api): State<Api>,
    Runs(caller): Runs,
    Path(name): Path<String>,
    Query(query): Query<Version>,
) -> Answer<(HeaderMap, Json<Agent>)> {
    let agent = towpath_agent::get(&api.chassis.db, caller.tenant, &name, query.version).await?;
    Ok((etag(agent.version), Json(agent)))
}

/// No new runs; live ones end.
#[utoipa::path(delete, path = "/v1/agents/{name}", responses((status = 204), (status = 404, body = Problem)))]
async fn delete(State(api): State<Api>, Admin(caller): Admin, Path(name): Path<String>) -> Answer<StatusCode> {
    towpath_agent::delete(&api.chassis.db, caller.tenant, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The tenant's agents, by name.
#[utoipa::path(get, path = "/v1/agents", responses((status = 200, body = Page<Agent>)))]
async fn list(State(api): State<Api>, Runs(caller): Runs) -> Answer<Json<Page<Agent>>> {
    Ok(Json(Page { items: towpath_agent::list(&api.chassis.db, caller.tenant).await?, cursor: None }))
}

/// An agent's versions, newest first.
#[utoipa::path(get, path = "/v1/agents/{name}/versions", responses((status = 200, body = Page<Agent>), (status = 404, body = Problem)))]
async fn versions(State(api): State<Api>, Runs(caller): Runs, Path(name): Path<String>) -> Answer<Json<Page<Agent>>> {
    Ok(Json(Page { items: towpath_agent::versions(&api.chassis.db, caller.tenant, &name).await?, cursor: None }))
}

/// Starts none of its runs until it is resumed; they are accepted and wait.
#[utoipa::path(post, path = "/v1/agents/{name}/pause", responses((status = 204), (status = 404, body = Problem)))]
async fn pause(State(api): State<Api>, Admin(caller): Admin, Path(name): Path<String>) -> Answer<StatusCode> {
    towpath_agent::pause(&api.chassis, caller.tenant, &name, true).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Starts its runs again.
#[utoipa::path(post, path = "/v1/agents/{name}/resume", responses((status = 204), (status = 404, body = Problem)))]
async fn resume(State(api): State<Api>, Admin(caller): Admin, Path(name): Path<String>) -> Answer<StatusCode> {
    towpath_agent::pause(&api.chassis, caller.tenant, &name, false).await?;
    Ok(StatusCode::NO_CONTENT)
}
