//! Answers: problem documents (RFC 9457), JSON bodies in, `Idempotency-Key`.

use axum::{
    Json,
    body::BodyDataStream,
    extract::{FromRequest, FromRequestParts, Request},
    http::{HeaderMap, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use serde::de::DeserializeOwned;
use towpath_chassis::{Error, idempotency::Key, secret};
use towpath_schemas::{ErrorCode, Problem, limit::BODY_BYTES};

/// Any refusal or failure, as the asker gets it.
#[derive(Debug)]
pub struct Refusal(pub Error);

pub type Answer<T> = std::result::Result<T, Refusal>;

impl<E: Into<Error>> From<E> for Refusal {
    fn from(error: E) -> Self {
        Refusal(error.into())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let problem = self.0.problem();
        if problem.status >= 500 {
            tracing::warn!(error = self.0.chain(), code = problem.code, "a request failed");
        }
        respond(&problem)
    }
}

pub fn respond(problem: &Problem) -> Response {
    metrics::counter!("towpath_refused_total", "code" => problem.code.clone()).increment(1);
    let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, [(header::CONTENT_TYPE, "application/problem+json")], Json(problem)).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/problem+json"));
    if problem.status == 503 {
        response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
    }
    if problem.status == 401 {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
    }
    response
}

pub async fn no_such_path(request: Request) -> Response {
    respond(&Problem::new(ErrorCode::NotFound, format!("there is no path {}", request.uri().path())))
}

pub async fn method_not_allowed(request: Request) -> Response {
    respond(&Problem::new(ErrorCode::MethodNotAllowed, format!("{} does not take {}", request.uri().path(), request.method())))
}

/// A JSON body, checked in this order: size, media type, UTF-8, shape.
pub struct Body<T> {
    pub value: T,
    /// SHA-256 of the bytes as they came.
    pub sha256: [u8; 32],
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Answer<Self> {
        let media_type =
            request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default().to_ascii_lowercase();
        let bytes = read(request.into_body().into_data_stream(), BODY_BYTES).await?;
        if !media_type.starts_with("application/json") {
            return Err(Error::refused(ErrorCode::UnsupportedMediaType, format!("the body came as `{media_type}`")).into());
        }
        let text = std::str::from_utf8(&bytes).map_err(|error| Error::refused(ErrorCode::InvalidUtf8, format!("body: {error}")))?;
        let value = serde_json::from_str(text).map_err(|error| {
            let code = if error.is_data() { ErrorCode::Unprocessable } else { ErrorCode::BadRequest };
            Error::refused(code, format!("body: {error}"))
        })?;
        Ok(Self { value, sha256: secret::sha256(&bytes) })
    }
}

/// A whole body of at most `most` bytes. What is over the limit is still read, up to [`DRAIN_BYTES`]: a client that is cut off while it sends sees a broken pipe instead of the answer.
pub async fn read(mut body: BodyDataStream, most: usize) -> Answer<Vec<u8>> {
    let mut bytes = Vec::new();
    while let Some(piece) = body.next().await {
        let piece = piece.map_err(|error| Error::refused(ErrorCode::BadRequest, format!("the body broke off: {error}")))?;
        if bytes.len() + piece.len() > most {
            drain(&mut body).await;
            return Err(Error::refused(ErrorCode::TooLarge, format!("a body here may hold at most {most} bytes")).into());
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

/// Most bytes of a refused body that are read and dropped.
const DRAIN_BYTES: usize = 64 << 20;

/// Reads on and drops what comes.
pub async fn drain(body: &mut BodyDataStream) {
    let mut dropped = 0;
    while let Some(Ok(piece)) = body.next().await {
        dropped += piece.len();
        if dropped > DRAIN_BYTES {
            return;
        }
    }
}

/// The `Idempotency-Key` of a request, if it has one; the thing and how to tell a replay stay with the handler.
pub struct IdempotencyKey(Option<String>);

impl IdempotencyKey {
    pub fn with_body(&self, sha256: [u8; 32]) -> Answer<Option<Key>> {
        Ok(self.0.as_deref().map(|key| Key::new(key, sha256.to_vec())).transpose()?)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for IdempotencyKey {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Answer<Self> {
        match parts.headers.get("idempotency-key").map(|value| value.to_str()) {
            None => Ok(Self(None)),
            Some(Ok(key)) => Ok(Self(Some(key.to_owned()))),
            Some(Err(_)) => Err(Error::refused(ErrorCode::BadRequest, "Idempotency-Key: use printable ASCII characters").into()),
        }
    }
}

/// Headers that tell a replay.
pub fn replay_header(replay: bool) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if replay {
        headers.insert("idempotent-replay", header::HeaderValue::from_static("true"));
    }
    headers
}

/// Query and path values, refused as problem documents.
pub struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Answer<Self> {
        match axum::extract::Query::<T>::from_request_parts(parts, state).await {
            Ok(axum::extract::Query(value)) => Ok(Self(value)),
            Err(rejection) => Err(Error::refused(ErrorCode::BadRequest, format!("query: {}", rejection.body_text())).into()),
        }
    }
}

pub struct Path<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Answer<Self> {
        match axum::extract::Path::<T>::from_request_parts(parts, state).await {
            Ok(axum::extract::Path(value)) => Ok(Self(value)),
            // An id that is none names nothing.
            Err(rejection) => Err(Error::refused(ErrorCode::NotFound, format!("path: {}", rejection.body_text())).into()),
        }
    }
}
