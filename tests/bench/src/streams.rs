//! Many event streams of one run that prints: how late they tell it, what they cost the API, and whether those who do not read hold up the others.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufRead, AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpSocket, TcpStream},
    task::JoinSet,
};
use towpath_schemas::{body::OutputEvent, id::RunId};

use crate::{
    ground::{Ground, TOKEN},
    life,
    queue::mebibytes,
};

/// Event streams of the one run.
const STREAMS: usize = 1000;
/// Those among them that stop reading, where some do. The figures of lag are of the others, in either case.
const STALLED: usize = 100;
/// Frames of output, and the time between two of them: 30 s. A supervisor cuts frames as often.
const FRAMES: usize = 600;
const BETWEEN: Duration = Duration::from_millis(50);
/// Numbered lines in a frame, and bytes of one: 128 KiB/s. With less in all nobody would stall: the kernel alone would hold it for those who do not read.
const LINES: usize = 728;
const LINE_BYTES: usize = 9;
/// Receive buffer of a reader that is going to stall.
const SMALL_BYTES: u32 = 8 * 1024;
/// Bytes that a reader takes at a time.
const READ_BYTES: usize = 32 * 1024;
/// Streams that are opened at a time.
const OPENING: usize = 64;
/// How long the run may take to its end, and its readers after that.
const SOON: Duration = Duration::from_secs(120);

pub async fn measure(ground: &Ground) -> Result<Value> {
    let _worker = ground.spawn(&["worker"])?;
    let mut all = serde_json::Map::new();
    let mut peaks = Vec::new();
    println!("{:>8} {:>8} {:>30} {:>9} {:>9}", "streams", "stalled", "lag p50 / p99 / max ms", "api MiB", "KiB each");
    for (name, stalled) in [("reading", 0), ("stalled", STALLED)] {
        let figures = case(ground, stalled).await.with_context(|| format!("with {stalled} of {STREAMS} streams stalled"))?;
        let (p50, p99, max) = (life::at(&figures.lags, 0.5), life::at(&figures.lags, 0.99), life::at(&figures.lags, 1.0));
        let kib = (figures.peak_mib - figures.before_mib) * 1024.0 / STREAMS as f64;
        let lag = format!("{p50:.1} / {p99:.1} / {max:.1}");
        println!("{STREAMS:>8} {stalled:>8} {lag:>30} {:>9.0} {kib:>9.0}", figures.peak_mib);
        peaks.push(figures.peak_mib);
        let figures = json!({ "streams": STREAMS, "stalled": stalled, "lag_p50_ms": p50, "lag_p99_ms": p99, "lag_max_ms": max,
            "api_before_mib": figures.before_mib, "api_mib": figures.peak_mib, "kib_each": kib });
        all.insert(name.to_owned(), figures);
    }
    let more = (peaks[1] - peaks[0]) * 1024.0 / STALLED as f64;
    println!(
        "lag of the same {} streams, from the supervisor's send to the reader; a stalled one costs {more:.0} KiB more",
        STREAMS - STALLED
    );
    println!("every stream told every byte in order, the stalled ones once they were read on");
    all.insert("kib_more_each_stalled".to_owned(), json!(more));
    Ok(json!({ "streams": all }))
}

struct Figures {
    /// Milliseconds, sorted.
    lags: Vec<f64>,
    /// The API's peak before there were streams, and in all.
    before_mib: f64,
    peak_mib: f64,
}

