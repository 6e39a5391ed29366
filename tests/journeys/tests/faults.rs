//! Faults: killed processes, an emptied NATS, a COMMIT without an answer, servers away at start and in the middle.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::{SinkExt, StreamExt};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stage::{Mode, Proxy, wait_for};
use tokio_tungstenite::tungstenite::Message;
use towpath_chassis::{config::Hidden, secret::Secrets};
use towpath_journeys::{Ground, SOON, World, sha256, supervisors};
use towpath_schemas::{
    RunId,
    guest::{Exit, FromGuest, Hello, Identity, PROTOCOL, Phase, ToGuest},
};

/// About 50 MB with colour codes, with runs of 1-byte writes among it, and with multibyte characters that are cut at every edge. It appends what it printed to a witness.
const PRINTER: &str = r#"
import hashlib, os, sys, time
digest, count = hashlib.sha256(), 0
def put(data):
    global count
    digest.update(data); count += len(data)
    while data:
        data = data[os.write(1, data):]
line = ("\x1b[1;3%dm" + "─🦀ü" * 40 + "\x1b[0m %d\n")
block = 0
while count < 50_000_000:
    text = "".join(line % (n % 8, n) for n in range(block, block + 100)).encode()
    size = 4093 + block % 7
    for at in range(0, len(text), size):
        put(text[at:at + size])
    if block % 50_000 == 0:
        for byte in text[:300]:
            put(bytes([byte]))
    block += 100
    if block % 2_000 == 0:
        time.sleep(float(sys.argv[1]))
with open("/workspace/witness", "a") as file:
    file.write("%d %s\n" % (count, digest.hexdigest()))
"#;

async fn printing(world: &World, run: &str, most: i64) -> Result<()> {
    world.until(run, SOON, |value| value["transcript"]["bytes"].as_i64().unwrap_or(0) > most).await?;
    Ok(())
}

/// The transcript must be what the agent says that it printed, and it must have printed it once.
async fn check_printed(world: &World, ended: &Value) -> Result<()> {
    ensure!(
        ended["state"] == "succeeded" && ended["transcript"]["state"] == "complete" && ended["epoch"] == 1,
        "{ended}\n{}",
        world.logs()
    );
    let witness = std::fs::read_to_string(world.workspace(ended["session"].as_str().context("session")?).join("witness"))?;
    let lines: Vec<&str> = witness.lines().collect();
    ensure!(lines.len() == 1, "executed {} times", lines.len());
    let (count, digest) = lines[0].split_once(' ').context("witness")?;
    let raw = world.raw(ended["id"].as_str().context("id")?).await?;
    ensure!(raw.len().to_string() == count && sha256(&raw) == digest, "{} bytes of {count} read back", raw.len());
    Ok(())
}

#[tokio::test]
async fn fifty_megabytes_read_back_and_no_process_grows_with_them() -> Result<()> {
    let world = World::start().await?;
    world.agent("printer", &["/usr/bin/python3", "-c", PRINTER, "0.02"], json!({})).await?;
    let memory = world.watch_memory();
    let run = world.run("printer", &json!("x")).await?;
    let ended = world.ended_within(&run, SOON * 2).await?;
    check_printed(&world, &ended).await?;
    memory.stayed_flat()?;
    world.finish().await
}

#[tokio::test]
async fn killing_api_and_worker_half_way_loses_no_byte_and_runs_nothing_twice() -> Result<()> {
    let world = World::prepare(Ground::shared().await?, &[]).await?;
    world.spawn("api", &["api"])?;
    world.spawn("worker", &["worker"])?;
    world.ready().await?;
    world.agent("printer", &["/usr/bin/python3", "-c", PRINTER, "0.02"], json!({})).await?;
    let memory = world.watch_memory();
    let run = world.run("printer", &json!("x")).await?;
    printing(&world, &run, 10_000_000).await?;
    world.kill("worker")?;
    world.kill("api")?;
    // Without anybody the agent goes on until its spool holds it.
    tokio::time::sleep(Duration::from_millis(500)).await;
    world.spawn("api", &["api"])?;
    world.spawn("worker", &["worker"])?;
    world.ready().await?;
    let ended = world.ended_within(&run, SOON * 2).await?;
    check_printed(&world, &ended).await?;
    memory.stayed_flat()?;
    world.finish().await
}

