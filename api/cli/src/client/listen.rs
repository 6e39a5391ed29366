//! `towpath listen`: a receiver for webhook deliveries, for trying them out. It verifies signatures by Standard Webhooks
//! (github.com/standard-webhooks/standard-webhooks, spec/standard-webhooks.md).

use std::{net::Ipv4Addr, sync::Arc};

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode},
};
use clap::Args;
use serde_json::{Value, json};
use standardwebhooks::Webhook;
use tokio::{net::TcpListener, sync::mpsc};

use super::{failure::Failure, print::Printer};

const BODY_BYTES: usize = 1024 * 1024;
const WAITING: usize = 64;

#[derive(Args)]
#[command(after_help = "\
Example, in two terminals:
  towpath listen --port 7801 --secret whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3
  towpath run echo '{\"print\": \"hi\"}' --deliver-webhook http://127.0.0.1:7801/ --webhook-secret whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3
The server must allow loopback receivers (TOWPATH_WEBHOOK_ALLOW=127.0.0.0/8, as ./dev up sets it).")]
pub struct ListenArgs {
    /// The loopback port; 0 takes a free one.
    #[arg(long, default_value_t = 7801)]
    port: u16,
    /// What deliveries are signed with; a delivery whose signature is wrong is answered 401.
    #[arg(long, env = "TOWPATH_WEBHOOK_SECRET", hide_env_values = true)]
    secret: Option<String>,
    /// End after so many deliveries.
    #[arg(long)]
    count: Option<usize>,
}

struct Receiver {
    webhook: Option<Webhook>,
    arrived: mpsc::Sender<Arrived>,
}

struct Arrived {
    id: String,
    signature: &'static str,
    body: Value,
}

pub async fn listen(printer: &Printer, args: ListenArgs) -> Result<(), Failure> {
    let webhook = args.secret.as_deref().map(Webhook::new).transpose().map_err(|error| Failure::Use(format!("--secret: {error}")))?;
    let (arrived, mut deliveries) = mpsc::channel(WAITING);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).await;
    let listener = listener.map_err(|error| Failure::local(format!("port {}", args.port), &error))?;
    let address = listener.local_addr().map_err(|error| Failure::local("the port", &error))?;
    let router = Router::new().fallback(receive).layer(axum::extract::DefaultBodyLimit::max(BODY_BYTES));
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serve = axum::serve(listener, router.with_state(Arc::new(Receiver { webhook, arrived })));
    let serve = serve.with_graceful_shutdown(async { drop(stopped.await) });
    eprintln!("listening on http://{address}/");
    let print = async {
        let mut count = 0;
        while args.count.is_none_or(|wanted| count < wanted)
            && let Some(delivery) = deliveries.recv().await
        {
            show(printer, &delivery);
            count += 1;
        }
        drop(stop);
    };
    let (served, ()) = tokio::join!(async { serve.await }, print);
    served.map_err(|error| Failure::local("the receiver", &error))
}

async fn receive(State(receiver): State<Arc<Receiver>>, headers: HeaderMap, bytes: Bytes) -> (StatusCode, &'static str) {
    let signature = match receiver.webhook.as_ref().map(|webhook| webhook.verify(&bytes, &headers)) {
        None => "not checked",
        Some(Ok(())) => "verified",
        Some(Err(error)) => {
            eprintln!("refused a delivery: {error}");
            return (StatusCode::UNAUTHORIZED, "the signature is wrong");
        }
    };
    let id = headers.get("webhook-id").and_then(|id| id.to_str().ok()).unwrap_or("?").to_owned();
    let Ok(body) = serde_json::from_slice(&bytes) else { return (StatusCode::BAD_REQUEST, "the body is not JSON") };
    match receiver.arrived.send(Arrived { id, signature, body }).await {
        Ok(()) => (StatusCode::OK, "received"),
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "the receiver is ending"),
    }
}

fn show(printer: &Printer, delivery: &Arrived) {
    if printer.json {
        printer.line(&json!({"webhook_id": delivery.id, "signature": delivery.signature, "body": delivery.body}));
        return;
    }
    let run = &delivery.body["data"]["run"];
    let word = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let mut text = format!("{} {} (signature {})\n", printer.bold(&word(&delivery.body["type"])), delivery.id, delivery.signature);
    text.push_str(&format!("  {} of {}: {}\n", word(&run["id"]), word(&run["agent"]), word(&run["state"])));
    if let Some(result) = run["result"]["text"].as_str() {
        text.extend(printer.filter().pass(result.as_bytes()).lines().map(|line| format!("  | {line}\n")));
    }
    printer.out(&text);
}
