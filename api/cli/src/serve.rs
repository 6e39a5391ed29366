//! The server commands: `dev`, `api`, `worker`, `migrate`, `recover`. One process can hold all roles, or any number of processes any subset.

use std::{
    fs,
    io::Write,
    net::SocketAddr,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Context;
use axum::serve::ListenerExt;
use clap::{Subcommand, ValueEnum};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};
use towpath_api::Api;
use towpath_chassis::{Chassis, Config, consume, db, idempotency, outbox, sweep, sweep::Sweep, telemetry::Telemetry, timer, timer::Timers};
use towpath_sandbox::{Host, process::ProcessBackend};
use towpath_schemas::body::NewToken;
use towpath_transcript::Sealers;

use crate::recover;

#[derive(Debug, Subcommand)]
pub enum ServeCommand {
    /// Serve the API and all workers in one process, for development; writes an admin token to the state folder
    Dev,
    /// Serve the API and the gateway
    Api,
    /// Work in some roles
    Worker {
        /// Comma-separated roles; all when left out
        #[arg(long, value_delimiter = ',', value_enum)]
        roles: Vec<Role>,
    },
    /// Bring the database to what this release needs, then exit
    Migrate,
    /// After a backup of the database was restored, and before anything else is started: fence every sandbox that it knows, and list what came after it
    Recover {
        /// Only tell what would be done
        #[arg(long)]
        dry_run: bool,
    },
}

/// What a worker process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Relay, timers and sweeps: at least one, always
    Clock,
    /// Admission, and this host's sandboxes when TOWPATH_SUPERVISOR is set
    Provision,
    /// Sealing transcripts
    Transcript,
    /// Sending results
    Deliver,
    /// Taking in messages of channels
    Intake,
}

/// How often a host says that it is there; one that was silent for 30 s gets no runs.
const HEARD: Duration = Duration::from_secs(5);
/// How often the clock looks for timers that are due.
const TIMER_IDLE: Duration = Duration::from_millis(250);

pub async fn run(command: ServeCommand) -> anyhow::Result<()> {
    let started = Instant::now();
    let telemetry = Telemetry::install(std::env::var_os("TOWPATH_LOG_TEXT").is_none())?;
    let config = Config::from_env()?;
    let result = match command {
        ServeCommand::Migrate => migrate(&config).await,
        ServeCommand::Dev => {
            migrate(&config).await?;
            let chassis = Chassis::start(config).await?;
            ensure_token(&chassis).await?;
            work(&chassis, Role::value_variants()).await?;
            serve(chassis, telemetry.metrics(), started).await
        }
        ServeCommand::Recover { dry_run } => recover::run(&Chassis::start(config).await?, dry_run).await,
        ServeCommand::Api => serve(Chassis::start(config).await?, telemetry.metrics(), started).await,
        ServeCommand::Worker { roles } => {
            let chassis = Chassis::start(config).await?;
            let roles = if roles.is_empty() { Role::value_variants().to_vec() } else { roles };
            work(&chassis, &roles).await?;
            tracing::info!(?roles, elapsed_ms = started.elapsed().as_millis(), "working");
            observe(&chassis, telemetry.metrics()).await?;
            until_asked_to_stop().await?;
            drain(&chassis).await;
            Ok(())
        }
    };
    telemetry.flush();
    result
}

async fn migrate(config: &Config) -> anyhow::Result<()> {
    let pool = db::connect(config).await?;
    db::migrate(&pool).await?;
    pool.close().await;
    Ok(())
}

/// The first start makes the operator's tenant and an admin token for it; later starts keep them.
async fn ensure_token(chassis: &Chassis) -> anyhow::Result<()> {
    let path = chassis.config.state_dir.join("token");
    if let Ok(secret) = fs::read_to_string(&path)
        && towpath_tenant::is_valid(chassis, secret.trim()).await?
    {
        return Ok(());
    }
    let tenant = towpath_tenant::ensure_tenant(chassis, "default").await?;
    let wanted = NewToken {
        principal: "developer".to_owned(),
        scopes: vec!["runs".to_owned(), "terminal".to_owned(), "admin".to_owned()],
        days: 365,
    };
    let token = towpath_tenant::create_token(chassis, tenant, &wanted).await?;
    fs::create_dir_all(&chassis.config.state_dir)?;
    write_private(&path, token.secret.as_deref().unwrap_or_default()).with_context(|| format!("writing {}", path.display()))
}

fn write_private(path: &Path, text: &str) -> anyhow::Result<()> {
    let _ = fs::remove_file(path);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    Ok(())
}

/// Starts the roles; they run until the process drains.
async fn work(chassis: &Chassis, roles: &[Role]) -> anyhow::Result<()> {
    for role in roles {
        match role {
            Role::Clock => clock(chassis),
            Role::Provision => provision(chassis).await?,
            Role::Transcript => handle(chassis, Sealers::start(chassis).handler()),
            Role::Deliver => handle(chassis, towpath_delivery::handler(towpath_channel::to_thread())),
            Role::Intake => handle(chassis, towpath_channel::handler()),
        }
    }
    Ok(())
}

fn handle(chassis: &Chassis, handler: consume::Handler) {
    let own = chassis.clone();
    chassis.tasks.keep("consumer", move || consume::run(own.clone(), handler.clone()));
}

fn sweep(chassis: &Chassis, one: Sweep) {
    let own = chassis.clone();
    chassis.tasks.keep(one.name, move || sweep::run(own.clone(), one.clone()));
}

