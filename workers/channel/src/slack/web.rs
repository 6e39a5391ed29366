//! Calls of Slack's Web API, and what each answer means.

use std::time::Duration;

use futures::StreamExt;
use reqwest::{Client, Response, header};
use serde_json::Value;
use towpath_chassis::{Chassis, Error, Result};
use towpath_delivery::{http, state::Answer};
use url::{Url, form_urlencoded};

/// Bytes of an answer that are read.
const ANSWER_BYTES: usize = 8 << 20;

/// Errors after which no call of this app works, until somebody does something.
const BROKEN: [&str; 12] = [
    "account_inactive",
    "ekm_access_denied",
    "enterprise_is_restricted",
    "invalid_auth",
    "missing_scope",
    "not_allowed_token_type",
    "not_authed",
    "org_login_required",
    "team_access_not_granted",
    "token_expired",
    "token_revoked",
    "two_factor_setup_required",
];
/// Errors after which nothing can be posted at this place.
const GONE: [&str; 18] = [
    "cannot_reply_to_message",
    "cant_post_to_channel",
    "channel_is_limited_access",
    "channel_not_found",
    "channel_type_not_supported",
    "duplicate_channel_not_found",
    "is_archived",
    "is_inactive",
    "messages_tab_disabled",
    "no_permission",
    "not_in_channel",
    "restricted_action",
    "restricted_action_non_threadable_channel",
    "restricted_action_read_only_channel",
    "restricted_action_thread_locked",
    "restricted_action_thread_only_channel",
    "thread_not_found",
    "user_not_found",
];

/// Why a call did not do what it was to do.
#[derive(Debug)]
pub enum Trouble {
    /// Nobody can tell whether it was done.
    Unknown(String),
    /// It surely was not, and may be later.
    NotTaken {
        why: String,
        retry_after: Option<Duration>,
    },
    /// It was not, and another time it will not be either.
    Gone(String),
    TooLong(String),
    /// Nothing can be done by this app now; `lasting`: until somebody does something.
    Broken {
        why: String,
        lasting: bool,
    },
    /// Somebody else goes on with it.
    Lost,
    Ours(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Trouble::Ours(error)
    }
}

impl Trouble {
    /// It may have been done.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Trouble::Unknown(_))
    }

    pub fn why(&self) -> String {
        match self {
            Trouble::Unknown(why)
            | Trouble::NotTaken { why, .. }
            | Trouble::Gone(why)
            | Trouble::TooLong(why)
            | Trouble::Broken { why, .. } => why.clone(),
            Trouble::Lost => "somebody else goes on with it".to_owned(),
            Trouble::Ours(error) => error.to_string(),
        }
    }
}

pub struct Web<'a> {
    chassis: &'a Chassis,
    client: &'static Client,
    api: Url,
    token: &'a str,
}

impl<'a> Web<'a> {
    pub fn new(chassis: &'a Chassis, api: &str, token: &'a str) -> Result<Self> {
        let api = format!("{}/", api.trim_end_matches('/')).parse().map_err(|error| Error::broken(format!("slack.api: {error}")))?;
        Ok(Self { chassis, client: http::client(chassis)?, api, token })
    }

    /// A call that writes.
    pub async fn call(&self, method: &str, arguments: &Value) -> std::result::Result<Value, Trouble> {
        self.send(method, "application/json; charset=utf-8", arguments.to_string()).await
    }

    /// A call that reads; those take no JSON.
    pub async fn ask(&self, method: &str, arguments: &[(&str, &str)]) -> std::result::Result<Value, Trouble> {
        let form = form_urlencoded::Serializer::new(String::new()).extend_pairs(arguments).finish();
        self.send(method, "application/x-www-form-urlencoded", form).await
    }

    async fn send(&self, method: &str, media_type: &str, body: String) -> std::result::Result<Value, Trouble> {
        let url = self.api.join(method).map_err(|error| Error::broken(format!("slack.api: {error}")))?;
        http::check_literal(self.chassis, &url).map_err(|why| Trouble::Broken { why, lasting: true })?;
        let request = self.client.post(url).bearer_auth(self.token).header(header::CONTENT_TYPE, media_type).body(body);
        let response = request.send().await.map_err(|error| failure(&error))?;
        answer(method, response).await
    }

