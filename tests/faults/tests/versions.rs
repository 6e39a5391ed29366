//! Two releases side by side (design section 4, "Upgrades"): what a newer one publishes and stores, met by this one. What schemas alone can tell is in `schemas/tests/samples.rs`.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stage::wait_for;
use towpath_agent::start::start_all;
use towpath_chassis::{
    Chassis, Error,
    consume::{self, Handler, Outcome},
    outbox,
    secret::sha256,
    timer,
};
use towpath_faults::{Life, World, life, roles};
use towpath_run::{
    admission,
    report::{self, Greeting},
    view,
};
use towpath_schemas::{
    agent::{AgentDefinition, Sandbox},
    body::{Run, RunState},
    command::Command,
    frame::{EndRecord, Frame, FrameKind},
    guest::{Hello, Identity, Walls},
    id::RunId,
    subject,
};
use towpath_supervisor::folder::IdentityRecord;
use towpath_transcript::chunk;

const SOON: Duration = Duration::from_secs(20);
/// What a newer release adds to an object.
const LATER: &str = r#"{"of_a_newer_release": {"type": "unheard_of"}}"#;

fn sample(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../schemas/samples/v1").join(name)
}

fn read(name: &str) -> Result<String> {
    let path = sample(name);
    fs::read_to_string(&path).with_context(|| path.display().to_string())
}

// ---- samples that other rooms write --------------------------------------------------------------------------------------------

#[test]
fn the_supervisor_writes_its_identity_as_it_is_stored() -> Result<()> {
    let text = read("folder/identity.json")?;
    let record: IdentityRecord = serde_json::from_str(&text)?;
    ensure!(serde_json::to_string_pretty(&record)? + "\n" == text, "identity.json is written otherwise now");
    let mut value: Value = serde_json::from_str(&text)?;
    value["of_a_newer_release"] = json!({ "type": "unheard_of" });
    ensure!(serde_json::from_value::<IdentityRecord>(value)? == record, "a field of a newer release is not ignored");
    Ok(())
}

#[test]
fn every_command_goes_where_it_went() -> Result<()> {
    let mut seen = 0;
    for entry in fs::read_dir(sample("command"))? {
        let value: Value = serde_json::from_str(&fs::read_to_string(entry?.path())?)?;
        let command: Command = serde_json::from_value(value["body"].clone())?;
        ensure!(outbox::subject_of(&command).as_deref() == value["subject"].as_str(), "{value}");
        seen += 1;
    }
    ensure!(seen >= 6, "{seen} samples of commands");
    Ok(())
}

/// How well it is compressed may change; that it unpacks may not.
#[test]
fn a_chunk_that_was_sealed_long_ago_unpacks() -> Result<()> {
    let frame =
        |kind, seq, payload: &[u8]| Frame { kind, epoch: 2, seq, offset: seq * 4, wall_us: seq, mono_us: seq, payload: payload.to_vec() };
    let frames = vec![frame(FrameKind::Stdout, 1, b"one\n"), frame(FrameKind::Stderr, 2, b"two\n"), frame(FrameKind::Resize, 3, b"{}")];
    let path = sample("chunk/chunk.hex");
    if !path.exists() && std::env::var_os("TOWPATH_BLESS").is_some() {
        let body = chunk::pack(&frames)?.context("frames")?.body;
        fs::create_dir_all(path.parent().context("a folder")?)?;
        fs::write(&path, body.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "\n")?;
    }
    let text = read("chunk/chunk.hex")?;
    let body = text
        .trim()
        .as_bytes()
        .chunks(2)
        .map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?))
        .collect::<Result<Vec<u8>>>()?;
    ensure!(chunk::unpack(&body, &sha256(&body))? == frames, "it reads as something else");
    Ok(())
}

/// Every path of keys in it; the keys below `labels` and `env` are data.
fn paths(value: &Value, at: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let path = format!("{at}/{key}");
                if !["env", "labels"].contains(&key.as_str()) {
                    paths(value, &path, found);
                }
                found.insert(path);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| paths(item, at, found)),
        _ => {}
    }
}

fn only_what_the_sample_has(name: &str, value: &Value) -> Result<()> {
    let (mut known, mut written) = (BTreeSet::new(), BTreeSet::new());
    paths(&serde_json::from_str(&read(name)?)?, "", &mut known);
    paths(value, "", &mut written);
    let strange: Vec<&String> = written.difference(&known).collect();
    ensure!(strange.is_empty(), "{name} has no {strange:?}");
    ensure!(!written.is_empty(), "{name}: nothing was written");
    Ok(())
}

