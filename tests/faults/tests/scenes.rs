//! The scenes. Each line of the list says what it covers, who asks again after a crash, whether a newer epoch fences it, the state before it, and what is done.

use anyhow::{Context, Result};
use towpath_agent::start::start_all;
use towpath_chassis::{Error, timer};
use towpath_faults::{Life, Process, Scene, Who, World, life, play, roles};
use towpath_file::{Spool, Spooled, upload};
use towpath_run::{
    accept,
    apply::{TIMER_DEADLINE, TIMER_MAX, TIMER_SEAL, TIMER_START, TIMER_WANTED, epoch_key},
    report::Report,
    retention,
};
use towpath_schemas::{
    command::Command,
    guest::{SteerEnd, SteerState},
    id::UploadId,
    key,
};

macro_rules! scenes {
    ($($name:ident: $covers:literal, $who:ident, $fenced:ident, $set:expr, $act:expr;)*) => {
        const COVERED: &[&str] = &[$($covers),*];
        $(
            #[tokio::test]
            async fn $name() -> Result<()> {
                play(Scene { set: $set, act: $act, who: Who::$who, fenced: $fenced }).await
            }
        )*
    };
}

#[allow(non_upper_case_globals, reason = "words for the column `fenced` of the list")]
const by_epoch: bool = true;
#[allow(non_upper_case_globals, reason = "words for the column `fenced` of the list")]
const never: bool = false;

