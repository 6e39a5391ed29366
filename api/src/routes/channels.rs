//! `/v1/channels`, and the hooks that messages come to.

use axum::{
    Json,
    body::Body as HttpBody,
    extract::State,
    http::{HeaderMap, StatusCode, header},
};
use base64::Engine;
use serde::Deserialize;
use towpath_channel::Envelope;
use towpath_chassis::{Error, secret};
use towpath_schemas::{
    ErrorCode, Problem,
    body::{Channel, Page},
    channel::ChannelDefinition,
    id::ChannelId,
    limit::INBOUND_BYTES,
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    Api,
    answer::{Answer, Body, Path, Query, read},
    caller::Admin,
};

pub fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::new()
        .routes(routes!(put, get, delete))
        .routes(routes!(list))
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(hook))
}

/// Stores a channel. Secrets that are left out stay as they were.
#[utoipa::path(put, path = "/v1/channels/{name}", request_body = ChannelDefinition, responses((status = 200, body = Channel), (status = 201, body = Channel), (status = 422, body = Problem)))]
async fn put(
    State(api): State<Api>,
    Admin(caller): Admin,
    Path(name): Path<String>,
    body: Body<ChannelDefinition>,
) -> Answer<(StatusCode, Json<Channel>)> {
    if body.value.name != name {
        return Err(
            Error::refused(ErrorCode::Unprocessable, format!("name: the path says `{name}`, the body `{}`", body.value.name)).into()
        );
    }
    let (channel, created) = towpath_channel::put(&api.chassis, caller.tenant, body.value).await?;
    Ok((if created { StatusCode::CREATED } else { StatusCode::OK }, Json(channel)))
}

/// One channel; of its secrets the names only.
#[utoipa::path(get, path = "/v1/channels/{name}", responses((status = 200, body = Channel), (status = 404, body = Problem)))]
async fn get(State(api): State<Api>, Admin(caller): Admin, Path(name): Path<String>) -> Answer<Json<Channel>> {
    Ok(Json(towpath_channel::by_name(&api.chassis, caller.tenant, &name).await?))
}

/// The tenant's channels.
#[utoipa::path(get, path = "/v1/channels", responses((status = 200, body = Page<Channel>)))]
async fn list(State(api): State<Api>, Admin(caller): Admin) -> Answer<Json<Page<Channel>>> {
    Ok(Json(Page { items: towpath_channel::list(&api.chassis, caller.tenant).await?, cursor: None }))
}

/// Takes nothing more in; runs that it has started go on.
#[utoipa::path(delete, path = "/v1/channels/{name}", responses((status = 204), (status = 404, body = Problem)))]
async fn delete(State(api): State<Api>, Admin(caller): Admin, Path(name): Path<String>) -> Answer<StatusCode> {
    towpath_channel::delete(&api.chassis, caller.tenant, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Takes nothing more in until it is resumed; what comes meanwhile is kept and waits.
#[utoipa::path(post, path = "/v1/channels/{name}/pause", responses((status = 204), (status = 404, body = Problem)))]
async fn pause(State(api): State<Api>, Admin(caller): Admin, Path(name): Path<String>) -> Answer<StatusCode> {
    towpath_channel::pause(&api.chassis, caller.tenant, &name, true).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Takes in what has waited, and what comes.
#[utoipa::path(post, path = "/v1/channels/{name}/resume", responses((status = 204), (status = 404, body = Problem)))]
async fn resume(State(api): State<Api>, Admin(caller): Admin, Path(name): Path<String>) -> Answer<StatusCode> {
    towpath_channel::pause(&api.chassis, caller.tenant, &name, false).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Handed {
    #[serde(default)]
    from: String,
    to: String,
}

/// Takes a mail as it came (`message/rfc822`), with the envelope in `?from=&to=` (recipients separated by commas) and the channel's `hook_password` by Basic authentication.
/// 200 once it is kept; the same mail again is 200 too, and changes nothing.
#[utoipa::path(post, path = "/hooks/{id}", responses((status = 200), (status = 401, body = Problem), (status = 404, body = Problem), (status = 413, body = Problem), (status = 503, body = Problem)))]
async fn hook(
    State(api): State<Api>,
    Path(channel): Path<ChannelId>,
    Query(handed): Query<Handed>,
    headers: HeaderMap,
    body: HttpBody,
) -> Answer<StatusCode> {
    // Looked up anew for each request: a channel works as soon as it is stored, on every process (field case A17).
    let found = tokio::time::timeout(api.chassis.config.limits.database_wait, towpath_channel::hook_password(&api.chassis, channel)).await;
    let found = found.map_err(|_| Error::refused(ErrorCode::Unavailable, "the database does not answer"))??;
    let password = found.ok_or_else(|| Error::refused(ErrorCode::NotFound, format!("there is no channel {channel}")))?;
    let unauthorized = || Error::refused(ErrorCode::Unauthorized, "use Basic authentication with the channel's hook_password");
    let password = password.ok_or_else(unauthorized)?;
    let given = basic_password(&headers).ok_or_else(unauthorized)?;
    // Of the digests, so that the time tells no length either.
    if !secret::same(&secret::sha256(given.as_bytes()), &secret::sha256(password.as_bytes())) {
        return Err(unauthorized().into());
    }
    let raw = read(body.into_data_stream(), INBOUND_BYTES).await?;
    let to = handed.to.split(',').map(|to| to.trim().to_owned()).filter(|to| !to.is_empty()).collect();
    api.inbox.receive(channel, Envelope { from: handed.from, to }, raw.to_vec()).await?;
    Ok(StatusCode::OK)
}

fn basic_password(headers: &HeaderMap) -> Option<String> {
    let encoded = headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Basic ")?;
    let text = String::from_utf8(base64::engine::general_purpose::STANDARD.decode(encoded.trim()).ok()?).ok()?;
    Some(text.split_once(':')?.1.to_owned())
}
