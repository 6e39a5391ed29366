//! What people do: sessions, steers, cancel, tenants, event streams.

use anyhow::{Context, Result, ensure};
use base64::Engine;
use eventsource_stream::Eventsource;
use futures::StreamExt;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stage::wait_for;
use towpath_journeys::{SOON, World};

async fn started(world: &World, run: &str) -> Result<()> {
    world
        .until(run, SOON, |value| value["startup"].as_array().is_some_and(|steps| steps.iter().any(|step| step["step"] == "started")))
        .await?;
    Ok(())
}

#[tokio::test]
async fn a_session_has_one_live_run_and_the_next_one_finds_its_workspace() -> Result<()> {
    let world = World::start().await?;
    world.example("echo").await?;
    let first = world.run("echo", &json!({ "steers": 1, "witness": "yes" })).await;
    // `witness` is a flag; what its type is, the agent says.
    let first = match first {
        Ok(run) => run,
        Err(error) => return Err(error),
    };
    let failed = world.ended(&first).await?;
    ensure!(failed["exit"]["code"] == 2, "{failed}");

    let first = world.run("echo", &json!({ "print": "one", "steers": 1, "witness": true })).await?;
    started(&world, &first).await?;
    let session = world.get(&format!("/v1/runs/{first}")).await?["session"].as_str().context("session")?.to_owned();
    let follow_up = json!({ "agent": "echo", "prompt": "{\"witness\": true}", "session": session });
    let (status, busy) = world.call(Method::POST, "/v1/runs", Some(&follow_up)).await?;
    ensure!(status == StatusCode::CONFLICT && busy["code"] == "session_busy" && busy["blocked_by"] == first.as_str(), "{status} {busy}");

    let (status, _) = world.steer(&first, "go on\nwith two lines").await?;
    ensure!(status == StatusCode::CREATED, "{status}");
    let ended = world.ended(&first).await?;
    ensure!(ended["result"]["text"] == "one\ngo on with two lines\n", "{ended}");
    let (status, late) = world.steer(&first, "too late").await?;
    ensure!(status == StatusCode::CONFLICT && late["code"] == "run_ended", "{status} {late}");

    let second = world.start_run(follow_up).await?;
    world.ended(&second).await?;
    let witness = std::fs::read_to_string(world.workspace(&session).join("witness"))?;
    let runs: Vec<&str> = witness.lines().filter_map(|line| line.split(' ').next()).collect();
    ensure!(runs == [first.as_str(), second.as_str()], "{witness}");
    let shown = world.get(&format!("/v1/sessions/{session}")).await?;
    ensure!(shown["runs"] == 2 && shown["live_run"].is_null() && shown["place"].is_string(), "{shown}");
    world.finish().await
}

#[tokio::test]
async fn steers_arrive_in_order_whenever_they_were_sent() -> Result<()> {
    let world = World::start().await?;
    world.example("echo").await?;
    // Some while it is queued or starting, some while it runs.
    let run = world.run("echo", &json!({ "steers": 40 })).await?;
    for number in 0..20 {
        let (status, answer) = world.steer(&run, &format!("message {number}")).await?;
        ensure!(status == StatusCode::CREATED, "{answer}");
    }
    started(&world, &run).await?;
    for number in 20..40 {
        let (status, answer) = world.steer(&run, &format!("message {number}")).await?;
        ensure!(status == StatusCode::CREATED, "{answer}");
    }
    let ended = world.ended(&run).await?;
    let expected: String = (0..40).map(|number| format!("message {number}\n")).collect();
    ensure!(ended["result"]["text"] == expected.as_str(), "{}", ended["result"]);
    let steers = world.get(&format!("/v1/runs/{run}/steers")).await?;
    ensure!(steers["items"].as_array().is_some_and(|all| all.len() == 40 && all.iter().all(|one| one["state"] == "read")), "{steers}");
    world.finish().await
}

