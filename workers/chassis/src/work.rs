//! One transaction and what goes out with it. Commands are written to the outbox by the transaction itself and published after its commit; the relay publishes
//! again what that missed. Events are only told after the commit: their listeners look at Postgres by themselves from time to time.

use std::collections::HashSet;

use sqlx::{PgConnection, Postgres, Transaction};
use towpath_schemas::{
    command::Command,
    event,
    id::{RunId, TenantId},
    subject,
};

use crate::{Chassis, Error, Result, kill, outbox, telemetry};

pub struct Work {
    transaction: Transaction<'static, Postgres>,
    commands: HashSet<Command>,
    events: Vec<(String, event::Kind)>,
    chassis: Chassis,
}

impl Work {
    pub(crate) async fn begin(chassis: &Chassis) -> Result<Self> {
        kill::point("begin").await;
        let transaction = chassis.db.begin().await?;
        Ok(Self { transaction, commands: HashSet::new(), events: Vec::new(), chassis: chassis.clone() })
    }

    pub fn db(&mut self) -> &mut PgConnection {
        &mut self.transaction
    }

    pub fn chassis(&self) -> &Chassis {
        &self.chassis
    }

    /// To be published once this transaction has committed; equal ones once.
    pub fn command(&mut self, command: Command) {
        self.commands.insert(command);
    }

    /// To be told to listeners once this transaction has committed.
    pub fn event(&mut self, tenant: TenantId, run: RunId, kind: event::Kind) {
        self.events.push((subject::event(tenant, run, kind.token()), kind));
    }

    /// Commits. After [`Error::OutcomeUnknown`] the caller has to read back what it wrote.
    pub async fn commit(mut self) -> Result<()> {
        let rows = outbox::insert(&mut self.transaction, self.commands.drain(), telemetry::traceparent()).await?;
        kill::point("commit").await;
        match tokio::time::timeout(self.chassis.config.limits.database_wait, self.transaction.commit()).await {
            Ok(result) => result.map_err(outcome)?,
            Err(_) => return Err(Error::OutcomeUnknown(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()))),
        }
        kill::point("committed").await;
        self.chassis.publisher.publish(rows);
        for (subject, kind) in self.events {
            outbox::tell(&self.chassis.nats, subject, &kind).await;
        }
        Ok(())
    }
}

/// A COMMIT that Postgres refused did not happen; one without an answer may have.
fn outcome(error: sqlx::Error) -> Error {
    match error {
        sqlx::Error::Database(refusal) if refusal.code().is_none_or(|code| !code.starts_with("57") && !code.starts_with("08")) => {
            Error::Database(sqlx::Error::Database(refusal))
        }
        other => Error::OutcomeUnknown(other),
    }
}
