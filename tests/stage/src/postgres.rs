//! Postgres: initialised once, started and stopped any number of times on the same port and data.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};

use crate::{
    probe,
    process::Slot,
    record::{random_hex, write_private},
    servers::Home,
    tool,
};

const READY: Duration = Duration::from_secs(60);
const STOP: Duration = Duration::from_secs(20);
const CONNECTIONS: u32 = 200;

/// A Postgres server of ours: scram passwords, TCP on loopback only, no TLS.
pub struct Postgres {
    home: Arc<Home>,
    pub(crate) slot: Slot,
}

/// Postgres refuses to run as root: then it runs as this user.
struct RunAs {
    uid: u32,
    gid: u32,
}

impl Postgres {
    pub(crate) fn new(home: Arc<Home>) -> Self {
        let slot = Slot::new("postgres", home.log("postgres"), home.detached, home.record().running.postgres.clone());
        Self { home, slot }
    }

    /// Of the role `towpath`, which owns the database `towpath` and may create others.
    pub fn url(&self) -> String {
        url(&self.home, "towpath")
    }

    /// Of the superuser, in the database `postgres` (where `pg_stat_statements` is).
    pub fn admin_url(&self) -> String {
        let record = self.home.record();
        format!("postgres://postgres:{}@127.0.0.1:{}/postgres?sslmode=disable", record.postgres_admin_password, record.postgres_port)
    }

    /// Starts it unless it runs, on the same port and data as before, and returns once it answers.
    pub async fn start(&self) -> Result<()> {
        if !self.slot.alive() {
            let bin = tool::postgres_bin()?;
            let user = run_as()?;
            let data = self.data(&bin, user.as_ref())?;
            remove_stale_lock(&data).await?;
            self.slot.spawn(self.server(&bin, user.as_ref(), &data))?;
            self.home.update(|record| record.running.postgres = self.slot.identity())?;
        }
        let mut connection = probe::ready(&self.slot, READY, async || Ok(PgConnection::connect(&self.admin_url()).await?)).await?;
        self.prepare(&mut connection).await.context("prepare Postgres's role and database")?;
        Ok(connection.close().await?)
    }

    /// SIGKILL to the server and all its backends: what a power cut leaves, as long as the kernel lives.
    pub fn kill9(&self) -> Result<()> {
        self.slot.kill9()?;
        self.home.update(|record| record.running.postgres = None)
    }

    /// A fast shutdown: connections are dropped, the data is left clean.
    pub async fn stop(&self) -> Result<()> {
        self.slot.stop(Signal::INT, STOP).await?;
        self.home.update(|record| record.running.postgres = None)
    }

    fn server(&self, bin: &Path, user: Option<&RunAs>, data: &Path) -> Command {
        let record = self.home.record();
        let mut command = command(user, &bin.join("postgres"));
        command.arg("-D").arg(data);
        let mut set = |setting: String| {
            command.arg("-c").arg(setting);
        };
        set("listen_addresses=127.0.0.1".to_owned());
        set(format!("port={}", record.postgres_port));
        set("unix_socket_directories=".to_owned());
        set(format!("max_connections={CONNECTIONS}"));
        set("password_encryption=scram-sha-256".to_owned());
        set("ssl=off".to_owned());
        set("logging_collector=off".to_owned());
        set("log_destination=stderr".to_owned());
        set("shared_preload_libraries=pg_stat_statements".to_owned());
        if !record.durable {
            // A commit is still in the kernel's hands when it is answered: it survives the server's end, only not the machine's.
            set("fsync=off".to_owned());
            set("full_page_writes=off".to_owned());
        }
        command
    }

    /// The data folder, initialised when it is new.
    fn data(&self, bin: &Path, user: Option<&RunAs>) -> Result<PathBuf> {
        if let Some(data) = self.home.record().postgres_data.clone() {
            ensure!(
                data.join("PG_VERSION").is_file(),
                "Postgres's data folder {} is gone; remove {} to start afresh",
                data.display(),
                self.home.dir.display()
            );
            return Ok(data);
        }
        let parent = data_parent(&self.home.dir, user)?;
        let (fresh, data) = (parent.join("data.new"), parent.join("data"));
        if fresh.exists() {
            fs::remove_dir_all(&fresh).with_context(|| format!("remove {}", fresh.display()))?;
        }
        self.initdb(bin, user, &parent, &fresh)?;
        fs::rename(&fresh, &data).with_context(|| format!("rename to {}", data.display()))?;
        self.home.update(|record| record.postgres_data = Some(data.clone()))?;
        Ok(data)
    }

