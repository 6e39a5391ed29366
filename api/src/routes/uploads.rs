//! `/v1/uploads`: files that come in parts and go on after a break, by the headers of the IETF's resumable uploads
//! (<https://datatracker.ietf.org/doc/draft-ietf-httpbis-resumable-upload/>): `Upload-Offset`, `Upload-Complete`, `Upload-Length`.

use axum::{
    Json,
    body::Body as HttpBody,
    extract::State,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use towpath_chassis::Error;
use towpath_file::{
    Spool, Spooled,
    upload::{self, Appended},
};
use towpath_schemas::{
    ErrorCode, Problem,
    body::FileRef,
    id::{TenantId, UploadId},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::files::{Named, named};
use crate::{
    Api,
    answer::{Answer, Path, Query, respond},
    caller::Runs,
};

const OFFSET: HeaderName = HeaderName::from_static("upload-offset");
const COMPLETE: HeaderName = HeaderName::from_static("upload-complete");
const LENGTH: HeaderName = HeaderName::from_static("upload-length");
const LIMIT: HeaderName = HeaderName::from_static("upload-limit");

pub fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::new().routes(routes!(begin)).routes(routes!(offset, append, cancel))
}

fn number(headers: &HeaderMap, name: &HeaderName) -> Answer<Option<u64>> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.parse().ok());
    Ok(Some(number.ok_or_else(|| Error::refused(ErrorCode::BadRequest, format!("{name}: use a number of bytes")))?))
}

/// A boolean of a structured header (RFC 9651).
fn boolean(value: bool) -> HeaderValue {
    HeaderValue::from_static(if value { "?1" } else { "?0" })
}

/// Begins an upload, `?name=` and `?media_type=` as for `POST /v1/files`; `Upload-Length` says how long it will be, if that is known. Its content is sent by PATCH to
/// `Location`.
#[utoipa::path(post, path = "/v1/uploads", responses((status = 201), (status = 413, body = Problem), (status = 429, body = Problem)))]
async fn begin(State(api): State<Api>, Runs(caller): Runs, Query(query): Query<Named>, headers: HeaderMap) -> Answer<Response> {
    let (name, media_type) = named(query, &headers)?;
    let length = number(&headers, &LENGTH)?;
    let id = upload::begin(&api.chassis, caller.tenant, caller.principal, &name, &media_type, length).await?;
    let answer = [
        (header::LOCATION, HeaderValue::try_from(format!("/v1/uploads/{id}")).map_err(|error| Error::broken(error.to_string()))?),
        (OFFSET, HeaderValue::from(0)),
        (COMPLETE, boolean(false)),
        (LIMIT, limit(&api)?),
    ];
    Ok((StatusCode::CREATED, answer).into_response())
}

fn limit(api: &Api) -> Answer<HeaderValue> {
    let text = format!("max-size={}", api.chassis.config.limits.file_bytes);
    Ok(HeaderValue::try_from(text).map_err(|error| Error::broken(error.to_string()))?)
}

/// How far an upload has come: `Upload-Offset`, and `Upload-Complete`.
#[utoipa::path(head, path = "/v1/uploads/{id}", responses((status = 204), (status = 404, body = Problem)))]
async fn offset(State(api): State<Api>, Runs(caller): Runs, Path(id): Path<UploadId>) -> Answer<Response> {
    let upload = upload::by_id(&api.chassis, caller.tenant, id).await?;
    let answer = [
        (OFFSET, HeaderValue::from(upload.received)),
        (COMPLETE, boolean(upload.completed)),
        (LIMIT, limit(&api)?),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    Ok((StatusCode::NO_CONTENT, answer).into_response())
}

/// Goes on with an upload: the bytes from `Upload-Offset` on. With `Upload-Complete: ?1` they are the last, and the answer is the file; asked again it is the same file. When
/// the body breaks off, what has come is kept.
#[utoipa::path(patch, path = "/v1/uploads/{id}", responses((status = 204), (status = 201, body = FileRef), (status = 404, body = Problem), (status = 409, body = Problem), (status = 413, body = Problem)))]
async fn append(
    State(api): State<Api>,
    Runs(caller): Runs,
    Path(id): Path<UploadId>,
    headers: HeaderMap,
    body: HttpBody,
) -> Answer<Response> {
    let refuse = |detail: &str| Error::refused(ErrorCode::BadRequest, detail);
    let first_byte = number(&headers, &OFFSET)?.ok_or_else(|| refuse("Upload-Offset: say where these bytes begin"))?;
    let last = match headers.get(&COMPLETE).map(HeaderValue::as_bytes) {
        Some(b"?1") => true,
        Some(b"?0") | None => false,
        Some(_) => return Err(refuse("Upload-Complete: use ?1 or ?0").into()),
    };
    let upload = upload::by_id(&api.chassis, caller.tenant, id).await?;
    if upload.completed && last {
        return finished(&api, caller.tenant, id).await;
    }
    if upload.received != first_byte {
        return Ok(elsewhere(id, upload.received));
    }
    let (part, broken) = spool(body, upload::room(&api.chassis, &upload)).await?;
    match upload::append(&api.chassis, caller.tenant, id, first_byte, part).await? {
        Appended::Elsewhere(received) => Ok(elsewhere(id, received)),
        Appended::Here(_) if broken => Err(refuse("the body broke off; ask for the offset and go on from there").into()),
        Appended::Here(_) if last => finished(&api, caller.tenant, id).await,
        Appended::Here(received) => {
            Ok((StatusCode::NO_CONTENT, [(OFFSET, HeaderValue::from(received)), (COMPLETE, boolean(false))]).into_response())
        }
    }
}

async fn finished(api: &Api, tenant: TenantId, id: UploadId) -> Answer<Response> {
    let file = upload::finish(&api.chassis, tenant, id).await?;
    let answer = [(OFFSET, HeaderValue::from(file.size)), (COMPLETE, boolean(true))];
    Ok((StatusCode::CREATED, answer, Json(file)).into_response())
}

fn elsewhere(id: UploadId, received: u64) -> Response {
    let mut answer = respond(&Problem::new(ErrorCode::UploadOffset, format!("{received} bytes of {id} are here")));
    answer.headers_mut().insert(OFFSET, HeaderValue::from(received));
    answer
}

/// What comes of a body, at most `most` bytes; and whether it broke off.
async fn spool(body: HttpBody, most: u64) -> Answer<(Spooled, bool)> {
    let mut body = body.into_data_stream();
    let mut spool = Spool::new(most)?;
    let mut broken = false;
    while let Some(piece) = body.next().await {
        match piece {
            Ok(piece) => spool.write(&piece).await?,
            Err(_) => {
                broken = true;
                break;
            }
        }
    }
    Ok((spool.finish().await?, broken))
}

/// Gives an upload up.
#[utoipa::path(delete, path = "/v1/uploads/{id}", responses((status = 204), (status = 404, body = Problem)))]
async fn cancel(State(api): State<Api>, Runs(caller): Runs, Path(id): Path<UploadId>) -> Answer<StatusCode> {
    if upload::cancel(&api.chassis, caller.tenant, id).await? {
        return Ok(StatusCode::NO_CONTENT);
    }
    Err(Error::refused(ErrorCode::NotFound, format!("there is no upload {id}")).into())
}
