//! A run's transcript and its event stream.

use axum::{
    Json,
    body::Body as HttpBody,
    extract::{State, WebSocketUpgrade},
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse, Response, Sse, sse::Event, sse::KeepAlive},
};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures::{Stream, StreamExt};
use serde::Deserialize;
use tokio_stream::wrappers::ReceiverStream;
use towpath_chassis::{Error, Result};
use towpath_run::view;
use towpath_schemas::{
    ErrorCode, Problem,
    body::{Found, Page},
    frame::{Frame, FrameKind, GapRecord},
    id::RunId,
    limit::{FOUND_LINES, SEARCH_BYTES, SEARCHED_BYTES},
};
use towpath_tenant::Scope;
use towpath_transcript::{
    Record,
    reader::{self, Cursor, Piece},
    render::{Format, Renderer},
    search::Search,
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    Api,
    answer::{Answer, Path, Query},
    caller::Runs,
    events,
    streams::Placed,
    terminal::{self, FROM_VIEWER_BYTES, Viewing},
};

pub fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::new().routes(routes!(transcript)).routes(routes!(event_stream)).routes(routes!(watch_terminal)).routes(routes!(search))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    format: Option<String>,
    stream: Option<String>,
    after: Option<String>,
    until: Option<String>,
    since: Option<DateTime<Utc>>,
    before: Option<DateTime<Utc>>,
}

