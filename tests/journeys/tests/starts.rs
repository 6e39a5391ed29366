//! Sandboxes that do not come up, workers that stand still or come late while others start, and an object store with odd answers.

use std::{fs, time::Duration};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use stage::{Mode, Proxy, wait_for};
use towpath_journeys::{Ground, SOON, World, sha256, supervisors};
use towpath_schemas::body::RunState;

fn signal(pid: i32, signal: Signal) -> Result<()> {
    Ok(kill_process(Pid::from_raw(pid).context("pid")?, signal)?)
}

/// Field case E14: a sandbox that is gone before it said anything is made again `start_retries` times, and then the run says so.
#[tokio::test]
async fn a_sandbox_that_is_gone_before_its_hello_is_retried_three_times_and_then_told() -> Result<()> {
    let world = World::prepare(Ground::shared().await?, &[]).await?;
    world.spawn("api", &["api"])?;
    // Where no gateway is, so that nobody says hello.
    let nowhere = format!("ws://127.0.0.1:{}", stage::free_port()?);
    world.spawn_with("worker", &["worker"], &[("TOWPATH_GATEWAY_URL", &nowhere)])?;
    world.ready().await?;
    world.example("echo").await?;
    let run = world.run("echo", &json!({ "witness": true })).await?;
    for epoch in 1..=4 {
        let recorded = world.state.join(format!("sandboxes/{run}.{epoch}/identity.json"));
        wait_for("its supervisor to be up", SOON, async || recorded.exists().then_some(())).await.with_context(|| world.logs())?;
        for pid in supervisors(&world.state) {
            signal(pid, Signal::KILL)?;
        }
    }
    let ended = world.ended(&run).await?;
    ensure!(ended["state"] == "failed" && ended["reason"] == "start_failed" && ended["epoch"] == 4, "{ended}");
    ensure!(ended["started_at"].is_null() && ended["exit"].is_null(), "it never started: {ended}");
    ensure!(ended["message"].as_str().is_some_and(|text| text.contains("each time it was tried")), "{ended}");
    let history = world.get(&format!("/v1/runs/{run}/history")).await?;
    let retries = history["items"].as_array().context("history")?.iter().filter(|entry| entry["reason"] == "start_retry").count();
    ensure!(retries == 3, "{history}");
    ensure!(!world.workspace(ended["session"].as_str().context("session")?).join("witness").exists(), "it was executed");
    world.finish().await
}

/// Field case E17: what a host can never start is refused at once and in plain words, and keeps no slot.
#[tokio::test]
async fn what_a_host_can_never_start_fails_at_once_with_a_reason_and_its_slot_is_free() -> Result<()> {
    let world = World::prepare(Ground::shared().await?, &[]).await?;
    let (real, removed) = (world.env["TOWPATH_SUPERVISOR"].clone(), world.state.join("towpath-supervisor"));
    fs::copy(&real, &removed)?;
    world.spawn("api", &["api"])?;
    let path = removed.display().to_string();
    world.spawn_with("worker", &["worker"], &[("TOWPATH_SUPERVISOR", &path), ("TOWPATH_SLOTS", "1")])?;
    world.ready().await?;
    let pool = async || (world.count("select count(*) from pool").await.ok()? == 1).then_some(());
    wait_for("the host to offer its slot", SOON, pool).await.with_context(|| world.logs())?;
    fs::remove_file(&removed)?;
    world.example("echo").await?;
    for _ in 0..2 {
        let ended = world.ended(&world.run("echo", &json!({})).await?).await?;
        ensure!(ended["state"] == "failed" && ended["reason"] == "wall_unavailable" && ended["epoch"] == 1, "{ended}");
        ensure!(ended["message"].as_str().is_some_and(|text| text.contains(&path) && text.contains("cannot be found")), "{ended}");
    }
    ensure!(world.count("select count(*) from slot").await? == 0, "a slot is taken");
    // Once the host is mended its one slot serves the next.
    fs::copy(real, &removed)?;
    let ended = world.ended(&world.run("echo", &json!({})).await?).await?;
    ensure!(ended["state"] == "succeeded", "{ended}");
    world.finish().await
}

