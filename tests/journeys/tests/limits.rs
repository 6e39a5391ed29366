//! Limits, deadlines and pauses: who may run, for how long, and what those wait for that may not.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use towpath_journeys::{Ground, SOON, World};

async fn world(slots: &str) -> Result<World> {
    let world = World::prepare(Ground::shared().await?, &[("TOWPATH_SLOTS", slots)]).await?;
    world.spawn("all", &["dev"])?;
    world.ready().await?;
    Ok(world)
}

async fn waits_for(world: &World, run: &str, what: &str) -> Result<Value> {
    world.until(run, SOON, |value| value["state"] == "queued" && value["waiting_for"] == what).await
}

async fn act(world: &World, path: &str) -> Result<()> {
    let (status, answer) = world.call(Method::POST, path, None).await?;
    ensure!(status == StatusCode::NO_CONTENT, "{path}: {status} {answer}");
    Ok(())
}

#[tokio::test]
async fn a_run_ends_at_its_maximum_and_at_its_deadline_working_or_waiting() -> Result<()> {
    let world = world("1").await?;
    world.agent("sleeper", &["/bin/sleep", "60"], json!({ "limits": { "max_s": 1, "grace_s": 1 } })).await?;
    world.agent("free", &["/bin/sleep", "60"], json!({ "limits": { "grace_s": 1 } })).await?;
    let long = world.run("sleeper", &json!("x")).await?;
    let ended = world.ended(&long).await?;
    ensure!(ended["state"] == "timed_out" && ended["reason"] == "maximum", "{ended}");
    // While somebody else has the only slot.
    let holder = world.run("free", &json!("x")).await?;
    world.until(&holder, SOON, |value| value["state"] == "running").await?;
    let waiting = world.start_run(json!({ "agent": "free", "prompt": "x", "deadline": "1s" })).await?;
    ensure!(world.get(&format!("/v1/runs/{waiting}")).await?["deadline"].is_string(), "no deadline is told");
    let late = world.start_run(json!({ "agent": "free", "prompt": "x", "deadline": "2020-01-01T00:00:00Z" })).await?;
    let at_its_deadline = async |run: &str, epoch: i64| -> Result<()> {
        let ended = world.ended(run).await?;
        ensure!(ended["state"] == "timed_out" && ended["reason"] == "deadline" && ended["epoch"] == epoch, "{ended}");
        Ok(())
    };
    at_its_deadline(&waiting, 0).await?;
    at_its_deadline(&late, 0).await?;
    world.call(Method::POST, &format!("/v1/runs/{holder}/cancel"), None).await?;
    world.ended(&holder).await?;
    let working = world.start_run(json!({ "agent": "free", "prompt": "x", "deadline": "5s" })).await?;
    world.until(&working, SOON, |value| value["state"] == "running").await?;
    at_its_deadline(&working, 1).await?;
    for bad in ["soon", "0s", "400d"] {
        let (status, problem) =
            world.call(Method::POST, "/v1/runs", Some(&json!({ "agent": "free", "prompt": "x", "deadline": bad }))).await?;
        ensure!(
            status == StatusCode::UNPROCESSABLE_ENTITY && problem["detail"].as_str().is_some_and(|text| text.starts_with("deadline")),
            "{problem}"
        );
    }
    world.finish().await
}

#[tokio::test]
async fn an_agent_and_a_tenant_have_no_more_runs_at_a_time_than_they_may() -> Result<()> {
    let world = world("6").await?;
    let noted = "echo started $(date +%s%N); sleep 0.8; echo ended $(date +%s%N)";
    world.agent("one", &["/bin/sh", "-c", noted], json!({ "limits": { "concurrent": 1 } })).await?;
    world.agent("other", &["/bin/sh", "-c", noted], json!({})).await?;
    let mut runs = Vec::new();
    for _ in 0..4 {
        runs.push(world.run("one", &json!("x")).await?);
    }
    waits_for(&world, &runs[3], "limit").await?;
    let beside = world.run("other", &json!("x")).await?;
    let beside = world.ended(&beside).await?;
    ensure!(world.get(&format!("/v1/runs/{}", runs[3])).await?["ended_at"].is_null(), "a limited agent held up another: {beside}");
    let mut spans = Vec::new();
    for run in &runs {
        world.ended(run).await?;
        spans.push(span(&world, run).await?);
    }
    spans.sort_unstable();
    ensure!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0), "two at a time: {spans:?}");

    let path = format!("/v1/tenants/{}/limits", towpath_schemas::TenantId(world.tenant));
    let (status, answer) = world.call(Method::PUT, &path, Some(&json!({ "concurrent": 2 }))).await?;
    ensure!(status == StatusCode::OK && answer["concurrent"] == 2, "{answer}");
    let mut runs = Vec::new();
    for _ in 0..5 {
        runs.push(world.run("other", &json!("x")).await?);
    }
    waits_for(&world, &runs[4], "limit").await?;
    let mut spans = Vec::new();
    for run in &runs {
        world.ended(run).await?;
        spans.push(span(&world, run).await?);
    }
    for (start, _) in &spans {
        let at_once = spans.iter().filter(|(from, to)| from <= start && start < to).count();
        ensure!(at_once <= 2, "{at_once} at a time: {spans:?}");
    }
    world.finish().await
}