    fn initdb(&self, bin: &Path, user: Option<&RunAs>, parent: &Path, data: &Path) -> Result<()> {
        let password = parent.join("password");
        write_private(&password, self.home.record().postgres_admin_password.as_bytes())?;
        if let Some(user) = user {
            std::os::unix::fs::chown(&password, Some(user.uid), Some(user.gid))?;
        }
        let mut command = command(user, &bin.join("initdb"));
        command.args(["--username=postgres", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8"]);
        command.arg(format!("--pwfile={}", password.display())).arg("-D").arg(data).stdin(Stdio::null());
        if !self.home.record().durable {
            command.arg("--no-sync");
        }
        let done = command.output().with_context(|| format!("run {}", bin.join("initdb").display()))?;
        fs::remove_file(&password)?;
        ensure!(done.status.success(), "initdb: {}\n{}", done.status, String::from_utf8_lossy(&done.stderr));
        Ok(())
    }

    async fn prepare(&self, connection: &mut PgConnection) -> Result<()> {
        let exists = |sql: &'static str| sqlx::query(sql);
        if exists("SELECT 1 FROM pg_roles WHERE rolname = 'towpath'").fetch_optional(&mut *connection).await?.is_none() {
            let password = self.home.record().postgres_password.clone();
            run(connection, &format!("CREATE ROLE towpath LOGIN CREATEDB PASSWORD '{password}' IN ROLE pg_monitor")).await?;
        }
        if exists("SELECT 1 FROM pg_database WHERE datname = 'towpath'").fetch_optional(&mut *connection).await?.is_none() {
            run(connection, "CREATE DATABASE towpath OWNER towpath").await?;
        }
        let extension = "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_stat_statements')";
        if !sqlx::query(extension).fetch_one(&mut *connection).await?.try_get::<bool, _>(0)? {
            run(connection, "CREATE EXTENSION pg_stat_statements").await?;
        }
        Ok(())
    }
}

/// The role `towpath`'s URL of a database.
pub(crate) fn url(home: &Home, database: &str) -> String {
    let record = home.record();
    format!("postgres://towpath:{}@127.0.0.1:{}/{database}?sslmode=disable", record.postgres_password, record.postgres_port)
}

/// Runs one statement that holds no text from outside.
pub(crate) async fn run(connection: &mut PgConnection, sql: &str) -> Result<()> {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await?;
    Ok(())
}

fn run_as() -> Result<Option<RunAs>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let users = fs::read_to_string("/etc/passwd").context("read /etc/passwd")?;
    let fields: Option<Vec<&str>> = users.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|fields| fields[0] == "postgres");
    match fields.as_deref() {
        Some([_, _, uid, gid, ..]) => Ok(Some(RunAs { uid: uid.parse()?, gid: gid.parse()? })),
        _ => bail!("Postgres does not run as root and there is no user `postgres`; run `./dev setup`"),
    }
}

/// Removes a lock file that a killed server left. Postgres does so itself, but not while the killed one's pid still exists, and where
/// nobody reaps orphans (a container whose process 1 does not) it exists for ever. Waits until no process of that server works in the folder.
async fn remove_stale_lock(data: &Path) -> Result<()> {
    let at_work = || -> Option<PathBuf> {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path().join("cwd"));
        processes.into_iter().find(|cwd| fs::read_link(cwd).is_ok_and(|folder| folder == data))
    };
    probe::wait_for("the former Postgres server's processes to end", STOP, async || at_work().is_none().then_some(())).await?;
    match fs::remove_file(data.join("postmaster.pid")) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).context("remove postmaster.pid"),
        _ => Ok(()),
    }
}

/// The program, behind setpriv (which execs it: same pid) when it must run as another user.
fn command(user: Option<&RunAs>, program: &Path) -> Command {
    let mut command = match user {
        None => Command::new(program),
        Some(user) => {
            let mut command = Command::new("setpriv");
            command.arg(format!("--reuid={}", user.uid)).arg(format!("--regid={}", user.gid)).args(["--init-groups", "--"]).arg(program);
            command
        }
    };
    command.current_dir("/").env("LC_ALL", "C.UTF-8");
    for (key, _) in std::env::vars_os().filter(|(key, _)| key.to_string_lossy().starts_with("PG")) {
        command.env_remove(key);
    }
    command
}

/// The folder that holds `data`, owned by the user that Postgres runs as: below the wanted one, or under /var/tmp when that user cannot get there.
fn data_parent(dir: &Path, user: Option<&RunAs>) -> Result<PathBuf> {
    let wanted = dir.join("postgres");
    let Some(user) = user else {
        fs::create_dir_all(&wanted).with_context(|| format!("make {}", wanted.display()))?;
        return Ok(wanted);
    };
    let reachable = command(Some(user), Path::new("test")).arg("-x").arg(dir).status().context("run setpriv")?.success();
    let parent = if reachable { wanted } else { PathBuf::from(format!("/var/tmp/towpath-postgres-{}", random_hex::<8>()?)) };
    fs::create_dir_all(&parent).with_context(|| format!("make {}", parent.display()))?;
    fs::set_permissions(&parent, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
    std::os::unix::fs::chown(&parent, Some(user.uid), Some(user.gid))?;
    Ok(parent)
}
