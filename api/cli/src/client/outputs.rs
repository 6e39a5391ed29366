//! `towpath outputs`.

use std::path::PathBuf;

use clap::Args;
use serde::Deserialize;

use super::{api::Api, failure::Failure, print::Printer, save::save};

#[derive(Args)]
#[command(after_help = "Examples:\n  towpath outputs run_0193…\n  towpath outputs run_0193… report.json -o report.json")]
pub struct OutputsArgs {
    run: String,
    /// The file to fetch; without it the files are listed.
    name: Option<String>,
    /// Where to write it; stdout otherwise.
    #[arg(short, long, requires = "name", value_name = "PATH")]
    output: Option<PathBuf>,
}

/// One file of the answer; it says more than is shown.
#[derive(Deserialize)]
struct OutputFile {
    name: String,
    size: u64,
    status: String,
    reason: Option<String>,
}

pub async fn outputs(api: &Api, printer: &Printer, args: OutputsArgs) -> Result<(), Failure> {
    if let Some(name) = &args.name {
        return fetch(api, printer, &args.run, name, args.output).await;
    }
    let answer = api.get(&["v1", "runs", &args.run, "outputs"], &[]).await?;
    printer.page(answer, None, |printer, files: Vec<OutputFile>| {
        let row = |file: OutputFile| vec![file.name, file.size.to_string(), file.status, file.reason.unwrap_or_default()];
        printer.table(&["name", "bytes", "status", ""], files.into_iter().map(row).collect())
    })
}

async fn fetch(api: &Api, printer: &Printer, run: &str, name: &str, output: Option<PathBuf>) -> Result<(), Failure> {
    let path: Vec<&str> = ["v1", "runs", run, "outputs"].into_iter().chain(name.split('/')).collect();
    save(printer, api.stream(&path, &[], None).await?, output.as_deref()).await
}