scenes! {
    a_run_is_admitted_once: "handler admit", Nobody, never, World::accepted,
        async |process: &Process, _: &World, _: &Life| life::handle(process, "admit", vec![Command::Admit { pool: life::POOL.to_owned() }]).await;
    a_lost_sandbox_is_taken_note_of_once: "handler run", Nobody, by_epoch, World::lost,
        async |process: &Process, _: &World, life: &Life| life::handle(process, "run", vec![life.observed()]).await;
    a_closed_record_settles_its_run_once: "handler run", Nobody, never, World::sealed,
        async |process: &Process, _: &World, life: &Life| life::handle(process, "run", vec![life.sealed()]).await;
    a_sandbox_is_created_once: "handler host-local", Nobody, never, asked_of_a_real_host, host;
    a_sandbox_is_found_gone_once: "handler host-local", Nobody, never, vanished, host;
    a_record_is_sealed_without_a_hole: "handler transcript", Nobody, never, printed,
        async |process: &Process, _: &World, life: &Life| life::seal(process, life).await;
    a_lost_record_ends_in_one_gap: "handler transcript", Nobody, never, lost_and_known,
        async |process: &Process, _: &World, life: &Life| life::seal(process, life).await;
    a_result_is_delivered_under_one_id: "handler deliver", Nobody, never, World::settled,
        async |process: &Process, world: &World, _: &Life| life::handle(process, "deliver", deliveries(world).await?).await;
    an_answer_in_several_messages_is_posted_once: "handler deliver", Nobody, never, owed_in_slack,
        async |process: &Process, world: &World, _: &Life| life::handle(process, "deliver", deliveries(world).await?).await;

    a_message_starts_its_run_once: "handler intake", Nobody, never, written,
        async |process: &Process, world: &World, _: &Life| life::handle(process, "intake", world.inbound().await?).await;

    a_message_of_slack_starts_its_run_once: "handler intake", Nobody, never, called_in_slack,
        async |process: &Process, world: &World, _: &Life| life::handle(process, "intake", world.inbound().await?).await;
    a_stop_that_takes_too_long_settles_once: "timer run_wanted", Nobody, never, World::stopping,
        async |process: &Process, world: &World, life: &Life| fire(process, world, TIMER_WANTED, life.run.to_string()).await;
    a_start_that_takes_too_long_fails_once: "timer run_start", Nobody, by_epoch, World::created,
        async |process: &Process, world: &World, life: &Life| fire(process, world, TIMER_START, epoch_key(life.run, life.epoch)).await;
    a_record_that_takes_too_long_fails_once: "timer run_seal", Nobody, never, World::finishing,
        async |process: &Process, world: &World, life: &Life| fire(process, world, TIMER_SEAL, epoch_key(life.run, life.epoch)).await;
    a_deadline_ends_a_waiting_run_once: "timer run_deadline", Nobody, never, paused,
        async |process: &Process, world: &World, life: &Life| fire(process, world, TIMER_DEADLINE, life.run.to_string()).await;
    a_deadline_ends_a_working_run_once: "timer run_deadline", Nobody, never, World::running,
        async |process: &Process, world: &World, life: &Life| fire(process, world, TIMER_DEADLINE, life.run.to_string()).await;
    a_run_that_works_too_long_is_stopped_once: "timer run_max", Nobody, never, World::running,
        async |process: &Process, world: &World, life: &Life| fire(process, world, TIMER_MAX, life.run.to_string()).await;
    a_message_is_tried_again_once: "timer intake", Nobody, never, written, next_intake;
    a_next_attempt_comes_once: "timer deliver", Nobody, never, World::settled, next_attempt;

    a_pool_with_room_is_filled_by_the_sweep: "sweep pools with room", Nobody, never, World::accepted, pools_with_room;
    an_untold_loss_is_found_by_the_sweep: "sweep untold facts", Nobody, by_epoch, World::lost, untold_facts;
    an_untold_record_is_found_by_the_sweep: "sweep untold facts", Nobody, never, World::sealed, untold_facts;
    an_unattended_record_is_found_by_the_sweep: "sweep unattended transcripts", Nobody, never, printed,
        async |process: &Process, _: &World, _: &Life| sweep(process, "unattended transcripts").await;
    a_missed_delivery_is_found_by_the_sweep: "sweep missed deliveries", Nobody, never, missed,
        async |process: &Process, _: &World, _: &Life| sweep(process, "missed deliveries").await;
    a_missed_message_is_found_by_the_sweep: "sweep missed inbound", Nobody, never, written_long_ago,
        async |process: &Process, _: &World, _: &Life| sweep(process, "missed inbound").await;
    a_late_reply_is_taken_in_once_more: "sweep steers of messages", Nobody, never, unread,
        async |process: &Process, _: &World, _: &Life| sweep(process, "steers of messages").await;
    an_owner_is_told_once_of_an_answer_that_was_given_up: "sweep answers given up", Nobody, never, given_up,
        async |process: &Process, _: &World, _: &Life| sweep(process, "answers given up").await;
    a_message_loses_its_bytes_when_it_is_old: "sweep old inbound", Owner, never, taken_long_ago,
        async |process: &Process, _: &World, _: &Life| sweep(process, "old inbound").await;
    an_unfinished_object_is_deleted_by_the_sweep: "sweep unfinished objects", Nobody, never, half_written,
        async |process: &Process, _: &World, _: &Life| sweep(process, "unfinished objects").await;
    a_vanished_sandbox_is_found_by_the_sweep: "sweep sandboxes of this host", Nobody, never, vanished,
        async |process: &Process, _: &World, _: &Life| sweep(process, "sandboxes of this host").await;
    a_lease_that_has_run_out_is_a_loss_once: "sweep leases that have run out", Nobody, never, silent_under_a_fence,
        async |process: &Process, _: &World, _: &Life| sweep(process, "leases that have run out").await;
    a_sandbox_that_nobody_sees_is_unknown: "sweep unobserved sandboxes", Nobody, never, silent,
        async |process: &Process, _: &World, _: &Life| sweep(process, "unobserved sandboxes").await;
    an_owner_is_told_of_doubt_once: "sweep doubted sandboxes", Nobody, never, doubted,
        async |process: &Process, _: &World, _: &Life| sweep(process, "doubted sandboxes").await;
    a_sandbox_without_a_row_is_left_alone: "sweep sandboxes without a row", Nobody, never, World::running,
        async |process: &Process, _: &World, _: &Life| sweep(process, "sandboxes without a row").await;
    an_unpublished_command_is_found_by_the_relay: "sweep outbox relay", Nobody, never, unpublished,
        async |process: &Process, _: &World, _: &Life| sweep(process, "outbox relay").await;
    an_old_key_is_forgotten_by_the_sweep: "sweep old idempotency keys", Nobody, never, old_keys,
        async |process: &Process, _: &World, _: &Life| sweep(process, "old idempotency keys").await;

    an_expired_transcript_goes_piece_by_piece: "sweep expired transcripts", Nobody, never, async |world: &World| old(world, "transcript_days = 90").await,
        async |process: &Process, _: &World, _: &Life| sweep(process, "expired transcripts").await;
    an_expired_output_goes_and_is_still_told: "sweep expired outputs", Nobody, never, async |world: &World| old(world, "file_days = 90").await,
        async |process: &Process, _: &World, _: &Life| sweep(process, "expired outputs").await;
    an_expired_file_that_no_run_needs_goes: "sweep expired files", Nobody, never, async |world: &World| old(world, "file_days = 90").await,
        async |process: &Process, _: &World, _: &Life| sweep(process, "expired files").await;
    an_expired_run_goes_with_all_that_it_had: "sweep expired runs", Nobody, never, async |world: &World| old(world, "run_days = 90").await,
        async |process: &Process, _: &World, _: &Life| sweep(process, "expired runs").await;
    an_expired_session_goes_after_its_runs: "sweep expired sessions", Nobody, never, without_runs,
        async |process: &Process, _: &World, _: &Life| sweep(process, "expired sessions").await;
    an_unwanted_workspace_goes_on_its_host: "sweep unwanted workspaces", Nobody, never, unwanted_workspace,
        async |process: &Process, _: &World, _: &Life| sweep(process, "unwanted workspaces").await;
    an_unused_object_goes_a_while_later: "sweep unused objects", Nobody, never, unused,
        async |process: &Process, _: &World, _: &Life| sweep(process, "unused objects").await;
    an_abandoned_upload_goes: "sweep abandoned uploads", Nobody, never, abandoned_upload,
        async |process: &Process, _: &World, _: &Life| sweep(process, "abandoned uploads").await;
    a_part_of_an_upload_is_taken_once: "upload::append", Owner, never, begun_upload,
        async |process: &Process, world: &World, life: &Life| append(process, world, life).await;
    an_upload_makes_one_file: "upload::finish", Owner, never, whole_upload,
        async |process: &Process, world: &World, life: &Life| {
            upload::finish(&process.chassis, life.tenant, the_upload(world).await?).await?;
            Ok(())
        };
    a_run_is_removed_when_it_is_asked_for: "retention::remove", Owner, never, async |world: &World| old(world, "run_days = null").await, remove;

    a_request_makes_one_run: "start_all", Asker, never, World::ready, start;
    a_steer_is_accepted_once: "accept::steer", Asker, never, World::running,
        async |process: &Process, _: &World, life: &Life| Ok(accept::steer(&process.chassis, &life.steer("turn left")?).await.map(|_| ())?);
    a_waiting_run_is_canceled_once: "accept::cancel", Asker, never, World::accepted, cancel;
    a_starting_run_is_canceled_once: "accept::cancel", Asker, never, World::created, cancel;
    a_run_is_asked_to_stop_once: "accept::cancel", Asker, never, World::steered, cancel;
    a_run_is_abandoned_once: "accept::abandon", Asker, never, World::steered,
        async |process: &Process, _: &World, life: &Life| Ok(accept::abandon(&process.chassis, life.tenant, life.principal, life.run).await.map(|_| ())?);

    a_supervisor_is_bound_once: "hello", Asker, by_epoch, World::created,
        async |process: &Process, _: &World, life: &Life| life::hello(&process.chassis, life.hello(&process.chassis)).await.map(|_| ());
    a_step_is_noted_once: "report step", Asker, by_epoch, World::running,
        async |process: &Process, _: &World, life: &Life| say(process, life, life::step("inputs")).await;
    a_command_ends_once: "report ended", Asker, by_epoch, World::steered,
        async |process: &Process, _: &World, life: &Life| say(process, life, life::ended(0)).await;
    a_command_that_was_stopped_ends_once: "report ended", Asker, never, World::stopping,
        async |process: &Process, _: &World, life: &Life| say(process, life, life::ended(1)).await;
    a_result_is_kept_once: "report result", Asker, by_epoch, World::running,
        async |process: &Process, _: &World, life: &Life| say(process, life, life::result("done")).await;
    an_output_is_kept_once: "report output", Asker, by_epoch, World::running, output;
    a_steer_is_marked_before_it_is_sent: "report steers_sent", Asker, by_epoch, World::steered,
        async |process: &Process, _: &World, life: &Life| say(process, life, Report::SteersSent(life.steers.clone())).await;
    a_steer_is_read_once: "report steers", Asker, by_epoch, sent, read;
}

