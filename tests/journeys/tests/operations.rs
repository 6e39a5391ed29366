//! What an operator sees: what is stuck and why, and that each alert says what to do.

use anyhow::{Context, Result, ensure};
use reqwest::Method;
use serde_json::{Value, json};
use stage::wait_for;
use towpath_journeys::{Ground, SOON, World};

/// What makes each kind of stuck things, in a world with one run that works and one that has a delivery.
const MADE: [(&str, &str); 15] = [
    ("unpublished_commands", "insert into outbox (subject, body, created_at) values ('command.none', '{}', now() - interval '1 minute')"),
    ("overdue_timers", "insert into timer (kind, key, due_at) values ('of a newer release', 'x', now() - interval '2 minutes')"),
    ("dead_letters", "insert into dead (role, subject, body, reason, attempts) values ('x', 'x', '{}', 'x', 20)"),
    ("runs_without_a_host", "update run set created_at = now() - interval '2 minutes' where state = 'queued'; update pool set heard_at = now() - interval '1 minute'"),
    ("runs_not_starting", "update run set state = 'starting', revision = revision + 1, epoch = epoch + 1, active = true, waiting_for = null where state = 'queued';
        insert into sandbox (run_id, epoch, tenant_id, session_id, host, backend, walls, state, created_at)
            select id, epoch, tenant_id, session_id, 'elsewhere', 'process', '{}', 'asked', now() - interval '1 hour' from run where state = 'starting'"),
    ("sandboxes_unknown", "update sandbox set unknown_since = now() - interval '20 minutes' where host = 'elsewhere'"),
    ("sandboxes_unheard", "update sandbox set state = 'bound', incarnation = 'x', key_sha256 = 'x', last_heard_at = now() - interval '10 minutes' where host = 'elsewhere'"),
    ("records_unattended", "insert into transcript (run_id, epoch, tenant_id, state, opened_at) select id, epoch, tenant_id, 'open', now() - interval '5 minutes' from run where state = 'starting'"),
    ("records_not_sealed", "update run set state = 'running', incarnation = 'x', started_at = now(), revision = revision + 1 where state = 'starting';
        update run set state = 'finishing', active = false, revision = revision + 1 where state = 'running' and incarnation = 'x';
        update run_history set at = now() - interval '20 minutes' where run_id in (select id from run where state = 'finishing')"),
    ("ended_runs_that_hold_something", "update run set active = true, ended_at = now() - interval '20 minutes' where state = 'succeeded'"),
    ("deliveries_overdue", "update delivery set state = 'pending', ended_at = null, next_attempt_at = now() - interval '5 minutes'"),
    ("deliveries_given_up", "update delivery set state = 'dead', ended_at = now(), next_attempt_at = null"),
    ("inbound_overdue", "insert into channel (id, tenant_id, name, definition, principal_id) select gen_random_uuid(), tenant_id, 'mail', '{}', id from principal limit 1;
        insert into inbound (id, tenant_id, channel_id, delivery_key, message_key, envelope, raw, state, next_attempt_at, created_at)
            select gen_random_uuid(), tenant_id, id, 'x', 'x', '{}', 'x', 'received', now(), now() - interval '1 hour' from channel"),
    ("channel_broken", "update channel set broken_at = now() - interval '10 minutes', broken_why = 'token_revoked', probe_at = now()"),
    ("inbound_given_up", "update inbound set state = 'dead', next_attempt_at = null, handled_at = now()"),
];

#[tokio::test]
async fn whatever_is_stuck_is_told_with_what_would_move_it() -> Result<()> {
    let world = World::prepare(Ground::shared().await?, &[]).await?;
    world.spawn("api", &["api"])?;
    world.spawn("worker", &["worker"])?;
    world.ready().await?;
    world.example("echo").await?;
    let receiver = towpath_journeys::Receiver::start(&["200 OK"]).await?;
    let run = world.start_run(json!({ "agent": "echo", "prompt": "{}", "deliver": [{ "webhook": { "url": receiver.url } }] })).await?;
    world.ended(&run).await?;
    stage::wait_for("the delivery", SOON, async || {
        (world.count("select count(*) from delivery where state = 'delivered'").await.ok()? == 1).then_some(())
    })
    .await?;
    let stuck = async || -> Result<Vec<Value>> { world.get("/v1/stuck").await?["items"].as_array().cloned().context("items") };
    ensure!(stuck().await?.is_empty(), "{:?}", stuck().await?);
    // From here on nothing moves by itself.
    world.kill("worker")?;
    world.run("echo", &json!({})).await?;
    sqlx::raw_sql("delete from outbox").execute(&world.db).await?;
    for (kind, sql) in MADE {
        sqlx::raw_sql(sql).execute(&world.db).await.with_context(|| kind)?;
        let all = stuck().await?;
        let found = all.iter().find(|stuck| stuck["kind"] == kind).with_context(|| format!("{kind} is not told: {all:?}"))?;
        let words = |key: &str| found[key].as_str().is_some_and(|text| !text.is_empty());
        ensure!(
            found["count"] == 1
                && found["oldest_s"].as_f64().is_some_and(|age| age >= 0.0)
                && words("told")
                && words("cure")
                && words("example"),
            "{found}"
        );
    }
    let metrics = world.client.get(format!("{}/metrics", world.url)).send().await?.text().await?;
    for (kind, _) in MADE {
        ensure!(metrics.contains(&format!("towpath_stuck{{kind=\"{kind}\"}}")), "{kind} has no gauge");
    }
    ensure!(metrics.contains("towpath_oldest_seconds{what=\"delivery\"}") && metrics.contains("towpath_streams_open 0"), "{metrics}");
    Ok(())
}

#[tokio::test]
async fn readiness_tells_the_age_of_the_oldest_of_each_kind_and_a_refusal_is_counted() -> Result<()> {
    let world = World::prepare(Ground::shared().await?, &[]).await?;
    world.spawn("api", &["api"])?;
    world.spawn("worker", &["worker"])?;
    world.ready().await?;
    wait_for("a pool", SOON, async || world.count("select count(*) from pool").await.ok().filter(|pools| *pools == 1)).await?;
    world.agent("waiter", &["/bin/true"], json!({})).await?;
    // Nobody works: what it makes stays where it is.
    world.kill("worker")?;
    let run = world.run("waiter", &json!("x")).await?;
    let command_waits = async || world.get("/readyz").await.ok().filter(|ready| ready["oldest_s"]["command"].as_f64() > Some(0.0));
    let ready = wait_for("a command to wait", SOON, command_waits).await?;
    ensure!(ready["ready"] == true, "slow workers are no reason to refuse: {ready}");
    for what in ["outbox", "command", "frame", "delivery"] {
        ensure!(ready["oldest_s"][what].is_number(), "{ready}");
    }
    let (status, _) = world.call(Method::GET, "/v1/runs/run_00000000000000000000000000000000", None).await?;
    ensure!(status == 404 || status == 400, "{status}");
    let metrics = world.client.get(format!("{}/metrics", world.url)).send().await?.text().await?;
    ensure!(metrics.contains("towpath_refused_total{code="), "{metrics}");
    world.spawn("worker", &["worker"])?;
    world.ended(&run).await?;
    world.finish().await
}

/// Every alert names a metric that there is, and has a page that says what to do.
#[test]
fn every_kind_has_an_alert_and_every_alert_a_page() -> Result<()> {
    let read = |name: &str| std::fs::read_to_string(stage::checkout(name)).with_context(|| name.to_owned());
    let (alerts, runbook, dashboard) =
        (read("deploy/operations/alerts.yaml")?, read("deploy/operations/runbook.md")?, read("deploy/operations/dashboard.json")?);
    for (kind, _) in MADE {
        ensure!(alerts.contains(&format!("kind=\"{kind}\"")) || alerts.contains("(towpath_stuck) > 0"), "{kind} raises no alert");
        ensure!(runbook.contains(&format!("### {kind}\n")), "{kind} has no page in the runbook");
    }
    let names: Vec<&str> = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    ensure!(names.len() >= 6, "{names:?}");
    for name in names {
        ensure!(runbook.contains(&format!("## {name}\n")), "{name} has no page in the runbook");
    }
    // What they look at exists.
    let sources = std::process::Command::new("grep")
        .args(["-rhoE", "\"towpath_[a-z0-9_]+\"", "workers", "api"])
        .current_dir(stage::checkout(""))
        .output()?;
    let known = String::from_utf8(sources.stdout)?;
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    for text in [&alerts, &dashboard] {
        for name in text.split(|c: char| !is_name(c)).filter(|name| name.starts_with("towpath_")) {
            ensure!(known.contains(&format!("\"{name}\"")), "{name} is no metric");
        }
    }
    let panels: Value = serde_json::from_str(&dashboard)?;
    ensure!(panels["panels"].as_array().is_some_and(|panels| panels.len() >= 8), "the dashboard has too few panels");
    Ok(())
}
