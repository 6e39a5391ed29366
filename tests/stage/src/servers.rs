//! The three servers as one.

use std::{
    fs,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
};

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::{
    nats::Nats,
    port,
    postgres::Postgres,
    record::{Record, write_private},
    s3::{S3, S3Access},
};

/// Which servers [`Servers::start`] starts; the others can be started later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Which {
    pub postgres: bool,
    pub nats: bool,
    pub s3: bool,
}

impl Which {
    pub const ALL: Which = Which { postgres: true, nats: true, s3: true };
    pub const POSTGRES: Which = Which { postgres: true, nats: false, s3: false };
    pub const NATS: Which = Which { postgres: false, nats: true, s3: false };
    pub const S3: Which = Which { postgres: false, nats: false, s3: true };
}

/// How servers are started.
#[derive(Debug, Clone)]
pub struct Options {
    /// Data, logs, ports and passwords; what is there already is used again.
    pub dir: PathBuf,
    /// Whether Postgres syncs to disk. Kept from the first start in this folder on.
    pub durable: bool,
    pub which: Which,
    /// NATS accounts for tests beside `towpath`. Kept from the first start on.
    pub accounts: usize,
    /// Whether the servers outlive this value and this process, until [`stop_recorded`].
    pub detached: bool,
}

impl Options {
    /// All servers, durable, for as long as the value lives.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), durable: true, which: Which::ALL, accounts: 0, detached: false }
    }
}

/// What the servers of one folder share.
pub(crate) struct Home {
    pub dir: PathBuf,
    pub detached: bool,
    record: Mutex<Record>,
}

impl Home {
    pub fn open(dir: &Path, detached: bool, record: Record) -> Arc<Self> {
        Arc::new(Self { dir: dir.to_owned(), detached, record: Mutex::new(record) })
    }

    pub fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().expect("record")
    }

    pub fn log(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.log"))
    }

    /// Changes the record and saves it.
    pub fn update(&self, change: impl FnOnce(&mut Record)) -> Result<()> {
        let mut record = self.record();
        change(&mut record);
        record.save(&self.dir)
    }
}

/// Postgres, NATS and an S3 server, started by us. Unless detached they die with this value, and with this process in any case.
pub struct Servers {
    pub postgres: Postgres,
    pub nats: Nats,
    pub s3: S3,
    home: Arc<Home>,
    temporary: Option<TempDir>,
}

impl Servers {
    /// Starts the chosen servers side by side and returns once each answers.
    pub async fn start(options: Options) -> Result<Self> {
        let dir = &options.dir;
        fs::DirBuilder::new().recursive(true).mode(0o755).create(dir).with_context(|| format!("make {}", dir.display()))?;
        let dir = dir.canonicalize().with_context(|| format!("find {}", dir.display()))?;
        let lock = fs::File::create(dir.join("stage.lock")).context("make stage.lock")?;
        lock.lock().context("lock stage.lock")?;
        let record = match Record::load(&dir)? {
            Some(record) => with_free_ports(record)?,
            None => Record::draw(options.durable, options.accounts)?,
        };
        record.save(&dir)?;
        let home = Home::open(&dir, options.detached, record);
        let servers =
            Self { postgres: Postgres::new(home.clone()), nats: Nats::new(home.clone()), s3: S3::new(home.clone()), home, temporary: None };
        servers.start_chosen(options.which).await?;
        Ok(servers)
    }

