//! A command came: attend to the epoch, unless this process does already or another has the lease.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use towpath_chassis::{
    Chassis,
    consume::{Handler, Outcome},
    lease,
};
use towpath_schemas::{command::Command, subject};
use uuid::Uuid;

use crate::{seal, stream::Epoch};

/// Epochs that one process seals at a time.
const MOST: usize = 512;

/// The sealers of this process.
#[derive(Clone)]
pub struct Sealers {
    owner: Uuid,
    at_work: Arc<Mutex<HashSet<Epoch>>>,
}

impl Default for Sealers {
    fn default() -> Self {
        Self { owner: lease::owner(), at_work: Arc::default() }
    }
}

impl Sealers {
    pub fn handler(&self) -> Handler {
        let sealers = self.clone();
        Handler::new("transcript", subject::SEAL_ALL, move |chassis, batch| {
            let sealers = sealers.clone();
            async move { Ok(batch.into_iter().map(|command| sealers.attend(&chassis, command)).collect()) }
        })
    }

    fn attend(&self, chassis: &Chassis, command: Command) -> Outcome {
        let Command::Seal { tenant, run, epoch } = command else { return Outcome::Done };
        let of = Epoch { tenant, run, epoch };
        {
            let mut at_work = self.at_work.lock().unwrap_or_else(PoisonError::into_inner);
            if at_work.contains(&of) {
                return Outcome::Done;
            }
            if at_work.len() >= MOST {
                return Outcome::Later(Duration::from_secs(1));
            }
            at_work.insert(of);
        }
        let (sealers, chassis) = (self.clone(), chassis.clone());
        chassis.tasks.clone().spawn(async move {
            let _attended = Attended { sealers: &sealers, of };
            sealers.attend_to(&chassis, of).await;
        });
        Outcome::Done
    }

    /// Seals to the end; passing trouble is waited out under the lease, and a lost lease is somebody else's gain.
    async fn attend_to(&self, chassis: &Chassis, of: Epoch) {
        while !chassis.tasks.is_stopping() {
            match seal::run(chassis.clone(), of, self.owner).await {
                Ok(_) => return,
                Err(error) => {
                    tracing::warn!(run = %of.run, epoch = of.epoch, error = error.chain(), "sealing goes on in a moment");
                    if !chassis.tasks.sleep(Duration::from_millis(500)).await {
                        return;
                    }
                }
            }
        }
    }
}

/// Takes the epoch off the list however its task ends.
struct Attended<'a> {
    sealers: &'a Sealers,
    of: Epoch,
}

impl Drop for Attended<'_> {
    fn drop(&mut self) {
        self.sealers.at_work.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.of);
    }
}
