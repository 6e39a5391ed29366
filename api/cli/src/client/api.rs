//! Requests to the API: token, retries, and problem documents turned into failures.

use std::{path::PathBuf, time::Duration};

use futures::TryStreamExt;
use reqwest::{Body, Client, Method, RequestBuilder, Response, StatusCode, Upgraded, header};
use serde::Serialize;
use serde_json::Value;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{handshake, protocol::Role},
};
use towpath_schemas::{Problem, limit::WAIT_S};
use url::Url;
use uuid::Uuid;

use super::failure::Failure;

const CONNECT: Duration = Duration::from_secs(5);
/// Longest silence of a server while an answer comes; event streams carry a comment every 15 s.
const SILENCE: Duration = Duration::from_secs(WAIT_S + 30);
/// Waits before each further try of a request that may be repeated safely.
const AGAIN: [Duration; 3] = [Duration::from_millis(250), Duration::from_millis(500), Duration::from_secs(1)];
const TOKEN_FILE: &str = ".towpath/token";

/// A server and who we are to it.
pub struct Api {
    client: Client,
    url: Url,
    token: Option<String>,
}

/// What is sent with a request that is not a plain GET.
pub enum Payload {
    Nothing,
    Json(Value),
}

impl Api {
    pub fn new(url: &str, token: Option<String>) -> Result<Self, Failure> {
        let url = Url::parse(url).ok().filter(|url| matches!(url.scheme(), "http" | "https") && !url.cannot_be_a_base());
        let url = url.ok_or_else(|| Failure::Use("the server's URL must look like http://127.0.0.1:7800".to_owned()))?;
        let client = Client::builder().connect_timeout(CONNECT).read_timeout(SILENCE).redirect(reqwest::redirect::Policy::none()).build();
        let client = client.map_err(|error| Failure::Use(format!("cannot make an HTTP client: {error}")))?;
        Ok(Self { client, url, token: token.or_else(token_from_file) })
    }

    /// Where it asks.
    pub fn address(&self) -> String {
        self.url.to_string()
    }

    pub async fn get(&self, path: &[&str], query: &[(&str, String)]) -> Result<Value, Failure> {
        self.json(Method::GET, path, query, Payload::Nothing).await
    }

    /// A POST that creates or changes something. It carries an Idempotency-Key, and so may be repeated when nobody knows what became of it.
    pub async fn post(&self, path: &[&str], body: impl Serialize, key: Option<String>) -> Result<Value, Failure> {
        let body = serde_json::to_value(body).map_err(|error| Failure::Use(error.to_string()))?;
        let key = key.unwrap_or_else(|| Uuid::new_v4().simple().to_string());
        let request = || self.request(Method::POST, path, &[]).header("Idempotency-Key", &key).json(&body);
        read_json(self.send(request).await?).await
    }

    /// Any other request with a JSON answer; `null` when the answer is empty.
    pub async fn json(&self, method: Method, path: &[&str], query: &[(&str, String)], payload: Payload) -> Result<Value, Failure> {
        let request = || match &payload {
            Payload::Nothing => self.request(method.clone(), path, query),
            Payload::Json(value) => self.request(method.clone(), path, query).json(value),
        };
        read_json(self.send(request).await?).await
    }

    /// A GET whose answer is read piece by piece.
    pub async fn stream(&self, path: &[&str], query: &[(&str, String)], last_event: Option<&str>) -> Result<Response, Failure> {
        let mut request = self.request(Method::GET, path, query);
        if let Some(id) = last_event {
            request = request.header("Last-Event-ID", id);
        }
        accepted(self.once(request).await?).await
    }

