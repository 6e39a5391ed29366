//! How commands end, and what is told of it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use towpath_journeys::{SOON, World, sha256};

async fn ends(world: &World, command: &[&str], more: Value) -> Result<Value> {
    world.agent("one", command, more).await?;
    let run = world.run("one", &json!("x")).await?;
    world.ended(&run).await
}

#[tokio::test]
async fn exit_codes_signals_and_commands_that_cannot_be_are_told_apart() -> Result<()> {
    let world = World::start().await?;
    for code in [0, 1, 126, 127, 137] {
        let ended = ends(&world, &["/bin/sh", "-c", &format!("exit {code}")], json!({})).await?;
        ensure!(ended["exit"] == json!({ "code": code, "signal": null, "oom": ended["exit"]["oom"] }), "{ended}");
        let (state, reason) = if code == 0 { ("succeeded", Value::Null) } else { ("failed", json!("exit_code")) };
        ensure!(ended["state"] == state && ended["reason"] == reason, "{ended}");
    }
    for (name, signal) in [("KILL", 9), ("TERM", 15), ("SEGV", 11)] {
        let ended = ends(&world, &["/bin/sh", "-c", &format!("kill -{name} $$")], json!({})).await?;
        ensure!(
            ended["state"] == "failed"
                && ended["reason"] == "signal"
                && ended["exit"]["signal"] == signal
                && ended["exit"]["code"].is_null(),
            "{ended}"
        );
    }
    let ended = ends(&world, &["frobnicate", "--now"], json!({})).await?;
    ensure!(ended["reason"] == "command_not_found" && ended["message"].as_str().is_some_and(|text| text.contains("frobnicate")), "{ended}");
    ensure!(ended["state"] == "failed" && ended["exit"]["code"].is_null() && ended["exit"]["signal"].is_null(), "{ended}");
    let ended = ends(&world, &["/usr/bin"], json!({})).await?;
    ensure!(ended["state"] == "failed" && ended["reason"].as_str().is_some_and(|reason| reason.starts_with("command_not")), "{ended}");
    world.finish().await
}

#[tokio::test]
async fn output_of_any_kind_reads_back_byte_for_byte() -> Result<()> {
    let world = World::start().await?;
    // 200 MB without a newline.
    let ended =
        ends(&world, &["/usr/bin/python3", "-c", "import sys\nfor _ in range(200): sys.stdout.buffer.write(b'x' * 1000000)"], json!({}))
            .await?;
    ensure!(
        ended["state"] == "succeeded" && ended["transcript"] == json!({ "state": "complete", "bytes": 200_000_000, "missing": 0 }),
        "{}",
        ended["transcript"]
    );
    ensure!(ended["result"]["text"].as_str().is_some_and(|text| text.len() == 64 * 1024), "the result is the tail");
    let run = ended["id"].as_str().context("id")?;
    ensure!(sha256(&world.raw(run).await?) == sha256(&vec![b'x'; 200_000_000]), "200 MB differ");
    // Invalid UTF-8, on both streams.
    let ended =
        ends(&world, &["/usr/bin/python3", "-c", "import os\nos.write(1, bytes(range(256)) * 3)\nos.write(2, b'\\xff\\xfe')"], json!({}))
            .await?;
    let run = ended["id"].as_str().context("id")?;
    let all: Vec<u8> = (0..3).flat_map(|_| 0..=255_u8).collect();
    ensure!(world.transcript(run, "format=raw&stream=stdout").await? == all, "stdout differs");
    ensure!(world.transcript(run, "format=raw&stream=stderr").await? == [0xff, 0xfe], "stderr differs");
    ensure!(ended["result"]["text"].as_str().is_some_and(|text| text.contains('\u{fffd}') && !text.contains('\0')), "{}", ended["result"]);
    world.finish().await
}

