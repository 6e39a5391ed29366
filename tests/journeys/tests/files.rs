//! Files in and out: uploads that break off, outputs that come back.

use std::{process::Stdio, time::Duration};

use anyhow::{Context, Result, ensure};
use reqwest::{Method, StatusCode, header};
use serde_json::{Value, json};
use stage::{Mode, Proxy};
use tokio::{io::AsyncWriteExt, net::TcpStream, process::Command};
use towpath_journeys::{Ground, World, sha256};

/// Bytes that look like nothing, the same each time.
fn noise(count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    (0..count).map(|_| next()).collect()
}

async fn download(world: &World, file: &Value) -> Result<Vec<u8>> {
    let id = file["id"].as_str().with_context(|| format!("{file}"))?;
    let answer = world.client.get(format!("{}/v1/files/{id}", world.url)).bearer_auth(&world.token).send().await?;
    ensure!(answer.status() == StatusCode::OK, "{}", answer.status());
    Ok(answer.bytes().await?.to_vec())
}

/// A request about an upload: its status, its `Upload-Offset`, its body.
async fn ask(
    world: &World,
    method: Method,
    path: &str,
    headers: &[(&'static str, &str)],
    body: Vec<u8>,
) -> Result<(StatusCode, Option<u64>, String, Value)> {
    let mut request = world.client.request(method, format!("{}{path}", world.url)).bearer_auth(&world.token);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = request.body(body).send().await?;
    let text = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let (offset, place) = (text("upload-offset").and_then(|text| text.parse().ok()), text("location").unwrap_or_default());
    let status = answer.status();
    let body = answer.bytes().await?;
    Ok((status, offset, place, serde_json::from_slice(&body).unwrap_or_default()))
}

#[tokio::test]
async fn an_upload_goes_on_where_it_broke_off_and_finishing_twice_makes_one_file() -> Result<()> {
    let world = World::start().await?;
    let content = noise(3_000_000);
    let (status, _, place, _) =
        ask(&world, Method::POST, "/v1/uploads?name=..%2Fnoise.bin", &[("upload-length", "3000000")], vec![]).await?;
    ensure!(status == StatusCode::CREATED && place.starts_with("/v1/uploads/upl_"), "{status} {place}");

    // A connection that breaks off in the middle of a part: what had come is kept.
    let mut broken = TcpStream::connect(world.url.trim_start_matches("http://")).await?;
    let head = format!(
        "PATCH {place} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\nupload-offset: 0\r\nupload-complete: ?0\r\ncontent-length: 2000000\r\n\r\n",
        world.token
    );
    broken.write_all(head.as_bytes()).await?;
    broken.write_all(&content[..1_234_567]).await?;
    broken.flush().await?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    drop(broken);
    let kept = stage::wait_for("what came to be kept", Duration::from_secs(20), async || {
        ask(&world, Method::HEAD, &place, &[], vec![]).await.ok()?.1.filter(|offset| *offset > 0)
    })
    .await?;
    ensure!(kept <= 1_234_567, "{kept} bytes of 1234567 are there");

    // A part that does not follow changes nothing and says where to go on.
    let at = usize::try_from(kept)?;
    let (status, offset, _, problem) = ask(&world, Method::PATCH, &place, &[("upload-offset", "7")], vec![1, 2, 3]).await?;
    ensure!(status == StatusCode::CONFLICT && offset == Some(kept) && problem["code"] == "upload_offset", "{problem}");
    // One that goes beyond what was announced is refused.
    let too_much = vec![0; content.len() - at + 1];
    let (status, ..) = ask(&world, Method::PATCH, &place, &[("upload-offset", &kept.to_string())], too_much).await?;
    ensure!(status == StatusCode::PAYLOAD_TOO_LARGE, "{status}");
    // Ended too early.
    let ends = [("upload-offset", kept.to_string()), ("upload-complete", "?1".to_owned())];
    let ends: Vec<(&'static str, &str)> = ends.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let (status, _, _, problem) = ask(&world, Method::PATCH, &place, &ends, vec![]).await?;
    ensure!(status == StatusCode::UNPROCESSABLE_ENTITY, "{problem}");

    let (status, _, _, file) = ask(&world, Method::PATCH, &place, &ends, content[at..].to_vec()).await?;
    ensure!(status == StatusCode::CREATED && file["name"] == "noise.bin" && file["size"] == 3_000_000, "{file}");
    ensure!(sha256(&download(&world, &file).await?) == sha256(&content), "what was uploaded is not what came");
    let (_, _, _, again) = ask(&world, Method::PATCH, &place, &[("upload-offset", "3000000"), ("upload-complete", "?1")], vec![]).await?;
    ensure!(again == file && world.count("select count(*) from file").await? == 1, "{again}");
    ensure!(world.count("select count(*) from object where state = 'live'").await? == 1, "parts are left");

    let (_, _, other, _) = ask(&world, Method::POST, "/v1/uploads?name=x", &[], vec![]).await?;
    let (status, ..) = ask(&world, Method::DELETE, &other, &[], vec![]).await?;
    let (gone, ..) = ask(&world, Method::HEAD, &other, &[], vec![]).await?;
    ensure!(status == StatusCode::NO_CONTENT && gone == StatusCode::NOT_FOUND, "{status} {gone}");
    let (status, ..) = ask(&world, Method::POST, "/v1/uploads?name=x", &[("upload-length", "99999999999")], vec![]).await?;
    ensure!(status == StatusCode::PAYLOAD_TOO_LARGE, "{status}");
    world.finish().await
}

#[tokio::test]
async fn the_client_uploads_over_cut_connections_and_a_killed_server() -> Result<()> {
    const BYTES: usize = 64 << 20;
    let world = World::prepare(Ground::shared().await?, &[("TOWPATH_FILE_BYTES", "100000000")]).await?;
    world.spawn("all", &["dev"])?;
    world.ready().await?;
    let proxy = Proxy::tcp(world.env["TOWPATH_LISTEN"].parse()?).await?;
    proxy.set(Mode::Throttle { bytes_per_s: 24 << 20 }).await;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("noise.bin");
    let content = noise(BYTES);
    std::fs::write(&path, &content)?;
    let client = Command::new(std::env::var("TOWPATH_BIN")?)
        .args(["files", "upload", "--json"])
        .arg(&path)
        .env_clear()
        .envs([("TOWPATH_URL", format!("http://{}", proxy.address())), ("TOWPATH_TOKEN", world.token.clone())])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let received = async |most: i64| {
        stage::wait_for("the upload to go on", Duration::from_secs(60), async || {
            let received: Option<i64> = sqlx::query_scalar("select received from upload").fetch_optional(&world.db).await.ok()?;
            received.filter(|received| *received >= most)
        })
        .await
    };
    received(1).await?;
    proxy.cut().await;
    received(16 << 20).await?;
    world.kill("all")?;
    world.spawn("all", &["dev"])?;
    received(32 << 20).await?;
    proxy.cut().await;
    let output = client.wait_with_output().await?;
    ensure!(output.status.success(), "{}", output.status);
    let file: Value = serde_json::from_slice(&output.stdout)?;
    world.ready().await?;
    ensure!(sha256(&download(&world, &file).await?) == sha256(&content), "what was uploaded is not what came");
    world.finish().await
}

#[tokio::test]
async fn outputs_come_back_into_an_empty_workspace_and_are_not_this_run_s() -> Result<()> {
    let world = World::start().await?;
    let script = "cd /workspace/outputs; find . -type f | sort | xargs -r cat; mkdir -p deep; [ -e deep/a ] || echo first > deep/a; echo $TOWPATH_TASK >> b; rm -f gone";
    world.agent("writer", &["/bin/sh", "-c", script], json!({})).await?;
    let outputs = async |run: &str| -> Result<Vec<String>> {
        let page = world.get(&format!("/v1/runs/{run}/outputs")).await?;
        Ok(page["items"].as_array().context("items")?.iter().filter_map(|item| item["name"].as_str().map(str::to_owned)).collect())
    };
    let first = world.ended(&world.run("writer", &json!("one")).await?).await?;
    let session = first["session"].as_str().context("session")?.to_owned();
    ensure!(outputs(first["id"].as_str().unwrap_or_default()).await? == ["b", "deep/a"], "{first}");
    let next = async |prompt: &str| -> Result<Value> {
        let run = world.start_run(json!({ "agent": "writer", "prompt": prompt, "session": session })).await?;
        world.ended(&run).await
    };
    // The workspace goes on: nothing is restored, and what the agent removed stays away.
    std::fs::remove_file(world.workspace(&session).join("outputs/deep/a"))?;
    std::fs::write(world.workspace(&session).join("outputs/deep/a"), "changed\n")?;
    let second = next("two").await?;
    ensure!(second["result"]["text"] == "one\nchanged\n", "{second}");
    // The host lost it.
    std::fs::remove_dir_all(world.workspace(&session))?;
    let third = next("three").await?;
    ensure!(third["result"]["text"] == "one\ntwo\nfirst\n" && third["state"] == "succeeded", "{third}");
    ensure!(outputs(third["id"].as_str().unwrap_or_default()).await? == ["b"], "{third}");
    let steps = third["startup"].to_string();
    ensure!(steps.contains("2 are restored"), "{steps}");
    world.finish().await
}

#[tokio::test]
async fn a_file_is_downloaded_with_its_length_and_never_shown_as_a_page() -> Result<()> {
    let world = World::start().await?;
    let (_, file) = world.upload("page.html", b"<script>alert(1)</script>".to_vec()).await?;
    let id = file["id"].as_str().context("id")?;
    let answer = world.client.get(format!("{}/v1/files/{id}", world.url)).bearer_auth(&world.token).send().await?;
    let header = |name: header::HeaderName| answer.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    ensure!(header(header::CONTENT_TYPE) == "application/octet-stream" && header(header::X_CONTENT_TYPE_OPTIONS) == "nosniff");
    ensure!(header(header::CONTENT_DISPOSITION).starts_with("attachment") && header(header::CONTENT_LENGTH) == "25");
    world.finish().await
}
