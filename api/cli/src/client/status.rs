//! `towpath status`: `/readyz` in words.

use reqwest::StatusCode;
use serde_json::Value;
use towpath_schemas::{ErrorCode, Problem};

use super::{api::Api, failure::Failure, print::Printer};

pub async fn status(api: &Api, printer: &Printer) -> Result<(), Failure> {
    let (status, text) = api.probe(&["readyz"]).await?;
    if let Ok(problem) = serde_json::from_str::<Problem>(&text) {
        return Err(Failure::Refused(Box::new(problem)));
    }
    if printer.json {
        printer.out(&format!("{}\n", text.trim_end()));
    } else {
        let word = if status.is_success() { "ready" } else { "not ready" };
        printer.out(&format!("{word}\n{}", in_words(&text)));
    }
    match status {
        status if status.is_success() => Ok(()),
        StatusCode::SERVICE_UNAVAILABLE => Err(Failure::Refused(Box::new(Problem::new(ErrorCode::Unavailable, "the server is not ready")))),
        other => Err(Failure::Unreachable(format!("/readyz answers {other}: that is not Towpath"))),
    }
}

/// Every value of the answer on a line of its own, by name.
fn in_words(text: &str) -> String {
    match serde_json::from_str::<Value>(text) {
        Ok(Value::Object(parts)) => parts.iter().map(|(name, value)| format!("  {name}: {}\n", plain(value))).collect(),
        _ => text.trim().lines().map(|line| format!("  {line}\n")).collect(),
    }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
