//! The pool of connections to Postgres.

use std::{str::FromStr, time::Instant};

use sqlx::{
    ConnectOptions, Connection, Executor, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};

use crate::{Config, Error, Result};

/// The migrations, compiled in. Applied by `towpath migrate` and `towpath dev` only.
pub static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("../../schemas/migrations");

/// Statements and idle transactions are bounded on the server too, so that nothing of a process that hangs holds locks for long.
const SESSION: &str =
    "set statement_timeout = '20s'; set idle_in_transaction_session_timeout = '20s'; set lock_timeout = '10s'; set timezone = 'UTC'";

pub fn options(config: &Config) -> Result<PgConnectOptions> {
    let options = PgConnectOptions::from_str(&config.database_url.0)
        .map_err(|_| Error::Config("TOWPATH_DATABASE_URL is no postgres:// URL".to_owned()))?;
    Ok(options.application_name("towpath").log_slow_statements(tracing::log::LevelFilter::Debug, std::time::Duration::from_secs(1)))
}

/// Connects, waiting for a server that is away up to `start_wait`.
pub async fn connect(config: &Config) -> Result<PgPool> {
    let pool = PgPoolOptions::new()
        .max_connections(config.database_connections)
        .acquire_timeout(config.limits.database_wait)
        .max_lifetime(std::time::Duration::from_secs(1800))
        .after_connect(|connection, _| {
            Box::pin(async move {
                connection.execute(SESSION).await?;
                Ok(())
            })
        })
        // A connection that a fail-over left on a read-only server answers SELECT 1 happily (field case F1).
        .before_acquire(|connection, meta| {
            Box::pin(async move {
                if meta.idle_for < std::time::Duration::from_secs(5) {
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
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    }
}

/// Brings the database to what this release needs.
pub async fn migrate(pool: &PgPool) -> Result<()> {
    MIGRATIONS.run(pool).await.map_err(|error| Error::Broken(format!("migration: {error}")))
}
