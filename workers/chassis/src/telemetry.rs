//! Logs, traces and metrics. Logs are JSON lines (or text on a terminal); traces go out by OTLP when `TOWPATH_OTLP_ENDPOINT` is set; metrics are read at `/metrics`.
//! One trace runs from request to delivery: its `traceparent` (W3C Trace Context) stands in the run's row and in every command.

use std::collections::HashMap;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use opentelemetry::{propagation::TextMapPropagator, trace::TracerProvider};
use opentelemetry_sdk::{propagation::TraceContextPropagator, trace::SdkTracerProvider};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

use crate::{Error, Result};

/// Counts that something met one of its limits, by the limit's name: what an operator sees of back-pressure.
pub fn limit_reached(limit: &'static str) {
    metrics::counter!("towpath_limit_reached_total", "limit" => limit).increment(1);
}

/// Holds what must be flushed at the end.
pub struct Telemetry {
    provider: SdkTracerProvider,
    metrics: PrometheusHandle,
}

impl Telemetry {
    /// Installs logs, traces and metrics for this process.
    pub fn install(json: bool) -> Result<Self> {
        let provider = tracer_provider()?;
        let filter =
            EnvFilter::try_from_env("TOWPATH_LOG").unwrap_or_else(|_| EnvFilter::new("info,sqlx=warn,async_nats=warn,aws=warn,hyper=warn"));
        let stderr = std::io::stderr;
        let lines = if json {
            tracing_subscriber::fmt::layer().json().with_writer(stderr).with_filter(filter).boxed()
        } else {
            tracing_subscriber::fmt::layer().compact().with_writer(stderr).with_filter(filter).boxed()
        };
        let traces = tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("towpath"))
            .with_filter(tracing_subscriber::filter::LevelFilter::INFO);
        tracing_subscriber::registry().with(lines).with(traces).try_init().map_err(|error| Error::Config(error.to_string()))?;
        let metrics = PrometheusBuilder::new().install_recorder().map_err(|error| Error::Config(error.to_string()))?;
        Ok(Self { provider, metrics })
    }

    pub fn metrics(&self) -> PrometheusHandle {
        self.metrics.clone()
    }

    pub fn flush(&self) {
        if let Err(error) = self.provider.shutdown() {
            tracing::debug!(%error, "traces were not flushed");
        }
    }
}

fn tracer_provider() -> Result<SdkTracerProvider> {
    let builder = SdkTracerProvider::builder();
    let Ok(endpoint) = std::env::var("TOWPATH_OTLP_ENDPOINT") else { return Ok(builder.build()) };
    use opentelemetry_otlp::{SpanExporter, WithExportConfig};
    let exporter = SpanExporter::builder()
        .with_http()
        .with_endpoint(endpoint)
        .build()
        .map_err(|error| Error::Config(format!("TOWPATH_OTLP_ENDPOINT: {error}")))?;
    Ok(builder.with_batch_exporter(exporter).build())
}

/// The current span's `traceparent`, if it is part of a trace.
pub fn traceparent() -> Option<String> {
    let mut carrier = HashMap::new();
    TraceContextPropagator::new().inject_context(&tracing::Span::current().context(), &mut carrier);
    carrier.remove("traceparent")
}

/// A span that goes on with the trace of `traceparent`.
pub fn span_from(what: &'static str, traceparent: Option<&str>) -> tracing::Span {
    let span = tracing::info_span!("towpath", what);
    if let Some(traceparent) = traceparent {
        let carrier = HashMap::from([("traceparent".to_owned(), traceparent.to_owned())]);
        let _ = span.set_parent(TraceContextPropagator::new().extract(&carrier));
    }
    span
}