#[tokio::test]
async fn an_agent_that_ignores_term_or_leaves_children_behind_ends_all_the_same() -> Result<()> {
    let world = World::start().await?;
    let script = "trap '' TERM; (setsid sh -c 'trap \"\" TERM; while :; do sleep 0.1; done' &) ; echo ready; while :; do sleep 0.1; done";
    world.agent("stubborn", &["/bin/sh", "-c", script], json!({ "limits": { "grace_s": 1 } })).await?;
    let run = world.run("stubborn", &json!("x")).await?;
    world.until(&run, SOON, |value| value["transcript"]["bytes"].as_i64().unwrap_or(0) > 0).await?;
    let (status, answer) = world.call(Method::POST, &format!("/v1/runs/{run}/cancel"), None).await?;
    ensure!(status == StatusCode::ACCEPTED && answer["state"] == "stopping" && answer["wanted"] == "canceled", "{status} {answer}");
    let began = Instant::now();
    let ended = world.ended(&run).await?;
    ensure!(ended["state"] == "canceled" && ended["exit"]["signal"] == 9, "{ended}");
    ensure!(began.elapsed() < Duration::from_secs(16), "canceled only after {:?}", began.elapsed());
    let (status, again) = world.call(Method::POST, &format!("/v1/runs/{run}/cancel"), None).await?;
    ensure!(status == StatusCode::OK && again["state"] == "canceled", "{status} {again}");
    // A daemonised child of a command that ends by itself.
    let ended = ends(
        &world,
        &["/bin/sh", "-c", "(setsid sh -c 'sleep 1000' </dev/null >/dev/null 2>&1 &); echo done"],
        json!({ "limits": { "grace_s": 1 } }),
    )
    .await?;
    ensure!(ended["state"] == "succeeded", "{ended}");
    world.finish().await
}

#[tokio::test]
async fn walls_hold_against_memory_forks_and_a_full_disk() -> Result<()> {
    let world = World::start().await?;
    let bomb = "import os\nn = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            import time; time.sleep(1000)\n        n += 1\nexcept OSError as e:\n    print('refused after', n < 64, e.errno)";
    let ended = ends(&world, &["/usr/bin/python3", "-c", bomb], json!({ "sandbox": { "pids": 64 }, "limits": { "grace_s": 1 } })).await?;
    ensure!(ended["state"] == "succeeded" && ended["result"]["text"] == "refused after True 11\n", "{ended}");
    let ended = ends(
        &world,
        &["/usr/bin/python3", "-c", "x = bytearray(400 << 20)\nprint(len(x))"],
        json!({ "sandbox": { "memory_bytes": 64 << 20 } }),
    )
    .await?;
    ensure!(ended["state"] == "failed" && ended["reason"] == "out_of_memory" && ended["exit"]["oom"] == true, "{ended}");
    // Field case E16: its owner reads which limit it was.
    ensure!(ended["message"] == "out of memory (limit 64 MiB)", "{ended}");
    let ended = ends(
        &world,
        &["/bin/sh", "-c", "dd if=/dev/zero of=/workspace/big bs=1M count=2000; sleep 60"],
        json!({ "sandbox": { "disk_bytes": 32 << 20 } }),
    )
    .await?;
    ensure!(ended["state"] == "failed" && ended["reason"] == "disk_limit", "{ended}");
    world.finish().await
}

#[tokio::test]
async fn a_sandbox_sees_its_workspace_and_nothing_of_the_host() -> Result<()> {
    let world = World::start().await?;
    let script = "id -u; cat /etc/shadow 2>&1; ls /root /home /work /var 2>&1; ls -d / /*; grep CapEff /proc/self/status; ls /proc | grep -c '^[0-9]'; cat /sys/class/net/*/address 2>/dev/null; env";
    let ended = ends(&world, &["/bin/sh", "-c", script], json!({})).await?;
    let text = ended["result"]["text"].as_str().context("result")?;
    ensure!(!text.starts_with("0\n") && !text.contains("root:"), "{text}");
    ensure!(text.contains("CapEff:\t0000000000000000"), "{text}");
    for hidden in ["TOWPATH_DATABASE_URL", "TOWPATH_MASTER_KEY", "\n/root\n", "\n/home\n", "\nlog\n", "\nlib\n"] {
        ensure!(!text.contains(hidden), "{hidden} is seen: {text}");
    }
    world.finish().await
}
