//! Gone or not: sandboxes that are cut off, under a fence and without one; a restored backup.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use stage::{Mode, Proxy, wait_for};
use towpath_journeys::{Ground, Receiver, SOON, World, supervisors};

/// Notes when it lived, in its workspace: the epoch and the time, every tenth of a second. The first one works for ever, its successor ends well.
const LIVING: &str = r#"
import os, pathlib, time
epoch = os.environ["TOWPATH_EPOCH"]
notes = pathlib.Path("/workspace/alive")
first = notes.read_text().split()[0] if notes.exists() else epoch
print("epoch", epoch, flush=True)
until = time.time() + (600 if epoch == first else 1)
while time.time() < until:
    with notes.open("a") as file:
        file.write("%s %.3f\n" % (epoch, time.time()))
    time.sleep(0.1)
pathlib.Path(os.environ["TOWPATH_RESULT_FILE"]).write_text("done by " + epoch)
"#;

async fn living(world: &World, more: Value) -> Result<String> {
    world.agent("living", &["/usr/bin/python3", "-c", LIVING], more).await?;
    let run = world.run("living", &json!("x")).await?;
    world.until(&run, SOON, |value| value["transcript"]["bytes"].as_i64().unwrap_or(0) > 0).await?;
    Ok(run)
}

/// When each epoch was alive: (epoch, first, last note).
fn lives(world: &World, run: &Value) -> Result<Vec<(i64, f64, f64)>> {
    let notes = std::fs::read_to_string(world.workspace(run["session"].as_str().context("session")?).join("alive"))?;
    let mut lives: Vec<(i64, f64, f64)> = Vec::new();
    for line in notes.lines() {
        let (epoch, at) = line.split_once(' ').context("note")?;
        let (epoch, at) = (epoch.parse()?, at.parse()?);
        match lives.iter_mut().find(|(known, ..)| *known == epoch) {
            Some((_, first, last)) => (*first, *last) = (first.min(at), last.max(at)),
            None => lives.push((epoch, at, at)),
        }
    }
    Ok(lives)
}

/// Two epochs, one wholly after the other, and the second one's result.
fn ran_one_after_the_other(world: &World, run: &Value) -> Result<()> {
    ensure!(run["state"] == "succeeded", "{run}\n{}", world.logs());
    let lives = lives(world, run)?;
    ensure!(lives.len() == 2 && lives[0].0 < lives[1].0, "{lives:?}");
    ensure!(lives[0].2 < lives[1].1, "both were alive at once: {lives:?}");
    ensure!(run["epoch"] == lives[1].0 && run["result"]["text"] == format!("done by {}", lives[1].0), "{run}");
    Ok(())
}

fn signal_all(pids: &[i32], signal: Signal) -> Result<()> {
    for pid in pids {
        kill_process(Pid::from_raw(*pid).context("pid")?, signal)?;
    }
    Ok(())
}

/// Field cases E15 and F15: whoever is only cut off must have stopped before its successor begins.
#[tokio::test]
async fn a_frozen_supervisor_s_command_has_ended_before_its_successor_begins() -> Result<()> {
    let world = World::start().await?;
    let run = living(&world, json!({ "on_lost": "restart", "fence_after": 15 })).await?;
    let frozen = supervisors(&world.state);
    ensure!(frozen.len() == 1, "{frozen:?}");
    signal_all(&frozen, Signal::STOP)?;
    let ended = world.ended_within(&run, SOON * 2).await?;
    ran_one_after_the_other(&world, &ended)?;
    ensure!(ended["transcript"]["state"] == "gap", "{ended}");
    let text = String::from_utf8(world.transcript(&run, "format=text").await?)?;
    ensure!(text.starts_with("epoch 1") && text.contains("[gap: ") && text.contains("epoch 2"), "{text}");
    // It comes back and finds that it is fenced; its host removes what it leaves.
    signal_all(&frozen, Signal::CONT)?;
    wait_for("the fenced supervisor to leave", SOON, async || supervisors(&world.state).is_empty().then_some(())).await?;
    let folders = async || (std::fs::read_dir(world.state.join("sandboxes")).map_or(0, Iterator::count) == 0).then_some(());
    wait_for("its folder to go", SOON, folders).await?;
    let after = world.get(&format!("/v1/runs/{run}")).await?;
    ensure!(after["revision"] == ended["revision"], "{after}");
    world.finish().await
}

#[tokio::test]
async fn a_sandbox_cut_off_for_longer_than_its_fence_says_so_when_it_is_back_and_is_started_again() -> Result<()> {
    let world = World::prepare(Ground::shared().await?, &[]).await?;
    let proxy = Proxy::tcp(world.env["TOWPATH_LISTEN"].parse()?).await?;
    let through = format!("ws://{}", proxy.address());
    world.spawn_with("all", &["dev"], &[("TOWPATH_GATEWAY_URL", &through)])?;
    world.ready().await?;
    let run = living(&world, json!({ "on_lost": "restart", "fence_after": 15 })).await?;
    proxy.set(Mode::Refuse).await;
    proxy.cut().await;
    tokio::time::sleep(Duration::from_secs(17)).await;
    proxy.set(Mode::Pass).await;
    let ended = world.ended_within(&run, SOON * 2).await?;
    ran_one_after_the_other(&world, &ended)?;
    world.finish().await
}

