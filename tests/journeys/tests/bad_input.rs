//! Bad input gets a clear error that says what to do, and loses nothing.

use anyhow::{Context, Result, ensure};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use towpath_journeys::World;

/// Every refusal is a problem document (RFC 9457) with a code, a sentence of help and whether it may be tried again.
fn check(status: StatusCode, problem: &Value, code: &str) -> Result<()> {
    ensure!(problem["code"] == code, "expected {code}: {status} {problem}");
    ensure!(problem["status"] == status.as_u16() && problem["retryable"].is_boolean(), "{problem}");
    ensure!(
        problem["help"].as_str().is_some_and(|help| help.len() > 10) && problem["detail"].as_str().is_some_and(|detail| !detail.is_empty()),
        "{problem}"
    );
    Ok(())
}

#[tokio::test]
async fn a_request_that_cannot_be_is_refused_with_what_to_do() -> Result<()> {
    let world = World::start().await?;
    world.example("echo").await?;
    let run = |body: Value| {
        let world = &world;
        async move { world.call(Method::POST, "/v1/runs", Some(&body)).await }
    };
    let cases = [
        (json!({ "agent": "nobody", "prompt": "x" }), 404, "unknown_agent"),
        (json!({ "agent": "echo", "prompt": "x", "session": "ses_01a22d0260cd75d4938e7b23e2eeeccd" }), 404, "unknown_session"),
        (json!({ "agent": "echo", "prompt": "x".repeat(1024 * 1024 + 1) }), 413, "prompt_too_long"),
        (json!({ "agent": "echo", "prompt": "a\u{0}b" }), 400, "nul_character"),
        (json!({ "agent": "echo", "prompt": "" }), 422, "unprocessable"),
        (json!({ "agent": "echo", "prompt": "x", "files": ["fil_01a22d0260cd75d4938e7b23e2eeeccd"] }), 404, "unknown_file"),
        (json!({ "agent": "echo", "prompt": "x", "sesion": "typo" }), 422, "unprocessable"),
        (json!({ "agent": "echo", "prompt": "x", "session": "not-an-id" }), 422, "unprocessable"),
        (json!({ "agent": "echo", "prompt": "x", "priority": 101 }), 422, "unprocessable"),
        (json!({ "agent": "echo", "prompt": "x", "deliver": [{ "webhook": { "url": "ftp://x/" } }] }), 422, "unprocessable"),
        (
            json!({ "agent": "echo", "prompt": "x", "deliver": [{ "webhook": { "url": "http://169.254.169.254/latest" } }] }),
            422,
            "unprocessable",
        ),
        (
            json!({ "agent": "echo", "prompt": "x", "deliver": [{ "webhook": { "url": "http://[::ffff:10.0.0.1]/" } }] }),
            422,
            "unprocessable",
        ),
        (
            json!({ "agent": "echo", "prompt": "x", "deliver": [{ "webhook": { "url": "https://x.example/", "secret": "short" } }] }),
            422,
            "unprocessable",
        ),
    ];
    for (body, status, code) in cases {
        let (got, problem) = run(body).await?;
        ensure!(got.as_u16() == status, "{code}: {got} {problem}");
        check(got, &problem, code)?;
    }
    ensure!(world.count("select count(*) from run").await? == 0, "a refused request left a run");
    ensure!(world.count("select count(*) from session").await? == 0, "a refused request left a session");

    let raw = async |bytes: Vec<u8>, media_type: &str| -> Result<(StatusCode, Value)> {
        let answer = world
            .client
            .post(format!("{}/v1/runs", world.url))
            .bearer_auth(&world.token)
            .header("content-type", media_type)
            .body(bytes)
            .send()
            .await?;
        let status = answer.status();
        ensure!(answer.headers()["content-type"] == "application/problem+json", "{:?}", answer.headers());
        Ok((status, answer.json().await?))
    };
    let (status, problem) = raw(b"{\"agent\":\"echo\",\"prompt\":\"\xff\"}".to_vec(), "application/json").await?;
    check(status, &problem, "invalid_utf8")?;
    let (status, problem) = raw(b"{\"agent\":".to_vec(), "application/json").await?;
    check(status, &problem, "bad_request")?;
    let (status, problem) = raw(b"agent=echo".to_vec(), "application/x-www-form-urlencoded").await?;
    check(status, &problem, "unsupported_media_type")?;
    let (status, problem) = raw(vec![b' '; 9 * 1024 * 1024], "application/json").await?;
    check(status, &problem, "too_large")?;
    let (status, problem) = world.call(Method::GET, "/v1/nothing", None).await?;
    check(status, &problem, "not_found")?;
    let (status, problem) = world.call(Method::DELETE, "/v1/runs", None).await?;
    check(status, &problem, "method_not_allowed")?;
    let (status, problem) = world.call(Method::GET, "/v1/runs/run_nonsense", None).await?;
    check(status, &problem, "not_found")?;
    world.finish().await
}

