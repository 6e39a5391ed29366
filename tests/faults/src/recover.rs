//! What makes good a crash: the relay, the sweeps and the timers, and then the handlers of what they publish. Rows are aged instead of waited for.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use futures::StreamExt;
use towpath_chassis::{Chassis, outbox, streams, timer};
use towpath_schemas::{
    command::Command,
    id::{DeliveryId, RunId},
    subject,
};

use crate::{Life, Process, World, life, roles};

/// Rounds after which a world that still changes is taken for one that never rests.
const ROUNDS: usize = 16;
/// How long a record that can be closed may take.
const SOON: Duration = Duration::from_secs(20);
/// Messages taken at a time.
const BATCH: usize = 256;

/// Everything that waits for an age has it. Timers and the next attempts of deliveries that failed are not touched: they are times, not ages.
const AGE: &str = "update outbox set created_at = created_at - interval '1 hour';
    update lease set until = now() - interval '1 second';
    update delivery set next_attempt_at = now() - interval '1 hour' where state = 'sending' or next_attempt_at <= now();
    update delivery_part set sending_at = sending_at - interval '1 hour' where sent_at is null;
    update inbound set next_attempt_at = now() - interval '1 hour' where next_attempt_at is not null;
    update object set created_at = created_at - interval '2 days', unused_at = unused_at - interval '1 hour' where state <> 'live'";

impl World {
    /// Relay, sweeps, timers and handlers, in the second process, until nothing changes any more.
    pub async fn recover(&mut self) -> Result<()> {
        let mut before = None;
        for _ in 0..ROUNDS {
            let busy = self.round().await?;
            let after = self.digest().await?;
            if !busy && before.as_ref() == Some(&after) {
                return Ok(());
            }
            before = Some(after);
        }
        bail!("no rest after {ROUNDS} rounds:\n{}", before.unwrap_or_default())
    }

    /// Whether there were messages.
    async fn round(&self) -> Result<bool> {
        sqlx::raw_sql(AGE).execute(self.db()).await?;
        let process = &self.second;
        for sweep in roles::sweeps() {
            sweep.once(&process.chassis).await.with_context(|| format!("sweep {}", sweep.name))?;
        }
        if self.hosted() {
            for sweep in roles::host_sweeps(process) {
                sweep.once(&process.chassis).await.with_context(|| format!("sweep {}", sweep.name))?;
            }
        }
        timer::fire(process.chassis.clone(), roles::timers()).await?;
        sqlx::raw_sql(AGE).execute(self.db()).await?;
        outbox::relay(process.chassis.clone()).await?;
        self.drain(process).await
    }

    /// Handles what is on the COMMAND stream; whether there was something to do.
    async fn drain(&self, process: &Process) -> Result<bool> {
        let chassis = &process.chassis;
        let consumer = streams::consumer(&chassis.jetstream, "everything", subject::COMMAND_ALL, &chassis.config).await?;
        let mut messages = consumer.fetch().max_messages(BATCH).messages().await?;
        let mut busy = false;
        while let Some(message) = messages.next().await {
            let message = message.map_err(|error| anyhow!("{error}"))?;
            busy |= self.handle(process, serde_json::from_slice(&message.payload)?).await?;
            message.ack().await.map_err(|error| anyhow!("{error}"))?;
        }
        Ok(busy)
    }

    /// Gives the handlers every message that could be on its way for this run, whether or not anything called for it. A run that waits is not admitted by this: that
    /// would be true, and another story.
    pub async fn every_message(&self, life: &Life) -> Result<()> {
        let deliveries: Vec<(sqlx::types::Uuid, sqlx::types::Uuid)> =
            sqlx::query_as("select tenant_id, id from delivery").fetch_all(self.db()).await?;
        let deliveries =
            deliveries.into_iter().map(|(tenant, delivery)| Command::Deliver { tenant: tenant.into(), delivery: delivery.into() });
        let stray = Command::Deliver { tenant: life.tenant, delivery: DeliveryId::mint() };
        let waits: bool = sqlx::query_scalar("select exists (select 1 from run where state = 'queued')").fetch_one(self.db()).await?;
        let admit = (!waits).then(|| Command::Admit { pool: life::POOL.to_owned() });
        let inbound = self.inbound().await?;
        let messages =
            [life.sealed(), life.observed(), life.seal(), life.host(), stray].into_iter().chain(admit).chain(deliveries).chain(inbound);
        for command in messages {
            self.handle(&self.second, command).await?;
        }
        Ok(())
    }

    /// A command for every message that came in.
    pub async fn inbound(&self) -> Result<Vec<Command>> {
        let rows: Vec<(sqlx::types::Uuid, sqlx::types::Uuid)> =
            sqlx::query_as("select tenant_id, id from inbound").fetch_all(self.db()).await?;
        Ok(rows.into_iter().map(|(tenant, inbound)| Command::Intake { tenant: tenant.into(), inbound: inbound.into() }).collect())
    }

    /// False for what waits for somebody else.
    async fn handle(&self, process: &Process, command: Command) -> Result<bool> {
        let name = match &command {
            Command::Admit { .. } => "admit",
            Command::Observed { .. } | Command::Sealed { .. } => "run",
            Command::Deliver { .. } => "deliver",
            Command::Intake { .. } => "intake",
            Command::Host { .. } if self.hosted() => "host-local",
            // The sandboxes of this scene are pretended; their host looks when the scene says so.
            Command::Host { .. } => return Ok(false),
            Command::Seal { run, epoch, .. } => {
                // A record that cannot be closed yet would be attended to for ever.
                if !self.can_close(*run, *epoch).await? {
                    return Ok(false);
                }
                life::handle(process, "transcript", vec![command.clone()]).await?;
                closed(&process.chassis, *run, *epoch).await?;
                return Ok(true);
            }
            Command::Unknown => bail!("a command that nobody knows"),
        };
        life::handle(process, name, vec![command]).await?;
        Ok(true)
    }

    async fn can_close(&self, run: RunId, epoch: i32) -> Result<bool> {
        let record = towpath_transcript::record(self.db(), run, epoch).await?;
        Ok(record.is_some_and(|record| match record.state {
            towpath_transcript::State::Open => self.has_end(run, epoch),
            towpath_transcript::State::Lost => true,
            towpath_transcript::State::Closed => false,
        }))
    }
}

/// Waits until a record is closed; fine when there is none.
pub async fn closed(chassis: &Chassis, run: RunId, epoch: i32) -> Result<()> {
    stage::wait_for("the record to be closed", SOON, async || {
        let record = towpath_transcript::record(&chassis.db, run, epoch).await.ok()?;
        record.is_none_or(|record| record.state == towpath_transcript::State::Closed).then_some(())
    })
    .await
}
