//! `towpath files`: input files, uploaded as a stream.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use reqwest::Body;
use serde_json::Value;
use tokio::fs::File;
use tokio_util::io::ReaderStream;
use towpath_schemas::body::FileRef;

use super::{
    api::Api,
    failure::Failure,
    print::{Printer, read},
};

#[derive(Subcommand)]
pub enum FilesCommand {
    /// Upload files and print their ids, for `files` of a run or a steer.
    Upload {
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
}

pub async fn files(api: &Api, printer: &Printer, command: FilesCommand) -> Result<(), Failure> {
    let FilesCommand::Upload { files } = command;
    for path in files {
        let answer = upload(api, &path).await?;
        printer.answer(answer, |_, file: FileRef| format!("{}  {}  {} bytes\n", file.id, file.name, file.size))?;
    }
    Ok(())
}

/// Uploads each file, in order.
pub async fn upload_all(api: &Api, printer: &Printer, paths: &[PathBuf]) -> Result<Vec<FileRef>, Failure> {
    let mut uploaded = Vec::new();
    for path in paths {
        let file: FileRef = read(upload(api, path).await?)?;
        printer.note(&format!("uploaded {} ({} bytes)", file.name, file.size));
        uploaded.push(file);
    }
    Ok(uploaded)
}

async fn upload(api: &Api, path: &Path) -> Result<Value, Failure> {
    let fails = |error: std::io::Error| Failure::local(path.display(), &error);
    let file = File::open(path).await.map_err(fails)?;
    let about = file.metadata().await.map_err(fails)?;
    if !about.is_file() {
        return Err(Failure::Use(format!("{} is not a file", path.display())));
    }
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| Failure::Use(format!("{}: the name is not UTF-8", path.display())))?;
    let query = [("name", name.to_owned()), ("media_type", media_type(name).to_owned())];
    api.upload(&["v1", "files"], &query, Body::wrap_stream(ReaderStream::new(file)), about.len()).await
}

fn media_type(name: &str) -> &'static str {
    match name.rsplit('.').next().unwrap_or_default().to_ascii_lowercase().as_str() {
        "gz" | "tgz" => "application/gzip",
        "tar" => "application/x-tar",
        "zip" => "application/zip",
        "zst" => "application/zstd",
        "json" => "application/json",
        "pdf" => "application/pdf",
        "txt" | "log" => "text/plain",
        "md" => "text/markdown",
        "csv" => "text/csv",
        "html" => "text/html",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        _ => "application/octet-stream",
    }
}
