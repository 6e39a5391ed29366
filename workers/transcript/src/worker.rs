//! A command came: attend to the epoch, unless this process does already or another has the lease.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use towpath_chassis::{
    Chassis, Result,
    consume::{Handler, Outcome},
    lease,
};
use towpath_schemas::{command::Command, subject};
use uuid::Uuid;

use crate::{commit::Commits, seal, stream::Epoch, table};

/// Epochs that one process seals at a time.
const MOST: usize = 512;

/// The sealers of this process.
#[derive(Clone)]
pub struct Sealers {
    owner: Uuid,
    commits: Commits,
    at_work: Arc<Mutex<HashSet<Epoch>>>,
}

impl Sealers {
    pub fn start(chassis: &Chassis) -> Self {
        Self { owner: lease::owner(), commits: Commits::start(chassis), at_work: Arc::default() }
    }

    pub fn handler(&self) -> Handler {
        let sealers = self.clone();
        Handler::new("transcript", subject::SEAL_ALL, move |chassis, batch| {
            let sealers = sealers.clone();
            async move { sealers.attend(&chassis, batch).await }
        })
    }

    /// Begins with the epochs that nobody attends to.
    async fn attend(&self, chassis: &Chassis, batch: Vec<Command>) -> Result<Vec<Outcome>> {
        let mut begun = Vec::new();
        let outcomes = batch.into_iter().map(|command| self.enter(command, &mut begun)).collect();
        let names: Vec<String> = begun.iter().map(|attended| table::lease_name(attended.of)).collect();
        let ours = lease::take_all(&chassis.db, &names, self.owner, seal::lease_time()).await?;
        for attended in begun.into_iter().filter(|attended| ours.contains(&table::lease_name(attended.of))) {
            let (sealers, chassis) = (self.clone(), chassis.clone());
            chassis.tasks.clone().spawn(async move { sealers.attend_to(&chassis, attended).await });
        }
        Ok(outcomes)
    }

    fn enter(&self, command: Command, begun: &mut Vec<Attended>) -> Outcome {
        let Command::Seal { tenant, run, epoch } = command else { return Outcome::Done };
        let of = Epoch { tenant, run, epoch };
        let mut at_work = self.at_work.lock().unwrap_or_else(PoisonError::into_inner);
        if at_work.len() >= MOST && !at_work.contains(&of) {
            return Outcome::Later(Duration::from_secs(1));
        }
        if at_work.insert(of) {
            begun.push(Attended { at_work: self.at_work.clone(), of });
        }
        Outcome::Done
    }

    /// Seals to the end; passing trouble is waited out under the lease, and a lost lease is somebody else's gain.
    async fn attend_to(&self, chassis: &Chassis, attended: Attended) {
        let of = attended.of;
        if chassis.tasks.is_stopping() {
            // Somebody else shall take it up at once.
            if let Err(error) = lease::release(&chassis.db, &table::lease_name(of), self.owner).await {
                tracing::debug!(error = error.chain(), "the lease runs out by itself");
            }
        }
        while !chassis.tasks.is_stopping() {
            match seal::run(chassis.clone(), self.commits.clone(), of, self.owner).await {
                Ok(_) => return,
                Err(error) => {
                    tracing::warn!(run = %of.run, epoch = of.epoch, error = error.chain(), "sealing goes on in a moment");
                    if !chassis.tasks.sleep(Duration::from_millis(500)).await {
                        return;
                    }
                }
            }
            while !chassis.tasks.is_stopping() {
                match lease::take(&chassis.db, &table::lease_name(of), self.owner, seal::lease_time()).await {
                    Ok(true) => break,
                    Ok(false) => return,
                    Err(error) => tracing::debug!(error = error.chain(), "the lease is asked for again"),
                }
                chassis.tasks.sleep(Duration::from_millis(500)).await;
            }
        }
    }
}

/// An epoch on the list of those that are attended to; off it however its task ends.
struct Attended {
    at_work: Arc<Mutex<HashSet<Epoch>>>,
    of: Epoch,
}

impl Drop for Attended {
    fn drop(&mut self) {
        self.at_work.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.of);
    }
}
