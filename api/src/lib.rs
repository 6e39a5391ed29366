#![doc = include_str!("../README.md")]

mod answer;
mod caller;
mod events;
mod feed;
pub mod gateway;
pub mod mail;
mod routes;
mod streams;
mod terminal;

use std::sync::Arc;

use axum::{
    Router,
    http::{Request, header},
    routing::{any, get},
};
use metrics_exporter_prometheus::PrometheusHandle;
use tower_http::{catch_panic::CatchPanicLayer, trace::TraceLayer};
use towpath_agent::start::Starts;
use towpath_channel::Inbox;
use towpath_chassis::{Chassis, telemetry};
use towpath_tenant::Callers;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;

/// What every handler is given.
#[derive(Clone)]
pub struct Api {
    pub chassis: Chassis,
    pub callers: Callers,
    pub feeds: feed::Feeds,
    pub starts: Starts,
    pub inbox: Inbox,
    pub gateway: gateway::Gateway,
    pub streams: streams::Streams,
    pub metrics: Option<PrometheusHandle>,
}

impl Api {
    pub fn new(chassis: Chassis, metrics: Option<PrometheusHandle>) -> Self {
        let callers = Callers::start(&chassis);
        let starts = Starts::new(&chassis);
        let inbox = Inbox::start(&chassis);
        let gateway = gateway::Gateway::start(&chassis);
        let feeds = feed::Feeds::new(&chassis);
        Self { chassis, callers, feeds, starts, inbox, gateway, streams: streams::Streams::default(), metrics }
    }
}

#[derive(OpenApi)]
#[openapi(info(title = "Towpath", description = "Durable runs of long-running agents", license(name = "Apache-2.0")))]
struct Description;

fn described() -> OpenApiRouter<Api> {
    OpenApiRouter::with_openapi(Description::openapi())
        .merge(routes::agents::routes())
        .merge(routes::runs::routes())
        .merge(routes::steers::routes())
        .merge(routes::record::routes())
        .merge(routes::files::routes())
        .merge(routes::uploads::routes())
        .merge(routes::sessions::routes())
        .merge(routes::deliveries::routes())
        .merge(routes::channels::routes())
        .merge(routes::inbound::routes())
        .merge(routes::tenants::routes())
        .merge(routes::dead::routes())
        .merge(routes::stuck::routes())
}

/// The OpenAPI description, made from the handlers.
pub fn openapi() -> utoipa::openapi::OpenApi {
    described().into_openapi()
}

/// The whole API with its gateway.
pub fn router(api: Api) -> Router {
    let (v1, description) = described().split_for_parts();
    let description = Arc::new(description);
    v1.route("/healthz", get(routes::health::alive))
        .route("/readyz", get(routes::health::ready))
        .route("/metrics", get(routes::health::metrics))
        .route("/openapi.json", get(move || async move { axum::Json((*description).clone()) }))
        .route("/sandbox", any(gateway::connect))
        .fallback(answer::no_such_path)
        .method_not_allowed_fallback(answer::method_not_allowed)
        .layer(CatchPanicLayer::new())
        .layer(TraceLayer::new_for_http().make_span_with(|request: &Request<_>| {
            let given = request.headers().get("traceparent").and_then(|value| value.to_str().ok());
            let span = telemetry::span_from("request", given);
            tracing::debug!(parent: &span, method = %request.method(), path = request.uri().path(), agent = ?request.headers().get(header::USER_AGENT), "request");
            span
        }))
        .with_state(api)
}
