//! `towpath transcript`: the record of a run, whole or in part, in any of its formats.

use std::path::PathBuf;

use clap::Args;
use futures::TryStreamExt;
use reqwest::Response;

use super::{api::Api, failure::Failure, print::Printer, save::save};

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct TranscriptArgs {
    run: String,
    /// text: what a person reads; raw: every byte; cast: a recording for asciinema; ndjson: a frame a line.
    #[arg(long, value_name = "FORMAT", default_value = "text", value_parser = ["text", "raw", "cast", "ndjson"])]
    format: String,
    /// Only what was printed on this stream.
    #[arg(long, value_name = "STREAM", value_parser = ["stdout", "stderr", "terminal"])]
    stream: Option<String>,
    /// Only what comes after this frame.
    #[arg(long, value_name = "EPOCH.SEQ")]
    after: Option<String>,
    /// Only what comes up to this frame.
    #[arg(long, value_name = "EPOCH.SEQ")]
    until: Option<String>,
    /// Only what was printed from this moment on (RFC 3339).
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Only what was printed before this moment (RFC 3339).
    #[arg(long, value_name = "TIME")]
    before: Option<String>,
    /// Write it here instead of to stdout; the file appears once it is whole.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  towpath transcript RUN
  towpath transcript RUN --format cast -o run.cast && asciinema play run.cast
  towpath transcript RUN --format raw --stream stderr
  towpath transcript RUN --format ndjson --since 2026-11-30T12:00:00Z --before 2026-11-30T12:05:00Z";

/// Says on stderr when some of a transcript is not kept.
pub fn tell_missing(printer: &Printer, response: &Response) {
    if let Some(missing) = response.headers().get("towpath-transcript-missing").and_then(|value| value.to_str().ok()) {
        let bytes = if missing == "unknown" { "nobody knows how many".to_owned() } else { missing.to_owned() };
        printer.note(&format!("(of what was printed, some is missing: {bytes} bytes)"));
    }
}

pub async fn transcript(api: &Api, printer: &Printer, args: TranscriptArgs) -> Result<(), Failure> {
    let mut query = vec![("format", args.format.clone())];
    let parts = [("stream", args.stream), ("after", args.after), ("until", args.until), ("since", args.since), ("before", args.before)];
    query.extend(parts.into_iter().filter_map(|(name, value)| Some((name, value?))));
    let response = api.stream(&["v1", "runs", &args.run, "transcript"], &query, None).await?;
    tell_missing(printer, &response);
    if args.output.is_some() || args.format != "text" {
        return save(printer, response, args.output.as_deref()).await;
    }
    // Control sequences of a sandbox are for a person's terminal only when they were asked for.
    let mut filter = printer.filter();
    let mut pieces = response.bytes_stream();
    while let Some(piece) = pieces.try_next().await.map_err(|error| Failure::Unreachable(format!("the transcript breaks off: {error}")))? {
        printer.out(&filter.pass(&piece));
    }
    Ok(())
}
