//! A command came: bring this host's sandboxes of some runs to what their rows ask for. The sweep does the same for all of them.

use std::sync::Arc;

use futures::{StreamExt, stream};
use towpath_chassis::{
    Chassis, Error, Result,
    consume::{Handler, Outcome},
    kill,
};
use towpath_schemas::{
    command::Command,
    guest::SandboxSpec,
    id::{RunId, SessionId},
    subject,
};

use crate::{
    process::{CreateError, Observed, ProcessBackend},
    table::{self, Row},
};

/// Sandboxes that one host creates or looks at, at a time.
const AT_A_TIME: usize = 8;

/// Sandboxes without a row that one look names.
const STRANGERS_NAMED: usize = 20;

type Key = (RunId, i32);

/// What came of a look at one sandbox.
enum Seen {
    Present,
    Unsure,
    /// Something was done about it.
    Acted,
    /// It is gone, and nothing is left of it.
    Removed,
}

/// What a host does about its own sandboxes.
#[derive(Clone)]
pub struct Host {
    backend: Arc<ProcessBackend>,
}

impl Host {
    pub fn new(backend: ProcessBackend) -> Self {
        Self { backend: Arc::new(backend) }
    }

    pub fn handler(&self, host: &str) -> Handler {
        let own = self.clone();
        Handler::new(format!("host-{}", subject::token(host)), subject::host_all(host), move |chassis, batch| {
            let own = own.clone();
            async move {
                let runs: Vec<RunId> = batch
                    .iter()
                    .filter_map(|command| match command {
                        Command::Host { run, .. } => Some(*run),
                        _ => None,
                    })
                    .collect();
                own.attend(&chassis, Some(&runs)).await?;
                Ok(vec![Outcome::Done; batch.len()])
            }
        })
    }

    /// Removes the file tree of a session that is kept no longer.
    pub async fn remove_workspace(&self, session: SessionId) -> std::io::Result<()> {
        self.backend.remove_workspace(session).await
    }

    /// Reports what lies on this host and has no row, as after a backup was restored: a person decides what becomes of it.
    pub async fn report_strangers(&self, chassis: &Chassis) -> Result<u64> {
        let folders = self.backend.folders().await.map_err(|error| Error::broken(format!("the folder of sandboxes: {error}")))?;
        let known = table::known(&chassis.db, &folders).await?;
        let strangers: Vec<&Key> = folders.iter().filter(|key| !known.contains(key)).collect();
        for (run, epoch) in strangers.iter().take(STRANGERS_NAMED) {
            tracing::warn!(%run, epoch, "a sandbox on this host has no row; when it is certainly of no use, remove its folder");
        }
        metrics::gauge!("towpath_sandboxes_without_row", "host" => chassis.config.host.clone()).set(strangers.len() as f64);
        Ok(0)
    }

