//! The record: what of it is kept, found again, and told when it is not there.

use std::{
    io::Write,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use reqwest::StatusCode;
use serde_json::{Value, json};
use towpath_journeys::{SOON, World};
use towpath_schemas::frame::Frame;

#[tokio::test]
async fn a_damaged_chunk_is_told_where_it_is_and_reading_goes_on_behind_it() -> Result<()> {
    let world = World::start().await?;
    world
        .agent(
            "printer",
            &["/bin/sh", "-c", "yes aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa | head -c 400000; sleep 3; yes b | head -c 400000; sleep 3; echo last"],
            json!({}),
        )
        .await?;
    let run = world.run("printer", &json!("x")).await?;
    world.ended_within(&run, SOON).await?;
    let keys: Vec<String> = sqlx::query_scalar("select object_key from chunk order by first_seq").fetch_all(&world.db).await?;
    ensure!(keys.len() >= 3, "{} chunks", keys.len());
    world.store().await?.put(&keys[1], b"not a chunk".as_slice().into()).await?;
    let text = String::from_utf8(world.transcript(&run, "format=text").await?)?;
    ensure!(text.contains("[gap: ") && text.ends_with("last\n") && text.starts_with("aaaa"), "{} bytes, no gap told", text.len());
    let raw = world.raw(&run).await;
    ensure!(raw.is_err(), "raw bytes that are not whole were given as if they were");
    world.finish().await
}

#[tokio::test]
async fn lines_are_found_with_their_places_page_by_page() -> Result<()> {
    let world = World::start().await?;
    world.agent("printer", &["/bin/sh", "-c", "for i in $(seq 1 250); do printf 'line %s \\033[31mneedle\\033[0m\\n' $i; [ $((i % 50)) = 0 ] && sleep 0.1; done; echo hay"], json!({})).await?;
    let run = world.run("printer", &json!("x")).await?;
    world.ended(&run).await?;
    let (mut found, mut after, mut pages) = (Vec::new(), String::new(), 0);
    loop {
        let page = world.get(&format!("/v1/runs/{run}/search?q=NEEDLE&ignore_case=true{after}")).await?;
        found.extend(page["items"].as_array().cloned().unwrap_or_default());
        pages += 1;
        let Some(cursor) = page["cursor"].as_str() else { break };
        after = format!("&after={cursor}");
    }
    let texts: Vec<&str> = found.iter().filter_map(|found| found["text"].as_str()).collect();
    let wanted: Vec<String> = (1..=250).map(|line| format!("line {line} needle")).collect();
    ensure!(texts == wanted && pages >= 2, "{} lines on {pages} pages", texts.len());
    let place = found[0]["seq"].as_u64().context("seq")?;
    let around = String::from_utf8(world.transcript(&run, &format!("format=text&after=1.{}&until=1.{place}", place - 1)).await?)?;
    ensure!(around.contains("line 1 needle"), "{around}");
    ensure!(world.get(&format!("/v1/runs/{run}/search?q=thistle")).await?["items"] == json!([]), "what is not there was found");
    let (status, _) = world.call(reqwest::Method::GET, &format!("/v1/runs/{run}/search?q="), None).await?;
    ensure!(status == StatusCode::BAD_REQUEST, "{status}");
    world.finish().await
}

/// Numbered lines of 64 bytes.
fn lines(count: usize) -> Vec<u8> {
    (0..count).flat_map(|n| format!("{n:063}\n").into_bytes()).collect()
}

#[tokio::test]
async fn a_capped_record_keeps_its_head_and_its_tail_and_says_what_is_gone_between() -> Result<()> {
    const CAP: usize = 4 << 20;
    const LINES: usize = 400_000;
    let world = World::start().await?;
    let print = format!("import sys\nfor n in range({LINES}): sys.stdout.write('%063d\\n' % n)");
    world.agent("flood", &["/usr/bin/python3", "-c", &print], json!({ "limits": { "transcript_bytes": CAP } })).await?;
    let run = world.run("flood", &json!("x")).await?;
    let ended = world.ended(&run).await?;
    ensure!(ended["state"] == "succeeded" && ended["transcript"]["state"] == "gap", "{ended}");
    let printed = lines(LINES);
    let missing = usize::try_from(ended["transcript"]["missing"].as_u64().context("missing")?)?;
    ensure!(ended["transcript"]["bytes"] == printed.len(), "{ended}");

    let raw = world.raw(&run).await?;
    ensure!(raw.len() + missing == printed.len() && raw.len() <= CAP, "{} bytes kept, {missing} missing", raw.len());
    let head = raw.iter().zip(&printed).take_while(|(one, other)| one == other).count();
    ensure!(head >= CAP / 4 && printed.ends_with(&raw[head..]), "{head} bytes of the head, the tail is not what was printed last");
    ensure!(raw.len() - head >= CAP / 4, "{} bytes of the tail", raw.len() - head);

    let answer = world.client.get(format!("{}/v1/runs/{run}/transcript?format=raw", world.url)).bearer_auth(&world.token).send().await?;
    let told = answer.headers().get("towpath-transcript-missing").and_then(|value| value.to_str().ok()).map(str::to_owned);
    ensure!(told.as_deref() == Some(missing.to_string().as_str()), "the header says {told:?}");
    let ndjson = String::from_utf8(world.transcript(&run, "format=ndjson").await?)?;
    let gaps: Vec<Value> = ndjson
        .lines()
        .map(serde_json::from_str::<Value>)
        .filter(|line| !line.as_ref().is_ok_and(|line| line["kind"] != "gap"))
        .collect::<Result<_, _>>()?;
    ensure!(gaps.len() == 1 && gaps[0]["bytes"] == missing, "{gaps:?}");
    let text = String::from_utf8(world.transcript(&run, "format=text").await?)?;
    ensure!(text.matches("[gap: more than 4194304 bytes were printed").count() == 1, "no gap in the text");

    // What went is given up in the store, too, and only that.
    let (live, unused): (i64, i64) = sqlx::query_as(
        "select count(*) filter (where state = 'live'), count(*) filter (where state = 'deleting' and unused_at is not null) from object",
    )
    .fetch_one(&world.db)
    .await?;
    ensure!(live == world.count("select count(*) from chunk").await? && unused > 0, "{live} live, {unused} unused");
    world.finish().await
}

#[tokio::test]
async fn chunks_behind_one_another_are_what_the_zstd_tool_reads() -> Result<()> {
    let world = World::start().await?;
    world.agent("printer", &["/bin/sh", "-c", "seq 1 100000; sleep 3; seq 100001 200000"], json!({})).await?;
    let run = world.run("printer", &json!("x")).await?;
    world.ended(&run).await?;
    let keys: Vec<String> = sqlx::query_scalar("select object_key from chunk order by first_seq").fetch_all(&world.db).await?;
    ensure!(keys.len() >= 3, "{} chunks", keys.len());
    let store = world.store().await?;
    let mut all = Vec::new();
    for key in &keys {
        all.extend_from_slice(&store.get(key).await?);
    }
    let mut tool = Command::new("zstd").args(["-d", "-c"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("zstd")?;
    let mut input = tool.stdin.take().context("stdin")?;
    let writing = std::thread::spawn(move || input.write_all(&all));
    let output = tool.wait_with_output()?;
    writing.join().map_err(|_| anyhow::anyhow!("writing"))??;
    ensure!(output.status.success(), "zstd: {}", output.status);
    let frames = Frame::decode_all(&output.stdout)?;
    let printed: Vec<u8> = frames.iter().filter(|frame| frame.kind.is_output()).flat_map(|frame| frame.payload.clone()).collect();
    let wanted: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
    ensure!(printed == wanted.as_bytes(), "{} bytes by the tool, {} were printed", printed.len(), wanted.len());
    world.finish().await
}

#[tokio::test]
async fn an_ended_run_is_removed_with_all_that_was_kept_of_it() -> Result<()> {
    let world = World::start().await?;
    world.agent("worker", &["/bin/sh", "-c", "echo printed; echo out > /workspace/outputs/out.txt; sleep 60"], json!({})).await?;
    let run = world.run("worker", &json!("x")).await?;
    world.until(&run, SOON, |value| value["state"] == "running").await?;
    let (status, problem) = world.call(reqwest::Method::DELETE, &format!("/v1/runs/{run}"), None).await?;
    ensure!(status == StatusCode::CONFLICT && problem["code"] == "run_not_ended", "{problem}");
    world.call(reqwest::Method::POST, &format!("/v1/runs/{run}/cancel"), Some(&json!({}))).await?;
    let ended = world.ended(&run).await?;
    let session = ended["session"].as_str().context("session")?.to_owned();
    stage::wait_for("the run to be removed", SOON, async || {
        let answer = world.call(reqwest::Method::DELETE, &format!("/v1/runs/{run}"), None).await.ok()?;
        (answer.0 == StatusCode::NO_CONTENT).then_some(())
    })
    .await?;
    let folders = world.state.join("sandboxes");
    stage::wait_for("the sandbox's folder to go", SOON, async || std::fs::read_dir(&folders).ok()?.next().is_none().then_some(())).await?;
    for path in ["", "/history", "/transcript", "/outputs", "/steers", "/events", "/deliveries"] {
        let (status, _) = world.call(reqwest::Method::GET, &format!("/v1/runs/{run}{path}"), None).await?;
        ensure!(status == StatusCode::NOT_FOUND, "{path}: {status}");
    }
    for table in [
        "run",
        "run_history",
        "run_step",
        "run_result",
        "run_target",
        "steer",
        "sandbox",
        "slot",
        "transcript",
        "chunk",
        "output",
        "delivery",
    ] {
        let left: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(format!("select count(*) from {table}"))).fetch_one(&world.db).await?;
        ensure!(left == 0, "{left} rows left in {table}");
    }
    ensure!(world.count("select count(*) from object where state = 'live'").await? == 0, "objects are left");
    // The session and its workspace go on.
    let next = world.start_run(json!({ "agent": "worker", "prompt": "y", "session": session })).await?;
    world.until(&next, SOON, |value| value["state"] == "running").await?;
    ensure!(world.workspace(&session).join("outputs/out.txt").is_file(), "the workspace is gone");
    world.call(reqwest::Method::POST, &format!("/v1/runs/{next}/cancel"), Some(&json!({}))).await?;
    world.finish().await
}

#[tokio::test]
async fn a_search_that_finds_nothing_for_long_answers_where_to_go_on() -> Result<()> {
    let world = World::start().await?;
    let print = "import sys\nfor n in range(70): sys.stdout.write(('y' * 1023 + '\\n') * 1024)\nprint('needle')";
    world.agent("hay", &["/usr/bin/python3", "-c", print], json!({})).await?;
    let run = world.run("hay", &json!("x")).await?;
    world.ended(&run).await?;
    let first = world.get(&format!("/v1/runs/{run}/search?q=needle")).await?;
    let cursor = first["cursor"].as_str().context("no cursor after 64 MiB")?;
    ensure!(first["items"] == json!([]), "{first}");
    let second = world.get(&format!("/v1/runs/{run}/search?q=needle&after={cursor}")).await?;
    ensure!(second["items"][0]["text"] == "needle" && second["cursor"].is_null(), "{second}");
    world.finish().await
}

#[tokio::test]
async fn a_run_that_cannot_be_removed_yet_keeps_all_that_it_has() -> Result<()> {
    let world = World::start().await?;
    world.example("echo").await?;
    let receiver = towpath_journeys::Receiver::start(&["500 Internal Server Error"]).await?;
    let run = world
        .start_run(json!({ "agent": "echo", "prompt": "{\"print\": \"kept\"}", "deliver": [{ "webhook": { "url": receiver.url } }] }))
        .await?;
    world.ended(&run).await?;
    let remove = async || world.call(reqwest::Method::DELETE, &format!("/v1/runs/{run}"), None).await;
    // First its sandbox holds it, then the delivery that fails.
    let told = |problem: &Value| problem["detail"].as_str().is_some_and(|detail| detail.contains("deliveries"));
    stage::wait_for("only the delivery to hold it", SOON, async || remove().await.ok().filter(|(_, problem)| told(problem)).map(|_| ()))
        .await?;
    let (status, problem) = remove().await?;
    ensure!(status == StatusCode::CONFLICT && problem["code"] == "run_not_ended", "{problem}");
    ensure!(world.raw(&run).await?.starts_with(b"kept"), "its transcript went although it was refused");
    // Its schedule is longer than any test.
    sqlx::query("update delivery set state = 'dead', ended_at = now(), next_attempt_at = null").execute(&world.db).await?;
    world.finish().await
}
