//! Durable servers, Towpath's release processes, and one tenant.

use std::{
    collections::HashMap,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use sqlx::PgPool;
use stage::{Options, Servers, wait_for};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use towpath_chassis::{config::Hidden, db, secret, secret::Secrets};
use towpath_schemas::{PrincipalId, RunId, TenantId, TokenId, subject};

const SOON: Duration = Duration::from_secs(60);
pub const TOKEN: &str = "tp_bench";
/// The host that pretended sandboxes are on.
pub const HOST: &str = "bench";

pub struct Ground {
    pub db: PgPool,
    pub listen: String,
    pub nats_url: String,
    pub tenant: TenantId,
    pub principal: PrincipalId,
    pub secrets: Secrets,
    admin: PgPool,
    env: HashMap<String, String>,
    servers: Servers,
    folder: TempDir,
    show_statements: bool,
}

/// A process of Towpath, killed when this is dropped.
pub struct Process(Child);

impl Process {
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What Postgres did so far.
#[derive(Debug, Clone, Copy)]
pub struct Counts {
    pub statements: f64,
    pub commits: f64,
    pub rows: f64,
}

impl Ground {
    pub async fn start(show_statements: bool) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("towpath-bench-").tempdir()?;
        std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        let servers = Servers::start(Options::new(folder.path().join("servers"))).await?;
        let text = std::fs::read_to_string(servers.write_env()?)?;
        let mut env: HashMap<String, String> =
            text.lines().filter_map(|line| line.split_once('=')).map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        let listen = format!("127.0.0.1:{}", stage::free_port()?);
        env.insert("TOWPATH_LISTEN".to_owned(), listen.clone());
        env.insert("TOWPATH_STATE_DIR".to_owned(), folder.path().join("state").display().to_string());
        env.insert("RUST_LOG".to_owned(), "warn".to_owned());
        let db = PgPool::connect(&servers.database_url()).await?;
        db::migrate(&db).await?;
        let admin = PgPool::connect(&servers.postgres.admin_url()).await?;
        let secrets = Secrets::new(&[Hidden(env.get("TOWPATH_MASTER_KEY").cloned().context("no master key")?)])?;
        let (tenant, principal) = (TenantId::mint(), PrincipalId::mint());
        let ground =
            Self { db, listen, nats_url: servers.nats_url(), tenant, principal, secrets, admin, env, servers, folder, show_statements };
        ground.fill().await?;
        Ok(ground)
    }

    async fn fill(&self) -> Result<()> {
        let (tenant, principal) = (self.tenant.uuid(), self.principal.uuid());
        sqlx::query("insert into tenant (id, name) values ($1, 'bench')").bind(tenant).execute(&self.db).await?;
        sqlx::query("insert into principal (id, tenant_id, kind, name) values ($1, $2, 'user', 'bench')")
            .bind(principal)
            .bind(tenant)
            .execute(&self.db)
            .await?;
        sqlx::query("insert into token (id, tenant_id, principal_id, sha256, scopes, expires_at) values ($1, $2, $3, $4, array['runs', 'admin'], now() + interval '1 day')")
            .bind(TokenId::mint().uuid())
            .bind(tenant)
            .bind(principal)
            .bind(secret::sha256(TOKEN.as_bytes()).to_vec())
            .execute(&self.db)
            .await?;
        Ok(())
    }

    /// A pool for sandboxes that are pretended. Nothing is placed there any more 30 s after this was last called.
    pub async fn pool(&self, capacity: i32) -> Result<()> {
        sqlx::query("insert into pool (name, backend, host, capacity) values ('process-bench', 'process', $1, $2) on conflict (name) do update set heard_at = now()")
            .bind(HOST)
            .bind(capacity)
            .execute(&self.db)
            .await?;
        Ok(())
    }

    pub fn spawn(&self, arguments: &[&str]) -> Result<Process> {
        let binary: PathBuf = std::env::current_exe()?.with_file_name("towpath");
        let log = std::fs::File::options().create(true).append(true).open(self.folder.path().join("towpath.log"))?;
        let child = Command::new(&binary)
            .args(arguments)
            .env_clear()
            .envs(&self.env)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("start {}", binary.display()))?;
        Ok(Process(child))
    }

    /// The API, serving and with the agent that is run.
    pub async fn api(&self) -> Result<Process> {
        let process = self.spawn(&["api"])?;
        wait_for("the API", SOON, async || TcpStream::connect(&self.listen).await.ok().map(|_| ())).await?;
        let mut client = self.client().await?;
        let status = client.send("PUT", "/v1/agents/bench", r#"{"name": "bench", "command": ["/bin/true"]}"#).await?;
        ensure!((200..300).contains(&status), "PUT agent: {status}");
        Ok(process)
    }

    pub async fn client(&self) -> Result<Client> {
        let stream = TcpStream::connect(&self.listen).await?;
        stream.set_nodelay(true)?;
        Ok(Client { stream, listen: self.listen.clone(), bytes: Vec::new() })
    }

    /// Statistics come to the tables within a second of the work.
    pub async fn counts(&self) -> Result<Counts> {
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let statements = sqlx::query_scalar("select coalesce(sum(calls), 0)::float8 from pg_stat_statements join pg_database on pg_database.oid = dbid where datname = 'towpath'")
            .fetch_one(&self.admin)
            .await?;
        let (commits, rows) = sqlx::query_as("select xact_commit::float8, (tup_inserted + tup_updated + tup_deleted)::float8 from pg_stat_database where datname = 'towpath'")
            .fetch_one(&self.admin)
            .await?;
        Ok(Counts { statements, commits, rows })
    }

    /// Messages that JetStream has taken on both streams so far.
    pub async fn jetstream_messages(&self) -> Result<f64> {
        let client = stage::connect_nats(&self.nats_url).await?;
        let mut total = 0.0;
        for stream in [subject::COMMAND, subject::OUTPUT] {
            let stream = async_nats::jetstream::new(client.clone()).get_stream(stream).await?;
            total += stream.cached_info().state.last_sequence as f64;
        }
        Ok(total)
    }

    /// Statistics of single statements begin anew.
    pub async fn forget_statements(&self) -> Result<()> {
        sqlx::query("select pg_stat_statements_reset()").execute(&self.admin).await?;
        Ok(())
    }

    /// Prints what each of `runs` runs cost since then, the most time first, when that was asked for.
    pub async fn print_statements(&self, runs: usize) -> Result<()> {
        if !self.show_statements {
            return Ok(());
        }
        let rows: Vec<(f64, f64, String)> = sqlx::query_as(
            "select calls::float8, (total_exec_time + total_plan_time)::float8, query from pg_stat_statements join pg_database on pg_database.oid = dbid
             where datname = 'towpath' order by 2 desc limit 40",
        )
        .fetch_all(&self.admin)
        .await?;
        println!("calls/run  ms/call  us/run  statement");
        for (calls, ms, text) in rows {
            let runs = runs as f64;
            let text: String = text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(140).collect();
            println!("{:>9.3} {:>8.3} {:>7.1}  {text}", calls / runs, ms / calls, ms * 1000.0 / runs);
        }
        Ok(())
    }

    pub fn servers_url(&self) -> String {
        self.servers.database_url()
    }

    pub async fn stop(self) -> Result<()> {
        self.db.close().await;
        self.admin.close().await;
        drop(self.servers);
        stage::stop_recorded(&self.folder.path().join("servers"), true).await
    }
}

/// One connection that sends a request and waits for its answer: as little work as possible, for it shares the cores with what is measured.
pub struct Client {
    stream: TcpStream,
    listen: String,
    bytes: Vec<u8>,
}

impl Client {
    /// The run that the last answer shows.
    pub fn created(&self) -> Result<RunId> {
        let start = self.bytes.windows(4).position(|window| window == b"\r\n\r\n").context("no answer")?;
        let run: serde_json::Value = serde_json::from_slice(&self.bytes[start + 4..])?;
        Ok(run["id"].as_str().context("no id")?.parse()?)
    }

    /// The status of the answer; its body is read to the end.
    pub async fn send(&mut self, method: &str, path: &str, body: &str) -> Result<u16> {
        self.send_with(method, path, body, &format!("authorization: Bearer {TOKEN}\r\n")).await
    }

    /// With these header lines.
    pub async fn send_with(&mut self, method: &str, path: &str, body: &str, headers: &str) -> Result<u16> {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {}\r\n{headers}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            self.listen,
            body.len()
        );
        self.stream.write_all(request.as_bytes()).await?;
        self.bytes.clear();
        loop {
            let read = self.stream.read_buf(&mut self.bytes).await?;
            ensure!(read > 0, "the API hung up");
            let Some(head) = self.bytes.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
            let text = String::from_utf8_lossy(&self.bytes[..head]).to_ascii_lowercase();
            let length: usize = text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok()).unwrap_or(0);
            if self.bytes.len() >= head + 4 + length {
                return text.split(' ').nth(1).and_then(|status| status.parse().ok()).context("no status");
            }
        }
    }
}