#[tokio::test]
async fn an_emptied_nats_half_way_loses_no_byte() -> Result<()> {
    let (_folder, servers, ground) = Ground::own_servers().await?;
    let world = World::prepare(ground, &[]).await?;
    world.spawn("all", &["dev"])?;
    world.ready().await?;
    world.example("echo").await?;
    world.agent("printer", &["/usr/bin/python3", "-c", PRINTER, "0.02"], json!({})).await?;
    let memory = world.watch_memory();
    let run = world.run("printer", &json!("x")).await?;
    printing(&world, &run, 10_000_000).await?;
    servers.nats.kill9()?;
    servers.nats.wipe()?;
    // A run that is accepted meanwhile is kept, too.
    let kept = world.run("echo", &json!({ "print": "kept" })).await?;
    servers.nats.start().await?;
    let ended = world.ended_within(&run, SOON * 2).await?;
    check_printed(&world, &ended).await?;
    memory.stayed_flat()?;
    ensure!(world.ended(&kept).await?["state"] == "succeeded", "{}", world.logs());
    world.finish().await
}

#[tokio::test]
async fn an_emptied_nats_between_the_end_and_its_seal_loses_nothing() -> Result<()> {
    let (_folder, servers, ground) = Ground::own_servers().await?;
    let world = World::prepare(ground, &[]).await?;
    // No role `transcript`: nothing is sealed.
    world.spawn("api", &["api"])?;
    world.spawn("worker", &["worker", "--roles", "clock,provision,deliver"])?;
    world.ready().await?;
    world.example("echo").await?;
    let run = world.run("echo", &json!({ "lines": 100 })).await?;
    world.until(&run, SOON, |value| value["state"] == "finishing").await?;
    servers.nats.kill9()?;
    servers.nats.wipe()?;
    servers.nats.start().await?;
    world.spawn("sealer", &["worker", "--roles", "transcript"])?;
    let ended = world.ended(&run).await?;
    ensure!(ended["state"] == "succeeded" && ended["transcript"]["state"] == "complete", "{ended}");
    let lines: String = (1..=100).map(|n| format!("line {n}\n")).collect();
    ensure!(world.raw(&run).await? == lines.as_bytes(), "the transcript differs");
    world.finish().await
}

/// Posts until an answer comes, as a client with a key does.
async fn post(world: &World, key: Option<&str>) -> Result<(StatusCode, Value)> {
    let mut request =
        world.client.post(format!("{}/v1/runs", world.url)).bearer_auth(&world.token).json(&json!({ "agent": "echo", "prompt": "{}" }));
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    let answer = request.send().await?;
    Ok((answer.status(), answer.json().await?))
}

#[tokio::test]
async fn a_commit_without_an_answer_makes_one_run_with_and_without_a_key() -> Result<()> {
    let ground = Ground::shared().await?;
    let upstream = url::Url::parse(&ground.database_url)?;
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], upstream.port().context("port")?));
    let proxy = Proxy::postgres(address).await?;
    let through = proxy.through(&ground.database_url)?;
    let world = World::prepare(ground, &[]).await?;
    // Only the API sits behind the proxy; no worker disturbs the count of commits.
    world.spawn_with("api", &["api"], &[("TOWPATH_DATABASE_URL", &through)])?;
    world.ready().await?;
    world.example("echo").await?;
    for (number, key) in [None, Some("key-1"), Some("key-2"), None].into_iter().enumerate() {
        let before = proxy.commits_cut();
        if number % 2 == 0 {
            proxy.cut_after_commit(1)
        } else {
            proxy.cut_before_commit(1)
        }
        let (status, answer) = post(&world, key).await?;
        ensure!(proxy.commits_cut() == before + 1, "no commit was cut");
        ensure!(status == StatusCode::CREATED && answer["state"] == "queued", "{status} {answer}\n{}", world.logs());
        let runs = world.count("select count(*) from run").await?;
        ensure!(runs == number as i64 + 1, "{runs} runs after {} requests", number + 1);
        if key.is_some() {
            let (status, again) = post(&world, key).await?;
            ensure!(status == StatusCode::CREATED && again["id"] == answer["id"], "{status} {again}");
        }
    }
    world.spawn("worker", &["worker"])?;
    for row in sqlx::query_as::<_, (uuid::Uuid,)>("select id from run").fetch_all(&world.db).await? {
        let run = towpath_schemas::RunId(row.0).to_string();
        ensure!(world.ended(&run).await?["state"] == "succeeded", "{run}");
    }
    world.finish().await
}

