//! Many who read one run at once, and some who do not keep up.

use anyhow::{Context, Result, ensure};
use base64::Engine;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
};
use towpath_journeys::World;

/// Readers of one run (TOWPATH_READERS), and what it prints.
const READERS: usize = 300;
const PRINTED: usize = 256 * 1024;
/// Readers that read nothing until the others have it all, of a run that prints more than the sockets and queues between hold.
const STALLED: usize = 10;
const MUCH: usize = 12 * 1024 * 1024;

/// Somebody who follows a run by its event stream, as any client does: taken up again after the last event when it breaks off or is refused for the moment.
struct Reader {
    host: String,
    run: String,
    token: String,
    last: Option<String>,
    digest: Sha256,
    bytes: usize,
    seq: u64,
    again: usize,
}

impl Reader {
    fn new(world: &World, run: &str) -> Self {
        let host = world.url.trim_start_matches("http://").to_owned();
        Self { host, run: run.to_owned(), token: world.token.clone(), last: None, digest: Sha256::new(), bytes: 0, seq: 0, again: 0 }
    }

    async fn open(&self) -> Result<BufReader<TcpStream>> {
        let mut stream = TcpStream::connect(&self.host).await?;
        let last = self.last.as_ref().map(|id| format!("last-event-id: {id}\r\n")).unwrap_or_default();
        let request = format!(
            "GET /v1/runs/{}/events HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\n{last}connection: close\r\n\r\n",
            self.run, self.host, self.token
        );
        stream.write_all(request.as_bytes()).await?;
        Ok(BufReader::new(stream))
    }

    /// Reads to the end: digest and number of the bytes, each frame once and in order; and how often it had to come again.
    async fn read(mut self, mut stream: BufReader<TcpStream>) -> Result<(String, usize, usize)> {
        while !self.one_connection(stream).await? {
            self.again += 1;
            ensure!(self.again < 100, "the stream breaks off again and again");
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            stream = self.open().await?;
        }
        Ok((hex::encode(self.digest.finalize()), self.bytes, self.again))
    }

    /// Whether the end was among its events.
    async fn one_connection(&mut self, stream: BufReader<TcpStream>) -> Result<bool> {
        let mut lines = stream.lines();
        let status = lines.next_line().await?.unwrap_or_default();
        ensure!(status.contains(" 200 ") || status.contains(" 503 "), "{status}");
        let mut kind = String::new();
        while let Some(line) = lines.next_line().await? {
            if let Some(event) = line.strip_prefix("event: ") {
                kind = event.to_owned();
            }
            if let Some(id) = line.strip_prefix("id: ") {
                self.last = Some(id.to_owned());
            }
            let Some(data) = line.strip_prefix("data: ") else { continue };
            ensure!(kind != "gap", "a gap: {data}");
            match kind.as_str() {
                "end" => return Ok(true),
                "output" => self.output(data)?,
                _ => {}
            }
        }
        Ok(false)
    }

    fn output(&mut self, data: &str) -> Result<()> {
        let output: Value = serde_json::from_str(data)?;
        let seq = output["seq"].as_u64().context("seq")?;
        ensure!(seq == self.seq + 1, "frame {seq} after {}", self.seq);
        self.seq = seq;
        let printed = base64::prelude::BASE64_STANDARD.decode(output["b64"].as_str().context("b64")?)?;
        self.bytes += printed.len();
        self.digest.update(&printed);
        Ok(())
    }
}

/// A run that prints so much, then waits for a message.
async fn printer(bytes: usize) -> Result<(World, String)> {
    let world = World::prepare(towpath_journeys::Ground::shared().await?, &[]).await?;
    world.spawn("api", &["api"])?;
    world.spawn("worker", &["worker"])?;
    world.ready().await?;
    world.example("echo").await?;
    let run = world.run("echo", &json!({ "steers": 1, "bytes": bytes })).await?;
    Ok((world, run))
}

/// What a reader of the whole run has.
async fn whole(world: &World, run: &str) -> Result<(String, usize)> {
    world.steer(run, "that is all").await?;
    world.ended_within(run, std::time::Duration::from_secs(300)).await?;
    let printed = world.raw(run).await?;
    Ok((towpath_journeys::sha256(&printed), printed.len()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_read_one_run_to_the_last_byte() -> Result<()> {
    let readers = std::env::var("TOWPATH_READERS").ok().and_then(|text| text.parse().ok()).unwrap_or(READERS);
    let (world, run) = printer(PRINTED).await?;
    let begun = std::time::Instant::now();
    let mut reading = tokio::task::JoinSet::new();
    for _ in 0..readers {
        let reader = Reader::new(&world, &run);
        let stream = reader.open().await?;
        reading.spawn(reader.read(stream));
    }
    let wanted = whole(&world, &run).await?;
    ensure!(wanted.1 >= PRINTED, "{} bytes", wanted.1);
    let (mut all, mut again) = (0, 0);
    while let Some(read) = reading.join_next().await {
        let (sha256, bytes, came_again) = read??;
        ensure!((sha256, bytes) == wanted, "a reader has something else");
        all += 1;
        again += came_again;
    }
    ensure!(all == readers, "{all} of {readers} readers came to the end");
    let peak = world.process("api", |process| Ok(process.peak_memory()))?;
    println!(
        "{readers} readers of {} bytes in {:.1?}, connected again {again} times; the API's peak memory {} MiB",
        wanted.1,
        begun.elapsed(),
        peak >> 20
    );
    world.finish().await
}

#[tokio::test]
async fn readers_who_stall_cost_the_others_nothing_and_miss_nothing() -> Result<()> {
    let (world, run) = printer(MUCH).await?;
    let mut stalled = Vec::new();
    for _ in 0..STALLED {
        let reader = Reader::new(&world, &run);
        let stream = reader.open().await?;
        stalled.push((reader, stream));
    }
    let prompt = Reader::new(&world, &run);
    let stream = prompt.open().await?;
    let (wanted, prompt) = tokio::join!(whole(&world, &run), prompt.read(stream));
    let (wanted, (sha256, bytes, _)) = (wanted?, prompt?);
    ensure!((sha256, bytes) == wanted && bytes >= MUCH, "the one who kept up has something else");
    let peak = world.process("api", |process| Ok(process.peak_memory()))?;
    for (reader, stream) in stalled {
        let (sha256, bytes, _) = reader.read(stream).await?;
        ensure!((sha256, bytes) == wanted, "one who stalled has something else");
    }
    // What is on its way to one who stalls is bounded: all of it would be ten times this.
    ensure!(peak < 200 << 20, "the API took {} MiB", peak >> 20);
    world.finish().await
}