/// What was printed so far. `?format=text` (default, control codes carried out), `raw` (every byte), `cast` (asciicast v3), `ndjson` (a frame a line);
/// `?stream=stdout`, `stderr` or `terminal` for one of them; a range by sequence number (`?after=<epoch>.<seq>`, `?until=<epoch>.<seq>`, which is the last) or by time
/// (`?since=`, `?before=`, RFC 3339).
#[utoipa::path(get, path = "/v1/runs/{id}/transcript", responses((status = 200, content_type = "text/plain"), (status = 404, body = Problem)))]
async fn transcript(State(api): State<Api>, Runs(caller): Runs, Path(run): Path<RunId>, Query(query): Query<Wanted>) -> Answer<Response> {
    let refuse = |detail: String| Error::refused(ErrorCode::BadRequest, detail);
    let format = query.format.as_deref().unwrap_or("text");
    let format = Format::from_name(format).ok_or_else(|| refuse(format!("format: `{format}` is none of {}", Format::NAMES.join(", "))))?;
    let only = match query.stream.as_deref() {
        None => None,
        Some("stdout") => Some(FrameKind::Stdout),
        Some("stderr") => Some(FrameKind::Stderr),
        Some("terminal") => Some(FrameKind::Terminal),
        Some(other) => return Err(refuse(format!("stream: `{other}` is none of stdout, stderr, terminal")).into()),
    };
    let place = |name: &str, text: &str| Cursor::parse(text).ok_or_else(|| refuse(format!("{name}: use <epoch>.<seq>")));
    let after = query.after.as_deref().map(|text| place("after", text)).transpose()?;
    let range = Range {
        until: query.until.as_deref().map(|text| place("until", text)).transpose()?,
        since_us: query.since.map(|at| at.timestamp_micros()),
        before_us: query.before.map(|at| at.timestamp_micros()),
    };
    view::state(&api.chassis.db, caller.tenant, run).await?;
    let missing = missing(&towpath_transcript::records(&api.chassis.db, caller.tenant, run).await?);
    let from = match (after, query.since) {
        (Some(after), _) => after,
        (None, Some(since)) => reader::since(&api.chassis, caller.tenant, run, since).await?,
        (None, None) => Cursor::default(),
    };
    let pieces = ReceiverStream::new(reader::read(&api.chassis, caller.tenant, run, from));
    let mut renderer = Renderer::new(format, only);
    let body = pieces.map(move |piece| piece.and_then(|piece| render(&mut renderer, format, &range, piece)));
    let mut answer =
        ([(header::CONTENT_TYPE, format.media_type()), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")], HttpBody::from_stream(body))
            .into_response();
    if let Some(missing) = missing {
        answer.headers_mut().insert(MISSING, missing);
    }
    Ok(answer)
}

/// Says how many bytes of the record are missing, or `unknown`, where some are; `raw` has no other place for it.
const MISSING: &str = "towpath-transcript-missing";

fn missing(records: &[Record]) -> Option<HeaderValue> {
    let gaps = records.iter().flat_map(|record| record.gap.iter().chain(record.cut.as_ref().map(|cut| &cut.gap)));
    let bytes: Vec<Option<u64>> = gaps.map(|gap| gap.bytes).collect();
    match bytes.iter().copied().sum::<Option<u64>>() {
        Some(_) if bytes.is_empty() => None,
        Some(bytes) => Some(HeaderValue::from(bytes)),
        None => Some(HeaderValue::from_static("unknown")),
    }
}

/// What of the frames was asked for, beside where reading begins.
struct Range {
    until: Option<Cursor>,
    since_us: Option<i64>,
    before_us: Option<i64>,
}

impl Range {
    fn has(&self, frame: &Frame) -> bool {
        let place = Cursor { epoch: i32::try_from(frame.epoch).unwrap_or(i32::MAX), seq: frame.seq };
        let at = i64::try_from(frame.wall_us).unwrap_or(i64::MAX);
        self.until.is_none_or(|until| place <= until)
            && self.since_us.is_none_or(|since| at >= since)
            && self.before_us.is_none_or(|before| at < before)
    }
}

fn render(renderer: &mut Renderer, format: Format, range: &Range, piece: Piece) -> Result<Bytes> {
    let mut out = Vec::new();
    match piece {
        Piece::Frames(frames) => frames.iter().filter(|frame| range.has(frame)).for_each(|frame| renderer.frame(frame, &mut out)),
        Piece::Gap { epoch, gap, .. } => renderer.gap(epoch, &gap, &mut out),
        // Bytes have no place for a mark: the answer breaks off instead of being silently short.
        Piece::Damaged { reason, .. } if format == Format::Raw => return Err(Error::broken(reason)),
        Piece::Damaged { epoch, reason, .. } => renderer.gap(epoch, &GapRecord { reason, bytes: None }, &mut out),
        Piece::Tip { .. } => renderer.finish(&mut out),
    }
    Ok(out.into())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Searched {
    q: String,
    #[serde(default)]
    ignore_case: bool,
    after: Option<String>,
}

/// Lines of the transcript that hold `?q=`, oldest first; `?ignore_case=true`. `cursor` goes on, as `?after=`: after 100 lines, or 64 MiB that were looked at, found or not.
#[utoipa::path(get, path = "/v1/runs/{id}/search", responses((status = 200, body = Page<Found>), (status = 400, body = Problem), (status = 404, body = Problem)))]
async fn search(
    State(api): State<Api>,
    Runs(caller): Runs,
    Path(run): Path<RunId>,
    Query(query): Query<Searched>,
) -> Answer<Json<Page<Found>>> {
    let refuse = |detail: String| Error::refused(ErrorCode::BadRequest, detail);
    if query.q.is_empty() || query.q.len() > SEARCH_BYTES || query.q.contains('\n') {
        return Err(refuse(format!("q: one line of 1 to {SEARCH_BYTES} bytes")).into());
    }
    let after =
        query.after.as_deref().map(|text| Cursor::parse(text).ok_or_else(|| refuse("after: use the cursor of the last answer".to_owned())));
    let after = after.transpose()?.unwrap_or_default();
    view::state(&api.chassis.db, caller.tenant, run).await?;
    let mut pieces = reader::read(&api.chassis, caller.tenant, run, after);
    let mut search = Search::new(&query.q, query.ignore_case);
    let mut items = Vec::new();
    let mut searched = 0;
    while let Some(piece) = pieces.recv().await {
        let Piece::Frames(frames) = piece? else { continue };
        for frame in frames {
            let enough = items.len() >= FOUND_LINES || searched >= SEARCHED_BYTES;
            // A recorded screen shows all of a terminal that was not found yet: the next search begins with it.
            if enough && frame.kind == FrameKind::Screen && frame.seq > 1 {
                return Ok(Json(Page { items, cursor: Some(format!("{}.{}", frame.epoch, frame.seq - 1)) }));
            }
            items.extend(search.frame(&frame));
            searched += frame.payload.len();
            let enough = items.len() >= FOUND_LINES || searched >= SEARCHED_BYTES;
            // Not in the middle of a line, unless no line ever ends.
            if enough && (search.may_pause() || items.len() >= 10 * FOUND_LINES || searched >= 2 * SEARCHED_BYTES) {
                return Ok(Json(Page { items, cursor: Some(format!("{}.{}", frame.epoch, frame.seq)) }));
            }
        }
    }
    items.extend(search.finish());
    Ok(Json(Page { items, cursor: None }))
}

/// A run's terminal as a WebSocket (schemas/src/viewer.rs): what it prints, and for whoever started the run what is typed. `?after=<epoch>.<seq>` goes on after
/// that frame; otherwise it begins with the last recorded screen.
#[utoipa::path(get, path = "/v1/runs/{id}/terminal", responses((status = 101), (status = 404, body = Problem)))]
async fn watch_terminal(
    State(api): State<Api>,
    Runs(caller): Runs,
    Path(run): Path<RunId>,
    Query(query): Query<After>,
    upgrade: WebSocketUpgrade,
) -> Answer<Response> {
    let place = api.streams.open(caller.tenant)?;
    let feed = api.feeds.of(caller.tenant, run).await?;
    let after = match query.after {
        Some(text) => Cursor::parse(&text)
            .ok_or_else(|| Error::refused(ErrorCode::BadRequest, "after: use <epoch>.<seq> of the last frame that you have"))?,
        None => reader::last_screen(&api.chassis, caller.tenant, run).await?,
    };
    let started_it = view::origins(&api.chassis.db, &[run]).await?.get(&run).is_some_and(|origin| origin.principal == caller.principal);
    let may_type = started_it && caller.scopes.contains(&Scope::Terminal);
    let viewing = Viewing { tenant: caller.tenant, run, feed, after, may_type };
    Ok(upgrade.max_message_size(FROM_VIEWER_BYTES).max_frame_size(FROM_VIEWER_BYTES).on_upgrade(move |socket| async move {
        let _place = place;
        terminal::view(api.chassis, socket, viewing).await;
    }))
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
) -> Answer<Sse<impl Stream<Item = std::result::Result<Event, std::convert::Infallible>>>> {
    let last = headers.get("last-event-id").and_then(|value| value.to_str().ok()).map(str::to_owned).or(query.after);
    let from = last.as_deref().map(|text| events::Place::parse(run, text)).transpose()?.unwrap_or_default();
    let place = api.streams.open(caller.tenant)?;
    let feed = api.feeds.of(caller.tenant, run).await?;
    let stream = Placed { stream: Box::pin(events::follow(&api.chassis, feed, caller.tenant, run, from)), _place: place };
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(events::COMMENT).text("")))
}