#[tokio::test]
async fn what_is_stored_and_sent_is_what_the_samples_show() -> Result<()> {
    let world = World::start().await?;
    world.settled().await?;
    let one = async |sql: &'static str| -> Result<Value> { Ok(sqlx::query_scalar(sql).fetch_one(world.db()).await?) };
    let webhook = one("select body from delivery").await?;
    only_what_the_sample_has("webhook/ended.json", &webhook)?;
    serde_json::from_value::<Run>(webhook["data"]["run"].clone())?;
    let definition = one("select definition from agent_version").await?;
    only_what_the_sample_has("stored/definition.json", &definition)?;
    serde_json::from_value::<AgentDefinition>(definition)?;
    let sandbox = one("select sandbox from run").await?;
    only_what_the_sample_has("stored/sandbox.json", &sandbox)?;
    serde_json::from_value::<Sandbox>(sandbox)?;
    let walls = one("select walls from sandbox").await?;
    only_what_the_sample_has("stored/walls.json", &walls)?;
    serde_json::from_value::<Walls>(walls)?;
    let identity = one("select identity from sandbox").await?;
    only_what_the_sample_has("stored/identity.json", &identity)?;
    serde_json::from_value::<Identity>(identity)?;
    let end = one("select end_record from transcript").await?;
    only_what_the_sample_has("record/end.json", &end)?;
    serde_json::from_value::<EndRecord>(end)?;
    Ok(())
}

// ---- rows of a newer release ---------------------------------------------------------------------------------------------------

async fn add(world: &World, table: &str, column: &str) -> Result<()> {
    let sql = format!("update {table} set {column} = {column} || $1::jsonb where {column} is not null");
    let done = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(LATER.parse::<Value>()?).execute(world.db()).await?;
    ensure!(done.rows_affected() > 0, "{table} has no row with {column}");
    Ok(())
}

#[tokio::test]
async fn rows_to_which_a_newer_release_added_fields_hold_up_nothing() -> Result<()> {
    let world = World::start().await?;
    let process = &world.first;
    let life = world.created().await?;
    add(&world, "sandbox", "walls").await?;
    process.host.attend(&process.chassis, None).await?;
    world.greet(&life).await?;
    add(&world, "sandbox", "identity").await?;
    process.host.attend(&process.chassis, None).await?;
    life::tell(&process.chassis, &life.reporter(), life::ended(0)).await?;
    add(&world, "run_history", "detail").await?;
    world.print(&life).await?;
    life::seal(process, &life).await?;
    add(&world, "transcript", "end_record").await?;
    life::handle(process, "run", vec![life.sealed()]).await?;
    add(&world, "delivery", "body").await?;
    let run = view::run(world.db(), life.tenant, life.run).await?;
    ensure!(run.state == RunState::Succeeded, "{:?}", run.state);
    view::history(world.db(), life.tenant, life.run, 0).await?;
    let delivery: sqlx::types::Uuid = sqlx::query_scalar("select id from delivery").fetch_one(world.db()).await?;
    life::handle(process, "deliver", vec![Command::Deliver { tenant: life.tenant, delivery: delivery.into() }]).await?;
    ensure!(world.posts().len() == 1, "{:?}", world.posts());
    Ok(())
}

/// The newer release writes every key that it knows, so during a roll each version that it stores has one that the older does not know.
#[tokio::test]
async fn an_agent_that_a_newer_release_stored_starts_runs() -> Result<()> {
    let world = World::start().await?;
    let life = world.ready().await?;
    add(&world, "agent_version", "definition").await?;
    towpath_agent::list(world.db(), life.tenant).await?;
    let answer = start_all(&world.first.chassis, vec![life.request(&world.first, &world)?]).await.pop().context("no answer")?;
    let run = answer.map_err(Error::from)?.run;
    admission::admit(&world.first.chassis, life::POOL).await?;
    ensure!(view::run(world.db(), life.tenant, run).await?.state == RunState::Starting, "not admitted");
    Ok(())
}

#[tokio::test]
async fn a_channel_that_a_newer_release_stored_takes_messages_in() -> Result<()> {
    let world = World::start().await?;
    let life = world.ready().await?;
    let chassis = &world.first.chassis;
    let channel = world.mail_channel(&life).await?;
    add(&world, "channel", "definition").await?;
    towpath_channel::list(chassis, life.tenant).await?;
    world.write(channel).await?;
    life::handle(&world.first, "intake", world.inbound().await?).await?;
    let taken = towpath_channel::inbound(world.db(), life.tenant, None).await?;
    ensure!(taken.iter().all(|inbound| inbound.state == "started") && taken.len() == 1, "{taken:?}");
    Ok(())
}

