//! A run's transcript and its event stream.

use axum::{
    body::Body as HttpBody,
    extract::State,
    http::{HeaderMap, header},
    response::{IntoResponse, Response, Sse, sse::Event, sse::KeepAlive},
};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use serde::Deserialize;
use tokio_stream::wrappers::ReceiverStream;
use towpath_chassis::Error;
use towpath_run::view;
use towpath_schemas::{ErrorCode, Problem, frame::FrameKind, id::RunId};
use towpath_transcript::{
    reader::{self, Cursor, Piece},
    text::{Format, Renderer},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    Api,
    answer::{Answer, Path, Query},
    caller::Runs,
    events,
};

pub fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::new().routes(routes!(transcript)).routes(routes!(event_stream))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    format: Option<String>,
    stream: Option<String>,
}

/// What was printed so far: `?format=text` (default) or `raw`; `?stream=stdout` or `stderr` for one of them.
#[utoipa::path(get, path = "/v1/runs/{id}/transcript", responses((status = 200, content_type = "text/plain"), (status = 404, body = Problem)))]
async fn transcript(State(api): State<Api>, Runs(caller): Runs, Path(run): Path<RunId>, Query(query): Query<Wanted>) -> Answer<Response> {
    let refuse = |detail: String| Error::refused(ErrorCode::BadRequest, detail);
    let format = match query.format.as_deref() {
        None | Some("text") => Format::Text,
        Some("raw") => Format::Raw,
        Some(other) => return Err(refuse(format!("format: `{other}` is none of text, raw")).into()),
    };
    let only = match query.stream.as_deref() {
        None => None,
        Some("stdout") => Some(FrameKind::Stdout),
        Some("stderr") => Some(FrameKind::Stderr),
        Some(other) => return Err(refuse(format!("stream: `{other}` is none of stdout, stderr")).into()),
    };
    view::state(&api.chassis.db, caller.tenant, run).await?;
    let pieces = ReceiverStream::new(reader::read(&api.chassis, caller.tenant, run, Cursor::default(), false));
    let media_type = match format {
        Format::Text => "text/plain; charset=utf-8",
        Format::Raw => "application/octet-stream",
    };
    let mut renderer = Renderer::new(format, only);
    let body = pieces.map(move |piece| piece.map(|piece| render(&mut renderer, piece)));
    Ok(([(header::CONTENT_TYPE, media_type), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")], HttpBody::from_stream(body)).into_response())
}

fn render(renderer: &mut Renderer, piece: Piece) -> Bytes {
    let mut out = Vec::new();
    match piece {
        Piece::Frames(frames) => frames.iter().for_each(|frame| renderer.frame(frame, &mut out)),
        Piece::Gap { gap, .. } => renderer.gap(&gap, &mut out),
        Piece::Tip { .. } => {}
    }
    out.into()
}

#[derive(Deserialize)]
struct After {
    after: Option<String>,
}

/// The run's events: `state`, `steer`, `output`, `gap`, `end`; each has an id that `Last-Event-ID` (or `?after=`) goes on from.
#[utoipa::path(get, path = "/v1/runs/{id}/events", responses((status = 200, content_type = "text/event-stream"), (status = 404, body = Problem)))]
async fn event_stream(
    State(api): State<Api>,
    Runs(caller): Runs,
    Path(run): Path<RunId>,
    Query(query): Query<After>,
    headers: HeaderMap,
) -> Answer<Sse<impl Stream<Item = Result<Event, std::convert::Infallible>>>> {
    let last = headers.get("last-event-id").and_then(|value| value.to_str().ok()).map(str::to_owned).or(query.after);
    let from = last.as_deref().map(|text| events::Place::parse(run, text)).transpose()?.unwrap_or_default();
    view::state(&api.chassis.db, caller.tenant, run).await?;
    let stream = events::follow(&api.chassis, caller.tenant, run, from).await?;
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(events::COMMENT).text("")))
}