#[tokio::test]
async fn a_steer_that_nobody_read_is_told_as_expired() -> Result<()> {
    let world = World::start().await?;
    world.agent("deaf", &["/bin/sh", "-c", "echo ready; sleep 3"], json!({})).await?;
    world.agent("closing", &["/bin/sh", "-c", "rm -f $TOWPATH_STEER_FIFO; echo ready; sleep 3"], json!({})).await?;
    for agent in ["deaf", "closing"] {
        let run = world.run(agent, &json!("x")).await?;
        started(&world, &run).await?;
        let (status, _) = world.steer(&run, "does anybody hear me?").await?;
        ensure!(status == StatusCode::CREATED, "{status}");
        let ended = world.ended(&run).await?;
        ensure!(ended["state"] == "succeeded", "{ended}");
        let steers = world.get(&format!("/v1/runs/{run}/steers")).await?;
        ensure!(steers["items"][0]["state"] == "expired", "{agent}: {steers}");
    }
    world.finish().await
}

#[tokio::test]
async fn an_idempotency_key_makes_one_thing_and_a_refusal_keeps_none() -> Result<()> {
    let world = World::start().await?;
    world.example("echo").await?;
    let post = async |key: &str, body: Value| -> Result<(StatusCode, bool, Value)> {
        let answer = world
            .client
            .post(format!("{}/v1/runs", world.url))
            .bearer_auth(&world.token)
            .header("idempotency-key", key)
            .json(&body)
            .send()
            .await?;
        let replay = answer.headers().get("idempotent-replay").is_some();
        Ok((answer.status(), replay, answer.json().await?))
    };
    let body = json!({ "agent": "echo", "prompt": "{}" });
    let refused = post("key-1", json!({ "agent": "nobody", "prompt": "{}" })).await?;
    ensure!(refused.0 == StatusCode::NOT_FOUND, "{refused:?}");
    let (first, second) = tokio::join!(post("key-1", body.clone()), post("key-1", body.clone()));
    let (first, second) = (first?, second?);
    ensure!(first.0 == StatusCode::CREATED && second.0 == StatusCode::CREATED && first.2["id"] == second.2["id"], "{first:?} {second:?}");
    ensure!(first.1 != second.1, "one of them is a replay");
    let other = post("key-1", json!({ "agent": "echo", "prompt": "{\"print\": \"x\"}" })).await?;
    ensure!(other.0 == StatusCode::UNPROCESSABLE_ENTITY && other.2["code"] == "idempotency_mismatch", "{other:?}");
    ensure!(world.count("select count(*) from run").await? == 1, "more than one run");
    world.ended(first.2["id"].as_str().context("id")?).await?;
    let later = post("key-1", body).await?;
    ensure!(later.1 && later.2["state"] == "succeeded", "a replay shows the thing as it is now: {later:?}");
    world.finish().await
}

#[tokio::test]
async fn another_tenant_s_things_are_not_there() -> Result<()> {
    let world = World::start().await?;
    world.example("echo").await?;
    let (_, stranger) = world.make_tenant("second").await?;
    let (_, file) = world.upload("secret.txt", b"secret".to_vec()).await?;
    let run = world.start_run(json!({ "agent": "echo", "prompt": "{\"print\": \"secret\"}", "files": [file["id"]] })).await?;
    let ended = world.ended(&run).await?;
    let (file, session) = (file["id"].as_str().context("file")?.to_owned(), ended["session"].as_str().context("session")?.to_owned());
    let gets = [
        format!("/v1/runs/{run}"),
        format!("/v1/runs/{run}/history"),
        format!("/v1/runs/{run}/steers"),
        format!("/v1/runs/{run}/transcript"),
        format!("/v1/runs/{run}/events"),
        format!("/v1/runs/{run}/outputs"),
        format!("/v1/runs/{run}/deliveries"),
        format!("/v1/sessions/{session}"),
        format!("/v1/files/{file}"),
        "/v1/agents/echo".to_owned(),
    ];
    for path in gets {
        let (status, answer) = world.call_as(&stranger, Method::GET, &path, None).await?;
        ensure!(status == StatusCode::NOT_FOUND, "{path}: {status} {answer}");
    }
    for (path, body) in [
        (format!("/v1/runs/{run}/cancel"), None),
        (format!("/v1/runs/{run}/abandon"), None),
        (format!("/v1/runs/{run}/steers"), Some(json!({ "message": "x" }))),
        ("/v1/runs".to_owned(), Some(json!({ "agent": "echo", "prompt": "x" }))),
    ] {
        let (status, answer) = world.call_as(&stranger, Method::POST, &path, body.as_ref()).await?;
        ensure!(status == StatusCode::NOT_FOUND, "{path}: {status} {answer}");
    }
    for path in ["/v1/runs", "/v1/sessions", "/v1/agents"] {
        let (_, list) = world.call_as(&stranger, Method::GET, path, None).await?;
        ensure!(list["items"] == json!([]), "{path}: {list}");
    }
    // Its own agent of the same name, but the other tenant's session and file.
    let definition = world.get("/v1/agents/echo").await?["definition"].clone();
    let (status, _) = world.call_as(&stranger, Method::PUT, "/v1/agents/echo", Some(&definition)).await?;
    ensure!(status == StatusCode::CREATED, "{status}");
    for body in [json!({ "agent": "echo", "prompt": "x", "session": session }), json!({ "agent": "echo", "prompt": "x", "files": [file] })]
    {
        let (status, answer) = world.call_as(&stranger, Method::POST, "/v1/runs", Some(&body)).await?;
        ensure!(status == StatusCode::NOT_FOUND, "{status} {answer}");
    }
    for token in ["", "tp_wrong", &world.token[..20]] {
        let (status, answer) = world.call_as(token, Method::GET, "/v1/runs", None).await?;
        ensure!(status == StatusCode::UNAUTHORIZED && answer["code"] == "unauthorized", "{status} {answer}");
    }
    world.finish().await
}

