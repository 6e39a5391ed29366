//! As much HTTP as the readiness probes of SeaweedFS's own (unauthenticated, loopback) ports need.

use anyhow::{Context, Result, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const ANSWER_BYTES: u64 = 256 * 1024;

/// One request on a connection of its own: status and body.
pub(crate) async fn request(port: u16, method: &str, path: &str, body: &[u8]) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.with_context(|| format!("connect to 127.0.0.1:{port}"))?;
    let content = if body.is_empty() { "" } else { "Content-Type: application/octet-stream\r\n" };
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n{content}Content-Length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body).await?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES).read_to_end(&mut answer).await?;
    let text = String::from_utf8_lossy(&answer);
    let (head, body) = text.split_once("\r\n\r\n").with_context(|| format!("{method} {path}: no HTTP answer"))?;
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).context("no status in the HTTP answer")?;
    Ok((status, body.to_owned()))
}

/// The same, and any status but 2xx is an error.
pub(crate) async fn demand(port: u16, method: &str, path: &str, body: &[u8]) -> Result<()> {
    let (status, answer) = request(port, method, path, body).await?;
    ensure!((200..300).contains(&status), "{method} {path} answered {status}: {}", answer.trim());
    Ok(())
}
