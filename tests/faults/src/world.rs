//! Two processes' worth of Towpath in one: a database, a NATS account and a bucket that nobody else uses, emptied between two performances.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result};
use sqlx::PgPool;
use stage::{NatsLease, slack::Slack};
use tempfile::TempDir;
use towpath_chassis::{Chassis, Config, db, outbox};
use towpath_journeys::Receiver;
use towpath_sandbox::{Host, process::ProcessBackend};
use towpath_schemas::{command::Command, id::RunId, subject};
use towpath_transcript::Sealers;

/// The name of the one host.
pub const HOST: &str = "local";
/// How long what was committed may take to be published.
const SOON: Duration = Duration::from_secs(20);

/// What one process of Towpath holds in memory. Dropping it and making it anew is what a crash and a restart leave.
pub struct Process {
    pub chassis: Chassis,
    pub sealers: Sealers,
    pub host: Host,
}

/// Everything that a scene plays in.
pub struct World {
    pub first: Process,
    pub second: Process,
    pub receiver: Receiver,
    pub slack: Slack,
    pub state: PathBuf,
    backend: Host,
    /// Requests that the receiver had got before this performance.
    seen: Mutex<usize>,
    /// Whether the host looks at its sandboxes by itself.
    hosted: AtomicBool,
    /// Epochs whose end record is in JetStream: they can be sealed to their end.
    ended: Mutex<BTreeMap<(RunId, i32), ()>>,
    _lease: NatsLease,
    _folder: TempDir,
}

/// All tables, in an order in which they can be emptied.
const EMPTY: &str = "delete from inbound_file; delete from inbound; delete from thread_message; delete from thread; delete from channel_address; delete from channel;
    delete from dead; delete from attempt; delete from idempotency; delete from lease; delete from timer; delete from outbox;
    delete from upload_part; delete from upload; delete from output; delete from steer_file; delete from run_file; delete from file; delete from delivery_part; delete from delivery; delete from chunk; delete from object;
    delete from transcript; delete from sandbox; delete from steer; delete from workspace; delete from slot; delete from pool; delete from run_target;
    delete from run_result; delete from run_step; delete from run_history; delete from run; delete from session; delete from agent_version;
    delete from agent; delete from token; delete from principal; delete from tenant";

impl World {
    pub async fn start() -> Result<Self> {
        Self::with(&[]).await
    }

