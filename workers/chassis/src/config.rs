//! Configuration: environment variables, read once, checked at start. A relation that is not safe refuses the start (invariant BOUNDED).

use std::{collections::HashMap, fmt, net::SocketAddr, path::PathBuf, time::Duration};

use ipnet::IpNet;
use url::Url;

use crate::{Error, Result, clock};

/// A value that is never printed.
#[derive(Clone)]
pub struct Hidden(pub String);

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

#[derive(Debug, Clone)]
pub struct Config {
    /// `postgres://user:password@host:port/database`
    pub database_url: Hidden,
    pub database_connections: u32,
    /// `nats://user:password@host:port`
    pub nats_url: Hidden,
    pub s3: S3,
    /// Newest first; 64 hex digits each. The first seals, all unseal.
    pub master_keys: Vec<Hidden>,
    /// Where the API and the gateway listen.
    pub listen: SocketAddr,
    /// Where the API takes mail, by LMTP or SMTP; nowhere when absent.
    pub mail_listen: Option<SocketAddr>,
    /// Sandboxes, spools and workspaces of this host.
    pub state_dir: PathBuf,
    /// The name of this host; its sandboxes and workspaces are nobody else's.
    pub host: String,
    /// Sandboxes that this host runs at a time.
    pub slots: u32,
    /// The static guest binary.
    pub supervisor: Option<PathBuf>,
    /// Where supervisors of this host reach a gateway, `ws://host:port`.
    pub gateway_url: String,
    /// The DNS server that mail's authors are looked up by; the system's when absent.
    pub dns: Option<SocketAddr>,
    /// Networks that webhooks may go to although they are private.
    pub webhook_allow: Vec<IpNet>,
    pub limits: Limits,
}

#[derive(Debug, Clone)]
pub struct S3 {
    /// Absent for AWS itself.
    pub endpoint: Option<Url>,
    pub region: String,
    pub bucket: String,
    pub access_key: Hidden,
    pub secret_key: Hidden,
    /// `when_supported` or `when_required`: some stores reject the newer checksum headers (field case F24).
    pub checksum_when_required: bool,
}

/// Waits and bounds, each with its unit.
#[derive(Debug, Clone)]
pub struct Limits {
    /// How long a start waits for Postgres, NATS and S3.
    pub start_wait: Duration,
    /// How long a request may wait for the database: KEPT answers 503 after it.
    pub database_wait: Duration,
    /// How long one handler may work on one batch.
    pub handler: Duration,
    /// After this an unacknowledged message is given to another worker.
    pub ack_wait: Duration,
    /// How long a SIGTERM may take.
    pub drain: Duration,
    /// Attempts of a message that fails for a reason of its own before it is laid aside.
    pub attempts: i32,
    /// From `wanted` to the settled run.
    pub settle_wanted: Duration,
    /// How long a finished run may wait for its record.
    pub seal_max: Duration,
    /// How long a supervisor stays after the end; longer than `seal_max`.
    pub linger: Duration,
    /// Output on a sandbox's disk that is not sealed yet.
    pub spool_bytes: u64,
    /// Largest input or output file.
    pub file_bytes: u64,
    /// Transcript bytes that JetStream may hold unsealed, over all runs.
    pub output_stream_bytes: i64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            start_wait: Duration::from_secs(60),
            database_wait: Duration::from_secs(2),
            handler: Duration::from_secs(20),
            ack_wait: Duration::from_secs(30),
            drain: Duration::from_secs(20),
            attempts: 20,
            settle_wanted: Duration::from_secs(15),
            seal_max: Duration::from_secs(24 * 3600),
            linger: Duration::from_secs(25 * 3600),
            spool_bytes: 1 << 30,
            file_bytes: towpath_schemas::limit::FILE_BYTES,
            output_stream_bytes: 1 << 30,
        }
    }
}

impl Limits {
    /// The waits that `TOWPATH_TIME_SCALE` shortens. Those of a record and of the supervisor that guards it stay.
    fn scaled(mut self) -> Self {
        for wait in [&mut self.handler, &mut self.ack_wait, &mut self.settle_wanted] {
            *wait = clock::scaled(*wait);
        }
        self
    }

