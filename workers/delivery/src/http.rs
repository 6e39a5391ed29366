//! Requests to addresses that people name: only to where the operator lets them go, within a time, without redirects.

use std::{
    net::IpAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use reqwest::Client;
use towpath_chassis::{Chassis, Error, Result, clock};
use url::{Host, Url};

use crate::{
    address::{RefusedAddress, Resolver, refusal},
    state::Answer,
};

/// Time limit of one request (Standard Webhooks advises 15 to 30 s), and of its connecting.
pub const ATTEMPT: Duration = Duration::from_secs(15);
const CONNECT: Duration = Duration::from_secs(5);

/// The client of all requests that go to addresses which people name.
pub fn client(chassis: &Chassis) -> Result<&'static Client> {
    static CLIENT: OnceLock<Client> = OnceLock::new();
    if let Some(client) = CLIENT.get() {
        return Ok(client);
    }
    let client = Client::builder()
        .dns_resolver(Arc::new(Resolver { allow: chassis.config.webhook_allow.clone() }))
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .connect_timeout(clock::scaled(CONNECT))
        .timeout(clock::scaled(ATTEMPT))
        .user_agent("towpath")
        .build()
        .map_err(|error| Error::broken(format!("HTTP client: {error}")))?;
    Ok(CLIENT.get_or_init(|| client))
}

/// Literal addresses never reach the resolver, so they are checked here.
pub fn check_literal(chassis: &Chassis, url: &Url) -> std::result::Result<(), String> {
    let address = match url.host() {
        Some(Host::Ipv4(v4)) => IpAddr::V4(v4),
        Some(Host::Ipv6(v6)) => IpAddr::V6(v6),
        Some(Host::Domain(_)) | None => return Ok(()),
    };
    match refusal(address, &chassis.config.webhook_allow) {
        Some(why) => Err(format!("{address} is {why}")),
        None => Ok(()),
    }
}

/// Told apart by whether the request can have left this machine.
pub fn failure(error: &reqwest::Error) -> Answer {
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(refused) = inner.downcast_ref::<RefusedAddress>() {
            return Answer::Refused(refused.0.clone());
        }
        source = inner.source();
    }
    let why = if error.is_timeout() { "timed out".to_owned() } else { chain(error) };
    if error.is_connect() || error.is_builder() { Answer::NotSent(why) } else { Answer::NoAnswer(why) }
}

fn chain(error: &reqwest::Error) -> String {
    // The URL may hold a secret of the receiver's; the owner sees it as the target already.
    let mut text = String::from("the connection failed");
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text = inner.to_string();
        source = inner.source();
    }
    text.chars().take(300).collect()
}
