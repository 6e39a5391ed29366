//! Following a run: its event stream, taken up again where it broke off, and the plain waiting for its end.

use std::time::{Duration, Instant};

use base64::{Engine, prelude::BASE64_STANDARD};
use eventsource_stream::{Event, Eventsource};
use futures::StreamExt;
use serde_json::{Value, json};
use towpath_schemas::{
    body::{OutputEvent, Run, RunState},
    frame::FrameKind,
    limit::RESULT_TAIL_BYTES,
};

use super::{
    api::Api,
    failure::Failure,
    print::{Printer, read},
    terminal::Filter,
};

/// How long a server may be away while we follow.
const AWAY: Duration = Duration::from_secs(60);
const FIRST_RETRY: Duration = Duration::from_millis(200);
const LAST_RETRY: Duration = Duration::from_secs(3);
const WAIT: &str = "30s";
/// The same while somebody looks on.
const LOOKED_AT: &str = "1s";

/// How output is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Show {
    /// Text and colours.
    Safe,
    /// Every byte as it was printed.
    Raw,
}

/// A run that was followed to its end.
pub struct Followed {
    pub ended: Value,
    /// The last of what it printed, without colours.
    printed: Printed,
}

/// Prints what the run prints until it has ended.
pub async fn follow(api: &Api, printer: &Printer, run: &str, show: Show) -> Result<Followed, Failure> {
    let mut follower = Follower {
        api,
        printer,
        run,
        last_event: None,
        progress: Progress::new(*printer),
        filter: printer.filter(),
        show,
        epoch: 0,
        printed: Printed::default(),
    };
    let ended = follower.interruptible().await?;
    Ok(Followed { ended, printed: follower.printed })
}

/// The end of the output, of which a result may have been made.
struct Printed {
    plain: Filter,
    tail: String,
}

impl Default for Printed {
    fn default() -> Self {
        Self { plain: Filter::new(false), tail: String::new() }
    }
}

impl Printed {
    fn add(&mut self, bytes: &[u8]) {
        self.tail.push_str(&self.plain.pass(bytes));
        if self.tail.len() > 4 * RESULT_TAIL_BYTES {
            let mut from = self.tail.len() - 2 * RESULT_TAIL_BYTES;
            while !self.tail.is_char_boundary(from) {
                from += 1;
            }
            self.tail.drain(..from);
        }
    }

    /// A person who has just seen this text needs no second sight of it.
    fn ends_with(&self, text: &str) -> bool {
        self.tail.trim_end().ends_with(text.trim())
    }
}

/// Waits until the run has ended, telling its steps; its last state.
pub async fn wait(api: &Api, printer: &Printer, run: &Run) -> Result<Value, Failure> {
    let mut progress = Progress::new(*printer);
    let mut patience = Patience::new();
    let since = Instant::now();
    loop {
        let patient = if printer.is_watched() { LOOKED_AT } else { WAIT };
        match api.get(&["v1", "runs", &run.id.to_string()], &[("wait", patient.to_owned())]).await {
            Ok(answer) => {
                patience = Patience::new();
                let run: Run = read(answer.clone())?;
                progress.show(&run);
                if run.state.ended() {
                    return Ok(answer);
                }
                printer.passing(&so_far(&run, since));
            }
            Err(failure) => patience.bear(failure).await?,
        }
    }
}

/// Prints the result of an ended run; a failure unless it succeeded.
pub fn conclude(printer: &Printer, ended: Value) -> Result<(), Failure> {
    tell_end(printer, ended, |_| false)
}

/// The same of a run that was followed: a result that was its last output is not printed again.
pub fn conclude_followed(printer: &Printer, followed: Followed) -> Result<(), Failure> {
    tell_end(printer, followed.ended, |result| followed.printed.ends_with(result))
}

fn tell_end(printer: &Printer, ended: Value, was_seen: impl Fn(&str) -> bool) -> Result<(), Failure> {
    if printer.json {
        printer.line(&json!({"event": "run", "data": ended}));
    }
    let run: Run = read(ended)?;
    if !printer.json {
        printer.note(&summary(&run));
        if let Some(result) = run.result.as_ref().filter(|result| !result.text.is_empty() && !was_seen(&result.text)) {
            let mut text = printer.filter().pass(result.text.as_bytes());
            if !text.ends_with('\n') {
                text.push('\n');
            }
            printer.out(&text);
            if result.truncated {
                printer.note("(the result was cut at 1 MiB)");
            }
        }
    }
    if run.state == RunState::Succeeded { Ok(()) } else { Err(Failure::Ended(run.state)) }
}

fn summary(run: &Run) -> String {
    let exit = run.exit.as_ref().map(|exit| match (exit.code, exit.signal) {
        (Some(code), _) => format!(", exit code {code}"),
        (None, Some(signal)) => format!(", ended by signal {signal}"),
        (None, None) => String::new(),
    });
    let why = run.message.as_ref().or(run.reason.as_ref()).map(|why| format!(": {why}"));
    format!("{} {}{}{}", run.id, run.state, exit.unwrap_or_default(), why.unwrap_or_default())
}

/// How far a run is, in one line.
fn so_far(run: &Run, since: Instant) -> String {
    format!("{}, {} s, {} bytes of output kept", run.state, since.elapsed().as_secs(), run.transcript.bytes)
}

struct Follower<'a> {
    api: &'a Api,
    printer: &'a Printer,
    run: &'a str,
    last_event: Option<String>,
    progress: Progress,
    filter: Filter,
    show: Show,
    /// Of the newest output.
    epoch: i32,
    printed: Printed,
}