    /// Hands in the bytes of a file at an address that Slack gave.
    pub async fn upload(&self, url: &str, content: Vec<u8>) -> std::result::Result<(), Trouble> {
        let url = self.own(url).ok_or_else(|| Trouble::Gone("Slack named an address of another host for the file".to_owned()))?;
        let response = self.client.post(url).body(content).send().await.map_err(|error| failure(&error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        Err(Trouble::NotTaken { why: format!("upload: HTTP {}", status.as_u16()), retry_after: None })
    }

    /// The bytes of a file, at most `most`.
    pub async fn download(&self, url: &str, most: usize) -> std::result::Result<Vec<u8>, Trouble> {
        // The token goes along, so it goes nowhere else.
        let url = self.own(url).ok_or_else(|| Trouble::Gone("it is not kept by Slack".to_owned()))?;
        let response = self.client.get(url).bearer_auth(self.token).send().await.map_err(|error| failure(&error))?;
        let status = response.status();
        let is_page = response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/html"));
        match status.as_u16() {
            // Slack shows its page to sign in to an app that may not see a file.
            200 if is_page && response.headers().get(header::CONTENT_DISPOSITION).is_none() => Err(no_scope()),
            200 => read(response, most).await,
            300..=399 | 401 | 403 => Err(no_scope()),
            404 | 410 => Err(Trouble::Gone("Slack keeps it no longer".to_owned())),
            status => Err(Trouble::NotTaken { why: format!("HTTP {status}"), retry_after: None }),
        }
    }

    /// The address, if it is of the API's host or below it.
    fn own(&self, url: &str) -> Option<Url> {
        let (url, host) = (url.parse::<Url>().ok()?, self.api.host_str()?);
        let is_own = url.host_str().is_some_and(|given| given == host || given.strip_suffix(host).is_some_and(|head| head.ends_with('.')));
        (is_own && url.scheme() == self.api.scheme() && http::check_literal(self.chassis, &url).is_ok()).then_some(url)
    }
}

fn no_scope() -> Trouble {
    Trouble::Gone("Slack does not let the app see it; does it have the scope files:read?".to_owned())
}

fn failure(error: &reqwest::Error) -> Trouble {
    match http::failure(error) {
        Answer::NotSent(why) => Trouble::Broken { why, lasting: false },
        Answer::Refused(why) => Trouble::Broken { why, lasting: true },
        Answer::NoAnswer(why) => Trouble::Unknown(why),
        other => Trouble::Unknown(towpath_delivery::state::words(&other)),
    }
}

async fn read(response: Response, most: usize) -> std::result::Result<Vec<u8>, Trouble> {
    let mut bytes = Vec::new();
    let mut stream = response.bytes_stream();
    while let Some(piece) = stream.next().await {
        bytes.extend_from_slice(&piece.map_err(|error| failure(&error))?);
        if bytes.len() > most {
            return Err(Trouble::Gone(format!("it has more than {most} bytes")));
        }
    }
    Ok(bytes)
}

async fn answer(method: &str, response: Response) -> std::result::Result<Value, Trouble> {
    let status = response.status().as_u16();
    let retry_after = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let retry_after = retry_after.map(Duration::from_secs);
    match status {
        200 => {}
        429 => return Err(Trouble::NotTaken { why: format!("{method}: rate limited"), retry_after }),
        500..=599 => return Err(Trouble::Unknown(format!("{method}: HTTP {status}"))),
        _ => return Err(Trouble::NotTaken { why: format!("{method}: HTTP {status}"), retry_after }),
    }
    let body = match read(response, ANSWER_BYTES).await {
        Ok(body) => body,
        Err(trouble) => return Err(Trouble::Unknown(trouble.why())),
    };
    let Ok(body) = serde_json::from_slice::<Value>(&body) else {
        return Err(Trouble::Unknown(format!("{method}: HTTP 200 and no JSON")));
    };
    // A status of 200 alone says nothing (field case B11).
    if body["ok"] == true {
        return Ok(body);
    }
    Err(judge(method, body["error"].as_str().unwrap_or("an answer without `ok`"), retry_after))
}

fn judge(method: &str, error: &str, retry_after: Option<Duration>) -> Trouble {
    let why: String = format!("{method}: {error}").chars().take(300).collect();
    match error {
        _ if BROKEN.contains(&error) => Trouble::Broken { why, lasting: true },
        _ if GONE.contains(&error) => Trouble::Gone(why),
        "msg_too_long" | "msg_blocks_too_long" | "text_too_long" => Trouble::TooLong(why),
        "ratelimited" | "rate_limited" | "message_limit_exceeded" => Trouble::NotTaken { why, retry_after },
        // Slack says of these that some of the deed may have been done.
        "fatal_error" | "internal_error" | "request_timeout" | "service_unavailable" | "an answer without `ok`" => Trouble::Unknown(why),
        _ => Trouble::NotTaken { why, retry_after },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_told_apart_by_what_helps_b9() {
        for error in ["token_revoked", "account_inactive", "invalid_auth"] {
            assert!(matches!(judge("m", error, None), Trouble::Broken { lasting: true, .. }), "{error}");
        }
        for error in ["is_archived", "channel_not_found", "thread_not_found", "not_in_channel"] {
            assert!(matches!(judge("m", error, None), Trouble::Gone(_)), "{error}");
        }
        assert!(judge("m", "internal_error", None).is_unknown());
        assert!(matches!(judge("m", "ratelimited", Some(Duration::from_secs(3))), Trouble::NotTaken { retry_after: Some(_), .. }));
        assert!(matches!(judge("m", "something_new", None), Trouble::NotTaken { .. }));
        assert!(matches!(judge("m", "msg_blocks_too_long", None), Trouble::TooLong(_)));
    }
}
