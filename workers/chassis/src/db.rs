//! The pool of connections to Postgres.

use std::{
    str::FromStr,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use sqlx::{
    ConnectOptions, Connection, Executor, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};

use crate::{Config, Error, Result};

/// The migrations, compiled in. Applied by `towpath migrate` and `towpath dev` only.
pub static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("../../schemas/migrations");

/// Statements and idle transactions are bounded on the server too, so that nothing of a process that hangs holds locks for long.
const SESSION: &str =
    "set statement_timeout = '20s'; set idle_in_transaction_session_timeout = '20s'; set lock_timeout = '2s'; set timezone = 'UTC'";

pub fn options(config: &Config) -> Result<PgConnectOptions> {
    let options = PgConnectOptions::from_str(&config.database_url.0)
        .map_err(|_| Error::Config("TOWPATH_DATABASE_URL is no postgres:// URL".to_owned()))?;
    Ok(options.application_name("towpath").log_slow_statements(tracing::log::LevelFilter::Debug, Duration::from_secs(1)))
}

/// A connection that was idle for this long is asked whether it can still write.
const IDLE: Duration = Duration::from_secs(5);
/// For this long after a refusal every connection is asked before it is used.
const SUSPICION: Duration = Duration::from_secs(60);

/// When a server last refused to write because it is read-only.
static REFUSED_AT: Mutex<Option<Instant>> = Mutex::new(None);

/// A statement came back with 25006: what holds for its connection may hold for others.
pub(crate) fn suspect() {
    *REFUSED_AT.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
}

fn suspected() -> bool {
    REFUSED_AT.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|at| at.elapsed() < SUSPICION)
}

/// Connects, waiting for a server that is away up to `start_wait`.
pub async fn connect(config: &Config) -> Result<PgPool> {
    let pool = PgPoolOptions::new()
        .max_connections(config.database_connections)
        .acquire_timeout(config.limits.database_wait)
        .max_lifetime(Duration::from_secs(1800))
        .after_connect(|connection, _| {
            Box::pin(async move {
                connection.execute(SESSION).await?;
                Ok(())
            })
        })
        // A connection that a fail-over left on a read-only server answers SELECT 1 happily (field case F1). One that is used all the time is asked as soon as
        // any statement was refused for that reason.
        .before_acquire(|connection, meta| {
            Box::pin(async move {
                if meta.idle_for < IDLE && !suspected() {
                    return Ok(true);
                }
                let writable: String = sqlx::query_scalar("show transaction_read_only").fetch_one(connection).await?;
                Ok(writable == "off")
            })
        })
        .connect_lazy_with(options(config)?);
    wait_for(config).await?;
    Ok(pool)
}

/// Waits for a server that is away up to `start_wait`, and says so.
async fn wait_for(config: &Config) -> Result<()> {
    let started = Instant::now();
    let options = options(config)?;
    loop {
        let why = match tokio::time::timeout(config.limits.database_wait, PgConnection::connect_with(&options)).await {
            Ok(Ok(connection)) => return Ok(connection.close().await?),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {:?}", config.limits.database_wait),
        };
        tracing::warn!(error = why, "waiting for Postgres");
        if started.elapsed() >= config.limits.start_wait {
            return Err(Error::Config(format!("Postgres is still away after {:?}: {why}", config.limits.start_wait)));
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Brings the database to what this release needs.
pub async fn migrate(pool: &PgPool) -> Result<()> {
    MIGRATIONS.run(pool).await.map_err(|error| Error::Broken(format!("migration: {error}")))
}