/// What is no handler, timer or sweep and has to be in the list all the same.
const FUNCTIONS: [&str; 14] = [
    "upload::append",
    "upload::finish",
    "retention::remove",
    "start_all",
    "accept::steer",
    "accept::cancel",
    "accept::abandon",
    "hello",
    "report step",
    "report ended",
    "report result",
    "report output",
    "report steers_sent",
    "report steers",
];

#[tokio::test]
async fn every_handler_timer_and_sweep_has_a_scene() -> Result<()> {
    let world = World::start().await?;
    let names = roles::names(&world.first);
    let without: Vec<&str> = names.iter().map(String::as_str).chain(FUNCTIONS).filter(|name| !COVERED.contains(name)).collect();
    assert!(without.is_empty(), "without a scene: {without:?}");
    let unknown: Vec<&&str> =
        COVERED.iter().filter(|name| !names.iter().any(|known| known == *name) && !FUNCTIONS.contains(name)).collect();
    assert!(unknown.is_empty(), "scenes of what there is not: {unknown:?}");
    Ok(())
}

// ---- states before -------------------------------------------------------------------------------------------------------------

async fn asked_of_a_real_host(world: &World) -> Result<Life> {
    world.host_looks();
    world.admitted().await
}

async fn vanished(world: &World) -> Result<Life> {
    let life = world.running().await?;
    world.vanish(life.run, life.epoch)?;
    world.host_looks();
    Ok(life)
}