/// Field case F16: neither a worker that stands still for longer than `ack_wait`, again and again, nor one that is started beside it makes any run start twice.
#[tokio::test]
async fn a_starved_worker_and_one_that_comes_late_execute_nothing_twice() -> Result<()> {
    let waits = [("TOWPATH_HANDLER_S", "2"), ("TOWPATH_ACK_WAIT_S", "3"), ("TOWPATH_SLOTS", "12")];
    let world = World::prepare(Ground::shared().await?, &waits).await?;
    world.spawn("api", &["api"])?;
    world.spawn("starved", &["worker"])?;
    world.spawn("steady", &["worker"])?;
    world.ready().await?;
    let script = "echo $TOWPATH_RUN_ID $TOWPATH_EPOCH >> /workspace/witness; echo begun; sleep 4; echo done";
    world.agent("sleeper", &["/bin/sh", "-c", script], json!({})).await?;
    let starved = i32::try_from(world.process("starved", |process| Ok(process.pid()))?)?;
    let mut runs = Vec::new();
    for pulse in 0..4 {
        for _ in 0..3 {
            runs.push(world.run("sleeper", &json!("x")).await?);
        }
        signal(starved, Signal::STOP)?;
        if pulse == 1 {
            world.spawn("late", &["worker"])?;
        }
        tokio::time::sleep(Duration::from_secs(4)).await;
        signal(starved, Signal::CONT)?;
    }
    for run in &runs {
        let ended = world.ended_within(run, SOON * 2).await?;
        ensure!(ended["state"] == RunState::Succeeded.word() && ended["epoch"] == 1, "{ended}\n{}", world.logs());
        let witness = fs::read_to_string(world.workspace(ended["session"].as_str().context("session")?).join("witness"))?;
        ensure!(witness == format!("{run} 1\n"), "{witness}");
        ensure!(world.raw(run).await? == b"begun\ndone\n", "its transcript differs");
    }
    world.finish().await
}

/// Field case F23: an `ETag` tells nothing here; whether bytes are whole is told by our own SHA-256.
#[tokio::test]
async fn an_object_store_whose_etags_mean_nothing_changes_nothing() -> Result<()> {
    let ground = Ground::shared().await?;
    let store = url::Url::parse(&ground.s3.endpoint)?;
    let proxy = Proxy::tcp(([127, 0, 0, 1], store.port().context("port")?).into()).await?;
    let through = proxy.through(&ground.s3.endpoint)?;
    let world = World::prepare(ground, &[("TOWPATH_S3_ENDPOINT", &through)]).await?;
    world.spawn("all", &["dev"])?;
    world.ready().await?;
    let script = "cat /workspace/files/in.bin > $TOWPATH_OUTPUTS_DIR/out.bin; seq 100000";
    world.agent("copier", &["/bin/sh", "-c", script], json!({})).await?;
    let printed: String = (1..=100_000).map(|n| format!("{n}\n")).collect();
    for etag in ["\"abc\"", "\"\"", "", "\"d41d8cd98f00b204e9800998ecf8427e-3\"", "unquoted"] {
        proxy.set(Mode::Etag(etag)).await;
        let before = proxy.etags_changed();
        let content = format!("for {etag}").repeat(100_000).into_bytes();
        let (status, file) = world.upload("in.bin", content.clone()).await?;
        ensure!(status.is_success(), "{etag}: {status} {file}");
        let run = world.start_run(json!({ "agent": "copier", "prompt": "x", "files": [file["id"]] })).await?;
        let ended = world.ended(&run).await?;
        ensure!(ended["state"] == "succeeded" && ended["transcript"]["state"] == "complete", "{etag}: {ended}");
        ensure!(sha256(&world.raw(&run).await?) == sha256(printed.as_bytes()), "{etag}: the transcript differs");
        let output = world.client.get(format!("{}/v1/runs/{run}/outputs/out.bin", world.url)).bearer_auth(&world.token).send().await?;
        ensure!(output.status().is_success() && output.bytes().await? == content, "{etag}: the output differs");
        ensure!(proxy.etags_changed() > before + 2, "{etag}: nothing went through the proxy");
    }
    world.finish().await
}
