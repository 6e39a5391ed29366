//! The client against a small server of our own: what it sends, how it takes refusals, breaks and ends.

use std::{
    net::SocketAddr,
    path::Path,
    process::{Output, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::{Context, Result};
use axum::{
    Json, Router,
    body::Bytes,
    extract::{Query, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post, put},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use standardwebhooks::Webhook;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpListener,
    process::Command,
};
use towpath_schemas::{ErrorCode, FileId, PrincipalId, Problem, RunId, SessionId};

const DEADLINE: Duration = Duration::from_secs(60);

/// What the server was asked, and how it shall answer.
#[derive(Default)]
struct Seen {
    requests: Vec<(String, HeaderMap, Vec<u8>)>,
    queries: Vec<String>,
}

type World = Arc<Mutex<Seen>>;

fn note(world: &World, what: &str, headers: &HeaderMap, body: &[u8]) -> usize {
    let mut seen = world.lock().expect("seen");
    seen.requests.push((what.to_owned(), headers.clone(), body.to_vec()));
    seen.requests.iter().filter(|request| request.0 == what).count()
}

fn requests(world: &World, what: &str) -> Vec<(HeaderMap, Vec<u8>)> {
    let seen = world.lock().expect("seen");
    seen.requests.iter().filter(|request| request.0 == what).map(|(_, headers, body)| (headers.clone(), body.clone())).collect()
}

async fn serve(router: Router<World>) -> Result<(SocketAddr, World)> {
    let world = World::default();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let router = router.with_state(world.clone());
    tokio::task::spawn_local(async move { axum::serve(listener, router).await });
    Ok((address, world))
}

fn command(server: SocketAddr, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towpath"));
    command.args(arguments).env("TOWPATH_URL", format!("http://{server}")).env("TOWPATH_TOKEN", "secret").env_remove("NO_COLOR");
    command.stdin(Stdio::null()).kill_on_drop(true);
    command
}

async fn towpath(server: SocketAddr, arguments: &[&str]) -> Result<Output> {
    Ok(tokio::time::timeout(DEADLINE, command(server, arguments).output()).await??)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn run(state: &str) -> Value {
    json!({
        "id": RunId::mint(), "session": SessionId::mint(), "agent": "echo", "agent_version": 1, "principal": PrincipalId::mint(), "mode": "one_shot",
        "state": state, "wanted": null, "reason": null, "message": null, "labels": {}, "priority": 0, "exit": null, "epoch": 1, "revision": 3,
        "startup": [{"step": "inputs", "at": "2027-01-01T00:00:00Z", "detail": null}], "waiting_for": null,
        "result": {"text": "# done", "truncated": false}, "transcript": {"state": "complete", "bytes": 5, "missing": 0},
        "created_at": "2027-01-01T00:00:00Z", "started_at": null, "ended_at": null, "deliveries": 0,
    })
}

fn refuse(code: ErrorCode, detail: &str) -> Response {
    let problem = Problem::new(code, detail).blocked_by("run_7");
    (StatusCode::from_u16(problem.status).expect("status"), Json(problem)).into_response()
}

fn output(id: u64, bytes: &[u8]) -> String {
    let data = json!({"epoch": 1, "seq": id, "stream": "stdout", "b64": BASE64_STANDARD.encode(bytes)});
    format!("event: output\nid: place-{id}\ndata: {data}\n\n: still here\n\n")
}

/// Runs a test whose server lives on the same thread.
fn local(test: impl Future<Output = Result<()>>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    tokio::task::LocalSet::new().block_on(&runtime, test)
}

#[test]
fn a_refusal_is_told_with_what_to_do_and_exit_code_5() -> Result<()> {
    local(async {
        let (server, _) =
            serve(Router::new().route("/v1/runs", post(async || refuse(ErrorCode::SessionBusy, "the session has a live run")))).await?;
        let done = towpath(server, &["run", "echo", "hi"]).await?;
        let error = text(&done.stderr);
        assert_eq!(done.status.code(), Some(5), "{error}");
        assert_eq!(error, "towpath: the session has a live run (run_7)\nSteer the live run, or wait until it has ended. [session_busy]\n");
        let done = towpath(server, &["run", "echo", "hi", "--json"]).await?;
        assert_eq!(serde_json::from_slice::<Value>(&done.stdout)?["code"], "session_busy");
        Ok(())
    })
}

#[test]
fn without_a_server_the_exit_code_is_6_and_wrong_use_is_2() -> Result<()> {
    local(async {
        let nobody = TcpListener::bind("127.0.0.1:0").await?.local_addr()?;
        let done = towpath(nobody, &["runs"]).await?;
        assert_eq!(done.status.code(), Some(6));
        assert!(text(&done.stderr).contains("does not answer"), "{}", text(&done.stderr));
        for wrong in
            [&["run", "echo"][..], &["runs", "--colour"], &["run", "echo", "hi", "--file", "/nowhere"], &["runs", "--url", "ftp://x"]]
        {
            assert_eq!(towpath(nobody, wrong).await?.status.code(), Some(2), "{wrong:?}");
        }
        Ok(())
    })
}

#[test]
fn waiting_ends_with_the_run_s_own_exit_code_and_prints_its_result() -> Result<()> {
    local(async {
        for (state, code) in [("succeeded", 0), ("failed", 1), ("canceled", 3), ("timed_out", 4)] {
            let router = Router::new().route("/v1/runs", post(async || (StatusCode::CREATED, Json(run("queued"))))).route(
                "/v1/runs/{id}",
                get(async move |State(world): State<World>, headers: HeaderMap| {
                    Json(run(if note(&world, "get", &headers, b"") == 1 { "running" } else { state }))
                }),
            );
            let (server, world) = serve(router).await?;
            let done = towpath(server, &["run", "echo", "hi", "--wait"]).await?;
            assert_eq!((done.status.code(), text(&done.stdout)), (Some(code), "# done\n".to_owned()), "{state}: {}", text(&done.stderr));
            assert!(text(&done.stderr).contains("· 0.00 s  inputs\nrunning\n"), "{}", text(&done.stderr));
            assert_eq!(requests(&world, "get").len(), 2);
        }
        Ok(())
    })
}

#[test]
fn following_takes_a_broken_stream_up_again_where_it_broke_off() -> Result<()> {
    local(async {
        let events = async |State(world): State<World>, headers: HeaderMap| {
            let first = note(&world, "events", &headers, b"") == 1;
            let body = if first {
                output(1, b"\x1b[31mone\x1b[0m\n") + &output(2, b"tw\xc3")
            } else {
                output(3, b"\xb6\n\x1b]0;title\x07three\n") + "event: end\nid: place-4\ndata: {\"state\":\"succeeded\"}\n\n"
            };
            ([(header::CONTENT_TYPE, "text/event-stream")], body)
        };
        let router = Router::new()
            .route("/v1/runs", post(async || (StatusCode::CREATED, Json(run("queued")))))
            .route("/v1/runs/{id}", get(async || Json(run("succeeded"))))
            .route("/v1/runs/{id}/events", get(events));
        let (server, world) = serve(router).await?;
        let done = towpath(server, &["run", "echo", "hi", "--follow"]).await?;
        assert_eq!((done.status.code(), text(&done.stdout)), (Some(0), "one\ntwö\nthree\n# done\n".to_owned()), "{}", text(&done.stderr));
        let last = requests(&world, "events").into_iter().map(|(headers, _)| headers.get("last-event-id").cloned()).collect::<Vec<_>>();
        assert_eq!(last, [None, Some("place-2".parse()?)]);
        Ok(())
    })
}

#[test]
fn a_result_that_was_the_last_output_is_printed_once() -> Result<()> {
    local(async {
        let events = async || {
            let body = output(1, b"work\n\x1b[1m# do")
                + &output(2, b"ne\x1b[0m\n")
                + "event: end\nid: place-3\ndata: {\"state\":\"succeeded\"}\n\n";
            ([(header::CONTENT_TYPE, "text/event-stream")], body)
        };
        let router = Router::new()
            .route("/v1/runs", post(async || (StatusCode::CREATED, Json(run("queued")))))
            .route("/v1/runs/{id}", get(async || Json(run("succeeded"))))
            .route("/v1/runs/{id}/events", get(events));
        let (server, _) = serve(router).await?;
        let done = towpath(server, &["run", "echo", "hi", "--follow"]).await?;
        assert_eq!((done.status.code(), text(&done.stdout)), (Some(0), "work\n# done\n".to_owned()), "{}", text(&done.stderr));
        Ok(())
    })
}

#[test]
fn files_are_uploaded_and_the_run_names_them() -> Result<()> {
    local(async {
        let id = FileId::mint();
        let upload =
            async move |State(world): State<World>, Query(query): Query<Vec<(String, String)>>, headers: HeaderMap, body: Bytes| {
                note(&world, "upload", &headers, &body);
                world.lock().expect("seen").queries.push(format!("{query:?}"));
                Json(json!({"id": id, "name": "a b.txt", "media_type": "text/plain", "size": body.len(), "status": "stored"}))
            };
        let create = async |State(world): State<World>, headers: HeaderMap, body: Bytes| {
            note(&world, "create", &headers, &body);
            (StatusCode::CREATED, Json(run("queued")))
        };
        let (server, world) = serve(Router::new().route("/v1/files", post(upload)).route("/v1/runs", post(create))).await?;
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("a b.txt");
        std::fs::write(&path, vec![b'x'; 1_000_000])?;
        let target = ["--deliver-webhook", "http://127.0.0.1:1/", "--label", "team=core", "--priority", "-3"];
        let mut arguments = vec!["run", "echo", "hi", "--file", path.to_str().context("path")?];
        arguments.extend(target);
        let done = towpath(server, &arguments).await?;
        assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
        let (headers, body) = requests(&world, "upload").remove(0);
        assert_eq!(
            (headers[header::CONTENT_LENGTH].to_str()?, headers[header::AUTHORIZATION].to_str()?, body.len()),
            ("1000000", "Bearer secret", 1_000_000)
        );
        assert_eq!(world.lock().expect("seen").queries, [r#"[("name", "a b.txt"), ("media_type", "text/plain")]"#]);
        let (_, body) = requests(&world, "create").remove(0);
        let expected = json!({"agent": "echo", "prompt": "hi", "files": [id], "deliver": [{"webhook": {"url": "http://127.0.0.1:1/"}}], "labels": {"team": "core"}, "priority": -3});
        assert_eq!(serde_json::from_slice::<Value>(&body)?, expected);
        Ok(())
    })
}

#[test]
fn what_creates_something_is_repeated_under_the_same_key_when_the_outcome_is_unknown() -> Result<()> {
    local(async {
        let create = async |State(world): State<World>, headers: HeaderMap| match note(&world, "create", &headers, b"") {
            1 => refuse(ErrorCode::OutcomeUnknown, "nobody can say"),
            _ => (StatusCode::CREATED, Json(run("queued"))).into_response(),
        };
        let (server, world) = serve(Router::new().route("/v1/runs", post(create))).await?;
        assert_eq!(towpath(server, &["run", "echo", "hi"]).await?.status.code(), Some(0));
        let keys = requests(&world, "create").iter().map(|(headers, _)| headers["idempotency-key"].clone()).collect::<Vec<_>>();
        assert_eq!((keys.len(), keys[0] == keys[1]), (2, true));
        Ok(())
    })
}

#[test]
fn a_wrong_definition_is_told_by_file_and_key_and_nothing_is_sent() -> Result<()> {
    local(async {
        let apply = async |State(world): State<World>, headers: HeaderMap, body: Bytes| {
            note(&world, "put", &headers, &body);
            StatusCode::NO_CONTENT
        };
        let (server, world) = serve(Router::new().route("/v1/agents/{name}", put(apply))).await?;
        let dir = tempfile::tempdir()?;
        let (good, bad) = (dir.path().join("good.toml"), dir.path().join("bad.toml"));
        std::fs::write(&good, "name = \"good\"\ncommand = [\"/bin/true\"]\n")?;
        std::fs::write(&bad, "name = \"bad\"\ncomand = [\"/bin/true\"]\n")?;
        let arguments = ["agents", "apply", good.to_str().context("path")?, bad.to_str().context("path")?];
        let done = towpath(server, &arguments).await?;
        let error = text(&done.stderr);
        assert!(done.status.code() == Some(2) && error.contains("bad.toml") && error.contains("comand"), "{error}");
        assert_eq!(requests(&world, "put").len(), 0);
        Ok(())
    })
}

#[test]
fn the_token_is_found_in_a_folder_above() -> Result<()> {
    local(async {
        let list = async |State(world): State<World>, headers: HeaderMap| {
            note(&world, "list", &headers, b"");
            Json(json!({"items": []}))
        };
        let (server, world) = serve(Router::new().route("/v1/runs", get(list))).await?;
        let dir = tempfile::tempdir()?;
        let below: &Path = &dir.path().join("some/folder");
        std::fs::create_dir_all(below)?;
        std::fs::create_dir(dir.path().join(".towpath"))?;
        std::fs::write(dir.path().join(".towpath/token"), "from-file\n")?;
        let done = command(server, &["runs"]).env_remove("TOWPATH_TOKEN").current_dir(below).output().await?;
        assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
        assert_eq!(requests(&world, "list")[0].0[header::AUTHORIZATION], "Bearer from-file");
        Ok(())
    })
}

#[test]
fn listen_takes_what_is_signed_and_refuses_the_rest() -> Result<()> {
    local(async {
        rustls::crypto::ring::default_provider().install_default().ok();
        let secret = format!("whsec_{}", BASE64_STANDARD.encode([7; 24]));
        let nobody: SocketAddr = "127.0.0.1:1".parse()?;
        let arguments = ["listen", "--port", "0", "--count", "1", "--secret", &secret];
        let mut listener = command(nobody, &arguments).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        let mut errors = BufReader::new(listener.stderr.take().context("stderr")?);
        errors.read_line(&mut line).await?;
        let url = line.trim().strip_prefix("listening on ").context("the address")?;
        let body = json!({"type": "run.ended", "data": {"run": run("succeeded")}}).to_string();
        let at = std::fs::metadata("/proc/self")?.modified()?.duration_since(std::time::UNIX_EPOCH)?.as_secs();
        let signature = Webhook::new(&secret)?.sign("dlv_1", i64::try_from(at)?, body.as_bytes())?;
        let send = async |signature: &str| -> Result<StatusCode> {
            let request = reqwest::Client::new().post(url).header("webhook-id", "dlv_1").header("webhook-timestamp", at);
            Ok(request.header("webhook-signature", signature).body(body.clone()).send().await?.status())
        };
        assert_eq!(send("v1,AAAA").await?, StatusCode::UNAUTHORIZED);
        assert_eq!(send(&signature).await?, StatusCode::OK);
        let done = tokio::time::timeout(DEADLINE, listener.wait_with_output()).await??;
        let printed = text(&done.stdout);
        assert!(printed.starts_with("run.ended dlv_1 (signature verified)\n") && printed.contains("  | # done\n"), "{printed}");
        Ok(())
    })
}

#[test]
fn servers_are_kept_under_names_and_a_token_that_does_not_work_is_not() -> Result<()> {
    local(async {
        let home = tempfile::tempdir()?;
        let agents = get(async |State(world): State<World>, headers: HeaderMap| {
            note(&world, "agents", &headers, b"");
            let known = headers.get(header::AUTHORIZATION).is_some_and(|value| value == "Bearer good");
            if known {
                Json(json!({ "items": [], "cursor": null })).into_response()
            } else {
                refuse(ErrorCode::Unauthorized, "the token is unknown")
            }
        });
        let (server, world) = serve(Router::new().route("/v1/agents", agents)).await?;
        let url = format!("http://{server}");
        let towpath = async |arguments: &[&str]| -> Result<Output> {
            let mut command = command(server, arguments);
            command.env_remove("TOWPATH_URL").env_remove("TOWPATH_TOKEN").env("HOME", home.path()).env_remove("XDG_CONFIG_HOME");
            Ok(command.current_dir(home.path()).output().await?)
        };
        let refused = towpath(&["login", "first", "--url", &url, "--token", "bad"]).await?;
        assert_eq!(refused.status.code(), Some(5), "{}", text(&refused.stderr));
        assert!(!home.path().join(".config/towpath/contexts.toml").exists());
        assert!(towpath(&["login", "first", "--url", &url, "--token", "good"]).await?.status.success());
        let kept = std::fs::metadata(home.path().join(".config/towpath/contexts.toml"))?;
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&kept.permissions()) & 0o777, 0o600);
        // Used without another word, by its name, and not with a URL of one's own.
        for (arguments, token) in [
            (&["agents", "list"][..], "good"),
            (&["agents", "list", "--context", "first"], "good"),
            (&["agents", "list", "--url", &url], ""),
        ] {
            towpath(arguments).await?;
            let (headers, _) = requests(&world, "agents").pop().context("asked")?;
            let shown = headers.get(header::AUTHORIZATION).map(|value| text(value.as_bytes())).unwrap_or_default();
            assert_eq!(shown.trim_start_matches("Bearer "), token, "{arguments:?}");
        }
        let unknown = towpath(&["agents", "list", "--context", "second"]).await?;
        assert!(unknown.status.code() == Some(2) && text(&unknown.stderr).contains("there are first"), "{}", text(&unknown.stderr));
        let listed = towpath(&["login"]).await?;
        assert!(text(&listed.stdout).contains(&url) && !text(&listed.stdout).contains("good"), "{}", text(&listed.stdout));
        assert!(towpath(&["logout", "first"]).await?.status.success());
        assert_eq!(towpath(&["use", "first"]).await?.status.code(), Some(2));
        Ok(())
    })
}

#[test]
fn doctor_says_what_is_in_the_way_and_what_to_do() -> Result<()> {
    local(async {
        let nobody = TcpListener::bind("127.0.0.1:0").await?.local_addr()?;
        let done = towpath(nobody, &["doctor"]).await?;
        assert!(done.status.code() == Some(1) && text(&done.stdout).contains("./dev up"), "{}", text(&done.stdout));
        let router = Router::new()
            .route(
                "/readyz",
                get(async || {
                    (
                        StatusCode::SERVICE_UNAVAILABLE,
                        Json(json!({ "ready": false, "postgres": "ok", "nats": "away: no answer", "s3": "ok" })),
                    )
                }),
            )
            .route("/v1/agents", get(async || Json(json!({ "items": [], "cursor": null }))))
            .route("/v1/runs", get(async || Json(json!({ "items": [], "cursor": null }))));
        let (server, _) = serve(router).await?;
        let done = towpath(server, &["doctor"]).await?;
        let told = text(&done.stdout);
        assert!(
            done.status.code() == Some(1)
                && told.contains("✗ nats: away: no answer")
                && told.contains("✓ postgres: ok")
                && told.contains("towpath agents apply"),
            "{told}"
        );
        Ok(())
    })
}

#[test]
fn a_shell_can_complete_every_command() -> Result<()> {
    local(async {
        let nobody = TcpListener::bind("127.0.0.1:0").await?.local_addr()?;
        for shell in ["bash", "zsh", "fish"] {
            let done = towpath(nobody, &["completion", shell]).await?;
            let script = text(&done.stdout);
            assert!(
                done.status.success() && ["attach", "transcript", "rerun", "doctor"].iter().all(|name| script.contains(name)),
                "{shell}"
            );
        }
        Ok(())
    })
}