fn clock(chassis: &Chassis) {
    let timers = towpath_channel::timers(towpath_delivery::timers(towpath_run::sweep::timers(Timers::default())));
    let (own, timers) = (chassis.clone(), timers);
    chassis.tasks.keep("timers", move || timer::run(own.clone(), timers.clone(), TIMER_IDLE));
    let of_chassis = [
        Sweep::new("outbox relay", Duration::from_secs(1), outbox::relay),
        Sweep::new("old idempotency keys", Duration::from_secs(600), idempotency::sweep),
    ];
    let rooms = [
        towpath_session::sweeps(),
        towpath_run::sweep::sweeps(),
        towpath_run::retention::sweeps(),
        towpath_sandbox::sweeps(),
        towpath_transcript::sweeps(),
        towpath_delivery::sweeps(),
        towpath_file::sweeps(),
        towpath_channel::sweeps(),
    ];
    for one in of_chassis.into_iter().chain(rooms.into_iter().flatten()) {
        sweep(chassis, one);
    }
}

async fn provision(chassis: &Chassis) -> anyhow::Result<()> {
    for handler in towpath_run::handlers() {
        handle(chassis, handler);
    }
    let config = &chassis.config;
    let Some(supervisor) = &config.supervisor else {
        tracing::info!("TOWPATH_SUPERVISOR is not set: this process admits runs and runs none itself");
        return Ok(());
    };
    anyhow::ensure!(supervisor.is_file(), "TOWPATH_SUPERVISOR: {} is no file", supervisor.display());
    let backend =
        ProcessBackend::new(&config.state_dir, supervisor).with_context(|| format!("state folder {}", config.state_dir.display()))?;
    let host = Host::new(backend);
    let mut work = chassis.begin().await?;
    towpath_run::admission::register_pool(&mut work, &config.pool(), "process", &config.host, config.slots).await?;
    work.commit().await?;
    handle(chassis, host.handler(&config.host));
    let heard = Sweep::new("this host is here", HEARD, |chassis| async move {
        towpath_run::admission::hear_pool(&chassis.db, &chassis.config.pool()).await?;
        Ok(0)
    });
    let own = host.clone();
    let workspaces = towpath_run::retention::host_sweep(move |session| {
        let host = own.clone();
        async move { host.remove_workspace(session).await }
    });
    for one in host.sweeps().into_iter().chain([heard, workspaces]) {
        sweep(chassis, one);
    }
    Ok(())
}

async fn serve(chassis: Chassis, metrics: PrometheusHandle, started: Instant) -> anyhow::Result<()> {
    let listener = TcpListener::bind(chassis.config.listen).await.with_context(|| format!("TOWPATH_LISTEN {}", chassis.config.listen))?;
    let api = Api::new(chassis.clone(), Some(metrics));
    if let Some(address) = chassis.config.mail_listen {
        let listener = TcpListener::bind(address).await.with_context(|| format!("TOWPATH_MAIL_LISTEN {address}"))?;
        tracing::info!(listen = %listener.local_addr()?, "taking mail");
        chassis.tasks.spawn(towpath_api::mail::serve(chassis.clone(), api.inbox.clone(), listener));
    }
    tracing::info!(listen = %listener.local_addr()?, elapsed_ms = started.elapsed().as_millis(), "serving");
    let stop = chassis.tasks.stopping();
    // Small messages follow one another on a sandbox's connection; held back until the first is acknowledged they would come 40 ms late.
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY");
        }
    });
    // As a make-service, which shares the table of routes; served as it is, a router is copied for every connection.
    let service = towpath_api::router(api).into_make_service();
    let server = axum::serve(listener, service).with_graceful_shutdown(stop.cancelled_owned());
    let draining = chassis.clone();
    let limit = chassis.config.limits.drain;
    tokio::select! {
        result = async { tokio::join!(server, async { until_asked_to_stop().await?; drain(&draining).await; anyhow::Ok(()) }) } => {
            result.0?;
            result.1
        }
        // A client that never lets go does not hold up the end.
        () = async { chassis.tasks.stopping().cancelled().await; tokio::time::sleep(limit).await } => Ok(()),
    }
}

/// `/metrics` and `/healthz` of a worker, when TOWPATH_METRICS_LISTEN says where.
async fn observe(chassis: &Chassis, metrics: PrometheusHandle) -> anyhow::Result<()> {
    let Ok(address) = std::env::var("TOWPATH_METRICS_LISTEN") else { return Ok(()) };
    let address: SocketAddr = address.parse().context("TOWPATH_METRICS_LISTEN: use address:port")?;
    let listener = TcpListener::bind(address).await.with_context(|| format!("TOWPATH_METRICS_LISTEN {address}"))?;
    let router = axum::Router::new()
        .route("/healthz", axum::routing::get(|| async { "ok\n" }))
        .route("/metrics", axum::routing::get(move || async move { metrics.render() }));
    let stop = chassis.tasks.stopping();
    chassis.tasks.spawn(async move {
        if let Err(error) = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await {
            tracing::warn!(%error, "the metrics listener ended");
        }
    });
    Ok(())
}

async fn until_asked_to_stop() -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

async fn drain(chassis: &Chassis) {
    let started = Instant::now();
    let whole = chassis.tasks.drain(chassis.config.limits.drain).await;
    tracing::info!(whole, elapsed_ms = started.elapsed().as_millis(), "drained");
}
