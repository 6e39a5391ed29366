//! `/v1/channels`, and the hooks that messages come to.

use axum::{
    Json,
    body::Body as HttpBody,
    extract::State,
    http::{HeaderMap, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use base64::Engine;
use serde::Deserialize;
use towpath_channel::{
    Envelope, Hook,
    slack::event::{self, Came},
};
use towpath_chassis::{Error, secret};
use towpath_schemas::{
    ErrorCode, Problem,
    body::{Channel, Page},
    channel::{ChannelDefinition, Kind},
    id::ChannelId,
    limit::{INBOUND_BYTES, SLACK_BYTES},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    Api,
    answer::{Answer, Body, Path, read},
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

/// What a provider posts to a channel, as its kind says. Of mail: a mail as it came (`message/rfc822`), with the envelope in `?from=&to=` (recipients separated by commas)
/// and the channel's `hook_password` by Basic authentication. Of Slack: events, slash commands and interactivity, signed with the channel's `signing_secret`.
/// 200 once it is kept; the same again is 200 too, and changes nothing. 503 when the database does not take it within two seconds.
#[utoipa::path(post, path = "/hooks/{id}", responses((status = 200), (status = 401, body = Problem), (status = 404, body = Problem), (status = 413, body = Problem), (status = 503, body = Problem)))]
async fn hook(State(api): State<Api>, Path(channel): Path<ChannelId>, uri: Uri, headers: HeaderMap, body: HttpBody) -> Answer<Response> {
    // Looked up anew for each request: a channel works as soon as it is stored, on every process (field case A17).
    let found = tokio::time::timeout(api.chassis.config.limits.database_wait, towpath_channel::hook(&api.chassis, channel)).await;
    let found = found.map_err(|_| Error::refused(ErrorCode::Unavailable, "the database does not answer"))??;
    let hook = found.ok_or_else(|| Error::refused(ErrorCode::NotFound, format!("there is no channel {channel}")))?;
    match hook.definition.kind() {
        Some(Kind::Mail(_)) => mail(&api, &hook, &uri, &headers, body).await,
        Some(Kind::Slack(_)) => slack(&api, &hook, &headers, body).await,
        None => Err(Error::refused(ErrorCode::Unavailable, "the channel is of a kind that this release does not know").into()),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Handed {
    #[serde(default)]
    from: String,
    to: String,
}

async fn mail(api: &Api, hook: &Hook, uri: &Uri, headers: &HeaderMap, body: HttpBody) -> Answer<Response> {
    let unauthorized = || Error::refused(ErrorCode::Unauthorized, "use Basic authentication with the channel's hook_password");
    let password = hook.secret("hook_password").ok_or_else(unauthorized)?;
    let given = basic_password(headers).ok_or_else(unauthorized)?;
    // Of the digests, so that the time tells no length either.
    if !secret::same(&secret::sha256(given.as_bytes()), &secret::sha256(password.as_bytes())) {
        return Err(unauthorized().into());
    }
    let axum::extract::Query(handed): axum::extract::Query<Handed> = axum::extract::Query::try_from_uri(uri)
        .map_err(|rejection| Error::refused(ErrorCode::BadRequest, format!("query: {}", rejection.body_text())))?;
    let raw = read(body.into_data_stream(), INBOUND_BYTES).await?;
    let to = handed.to.split(',').map(|to| to.trim().to_owned()).filter(|to| !to.is_empty()).collect();
    api.inbox.mail(hook.channel, Envelope { from: handed.from, to }, raw).await?;
    Ok(StatusCode::OK.into_response())
}

fn basic_password(headers: &HeaderMap) -> Option<String> {
    let encoded = headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Basic ")?;
    let text = String::from_utf8(base64::engine::general_purpose::STANDARD.decode(encoded.trim()).ok()?).ok()?;
    Some(text.split_once(':')?.1.to_owned())
}

async fn slack(api: &Api, hook: &Hook, headers: &HeaderMap, body: HttpBody) -> Answer<Response> {
    let raw = read(body.into_data_stream(), SLACK_BYTES).await?;
    let given = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let (timestamp, signature) = (given("x-slack-request-timestamp"), given("x-slack-signature"));
    event::verify(hook.secret("signing_secret").unwrap_or_default(), hook.now, timestamp, signature, &raw)
        .map_err(|why| Error::refused(ErrorCode::Unauthorized, why))?;
    match event::came(&raw) {
        Came::Challenge(challenge) => Ok(challenge.into_response()),
        Came::Keep { keys, command } => {
            api.inbox.keep(hook.channel, keys, Envelope::default(), raw).await?;
            let taken =
                || Json(serde_json::json!({ "response_type": "ephemeral", "text": "Taken. The answer comes here." })).into_response();
            Ok(if command { taken() } else { StatusCode::OK.into_response() })
        }
        Came::Nothing => Ok(StatusCode::OK.into_response()),
        Came::Limited => {
            tracing::warn!(channel = hook.definition.name, "Slack holds events back: there are more than 30,000 an hour in a workspace");
            Ok(StatusCode::OK.into_response())
        }
    }
}