    /// The WebSocket of a run's terminal, after this frame or from the last recorded screen on.
    pub async fn terminal(&self, run: &str, after: Option<&str>) -> Result<WebSocketStream<Upgraded>, Failure> {
        let query: Vec<(&str, String)> = after.iter().map(|after| ("after", (*after).to_owned())).collect();
        let key = handshake::client::generate_key();
        let request = self
            .request(Method::GET, &["v1", "runs", run, "terminal"], &query)
            .header(header::CONNECTION, "upgrade")
            .header(header::UPGRADE, "websocket")
            .header(header::SEC_WEBSOCKET_VERSION, "13")
            .header(header::SEC_WEBSOCKET_KEY, &key);
        let response = self.once(request).await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            let status = accepted(response).await?.status();
            return Err(Failure::Unreachable(format!("the answer is {status} and no WebSocket")));
        }
        let proof = response.headers().get(header::SEC_WEBSOCKET_ACCEPT).map(header::HeaderValue::as_bytes);
        if proof != Some(handshake::derive_accept_key(key.as_bytes()).as_bytes()) {
            return Err(Failure::Unreachable("the answer is no WebSocket's (RFC 6455, 4.2.2)".to_owned()));
        }
        let stream = response.upgrade().await.map_err(|error| self.unreachable(&error))?;
        Ok(WebSocketStream::from_raw_socket(stream, Role::Client, None).await)
    }

    /// A POST of raw bytes, sent once: a stream cannot be sent again.
    pub async fn upload(&self, path: &[&str], query: &[(&str, String)], body: Body, length: u64) -> Result<Value, Failure> {
        let request = self.request(Method::POST, path, query).header(header::CONTENT_TYPE, "application/octet-stream");
        read_json(accepted(self.once(request.header(header::CONTENT_LENGTH, length).body(body)).await?).await?).await
    }

    /// Begins an upload in parts; the last component of where it is.
    pub async fn upload_begin(&self, query: &[(&str, String)], length: u64) -> Result<String, Failure> {
        let request = || self.request(Method::POST, &["v1", "uploads"], query).header(UPLOAD_LENGTH, length);
        let response = self.send(request).await?;
        let place =
            response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok()).and_then(|place| place.rsplit('/').next());
        place.map(str::to_owned).ok_or_else(|| Failure::Unreachable("the answer does not say where the upload is".to_owned()))
    }

    /// Bytes of an upload that are there.
    pub async fn upload_offset(&self, upload: &str) -> Result<u64, Failure> {
        // The answer to a HEAD has no body, so its status has to tell.
        let response = self.once(self.request(Method::HEAD, &["v1", "uploads", upload], &[])).await?;
        match response.status() {
            StatusCode::NOT_FOUND => Err(Failure::Use(format!("there is no upload {upload}, or it was left alone for a day; begin again"))),
            status if status.is_success() => offset_of(&response),
            _ => Err(accepted(response).await.err().unwrap_or_else(|| Failure::Unreachable("no offset".to_owned()))),
        }
    }

    /// Sends one part of an upload, once; with `last` the answer is the file.
    pub async fn upload_part(&self, upload: &str, offset: u64, bytes: Vec<u8>, last: bool) -> Result<Value, Failure> {
        let request = self
            .request(Method::PATCH, &["v1", "uploads", upload], &[])
            .header(header::CONTENT_TYPE, "application/partial-upload")
            .header(UPLOAD_OFFSET, offset)
            .header("Upload-Complete", if last { "?1" } else { "?0" });
        read_json(accepted(self.once(request.body(bytes)).await?).await?).await
    }

    /// The status and text of a GET, whatever the status.
    pub async fn probe(&self, path: &[&str]) -> Result<(StatusCode, String), Failure> {
        let response = self.once(self.request(Method::GET, path, &[])).await?;
        let status = response.status();
        Ok((status, response.text().await.map_err(|error| self.unreachable(&error))?))
    }

    fn request(&self, method: Method, path: &[&str], query: &[(&str, String)]) -> RequestBuilder {
        let mut url = self.url.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let request = self.client.request(method, url);
        match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    /// Sends a request that may safely arrive twice, again after a lost answer or a refusal that calls itself retryable and temporary.
    async fn send(&self, request: impl Fn() -> RequestBuilder) -> Result<Response, Failure> {
        let mut waits = AGAIN.into_iter();
        loop {
            let outcome = request().send().await;
            let again = match &outcome {
                Ok(response) => response.status() == StatusCode::SERVICE_UNAVAILABLE,
                Err(error) => !error.is_connect() && !error.is_builder(),
            };
            match waits.next().filter(|_| again) {
                Some(wait) => tokio::time::sleep(wait).await,
                None => return accepted(outcome.map_err(|error| self.unreachable(&error))?).await,
            }
        }
    }

    async fn once(&self, request: RequestBuilder) -> Result<Response, Failure> {
        request.send().await.map_err(|error| self.unreachable(&error))
    }

    fn unreachable(&self, error: &reqwest::Error) -> Failure {
        let mut cause: &dyn std::error::Error = error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        Failure::Unreachable(format!("{} does not answer: {cause}", self.url))
    }
}

/// Turns a refusal into its problem document.
async fn accepted(response: Response) -> Result<Response, Failure> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let text = response.text().await.unwrap_or_default();
    match serde_json::from_str::<Problem>(&text) {
        Ok(problem) => Err(Failure::Refused(Box::new(problem))),
        Err(_) => {
            let beginning: String = text.chars().take(200).collect();
            Err(Failure::Unreachable(format!("the answer is {status} and not Towpath's: {beginning}")))
        }
    }
}

const UPLOAD_OFFSET: &str = "Upload-Offset";
const UPLOAD_LENGTH: &str = "Upload-Length";

fn offset_of(response: &Response) -> Result<u64, Failure> {
    let offset = response.headers().get(UPLOAD_OFFSET).and_then(|value| value.to_str().ok()).and_then(|text| text.parse().ok());
    offset.ok_or_else(|| Failure::Unreachable("the answer does not say how much of the upload is there".to_owned()))
}

async fn read_json(response: Response) -> Result<Value, Failure> {
    let bytes = response.bytes_stream().try_fold(Vec::new(), async |mut all, piece| {
        all.extend_from_slice(&piece);
        Ok(all)
    });
    let bytes = bytes.await.map_err(|error| Failure::Unreachable(format!("the answer breaks off: {error}")))?;
    if bytes.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(&bytes).map_err(|error| Failure::Unreachable(format!("the answer is not JSON: {error}")))
}

/// The token that `towpath dev` wrote, in this folder or the nearest one above.
fn token_from_file() -> Option<String> {
    let here = std::env::current_dir().ok()?;
    let files = here.ancestors().map(|folder| folder.join(TOKEN_FILE)).collect::<Vec<PathBuf>>();
    files.iter().find_map(|file| std::fs::read_to_string(file).ok()).map(|text| text.trim().to_owned())
}
