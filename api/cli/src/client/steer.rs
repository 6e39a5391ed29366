//! `towpath steer`.

use std::path::PathBuf;

use clap::Args;
use towpath_schemas::body::{NewSteer, Steer};

use super::{api::Api, failure::Failure, file, print::Printer, run::text_or_stdin};

#[derive(Args)]
#[command(after_help = "Example:\n  towpath steer run_0193… \"also list the ten largest files\"")]
pub struct SteerArgs {
    run: String,
    /// At most 32 KiB; `-` reads it from stdin.
    message: String,
    /// A file to lay beside the message, staged before it is given.
    #[arg(long = "file", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// A repeat with the same key sends nothing twice.
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
}

pub async fn steer(api: &Api, printer: &Printer, args: SteerArgs) -> Result<(), Failure> {
    let message = text_or_stdin(args.message).await?;
    let files = file::upload_all(api, printer, &args.files).await?;
    let body = NewSteer { message, files: files.into_iter().map(|file| file.id).collect() };
    let answer = api.post(&["v1", "runs", &args.run, "steers"], body, args.idempotency_key).await?;
    printer.answer(answer, |_, steer: Steer| format!("{} is message {} of the run, {}\n", steer.id, steer.ordinal, word(&steer)))
}

fn word(steer: &Steer) -> String {
    serde_json::to_value(steer.state).ok().and_then(|word| word.as_str().map(str::to_owned)).unwrap_or_default()
}