/// One of its sandbox is for a newer release to put up: the run is accepted and waits.
#[tokio::test]
async fn a_wall_that_a_newer_release_stored_is_not_left_out() -> Result<()> {
    let world = World::start().await?;
    let life = world.ready().await?;
    let sql = "update agent_version set definition = jsonb_set(definition, '{sandbox}', definition -> 'sandbox' || $1::jsonb)";
    sqlx::query(sql).bind(LATER.parse::<Value>()?).execute(world.db()).await?;
    let answer = start_all(&world.first.chassis, vec![life.request(&world.first, &world)?]).await.pop().context("no answer")?;
    let run = answer.map_err(Error::from)?.run;
    ensure!(admission::admit(&world.first.chassis, life::POOL).await? == 0, "it was admitted");
    ensure!(view::run(world.db(), life.tenant, run).await?.state == RunState::Queued, "it does not wait");
    Ok(())
}

/// A setting that this release cannot enforce is a newer one's to keep: the run waits for it, and nobody else does.
#[tokio::test]
async fn a_run_with_settings_of_a_newer_release_holds_up_no_other() -> Result<()> {
    let world = World::start().await?;
    let first = world.accepted().await?;
    add(&world, "run", "sandbox").await?;
    sqlx::query("update idempotency set key = 'other'").execute(world.db()).await?;
    let answer = start_all(&world.first.chassis, vec![first.request(&world.first, &world)?]).await.pop().context("no answer")?;
    let second = answer.map_err(Error::from)?.run;
    admission::admit(&world.first.chassis, life::POOL).await?;
    ensure!(view::run(world.db(), first.tenant, second).await?.state == RunState::Starting, "the other run was not admitted");
    Ok(())
}

/// Its run is now in a state that a newer release brought.
async fn in_another_state(world: &World) -> Result<()> {
    sqlx::raw_sql(
        "alter table run drop constraint run_state_known; alter table run disable trigger user; update run set state = 'unheard_of'",
    )
    .execute(world.db())
    .await?;
    Ok(())
}

/// Of a state that a newer release brought its own processes know what to do: messages about it are acknowledged, sweeps pass it over, its timers stay.
#[tokio::test]
async fn a_run_in_a_state_of_a_newer_release_is_passed_over() -> Result<()> {
    let world = World::start().await?;
    let life = world.lost().await?;
    in_another_state(&world).await?;
    let chassis = &world.first.chassis;
    sqlx::query("insert into timer (kind, key, due_at) values ('run_deadline', $1, now()), ('run_seal', $1 || '.1', now())")
        .bind(life.run.to_string())
        .execute(world.db())
        .await?;
    sqlx::raw_sql("update sandbox set unknown_since = now() - interval '1 hour', observed = 'unknown'").execute(world.db()).await?;
    life::handle(&world.first, "run", vec![life.observed(), life.sealed()]).await.context("messages about it")?;
    for sweep in roles::sweeps() {
        sweep.once(chassis).await.with_context(|| format!("sweep {}", sweep.name))?;
    }
    timer::fire(chassis.clone(), roles::timers()).await.context("timers")?;
    let timers: i64 = sqlx::query_scalar("select count(*) from timer where kind in ('run_deadline', 'run_seal') and due_at > now()")
        .fetch_one(world.db())
        .await?;
    ensure!(timers == 2, "{timers} of its timers are kept");
    let told: i64 = sqlx::query_scalar("select count(*) from delivery").fetch_one(world.db()).await?;
    ensure!(told == 0, "its owner was told something");
    let (state, revision): (String, i64) = sqlx::query_as("select state, revision from run").fetch_one(world.db()).await?;
    ensure!((state.as_str(), revision) == ("unheard_of", 3), "{state}, {revision}");
    Ok(())
}

/// A gateway of this release must not end what a newer one counts on.
#[tokio::test]
async fn a_supervisor_whose_run_is_in_a_state_of_a_newer_release_is_not_fenced() -> Result<()> {
    let world = World::start().await?;
    let life = world.running().await?;
    in_another_state(&world).await?;
    let chassis = &world.first.chassis;
    ensure!(life::hello(chassis, life.hello(chassis)).await.is_err(), "its hello was answered");
    ensure!(life::tell(chassis, &life.reporter(), life::ended(0)).await.is_err(), "its report was answered");
    let standings = report::standings(chassis, &[(life.run, life.epoch)]).await?;
    ensure!(standings.iter().all(|one| !one.fenced && !one.release), "{standings:?}");
    Ok(())
}