/// One run, from its start until every reader has all of it, on an API of its own.
async fn case(ground: &Ground, stalled: usize) -> Result<Figures> {
    // The case before may still have its place.
    ground.pool(2).await?;
    let api = ground.api().await?;
    let (run, supervisor) = life::printer(ground).await?;
    let printed: Arc<Vec<Printed>> = Arc::new((0..FRAMES).map(Printed::new).collect::<Result<_>>()?);
    let told: usize = printed.iter().map(|frame| frame.told.len()).sum();
    ensure!(told > kernel_bytes()?, "nobody would stall: the kernel alone may hold all that a stream tells ({told} bytes)");
    let before_mib = mebibytes(&api);
    let mut readers: Vec<Reader<Socket>> = stream::iter(0..STREAMS)
        .map(|number| Reader::open(ground, run, printed.clone(), number < stalled))
        .buffered(OPENING)
        .try_collect()
        .await?;
    let others = readers.split_off(STALLED);
    let (waiting, reading) = if stalled > 0 { (readers, Vec::new()) } else { (Vec::new(), readers) };
    let (others, reading) = (read_all(others), read_all(reading));
    let run = supervisor.print(&printed, BETWEEN);
    tokio::time::timeout(SOON, run).await.context("the run did not come to its end")??;
    let mut lags = had_all(others).await?;
    had_all(reading).await?;
    had_all(read_all(waiting)).await.context("readers that had stalled")?;
    lags.sort_by(f64::total_cmp);
    Ok(Figures { lags, before_mib, peak_mib: mebibytes(&api) })
}

/// What the kernel may hold for one connection whose reader does not read (tcp(7), tcp_wmem).
fn kernel_bytes() -> Result<usize> {
    let sizes = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_wmem")?;
    Ok(sizes.split_whitespace().next_back().context("tcp_wmem is empty")?.parse()?)
}

type Reading = JoinSet<Result<Vec<f64>>>;

fn read_all(readers: Vec<Reader<Socket>>) -> Reading {
    readers.into_iter().map(Reader::read).collect()
}

/// The lags of all that was read, once all of it was.
async fn had_all(mut reading: Reading) -> Result<Vec<f64>> {
    let all = async {
        let mut lags = Vec::new();
        while let Some(read) = reading.join_next().await {
            lags.extend(read??);
        }
        anyhow::Ok(lags)
    };
    tokio::time::timeout(SOON, all).await.context("a reader did not come to the stream's end")?
}

/// A frame of output.
pub struct Printed {
    pub payload: Vec<u8>,
    /// The line by which a stream tells it.
    told: Vec<u8>,
    /// When it was sent.
    pub at: OnceLock<Instant>,
}

impl Printed {
    /// The frame after `before` others: lines that are numbered through the whole run, so that every byte has its place.
    fn new(before: usize) -> Result<Self> {
        let first = before * LINES;
        let payload: String = (first..first + LINES).map(|number| format!("{number:0width$}\n", width = LINE_BYTES - 1)).collect();
        let event = OutputEvent { epoch: 1, seq: before as u64 + 1, stream: "stdout".to_owned(), b64: base64(payload.as_bytes()) };
        let told = format!("data: {}\n", serde_json::to_string(&event)?).into_bytes();
        Ok(Self { payload: payload.into_bytes(), told, at: OnceLock::new() })
    }
}

/// Of whole groups of three bytes only.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let groups = bytes.chunks_exact(3).map(|group| u32::from_be_bytes([0, group[0], group[1], group[2]]));
    groups.flat_map(|group| [18, 12, 6, 0].map(|shift| char::from(DIGITS[(group >> shift) as usize % 64]))).collect()
}

type Socket = BufReader<TcpStream>;

/// One event stream. It compares what it is told with what was printed and decodes nothing, for it shares the cores with what is measured.
struct Reader<Stream> {
    stream: Stream,
    line: Vec<u8>,
    printed: Arc<Vec<Printed>>,
}