#[tokio::test]
async fn a_short_cut_costs_a_fenced_run_nothing_and_without_restart_a_long_one_ends_it() -> Result<()> {
    let world = World::prepare(Ground::shared().await?, &[]).await?;
    let proxy = Proxy::tcp(world.env["TOWPATH_LISTEN"].parse()?).await?;
    let through = format!("ws://{}", proxy.address());
    world.spawn_with("all", &["dev"], &[("TOWPATH_GATEWAY_URL", &through)])?;
    world.ready().await?;
    let run = living(&world, json!({ "fence_after": 15 })).await?;
    let cut = async |seconds| {
        proxy.set(Mode::Refuse).await;
        proxy.cut().await;
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        proxy.set(Mode::Pass).await;
    };
    cut(3).await;
    // Long enough for a lease that was not granted again to run out.
    tokio::time::sleep(Duration::from_secs(16)).await;
    ensure!(world.get(&format!("/v1/runs/{run}")).await?["state"] == "running", "{}", world.logs());
    cut(17).await;
    let ended = world.ended_within(&run, SOON * 2).await?;
    ensure!(ended["state"] == "failed" && ended["epoch"] == 1, "{ended}");
    ensure!(ended["reason"] == "fence" || ended["reason"] == "sandbox_lost", "{ended}");
    world.finish().await
}

#[tokio::test]
async fn an_owner_is_told_once_when_nobody_knows_whether_a_sandbox_is_there() -> Result<()> {
    let world = World::start().await?;
    let receiver = Receiver::start(&["204 No Content"]).await?;
    world.agent("waiter", &["/bin/sh", "-c", "echo up; sleep 600"], json!({})).await?;
    let run = world.start_run(json!({ "agent": "waiter", "prompt": "x", "deliver": [{ "webhook": { "url": receiver.url } }] })).await?;
    world.until(&run, SOON, |value| value["transcript"]["bytes"].as_i64().unwrap_or(0) > 0).await?;
    // Its host falls silent; nobody else may judge the sandbox.
    let guests = supervisors(&world.state);
    signal_all(&guests, Signal::STOP)?;
    world.kill("all")?;
    world.spawn("api", &["api"])?;
    sqlx::query("update sandbox set unknown_since = now() - interval '16 minutes', observed = 'unknown'").execute(&world.db).await?;
    world.spawn("worker", &["worker", "--roles", "clock,deliver,transcript"])?;
    world.ready().await?;
    let notice = wait_for("the notice", SOON * 2, async || receiver.received().into_iter().next()).await?;
    let body: Value = serde_json::from_slice(&notice.body)?;
    ensure!(body["type"] == "run.sandbox_unknown" && body["data"]["run"]["id"] == run, "{body}");
    ensure!(body["data"]["run"]["state"] == "running" && body["data"]["run"]["reason"] == "sandbox_unknown", "{body}");
    let history = world.get(&format!("/v1/runs/{run}/history")).await?;
    let doubts = history["items"].as_array().context("history")?.iter().filter(|entry| entry["on"] == "doubted").count();
    ensure!(doubts == 1, "{history}");
    world.kill("worker")?;
    world.spawn("worker", &["worker"])?;
    signal_all(&guests, Signal::CONT)?;
    world.call(reqwest::Method::POST, &format!("/v1/runs/{run}/cancel"), None).await?;
    world.ended(&run).await?;
    let bodies = wait_for("the result", SOON, async || {
        let bodies: Vec<Value> = receiver.received().iter().filter_map(|one| serde_json::from_slice(&one.body).ok()).collect();
        (bodies.len() >= 2).then_some(bodies)
    })
    .await?;
    let types: Vec<&str> = bodies.iter().filter_map(|body| body["type"].as_str()).collect();
    ensure!(types == ["run.sandbox_unknown", "run.ended"], "{types:?}");
    world.finish().await
}

/// Everything but the database goes on; the database goes back. What it knew to be alive is fenced, what it never knew is refused and listed, and no epoch is given out twice.
#[tokio::test]
async fn after_a_restored_backup_no_epoch_is_given_out_twice_and_what_came_after_is_listed() -> Result<()> {
    let world = World::start().await?;
    let run = living(&world, json!({ "on_lost": "restart", "fence_after": 86400 })).await?;
    world.example("echo").await?;
    let backup = world.dump()?;
    // After the backup: the run is lost and starts again as epoch 2, and another one comes and ends.
    signal_all(&supervisors(&world.state), Signal::KILL)?;
    world.until(&run, SOON, |value| value["epoch"] == 2 && value["state"] == "running").await?;
    let later = world.run("echo", &json!({ "print": "after the backup" })).await?;
    world.ended(&later).await?;
    world.until(&run, SOON, |value| value["state"] == "running" || value["state"] == "succeeded").await?;
    world.kill("all")?;
    world.restore(&backup)?;
    let told = world.command(&["recover", "--dry-run"])?;
    ensure!(told.contains("1 runs may have a sandbox"), "{told}");
    let told = world.command(&["recover"])?;
    ensure!(told.contains("1 runs may have a sandbox") && told.contains(&later) && told.contains("came after the backup"), "{told}");
    ensure!(world.command(&["recover"])?.contains("0 runs may have"), "what is recovered is recovered");
    world.spawn("all", &["dev"])?;
    world.ready().await?;
    let ended = world.ended_within(&run, SOON * 2).await?;
    ensure!(ended["state"] == "succeeded" && ended["epoch"].as_i64() > Some(1000), "{ended}\n{}", world.logs());
    let epochs: Vec<i64> = lives(&world, &ended)?.into_iter().map(|(epoch, ..)| epoch).collect();
    ensure!(epochs[..2] == [1, 2] && epochs.last() == ended["epoch"].as_i64().as_ref(), "{epochs:?}");
    let (status, _) = world.call(reqwest::Method::GET, &format!("/v1/runs/{later}"), None).await?;
    ensure!(status == 404, "{status}");
    world.finish().await
}