    /// The relations that keep one message from being worked on twice.
    pub fn check(&self) -> Result<()> {
        let rules = [
            (
                self.handler < self.ack_wait,
                "TOWPATH_HANDLER_S must be below TOWPATH_ACK_WAIT_S: else a second worker starts what the first still does",
            ),
            (
                self.seal_max < self.linger,
                "TOWPATH_SEAL_MAX_S must be below TOWPATH_LINGER_S: else a supervisor leaves with the only copy of a record",
            ),
            (self.attempts > 0, "TOWPATH_ATTEMPTS must be at least 1"),
        ];
        match rules.into_iter().find(|(holds, _)| !holds) {
            Some((_, help)) => Err(Error::Config(help.to_owned())),
            None => Ok(()),
        }
    }
}

impl Config {
    pub fn from_env() -> Result<Self> {
        Self::from_map(&std::env::vars().filter(|(key, _)| key.starts_with("TOWPATH_")).collect())
    }

    pub fn from_map(env: &HashMap<String, String>) -> Result<Self> {
        let read = Reader(env);
        let scale: f64 = read.parse("TOWPATH_TIME_SCALE", 1.0)?;
        if !(0.01..=1.0).contains(&scale) {
            return Err(Error::Config(format!("TOWPATH_TIME_SCALE: {scale} is not from 0.01 to 1")));
        }
        clock::set_scale(scale);
        let defaults = Limits::default().scaled();
        let config = Self {
            database_url: Hidden(read.need("TOWPATH_DATABASE_URL")?),
            database_connections: read.parse("TOWPATH_DATABASE_CONNECTIONS", 16)?,
            nats_url: Hidden(read.need("TOWPATH_NATS_URL")?),
            s3: S3 {
                endpoint: read.optional("TOWPATH_S3_ENDPOINT")?,
                region: read.text("TOWPATH_S3_REGION", "us-east-1"),
                bucket: read.need("TOWPATH_S3_BUCKET")?,
                access_key: Hidden(read.need("TOWPATH_S3_ACCESS_KEY")?),
                secret_key: Hidden(read.need("TOWPATH_S3_SECRET_KEY")?),
                checksum_when_required: read.text("TOWPATH_S3_CHECKSUM", "when_supported") == "when_required",
            },
            master_keys: read.need("TOWPATH_MASTER_KEY")?.split(',').map(|key| Hidden(key.trim().to_owned())).collect(),
            listen: read.parse("TOWPATH_LISTEN", SocketAddr::from(([127, 0, 0, 1], 7800)))?,
            mail_listen: read.optional("TOWPATH_MAIL_LISTEN")?,
            state_dir: PathBuf::from(read.text("TOWPATH_STATE_DIR", ".towpath")),
            host: read.text("TOWPATH_HOST", "local"),
            slots: read.parse("TOWPATH_SLOTS", 8)?,
            supervisor: read.optional::<PathBuf>("TOWPATH_SUPERVISOR")?,
            gateway_url: read.text("TOWPATH_GATEWAY_URL", "ws://127.0.0.1:7800"),
            dns: read.optional("TOWPATH_DNS")?,
            webhook_allow: read.list("TOWPATH_WEBHOOK_ALLOW")?,
            limits: Limits {
                start_wait: read.seconds("TOWPATH_START_WAIT_S", defaults.start_wait)?,
                database_wait: defaults.database_wait,
                handler: read.seconds("TOWPATH_HANDLER_S", defaults.handler)?,
                ack_wait: read.seconds("TOWPATH_ACK_WAIT_S", defaults.ack_wait)?,
                drain: read.seconds("TOWPATH_DRAIN_S", defaults.drain)?,
                attempts: read.parse("TOWPATH_ATTEMPTS", defaults.attempts)?,
                settle_wanted: read.seconds("TOWPATH_SETTLE_WANTED_S", defaults.settle_wanted)?,
                seal_max: read.seconds("TOWPATH_SEAL_MAX_S", defaults.seal_max)?,
                linger: read.seconds("TOWPATH_LINGER_S", defaults.linger)?,
                spool_bytes: read.parse("TOWPATH_SPOOL_BYTES", defaults.spool_bytes)?,
                file_bytes: read.parse("TOWPATH_FILE_BYTES", defaults.file_bytes)?,
                output_stream_bytes: read.parse("TOWPATH_OUTPUT_STREAM_BYTES", defaults.output_stream_bytes)?,
            },
        };
        config.limits.check()?;
        if config.host.is_empty() || config.host != towpath_schemas::subject::token(&config.host) {
            return Err(Error::Config("TOWPATH_HOST: use ASCII letters, digits and dashes only".to_owned()));
        }
        Ok(config)
    }

