//! What many say at once is what each would have said alone, and a bad member spoils nothing for the others.

use anyhow::{Context, Result, ensure};
use towpath_agent::start::start_all;
use towpath_chassis::Error;
use towpath_faults::{Life, World, life};
use towpath_run::{
    accept, admission,
    report::{self, Greeting, Report, Reporter},
};
use towpath_schemas::{
    ErrorCode,
    agent::AgentDefinition,
    body::NewRun,
    guest::{SteerEnd, SteerState},
    id::SteerId,
};

const MANY: usize = 12;

/// Runs of one tenant that are all starting.
async fn many(world: &World) -> Result<Vec<Life>> {
    let chassis = &world.first.chassis;
    let first = world.ready().await?;
    let mut work = chassis.begin().await?;
    admission::register_pool(&mut work, life::POOL, "process", "local", 100).await?;
    work.commit().await?;
    let definition: AgentDefinition = serde_json::from_value(serde_json::json!({ "name": "worker", "command": ["/bin/true"] }))?;
    towpath_agent::put(chassis, first.tenant, first.principal, &definition, None).await?;
    let start = |_| {
        let request = NewRun { agent: "worker".to_owned(), prompt: "work".to_owned(), ..NewRun::default() };
        towpath_agent::start::Start::new(chassis, first.tenant, first.principal, request, None, None)
    };
    let batch = (0..MANY).map(start).collect::<Result<Vec<_>, _>>()?;
    let mut lives = Vec::new();
    for answer in start_all(chassis, batch).await {
        lives.push(Life { run: answer.map_err(Error::from)?.run, ..first.clone() });
    }
    admission::admit(chassis, life::POOL).await?;
    Ok(lives)
}

async fn state(world: &World, life: &Life) -> Result<String> {
    Ok(towpath_run::view::run(world.db(), life.tenant, life.run).await?.state.to_string())
}

#[tokio::test]
async fn hellos_of_one_batch_are_each_answered_for_themselves() -> Result<()> {
    let world = World::start().await?;
    let lives = many(&world).await?;
    let chassis = &world.first.chassis;
    let mut batch: Vec<_> = lives.iter().map(|life| life.hello(chassis)).collect();
    // Another supervisor of the first epoch, the same one once more, one with a wrong token, one of an epoch that never was.
    batch.push(lives[0].impostor().hello(chassis));
    batch.push(lives[1].hello(chassis));
    let mut forged = lives[2].impostor().hello(chassis);
    forged.token = Some("0".repeat(64));
    batch.insert(0, forged);
    let mut never = lives[3].hello(chassis);
    never.epoch = 7;
    batch.push(never);
    let greetings = report::hellos(chassis, &batch).await;
    let welcome: Vec<bool> = greetings.iter().map(|greeting| matches!(greeting, Ok(Greeting::Welcome { .. }))).collect();
    let expected: Vec<bool> = std::iter::once(false).chain(std::iter::repeat_n(true, MANY)).chain([false, true, false]).collect();
    ensure!(welcome == expected, "{greetings:?}");
    for life in &lives {
        ensure!(state(&world, life).await? == "running", "{} is {}", life.run, state(&world, life).await?);
    }
    Ok(())
}

#[tokio::test]
async fn a_sandbox_that_was_given_up_meanwhile_takes_no_other_hello_with_it() -> Result<()> {
    let world = World::start().await?;
    let lives = many(&world).await?;
    let chassis = &world.first.chassis;
    // Between the look at its credentials and the binding its host proved that it is gone: the run's row does not know yet.
    sqlx::query("create function vanish() returns trigger language plpgsql as $$ begin if old.run_id = (select min(run_id::text)::uuid from sandbox) then return null; end if; return new; end $$")
        .execute(world.db())
        .await?;
    sqlx::query("create trigger vanish before update on sandbox for each row when (new.state = 'bound') execute function vanish()")
        .execute(world.db())
        .await?;
    let hellos: Vec<_> = lives.iter().map(|life| life.hello(chassis)).collect();
    let greetings = report::hellos(chassis, &hellos).await;
    let mut lost = lives.iter().zip(&greetings).filter(|(_, greeting)| matches!(greeting, Ok(Greeting::Fenced(_))));
    let (life, _) = lost.next().context("nobody was fenced")?;
    ensure!(lost.next().is_none(), "{greetings:?}");
    ensure!(state(&world, life).await? == "starting", "a move without its binding was committed");
    ensure!(greetings.iter().filter(|greeting| matches!(greeting, Ok(Greeting::Welcome { .. }))).count() == MANY - 1, "{greetings:?}");
    Ok(())
}