#[tokio::test]
async fn a_server_that_is_away_at_start_is_waited_for_and_named() -> Result<()> {
    for away in ["Postgres", "NATS", "S3"] {
        let ground = Ground::shared().await?;
        let port = |text: &str| -> Result<std::net::SocketAddr> {
            Ok(std::net::SocketAddr::from(([127, 0, 0, 1], url::Url::parse(text)?.port().context("port")?)))
        };
        let (key, target) = match away {
            "Postgres" => ("TOWPATH_DATABASE_URL", ground.database_url.clone()),
            "NATS" => ("TOWPATH_NATS_URL", ground.nats_url.clone()),
            _ => ("TOWPATH_S3_ENDPOINT", ground.s3.endpoint.clone()),
        };
        let proxy = Proxy::tcp(port(&target)?).await?;
        proxy.down().await;
        let world = World::prepare(ground, &[]).await?;
        let through = proxy.through(&target)?;
        world.spawn_with("limited", &["api"], &[(key, &through), ("TOWPATH_START_WAIT_S", "2")])?;
        let code = wait_for("the limit", SOON, async || world.process("limited", |process| process.ended()).ok().flatten()).await?;
        ensure!(code != 0 && world.logs().contains(&format!("waiting for {away}")), "{away}: {code}\n{}", world.logs());
        world.spawn_with("all", &["dev"], &[(key, &through)])?;
        wait_for("the wait to be told", SOON, async || world.logs().contains(&format!("waiting for {away}")).then_some(())).await?;
        proxy.up().await;
        world.ready().await?;
        world.example("echo").await?;
        let run = world.run("echo", &json!({ "print": "hello" })).await?;
        ensure!(world.ended(&run).await?["state"] == "succeeded", "{away}");
        world.finish().await?;
    }
    Ok(())
}

#[tokio::test]
async fn servers_that_go_away_in_the_middle_delay_and_lose_nothing() -> Result<()> {
    let (_folder, servers, ground) = Ground::own_servers().await?;
    let world = World::prepare(ground, &[]).await?;
    world.spawn("all", &["dev"])?;
    world.ready().await?;
    world.example("echo").await?;
    // S3: a run ends while it is away, and says what it waits for.
    servers.s3.kill9()?;
    let waiting = world.run("echo", &json!({ "print": "while S3 is away" })).await?;
    world.until(&waiting, SOON, |value| value["state"] == "finishing").await?;
    let shown = world.get(&format!("/v1/runs/{waiting}")).await?;
    ensure!(shown["transcript"]["state"] == "sealing", "{shown}");
    servers.s3.start().await?;
    ensure!(world.ended(&waiting).await?["state"] == "succeeded", "{}", world.logs());
    // NATS: accepted all the same.
    servers.nats.kill9()?;
    let queued = world.run("echo", &json!({ "print": "while NATS is away" })).await?;
    servers.nats.start().await?;
    ensure!(world.ended(&queued).await?["state"] == "succeeded", "{}", world.logs());
    // Postgres: refused within the limit, and what runs meanwhile goes on.
    let live = world.run("echo", &json!({ "lines": 10, "sleep_ms": 4000, "witness": true })).await?;
    world
        .until(&live, SOON, |value| value["startup"].as_array().is_some_and(|steps| steps.iter().any(|step| step["step"] == "started")))
        .await?;
    servers.postgres.kill9()?;
    let began = std::time::Instant::now();
    let (status, refused) = world.call(Method::POST, "/v1/runs", Some(&json!({ "agent": "echo", "prompt": "{}" }))).await?;
    ensure!(status == StatusCode::SERVICE_UNAVAILABLE && refused["retryable"] == true, "{status} {refused}");
    println!("503 after {:.2} s", began.elapsed().as_secs_f64());
    servers.postgres.start().await?;
    let ended = world.ended(&live).await?;
    ensure!(ended["state"] == "succeeded" && ended["epoch"] == 1, "{ended}");
    world.finish().await
}