    /// The pool of this host's process sandboxes.
    pub fn pool(&self) -> String {
        format!("process-{}", self.host)
    }
}

struct Reader<'a>(&'a HashMap<String, String>);

impl Reader<'_> {
    fn get(&self, key: &str) -> Option<&String> {
        self.0.get(key).filter(|value| !value.is_empty())
    }

    fn need(&self, key: &str) -> Result<String> {
        self.get(key).cloned().ok_or_else(|| Error::Config(format!("{key} is not set")))
    }

    fn text(&self, key: &str, default: &str) -> String {
        self.get(key).cloned().unwrap_or_else(|| default.to_owned())
    }

    fn optional<T: std::str::FromStr>(&self, key: &str) -> Result<Option<T>>
    where
        T::Err: fmt::Display,
    {
        self.get(key).map(|value| value.parse().map_err(|error| Error::Config(format!("{key}: {error}")))).transpose()
    }

    fn parse<T: std::str::FromStr>(&self, key: &str, default: T) -> Result<T>
    where
        T::Err: fmt::Display,
    {
        Ok(self.optional(key)?.unwrap_or(default))
    }

    fn seconds(&self, key: &str, default: Duration) -> Result<Duration> {
        let seconds = self.parse(key, default.as_secs_f64())?;
        Duration::try_from_secs_f64(seconds).map_err(|_| Error::Config(format!("{key}: {seconds} is no number of seconds")))
    }

    fn list<T: std::str::FromStr>(&self, key: &str) -> Result<Vec<T>>
    where
        T::Err: fmt::Display,
    {
        let Some(text) = self.get(key) else { return Ok(Vec::new()) };
        text.split(',').map(|part| part.trim().parse().map_err(|error| Error::Config(format!("{key}: {part}: {error}")))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(extra: &[(&str, &str)]) -> HashMap<String, String> {
        let needed = [
            "TOWPATH_DATABASE_URL",
            "TOWPATH_NATS_URL",
            "TOWPATH_S3_BUCKET",
            "TOWPATH_S3_ACCESS_KEY",
            "TOWPATH_S3_SECRET_KEY",
            "TOWPATH_MASTER_KEY",
        ];
        needed.iter().map(|key| (*key, "hush-hush")).chain(extra.iter().copied()).map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
    }

    #[test]
    fn waits_that_would_let_two_workers_do_one_thing_refuse_the_start() {
        for (key, value) in [("TOWPATH_HANDLER_S", "30"), ("TOWPATH_ACK_WAIT_S", "20"), ("TOWPATH_LINGER_S", "86400")] {
            let error = Config::from_map(&env(&[(key, value)])).expect_err(key);
            assert!(error.to_string().contains("must be below"), "{error}");
        }
        Config::from_map(&env(&[])).expect("the defaults are safe");
    }

    #[test]
    fn a_missing_value_is_named_and_a_secret_is_never_printed() {
        let mut missing = env(&[]);
        missing.remove("TOWPATH_S3_BUCKET");
        assert!(Config::from_map(&missing).expect_err("missing").to_string().contains("TOWPATH_S3_BUCKET is not set"));
        let printed = format!("{:?}", Config::from_map(&env(&[("TOWPATH_S3_BUCKET", "bucket")])).expect("config"));
        assert!(!printed.contains("hush-hush"), "{printed}");
    }
}