/// When its command said that it started and ended, in nanoseconds.
async fn span(world: &World, run: &str) -> Result<(u64, u64)> {
    let text = String::from_utf8(world.raw(run).await?)?;
    let at = |word: &str| {
        text.lines().find_map(|line| line.strip_prefix(word)).and_then(|at| at.trim().parse().ok()).with_context(|| text.clone())
    };
    Ok((at("started")?, at("ended")?))
}

#[tokio::test]
async fn what_is_paused_is_accepted_and_waits_until_it_is_resumed() -> Result<()> {
    let world = world("4").await?;
    world.example("echo").await?;
    let tenant = format!("/v1/tenants/{}", towpath_schemas::TenantId(world.tenant));
    for thing in ["/v1/agents/echo".to_owned(), tenant, "/v1".to_owned()] {
        act(&world, &format!("{thing}/pause")).await?;
        let run = world.run("echo", &json!({ "print": "hello" })).await?;
        waits_for(&world, &run, "pause").await?;
        // Longer than any sweep takes.
        tokio::time::sleep(Duration::from_secs(6)).await;
        ensure!(world.get(&format!("/v1/runs/{run}")).await?["state"] == "queued", "{thing} was paused and its run started");
        act(&world, &format!("{thing}/resume")).await?;
        let ended = world.ended(&run).await?;
        ensure!(ended["state"] == "succeeded", "{ended}");
    }
    world.finish().await
}

#[tokio::test]
async fn a_tenant_that_queues_hundreds_does_not_delay_another_s_first_and_sees_its_places() -> Result<()> {
    let world = world("2").await?;
    world.agent("short", &["/bin/sleep", "0.2"], json!({})).await?;
    let (_, other) = world.make_tenant("second").await?;
    let agent = json!({ "name": "short", "command": ["/bin/sleep", "0.2"] });
    let (status, answer) = world.call_as(&other, Method::PUT, "/v1/agents/short", Some(&agent)).await?;
    ensure!(status.is_success(), "{answer}");
    act(&world, "/v1/pause").await?;
    let mut runs = Vec::new();
    for _ in 0..300 {
        runs.push(world.run("short", &json!("x")).await?);
    }
    for (place, ahead) in [(0, 0), (1, 1), (57, 57), (100, 100), (299, 100)] {
        let run = world.get(&format!("/v1/runs/{}", runs[place])).await?;
        ensure!(run["ahead"] == ahead, "run {place} is told {} ahead", run["ahead"]);
    }
    act(&world, "/v1/resume").await?;
    world.ended(&runs[3]).await?;
    let (_, first) = world.call_as(&other, Method::POST, "/v1/runs", Some(&json!({ "agent": "short", "prompt": "x" }))).await?;
    let id = first["id"].as_str().context("id")?;
    let (_, ended) = world.call_as(&other, Method::GET, &format!("/v1/runs/{id}?wait=30s"), None).await?;
    let left = world.count("select count(*) from run where state = 'queued'").await?;
    ensure!(ended["state"] == "succeeded" && left > 200, "the other's first ended ({}) when {left} were left", ended["state"]);
    // Enough was seen.
    let waiting: Vec<sqlx::types::Uuid> = sqlx::query_scalar("select id from run where state = 'queued'").fetch_all(&world.db).await?;
    for run in waiting {
        let run = towpath_schemas::RunId(run);
        world.call(Method::POST, &format!("/v1/runs/{run}/cancel"), Some(&json!({}))).await?;
    }
    world.finish().await
}

#[tokio::test]
async fn dead_letters_are_seen_given_back_and_dropped() -> Result<()> {
    let world = world("1").await?;
    let insert = "insert into dead (role, subject, body, reason, attempts) values ('admit', 'command.admit.x', $1, 'because of a test', 20) returning id";
    let letter = async |body: Value| -> Result<i64> { Ok(sqlx::query_scalar(insert).bind(body).fetch_one(&world.db).await?) };
    let known = letter(json!({ "kind": "admit", "pool": "process-local" })).await?;
    let unknown = letter(json!({ "kind": "of a newer release" })).await?;
    let page = world.get("/v1/dead").await?;
    ensure!(
        page["items"]
            .as_array()
            .is_some_and(|items| items.len() == 2 && items[0]["id"] == unknown && items[1]["reason"] == "because of a test"),
        "{page}"
    );
    ensure!(world.get(&format!("/v1/dead/{known}")).await?["body"]["pool"] == "process-local");
    let (status, problem) = world.call(Method::POST, &format!("/v1/dead/{unknown}/redrive"), None).await?;
    ensure!(status == StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    act(&world, &format!("/v1/dead/{known}/redrive")).await?;
    let (status, _) = world.call(Method::DELETE, &format!("/v1/dead/{unknown}"), None).await?;
    ensure!(status == StatusCode::NO_CONTENT, "{status}");
    let (status, _) = world.call(Method::DELETE, &format!("/v1/dead/{unknown}"), None).await?;
    ensure!(status == StatusCode::NOT_FOUND, "{status}");
    let (_, other) = world.make_tenant("second").await?;
    let (status, _) = world.call_as(&other, Method::GET, "/v1/dead", None).await?;
    ensure!(status == StatusCode::FORBIDDEN, "another tenant's admin sees dead letters: {status}");
    world.finish().await
}
