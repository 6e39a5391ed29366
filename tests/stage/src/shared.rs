//! One set of servers for a whole test run. Tests run each in a process of its own; they find the servers by the folder that
//! TOWPATH_STAGE_DIR names, which `./dev test` starts before and stops after, and each takes what nobody else uses.

use std::{
    fs::{self, File},
    path::PathBuf,
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use futures::TryStreamExt;
use sqlx::{Connection, PgConnection};

use crate::{
    nats::{self, NatsLease},
    postgres::{self, run},
    probe,
    record::{Record, random_hex},
    s3::{self, S3Access},
    servers::Home,
};

const LEASE: Duration = Duration::from_secs(60);

/// The servers of this test run.
pub struct Shared {
    home: Arc<Home>,
}

/// The servers of this test run; an error that says what to do when there are none.
pub fn shared() -> Result<Shared> {
    let Some(dir) = std::env::var_os("TOWPATH_STAGE_DIR").map(PathBuf::from) else {
        bail!("TOWPATH_STAGE_DIR is not set: run tests by `./dev test`, or start `stage up --dir DIR --tests` and set it to DIR");
    };
    let record = Record::load(&dir)?.with_context(|| format!("no servers were started in {}", dir.display()))?;
    Ok(Shared { home: Home::open(&dir, true, record) })
}

/// The URL of an empty database that nobody else uses.
pub async fn fresh_database() -> Result<String> {
    shared()?.database().await
}

/// A NATS account that nobody else uses, without streams.
pub async fn fresh_nats() -> Result<NatsLease> {
    shared()?.nats().await
}

/// A bucket that nobody else uses.
pub async fn fresh_bucket() -> Result<S3Access> {
    shared()?.bucket().await
}

impl Shared {
    /// The URL of an empty database that nobody else uses.
    pub async fn database(&self) -> Result<String> {
        let name = format!("t_{}", random_hex::<8>()?);
        self.create_database(&name, "template0").await?;
        Ok(postgres::url(&self.home, &name))
    }

    /// The URL of a copy of a database that `make` fills once for the whole test run. Name the template after what it holds (for migrations:
    /// their digest). `make` must leave no connection open.
    pub async fn database_from(&self, template: &str, make: impl AsyncFnOnce(String) -> Result<()>) -> Result<String> {
        let template = format!("template_{template}");
        let lock = self.lock(&template).await?;
        let done = self.home.dir.join("lease").join(format!("{template}.done"));
        if !done.exists() {
            let mut connection = self.connection().await?;
            run(&mut connection, &format!("DROP DATABASE IF EXISTS \"{template}\"")).await?;
            self.create_database(&template, "template0").await?;
            make(postgres::url(&self.home, &template)).await.with_context(|| format!("fill the database {template}"))?;
            File::create(&done)?;
        }
        let name = format!("t_{}", random_hex::<8>()?);
        self.create_database(&name, &template).await?;
        drop(lock);
        Ok(postgres::url(&self.home, &name))
    }

    /// A NATS account that nobody else uses, without streams.
    pub async fn nats(&self) -> Result<NatsLease> {
        let (number, lock) = probe::wait_for("a free NATS account", LEASE, async || self.free_account().ok().flatten()).await?;
        let account = nats::account(number);
        let url = nats::url(&self.home, &account);
        let jetstream = async_nats::jetstream::new(nats::connect(&url).await?);
        let names: Vec<String> = jetstream.stream_names().try_collect().await.context("list the account's streams")?;
        for name in names {
            jetstream.delete_stream(&name).await.with_context(|| format!("delete the stream {name}"))?;
        }
        Ok(NatsLease { url, account, _lock: lock })
    }

    /// A bucket that nobody else uses.
    pub async fn bucket(&self) -> Result<S3Access> {
        let bucket = format!("t-{}", random_hex::<8>()?);
        s3::make_bucket(&self.home, &bucket).await?;
        Ok(s3::access(&self.home, &bucket))
    }

    /// The next account in turn that is free, so that one just given back rests longest.
    fn free_account(&self) -> Result<Option<(usize, File)>> {
        let accounts = self.home.record().accounts;
        let turn = self.open_lease("turn")?;
        turn.lock()?;
        let path = self.home.dir.join("lease/turn.next");
        let first = fs::read_to_string(&path).ok().and_then(|text| usize::from_str(&text).ok()).unwrap_or(0);
        for number in (0..accounts).map(|step| (first + step) % accounts) {
            let file = self.open_lease(&nats::account(number))?;
            if file.try_lock().is_ok() {
                fs::write(&path, (number + 1).to_string())?;
                return Ok(Some((number, file)));
            }
        }
        Ok(None)
    }

    fn open_lease(&self, name: &str) -> Result<File> {
        let dir = self.home.dir.join("lease");
        fs::create_dir_all(&dir)?;
        File::options().create(true).append(true).open(dir.join(name)).with_context(|| format!("open the lock {name}"))
    }

    async fn lock(&self, name: &str) -> Result<File> {
        let file = self.open_lease(name)?;
        probe::wait_for(name, LEASE, async || file.try_lock().ok()).await?;
        Ok(file)
    }

    async fn create_database(&self, name: &str, template: &str) -> Result<()> {
        let mut connection = self.connection().await?;
        run(&mut connection, &format!("CREATE DATABASE \"{name}\" TEMPLATE \"{template}\""))
            .await
            .with_context(|| format!("create the database {name}"))?;
        Ok(connection.close().await?)
    }

    async fn connection(&self) -> Result<PgConnection> {
        PgConnection::connect(&postgres::url(&self.home, "towpath")).await.context("connect to Postgres")
    }
}