/// Reads an event stream to its end, or until `most` events have come.
async fn events(world: &World, run: &str, last: Option<&str>, most: usize) -> Result<Vec<(String, String, Value)>> {
    let mut request = world.client.get(format!("{}/v1/runs/{run}/events", world.url)).bearer_auth(&world.token);
    if let Some(last) = last {
        request = request.header("last-event-id", last);
    }
    let mut stream = request.send().await?.error_for_status()?.bytes_stream().eventsource();
    let mut all = Vec::new();
    while all.len() < most {
        let Some(event) = stream.next().await else { break };
        let event = event?;
        let ended = event.event == "end";
        all.push((event.id, event.event, serde_json::from_str(&event.data)?));
        if ended {
            break;
        }
    }
    Ok(all)
}

#[tokio::test]
async fn an_event_stream_goes_on_from_any_id_without_a_gap_or_a_repeat() -> Result<()> {
    let world = World::start().await?;
    let script = "i=0; while [ $i -lt 60 ]; do echo line $i; [ $((i % 10)) = 0 ] && sleep 0.1; i=$((i + 1)); done; echo err >&2";
    world.agent("talker", &["/bin/sh", "-c", script], json!({})).await?;
    let run = world.run("talker", &json!("x")).await?;
    let live = events(&world, &run, None, usize::MAX).await?;
    let kinds: Vec<&str> = live.iter().map(|(_, kind, _)| kind.as_str()).collect();
    ensure!(kinds.first() == Some(&"state") && kinds.last() == Some(&"end"), "{kinds:?}");
    let printed = |all: &[(String, String, Value)]| -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for (_, kind, data) in all {
            if kind == "output" {
                bytes.extend(base64::engine::general_purpose::STANDARD.decode(data["b64"].as_str().context("b64")?)?);
            }
        }
        Ok(bytes)
    };
    ensure!(printed(&live)? == world.raw(&run).await?, "the live stream differs from the record");
    let states: Vec<&str> = live.iter().filter(|(_, kind, _)| kind == "state").filter_map(|(.., data)| data["to"].as_str()).collect();
    ensure!(states == ["queued", "starting", "running", "finishing", "succeeded"], "{states:?}");
    // From every place that the live reader was at.
    for at in 0..live.len() - 1 {
        let rest = events(&world, &run, Some(&live[at].0), usize::MAX).await?;
        let key = |all: &[(String, String, Value)], kind: &str| -> Vec<Value> {
            all.iter().filter(|one| one.1 == kind).map(|one| one.2.clone()).collect()
        };
        for kind in ["state", "output", "end"] {
            ensure!(key(&rest, kind) == key(&live[at + 1..], kind), "from event {at} ({}): {kind} differs", live[at].0);
        }
    }
    let (status, refused) = world.call(Method::GET, &format!("/v1/runs/{run}/events?after=nonsense"), None).await?;
    ensure!(status == StatusCode::BAD_REQUEST, "{status} {refused}");
    world.finish().await
}

