//! One attempt of a webhook, by Standard Webhooks (standardwebhooks.com, version 1): headers `webhook-id`, `webhook-timestamp`, `webhook-signature`.

use std::time::Duration;

use base64::Engine;
use reqwest::header;
use towpath_chassis::{Chassis, Error, Result, kill};
use towpath_schemas::{ErrorCode, body::WebhookTarget, id::InboundId};
use url::Url;

use crate::{http, state::Answer, table::Due};

const URL_BYTES: usize = 2048;

/// Refuses a target that could never be sent to. Names are resolved at each attempt, not here.
pub fn check_target(chassis: &Chassis, target: &WebhookTarget) -> Result<()> {
    let refuse = |detail: String| Err(Error::refused(ErrorCode::Unprocessable, detail));
    let Ok(url) = target.url.parse::<Url>() else {
        return refuse(format!("deliver: `{}` is no URL", target.url.chars().take(200).collect::<String>()));
    };
    if target.url.len() > URL_BYTES || !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
        return refuse(format!("deliver: use an http or https URL of at most {URL_BYTES} bytes"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return refuse("deliver: leave user and password out of the URL; the signature proves who sends".to_owned());
    }
    if let Err(why) = http::check_literal(chassis, &url) {
        return refuse(format!("deliver: {why}; the operator can allow its network by TOWPATH_WEBHOOK_ALLOW"));
    }
    match &target.secret {
        Some(secret) if !secret_is_valid(secret) => refuse("deliver: a secret is `whsec_` and the base64 of 24 to 64 bytes".to_owned()),
        Some(_) | None => Ok(()),
    }
}

fn secret_is_valid(secret: &str) -> bool {
    let Some(encoded) = secret.strip_prefix("whsec_") else { return false };
    base64::engine::general_purpose::STANDARD.decode(encoded).is_ok_and(|bytes| (24..=64).contains(&bytes.len()))
}

/// Sends one delivery once.
pub async fn attempt(chassis: &Chassis, due: &Due) -> Result<Answer> {
    let Ok(url) = due.target.parse::<Url>() else { return Ok(Answer::Refused("the target is no URL".to_owned())) };
    if let Err(why) = http::check_literal(chassis, &url) {
        return Ok(Answer::Refused(why));
    }
    let body = due.body.to_string();
    let timestamp = due.claimed_at.timestamp();
    let id = due.id.to_string();
    let mut request = http::client(chassis)?
        .post(url)
        .header(header::CONTENT_TYPE, "application/json")
        .header("webhook-id", &id)
        .header("webhook-timestamp", timestamp.to_string());
    if let Some(traceparent) = &due.traceparent {
        request = request.header("traceparent", traceparent);
    }
    if let Some(sealed) = &due.secret {
        let secret = match chassis.secrets.unseal(&place_of(due), sealed) {
            Ok(secret) => String::from_utf8_lossy(&secret).into_owned(),
            Err(error) => return Ok(Answer::Refused(error.to_string())),
        };
        let signer = standardwebhooks::Webhook::new(&secret).map_err(|error| Error::broken(format!("webhook secret: {error}")))?;
        let signature =
            signer.sign(&id, timestamp, body.as_bytes()).map_err(|error| Error::broken(format!("webhook signature: {error}")))?;
        request = request.header("webhook-signature", signature);
    }
    kill::point("send").await;
    let answer = match request.body(body).send().await {
        Ok(response) => Answer::Status { status: response.status().as_u16(), retry_after: retry_after(response.headers(), due.claimed_at) },
        Err(error) => http::failure(&error),
    };
    kill::point("sent").await;
    Ok(answer)
}

fn place_of(due: &Due) -> String {
    match (due.run, due.inbound) {
        (Some(run), None) => secret_place(run, due.n),
        (_, Some(message)) => notice_place(message),
        (None, None) => String::new(),
    }
}

/// Where the secret of a notice about a message is sealed for.
pub fn notice_place(message: InboundId) -> String {
    format!("notice {message}")
}

/// Where a target's secret is sealed for.
pub fn secret_place(run: towpath_schemas::id::RunId, n: i32) -> String {
    format!("run_target {run} {n}")
}

fn retry_after(headers: &header::HeaderMap, now: chrono::DateTime<chrono::Utc>) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let at = chrono::DateTime::parse_from_rfc2822(text).ok()?;
    (at.to_utc() - now).to_std().ok()
}