/// Neither its host nor a gateway has had a sign of it for an hour.
async fn silent(world: &World) -> Result<Life> {
    let life = world.running().await?;
    sqlx::query("update sandbox set created_at = now() - interval '1 hour', observed_at = null, last_heard_at = now() - interval '1 hour'")
        .execute(world.db())
        .await?;
    Ok(life)
}

async fn silent_under_a_fence(world: &World) -> Result<Life> {
    let life = silent(world).await?;
    sqlx::raw_sql(
        "update run set fence_s = 60, restartable = true; update sandbox set fence_s = 60, leased_at = now() - interval '1 hour'",
    )
    .execute(world.db())
    .await?;
    Ok(life)
}

async fn doubted(world: &World) -> Result<Life> {
    let life = world.running().await?;
    sqlx::query("update sandbox set observed = 'unknown', unknown_since = now() - interval '1 hour'").execute(world.db()).await?;
    Ok(life)
}

async fn printed(world: &World) -> Result<Life> {
    let life = world.finishing().await?;
    world.print(&life).await?;
    Ok(life)
}

async fn lost_and_known(world: &World) -> Result<Life> {
    let life = world.lost().await?;
    life::handle(&world.first, "run", vec![life.observed()]).await?;
    Ok(life)
}

/// A run that waits and is not admitted by any sweep.
async fn paused(world: &World) -> Result<Life> {
    let life = world.accepted().await?;
    sqlx::query("update tenant set paused_at = now()").execute(world.db()).await?;
    Ok(life)
}