    /// Servers for one test in a folder of their own, gone with this value. Postgres does not sync to disk.
    pub async fn temporary(which: Which) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("towpath-stage-").tempdir().context("make a temporary folder")?;
        fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        let mut servers = Self::start(Options { durable: false, which, ..Options::new(dir.path()) }).await?;
        servers.temporary = Some(dir);
        Ok(servers)
    }

    pub fn database_url(&self) -> String {
        self.postgres.url()
    }

    pub fn nats_url(&self) -> String {
        self.nats.url()
    }

    pub fn s3(&self) -> S3Access {
        self.s3.access()
    }

    /// Writes `env` into the folder: the settings that Towpath needs, as lines `NAME=value`, readable by its owner only.
    pub fn write_env(&self) -> Result<PathBuf> {
        let s3 = self.s3();
        let lines = [
            ("TOWPATH_DATABASE_URL", self.database_url()),
            ("TOWPATH_NATS_URL", self.nats_url()),
            ("TOWPATH_S3_ENDPOINT", s3.endpoint),
            ("TOWPATH_S3_BUCKET", s3.bucket),
            ("TOWPATH_S3_REGION", s3.region),
            ("TOWPATH_S3_ACCESS_KEY", s3.access_key),
            ("TOWPATH_S3_SECRET_KEY", s3.secret_key),
            ("TOWPATH_MASTER_KEY", self.home.record().master_key.clone()),
        ];
        let path = self.home.dir.join("env");
        write_private(&path, lines.map(|(name, value)| format!("{name}={value}\n")).concat().as_bytes())?;
        Ok(path)
    }

    async fn start_chosen(&self, which: Which) -> Result<()> {
        let postgres = async || if which.postgres { self.postgres.start().await } else { Ok(()) };
        let nats = async || if which.nats { self.nats.start().await } else { Ok(()) };
        let s3 = async || if which.s3 { self.s3.start().await } else { Ok(()) };
        // All three are awaited to their end, so that a failure of one leaves no half-started other unrecorded.
        let (postgres, nats, s3) = tokio::join!(postgres(), nats(), s3());
        postgres.and(nats).and(s3)
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        if self.temporary.is_none() {
            return;
        }
        for (name, killed) in [("postgres", self.postgres.kill9()), ("nats", self.nats.kill9()), ("s3", self.s3.kill9())] {
            if let Err(error) = killed {
                eprintln!("stage: {name}: {error:#}");
            }
        }
        if let Err(error) = remove_outside_data(&self.home.record(), &self.home.dir) {
            eprintln!("stage: {error:#}");
        }
    }
}

/// Whether each server that a folder records still runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    pub postgres: Option<i32>,
    pub nats: Option<i32>,
    pub s3: Option<i32>,
}

impl Status {
    /// The pids of what runs, from the folder's record; all absent when there is none.
    pub fn read(dir: &Path) -> Result<Self> {
        let running = Record::load(dir)?.map(|record| record.running).unwrap_or_default();
        let pid = |identity: Option<crate::process::Identity>| identity.filter(|identity| identity.alive()).map(|identity| identity.pid);
        Ok(Self { postgres: pid(running.postgres), nats: pid(running.nats), s3: pid(running.s3) })
    }
}

/// Stops the servers that the folder records as started, and nothing else. With `wipe` their data goes too.
pub async fn stop_recorded(dir: &Path, wipe: bool) -> Result<()> {
    let Some(record) = Record::load(dir)? else { return Ok(()) };
    let dir = dir.canonicalize()?;
    let lock = fs::File::create(dir.join("stage.lock")).context("make stage.lock")?;
    lock.lock().context("lock stage.lock")?;
    let home = Home::open(&dir, true, record);
    let (postgres, nats, s3) = (Postgres::new(home.clone()), Nats::new(home.clone()), S3::new(home.clone()));
    if wipe {
        postgres.kill9().and(nats.kill9()).and(s3.kill9())?;
        remove_outside_data(&home.record(), &dir)?;
        for name in ["postgres", "nats", "s3", "lease"] {
            remove_if_there(&dir.join(name))?;
        }
        fs::remove_file(dir.join("stage.json")).context("remove stage.json")
    } else {
        let (postgres, nats, s3) = tokio::join!(postgres.stop(), nats.stop(), s3.stop());
        postgres.and(nats).and(s3)
    }
}

/// Removes Postgres's data when it could not live in the stage's own folder.
fn remove_outside_data(record: &Record, dir: &Path) -> Result<()> {
    match record.postgres_data.as_deref().and_then(Path::parent) {
        Some(parent) if !parent.starts_with(dir) => remove_if_there(parent),
        _ => Ok(()),
    }
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).with_context(|| format!("remove {}", path.display())),
        _ => Ok(()),
    }
}

/// The recorded ports, except that a server which does not run and whose port was taken meanwhile gets a new one.
fn with_free_ports(mut record: Record) -> Result<Record> {
    let replace = |running: &Option<crate::process::Identity>, ports: &mut [u16]| -> Result<()> {
        if running.as_ref().is_some_and(crate::process::Identity::alive) {
            return Ok(());
        }
        for port in ports.iter_mut().filter(|port| !port::is_free(**port)) {
            *port = port::free_port()?;
        }
        Ok(())
    };
    replace(&record.running.postgres, std::slice::from_mut(&mut record.postgres_port))?;
    replace(&record.running.nats, std::slice::from_mut(&mut record.nats_port))?;
    replace(&record.running.s3, &mut record.s3_ports)?;
    Ok(record)
}