#[tokio::test]
async fn a_lost_sandbox_is_proved_gone_and_its_record_says_where_it_ends() -> Result<()> {
    let world = World::start().await?;
    world.agent("victim", &["/bin/sh", "-c", "echo before; sleep 1000"], json!({})).await?;
    let run = world.run("victim", &json!("x")).await?;
    printing(&world, &run, 0).await?;
    let (status, problem) = world.call(Method::POST, &format!("/v1/runs/{run}/abandon"), None).await?;
    ensure!(status == StatusCode::CONFLICT && problem["code"] == "sandbox_present", "{status} {problem}");
    for pid in supervisors(&world.state) {
        if let Some(pid) = rustix::process::Pid::from_raw(pid) {
            rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
        }
    }
    let ended = world.ended(&run).await?;
    ensure!(ended["state"] == "failed" && ended["reason"] == "sandbox_lost" && ended["exit"].is_null(), "{ended}");
    ensure!(ended["transcript"]["state"] == "gap" && ended["transcript"]["missing"].is_null(), "{ended}");
    ensure!(world.raw(&run).await? == b"before\n", "what was printed before is kept");
    let text = String::from_utf8(world.transcript(&run, "format=text").await?)?;
    ensure!(text.contains("[gap: "), "{text}");
    world.finish().await
}

#[tokio::test]
async fn a_drained_process_hands_over_and_leaves_in_time() -> Result<()> {
    let world = World::start().await?;
    world.example("echo").await?;
    let run = world.run("echo", &json!({ "print": "one", "steers": 1 })).await?;
    world.until(&run, SOON, |value| value["state"] == "running").await?;
    let began = std::time::Instant::now();
    let code = world.process("all", |process| process.terminate())?;
    ensure!(code == Some(0), "{code:?}\n{}", world.logs());
    println!("drained in {:.2} s", began.elapsed().as_secs_f64());
    world.spawn("all", &["dev"])?;
    world.ready().await?;
    world.steer(&run, "two").await?;
    let ended = world.ended(&run).await?;
    ensure!(ended["result"]["text"] == "one\ntwo\n", "{ended}");
    world.finish().await
}

#[tokio::test]
async fn an_abandoned_sandbox_has_no_say_any_more() -> Result<()> {
    let world = World::start().await?;
    world.agent("frozen", &["/bin/sh", "-c", "echo before; sleep 1000"], json!({})).await?;
    let run = world.run("frozen", &json!("x")).await?;
    printing(&world, &run, 0).await?;
    // The host is cut off from everybody: its worker is away, its supervisor does not move, and nobody has seen it for a while.
    let frozen = supervisors(&world.state);
    for pid in &frozen {
        rustix::process::kill_process(rustix::process::Pid::from_raw(*pid).context("pid")?, rustix::process::Signal::STOP)?;
    }
    world.kill("all")?;
    world.spawn("api", &["api"])?;
    world.spawn("worker", &["worker", "--roles", "clock,transcript,deliver"])?;
    world.spawn_with("admission", &["worker", "--roles", "provision"], &[("TOWPATH_SUPERVISOR", "")])?;
    world.ready().await?;
    sqlx::query("update sandbox set observed = 'unknown'").execute(&world.db).await?;
    let (status, answer) = world.call(Method::POST, &format!("/v1/runs/{run}/abandon"), None).await?;
    ensure!(status.is_success(), "{status} {answer}");
    let ended = world.ended(&run).await?;
    ensure!(ended["state"] == "failed" && ended["reason"] == "sandbox_lost" && ended["transcript"]["state"] == "gap", "{ended}");
    // It comes back, and finds itself fenced.
    for pid in &frozen {
        rustix::process::kill_process(rustix::process::Pid::from_raw(*pid).context("pid")?, rustix::process::Signal::CONT)?;
    }
    wait_for("the fenced supervisor to leave", SOON, async || supervisors(&world.state).is_empty().then_some(())).await?;
    let after = world.get(&format!("/v1/runs/{run}")).await?;
    ensure!(after["revision"] == ended["revision"] && after["result"] == ended["result"], "{after}");
    world.finish().await
}