async fn missed(world: &World) -> Result<Life> {
    let life = world.settled().await?;
    sqlx::query("update delivery set next_attempt_at = now() - interval '1 hour'").execute(world.db()).await?;
    Ok(life)
}

/// A mail that came in.
async fn written(world: &World) -> Result<Life> {
    let life = world.ready().await?;
    let channel = world.mail_channel(&life).await?;
    world.write(channel).await?;
    Ok(life)
}

async fn called_in_slack(world: &World) -> Result<Life> {
    let life = world.ready().await?;
    world.slack_message(&life).await?;
    Ok(life)
}

/// What is owed to a thread and takes three messages.
async fn owed_in_slack(world: &World) -> Result<Life> {
    let life = called_in_slack(world).await?;
    sqlx::query("update inbound set state = 'answered', next_attempt_at = null, handled_at = now(), head = $1")
        .bind(serde_json::json!({ "message_id": "T0TEAM/C1/1", "references": [], "to": "C1", "subject": "", "root": "T0TEAM/C1/1700000000.000001" }))
        .execute(world.db())
        .await?;
    sqlx::query(
        "insert into delivery (id, tenant_id, inbound_id, n, about, kind, target, body, state, next_attempt_at)
         select gen_random_uuid(), tenant_id, id, -1, 'status', 'thread', 'inb', jsonb_build_object('text', repeat('word ', 2000)), 'pending', now() from inbound",
    )
    .execute(world.db())
    .await?;
    Ok(life)
}

async fn written_long_ago(world: &World) -> Result<Life> {
    let life = written(world).await?;
    sqlx::query("update inbound set next_attempt_at = now() - interval '1 hour'").execute(world.db()).await?;
    Ok(life)
}

async fn taken_long_ago(world: &World) -> Result<Life> {
    let life = written(world).await?;
    life::handle(&world.first, "intake", world.inbound().await?).await?;
    sqlx::query("update inbound set created_at = now() - interval '20 days'").execute(world.db()).await?;
    Ok(life)
}

/// A mail that became a steer which its run ended without.
async fn unread(world: &World) -> Result<Life> {
    let life = world.settled().await?;
    let channel = world.mail_channel(&life).await?;
    world.write(channel).await?;
    sqlx::query("update inbound set state = 'steered', run_id = $1, next_attempt_at = null, handled_at = now(), steer_looked_at = now()")
        .bind(life.run.uuid())
        .execute(world.db())
        .await?;
    sqlx::query("insert into steer (id, tenant_id, run_id, ordinal, message, state, principal_id) select id, tenant_id, run_id, 1, 'late', 'expired', $1 from inbound")
        .bind(life.principal.uuid())
        .execute(world.db())
        .await?;
    Ok(life)
}

/// A mail whose answer was given up, of a channel whose owner wants to hear of it.
async fn given_up(world: &World) -> Result<Life> {
    let life = written(world).await?;
    sqlx::query("update channel set definition = definition || jsonb_build_object('notify', $1)")
        .bind(&world.receiver.url)
        .execute(world.db())
        .await?;
    sqlx::query("update inbound set state = 'ignored', next_attempt_at = null, handled_at = now()").execute(world.db()).await?;
    sqlx::query(
        "insert into delivery (id, tenant_id, inbound_id, n, about, kind, target, body, state, answer, ended_at)
         select gen_random_uuid(), tenant_id, id, -1, 'status', 'thread', 'inb', '{}', 'dead', 'SMTP 550', now() from inbound",
    )
    .execute(world.db())
    .await?;
    Ok(life)
}

async fn next_intake(process: &Process, world: &World, _: &Life) -> Result<()> {
    let ids: Vec<sqlx::types::Uuid> = sqlx::query_scalar("select id from inbound").fetch_all(world.db()).await?;
    for id in ids {
        fire(process, world, "intake", towpath_schemas::InboundId::from(id).to_string()).await?;
    }
    Ok(())
}

