//! `towpath files`: input files, sent and fetched as streams.

use std::{
    io::SeekFrom,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Subcommand;
use reqwest::Body;
use serde_json::Value;
use tokio::{
    fs::File,
    io::{AsyncReadExt, AsyncSeekExt},
};
use tokio_util::io::ReaderStream;
use towpath_schemas::{ErrorCode, body::FileRef};

use super::{
    api::Api,
    failure::Failure,
    print::{Printer, read},
    save::save,
};

#[derive(Subcommand)]
pub enum FilesCommand {
    /// Upload files and print their ids, for `files` of a run or a steer.
    #[command(
        after_help = "A large file goes in parts. When it breaks off it is taken up again where it was; when the command itself breaks off, it says how to go on."
    )]
    Upload {
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Go on with this upload of the one file.
        #[arg(long, value_name = "UPLOAD")]
        resume: Option<String>,
    },
    /// Fetch a file that was uploaded.
    Get {
        file: String,
        /// Where to put it; otherwise to stdout.
        #[arg(short, long, value_name = "PATH")]
        output: Option<PathBuf>,
    },
}

/// Larger files go in parts of this size.
const PART: u64 = 8 << 20;
/// Waits after each further failure in a row; any progress begins anew.
const AGAIN: [Duration; 6] = [
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
    Duration::from_secs(8),
];

pub async fn files(api: &Api, printer: &Printer, command: FilesCommand) -> Result<(), Failure> {
    match command {
        FilesCommand::Upload { files, resume } => send(api, printer, files, resume).await,
        FilesCommand::Get { file, output } => save(printer, api.stream(&["v1", "files", &file], &[], None).await?, output.as_deref()).await,
    }
}

async fn send(api: &Api, printer: &Printer, files: Vec<PathBuf>, resume: Option<String>) -> Result<(), Failure> {
    if resume.is_some() && files.len() != 1 {
        return Err(Failure::Use("--resume goes on with one file: name that one".to_owned()));
    }
    for path in files {
        let answer = upload(api, printer, &path, resume.as_deref()).await?;
        printer.answer(answer, |_, file: FileRef| format!("{}  {}  {} bytes\n", file.id, file.name, file.size))?;
    }
    Ok(())
}

/// Uploads each file, in order.
pub async fn upload_all(api: &Api, printer: &Printer, paths: &[PathBuf]) -> Result<Vec<FileRef>, Failure> {
    let mut uploaded = Vec::new();
    for path in paths {
        let file: FileRef = read(upload(api, printer, path, None).await?)?;
        printer.note(&format!("uploaded {} ({} bytes)", file.name, file.size));
        uploaded.push(file);
    }
    Ok(uploaded)
}

async fn upload(api: &Api, printer: &Printer, path: &Path, resume: Option<&str>) -> Result<Value, Failure> {
    let fails = |error: std::io::Error| Failure::local(path.display(), &error);
    let file = File::open(path).await.map_err(fails)?;
    let about = file.metadata().await.map_err(fails)?;
    if !about.is_file() {
        return Err(Failure::Use(format!("{} is not a file", path.display())));
    }
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| Failure::Use(format!("{}: the name is not UTF-8", path.display())))?;
    let query = [("name", name.to_owned()), ("media_type", media_type(name).to_owned())];
    if about.len() <= PART && resume.is_none() {
        return api.upload(&["v1", "files"], &query, Body::wrap_stream(ReaderStream::new(file)), about.len()).await;
    }
    let upload = match resume {
        Some(upload) => upload.to_owned(),
        None => api.upload_begin(&query, about.len()).await?,
    };
    in_parts(api, &upload, file, about.len()).await.inspect_err(|failure| {
        if matches!(failure, Failure::Unreachable(_)) {
            printer.note(&format!("to go on: towpath files upload {} --resume {upload}", path.display()));
        }
    })
}

async fn in_parts(api: &Api, upload: &str, mut file: File, length: u64) -> Result<Value, Failure> {
    let local = |error: std::io::Error| Failure::local("the file", &error);
    let mut waits = AGAIN.into_iter();
    let mut at = api.upload_offset(upload).await?;
    loop {
        if at > length {
            return Err(Failure::Use(format!("{at} bytes of {upload} are there, more than the file has: it is another file's")));
        }
        file.seek(SeekFrom::Start(at)).await.map_err(local)?;
        let mut part = Vec::with_capacity(usize::try_from(PART.min(length - at)).unwrap_or(0));
        (&mut file).take(PART.min(length - at)).read_to_end(&mut part).await.map_err(local)?;
        let end = at + part.len() as u64;
        if part.is_empty() && end < length {
            return Err(Failure::Use("the file became shorter while it was sent".to_owned()));
        }
        match api.upload_part(upload, at, part, end == length).await {
            Ok(answer) if end == length => return Ok(answer),
            Ok(_) => {
                at = end;
                waits = AGAIN.into_iter();
            }
            Err(failure) => {
                if !passes(&failure) {
                    return Err(failure);
                }
                at = go_on(api, upload, failure, &mut waits).await?;
            }
        }
    }
}

/// Trouble that may be over in a moment.
fn passes(failure: &Failure) -> bool {
    match failure {
        Failure::Unreachable(_) => true,
        Failure::Refused(problem) => problem.status == 503 || problem.code == ErrorCode::UploadOffset.code(),
        Failure::Use(_) | Failure::Ended(_) | Failure::Interrupted | Failure::Unwell => false,
    }
}

/// Where the upload is, once somebody answers again.
async fn go_on(api: &Api, upload: &str, failure: Failure, waits: &mut impl Iterator<Item = Duration>) -> Result<u64, Failure> {
    let mut failure = failure;
    loop {
        let Some(wait) = waits.next() else { return Err(failure) };
        tokio::time::sleep(wait).await;
        match api.upload_offset(upload).await {
            Ok(at) => return Ok(at),
            Err(other) if passes(&other) => failure = other,
            Err(other) => return Err(other),
        }
    }
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
