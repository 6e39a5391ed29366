//! 5,000 signed Slack events, 30 of 100 of them repetitions, and how long each waits for its answer; beside it one bare commit of as many bytes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use serde_json::{Value, json};
use stage::slack::{self, Slack};
use towpath_chassis::clock;

use crate::{ground::Ground, life::at};

const EVENTS: usize = 5000;
/// Of ten events so many are new; the others repeat one of them.
const NEW_OF_TEN: usize = 7;
const IN_FLIGHT: [usize; 3] = [1, 16, 64];

pub async fn measure(ground: &Ground) -> Result<Value> {
    let _api = ground.api().await?;
    let hook = hook(ground).await?;
    let mut all = serde_json::Map::new();
    println!("{:>28} {:>9} {:>8} {:>8} {:>8}", "", "events/s", "p50 ms", "p99 ms", "max ms");
    for in_flight in IN_FLIGHT {
        let began = Instant::now();
        let waits = post(ground, &hook, in_flight).await?;
        let per_s = EVENTS as f64 / began.elapsed().as_secs_f64();
        all.insert(in_flight.to_string(), line(&format!("events, {in_flight} in flight"), per_s, &waits));
        let began = Instant::now();
        let waits = commit(ground, in_flight).await?;
        let per_s = waits.len() as f64 / began.elapsed().as_secs_f64();
        all.insert(format!("commit_{in_flight}"), line(&format!("bare commits, {in_flight} in flight"), per_s, &waits));
    }
    let kept: i64 = sqlx::query_scalar("select count(*) from inbound").fetch_one(&ground.db).await?;
    ensure!(usize::try_from(kept)? == IN_FLIGHT.len() * EVENTS * NEW_OF_TEN / 10, "{kept} messages were kept");
    Ok(json!({ "slack": all }))
}

fn line(what: &str, per_s: f64, sorted: &[f64]) -> Value {
    let (p50, p99, max) = (at(sorted, 0.5), at(sorted, 0.99), at(sorted, 1.0));
    println!("{what:>28} {per_s:>9.0} {p50:>8.2} {p99:>8.2} {max:>8.2}");
    json!({ "per_s": per_s.round(), "p50_ms": p50, "p99_ms": p99, "max_ms": max })
}

/// The path of a Slack channel's hook.
async fn hook(ground: &Ground) -> Result<String> {
    let definition = json!({
        "name": "slack", "agent": "bench", "access": "public", "slack": { "api": "http://127.0.0.1:9/api" },
        "secrets": { "signing_secret": slack::SIGNING_SECRET, "bot_token": slack::BOT_TOKEN },
    });
    let status = ground.client().await?.send("PUT", "/v1/channels/slack", &definition.to_string()).await?;
    ensure!((200..300).contains(&status), "PUT channel: {status}");
    let id: String = sqlx::query_scalar("select replace(id::text, '-', '') from channel").fetch_one(&ground.db).await?;
    Ok(format!("/hooks/chn_{id}"))
}

/// Milliseconds to each answer, sorted.
async fn post(ground: &Ground, hook: &str, in_flight: usize) -> Result<Vec<f64>> {
    let waits = try_join_all((0..in_flight).map(|lane| async move {
        let mut client = ground.client().await?;
        let mut waits = Vec::new();
        let mut event = None;
        for n in (lane..EVENTS / 10).step_by(in_flight).flat_map(|ten| ten * 10..ten * 10 + 10) {
            if n % 10 < NEW_OF_TEN {
                let ts = format!("{in_flight}.{n:06}");
                event = Some(slack::mention("C1", "U0ANN", "<@U0BOT> count the code", &ts, None).body);
            }
            let body = event.as_deref().context("an event")?;
            let now = clock::wall().timestamp();
            let headers = format!("x-slack-request-timestamp: {now}\r\nx-slack-signature: {}\r\n", Slack::sign(now, body));
            let began = Instant::now();
            let status = client.send_with("POST", hook, body, &headers).await?;
            waits.push(began.elapsed().as_secs_f64() * 1000.0);
            ensure!(status == 200, "POST {hook}: {status}");
        }
        anyhow::Ok(waits)
    }))
    .await?;
    Ok(sorted(waits.concat()))
}

/// The same of commits of a row of as many bytes, each in a transaction of its own.
async fn commit(ground: &Ground, in_flight: usize) -> Result<Vec<f64>> {
    const SPAN: Duration = Duration::from_secs(3);
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(u32::try_from(in_flight)?).connect(&ground.servers_url()).await?;
    sqlx::query("create table if not exists bare (id bigserial primary key, raw bytea)").execute(&pool).await?;
    let raw = slack::mention("C1", "U0ANN", "<@U0BOT> count the code", "1.000000", None).body.into_bytes();
    let began = Instant::now();
    let waits = try_join_all((0..in_flight).map(|_| async {
        let mut waits = Vec::new();
        while began.elapsed() < SPAN {
            let began = Instant::now();
            sqlx::query("insert into bare (raw) values ($1)").bind(&raw).execute(&pool).await?;
            waits.push(began.elapsed().as_secs_f64() * 1000.0);
        }
        anyhow::Ok(waits)
    }))
    .await?;
    pool.close().await;
    Ok(sorted(waits.concat()))
}

fn sorted(mut waits: Vec<f64>) -> Vec<f64> {
    waits.sort_by(f64::total_cmp);
    waits
}
