//! One job: what is asked of the agent, and what it must print.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The agent's program (agent.py beside this file).
pub const PROGRAM: &str = include_str!("agent.py");

#[derive(Debug, Clone)]
pub struct Job {
    /// Names the job everywhere outside of Towpath.
    pub tag: String,
    pub lines: usize,
    /// Lines between two pauses, and how long one is, in seconds.
    pub every: usize,
    pub pause: f64,
    pub exit: i32,
    pub output: bool,
    /// A terminal instead of pipes.
    pub interactive: bool,
    pub file: Option<Vec<u8>>,
    pub steers: usize,
    /// Milliseconds after its start.
    pub cancel_ms: Option<u64>,
    pub delivered: bool,
    /// Its agent has a fence and is started again after a loss.
    pub fenced: bool,
}

impl Job {
    pub fn draw(rng: &mut fastrand::Rng, number: usize) -> Self {
        let flood = rng.u32(0..10) == 0;
        Self {
            tag: format!("job{number:05}"),
            lines: if flood { rng.usize(10_000..30_000) } else { rng.usize(1..600) },
            every: if flood { 2_000 } else { 50 },
            pause: 0.05 + f64::from(rng.u32(0..200)) / 1000.0,
            exit: if rng.u32(0..8) == 0 { 3 } else { 0 },
            output: rng.u32(0..3) == 0,
            interactive: rng.u32(0..5) == 0,
            file: (rng.u32(0..4) == 0).then(|| (0..rng.usize(1..300_000)).map(|_| rng.u8(..)).collect()),
            steers: if rng.u32(0..3) == 0 { rng.usize(1..5) } else { 0 },
            cancel_ms: (rng.u32(0..8) == 0).then(|| rng.u64(0..1500)),
            delivered: rng.u32(0..2) == 0,
            fenced: rng.u32(0..3) == 0,
        }
    }

    pub fn prompt(&self) -> String {
        let files: Vec<Value> = self.file.iter().map(|content| json!(["input.bin", hex::encode(Sha256::digest(content))])).collect();
        json!({
            "tag": self.tag, "lines": self.lines, "every": self.every, "pause": self.pause, "exit": self.exit, "output": self.output, "files": files,
        })
        .to_string()
    }

    /// The first `lines` lines that it prints, as they come out of a pipe or a terminal.
    pub fn printed(&self, lines: usize) -> Vec<u8> {
        let end = if self.interactive { "\r\n" } else { "\n" };
        let mut all = Vec::new();
        for n in 0..lines {
            let digest = hex::encode(Sha256::digest(format!("{} {n}", self.tag)));
            all.extend_from_slice(format!("{} {n:08} {digest}{end}", self.tag).as_bytes());
        }
        all
    }
}