    /// Looks at the host's sandboxes, all or those of `runs`; how many were not yet as they should be.
    pub async fn attend(&self, chassis: &Chassis, runs: Option<&[RunId]>) -> Result<u64> {
        let rows = table::of_host(&chassis.db, &chassis.config.host, runs).await?;
        let looks: Vec<(Key, Result<Seen>)> = stream::iter(rows)
            .map(|row| async move { ((row.run, row.epoch), self.attend_to(chassis, row).await) })
            .buffer_unordered(AT_A_TIME)
            .collect()
            .await;
        let present: Vec<Key> = looks.iter().filter(|(_, seen)| matches!(seen, Ok(Seen::Present))).map(|(key, _)| *key).collect();
        if !present.is_empty() {
            table::present(&chassis.db, &present).await?;
        }
        let removed: Vec<Key> = looks.iter().filter(|(_, seen)| matches!(seen, Ok(Seen::Removed))).map(|(key, _)| *key).collect();
        if !removed.is_empty() {
            table::removed(&chassis.db, &removed).await?;
        }
        let mut changed = 0;
        let mut failure = None;
        for (_, seen) in looks {
            match seen {
                Ok(Seen::Acted | Seen::Removed) => changed += 1,
                Ok(Seen::Present | Seen::Unsure) => {}
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or(Ok(changed), Err)
    }

    async fn attend_to(&self, chassis: &Chassis, row: Row) -> Result<Seen> {
        match self.backend.observe(row.run, row.epoch).await {
            Observed::NeverCreated | Observed::Absent { .. } if row.gone => Ok(self.remove(&row).await),
            // It may still be told so itself, or keep trying; what it says counts no more.
            Observed::Present(_) | Observed::Unknown { .. } if row.gone => Ok(Seen::Unsure),
            Observed::NeverCreated if row.unwanted => self.gone(chassis, &row).await,
            Observed::NeverCreated if row.bound => self.unknown(chassis, &row, "its folder is not there").await,
            Observed::NeverCreated => self.create(chassis, &row).await,
            Observed::Present(_) => Ok(Seen::Present),
            Observed::Absent { proof } => {
                tracing::info!(run = %row.run, epoch = row.epoch, proof, "the sandbox is gone");
                self.gone(chassis, &row).await
            }
            Observed::Unknown { why } => self.unknown(chassis, &row, &why).await,
        }
    }

    async fn create(&self, chassis: &Chassis, row: &Row) -> Result<Seen> {
        if let Err(refused) = self.backend.check(&row.walls) {
            let mut work = chassis.begin().await?;
            table::refused(&mut work, row, "wall_unavailable", &refused.to_string()).await?;
            work.commit().await?;
            return Ok(Seen::Acted);
        }
        let spec = self.spec(chassis, row)?;
        kill::point("create sandbox").await;
        match self.backend.create(&spec).await {
            Ok(()) => {
                kill::point("sandbox created").await;
                Ok(Seen::Acted)
            }
            Err(CreateError::Refused(refused)) => {
                let mut work = chassis.begin().await?;
                table::refused(&mut work, row, "wall_unavailable", &refused.to_string()).await?;
                work.commit().await?;
                Ok(Seen::Acted)
            }
            // Whether something was made is seen at the next look.
            Err(CreateError::Unsure(why)) => Err(Error::Nats { doing: "create sandbox", detail: why }),
        }
    }

    fn spec(&self, chassis: &Chassis, row: &Row) -> Result<SandboxSpec> {
        let config = &chassis.config;
        let workspace =
            self.backend.workspace(row.session).map_err(|error| Error::broken(format!("workspace of {}: {error}", row.session)))?;
        let mut walls = row.walls.clone();
        walls.uid = self.backend.uid_for(row.session);
        Ok(SandboxSpec {
            run: row.run,
            session: row.session,
            epoch: row.epoch,
            gateway: format!("{}/sandbox", config.gateway_url.trim_end_matches('/')),
            token: chassis.secrets.sandbox_token(row.run, row.epoch),
            workspace: workspace.display().to_string(),
            walls,
            linger_s: config.limits.linger.as_secs(),
            spool_bytes: config.limits.spool_bytes,
        })
    }

    async fn gone(&self, chassis: &Chassis, row: &Row) -> Result<Seen> {
        let mut work = chassis.begin().await?;
        table::gone(&mut work, row).await?;
        work.commit().await?;
        Ok(self.remove(row).await)
    }

    /// Its folder is only litter now; what cannot be removed is tried again at the next look.
    async fn remove(&self, row: &Row) -> Seen {
        match self.backend.remove(row.run, row.epoch).await {
            Ok(()) => Seen::Removed,
            Err(error) => {
                tracing::warn!(run = %row.run, epoch = row.epoch, %error, "a sandbox's folder stays for now");
                Seen::Unsure
            }
        }
    }

    async fn unknown(&self, chassis: &Chassis, row: &Row, why: &str) -> Result<Seen> {
        tracing::warn!(run = %row.run, epoch = row.epoch, why, "nobody can tell whether the sandbox is there");
        table::unknown(&chassis.db, row).await?;
        Ok(Seen::Unsure)
    }
}
