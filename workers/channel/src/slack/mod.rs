//! Slack: what its app posts to us, and answers by its Web API (docs.slack.dev).

pub mod event;
mod fetch;
mod render;
pub(crate) mod send;
mod web;

pub(crate) use fetch::fetch;
