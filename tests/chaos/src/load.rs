//! The load: clients that ask again until they are answered, and note what they were promised.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result};
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::Instant,
};

use crate::job::Job;

/// Clients at a time.
const CLIENTS: usize = 12;
const AGAIN: Duration = Duration::from_millis(200);
/// Of so many posts one has its answer lost.
const LOSE_ONE_OF: usize = 8;

/// What a client was promised.
#[derive(Debug, Clone)]
pub struct Promise {
    pub job: Job,
    pub run: String,
    pub session: String,
    /// Accepted steers: id and text, in order.
    pub steers: Vec<(String, String)>,
    pub canceled: bool,
}

/// A post that came to the receiver.
#[derive(Debug, Clone)]
pub struct Post {
    pub id: String,
    pub run: String,
    pub answered: bool,
}

#[derive(Clone)]
pub struct Load {
    pub promises: Arc<Mutex<Vec<Promise>>>,
    pub posts: Arc<Mutex<Vec<Post>>>,
    stop: Arc<AtomicBool>,
    client: Client,
    urls: [String; 2],
    token: String,
    hook: String,
    next: Arc<AtomicUsize>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Load {
    /// Starts the receiver and the clients; they end when `stop` was called and what they began is accepted.
    pub async fn start(urls: &[String; 2], token: &str, seed: u64) -> Result<(Self, Clients)> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let hook = format!("http://{}/hook", listener.local_addr()?);
        let load = Self {
            promises: Arc::default(),
            posts: Arc::default(),
            stop: Arc::default(),
            client: Client::builder().no_proxy().timeout(Duration::from_secs(10)).build()?,
            urls: urls.clone(),
            token: token.to_owned(),
            hook,
            next: Arc::default(),
        };
        let mut receiver = JoinSet::new();
        receiver.spawn(take_posts(listener, load.posts.clone()));
        let mut clients = JoinSet::new();
        for number in 0..CLIENTS {
            let (load, rng) = (load.clone(), fastrand::Rng::with_seed(seed.wrapping_mul(1000).wrapping_add(number as u64)));
            clients.spawn(async move { load.client(rng).await });
        }
        Ok((load, Clients { clients, _receiver: receiver }))
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    async fn client(&self, mut rng: fastrand::Rng) -> Result<()> {
        while !self.stop.load(Ordering::Relaxed) {
            let job = Job::draw(&mut rng, self.next.fetch_add(1, Ordering::Relaxed));
            self.one(job).await?;
            tokio::time::sleep(Duration::from_millis(rng.u64(0..400))).await;
        }
        Ok(())
    }

    async fn one(&self, job: Job) -> Result<()> {
        let mut files = Vec::new();
        if let Some(content) = &job.file {
            let file = self.insist(&format!("/v1/files?name=input.bin&tag={}", job.tag), Payload::Bytes(content.clone()), None).await?;
            files.push(file.1["id"].clone());
        }
        let mut body = json!({ "agent": if job.fenced { "fenced" } else { "chaos" }, "prompt": job.prompt(), "files": files, "labels": { "tag": job.tag } });
        if job.interactive {
            body["mode"] = "interactive".into();
        }
        if job.delivered {
            body["deliver"] = json!([{ "webhook": { "url": self.hook } }]);
        }
        let (status, run) = self.insist("/v1/runs", Payload::Json(body), Some(&job.tag)).await?;
        anyhow::ensure!(status.is_success(), "{} was refused: {run}", job.tag);
        let word = |key: &str| run[key].as_str().map(str::to_owned).context("answer");
        let (run, session) = (word("id")?, word("session")?);
        let place = {
            let mut promises = lock(&self.promises);
            promises.push(Promise { job: job.clone(), run: run.clone(), session, steers: Vec::new(), canceled: false });
            promises.len() - 1
        };
        for number in 0..job.steers {
            let message = format!("{} steer {number}", job.tag);
            let (status, steer) = self
                .insist(&format!("/v1/runs/{run}/steers"), Payload::Json(json!({ "message": message })), Some(&message.replace(' ', "-")))
                .await?;
            if status.is_success() {
                lock(&self.promises)[place].steers.push((steer["id"].as_str().context("steer")?.to_owned(), message));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        if let Some(after) = job.cancel_ms {
            tokio::time::sleep(Duration::from_millis(after)).await;
            self.insist(&format!("/v1/runs/{run}/cancel"), Payload::Json(json!({})), None).await?;
            lock(&self.promises)[place].canceled = true;
        }
        // Until it has ended, so that only so many are open at a time; in the storm nobody waits for ever.
        let patience = Instant::now() + Duration::from_secs(20);
        while Instant::now() < patience {
            let url = format!("{}/v1/runs/{run}?wait=3s", self.urls[place % 2]);
            let answer = self.client.get(url).bearer_auth(&self.token).send().await;
            let ended = match answer {
                Ok(answer) => answer.json::<Value>().await.is_ok_and(|run| run["ended_at"].is_string()),
                Err(_) => false,
            };
            if ended {
                break;
            }
            tokio::time::sleep(AGAIN).await;
        }
        Ok(())
    }

    /// Asks one API or the other until it is answered for good.
    async fn insist(&self, path: &str, payload: Payload, key: Option<&str>) -> Result<(StatusCode, Value)> {
        let mut turn = self.next.load(Ordering::Relaxed);
        let patience = Instant::now() + Duration::from_secs(120);
        loop {
            turn += 1;
            let mut request = self.client.post(format!("{}{path}", self.urls[turn % 2])).bearer_auth(&self.token);
            if let Some(key) = key {
                request = request.header("Idempotency-Key", key);
            }
            request = match &payload {
                Payload::Json(body) => request.json(body),
                Payload::Bytes(bytes) => request.body(bytes.clone()),
            };
            let told = match request.send().await {
                Ok(answer) => {
                    let status = answer.status();
                    let body = answer.json::<Value>().await;
                    match body {
                        Ok(body) if status.is_success() || body["retryable"] == false => return Ok((status, body)),
                        Ok(body) => body.to_string(),
                        Err(error) => error.to_string(),
                    }
                }
                Err(error) => error.to_string(),
            };
            anyhow::ensure!(Instant::now() < patience, "{path} was not answered for 120 s: {told}");
            tokio::time::sleep(AGAIN).await;
        }
    }
}

/// The clients at work, and the receiver of deliveries.
pub struct Clients {
    pub clients: JoinSet<Result<()>>,
    _receiver: JoinSet<()>,
}

async fn take_posts(listener: TcpListener, posts: Arc<Mutex<Vec<Post>>>) {
    let mut open = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        while open.try_join_next().is_some() {}
        let posts = posts.clone();
        // One that breaks off is the sender's to send again.
        open.spawn(
            async move { tokio::time::timeout(Duration::from_secs(10), receive(stream, &posts)).await.is_ok_and(|taken| taken.is_ok()) },
        );
    }
}

enum Payload {
    Json(Value),
    Bytes(Vec<u8>),
}

/// Takes one post; some have their answer lost.
async fn receive(mut stream: TcpStream, posts: &Mutex<Vec<Post>>) -> Result<()> {
    let mut bytes = Vec::new();
    let (head, body) = loop {
        let read = stream.read_buf(&mut bytes).await?;
        anyhow::ensure!(read > 0, "cut short");
        let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
        let header = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned());
        let length: usize = header("content-length:").context("length")?.parse()?;
        if bytes.len() >= end + 4 + length {
            break (header("webhook-id:").context("webhook-id")?, bytes[end + 4..end + 4 + length].to_vec());
        }
    };
    let body: Value = serde_json::from_slice(&body)?;
    let run = body["data"]["run"]["id"].as_str().context("run")?.to_owned();
    let answered = {
        let mut posts = lock(posts);
        // Only the first of a delivery: the wait after a second one would outlast everything here.
        let first = !posts.iter().any(|post: &Post| post.id == head);
        let answered = !(first && posts.len() % LOSE_ONE_OF == LOSE_ONE_OF - 1);
        posts.push(Post { id: head, run, answered });
        answered
    };
    if answered {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await?;
    }
    Ok(())
}

/// Posts by run.
pub fn by_run(posts: &[Post]) -> HashMap<&str, Vec<&Post>> {
    let mut all: HashMap<&str, Vec<&Post>> = HashMap::new();
    for post in posts {
        all.entry(post.run.as_str()).or_default().push(post);
    }
    all
}