#[tokio::test]
async fn a_gateway_connection_that_is_cut_or_stands_still_loses_no_byte() -> Result<()> {
    let ground = Ground::shared().await?;
    let world = World::prepare(ground, &[]).await?;
    let listen = world.env["TOWPATH_LISTEN"].clone();
    let proxy = Proxy::tcp(listen.parse()?).await?;
    let through = format!("ws://{}", proxy.address());
    world.spawn_with("all", &["dev"], &[("TOWPATH_GATEWAY_URL", &through)])?;
    world.ready().await?;
    world.agent("printer", &["/usr/bin/python3", "-c", PRINTER, "0.05"], json!({})).await?;
    let memory = world.watch_memory();
    let run = world.run("printer", &json!("x")).await?;
    for (most, fault) in [(2_000_000, None), (8_000_000, Some(Mode::Refuse)), (14_000_000, None), (20_000_000, Some(Mode::BlackHole))] {
        printing(&world, &run, most).await?;
        if let Some(mode) = fault {
            proxy.set(mode).await;
        }
        proxy.cut().await;
        if fault.is_some() {
            tokio::time::sleep(Duration::from_secs(1)).await;
            proxy.set(Mode::Pass).await;
        }
    }
    let ended = world.ended_within(&run, SOON * 2).await?;
    check_printed(&world, &ended).await?;
    memory.stayed_flat()?;
    world.finish().await
}

/// A supervisor of the test's own: its connection and what it was told so far.
struct Guest(tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<tokio::net::TcpStream>>);

impl Guest {
    async fn hello(world: &World, run: RunId) -> Result<Self> {
        let secrets = Secrets::new(&[Hidden(world.env["TOWPATH_MASTER_KEY"].clone())])?;
        let (mut socket, _) = tokio_tungstenite::connect_async(format!("ws://{}/sandbox", world.env["TOWPATH_LISTEN"])).await?;
        let hello = FromGuest::Hello(Hello {
            protocol: PROTOCOL,
            run,
            epoch: 1,
            incarnation: "1".repeat(32),
            token: Some(secrets.sandbox_token(run, 1)),
            key: "2".repeat(64),
            phase: Phase::Fresh,
            identity: Identity::default(),
        });
        socket.send(serde_json::to_string(&hello)?.into()).await?;
        Ok(Self(socket))
    }

    async fn say(&mut self, message: &FromGuest) -> Result<()> {
        Ok(self.0.send(serde_json::to_string(message)?.into()).await?)
    }

    /// The next message that is wanted; others are passed over.
    async fn told(&mut self, wanted: impl Fn(&ToGuest) -> bool) -> Result<ToGuest> {
        let listening = async {
            while let Some(message) = self.0.next().await {
                if let Message::Text(text) = message?
                    && let Ok(message) = serde_json::from_str::<ToGuest>(&text)
                    && wanted(&message)
                {
                    return Ok(message);
                }
            }
            anyhow::bail!("the gateway closed the connection")
        };
        tokio::time::timeout(SOON, listening).await?
    }
}

#[tokio::test]
async fn a_stop_that_comes_before_the_start_order_still_ends_the_run() -> Result<()> {
    let world = World::prepare(Ground::shared().await?, &[]).await?;
    world.spawn("api", &["api"])?;
    world.spawn_with("worker", &["worker"], &[("TOWPATH_SUPERVISOR", "")])?;
    world.ready().await?;
    world.example("echo").await?;
    // A host that is there but starts nothing: the test is its supervisor.
    sqlx::query("insert into pool (name, backend, host, capacity) values ('process-test', 'process', 'test', 1)")
        .execute(&world.db)
        .await?;
    let id = world.run("echo", &json!({})).await?;
    let run: RunId = id.parse()?;
    world.until(&id, SOON, |value| value["state"] == "starting").await?;
    let mut first = Guest::hello(&world, run).await?;
    first.told(|message| matches!(message, ToGuest::Welcome { .. })).await?;
    drop(first);
    let (status, answer) = world.call(Method::POST, &format!("/v1/runs/{id}/cancel"), None).await?;
    ensure!(status == StatusCode::ACCEPTED && answer["state"] == "stopping", "{status} {answer}");
    let mut again = Guest::hello(&world, run).await?;
    again.told(|message| matches!(message, ToGuest::Cancel { .. })).await?;
    again.told(|message| matches!(message, ToGuest::Start(_))).await?;
    again.say(&FromGuest::Ended { exit: Exit::default(), reason: Some("canceled".to_owned()) }).await?;
    again.told(|message| matches!(message, ToGuest::EndedStored)).await?;
    ensure!(world.count("select count(*) from slot").await? == 0, "the slot is still taken");
    let ended = world.ended(&id).await?;
    ensure!(ended["state"] == "canceled", "{ended}");
    Ok(())
}
