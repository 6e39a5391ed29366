#![doc = include_str!("../README.md")]

mod memory;
mod process;
mod receiver;
pub mod terminal;

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
pub use memory::Memory;
pub use process::{Process, peak_memory};
pub use receiver::{Received, Receiver};
use reqwest::{Client, Method, StatusCode};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use sqlx::{PgPool, Row};
use stage::{NatsLease, Options, S3Access, Servers, wait_for};
use tempfile::TempDir;
pub use terminal::{AtTerminal, Viewer};

/// How long anything may take that is expected to happen.
pub const SOON: Duration = Duration::from_secs(60);

/// Servers that a world stands on; a test that breaks them brings its own.
pub struct Ground {
    pub database_url: String,
    pub nats_url: String,
    pub s3: S3Access,
    lease: Option<NatsLease>,
}

impl Ground {
    /// A database, a NATS account and a bucket of the test run's servers.
    pub async fn shared() -> Result<Self> {
        let nats = stage::fresh_nats().await?;
        Ok(Self {
            database_url: stage::fresh_database().await?,
            nats_url: nats.url.clone(),
            s3: stage::fresh_bucket().await?,
            lease: Some(nats),
        })
    }

    /// Servers of a test that breaks them; they end when they are dropped.
    pub async fn own_servers() -> Result<(TempDir, Servers, Self)> {
        let folder = tempfile::Builder::new().prefix("towpath-servers-").tempdir_in("/tmp")?;
        std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        let servers = Servers::start(Options::new(folder.path())).await?;
        let ground = Self::own(servers.database_url(), servers.nats_url(), servers.s3());
        Ok((folder, servers, ground))
    }

    pub fn own(database_url: String, nats_url: String, s3: S3Access) -> Self {
        Self { database_url, nats_url, s3, lease: None }
    }
}

/// A running Towpath.
pub struct World {
    pub client: Client,
    pub url: String,
    pub token: String,
    pub tenant: uuid::Uuid,
    pub db: PgPool,
    pub env: HashMap<String, String>,
    pub state: PathBuf,
    processes: Arc<Mutex<BTreeMap<String, Process>>>,
    folder: TempDir,
    _lease: Option<NatsLease>,
}

impl World {
    /// One process with all roles, eight slots.
    pub async fn start() -> Result<Self> {
        let world = Self::prepare(Ground::shared().await?, &[]).await?;
        world.spawn("all", &["dev"])?;
        world.ready().await?;
        Ok(world)
    }

