//! The main job: a message becomes a run, the run works on real input, a person steers it, its result comes back.

use std::io::Write;

use anyhow::{Context, Result, ensure};
use reqwest::StatusCode;
use serde_json::json;
use stage::wait_for;
use towpath_journeys::{Receiver, SOON, World};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SECRET: &str = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3";

/// A small source tree as a zip archive, made by the zip module of the Python that agents use too.
fn archive() -> Result<Vec<u8>> {
    let folder = tempfile::tempdir()?;
    for (name, lines) in [("src/main.rs", 30), ("src/deep/other.rs", 12), ("script.py", 7), ("README.md", 3)] {
        let path = folder.path().join("tree").join(name);
        std::fs::create_dir_all(path.parent().context("parent")?)?;
        let mut file = std::fs::File::create(path)?;
        for line in 0..lines {
            writeln!(file, "// line {line}")?;
        }
    }
    let status = std::process::Command::new("tar").args(["-czf", "tree.tar.gz", "tree"]).current_dir(folder.path()).status()?;
    ensure!(status.success(), "tar");
    Ok(std::fs::read(folder.path().join("tree.tar.gz"))?)
}

/// Field cases S1, S2 and S4, as far as they are about Towpath's own logs: secrets are looked for by their text, in everything that every process wrote at its most
/// talkative, and in everything that Postgres holds.
#[tokio::test]
async fn no_secret_is_in_a_log_or_readable_in_the_database() -> Result<()> {
    let world = World::prepare(towpath_journeys::Ground::shared().await?, &[("TOWPATH_LOG", "trace")]).await?;
    world.spawn("all", &["dev"])?;
    world.ready().await?;
    world.example("echo").await?;
    let receiver = Receiver::start(&["500 Internal Server Error", "200 OK"]).await?;
    let url = format!("{}secret-path-8c1f", receiver.url);
    let body = json!({ "agent": "echo", "prompt": "{}", "deliver": [{ "webhook": { "url": url, "secret": SECRET } }] });
    let run = world.start_run(body).await?;
    world.ended(&run).await?;
    wait_for("the delivery", SOON, async || (receiver.received().len() >= 2).then_some(())).await?;
    let (_, token) =
        world.call(reqwest::Method::POST, "/v1/tokens", Some(&json!({ "principal": "other", "scopes": ["runs"], "days": 1 }))).await?;
    let new = token["secret"].as_str().context("secret")?.to_owned();
    world.call_as(&new, reqwest::Method::GET, "/v1/runs", None).await?;
    let log = world.process("all", |process| Ok(process.log()))?;
    ensure!(log.len() > 10_000 && log.contains("TRACE"), "{} bytes of log", log.len());
    let own = ["TOWPATH_MASTER_KEY", "TOWPATH_S3_SECRET_KEY"].map(|key| world.env[key].clone());
    let dump: Vec<String> = {
        let tables: Vec<String> =
            sqlx::query_scalar("select tablename::text from pg_tables where schemaname = 'public'").fetch_all(&world.db).await?;
        let mut all = Vec::new();
        for table in tables {
            all.extend(
                sqlx::query_scalar::<_, String>(sqlx::AssertSqlSafe(format!("select t::text from {table} as t")))
                    .fetch_all(&world.db)
                    .await?,
            );
        }
        all
    };
    ensure!(dump.iter().any(|row| row.contains("secret-path-8c1f")), "the dump does not hold the target");
    for secret in [SECRET, SECRET.trim_start_matches("whsec_"), &world.token, &new, &own[0], &own[1]] {
        ensure!(!log.contains(secret), "a secret that begins with {} is in the log", &secret[..6]);
        ensure!(!dump.iter().any(|row| row.contains(secret)), "a secret that begins with {} is readable in the database", &secret[..6]);
    }
    world.finish().await
}

