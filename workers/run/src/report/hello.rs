//! Hellos: who may speak for an epoch, and the one binding of an incarnation to it.

use std::collections::HashMap;

use futures::FutureExt;
use towpath_chassis::{
    Chassis, Error, Result,
    group::{Answer, halving},
    secret,
};
use towpath_sandbox::{Binding, Credential};
use towpath_schemas::{guest::Hello, id::RunId};

use super::{Greeting, Reporter, Stop};
use crate::{
    apply::{Applied, Happening, apply},
    state::On,
    table::{self, Locked, StepRow},
};

type Key = (RunId, i32);

/// Answers hellos, in order. Those that are welcome are bound once this returns.
pub async fn hellos(chassis: &Chassis, batch: &[Hello]) -> Vec<Answer<Greeting>> {
    match greet(chassis, batch).await {
        Ok(greetings) => greetings,
        Err(error) => batch.iter().map(|_| Err(error.problem())).collect(),
    }
}

async fn greet(chassis: &Chassis, batch: &[Hello]) -> Result<Vec<Answer<Greeting>>> {
    let keys: Vec<Key> = batch.iter().map(|hello| (hello.run, hello.epoch)).collect();
    let credentials = towpath_sandbox::credentials(&chassis.db, &keys).await?;
    let checked: Vec<Result<&Hello, &'static str>> = batch
        .iter()
        .map(|hello| match check(chassis, hello, credentials.get(&(hello.run, hello.epoch))) {
            None => Ok(hello),
            Some(why) => Err(why),
        })
        .collect();
    let honest: Vec<&Hello> = checked.iter().filter_map(|checked| checked.ok()).collect();
    let bound = halving(&honest, |part| bind(chassis, part).boxed()).await;
    let sealed: HashMap<Key, u64> =
        towpath_transcript::marks(&chassis.db, &keys).await?.into_iter().map(|(run, epoch, sealed)| ((run, epoch), sealed)).collect();
    let mut bound = bound.into_iter();
    Ok(checked
        .into_iter()
        .map(|checked| {
            let hello = match checked {
                Ok(hello) => hello,
                Err(why) => return Ok(Greeting::Fenced(why)),
            };
            let run = bound.next().unwrap_or_else(|| Err(Error::broken("a hello without an answer").problem()))?;
            Ok(run.map_or(Greeting::Fenced("the run has gone on without it"), |run| Greeting::Welcome {
                reporter: Reporter { tenant: run.tenant, run: run.id, epoch: hello.epoch, incarnation: hello.incarnation.clone() },
                sealed: sealed.get(&(hello.run, hello.epoch)).copied().unwrap_or(0),
                stop: stop_of(&run),
            }))
        })
        .collect())
}

/// Why a hello is not believed.
fn check(chassis: &Chassis, hello: &Hello, credential: Option<&Credential>) -> Option<&'static str> {
    let Some(credential) = credential else { return Some("there is no such sandbox") };
    let knows_token = hello.token.as_deref().is_some_and(|token| chassis.secrets.is_sandbox_token(hello.run, hello.epoch, token));
    let key_sha256 = secret::sha256(hello.key.as_bytes());
    let knows_key = credential.key_sha256.as_deref().is_some_and(|known| secret::same(known, &key_sha256));
    match &credential.incarnation {
        Some(bound) if *bound != hello.incarnation => Some("another supervisor has this epoch"),
        Some(_) if !knows_key => Some("wrong key"),
        None if !knows_token => Some("wrong token"),
        Some(_) | None if credential.unwanted => Some("the sandbox is not wanted any more"),
        Some(_) | None => None,
    }
}

/// Binds those that can be, in one transaction: the runs of the bound ones, None for those that came too late.
async fn bind(chassis: &Chassis, batch: &[&Hello]) -> Result<Vec<Option<Locked>>> {
    let mut work = chassis.begin().await?;
    let happenings: Vec<Happening> = batch
        .iter()
        .map(|hello| {
            let on = On::Bound { epoch: hello.epoch, incarnation: hello.incarnation.clone() };
            Happening::new(hello.run, on, "supervisor")
        })
        .collect();
    let applied = apply(&mut work, &happenings).await?;
    let mut runs = Vec::with_capacity(batch.len());
    let mut moved = Vec::new();
    let mut bindings = Vec::new();
    for (hello, applied) in batch.iter().zip(applied) {
        let run = match applied {
            Applied::Moved(run) => {
                moved.push(StepRow { run: run.id, epoch: hello.epoch, tenant: run.tenant, step: "connected".to_owned(), detail: None });
                Some(run)
            }
            // The same supervisor again; its identity may be completer now.
            Applied::Unchanged(run)
                if run.machine.epoch == hello.epoch && run.machine.incarnation.as_deref() == Some(&hello.incarnation) =>
            {
                Some(run)
            }
            // Fencing it would end what works.
            Applied::NotOurs => return Err(table::of_a_newer_release(hello.run)),
            Applied::Unchanged(_) | Applied::Refused(..) | Applied::NoSuchRun => None,
        };
        if run.is_some() {
            bindings.push(Binding {
                run: hello.run,
                epoch: hello.epoch,
                incarnation: hello.incarnation.clone(),
                key_sha256: secret::sha256(hello.key.as_bytes()).to_vec(),
                identity: hello.identity.clone(),
            });
        }
        runs.push(run.map(|run| *run));
    }
    let bound = towpath_sandbox::bind(&mut work, &bindings).await?;
    if let Some(late) = moved.iter().find(|step| !bound.contains(&(step.run, step.epoch))) {
        // Its sandbox was given up since it was looked at: its move must not be committed. Alone, it is all there is to drop.
        return if batch.len() == 1 {
            Ok(vec![None])
        } else {
            Err(Error::broken(format!("the sandbox of {} is not wanted any more", late.run)))
        };
    }
    table::steps(&mut work, &moved).await?;
    work.commit().await?;
    Ok(runs)
}

fn stop_of(run: &Locked) -> Option<Stop> {
    let wanted = run.machine.wanted?;
    let reason = run.machine.reason.clone().unwrap_or_else(|| wanted.word().to_owned());
    run.machine.active.then(|| Stop { grace_s: u32::try_from(run.grace_s).unwrap_or(0), reason })
}