async fn half_written(world: &World) -> Result<Life> {
    let life = world.running().await?;
    let key = key::file(life.tenant, towpath_file::unique());
    towpath_file::object_begin(world.db(), life.tenant, &key).await?;
    world.first.chassis.store.put(&key, b"half".as_slice().into()).await?;
    sqlx::query("update object set created_at = now() - interval '2 days'").execute(world.db()).await?;
    Ok(life)
}

/// A run with an output, and a file beside it, that ended long ago, of a tenant that keeps for ever what `days` does not name.
async fn old(world: &World, days: &str) -> Result<Life> {
    let life = world.running().await?;
    output(&world.first, world, &life).await?;
    towpath_file::store(&world.first.chassis, life.tenant, life.principal, "input.txt", "text/plain", spooled(b"input").await?).await?;
    say(&world.first, &life, life::ended(0)).await?;
    world.print(&life).await?;
    life::seal(&world.first, &life).await?;
    life::handle(&world.first, "run", vec![life.sealed()]).await?;
    life::handle(&world.first, "deliver", deliveries(world).await?).await?;
    world.vanish(life.run, life.epoch)?;
    world.first.host.attend(&world.first.chassis, None).await?;
    age(world, days).await?;
    Ok(life)
}

async fn begun_upload(world: &World) -> Result<Life> {
    let life = world.running().await?;
    upload::begin(&world.first.chassis, life.tenant, life.principal, "big", "text/plain", Some(4)).await?;
    Ok(life)
}

async fn whole_upload(world: &World) -> Result<Life> {
    let life = begun_upload(world).await?;
    append(&world.first, world, &life).await?;
    Ok(life)
}

async fn abandoned_upload(world: &World) -> Result<Life> {
    let life = whole_upload(world).await?;
    sqlx::query("update upload set changed_at = now() - interval '2 days'").execute(world.db()).await?;
    Ok(life)
}

async fn the_upload(world: &World) -> Result<UploadId> {
    Ok(UploadId(sqlx::query_scalar("select id from upload").fetch_one(world.db()).await?))
}

async fn append(process: &Process, world: &World, life: &Life) -> Result<()> {
    let part = spooled(b"part").await?;
    upload::append(&process.chassis, life.tenant, the_upload(world).await?, 0, part).await?;
    Ok(())
}

async fn age(world: &World, days: &str) -> Result<()> {
    sqlx::raw_sql(
        "update run set ended_at = ended_at - interval '100 days'; update session set created_at = created_at - interval '100 days';
         update file set created_at = created_at - interval '100 days'; update tenant set transcript_days = null, file_days = null, run_days = null",
    )
    .execute(world.db())
    .await?;
    sqlx::query(sqlx::AssertSqlSafe(format!("update tenant set {days}"))).execute(world.db()).await?;
    Ok(())
}

async fn without_runs(world: &World) -> Result<Life> {
    let life = old(world, "run_days = 90").await?;
    world.host_looks();
    sweep(&world.first, "expired runs").await?;
    Ok(life)
}

async fn unwanted_workspace(world: &World) -> Result<Life> {
    let life = without_runs(world).await?;
    let folder = world.state.join("workspaces").join(life.session.to_string());
    std::fs::create_dir_all(folder.join("deep"))?;
    std::os::unix::fs::symlink("/etc", folder.join("elsewhere"))?;
    sweep(&world.first, "expired sessions").await?;
    Ok(life)
}

async fn unused(world: &World) -> Result<Life> {
    let life = old(world, "transcript_days = 90").await?;
    sweep(&world.first, "expired transcripts").await?;
    sqlx::query("update object set unused_at = unused_at - interval '1 hour'").execute(world.db()).await?;
    Ok(life)
}

async fn unpublished(world: &World) -> Result<Life> {
    let life = world.accepted().await?;
    world.lose_messages().await?;
    world.leave_in_outbox(&Command::Admit { pool: life::POOL.to_owned() }).await?;
    Ok(life)
}

async fn old_keys(world: &World) -> Result<Life> {
    let life = world.accepted().await?;
    sqlx::query("update idempotency set created_at = now() - interval '2 days'").execute(world.db()).await?;
    Ok(life)
}