impl Follower<'_> {
    /// Until the end, or until a person has seen enough: the run does not end with that.
    async fn interruptible(&mut self) -> Result<Value, Failure> {
        let (run, printer) = (self.run.to_owned(), *self.printer);
        tokio::select! {
            ended = self.until_ended() => ended,
            Ok(()) = tokio::signal::ctrl_c() => {
                printer.note(&format!("\nthe run goes on: towpath logs -f {run}, towpath cancel {run}"));
                Err(Failure::Interrupted)
            }
        }
    }

    async fn until_ended(&mut self) -> Result<Value, Failure> {
        let mut patience = Patience::new();
        loop {
            let before = self.last_event.clone();
            match self.one_connection().await {
                Ok(true) => return self.api.get(&["v1", "runs", self.run], &[]).await,
                Ok(false) => patience.bear(Failure::Unreachable("the event stream breaks off again and again".to_owned())).await?,
                Err(failure) => patience.bear(failure).await?,
            }
            if self.last_event != before {
                patience = Patience::new();
            }
        }
    }

    /// One connection's events; whether the end was among them.
    async fn one_connection(&mut self) -> Result<bool, Failure> {
        let response = self.api.stream(&["v1", "runs", self.run, "events"], &[], self.last_event.as_deref()).await?;
        let mut events = response.bytes_stream().eventsource();
        while let Some(Ok(event)) = events.next().await {
            let ended = event.event == "end";
            self.event(&event).await?;
            if !event.id.is_empty() {
                self.last_event = Some(event.id);
            }
            if ended {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn event(&mut self, event: &Event) -> Result<(), Failure> {
        let data: Value = serde_json::from_str(&event.data).unwrap_or_else(|_| json!(event.data));
        if self.printer.json {
            self.printer.line(&json!({"event": event.event, "id": event.id, "data": data}));
            return Ok(());
        }
        match event.event.as_str() {
            "output" => self.output(data).await,
            "state" => self.look().await,
            "steer" => {
                self.steer(&data);
                Ok(())
            }
            "gap" => {
                self.printer.note("(some of the transcript is missing here)");
                Ok(())
            }
            // The end's own words come with the run; kinds of a newer release are not ours to show.
            _ => Ok(()),
        }
    }

    async fn output(&mut self, data: Value) -> Result<(), Failure> {
        let output: OutputEvent = read(data)?;
        if self.epoch != output.epoch {
            // The steps of the start are told before what they led to.
            self.look().await?;
            self.epoch = output.epoch;
        }
        let bytes =
            BASE64_STANDARD.decode(&output.b64).map_err(|error| Failure::Unreachable(format!("an output event is damaged: {error}")))?;
        if output.stream != FrameKind::Stderr.name() {
            self.printed.add(&bytes);
        }
        match self.show {
            Show::Raw => self.printer.bytes(&bytes),
            Show::Safe => {
                let text = self.filter.pass(&bytes);
                self.printer.out(&text);
            }
        }
        Ok(())
    }

    /// Tells how far the run is.
    async fn look(&mut self) -> Result<(), Failure> {
        let run: Run = read(self.api.get(&["v1", "runs", self.run], &[]).await?)?;
        self.progress.show(&run);
        Ok(())
    }

    /// A row of the history: what became of a message. Its way to the sandbox is not told step by step.
    fn steer(&self, data: &Value) {
        let word = |key: &str| data["detail"][key].as_str().unwrap_or_default();
        let told = match word("state") {
            "queued" | "sent" | "written" => return,
            "read" => "was read",
            "expired" => "was not taken",
            "unknown" => "may or may not have been taken",
            other => other,
        };
        self.printer.note(&format!("message {} {told}", word("steer")));
    }
}

/// Tells each step and state once, on stderr.
struct Progress {
    printer: Printer,
    steps: usize,
    told: Option<String>,
}

impl Progress {
    fn new(printer: Printer) -> Self {
        Self { printer, steps: 0, told: None }
    }

    fn show(&mut self, run: &Run) {
        if self.printer.json {
            return;
        }
        let waits = run.waiting_for.as_ref().filter(|_| !run.state.ended()).map(|what| format!(", waits for {what}"));
        let now = format!("{}{}", run.state, waits.unwrap_or_default());
        // A restart begins the steps anew.
        let from = if self.steps <= run.startup.len() { self.steps } else { 0 };
        for step in &run.startup[from..] {
            let after_s = (step.at - run.created_at).as_seconds_f64().max(0.0);
            let detail = step.detail.as_ref().map(|detail| format!(" ({detail})")).unwrap_or_default();
            self.printer.note(&format!("· {after_s:.2} s  {}{detail}", step.step));
        }
        self.steps = run.startup.len();
        if self.told.as_ref() != Some(&now) && !run.state.ended() {
            self.printer.note(&now);
        }
        self.told = Some(now);
    }
}

/// How long an unreachable server is borne, and the growing waits between tries.
pub struct Patience {
    since: Instant,
    wait: Duration,
}

impl Patience {
    pub fn new() -> Self {
        Self { since: Instant::now(), wait: FIRST_RETRY }
    }

    /// Waits before the next try, or gives the failure back: refusals at once unless they are temporary, the rest after [`AWAY`].
    pub async fn bear(&mut self, failure: Failure) -> Result<(), Failure> {
        let temporary = match &failure {
            Failure::Unreachable(_) => true,
            Failure::Refused(problem) => problem.retryable && problem.status >= 500,
            Failure::Use(_) | Failure::Ended(_) | Failure::Interrupted | Failure::Unwell => false,
        };
        if !temporary || self.since.elapsed() > AWAY {
            return Err(failure);
        }
        tokio::time::sleep(self.wait).await;
        self.wait = (self.wait * 2).min(LAST_RETRY);
        Ok(())
    }
}