/// It cannot be shown here; another process may show it.
#[tokio::test]
async fn who_asks_for_a_run_in_a_state_of_a_newer_release_is_told_to_ask_again() -> Result<()> {
    let world = World::start().await?;
    let life = world.running().await?;
    in_another_state(&world).await?;
    let problem = view::run(world.db(), life.tenant, life.run).await.err().context("it was shown")?.problem();
    ensure!(problem.retryable && problem.status == 503 && problem.detail.contains("unheard_of"), "{problem:?}");
    Ok(())
}

// ---- messages of a newer release -----------------------------------------------------------------------------------------------

async fn publish(chassis: &Chassis, body: &Value, pool: &str) -> Result<()> {
    chassis.jetstream.publish(subject::admit(pool), serde_json::to_vec(body)?.into()).await?.await?;
    Ok(())
}

/// An unknown command, and then one that is known, which has been handled.
async fn after_an_unknown_command(world: &World) -> Result<()> {
    let chassis = &world.first.chassis;
    publish(chassis, &json!({ "kind": "unheard_of", "pool": "one" }), "one").await?;
    publish(chassis, &serde_json::to_value(Command::Admit { pool: "two".to_owned() })?, "two").await?;
    let handled = Arc::new(AtomicUsize::new(0));
    let count = handled.clone();
    let handler = Handler::new("versions-test", subject::ADMIT_ALL, move |_, batch: Vec<Command>| {
        count.fetch_add(batch.len(), Ordering::SeqCst);
        async move { Ok(batch.iter().map(|_| Outcome::Done).collect()) }
    });
    chassis.tasks.spawn(consume::run(chassis.clone(), handler));
    wait_for("the known command to be handled", SOON, async || (handled.load(Ordering::SeqCst) > 0).then_some(())).await?;
    // Longer than a message that is given back stays away.
    tokio::time::sleep(consume::LATER_MAX + Duration::from_secs(3)).await;
    ensure!(handled.load(Ordering::SeqCst) == 1, "the unknown one was handled");
    Ok(())
}

#[tokio::test]
async fn an_unknown_command_counts_no_attempt_and_is_not_laid_aside() -> Result<()> {
    let world = World::with(&[("TOWPATH_ATTEMPTS", "1")]).await?;
    after_an_unknown_command(&world).await?;
    let counted: i64 =
        sqlx::query_scalar("select (select count(*) from attempt) + (select count(*) from dead)").fetch_one(world.db()).await?;
    ensure!(counted == 0, "it was counted or laid aside");
    Ok(())
}

/// One that is given back again and again keeps its place among the unacknowledged ones, of which there may be only so many.
#[tokio::test]
async fn an_unknown_command_keeps_no_place_among_the_unacknowledged() -> Result<()> {
    let world = World::start().await?;
    after_an_unknown_command(&world).await?;
    let stream = world.first.chassis.jetstream.get_stream(subject::COMMAND).await?;
    let pending = stream.consumer_info("versions-test").await?.num_ack_pending;
    ensure!(pending == 0, "{pending} messages are not acknowledged");
    Ok(())
}

#[tokio::test]
async fn a_frame_of_an_unknown_kind_is_sealed_and_read_back() -> Result<()> {
    let world = World::start().await?;
    let life = world.finishing().await?;
    let end = serde_json::to_vec(&EndRecord { exit: life::exit(0), bytes: 4, steers: Vec::new() })?;
    let payloads: [(FrameKind, &[u8]); 3] = [(FrameKind::Stdout, b"one\n"), (FrameKind::Resize, b"later"), (FrameKind::End, &end)];
    for (seq, (kind, payload)) in (1_u64..).zip(payloads) {
        let frame = Frame { kind, epoch: 1, seq, offset: 0, wall_us: seq, mono_us: seq, payload: payload.to_vec() };
        let mut bytes = frame.encode();
        if kind == FrameKind::Resize {
            bytes[1] = 99;
        }
        let subject = subject::output(life.tenant, life.run, life.epoch, seq);
        world.first.chassis.jetstream.publish(subject, bytes.into()).await?.await?;
    }
    life::seal(&world.first, &life).await?;
    let digest = world.digest().await?;
    ensure!(digest.contains("one\\n") && !digest.contains("damaged") && digest.contains("frame tip true"), "{digest}");
    Ok(())
}

// ---- supervisors of other releases ---------------------------------------------------------------------------------------------

