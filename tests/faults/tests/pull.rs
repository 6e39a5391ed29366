//! The pull loop against a real JetStream: what is acknowledged, what comes again, what is laid aside.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use stage::wait_for;
use towpath_chassis::{
    Chassis, Error,
    consume::{self, Handler, Outcome},
    dead, kill, streams,
};
use towpath_faults::{World, life, roles};
use towpath_run::view;
use towpath_schemas::{body::RunState, command::Command, subject};

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

async fn aside(world: &World) -> Result<Vec<(String, String, i32)>> {
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
    let dead = aside(&world).await?;
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
    ensure!(aside(&world).await?.is_empty(), "it was laid aside");
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

/// Short enough that a message whose handler stands still comes again soon.
const SHORT: [(&str, &str); 2] = [("TOWPATH_HANDLER_S", "1"), ("TOWPATH_ACK_WAIT_S", "2")];

/// Field case F8: whoever takes too long is ended before the message is given to another, and what was done does not come again.
#[tokio::test]
async fn a_handler_that_takes_too_long_is_ended_before_its_message_comes_again() -> Result<()> {
    let world = World::with(&SHORT).await?;
    let (begun, working, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(()), Arc::new(AtomicUsize::new(0)));
    let (begins, works, peak) = (begun.clone(), working.clone(), most.clone());
    let handler = Handler::new("pull-test", subject::ADMIT_ALL, move |_, batch: Vec<Command>| {
        let (begun, mine, most) = (begins.clone(), works.clone(), peak.clone());
        async move {
            let before = begun.fetch_add(1, Ordering::SeqCst);
            // Beside those that work, the test and the handler itself hold it.
            most.fetch_max(Arc::strong_count(&mine) - 2, Ordering::SeqCst);
            if before < 2 {
                std::future::pending::<()>().await;
            }
            Ok(vec![Outcome::Done; batch.len()])
        }
    });
    for process in [&world.first, &world.second] {
        process.chassis.tasks.spawn(consume::run(process.chassis.clone(), handler.clone()));
    }
    publish(&world.first.chassis, "slow").await?;
    until_empty(&world.first.chassis).await?;
    tokio::time::sleep(world.first.chassis.config.limits.ack_wait * 2).await;
    ensure!(begun.load(Ordering::SeqCst) == 3, "{begun:?} times begun");
    ensure!(most.load(Ordering::SeqCst) == 1, "{most:?} at a time");
    ensure!(Arc::strong_count(&working) == 2 && aside(&world).await?.is_empty(), "something is left of it");
    Ok(())
}

/// A message as a worker gets it that then falls silent.
async fn taken(chassis: &Chassis, name: &str, filter: &str) -> Result<async_nats::jetstream::Message> {
    let consumer = streams::consumer(&chassis.jetstream, name, filter, &chassis.config).await?;
    let message = wait_for("a message", SOON, async || {
        let mut batch = consumer.fetch().max_messages(1).messages().await.ok()?;
        batch.next().await?.ok()
    });
    message.await
}

/// Field case F10: the copy that was sent again is another message, so that the late word about the first one is not about it.
#[tokio::test]
async fn a_late_acknowledgement_settles_nothing_of_a_message_that_was_redriven() -> Result<()> {
    let world = World::with(&[SHORT[0], SHORT[1], ("TOWPATH_ATTEMPTS", "1")]).await?;
    let (first, second) = (&world.first.chassis, &world.second.chassis);
    publish(first, "bad").await?;
    let late = taken(first, "pull-test", subject::ADMIT_ALL).await?;
    let one = async || -> Option<i64> { sqlx::query_scalar("select id from dead").fetch_optional(world.db()).await.ok()? };
    let counts = Counts::default();
    first.tasks.spawn(consume::run(first.clone(), handler(&counts)));
    let exhausted = wait_for("the second attempt to be the last one", SOON, one).await?;
    until_empty(first).await?;
    ensure!(first.tasks.drain(SOON).await, "the first worker goes on");
    dead::redrive(second, exhausted).await?;
    wait_for("it to be sent again", SOON, async || (left(second).await.ok()? == 1).then_some(())).await?;
    late.ack().await.map_err(|error| anyhow::anyhow!("{error}"))?;
    // The server has read the acknowledgement once it answers what came after it on the same connection.
    first.nats.flush().await?;
    ensure!(left(second).await? == 1, "what was sent again is gone");
    second.tasks.spawn(consume::run(second.clone(), handler(&counts)));
    let again = wait_for("it to be handled", SOON, one).await?;
    ensure!(again != exhausted, "the same dead letter");
    Ok(())
}

/// Field case F10, from the other side: JetStream believes a late word, and the work that its message was for is done all the same, once.
#[tokio::test]
async fn a_late_acknowledgement_loses_a_message_and_no_work() -> Result<()> {
    let world = World::with(&SHORT).await?;
    let life = world.sealed().await?;
    let chassis = &world.first.chassis;
    chassis.jetstream.get_stream_no_info(subject::COMMAND).await?.purge().await?;
    let subject = towpath_chassis::outbox::subject_of(&life.sealed()).context("a subject")?;
    chassis.jetstream.publish(subject, serde_json::to_vec(&life.sealed())?.into()).await?.await?;
    let late = taken(chassis, "run", subject::RUN_ALL).await?;
    let again = taken(&world.second.chassis, "run", subject::RUN_ALL).await?;
    ensure!(again.info().map_err(|error| anyhow::anyhow!("{error}"))?.delivered == 2, "not the same message");
    late.double_ack().await.map_err(|error| anyhow::anyhow!("{error}"))?;
    ensure!(left(chassis).await? == 0, "the late word was not believed");
    let state = async || -> Result<(RunState, i64)> { Ok(view::state(world.db(), life.tenant, life.run).await?) };
    ensure!(state().await?.0 == RunState::Finishing, "an acknowledgement settled the run");
    roles::sweep(&world.first, "untold facts")?.once(chassis).await?;
    let settled = state().await?;
    ensure!(settled.0 == RunState::Succeeded, "{settled:?}");
    life::handle(&world.second, "run", vec![serde_json::from_slice(&again.payload)?]).await?;
    ensure!(state().await? == settled, "it was settled again: {:?}", state().await?);
    Ok(())
}