async fn sent(world: &World) -> Result<Life> {
    let life = world.steered().await?;
    say(&world.first, &life, Report::SteersSent(life.steers.clone())).await?;
    Ok(life)
}

// ---- acts ----------------------------------------------------------------------------------------------------------------------

async fn say(process: &Process, life: &Life, report: Report) -> Result<()> {
    life::tell(&process.chassis, &life.reporter(), report).await.map(|_| ())
}

async fn host(process: &Process, _: &World, life: &Life) -> Result<()> {
    life::handle(process, "host-local", vec![life.host()]).await
}

async fn deliveries(world: &World) -> Result<Vec<Command>> {
    let rows: Vec<(sqlx::types::Uuid, sqlx::types::Uuid)> =
        sqlx::query_as("select tenant_id, id from delivery").fetch_all(world.db()).await?;
    Ok(rows.into_iter().map(|(tenant, delivery)| Command::Deliver { tenant: tenant.into(), delivery: delivery.into() }).collect())
}

/// Fires a timer, however late it is and whether or not it was cleared.
async fn fire(process: &Process, world: &World, kind: &str, key: String) -> Result<()> {
    sqlx::query(
        "insert into timer (kind, key, due_at) values ($1, $2, now()) on conflict (kind, key) do update set due_at = excluded.due_at",
    )
    .bind(kind)
    .bind(key)
    .execute(world.db())
    .await?;
    timer::fire(process.chassis.clone(), roles::timers()).await?;
    Ok(())
}

async fn next_attempt(process: &Process, world: &World, _: &Life) -> Result<()> {
    let ids: Vec<sqlx::types::Uuid> = sqlx::query_scalar("select id from delivery").fetch_all(world.db()).await?;
    for id in ids {
        fire(process, world, "deliver", towpath_schemas::DeliveryId::from(id).to_string()).await?;
    }
    Ok(())
}

async fn sweep(process: &Process, name: &str) -> Result<()> {
    roles::sweep(process, name)?.once(&process.chassis).await?;
    Ok(())
}

async fn pools_with_room(process: &Process, _: &World, _: &Life) -> Result<()> {
    sweep(process, "pools with room").await
}

async fn untold_facts(process: &Process, _: &World, _: &Life) -> Result<()> {
    sweep(process, "untold facts").await
}

async fn start(process: &Process, world: &World, life: &Life) -> Result<()> {
    let answer = start_all(&process.chassis, vec![life.request(process, world)?]).await.pop().context("no answer")?;
    answer.map_err(Error::from)?;
    Ok(())
}

async fn cancel(process: &Process, _: &World, life: &Life) -> Result<()> {
    accept::cancel(&process.chassis, life.tenant, life.principal, life.run).await?;
    Ok(())
}

async fn remove(process: &Process, _: &World, life: &Life) -> Result<()> {
    match retention::remove(&process.chassis, life.tenant, life.run).await {
        // Whoever asks again after an answer that never came, or beside another, finds nothing.
        Err(Error::Refused(problem)) if problem.status == 404 => Ok(()),
        other => Ok(other?),
    }
}

async fn spooled(content: &[u8]) -> Result<Spooled> {
    let mut spool = Spool::new(1024)?;
    spool.write(content).await?;
    Ok(spool.finish().await?)
}

/// An output comes, as the gateway takes it.
async fn output(process: &Process, _: &World, life: &Life) -> Result<()> {
    let spooled = spooled(b"report").await?;
    let object_key = towpath_file::put_output(&process.chassis, life.tenant, &spooled).await?;
    let report = Report::Output { name: "report.txt".to_owned(), size: spooled.size, sha256: spooled.sha256, object_key };
    say(process, life, report).await
}

async fn read(process: &Process, _: &World, life: &Life) -> Result<()> {
    let ends: Vec<SteerEnd> = life.steers.iter().map(|steer| SteerEnd { steer: *steer, state: SteerState::Read }).collect();
    say(process, life, Report::Steers(ends)).await
}