/// A run under a fence of a minute, that is started again when its sandbox is lost, with a supervisor that says this.
async fn fenced_with(world: &World, change: impl FnOnce(&mut Value)) -> Result<Life> {
    let chassis = &world.first.chassis;
    let mut life = world.ready().await?;
    let definition = json!({ "name": "worker", "command": ["/bin/true"], "on_lost": "restart", "fence_after": 60 });
    let definition: AgentDefinition = serde_json::from_value(definition)?;
    towpath_agent::put(chassis, life.tenant, life.principal, &definition, None).await?;
    let answer = start_all(chassis, vec![life.request(&world.first, world)?]).await.pop().context("no answer")?;
    life.run = answer.map_err(Error::from)?.run;
    life.session = view::run(world.db(), life.tenant, life.run).await?.session;
    admission::admit(chassis, life::POOL).await?;
    life.identity = world.pretend(life.run, life.epoch)?;
    let mut hello = serde_json::to_value(life.hello(chassis))?;
    change(&mut hello);
    let hello: Hello = serde_json::from_value(hello)?;
    let greeting = life::hello(chassis, hello).await?;
    ensure!(matches!(greeting, Greeting::Welcome { .. }), "it is not welcome");
    Ok(life)
}

/// Neither its host nor a gateway has had a sign of it for an hour, and whatever lease it had was granted before.
async fn silent_for_an_hour(world: &World) -> Result<()> {
    sqlx::raw_sql(
        "update sandbox set created_at = now() - interval '1 hour', observed_at = null, last_heard_at = now() - interval '1 hour',
             leased_at = case when leased_at is not null then now() - interval '1 hour' end",
    )
    .execute(world.db())
    .await?;
    for name in ["leases that have run out", "unobserved sandboxes"] {
        roles::sweep(&world.first, name)?.once(&world.first.chassis).await?;
    }
    Ok(())
}

async fn sandbox(world: &World, run: RunId) -> Result<(String, Option<String>)> {
    Ok(sqlx::query_as("select state, observed from sandbox where run_id = $1").bind(run.uuid()).fetch_one(world.db()).await?)
}

/// Its command goes on without a lease, so that its silence proves nothing and no second one may be started beside it.
#[tokio::test]
async fn a_supervisor_that_knows_of_no_fence_is_never_taken_for_gone_by_its_silence() -> Result<()> {
    let world = World::start().await?;
    let life = fenced_with(&world, |hello| hello["protocol"] = json!(1)).await?;
    silent_for_an_hour(&world).await?;
    let (state, observed) = sandbox(&world, life.run).await?;
    ensure!((state.as_str(), observed.as_deref()) == ("bound", Some("unknown")), "{state}, {observed:?}");
    life::handle(&world.first, "run", vec![life.observed()]).await?;
    let run = view::run(world.db(), life.tenant, life.run).await?;
    ensure!((run.state, run.epoch, run.reason.as_deref()) == (RunState::Running, 1, Some("sandbox_unknown")), "{run:?}");
    Ok(())
}

#[tokio::test]
async fn a_supervisor_that_was_granted_a_lease_is_gone_once_it_has_run_out() -> Result<()> {
    let world = World::start().await?;
    let life = fenced_with(&world, |_| {}).await?;
    let key = (life.run, life.epoch);
    ensure!(towpath_sandbox::lease(world.db(), &[key]).await?.contains(&key), "no lease");
    silent_for_an_hour(&world).await?;
    let (state, observed) = sandbox(&world, life.run).await?;
    ensure!((state.as_str(), observed.as_deref()) == ("gone", Some("absent")), "{state}, {observed:?}");
    life::handle(&world.first, "run", vec![life.observed()]).await?;
    let run = view::run(world.db(), life.tenant, life.run).await?;
    ensure!(run.state == RunState::Queued, "{:?}", run.state);
    Ok(())
}

/// A gateway that is replaced last meets supervisors that are newer than it is.
#[tokio::test]
async fn a_supervisor_of_a_newer_release_is_bound() -> Result<()> {
    let world = World::start().await?;
    let life = fenced_with(&world, |hello| {
        hello["protocol"] = json!(99);
        hello["identity"]["of_a_newer_release"] = json!([1]);
        hello["of_a_newer_release"] = json!({ "type": "unheard_of" });
    })
    .await?;
    ensure!(sandbox(&world, life.run).await?.0 == "bound", "not bound");
    ensure!(life::tell(&world.first.chassis, &life.reporter(), life::ended(0)).await?, "its word does not count");
    Ok(())
}