#[tokio::test]
async fn a_message_becomes_a_run_that_is_steered_and_whose_result_comes_back() -> Result<()> {
    let world = World::start().await?;
    world.example("surveyor").await?;
    let receiver = Receiver::start(&["200 OK"]).await?;
    let (status, file) = world.upload("tree.tar.gz", archive()?).await?;
    ensure!(status == StatusCode::CREATED, "{file}");
    let request = world
        .client
        .post(format!("{}/v1/runs", world.url))
        .bearer_auth(&world.token)
        .header("traceparent", format!("00-{TRACE}-00f067aa0ba902b7-01"))
        .json(&json!({
            "agent": "surveyor", "prompt": "count the code", "files": [file["id"]], "labels": { "why": "test" },
            "deliver": [{ "webhook": { "url": receiver.url, "secret": SECRET } }],
        }));
    let accepted: serde_json::Value = request.send().await?.error_for_status()?.json().await?;
    let run = accepted["id"].as_str().context("id")?.to_owned();
    ensure!(
        accepted["state"] == "queued"
            && accepted["waiting_for"] == "place"
            && accepted["deliveries"] == 1
            && accepted["labels"]["why"] == "test",
        "{accepted}"
    );
    world
        .until(&run, SOON, |value| value["startup"].as_array().is_some_and(|steps| steps.iter().any(|step| step["step"] == "started")))
        .await?;
    let (status, steer) = world.steer(&run, "also list the ten largest files").await?;
    ensure!(status == StatusCode::CREATED, "{steer}");

    let ended = world.ended(&run).await?;
    ensure!(ended["state"] == "succeeded" && ended["exit"]["code"] == 0, "{ended}\n{}", world.logs());
    let text = ended["result"]["text"].as_str().context("result")?;
    ensure!(text.contains("| Rust | 2 | 42 |") && text.contains("largest files"), "{text}");
    ensure!(ended["transcript"]["state"] == "complete", "{ended}");
    let steps: Vec<&str> = ended["startup"].as_array().into_iter().flatten().filter_map(|step| step["step"].as_str()).collect();
    for step in ["admitted", "connected", "inputs", "started"] {
        ensure!(steps.contains(&step), "{step} is missing in {steps:?}");
    }

    let steers = world.get(&format!("/v1/runs/{run}/steers")).await?;
    ensure!(steers["items"][0]["state"] == "read", "{steers}");
    let raw = world.raw(&run).await?;
    ensure!(raw.contains(&0x1b), "colours are in the raw transcript");
    let plain = String::from_utf8(world.transcript(&run, "format=text").await?)?;
    ensure!(!plain.contains('\x1b') && plain.contains("100 %"), "{plain}");

    let outputs = world.get(&format!("/v1/runs/{run}/outputs")).await?;
    ensure!(outputs["items"][0]["name"] == "report.json" && outputs["items"][0]["status"] == "stored", "{outputs}");
    let report = world.get(&format!("/v1/runs/{run}/outputs/report.json")).await?;
    ensure!(report.is_object(), "{report}");

    wait_for("the delivery", SOON, async || (!receiver.received().is_empty()).then_some(())).await?;
    let received = receiver.received().remove(0);
    let id = &received.headers["webhook-id"];
    let timestamp: i64 = received.headers["webhook-timestamp"].parse()?;
    let expected = standardwebhooks::Webhook::new(SECRET)?.sign(id, timestamp, &received.body)?;
    ensure!(received.headers["webhook-signature"] == expected, "{:?}", received.headers);
    ensure!(
        received.headers["traceparent"].starts_with(&format!("00-{TRACE}-")),
        "one trace from request to delivery: {:?}",
        received.headers
    );
    let body: serde_json::Value = serde_json::from_slice(&received.body)?;
    ensure!(
        body["type"] == "run.ended" && body["data"]["run"]["id"] == run.as_str() && body["data"]["run"]["result"]["text"] == text,
        "{body}"
    );
    let deliveries = wait_for("the record of the delivery", SOON, async || {
        world.get(&format!("/v1/runs/{run}/deliveries")).await.ok().filter(|list| list["items"][0]["state"] == "delivered")
    })
    .await?;
    ensure!(deliveries["items"][0]["id"] == id.as_str() && deliveries["items"][0]["attempts"] == 1, "{deliveries}");
    let stored: Vec<(Option<Vec<u8>>,)> = sqlx::query_as("select secret from run_target").fetch_all(&world.db).await?;
    ensure!(
        stored.iter().all(|(secret,)| secret.as_ref().is_some_and(|bytes| !bytes.windows(8).any(|w| w == b"MDEyMzQ1"))),
        "a secret is stored in clear"
    );
    ensure!(!world.logs().contains("MDEyMzQ1"), "a secret was logged");

    let history = world.get(&format!("/v1/runs/{run}/history")).await?;
    let moves: Vec<&str> =
        history["items"].as_array().into_iter().flatten().filter(|row| row["on"] != "steer").filter_map(|row| row["to"].as_str()).collect();
    ensure!(moves == ["queued", "starting", "running", "finishing", "succeeded"], "{moves:?}");
    world.finish().await
}

#[tokio::test]
async fn a_receiver_that_is_gone_is_not_asked_again_and_a_failing_one_is() -> Result<()> {
    let world = World::start().await?;
    world.example("echo").await?;
    let (gone, failing, moved) = (
        Receiver::start(&["410 Gone"]).await?,
        Receiver::start(&["500 Oops", "silence", "204 No Content"]).await?,
        Receiver::start(&["302 Found\r\nlocation: http://169.254.169.254/"]).await?,
    );
    let target = |url: &str| json!({ "webhook": { "url": url } });
    let run = world
        .start_run(json!({ "agent": "echo", "prompt": "{}", "deliver": [target(&gone.url), target(&failing.url), target(&moved.url)] }))
        .await?;
    world.ended(&run).await?;
    let states = async || -> Option<Vec<serde_json::Value>> {
        Some(world.get(&format!("/v1/runs/{run}/deliveries")).await.ok()?["items"].as_array()?.clone())
    };
    wait_for("first attempts", SOON, async || {
        states().await.filter(|list| list.len() == 3 && list.iter().all(|one| !one["answer"].is_null()))
    })
    .await?;
    let list = states().await.context("deliveries")?;
    ensure!(list[0]["state"] == "dead" && list[0]["answer"] == "HTTP 410: the receiver is gone", "{list:?}");
    ensure!(list[1]["state"] == "pending" && list[1]["answer"] == "HTTP 500" && !list[1]["next_attempt_at"].is_null(), "{list:?}");
    ensure!(list[2]["state"] == "pending" && list[2]["answer"] == "HTTP 302: redirects are not followed", "{list:?}");
    // The second attempt comes 5 s later by the schedule and is left without an answer; it is then sent again under the same id.
    wait_for("an attempt without an answer", SOON, async || states().await.filter(|list| list[1]["state"] == "unknown")).await?;
    let delivery = list[1]["id"].as_str().context("id")?.to_owned();
    let (status, _) = world.call(reqwest::Method::POST, &format!("/v1/deliveries/{delivery}/retry"), None).await?;
    ensure!(status == StatusCode::ACCEPTED, "{status}");
    wait_for("the third attempt", SOON, async || states().await.filter(|list| list[1]["state"] == "delivered")).await?;
    let ids: Vec<String> = failing.received().iter().map(|one| one.headers["webhook-id"].clone()).collect();
    ensure!(ids.len() == 3 && ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    ensure!(gone.received().len() == 1, "a receiver that is gone was asked again");
    Ok(())
}
