//! `/v1/files` and a run's outputs. Content streams both ways.

use axum::{
    Json,
    body::Body as HttpBody,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::stream;
use serde::Deserialize;
use towpath_chassis::{Chassis, Error};
use towpath_file::Spool;
use towpath_run::view;
use towpath_schemas::{
    ErrorCode, Problem,
    body::{FileRef, Output, Page},
    id::{FileId, RunId},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    Api,
    answer::{Answer, Path, Query, drain},
    caller::Runs,
};

/// Bytes read from the object store at a time.
const PIECE: u64 = 1 << 20;

pub fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::new().routes(routes!(upload)).routes(routes!(download)).routes(routes!(outputs)).routes(routes!(output))
}

#[derive(Deserialize)]
pub(super) struct Named {
    name: Option<String>,
    media_type: Option<String>,
}

/// Name and media type of a file that comes.
pub(super) fn named(query: Named, headers: &HeaderMap) -> Answer<(String, String)> {
    let name = query.name.unwrap_or_else(|| "file".to_owned());
    let from_header = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let media_type = query.media_type.or(from_header).unwrap_or_else(|| "application/octet-stream".to_owned());
    if media_type.len() > 255 || !media_type.is_ascii() || media_type.contains('\0') {
        return Err(Error::refused(ErrorCode::Unprocessable, "media_type: at most 255 ASCII characters").into());
    }
    Ok((name, media_type))
}

/// Keeps a file: the raw bytes as body, `?name=` and `?media_type=` beside.
#[utoipa::path(post, path = "/v1/files", responses((status = 201, body = FileRef), (status = 413, body = Problem)))]
async fn upload(
    State(api): State<Api>,
    Runs(caller): Runs,
    Query(query): Query<Named>,
    headers: HeaderMap,
    body: HttpBody,
) -> Answer<(StatusCode, Json<FileRef>)> {
    let (name, media_type) = named(query, &headers)?;
    let mut body = body.into_data_stream();
    let spooled = match Spool::take(api.chassis.config.limits.file_bytes, &mut body).await {
        Ok(spooled) => spooled,
        Err(error) => {
            drain(&mut body).await;
            return Err(error.into());
        }
    };
    let file = towpath_file::store(&api.chassis, caller.tenant, caller.principal, &name, &media_type, spooled).await?;
    Ok((StatusCode::CREATED, Json(file)))
}

/// A file's content.
#[utoipa::path(get, path = "/v1/files/{id}", responses((status = 200, content_type = "application/octet-stream"), (status = 404, body = Problem)))]
async fn download(State(api): State<Api>, Runs(caller): Runs, Path(id): Path<FileId>) -> Answer<Response> {
    let found = towpath_file::object_of(&api.chassis.db, caller.tenant, id).await?;
    let (object_key, file) = found.ok_or_else(|| Error::refused(ErrorCode::UnknownFile, format!("there is no file {id}")))?;
    Ok(content(&api.chassis, object_key, file.size, &file.name))
}

/// The run's outputs, by name.
#[utoipa::path(get, path = "/v1/runs/{id}/outputs", responses((status = 200, body = Page<Output>), (status = 404, body = Problem)))]
async fn outputs(State(api): State<Api>, Runs(caller): Runs, Path(run): Path<RunId>) -> Answer<Json<Page<Output>>> {
    view::state(&api.chassis.db, caller.tenant, run).await?;
    let outputs = towpath_file::outputs(&api.chassis.db, caller.tenant, run).await?;
    let items = outputs
        .into_iter()
        .map(|one| Output { name: one.name, size: one.size, sha256: one.sha256, status: one.status, reason: one.reason })
        .collect();
    Ok(Json(Page { items, cursor: None }))
}

/// An output's content.
#[utoipa::path(get, path = "/v1/runs/{id}/outputs/{*name}", responses((status = 200, content_type = "application/octet-stream"), (status = 404, body = Problem)))]
async fn output(State(api): State<Api>, Runs(caller): Runs, Path((run, name)): Path<(RunId, String)>) -> Answer<Response> {
    let outputs = towpath_file::outputs(&api.chassis.db, caller.tenant, run).await?;
    let missing = || Error::refused(ErrorCode::NotFound, format!("{run} has no output `{name}`"));
    let output = outputs.into_iter().find(|output| output.name == name).ok_or_else(missing)?;
    let object_key = output
        .object_key
        .ok_or_else(|| Error::refused(ErrorCode::NotFound, format!("`{name}` was not kept: {}", output.reason.unwrap_or_default())))?;
    Ok(content(&api.chassis, object_key, output.size, &output.name))
}

/// Streams an object in pieces. Whoever reads slowly holds one piece.
fn content(chassis: &Chassis, object_key: String, size: u64, name: &str) -> Response {
    let chassis = chassis.clone();
    let pieces = stream::unfold(0_u64, move |at| {
        let (chassis, object_key) = (chassis.clone(), object_key.clone());
        async move {
            if at >= size {
                return None;
            }
            let piece = chassis.store.get_range(&object_key, at, PIECE.min(size - at)).await;
            let next = at + piece.as_ref().map_or(size, |bytes: &Bytes| bytes.len().max(1) as u64);
            Some((piece, next))
        }
    });
    let last = name.rsplit('/').next().unwrap_or(name);
    let ascii: String = last.chars().map(|c| if c.is_ascii_graphic() && c != '"' && c != '\\' { c } else { '_' }).collect();
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, size.to_string()),
        (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{ascii}\"")),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
    ];
    (headers, HttpBody::from_stream(pieces)).into_response()
}