#[tokio::test]
async fn reports_of_one_batch_do_what_each_would_do_alone() -> Result<()> {
    let world = World::start().await?;
    let lives = many(&world).await?;
    let chassis = &world.first.chassis;
    for life in &lives {
        world.greet(life).await?;
    }
    let mut steers: Vec<SteerId> = Vec::new();
    for life in &lives {
        steers.push(accept::steer(chassis, &life.steer("turn left")?).await?.0);
    }
    let mut batch: Vec<(Reporter, Report)> = Vec::new();
    for (life, steer) in lives.iter().zip(&steers) {
        batch.push((life.reporter(), life::step("started")));
        batch.push((life.reporter(), Report::SteersSent(vec![*steer])));
        batch.push((life.reporter(), Report::Steers(vec![SteerEnd { steer: *steer, state: SteerState::Read }])));
        batch.push((life.reporter(), life::result("first")));
        batch.push((life.reporter(), life::result("second")));
        batch.push((life.impostor().reporter(), life::result("lies")));
        batch.push((life.impostor().reporter(), life::ended(9)));
    }
    let answers = report::reports(chassis, &batch).await;
    for ((reporter, report), answer) in batch.iter().zip(&answers) {
        let honest = reporter.incarnation == lives[0].incarnation;
        let answer = *answer.as_ref().map_err(|problem| anyhow::anyhow!("{report:?}: {}", problem.detail))?;
        ensure!(answer == honest || matches!(report, Report::Ended { .. }), "{report:?} of {reporter:?}: {answer}");
    }
    let ends: Vec<(Reporter, Report)> = lives.iter().map(|life| (life.reporter(), life::ended(0))).collect();
    report::reports(chassis, &ends).await.into_iter().collect::<Result<Vec<_>, _>>().map_err(Error::from)?;
    for (life, steer) in lives.iter().zip(&steers) {
        let run = towpath_run::view::run(world.db(), life.tenant, life.run).await?;
        ensure!(run.state.to_string() == "finishing" && run.result.as_ref().is_some_and(|result| result.text == "first"), "{run:?}");
        let kept = towpath_steer::by_id(world.db(), life.tenant, *steer).await?.context("the steer")?;
        ensure!(kept.state == SteerState::Read, "{kept:?}");
        let history: Vec<i64> = sqlx::query_scalar("select revision from run_history where run_id = $1 order by revision")
            .bind(life.run.uuid())
            .fetch_all(world.db())
            .await?;
        let whole: Vec<i64> = (1..=history.len() as i64).collect();
        ensure!(history == whole && run.revision == history.len() as i64, "revisions {history:?}, the run is at {}", run.revision);
    }
    Ok(())
}

#[tokio::test]
async fn a_report_that_the_database_refuses_spoils_no_other_one() -> Result<()> {
    let world = World::start().await?;
    let lives = many(&world).await?;
    let chassis = &world.first.chassis;
    for life in &lives {
        world.greet(life).await?;
    }
    sqlx::query("alter table run_result add constraint no_poison check (text <> 'poison')").execute(world.db()).await?;
    let batch: Vec<(Reporter, Report)> =
        lives.iter().enumerate().map(|(place, life)| (life.reporter(), life::result(if place == 5 { "poison" } else { "done" }))).collect();
    let answers = report::reports(chassis, &batch).await;
    for (place, answer) in answers.iter().enumerate() {
        match answer {
            Ok(heard) => ensure!(place != 5 && *heard, "{place}: {heard}"),
            Err(problem) => ensure!(place == 5 && problem.code == ErrorCode::Internal.code(), "{place}: {}", problem.detail),
        }
    }
    let kept: i64 = sqlx::query_scalar("select count(*) from run_result").fetch_one(world.db()).await?;
    ensure!(kept == MANY as i64 - 1, "{kept} results");
    Ok(())
}
