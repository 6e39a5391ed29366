//! Content that is fetched: to stdout, or to a file that has its name only once it is whole.

use std::path::{Path, PathBuf};

use futures::TryStreamExt;
use reqwest::Response;
use tokio::{fs::File, io::AsyncWriteExt};

use super::{failure::Failure, print::Printer};

/// Fetches an answer's content; `None` is stdout.
pub async fn save(printer: &Printer, response: Response, output: Option<&Path>) -> Result<(), Failure> {
    let mut pieces = response.bytes_stream();
    let mut next = async || pieces.try_next().await.map_err(|error| Failure::Unreachable(format!("it breaks off: {error}")));
    let Some(path) = output else {
        while let Some(piece) = next().await? {
            printer.bytes(&piece);
        }
        return Ok(());
    };
    let mut unfinished = path.to_owned().into_os_string();
    unfinished.push(".part");
    let unfinished = PathBuf::from(unfinished);
    let fails = |error: std::io::Error| Failure::local(unfinished.display(), &error);
    let mut file = File::create(&unfinished).await.map_err(fails)?;
    let mut bytes = 0;
    while let Some(piece) = next().await? {
        file.write_all(&piece).await.map_err(fails)?;
        bytes += piece.len();
    }
    file.sync_all().await.map_err(fails)?;
    tokio::fs::rename(&unfinished, path).await.map_err(|error| Failure::local(path.display(), &error))?;
    printer.note(&format!("{bytes} bytes in {}", path.display()));
    Ok(())
}