impl Reader<Socket> {
    /// Reads up to the first event.
    async fn open(ground: &Ground, run: RunId, printed: Arc<Vec<Printed>>, stalls: bool) -> Result<Self> {
        let socket = TcpSocket::new_v4()?;
        if stalls {
            socket.set_recv_buffer_size(SMALL_BYTES)?;
        }
        let mut stream = socket.connect(ground.listen.parse::<SocketAddr>()?).await?;
        let request = format!("GET /v1/runs/{run}/events HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {TOKEN}\r\n\r\n", ground.listen);
        stream.write_all(request.as_bytes()).await?;
        let mut reader = Self { stream: BufReader::with_capacity(READ_BYTES, stream), line: Vec::new(), printed };
        let opening = async {
            let status = reader.line().await?;
            ensure!(status.starts_with(b"HTTP/1.1 200 "), "GET events: {}", String::from_utf8_lossy(status).trim());
            while !reader.line().await?.starts_with(b"data: ") {}
            Ok(())
        };
        tokio::time::timeout(SOON, opening).await.context("no first event")??;
        Ok(reader)
    }
}

impl<Stream: AsyncBufRead + Unpin> Reader<Stream> {
    /// The next line, with its end. The API sends an event as one chunk of its answer, so a line is never cut; what frames the chunks are lines of their own.
    async fn line(&mut self) -> Result<&[u8]> {
        self.line.clear();
        ensure!(self.stream.read_until(b'\n', &mut self.line).await? > 0, "the API hung up");
        Ok(&self.line)
    }

    /// Reads to the end of the stream; how late each frame was, in milliseconds. An error when anything is missing, other than it was printed, or in another order.
    async fn read(mut self) -> Result<Vec<f64>> {
        let printed = self.printed.clone();
        let mut lags = Vec::with_capacity(printed.len());
        loop {
            match self.line().await? {
                b"event: output\n" => {}
                b"event: gap\n" => bail!("a stream told of a gap after {} of {} frames", lags.len(), printed.len()),
                b"event: end\n" => break,
                _ => continue,
            }
            let told = loop {
                let line = self.line().await?;
                if line.starts_with(b"data: ") {
                    break line;
                }
            };
            let frame = printed.get(lags.len()).filter(|frame| frame.told == told);
            let at = frame.and_then(|frame| frame.at.get());
            let at = at.with_context(|| format!("a stream told something else than frame {} of {}", lags.len() + 1, printed.len()))?;
            lags.push(at.elapsed().as_secs_f64() * 1000.0);
        }
        ensure!(lags.len() == printed.len(), "a stream ended after {} of {} frames", lags.len(), printed.len());
        Ok(lags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_told_as_its_bytes_in_base64() -> Result<()> {
        let printed = Printed::new(1)?;
        assert_eq!(printed.payload.len(), LINES * LINE_BYTES);
        assert!(printed.payload.starts_with(b"00000728\n00000729\n"));
        assert!(printed.told.starts_with(br#"data: {"epoch":1,"seq":2,"stream":"stdout","b64":"MDAwMDA3MjgKMDAwMDA3Mjk"#));
        Ok(())
    }

    /// Reads a stream that tells these frames of three.
    async fn read(frames: &[usize]) -> Result<Vec<f64>> {
        let printed = (0..3).map(Printed::new).collect::<Result<Vec<_>>>()?;
        let mut stream = Vec::new();
        for frame in frames {
            printed[*frame].at.get_or_init(Instant::now);
            stream.extend_from_slice(b"2a\r\nevent: output\nid: place\n");
            stream.extend_from_slice(&printed[*frame].told);
            stream.extend_from_slice(b"\n\r\n");
        }
        stream.extend_from_slice(b"2a\r\nevent: end\nid: place\ndata: {}\n\n\r\n");
        Reader { stream: stream.as_slice(), line: Vec::new(), printed: Arc::new(printed) }.read().await
    }

    #[tokio::test]
    async fn a_stream_that_loses_repeats_or_swaps_frames_is_an_error() -> Result<()> {
        assert_eq!(read(&[0, 1, 2]).await?.len(), 3);
        for wrong in [&[0, 1][..], &[1, 2], &[0, 2, 1], &[0, 1, 1, 2], &[0, 1, 2, 2]] {
            assert!(read(wrong).await.is_err(), "{wrong:?}");
        }
        Ok(())
    }
}
