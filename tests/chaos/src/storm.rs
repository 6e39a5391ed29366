//! The storm: faults drawn from a seed, one after the other and now and then two at once, and how soon runs settle again after each.

use std::{
    collections::{BTreeMap, HashSet},
    sync::PoisonError,
    time::Duration,
};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{Connection, PgConnection};
use stage::Mode;
use tokio::time::{Instant, sleep};
use towpath_journeys::supervisors;

use crate::ground::{FENCE_S, Ground, ROLES, Role};

macro_rules! faults {
    ($($(#[$doc:meta])* $fault:ident = $name:literal,)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Fault { $($(#[$doc])* $fault),* }

        impl Fault {
            pub const ALL: &'static [Fault] = &[$(Fault::$fault),*];

            pub fn name(self) -> &'static str {
                match self { $(Fault::$fault => $name),* }
            }
        }
    };
}

faults! {
    KillApi = "API killed",
    KillWorker = "worker killed",
    KillSupervisor = "supervisor killed",
    StopSupervisor = "supervisor stopped for longer than a fence",
    StopApi = "API stopped for longer than a lease",
    StopWorker = "worker stopped for longer than a lease",
    KillPostgres = "Postgres killed",
    ReadOnlyPostgres = "Postgres read-only",
    CutPostgres = "connections to Postgres cut",
    CutBeforeCommit = "connection cut before a COMMIT",
    CutAfterCommit = "connection cut between a COMMIT and its answer",
    SlowPostgres = "Postgres slow",
    KillNats = "NATS killed",
    EmptyNats = "NATS emptied",
    EmptyNatsUnderSleepers = "NATS emptied while every worker is stopped",
    SilentNats = "NATS silent",
    KillS3 = "S3 killed",
    SilentS3 = "S3 silent",
    CutS3 = "connections to S3 cut",
    SlowS3 = "S3 slow",
    RefusingS3 = "S3 answers 503 SlowDown",
    LosingS3 = "answers of S3 lost after the body",
    LosingNats = "acknowledgements of NATS lost",
    CutGateway = "gateway connections cut",
    SilentGateway = "gateway silent",
    SlowGateway = "gateway slow",
    DoublingGateway = "messages of a gateway doubled",
    FullDisk = "disk full under the spools",
}

/// What one kind of fault did.
#[derive(Debug, Clone, Default)]
pub struct Told {
    pub times: usize,
    /// The longest time from the end of one until a run settled.
    pub slowest: Duration,
}

#[derive(Debug, Default)]
pub struct Weather {
    pub faults: BTreeMap<Fault, Told>,
    /// Runs whose supervisor was killed, or stopped for longer than their fence.
    pub hit: HashSet<String>,
}

/// As S3 says that it is asked too much (Amazon S3 API, "Error responses").
const SLOW_DOWN: &str = "HTTP/1.1 503 Slow Down\r\ncontent-type: application/xml\r\ncontent-length: 125\r\nconnection: close\r\n\r\n<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>";

/// How long a supervisor is stopped: longer than a fence and what is added to it.
const FROZEN: Duration = Duration::from_secs(2 * FENCE_S as u64);
/// How long a run may take to settle after a fault, before the storm goes on without it.
const PATIENCE: Duration = Duration::from_secs(20);

/// Rages until `until`.
pub async fn rage(ground: &Ground, rng: &mut fastrand::Rng, until: Instant) -> Result<Weather> {
    let mut weather = Weather::default();
    while Instant::now() < until {
        sleep(Duration::from_millis(rng.u64(200..1200))).await;
        let fault = *rng.choice(Fault::ALL).context("no fault")?;
        strike(ground, rng, fault, &mut weather).await.with_context(|| fault.name())?;
        let told = weather.faults.entry(fault).or_default();
        told.times += 1;
        // Some strike while the last one is not overcome yet.
        if rng.u32(0..4) > 0 {
            let before = Instant::now();
            if settles(ground).await {
                told.slowest = told.slowest.max(before.elapsed());
            } else {
                told.slowest = PATIENCE;
            }
        }
    }
    Ok(weather)
}

/// Waits until one more run has settled, or none is open; false when it takes too long.
async fn settles(ground: &Ground) -> bool {
    let count = async || -> Option<(i64, i64)> {
        sqlx::query_as("select count(*) filter (where ended_at is not null), count(*) filter (where ended_at is null) from run")
            .fetch_one(&ground.world.db)
            .await
            .ok()
    };
    let started = Instant::now();
    let mut before = None;
    while started.elapsed() < PATIENCE {
        if let Some((ended, open)) = count().await {
            let first = *before.get_or_insert(ended);
            if ended > first || open == 0 {
                return true;
            }
        }
        sleep(Duration::from_millis(20)).await;
    }
    false
}

fn role<'a>(rng: &mut fastrand::Rng, listens: bool) -> &'a Role {
    let roles: Vec<&Role> = ROLES.iter().filter(|role| role.listens == listens).collect();
    roles[rng.usize(0..roles.len())]
}

async fn strike(ground: &Ground, rng: &mut fastrand::Rng, fault: Fault, weather: &mut Weather) -> Result<()> {
    let moment = |rng: &mut fastrand::Rng| Duration::from_millis(rng.u64(200..1500));
    match fault {
        Fault::KillApi | Fault::KillWorker => {
            let role = role(rng, fault == Fault::KillApi);
            ground.world.kill(role.name)?;
            sleep(moment(rng)).await;
            ground.spawn(role)
        }
        Fault::StopApi | Fault::StopWorker => {
            let pid = pid_of(ground, role(rng, fault == Fault::StopApi))?;
            kill_process(pid, Signal::STOP)?;
            sleep(Duration::from_millis(2_500) + moment(rng)).await;
            Ok(kill_process(pid, Signal::CONT)?)
        }
        Fault::KillSupervisor => {
            let Some((pid, run)) = a_supervisor(ground, rng) else { return Ok(()) };
            weather.hit.extend(run);
            // It may have left at this very moment.
            let _ = kill_process(pid, Signal::KILL);
            Ok(())
        }
        Fault::StopSupervisor => {
            let Some((pid, run)) = a_supervisor(ground, rng) else { return Ok(()) };
            weather.hit.extend(run);
            if kill_process(pid, Signal::STOP).is_ok() {
                // The storm rages on meanwhile.
                ground.frozen.lock().unwrap_or_else(PoisonError::into_inner).spawn(async move {
                    sleep(FROZEN).await;
                    let _ = kill_process(pid, Signal::CONT);
                });
            }
            Ok(())
        }
        Fault::KillPostgres => {
            ground.servers.postgres.kill9()?;
            sleep(moment(rng)).await;
            ground.servers.postgres.start().await
        }
        Fault::ReadOnlyPostgres => {
            read_only(ground, true).await?;
            sleep(moment(rng)).await;
            read_only(ground, false).await
        }
        Fault::CutPostgres => {
            ground.database.cut().await;
            Ok(())
        }
        Fault::CutBeforeCommit => {
            ground.database.cut_before_commit(rng.u64(1..20));
            Ok(())
        }
        Fault::CutAfterCommit => {
            ground.database.cut_after_commit(rng.u64(1..20));
            Ok(())
        }
        Fault::SlowPostgres => through(&ground.database, Mode::Delay(Duration::from_millis(rng.u64(20..200))), moment(rng)).await,
        Fault::KillNats | Fault::EmptyNats => {
            ground.servers.nats.kill9()?;
            if fault == Fault::EmptyNats {
                ground.servers.nats.wipe()?;
            }
            sleep(moment(rng)).await;
            ground.servers.nats.start().await
        }
        // End records come and nobody seals them; whoever was about to seal or to purge sleeps over the loss.
        Fault::EmptyNatsUnderSleepers => {
            let workers: Vec<Pid> = ROLES.iter().filter(|role| !role.listens).map(|role| pid_of(ground, role)).collect::<Result<_>>()?;
            for pid in &workers {
                kill_process(*pid, Signal::STOP)?;
            }
            sleep(moment(rng)).await;
            ground.servers.nats.kill9()?;
            ground.servers.nats.wipe()?;
            ground.servers.nats.start().await?;
            for pid in &workers {
                kill_process(*pid, Signal::CONT)?;
            }
            Ok(())
        }
        Fault::SilentNats => through(&ground.nats, Mode::BlackHole, moment(rng)).await,
        Fault::KillS3 => {
            ground.servers.s3.kill9()?;
            sleep(moment(rng)).await;
            ground.servers.s3.start().await
        }
        Fault::SilentS3 => through(&ground.s3, Mode::BlackHole, moment(rng)).await,
        Fault::CutS3 => {
            ground.s3.cut().await;
            Ok(())
        }
        Fault::SlowS3 => through(&ground.s3, Mode::Throttle { bytes_per_s: 100_000 }, moment(rng)).await,
        Fault::RefusingS3 => through(&ground.s3, Mode::Answer(SLOW_DOWN), moment(rng)).await,
        Fault::LosingS3 => through(&ground.s3, Mode::LoseAnswers, moment(rng)).await,
        Fault::LosingNats => through(&ground.nats, Mode::LoseAnswers, moment(rng)).await,
        Fault::CutGateway => {
            ground.gateways[rng.usize(0..2)].cut().await;
            Ok(())
        }
        Fault::SilentGateway => through(&ground.gateways[rng.usize(0..2)], Mode::BlackHole, moment(rng) * 2).await,
        Fault::SlowGateway => through(&ground.gateways[rng.usize(0..2)], Mode::Throttle { bytes_per_s: 50_000 }, moment(rng) * 2).await,
        Fault::DoublingGateway => through(&ground.gateways[rng.usize(0..2)], Mode::Duplicate, moment(rng) * 2).await,
        Fault::FullDisk => match &ground.spools {
            Some(disk) => disk.fill(moment(rng)).await,
            None => Ok(()),
        },
    }
}

/// One of the supervisors, and its run.
fn a_supervisor(ground: &Ground, rng: &mut fastrand::Rng) -> Option<(Pid, Option<String>)> {
    let alive = supervisors(&ground.world.state);
    let pid = *rng.choice(&alive)?;
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line).into_owned();
    // All of its runs' processes have the run's id in their command line.
    let run = line.find("run_").map(|at| line[at..].chars().take(36).collect());
    Some((Pid::from_raw(pid)?, run))
}

fn pid_of(ground: &Ground, role: &Role) -> Result<Pid> {
    Pid::from_raw(i32::try_from(ground.world.process(role.name, |process| Ok(process.pid()))?)?).context("pid")
}

async fn through(proxy: &stage::Proxy, mode: Mode, time: Duration) -> Result<()> {
    proxy.set(mode).await;
    sleep(time).await;
    proxy.set(Mode::Pass).await;
    Ok(())
}

/// As after a fail-over: sessions that exist can write no more (field case F1).
async fn read_only(ground: &Ground, on: bool) -> Result<()> {
    let mut connection = PgConnection::connect(&ground.admin_url).await?;
    let setting =
        if on { "alter system set default_transaction_read_only = on" } else { "alter system reset default_transaction_read_only" };
    sqlx::raw_sql("set default_transaction_read_only = off").execute(&mut connection).await?;
    sqlx::raw_sql(setting).execute(&mut connection).await?;
    sqlx::raw_sql("select pg_reload_conf()").execute(&mut connection).await?;
    Ok(())
}
