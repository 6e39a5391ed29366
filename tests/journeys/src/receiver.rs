//! A webhook receiver that answers as it is told and remembers what came.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Result;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

/// One request as it came.
#[derive(Debug, Clone)]
pub struct Received {
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
}

pub struct Receiver {
    pub url: String,
    received: Arc<Mutex<Vec<Received>>>,
    _serving: JoinSet<()>,
}

impl Receiver {
    /// Answers the nth request with the nth of `answers` (whole HTTP heads such as `410 Gone`), the last one for ever.
    pub async fn start(answers: &[&str]) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/hook", listener.local_addr()?);
        let received: Arc<Mutex<Vec<Received>>> = Arc::default();
        let (answers, taken) = (answers.iter().map(|answer| (*answer).to_owned()).collect::<Vec<_>>(), received.clone());
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                // A request that breaks off is the sender's to send again.
                let _ = tokio::time::timeout(Duration::from_secs(20), serve(stream, &answers, &taken)).await;
            }
        });
        Ok(Self { url, received, _serving: serving })
    }

    pub fn received(&self) -> Vec<Received> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn serve(mut stream: TcpStream, answers: &[String], received: &Mutex<Vec<Received>>) -> Result<()> {
    let mut bytes = Vec::new();
    let head_end = loop {
        let mut piece = [0_u8; 8192];
        let read = stream.read(&mut piece).await?;
        anyhow::ensure!(read > 0, "cut short");
        bytes.extend_from_slice(&piece[..read]);
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
    };
    let head = String::from_utf8_lossy(&bytes[..head_end]).into_owned();
    let headers: HashMap<String, String> = head
        .lines()
        .skip(1)
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.trim().to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let length: usize = headers.get("content-length").and_then(|value| value.parse().ok()).unwrap_or(0);
    let mut body = bytes[head_end + 4..].to_vec();
    while body.len() < length {
        let mut piece = vec![0_u8; length - body.len()];
        let read = stream.read(&mut piece).await?;
        anyhow::ensure!(read > 0, "cut short");
        body.extend_from_slice(&piece[..read]);
    }
    let index = {
        let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
        received.push(Received { headers, body });
        received.len() - 1
    };
    let answer = answers.get(index).or(answers.last()).map_or("200 OK", String::as_str);
    if answer == "silence" {
        return Ok(());
    }
    stream.write_all(format!("HTTP/1.1 {answer}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").as_bytes()).await?;
    Ok(())
}