    /// Everything but processes. `extra` adds to the environment of all of them.
    pub async fn prepare(ground: Ground, extra: &[(&str, &str)]) -> Result<Self> {
        // Another test of the same process may have done it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::Builder::new().prefix("towpath-journey-").tempdir_in("/tmp")?;
        // The commands of sandboxes run as other users and must reach their workspaces.
        std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o711))?;
        let state = folder.path().join("state");
        std::fs::create_dir(&state)?;
        std::fs::set_permissions(&state, std::os::unix::fs::PermissionsExt::from_mode(0o711))?;
        let port = stage::free_port()?;
        let supervisor = std::env::var("TOWPATH_SUPERVISOR").context("TOWPATH_SUPERVISOR is not set: run tests by `./dev test`")?;
        let state_text = state.display().to_string();
        let listen = format!("127.0.0.1:{port}");
        let gateway = format!("ws://{listen}");
        let master_key = "5a".repeat(32);
        let pairs = [
            ("TOWPATH_DATABASE_URL", ground.database_url.as_str()),
            ("TOWPATH_NATS_URL", &ground.nats_url),
            ("TOWPATH_S3_ENDPOINT", &ground.s3.endpoint),
            ("TOWPATH_S3_REGION", &ground.s3.region),
            ("TOWPATH_S3_BUCKET", &ground.s3.bucket),
            ("TOWPATH_S3_ACCESS_KEY", &ground.s3.access_key),
            ("TOWPATH_S3_SECRET_KEY", &ground.s3.secret_key),
            ("TOWPATH_MASTER_KEY", &master_key),
            ("TOWPATH_STATE_DIR", &state_text),
            ("TOWPATH_SUPERVISOR", &supervisor),
            ("TOWPATH_LISTEN", &listen),
            ("TOWPATH_GATEWAY_URL", &gateway),
            ("TOWPATH_WEBHOOK_ALLOW", "127.0.0.0/8"),
            ("TOWPATH_OUTPUT_STREAM_BYTES", "268435456"),
        ];
        let env: HashMap<String, String> = pairs.iter().chain(extra).map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let db = PgPool::connect(&ground.database_url).await?;
        towpath_chassis::db::migrate(&db).await?;
        let client = Client::builder().no_proxy().timeout(Duration::from_secs(90)).build()?;
        let mut world = Self {
            client,
            url: format!("http://{listen}"),
            token: String::new(),
            tenant: uuid::Uuid::nil(),
            db,
            env,
            state,
            processes: Arc::default(),
            folder,
            _lease: ground.lease,
        };
        let (tenant, token) = world.make_tenant("first").await?;
        (world.tenant, world.token) = (tenant, token);
        Ok(world)
    }

    /// A tenant with a principal, and a token of all scopes for it.
    pub async fn make_tenant(&self, name: &str) -> Result<(uuid::Uuid, String)> {
        let secret = format!("tp_{}", hex::encode(Sha256::digest(name.as_bytes())));
        let (tenant, principal, token) = (
            towpath_schemas::TenantId::mint().uuid(),
            towpath_schemas::PrincipalId::mint().uuid(),
            towpath_schemas::TokenId::mint().uuid(),
        );
        sqlx::query("insert into tenant (id, name) values ($1, $2)").bind(tenant).bind(name).execute(&self.db).await?;
        sqlx::query("insert into principal (id, tenant_id, kind, name) values ($1, $2, 'user', 'tester')")
            .bind(principal)
            .bind(tenant)
            .execute(&self.db)
            .await?;
        sqlx::query("insert into token (id, tenant_id, principal_id, sha256, scopes, expires_at) values ($1, $2, $3, $4, array['runs', 'admin', 'terminal'], now() + interval '1 day')")
            .bind(token)
            .bind(tenant)
            .bind(principal)
            .bind(Sha256::digest(secret.as_bytes()).to_vec())
            .execute(&self.db)
            .await?;
        Ok((tenant, secret))
    }

    /// Starts a process under a name of the test's.
    pub fn spawn(&self, name: &str, arguments: &[&str]) -> Result<()> {
        self.spawn_with(name, arguments, &[])
    }

    pub fn spawn_with(&self, name: &str, arguments: &[&str], extra: &[(&str, &str)]) -> Result<()> {
        let mut env = self.env.clone();
        env.extend(extra.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())));
        let process = Process::spawn(arguments, &env, &self.folder.path().join(format!("{name}.log")))?;
        self.lock().insert(name.to_owned(), process);
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Process>> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with a process.
    pub fn process<T>(&self, name: &str, what: impl FnOnce(&mut Process) -> Result<T>) -> Result<T> {
        let mut processes = self.lock();
        what(processes.get_mut(name).with_context(|| format!("no process {name}"))?)
    }

    /// Notes from now on the highest memory of every process, of those that are killed too.
    pub fn watch_memory(&self) -> Memory {
        Memory::watch(self.processes.clone(), self.state.clone())
    }

    pub fn kill(&self, name: &str) -> Result<()> {
        let process = self.lock().remove(name).with_context(|| format!("no process {name}"))?;
        process.kill()
    }

    pub fn logs(&self) -> String {
        self.lock().iter().map(|(name, process)| format!("--- {name}\n{}\n", tail(&process.log(), 12_000))).collect()
    }

    /// Waits until the API answers that everything is there.
    pub async fn ready(&self) -> Result<()> {
        let url = format!("{}/readyz", self.url);
        wait_for("readiness", SOON, async || {
            self.client.get(&url).send().await.ok().filter(|answer| answer.status().is_success()).map(|_| ())
        })
        .await
        .with_context(|| self.logs())
    }

    /// A request by the first tenant's token; the answer's status and JSON (null when it is none).
    pub async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Result<(StatusCode, Value)> {
        self.call_as(&self.token, method, path, body).await
    }

    pub async fn call_as(&self, token: &str, method: Method, path: &str, body: Option<&Value>) -> Result<(StatusCode, Value)> {
        let mut request = self.client.request(method, format!("{}{path}", self.url)).bearer_auth(token);
        if let Some(body) = body {
            request = request.json(body);
        }
        let answer = request.send().await?;
        let status = answer.status();
        let bytes = answer.bytes().await?;
        Ok((status, serde_json::from_slice(&bytes).unwrap_or(Value::Null)))
    }

    pub async fn get(&self, path: &str) -> Result<Value> {
        let (status, value) = self.call(Method::GET, path, None).await?;
        ensure!(status.is_success(), "GET {path}: {status} {value}");
        Ok(value)
    }

    /// Applies an agent that runs a command, with more of the definition beside.
    pub async fn agent(&self, name: &str, command: &[&str], more: Value) -> Result<()> {
        let mut definition = json!({ "name": name, "command": command });
        for (key, value) in more.as_object().into_iter().flatten() {
            definition[key] = value.clone();
        }
        self.apply(&definition).await
    }

    /// Applies an example agent of `deploy/agents`.
    pub async fn example(&self, name: &str) -> Result<()> {
        let path = stage::checkout(&format!("deploy/agents/{name}.toml"));
        let definition: Value = toml::from_str(&std::fs::read_to_string(path)?)?;
        self.apply(&definition).await
    }

    async fn apply(&self, definition: &Value) -> Result<()> {
        let name = definition["name"].as_str().context("name")?;
        let (status, answer) = self.call(Method::PUT, &format!("/v1/agents/{name}"), Some(definition)).await?;
        ensure!(status.is_success(), "PUT agent: {status} {answer}");
        Ok(())
    }

    /// Starts a run; its id.
    pub async fn run(&self, agent: &str, prompt: &Value) -> Result<String> {
        let prompt = prompt.as_str().map_or_else(|| prompt.to_string(), str::to_owned);
        self.start_run(json!({ "agent": agent, "prompt": prompt })).await
    }

    pub async fn start_run(&self, body: Value) -> Result<String> {
        let (status, answer) = self.call(Method::POST, "/v1/runs", Some(&body)).await?;
        ensure!(status == StatusCode::CREATED, "POST run: {status} {answer}");
        Ok(answer["id"].as_str().context("id")?.to_owned())
    }

    /// The run once it has ended.
    pub async fn ended(&self, run: &str) -> Result<Value> {
        self.ended_within(run, SOON).await
    }

    pub async fn ended_within(&self, run: &str, limit: Duration) -> Result<Value> {
        self.until(run, limit, |value| matches!(value["state"].as_str(), Some("succeeded" | "failed" | "canceled" | "timed_out"))).await
    }

    /// The run once it looks as wanted. Answers that fail meanwhile are waited out.
    pub async fn until(&self, run: &str, limit: Duration, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let mut last = Value::Null;
        let deadline = tokio::time::Instant::now() + limit;
        loop {
            if let Ok(value) = self.get(&format!("/v1/runs/{run}?wait=1s")).await {
                if wanted(&value) {
                    return Ok(value);
                }
                last = value;
            }
            if tokio::time::Instant::now() > deadline {
                anyhow::bail!("{run} is not as wanted after {limit:?}: {last}\n{}", self.logs());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The run's transcript as it was printed.
    pub async fn raw(&self, run: &str) -> Result<Vec<u8>> {
        self.transcript(run, "format=raw").await
    }

    pub async fn transcript(&self, run: &str, query: &str) -> Result<Vec<u8>> {
        let answer = self.client.get(format!("{}/v1/runs/{run}/transcript?{query}", self.url)).bearer_auth(&self.token).send().await?;
        ensure!(answer.status().is_success(), "transcript: {}", answer.status());
        Ok(answer.bytes().await?.to_vec())
    }

    /// The same once the run has ended.
    pub async fn transcript_when_ended(&self, run: &str, query: &str) -> Result<Vec<u8>> {
        self.ended(run).await?;
        self.transcript(run, query).await
    }

    /// The object store, to break what is in it.
    pub async fn store(&self) -> Result<towpath_chassis::store::Store> {
        Ok(towpath_chassis::store::Store::connect(&towpath_chassis::Config::from_map(&self.env)?).await?)
    }

    pub async fn steer(&self, run: &str, message: &str) -> Result<(StatusCode, Value)> {
        self.call(Method::POST, &format!("/v1/runs/{run}/steers"), Some(&json!({ "message": message }))).await
    }

    pub async fn upload(&self, name: &str, bytes: Vec<u8>) -> Result<(StatusCode, Value)> {
        let answer =
            self.client.post(format!("{}/v1/files", self.url)).query(&[("name", name)]).bearer_auth(&self.token).body(bytes).send().await?;
        let status = answer.status();
        Ok((status, answer.json().await.unwrap_or(Value::Null)))
    }

    /// The host's view of a session's workspace.
    pub fn workspace(&self, session: &str) -> PathBuf {
        self.state.join("workspaces").join(session)
    }

    /// A backup of the database, as SQL that brings it back.
    pub fn dump(&self) -> Result<String> {
        let done = self.postgres_tool("pg_dump")?.args(["--clean", "--if-exists"]).arg(&self.env["TOWPATH_DATABASE_URL"]).output()?;
        ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Ok(String::from_utf8(done.stdout)?)
    }

    /// Brings a backup back. Nobody of Towpath may run.
    pub fn restore(&self, backup: &str) -> Result<()> {
        let path = self.folder.path().join("backup.sql");
        std::fs::write(&path, backup)?;
        let done = self
            .postgres_tool("psql")?
            .args(["--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1", "--file"])
            .arg(&path)
            .arg(&self.env["TOWPATH_DATABASE_URL"])
            .output()?;
        ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Ok(())
    }

    fn postgres_tool(&self, name: &str) -> Result<std::process::Command> {
        Ok(std::process::Command::new(stage::postgres_bin()?.join(name)))
    }

    /// Runs one command of the server to its end; what it printed.
    pub fn command(&self, arguments: &[&str]) -> Result<String> {
        process::once(arguments, &self.env)
    }

    /// One number from the database.
    pub async fn count(&self, sql: &'static str) -> Result<i64> {
        Ok(sqlx::query(sql).fetch_one(&self.db).await?.get(0))
    }

    /// Nothing may be left: fails on outbox rows, slots, held workspaces, sandboxes, unfinished records and supervisors.
    pub async fn finish(self) -> Result<()> {
        let left = [
            ("outbox rows", "select count(*) from outbox"),
            ("slots", "select count(*) from slot"),
            ("held workspaces", "select count(*) from workspace where run_id is not null"),
            ("sandboxes", "select count(*) from sandbox where state <> 'gone'"),
            ("open transcripts", "select count(*) from transcript where state <> 'closed'"),
            ("unsettled runs", "select count(*) from run where ended_at is null"),
            ("open steers", "select count(*) from steer where state in ('queued', 'sent', 'written')"),
            ("dead letters", "select count(*) from dead"),
            ("failed attempts", "select count(*) from attempt"),
        ];
        for (what, sql) in left {
            let waited = wait_for(what, SOON, async || self.count(sql).await.ok().filter(|count| *count == 0)).await;
            ensure!(waited.is_ok(), "{what} are left: {:?}\n{}", self.count(sql).await, self.logs());
        }
        wait_for("supervisors to leave", SOON, async || supervisors(&self.state).is_empty().then_some(()))
            .await
            .with_context(|| self.logs())?;
        Ok(())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Whoever watches their memory holds the list, too.
        self.lock().clear();
        for pid in supervisors(&self.state) {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                // It may have left meanwhile.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
    }
}

/// Supervisors whose sandboxes are in this state folder.
pub fn supervisors(state: &Path) -> Vec<i32> {
    let wanted = state.display().to_string();
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line);
            line.contains("towpath-supervisor") && line.contains(&wanted)
        })
        .collect()
}

fn tail(text: &str, most: usize) -> &str {
    let mut from = text.len().saturating_sub(most);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    &text[from..]
}

/// SHA-256 in hex.
pub fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}
