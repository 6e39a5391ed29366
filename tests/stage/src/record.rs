//! `stage.json`: what was chosen once for a folder (ports, passwords) and which processes run. Readable by its owner only.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::{port, process::Identity};

/// Number of ports that SeaweedFS needs: master, volume, filer and S3, each with its gRPC port.
pub(crate) const S3_PORTS: usize = 8;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    pub postgres_port: u16,
    pub nats_port: u16,
    pub s3_ports: [u16; S3_PORTS],
    /// Of the superuser `postgres`.
    pub postgres_admin_password: String,
    /// Of the role `towpath`.
    pub postgres_password: String,
    pub nats_password: String,
    pub s3_access_key: String,
    pub s3_secret_key: String,
    /// The key that Towpath encrypts secrets with.
    pub master_key: String,
    /// Whether writes survive a power cut. Off only for tests.
    pub durable: bool,
    /// How many NATS accounts there are for tests beside `towpath`.
    pub accounts: usize,
    /// Where Postgres's data is, once it was initialised.
    pub postgres_data: Option<PathBuf>,
    pub running: Running,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Running {
    pub postgres: Option<Identity>,
    pub nats: Option<Identity>,
    pub s3: Option<Identity>,
}

impl Record {
    /// Fresh ports and passwords.
    pub fn draw(durable: bool, accounts: usize) -> Result<Self> {
        let mut ports = Vec::new();
        while ports.len() < 2 + S3_PORTS {
            let port = port::free_port()?;
            if !ports.contains(&port) {
                ports.push(port);
            }
        }
        Ok(Self {
            postgres_port: ports[0],
            nats_port: ports[1],
            s3_ports: std::array::from_fn(|index| ports[2 + index]),
            postgres_admin_password: random_hex::<16>()?,
            postgres_password: random_hex::<16>()?,
            nats_password: random_hex::<16>()?,
            s3_access_key: random_hex::<10>()?,
            s3_secret_key: random_hex::<20>()?,
            master_key: random_hex::<32>()?,
            durable,
            accounts,
            postgres_data: None,
            running: Running::default(),
        })
    }

    pub fn load(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join("stage.json");
        match fs::read(&path) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).with_context(|| format!("read {}", path.display()))?)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
        }
    }

    pub fn save(&self, dir: &Path) -> Result<()> {
        write_private(&dir.join("stage.json"), &serde_json::to_vec_pretty(self)?)
    }
}

/// Replaces the file as a whole; only its owner may read it.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> Result<()> {
    let fresh = path.with_extension(format!("{}.new", random_hex::<4>()?));
    let write = || -> std::io::Result<()> {
        let mut file: File = File::options().write(true).create_new(true).mode(0o600).open(&fresh)?;
        file.write_all(bytes)?;
        fs::rename(&fresh, path)
    };
    write().with_context(|| format!("write {}", path.display()))
}

/// Random bytes as hex digits.
pub(crate) fn random_hex<const BYTES: usize>() -> Result<String> {
    let mut bytes = [0_u8; BYTES];
    getrandom::fill(&mut bytes).context("draw random bytes")?;
    Ok(hex::encode(bytes))
}
