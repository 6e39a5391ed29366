//! `towpath outputs`.

use std::path::PathBuf;

use clap::Args;
use futures::TryStreamExt;
use serde::Deserialize;
use tokio::{fs::File, io::AsyncWriteExt};

use super::{api::Api, failure::Failure, print::Printer};

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
    let mut pieces = api.stream(&path, &[], None).await?.bytes_stream();
    let fails = |error: std::io::Error| Failure::local(output.as_ref().map(|path| path.display().to_string()).unwrap_or_default(), &error);
    let mut file = match &output {
        Some(path) => Some(File::create(path).await.map_err(fails)?),
        None => None,
    };
    while let Some(piece) = pieces.try_next().await.map_err(|error| Failure::Unreachable(format!("the file breaks off: {error}")))? {
        match &mut file {
            Some(file) => file.write_all(&piece).await.map_err(fails)?,
            None => printer.bytes(&piece),
        }
    }
    if let Some(mut file) = file {
        file.flush().await.map_err(fails)?;
    }
    Ok(())
}
