//! Content on its way in: written to a file of the local disk as it comes, counted and hashed, never whole in memory.

use std::path::Path;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;
use towpath_chassis::{Error, Result};
use towpath_schemas::ErrorCode;

pub struct Spool {
    file: tokio::fs::File,
    path: tempfile::TempPath,
    hasher: Sha256,
    size: u64,
    most: u64,
}

/// Content that is all there; its file goes when this goes.
pub struct Spooled {
    path: tempfile::TempPath,
    pub size: u64,
    pub sha256: [u8; 32],
}

impl Spooled {
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Spool {
    /// Takes at most `most` bytes.
    pub fn new(most: u64) -> Result<Self> {
        let (file, path) = tempfile::Builder::new().prefix("towpath-spool-").tempfile().map_err(disk)?.into_parts();
        Ok(Self { file: tokio::fs::File::from_std(file), path, hasher: Sha256::new(), size: 0, most })
    }

    pub async fn write(&mut self, piece: &[u8]) -> Result<()> {
        self.size += piece.len() as u64;
        if self.size > self.most {
            return Err(Error::refused(ErrorCode::TooLarge, format!("a file may hold at most {} bytes", self.most)));
        }
        self.hasher.update(piece);
        self.file.write_all(piece).await.map_err(disk)
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    pub async fn finish(mut self) -> Result<Spooled> {
        self.file.flush().await.map_err(disk)?;
        Ok(Spooled { path: self.path, size: self.size, sha256: self.hasher.finalize().into() })
    }

    /// Spools a whole stream.
    pub async fn take<S, E>(most: u64, mut stream: S) -> Result<Spooled>
    where
        S: Stream<Item = std::result::Result<Bytes, E>> + Unpin,
        E: std::fmt::Display,
    {
        let mut spool = Self::new(most)?;
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(|error| Error::refused(ErrorCode::BadRequest, format!("the body broke off: {error}")))?;
            spool.write(&piece).await?;
        }
        spool.finish().await
    }
}

fn disk(error: std::io::Error) -> Error {
    Error::refused(ErrorCode::Unavailable, format!("this server's disk: {error}"))
}