    /// With these settings (`TOWPATH_…`) beside those that a scene needs.
    pub async fn with(settings: &[(&str, &str)]) -> Result<Self> {
        // Another test of the same process may have done it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let lease = stage::fresh_nats().await?;
        let s3 = stage::fresh_bucket().await?;
        let database_url = stage::shared()?
            .database_from(&template(), async |url| {
                let pool = PgPool::connect(&url).await?;
                db::migrate(&pool).await?;
                pool.close().await;
                Ok(())
            })
            .await?;
        let folder = tempfile::Builder::new().prefix("towpath-faults-").tempdir_in("/tmp")?;
        // The commands of sandboxes run as other users and must reach their workspaces.
        std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o711))?;
        let state = folder.path().join("state");
        let supervisor = std::env::var("TOWPATH_SUPERVISOR").context("TOWPATH_SUPERVISOR is not set: run tests by `./dev test`")?;
        let pairs = [
            ("TOWPATH_DATABASE_URL", database_url),
            ("TOWPATH_DATABASE_CONNECTIONS", "10".to_owned()),
            ("TOWPATH_NATS_URL", lease.url.clone()),
            ("TOWPATH_S3_ENDPOINT", s3.endpoint),
            ("TOWPATH_S3_REGION", s3.region),
            ("TOWPATH_S3_BUCKET", s3.bucket),
            ("TOWPATH_S3_ACCESS_KEY", s3.access_key),
            ("TOWPATH_S3_SECRET_KEY", s3.secret_key),
            ("TOWPATH_MASTER_KEY", "5a".repeat(32)),
            ("TOWPATH_STATE_DIR", state.display().to_string()),
            ("TOWPATH_SUPERVISOR", supervisor.clone()),
            ("TOWPATH_HOST", HOST.to_owned()),
            // Nobody listens there: a supervisor that is started waits for a gateway until it is killed.
            ("TOWPATH_GATEWAY_URL", format!("ws://127.0.0.1:{}", stage::free_port()?)),
            ("TOWPATH_WEBHOOK_ALLOW", "127.0.0.0/8".to_owned()),
        ];
        let more = settings.iter().map(|(key, value)| (*key, (*value).to_owned()));
        let env: HashMap<String, String> = pairs.into_iter().chain(more).map(|(key, value)| (key.to_owned(), value)).collect();
        let config = Config::from_map(&env)?;
        let backend = Host::new(ProcessBackend::new(&state, &supervisor)?);
        let first = Process::new(Chassis::start(config.clone()).await?, &backend);
        let second = Process::new(Chassis::start(config).await?, &backend);
        Ok(Self {
            first,
            second,
            receiver: Receiver::start(&["200 OK"]).await?,
            slack: Slack::start().await?,
            state,
            backend,
            seen: Mutex::new(0),
            hosted: AtomicBool::new(false),
            ended: Mutex::default(),
            _lease: lease,
            _folder: folder,
        })
    }

    pub fn db(&self) -> &PgPool {
        &self.first.chassis.db
    }

    /// Two processes that were just started, over empty servers.
    pub async fn anew(&mut self) -> Result<()> {
        self.end_supervisors().await?;
        self.reborn();
        self.hosted.store(false, Ordering::Relaxed);
        self.ended.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
        self.slack.clear();
        *self.seen.get_mut().unwrap_or_else(PoisonError::into_inner) = self.receiver.received().len();
        // In one transaction: whoever still holds a lock of the last performance is waited for.
        let mut transaction = self.db().begin().await?;
        sqlx::raw_sql(EMPTY).execute(&mut *transaction).await?;
        transaction.commit().await?;
        for stream in [subject::COMMAND, subject::OUTPUT] {
            self.first.chassis.jetstream.get_stream_no_info(stream).await?.purge().await?;
        }
        Ok(())
    }

    /// Every message that was published so far is lost.
    pub async fn lose_messages(&self) -> Result<()> {
        // But for what a scene left there on purpose, which is old.
        let young = "select count(*) from outbox where created_at > now() - interval '30 minutes'";
        let published = async || (sqlx::query_scalar::<_, i64>(young).fetch_one(self.db()).await.ok()? == 0).then_some(());
        stage::wait_for("the outbox to be published", SOON, published).await?;
        self.first.chassis.jetstream.get_stream_no_info(subject::COMMAND).await?.purge().await?;
        Ok(())
    }

    /// A command that was committed and whose publishing was missed.
    pub async fn leave_in_outbox(&self, command: &Command) -> Result<()> {
        sqlx::query("insert into outbox (subject, body, created_at) values ($1, $2, now() - interval '1 hour')")
            .bind(outbox::subject_of(command))
            .bind(serde_json::to_value(command)?)
            .execute(self.db())
            .await?;
        Ok(())
    }

    pub async fn has_runs(&self) -> Result<bool> {
        Ok(sqlx::query_scalar("select exists (select 1 from run)").fetch_one(self.db()).await?)
    }

    /// Both processes have crashed and come back: nothing of their memory is left.
    pub fn reborn(&mut self) {
        self.first = Process::new(self.first.chassis.clone(), &self.backend);
        self.second = Process::new(self.second.chassis.clone(), &self.backend);
    }

    /// The `webhook-id`s that were posted in this performance, in order.
    pub fn posts(&self) -> Vec<String> {
        let seen = *self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        self.receiver.received().iter().skip(seen).map(|post| post.headers.get("webhook-id").cloned().unwrap_or_default()).collect()
    }

    /// From now on the host looks at its sandboxes by itself, and creates what is asked for.
    pub fn host_looks(&self) {
        self.hosted.store(true, Ordering::Relaxed);
    }

    pub fn hosted(&self) -> bool {
        self.hosted.load(Ordering::Relaxed)
    }

    pub fn note_end(&self, run: RunId, epoch: i32) {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).insert((run, epoch), ());
    }

    pub fn has_end(&self, run: RunId, epoch: i32) -> bool {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&(run, epoch))
    }
}

impl Process {
    fn new(chassis: Chassis, host: &Host) -> Self {
        Self { sealers: Sealers::start(&chassis), chassis, host: host.clone() }
    }
}

/// Named after what it holds, so that a changed migration makes another one.
fn template() -> String {
    let newest = db::MIGRATIONS.iter().last();
    newest.map_or_else(
        || "faults".to_owned(),
        |migration| {
            let digest: String = migration.checksum.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
            format!("faults_{}_{digest}", migration.version)
        },
    )
}
