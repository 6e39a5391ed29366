//! The pull loop against a real JetStream: what is acknowledged, what comes again, what is laid aside.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use stage::wait_for;
use towpath_chassis::{
    Chassis, Error,
    consume::{self, Handler, Outcome},
    kill,
};
use towpath_faults::World;
use towpath_schemas::{command::Command, subject};

const SOON: Duration = Duration::from_secs(40);

/// How often each pool was handled, and a handler that counts; what it does is told by the pool's name.
type Counts = Arc<Mutex<BTreeMap<String, usize>>>;

fn handler(counts: &Counts) -> Handler {
    let counts = counts.clone();
    Handler::new("pull-test", subject::ADMIT_ALL, move |_, batch: Vec<Command>| {
        let counts = counts.clone();
        async move {
            let pools: Vec<String> =
                batch.iter().map(|command| if let Command::Admit { pool } = command { pool.clone() } else { String::new() }).collect();
            assert!(!pools.iter().any(|pool| pool == "panic"), "this pool makes the handler panic");
            if pools.iter().any(|pool| pool == "bad") {
                return Err(Error::broken("this pool is bad"));
            }
            let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(pools
                .into_iter()
                .map(|pool| {
                    let count = counts.entry(pool.clone()).or_default();
                    *count += 1;
                    match pool.as_str() {
                        "dead" => Outcome::Dead("nobody wants it".to_owned()),
                        "later" if *count == 1 => Outcome::Later(Duration::from_millis(100)),
                        _ => Outcome::Done,
                    }
                })
                .collect())
        }
    })
}

async fn publish(chassis: &Chassis, pool: &str) -> Result<()> {
    let command = serde_json::to_vec(&Command::Admit { pool: pool.to_owned() })?;
    chassis.jetstream.publish(subject::admit(pool), command.into()).await?.await?;
    Ok(())
}

async fn left(chassis: &Chassis) -> Result<u64> {
    Ok(chassis.jetstream.get_stream(subject::COMMAND).await?.get_info().await?.state.messages)
}

async fn until_empty(chassis: &Chassis) -> Result<()> {
    wait_for("the stream to be empty", SOON, async || (left(chassis).await.ok()? == 0).then_some(())).await
}

async fn dead(world: &World) -> Result<Vec<(String, String, i32)>> {
    Ok(sqlx::query_as("select subject, reason, attempts from dead order by subject").fetch_all(world.db()).await?)
}

/// Field cases F6 and F20.
#[tokio::test]
async fn a_bad_message_is_laid_aside_with_its_reason_and_holds_up_no_other() -> Result<()> {
    let world = World::with(&[("TOWPATH_ATTEMPTS", "2")]).await?;
    let chassis = &world.first.chassis;
    for pool in ["one", "bad", "two", "dead", "panic", "later", "three"] {
        publish(chassis, pool).await?;
    }
    chassis.jetstream.publish(subject::admit("text"), "no command".into()).await?.await?;
    let counts = Counts::default();
    chassis.tasks.spawn(consume::run(chassis.clone(), handler(&counts)));
    until_empty(chassis).await?;
    let dead = dead(&world).await?;
    let found: Vec<(&str, bool, i32)> = dead
        .iter()
        .map(|(subject, reason, attempts)| {
            let reasons = ["this pool is bad", "nobody wants it", "not a command", "panicked"];
            (subject.rsplit('.').next().unwrap_or_default(), reasons.iter().any(|known| reason.contains(known)), *attempts)
        })
        .collect();
    ensure!(found == [("bad", true, 2), ("dead", true, 1), ("panic", true, 2), ("text", true, 1)], "{dead:?}");
    let counts = counts.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let expected = [("dead", 1), ("later", 2), ("one", 1), ("three", 1), ("two", 1)];
    ensure!(counts.iter().map(|(pool, count)| (pool.as_str(), *count)).eq(expected), "{counts:?}");
    let attempts: i64 = sqlx::query_scalar("select count(*) from attempt").fetch_one(world.db()).await?;
    ensure!(attempts == 0, "{attempts} attempts are still counted");
    Ok(())
}

#[tokio::test]
async fn a_message_whose_handler_was_killed_before_the_acknowledgement_comes_again() -> Result<()> {
    let world = World::with(&[("TOWPATH_HANDLER_S", "1"), ("TOWPATH_ACK_WAIT_S", "2")]).await?;
    publish(&world.first.chassis, "one").await?;
    let counts = Counts::default();
    let fate = kill::run(0, consume::run(world.first.chassis.clone(), handler(&counts))).await;
    ensure!(matches!(fate, kill::Fate::Killed("acknowledge")), "{fate:?}");
    ensure!(left(&world.first.chassis).await? == 1, "it was acknowledged");
    let second = &world.second.chassis;
    second.tasks.spawn(consume::run(second.clone(), handler(&counts)));
    until_empty(second).await?;
    let counts = counts.lock().unwrap_or_else(PoisonError::into_inner).clone();
    ensure!(counts == BTreeMap::from([("one".to_owned(), 2)]), "{counts:?}");
    ensure!(dead(&world).await?.is_empty(), "it was laid aside");
    Ok(())
}

/// Field case F7.
#[tokio::test]
async fn a_consumer_and_a_stream_that_vanish_are_made_again() -> Result<()> {
    let world = World::start().await?;
    let chassis = &world.first.chassis;
    let counts = Counts::default();
    chassis.tasks.spawn(consume::run(chassis.clone(), handler(&counts)));
    let handled = |pool: &'static str| {
        let counts = counts.clone();
        async move {
            wait_for("the message to be handled", SOON, async || {
                counts.lock().unwrap_or_else(PoisonError::into_inner).contains_key(pool).then_some(())
            })
            .await
        }
    };
    publish(chassis, "one").await?;
    handled("one").await?;
    let stream = chassis.jetstream.get_stream(subject::COMMAND).await?;
    stream.delete_consumer("pull-test").await.context("delete the consumer")?;
    publish(chassis, "two").await?;
    handled("two").await?;
    chassis.jetstream.delete_stream(subject::COMMAND).await.context("delete the stream")?;
    wait_for("the stream to be there again", SOON, async || publish(chassis, "three").await.ok()).await?;
    handled("three").await?;
    Ok(())
}