#[tokio::test]
async fn a_queued_run_says_what_it_waits_for_and_can_be_canceled() -> Result<()> {
    let world = World::start().await?;
    world.agent("sleeper", &["/bin/sh", "-c", "sleep 30"], json!({ "limits": { "grace_s": 1 } })).await?;
    let mut live = Vec::new();
    for _ in 0..8 {
        live.push(world.run("sleeper", &json!("x")).await?);
    }
    for run in &live {
        world.until(run, SOON, |value| value["state"] == "running").await?;
    }
    let waiting = world.run("sleeper", &json!("x")).await?;
    let shown = world.get(&format!("/v1/runs/{waiting}")).await?;
    ensure!(shown["state"] == "queued" && shown["waiting_for"] == "place", "{shown}");
    let (status, canceled) = world.call(Method::POST, &format!("/v1/runs/{waiting}/cancel"), None).await?;
    ensure!(status == StatusCode::OK && canceled["state"] == "canceled" && canceled["epoch"] == 0, "{status} {canceled}");
    let next = world.run("sleeper", &json!("x")).await?;
    world.call(Method::POST, &format!("/v1/runs/{}/cancel", live[0]), None).await?;
    wait_for("the freed slot to be taken", SOON, async || {
        world.get(&format!("/v1/runs/{next}")).await.ok().filter(|run| run["state"] == "running")
    })
    .await?;
    for run in live.iter().chain([&next]) {
        world.call(Method::POST, &format!("/v1/runs/{run}/cancel"), None).await?;
    }
    for run in live.iter().chain([&next]) {
        ensure!(world.ended(run).await?["state"] == "canceled", "{run}");
    }
    world.finish().await
}

#[tokio::test]
async fn a_run_is_run_again_with_its_files_and_targets_and_what_was_to_be_otherwise() -> Result<()> {
    let world = World::start().await?;
    world
        .agent(
            "reader",
            &["/bin/sh", "-c", "cat /workspace/files/* > $TOWPATH_RESULT_FILE; cat $TOWPATH_TASK_FILE >> $TOWPATH_RESULT_FILE"],
            json!({}),
        )
        .await?;
    let receiver = towpath_journeys::Receiver::start(&["200 OK"]).await?;
    let (status, file) = world.upload("note.txt", b"from a file; ".to_vec()).await?;
    ensure!(status.is_success(), "{status} {file}");
    let secret = format!("whsec_{}", base64::prelude::BASE64_STANDARD.encode([7_u8; 32]));
    let first = json!({ "agent": "reader", "prompt": "the first task", "files": [file["id"]], "labels": { "team": "core" },
        "deliver": [{ "webhook": { "url": receiver.url, "secret": secret } }] });
    let first = world.start_run(first).await?;
    let first_ended = world.ended(&first).await?;
    let key = uuid::Uuid::new_v4().to_string();
    let again = async |body: Value| -> Result<(StatusCode, Value)> {
        let url = format!("{}/v1/runs/{first}/rerun", world.url);
        let answer = world.client.post(url).bearer_auth(&world.token).header("Idempotency-Key", &key).json(&body).send().await?;
        Ok((answer.status(), answer.json().await?))
    };
    let (status, second) = again(json!({})).await?;
    ensure!(status == StatusCode::CREATED, "{status} {second}");
    let (_, repeated) = again(json!({})).await?;
    ensure!(repeated["id"] == second["id"], "the same key made another run: {repeated}");
    let (status, _) = again(json!({ "prompt": "another" })).await?;
    ensure!(status == StatusCode::UNPROCESSABLE_ENTITY, "{status}");
    let ended = world.ended(second["id"].as_str().context("id")?).await?;
    ensure!(
        ended["result"]["text"] == "from a file; the first task"
            && ended["labels"]["team"] == "core"
            && ended["session"] != first_ended["session"],
        "{ended}"
    );

    let (status, third) =
        world.call(Method::POST, &format!("/v1/runs/{first}/rerun"), Some(&json!({ "prompt": "the third", "same_session": true }))).await?;
    ensure!(status == StatusCode::CREATED && third["session"] == first_ended["session"], "{status} {third}");
    let ended = world.ended(third["id"].as_str().context("id")?).await?;
    ensure!(ended["result"]["text"] == "from a file; the third", "{ended}");
    wait_for("three deliveries", SOON, async || (receiver.received().len() == 3).then_some(())).await?;
    let (status, _) = world.call(Method::POST, &format!("/v1/runs/{}/rerun", towpath_schemas::RunId::mint()), Some(&json!({}))).await?;
    ensure!(status == StatusCode::NOT_FOUND, "{status}");
    world.finish().await
}