#[tokio::test]
async fn a_prompt_of_exactly_one_mebibyte_is_taken_whole() -> Result<()> {
    let world = World::start().await?;
    world.agent("measure", &["/bin/sh", "-c", "wc -c < $TOWPATH_TASK_FILE; [ -z \"$TOWPATH_TASK\" ] && echo unset"], json!({})).await?;
    // One byte needs six in JSON: escapes do not count.
    let run = world.start_run(json!({ "agent": "measure", "prompt": "\u{1}".repeat(1024 * 1024) })).await?;
    let ended = world.ended(&run).await?;
    ensure!(ended["result"]["text"] == "1048576\nunset\n", "{}", ended["result"]);
    world.finish().await
}

#[tokio::test]
async fn a_file_that_is_too_large_is_refused_and_a_name_is_made_safe() -> Result<()> {
    let world = World::start().await?;
    world
        .agent(
            "list",
            &[
                "/bin/sh",
                "-c",
                "cd $TOWPATH_ATTACHMENTS_DIR && ls -1 && cat $TOWPATH_ATTACHMENTS_MANIFEST; echo; echo x > x || echo read-only",
            ],
            json!({}),
        )
        .await?;
    let (status, problem) = world.upload("big", vec![0; 25 * 1024 * 1024 + 1]).await?;
    check(status, &problem, "too_large")?;
    let (_, exact) = world.upload("exact.bin", vec![7; 25 * 1024 * 1024]).await?;
    let mut files = vec![exact["id"].clone()];
    for name in ["../../etc/passwd", "Report.txt", "report.TXT", "Abscha\u{308}tzung.pdf"] {
        let (status, file) = world.upload(name, name.as_bytes().to_vec()).await?;
        ensure!(status == StatusCode::CREATED, "{file}");
        files.push(file["id"].clone());
    }
    let run = world.start_run(json!({ "agent": "list", "prompt": "x", "files": files })).await?;
    let ended = world.ended(&run).await?;
    let text = ended["result"]["text"].as_str().context("result")?;
    for name in ["exact.bin\n", "passwd\n", "Report.txt\n", "report (2).TXT\n", "Absch\u{e4}tzung.pdf\n", "read-only"] {
        ensure!(text.contains(name), "{name:?} is missing in {text}");
    }
    let (from, to) = (text.find('[').context("manifest")?, text.rfind(']').context("manifest")?);
    let manifest: Vec<Value> = serde_json::from_str(&text[from..=to])?;
    ensure!(
        manifest.len() == 5
            && manifest[0]["size"] == 25 * 1024 * 1024
            && manifest[0]["mediaType"].is_string()
            && manifest[0]["path"].is_string(),
        "{manifest:?}"
    );
    world.finish().await
}

#[tokio::test]
async fn an_agent_that_this_release_cannot_run_as_written_is_refused() -> Result<()> {
    let world = World::start().await?;
    let put = async |more: Value| -> Result<(StatusCode, Value)> {
        let mut definition = json!({ "name": "a", "command": ["/bin/true"] });
        for (key, value) in more.as_object().context("object")? {
            definition[key] = value.clone();
        }
        world.call(Method::PUT, "/v1/agents/a", Some(&definition)).await
    };
    for more in [
        json!({ "comand": [] }),
        json!({ "command": [] }),
        json!({ "sandbox": { "backend": "kubernetes" } }),
        json!({ "sandbox": { "isolation": "chroot" } }),
        json!({ "limits": { "grace_s": 11 } }),
        json!({ "on_lost": "restart" }),
        json!({ "env": { "TOWPATH_RUN_ID": "mine" } }),
        json!({ "name": "b" }),
    ] {
        let (status, problem) = put(more.clone()).await?;
        ensure!(status == StatusCode::UNPROCESSABLE_ENTITY, "{more}: {status} {problem}");
        check(status, &problem, "unprocessable")?;
    }
    let (status, first) = put(json!({})).await?;
    ensure!(status == StatusCode::CREATED && first["version"] == 1, "{status} {first}");
    let (status, same) = put(json!({})).await?;
    ensure!(status == StatusCode::OK && same["version"] == 1, "an equal definition is no new version: {same}");
    let (status, second) = put(json!({ "description": "changed" })).await?;
    ensure!(status == StatusCode::OK && second["version"] == 2, "{second}");
    world.finish().await
}
