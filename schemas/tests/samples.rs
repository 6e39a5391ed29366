//! Golden samples of everything that one process leaves for another, `schemas/samples/v<version>/…`, and what a reader makes of a newer writer.
//!
//! Today's types read every sample, write those of today's version exactly as they are stored, and pass over fields that they do not know. `TOWPATH_BLESS=1` writes samples that
//! are missing and never changes one. Whoever gives a message another form keeps the old sample under `<name>.<what it lacks>.json`: it must read for ever.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    fs,
    path::{Path, PathBuf},
};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use towpath_schemas::{
    agent::{
        AgentDefinition, Backend, Contract, Isolation, Limits, Mode, OnLost, Sandbox, SpoolFull, Steering, SteeringFormat, Terminal,
        Workspace,
    },
    body::{Run, RunResult, RunState, Transcript},
    command::Command,
    event::Kind,
    frame::{self, EndRecord, Frame, FrameKind, GapRecord, ScreenRecord, Size},
    guest::{
        self, Exit, FromGuest, Hello, Identity, InputFile, Phase, SandboxSpec, StartOrder, SteerEnd, SteerOrder, SteerState, Step, ToGuest,
        ViewerHeard, ViewerSays, Walls, binary,
    },
    id::{DeliveryId, FileId, InboundId, PrincipalId, RunId, SessionId, SteerId, TenantId},
    key, subject,
    viewer::{FromViewer, Said, ToViewer},
};
use uuid::Uuid;

/// The version of everything that carries none of its own.
const FORMAT: u32 = 1;
/// A number that a reader with floating-point numbers would spoil.
const LARGE: u64 = (1 << 53) + 1;

// ---- the words of the samples --------------------------------------------------------------------------------------------------

fn id<T: From<Uuid>>(last: u8) -> T {
    T::from(Uuid::from_u128(0x0193_a5c0_b1d2_7e4f_8a6b_1c2d_3e4f_5a00 | u128::from(last)))
}

fn tenant() -> TenantId {
    id(1)
}

fn run() -> RunId {
    id(2)
}

fn session() -> SessionId {
    id(3)
}

fn steer() -> SteerId {
    id(4)
}

fn file() -> FileId {
    id(5)
}

fn at(second: u32) -> DateTime<Utc> {
    format!("2026-11-30T09:08:{second:02}.123456Z").parse().expect("time")
}

fn text(words: &str) -> String {
    words.to_owned()
}

const SIZE: Size = Size { cols: 132, rows: 43 };

fn exit() -> Exit {
    Exit { code: None, signal: Some(9), oom: Some(true) }
}

fn identity() -> Identity {
    Identity {
        boot_id: text("5a5a5a5a-1111-2222-3333-444444444444"),
        supervisor_pid: 4321,
        supervisor_start: LARGE,
        init_pid: Some(4330),
        init_start: Some(LARGE + 2),
        pid_namespace: Some(4_026_532_555),
        cgroup: Some(text("/towpath/run.1")),
    }
}

fn input_file() -> InputFile {
    InputFile { file: file(), name: text("Übersicht.pdf"), media_type: text("application/pdf"), size: LARGE }
}

fn walls() -> Walls {
    Walls {
        isolation: Isolation::Bubblewrap,
        egress: true,
        memory_bytes: Some(1 << 30),
        pids: Some(100),
        disk_bytes: Some(LARGE),
        uid: Some(100_001),
    }
}

fn sandbox() -> Sandbox {
    Sandbox {
        backend: Backend::Process,
        isolation: Isolation::Bubblewrap,
        egress: true,
        memory_bytes: Some(1 << 30),
        pids: Some(100),
        disk_bytes: Some(LARGE),
    }
}

fn end_record() -> EndRecord {
    let steers = [SteerState::Read, SteerState::Unknown].into_iter().map(|state| SteerEnd { steer: steer(), state }).collect();
    EndRecord { exit: exit(), bytes: LARGE, steers }
}

fn gap_record() -> GapRecord {
    GapRecord { reason: text("the sandbox was lost before its end record was kept"), bytes: Some(LARGE) }
}

fn screen_record() -> ScreenRecord {
    ScreenRecord { size: SIZE, dump: text("\u{1b}[2J\u{1b}[1;1Hhello €") }
}

/// Words that stand in messages and rows.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Words<T>(Vec<T>);

type Named<T> = Vec<(&'static str, T)>;

/// All variants of an enum, each with its sample, named by its word on the wire. A variant that is not in the list does not compile.
macro_rules! samples {
    ($(#[$doc:meta])* fn $name:ident() -> $of:ty $(, but $unknown:path)? { $($pattern:pat => $word:literal: $value:expr,)* }) => {
        $(#[$doc])*
        fn $name() -> Named<$of> {
            fn word(of: &$of) -> &'static str {
                match of { $($pattern => $word,)* $($unknown => "a kind without a sample",)? }
            }
            let samples = vec![$(($word, $value)),*];
            for (name, sample) in &samples {
                assert_eq!(word(sample), *name, "the sample is of another kind");
            }
            samples
        }
    };
}

/// The same for words.
macro_rules! words {
    ($name:literal, $of:ident { $($variant:ident),* $(,)? }) => {{
        let whole = |word: &$of| match word { $($of::$variant => ()),* };
        let words = vec![$($of::$variant),*];
        words.iter().for_each(whole);
        vec![($name, Words(words))]
    }};
}

// ---- all samples ---------------------------------------------------------------------------------------------------------------

samples! {
    fn commands() -> Command, but Command::Unknown {
        Command::Admit { .. } => "admit": Command::Admit { pool: text("process-host.example") },
        Command::Host { .. } => "host": Command::Host { host: text("host.example"), run: run() },
        Command::Seal { .. } => "seal": Command::Seal { tenant: tenant(), run: run(), epoch: 2 },
        Command::Observed { .. } => "observed": Command::Observed { tenant: tenant(), run: run(), epoch: 2 },
        Command::Sealed { .. } => "sealed": Command::Sealed { tenant: tenant(), run: run(), epoch: 2 },
        Command::Deliver { .. } => "deliver": Command::Deliver { tenant: tenant(), delivery: id::<DeliveryId>(6) },
        Command::Intake { .. } => "intake": Command::Intake { tenant: tenant(), inbound: id::<InboundId>(7) },
    }
}

fn command_subject(command: &Command) -> String {
    match command {
        Command::Admit { pool } => subject::admit(pool),
        Command::Host { host, run } => subject::host(host, *run),
        Command::Seal { tenant, run, epoch } => subject::seal(*tenant, *run, *epoch),
        Command::Observed { tenant, run, epoch } => subject::observed(*tenant, *run, *epoch),
        Command::Sealed { tenant, run, epoch } => subject::sealed(*tenant, *run, *epoch),
        Command::Deliver { tenant, delivery } => subject::deliver(*tenant, *delivery),
        Command::Intake { tenant, inbound } => subject::intake(*tenant, *inbound),
        Command::Unknown => String::new(),
    }
}

samples! {
    fn events() -> Kind, but Kind::Unknown {
        Kind::Moved { .. } => "moved": Kind::Moved { revision: 17 },
        Kind::Sealed { .. } => "sealed": Kind::Sealed { epoch: 2, seq: LARGE as i64 },
        Kind::Closed { .. } => "closed": Kind::Closed { epoch: 2 },
        Kind::Hole { .. } => "hole": Kind::Hole { epoch: 2, seq: 33 },
    }
}

samples! {
    fn from_guest() -> FromGuest, but FromGuest::Unknown {
        FromGuest::Hello(_) => "hello": FromGuest::Hello(Hello {
            protocol: guest::PROTOCOL,
            run: run(),
            epoch: 2,
            incarnation: "1a".repeat(16),
            token: Some(text("sbx_token")),
            key: "2b".repeat(32),
            phase: Phase::Started,
            identity: identity(),
        }),
        FromGuest::Step { .. } => "step": FromGuest::Step { step: text("inputs"), detail: Some(text("2 files")) },
        FromGuest::Started => "started": FromGuest::Started,
        FromGuest::Refused { .. } => "refused": FromGuest::Refused { code: text("command_not_found"), message: text("there is no /bin/nothing") },
        FromGuest::Steer { .. } => "steer": FromGuest::Steer { steer: steer(), state: SteerState::Written },
        FromGuest::Ended { .. } => "ended": FromGuest::Ended { exit: exit(), reason: Some(text(guest::FENCE_RAN_OUT)) },
        FromGuest::Result { .. } => "result": FromGuest::Result { text: text("42 €"), truncated: true },
        FromGuest::ReadFile { .. } => "read_file": FromGuest::ReadFile { request: 7, file: file(), offset: LARGE, length: 262_144 },
        FromGuest::Output { .. } => "output": FromGuest::Output { upload: 3, name: text("charts/a.png"), size: LARGE, sha256: "3c".repeat(32) },
        FromGuest::OutputSkipped { .. } => "output_skipped":
            FromGuest::OutputSkipped { upload: 4, name: text("huge.bin"), size: LARGE, reason: text("too_large") },
        FromGuest::Viewer { .. } => "viewer": FromGuest::Viewer { viewer: text("v1"), heard: ViewerHeard::Typed { number: 9 } },
        FromGuest::Lease { .. } => "lease": FromGuest::Lease { number: 12 },
        FromGuest::Done => "done": FromGuest::Done,
    }
}

samples! {
    fn to_guest() -> ToGuest, but ToGuest::Unknown {
        ToGuest::Welcome { .. } => "welcome": ToGuest::Welcome { sealed: LARGE },
        ToGuest::Start(_) => "start": ToGuest::Start(Box::new(StartOrder {
            run: run(),
            session: session(),
            epoch: 2,
            agent: text("worker"),
            mode: text("one_shot"),
            command: vec![text("/usr/bin/python3"), text("-c"), text("print('€')")],
            env: BTreeMap::from([(text("LANG"), text("C.UTF-8"))]),
            prompt: text("do it"),
            instructions: text("be brief"),
            files: vec![input_file()],
            restore: vec![InputFile { name: text("charts/a.png"), media_type: text("image/png"), ..input_file() }],
            terminal: Terminal::Pty,
            steering: SteeringFormat::Json,
            contract: Contract::Towpath,
            output_bytes: 26_214_400,
            grace_s: 5,
            idle_s: Some(600),
            fence_s: Some(120),
        })),
        ToGuest::Fenced => "fenced": ToGuest::Fenced,
        ToGuest::Later { .. } => "later": ToGuest::Later { detail: text("this gateway is shutting down") },
        ToGuest::Stored { .. } => "stored": ToGuest::Stored { seq: LARGE },
        ToGuest::Sealed { .. } => "sealed": ToGuest::Sealed { seq: LARGE },
        ToGuest::Resend { .. } => "resend": ToGuest::Resend { from: LARGE },
        ToGuest::Steer(_) => "steer":
            ToGuest::Steer(SteerOrder { steer: steer(), ordinal: 3, message: text("turn left"), files: vec![input_file()] }),
        ToGuest::Cancel { .. } => "cancel": ToGuest::Cancel { grace_s: 5, reason: text("canceled") },
        ToGuest::Viewer { .. } => "viewer": ToGuest::Viewer { viewer: text("v1"), says: ViewerSays::Own { size: SIZE } },
        ToGuest::Leased { .. } => "leased": ToGuest::Leased { number: 12 },
        ToGuest::EndedStored => "ended_stored": ToGuest::EndedStored,
        ToGuest::ResultStored => "result_stored": ToGuest::ResultStored,
        ToGuest::FileRefused { .. } => "file_refused":
            ToGuest::FileRefused { request: 7, code: text("not_found"), detail: text("there is no such file"), again: true },
        ToGuest::OutputStored { .. } => "output_stored": ToGuest::OutputStored { upload: 3 },
        ToGuest::OutputRefused { .. } => "output_refused":
            ToGuest::OutputRefused { upload: 3, code: text("changed"), detail: text("it changed while it was read") },
        ToGuest::Release => "release": ToGuest::Release,
    }
}

samples! {
    fn viewer_says() -> ViewerSays {
        ViewerSays::Here { .. } => "here": ViewerSays::Here { size: SIZE, may_resize: true },
        ViewerSays::Own { .. } => "own": ViewerSays::Own { size: SIZE },
        ViewerSays::Type { .. } => "type": ViewerSays::Type { number: LARGE, b64: text("bHMNCg==") },
        ViewerSays::Leave => "leave": ViewerSays::Leave,
    }
}

samples! {
    fn viewer_heard() -> ViewerHeard {
        ViewerHeard::Size { .. } => "size": ViewerHeard::Size { size: SIZE, owner: true },
        ViewerHeard::Typed { .. } => "typed": ViewerHeard::Typed { number: LARGE },
        ViewerHeard::Refused { .. } => "refused": ViewerHeard::Refused { number: 9, reason: text("the command has ended") },
    }
}

samples! {
    fn to_viewer() -> ToViewer, but ToViewer::Unknown {
        ToViewer::Hello { .. } => "hello": ToViewer::Hello { run: run(), state: RunState::Running, may_type: true },
        ToViewer::Size { .. } => "size": ToViewer::Size { size: SIZE, owner: true },
        ToViewer::Typed { .. } => "typed": ToViewer::Typed { number: LARGE },
        ToViewer::Refused { .. } => "refused": ToViewer::Refused { number: 9, reason: text("the sandbox is not connected; nothing was typed") },
        ToViewer::Unheard { .. } => "unheard": ToViewer::Unheard { number: 9 },
        ToViewer::Gap { .. } => "gap": ToViewer::Gap { epoch: 2, reason: text("the sandbox was lost before its end record was kept") },
        ToViewer::End { .. } => "end": ToViewer::End { state: RunState::TimedOut },
    }
}

samples! {
    fn from_viewer() -> FromViewer, but FromViewer::Unknown {
        FromViewer::Window { .. } => "window": FromViewer::Window { size: SIZE },
        FromViewer::Own => "own": FromViewer::Own,
    }
}

fn spec() -> SandboxSpec {
    SandboxSpec {
        run: run(),
        session: session(),
        epoch: 2,
        gateway: text("wss://towpath.example/sandbox"),
        token: text("sbx_token"),
        workspace: text("/var/lib/towpath/workspaces/one"),
        walls: walls(),
        linger_s: 90_000,
        spool_bytes: 1 << 30,
    }
}

fn definition() -> AgentDefinition {
    AgentDefinition {
        name: text("worker"),
        description: text("works"),
        command: vec![text("/usr/bin/python3"), text("-c"), text("print('€')")],
        image: None,
        instructions: text("be brief"),
        env: BTreeMap::from([(text("LANG"), text("C.UTF-8"))]),
        mode: Mode::Interactive,
        terminal: Some(Terminal::Pty),
        workspace: Workspace::Session,
        on_lost: OnLost::Restart,
        fence_after: Some(120),
        spool_full: SpoolFull::Block,
        contract: Contract::Towpath,
        steering: Steering { format: SteeringFormat::Json },
        sandbox: sandbox(),
        limits: Limits { concurrent: Some(3), idle_s: Some(600), max_s: Some(3600), ..Limits::default() },
    }
}

/// A webhook's body, as a receiver reads it. `workers/run/src/settle.rs` makes it; `tests/faults/tests/versions.rs` holds it against these samples.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Webhook {
    #[serde(rename = "type")]
    about: String,
    timestamp: String,
    data: WebhookData,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct WebhookData {
    run: Run,
    link: String,
}

fn webhook(about: &str, run: Run) -> Webhook {
    let link = format!("/v1/runs/{}", run.id);
    Webhook { about: text(about), timestamp: text("2026-11-30T09:08:09.123456+00:00"), data: WebhookData { run, link } }
}

fn ended_run() -> Run {
    Run {
        id: run(),
        session: session(),
        agent: text("worker"),
        agent_version: 3,
        principal: id::<PrincipalId>(7),
        mode: Mode::OneShot,
        state: RunState::TimedOut,
        wanted: Some(RunState::TimedOut),
        reason: Some(text("maximum")),
        message: Some(text("it worked longer than it may")),
        prompt: None,
        labels: BTreeMap::from([(text("team"), text("blue"))]),
        priority: 5,
        files: None,
        result: Some(RunResult { text: text("42 €"), truncated: true }),
        exit: Some(exit()),
        epoch: 2,
        revision: 17,
        startup: vec![Step { step: text("connected"), at: at(2), detail: Some(text("at once")) }],
        waiting_for: None,
        transcript: Transcript { state: text("gap"), bytes: LARGE as i64, missing: Some(8) },
        ahead: None,
        deadline: Some(at(8)),
        created_at: at(1),
        started_at: Some(at(3)),
        ended_at: Some(at(9)),
        deliveries: 1,
    }
}

fn doubtful_run() -> Run {
    Run {
        state: RunState::Running,
        wanted: None,
        reason: Some(text("sandbox_unknown")),
        message: Some(text("nobody can tell whether its sandbox is there; its host's log tells why")),
        result: None,
        exit: None,
        transcript: Transcript { state: text("live"), bytes: 12, missing: None },
        ended_at: None,
        ..ended_run()
    }
}

/// Subjects and object keys: what one release publishes or stores there, another looks for there.
fn names() -> BTreeMap<String, String> {
    let unique = Uuid::from_u128(0x0193_a5c0_b1d2_7e4f_8a6b_1c2d_3e4f_5aff);
    let names = [
        ("stream command", text(subject::COMMAND)),
        ("stream output", text(subject::OUTPUT)),
        ("stream event", text(subject::EVENT)),
        ("stream command holds", text(subject::COMMAND_ALL)),
        ("stream output holds", text(subject::OUTPUT_ALL)),
        ("stream event holds", text(subject::EVENT_ALL)),
        ("consumer admit", text(subject::ADMIT_ALL)),
        ("consumer host", subject::host_all("host.example")),
        ("consumer run", text(subject::RUN_ALL)),
        ("consumer transcript", text(subject::SEAL_ALL)),
        ("consumer deliver", text(subject::DELIVER_ALL)),
        ("frame", subject::output(tenant(), run(), 2, 65)),
        ("frames of a block", subject::output_block(tenant(), run(), 2, 2)),
        ("frames of an epoch", subject::output_epoch(tenant(), run(), 2)),
        ("frames of a run", subject::output_run(tenant(), run())),
        ("events of a run", subject::event_run(tenant(), run())),
        ("terminal", subject::terminal(tenant(), run())),
        ("object of a chunk", key::chunk(tenant(), run(), 2, unique)),
        ("object of a file", key::file(tenant(), unique)),
    ];
    names.into_iter().map(|(name, value)| (text(name), value)).collect()
}

/// A message and where it is published.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Published<T> {
    subject: String,
    body: T,
}

/// Whose readers are to pass over what they do not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Writer {
    /// Another release of ours.
    Release,
    /// People, whose unknown keys are refused. Such a thing is stored too.
    People,
}

trait Sample: Serialize + DeserializeOwned + PartialEq + Debug {}
impl<T: Serialize + DeserializeOwned + PartialEq + Debug> Sample for T {}

/// Something to be done with every sample that is JSON.
trait Visit {
    fn each<T: Sample>(&mut self, writer: Writer, version: u32, folder: &str, samples: Named<T>);
}

fn visit_all(visit: &mut impl Visit) {
    let publish = |body: Command| Published { subject: command_subject(&body), body };
    visit.each(Writer::Release, FORMAT, "command", commands().into_iter().map(|(name, body)| (name, publish(body))).collect());
    let publish = |body: Kind| Published { subject: subject::event(tenant(), run(), body.token()), body };
    visit.each(Writer::Release, FORMAT, "event", events().into_iter().map(|(name, body)| (name, publish(body))).collect());

    visit.each(Writer::Release, guest::PROTOCOL, "guest/from", from_guest());
    visit.each(Writer::Release, guest::PROTOCOL, "guest/to", to_guest());
    visit.each(Writer::Release, guest::PROTOCOL, "guest/viewer_says", viewer_says());
    visit.each(Writer::Release, guest::PROTOCOL, "guest/viewer_heard", viewer_heard());

    visit.each(Writer::Release, FORMAT, "viewer/to", to_viewer());
    visit.each(Writer::Release, FORMAT, "viewer/from", from_viewer());
    visit.each(Writer::Release, FORMAT, "viewer", vec![("said", Said { viewer: text("v1"), says: ViewerSays::Leave })]);

    visit.each(Writer::Release, u32::from(frame::VERSION), "record", vec![("end", end_record())]);
    visit.each(Writer::Release, u32::from(frame::VERSION), "record", vec![("gap", gap_record())]);
    visit.each(Writer::Release, u32::from(frame::VERSION), "record", vec![("screen", screen_record())]);
    visit.each(Writer::Release, u32::from(frame::VERSION), "record", vec![("resize", SIZE)]);

    visit.each(Writer::Release, FORMAT, "folder", vec![("spec", spec())]);

    visit.each(
        Writer::Release,
        FORMAT,
        "webhook",
        vec![("ended", webhook("run.ended", ended_run())), ("sandbox_unknown", webhook("run.sandbox_unknown", doubtful_run()))],
    );

    visit.each(Writer::People, FORMAT, "stored", vec![("definition", definition())]);
    visit.each(Writer::People, FORMAT, "stored", vec![("sandbox", sandbox())]);
    visit.each(Writer::Release, FORMAT, "stored", vec![("walls", walls())]);
    visit.each(Writer::Release, FORMAT, "stored", vec![("identity", identity())]);
    visit.each(Writer::Release, FORMAT, "stored", vec![("exit", exit())]);
    visit.each(Writer::Release, FORMAT, "stored", vec![("labels", ended_run().labels)]);

    visit.each(Writer::Release, FORMAT, ".", vec![("names", names())]);
    visit.each(Writer::Release, FORMAT, "words", words!("phase", Phase { Fresh, Started, Ended }));
    visit.each(Writer::Release, FORMAT, "words", words!("steer_state", SteerState { Queued, Sent, Written, Read, Expired, Unknown }));
    visit.each(
        Writer::Release,
        FORMAT,
        "words",
        words!("run_state", RunState { Queued, Starting, Running, Stopping, Finishing, Succeeded, Failed, Canceled, TimedOut }),
    );
    visit.each(Writer::Release, FORMAT, "words", words!("mode", Mode { OneShot, Interactive }));
    visit.each(Writer::Release, FORMAT, "words", words!("terminal", Terminal { Pipes, Pty }));
    visit.each(Writer::Release, FORMAT, "words", words!("workspace", Workspace { Session, None }));
    visit.each(Writer::Release, FORMAT, "words", words!("on_lost", OnLost { Fail, Restart }));
    visit.each(Writer::Release, FORMAT, "words", words!("spool_full", SpoolFull { Block, Gap }));
    visit.each(Writer::Release, FORMAT, "words", words!("contract", Contract { Towpath, Archestra }));
    visit.each(Writer::Release, FORMAT, "words", words!("steering_format", SteeringFormat { Text, Json }));
    visit.each(Writer::Release, FORMAT, "words", words!("backend", Backend { Process, Container, Kubernetes }));
    visit.each(Writer::Release, FORMAT, "words", words!("isolation", Isolation { Bubblewrap, None }));
}

fn frame_of(kind: FrameKind, payload: Vec<u8>) -> Frame {
    Frame { kind, epoch: 7, seq: u64::MAX - 1, offset: 1 << 40, wall_us: 1_800_000_000_000_000, mono_us: 12, payload }
}

samples! {
    fn frame_kinds() -> FrameKind {
        FrameKind::Stdout => "stdout": FrameKind::Stdout,
        FrameKind::Stderr => "stderr": FrameKind::Stderr,
        FrameKind::Terminal => "terminal": FrameKind::Terminal,
        FrameKind::Gap => "gap": FrameKind::Gap,
        FrameKind::End => "end": FrameKind::End,
        FrameKind::Screen => "screen": FrameKind::Screen,
        FrameKind::Resize => "resize": FrameKind::Resize,
        FrameKind::Other(_) => "other": FrameKind::Other(99),
    }
}

fn record<T: Serialize>(record: &T) -> Vec<u8> {
    serde_json::to_vec(record).expect("record")
}

fn frames() -> Named<Frame> {
    let payload = |kind| match kind {
        FrameKind::Stdout => b"out \xff\x00\n".to_vec(),
        FrameKind::Stderr => b"golden".to_vec(),
        FrameKind::Terminal => b"\x1b[31mred\x1b[0m\r\n".to_vec(),
        FrameKind::Gap => record(&gap_record()),
        FrameKind::End => record(&end_record()),
        FrameKind::Screen => record(&screen_record()),
        FrameKind::Resize => record(&SIZE),
        FrameKind::Other(_) => b"of a newer release".to_vec(),
    };
    frame_kinds().into_iter().map(|(name, kind)| (name, frame_of(kind, payload(kind)))).collect()
}

/// What goes over connections in binary.
fn binaries() -> Named<Vec<u8>> {
    let numbered = |number: u64, bytes: &[u8]| [&number.to_be_bytes()[..], bytes].concat();
    let two: Vec<u8> = frames().iter().take(2).flat_map(|(_, frame)| frame.encode()).collect();
    vec![
        ("guest/binary/frames", [&[binary::FRAMES][..], &two].concat()),
        ("guest/binary/file_piece", [&[binary::FILE_PIECE][..], &numbered(LARGE, b"piece")].concat()),
        ("guest/binary/output_piece", [&[binary::OUTPUT_PIECE][..], &numbered(LARGE, b"piece")].concat()),
        ("viewer/from/typed", numbered(LARGE, b"ls\r\n")),
    ]
}

// ---- files ---------------------------------------------------------------------------------------------------------------------

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("samples")
}

/// What is at that place. One that is missing is written when that is asked for.
fn stored(path: &Path, today: &str) -> String {
    if !path.exists() && std::env::var_os("TOWPATH_BLESS").is_some() {
        fs::create_dir_all(path.parent().expect("a folder")).expect("make the folder");
        fs::write(path, today).expect("write the sample");
    }
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}; TOWPATH_BLESS=1 writes what is missing", path.display()))
}

/// Every sample there is.
fn files() -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("read the folder") {
            let path = entry.expect("entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.insert(path);
            }
        }
    }
    files
}

/// The samples of this kind that today's version writes no more: those of older versions, and older forms `<name>.<what>.json`.
fn older(version: u32, folder: &str, name: &str) -> Vec<PathBuf> {
    let named = |path: &PathBuf| {
        let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
        file.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'))
    };
    let of = |version: u32| root().join(format!("v{version}")).join(folder);
    let current = of(version).join(format!("{name}.json"));
    let folders: BTreeSet<PathBuf> = (0..=version).map(of).collect();
    files()
        .into_iter()
        .filter(|path| *path != current && named(path) && path.parent().is_some_and(|at| folders.iter().any(|folder| same(folder, at))))
        .collect()
}

fn same(one: &Path, other: &Path) -> bool {
    one.components().eq(other.components())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).expect("text"), 16).expect("hex digits");
    digits.chunks(2).map(byte).collect()
}

fn read<T: DeserializeOwned>(path: &Path, text: &str) -> T {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{} does not read any more: {error}", path.display()))
}

/// The word by which a reader tells messages apart is the sample's name.
fn check_tag(path: &Path, name: &str, value: &Value) {
    let body = value.get("body").unwrap_or(value);
    let tag = ["kind", "type"].iter().find_map(|key| body.get(key)?.as_str()).filter(|_| !path.to_string_lossy().contains("webhook"));
    assert!(tag.is_none_or(|tag| tag == name), "{} holds {tag:?}", path.display());
}

struct Golden {
    seen: BTreeSet<PathBuf>,
}

impl Visit for Golden {
    fn each<T: Sample>(&mut self, _: Writer, version: u32, folder: &str, samples: Named<T>) {
        for (name, sample) in samples {
            let path: PathBuf = root().join(format!("v{version}")).join(folder).join(format!("{name}.json")).components().collect();
            let written = serde_json::to_string_pretty(&sample).expect("write") + "\n";
            let text = stored(&path, &written);
            let value: T = read(&path, &text);
            assert_eq!(value, sample, "{} reads as something else", path.display());
            assert_eq!(written, text, "{} is written otherwise now", path.display());
            check_tag(&path, name, &serde_json::from_str(&text).expect("JSON"));
            self.seen.insert(path);
            for path in older(version, folder, name) {
                let text = fs::read_to_string(&path).expect("read");
                let _: T = read(&path, &text);
                self.seen.insert(path);
            }
        }
    }
}

#[test]
fn every_sample_reads_and_today_s_are_written_as_they_are_stored() {
    let mut golden = Golden { seen: BTreeSet::new() };
    visit_all(&mut golden);

    let version = u32::from(frame::VERSION);
    for (name, frame) in frames() {
        let path = root().join(format!("v{version}/frame/{name}.hex"));
        let encoded = frame.encode();
        let (head, payload) = encoded.split_at(frame::HEADER_BYTES);
        let text = stored(&path, &format!("{}\n{}\n", hex(head), hex(payload)));
        let stored = bytes(&text);
        assert_eq!(Frame::decode(&stored), Ok((frame.clone(), stored.len())), "{}", path.display());
        assert_eq!(encoded, stored, "{} is written otherwise now", path.display());
        golden.seen.insert(path);
    }
    for (name, message) in binaries() {
        let path = root().join(format!("v{}/{name}.hex", guest::PROTOCOL));
        let text = stored(&path, &(hex(&message) + "\n"));
        assert_eq!(message, bytes(&text), "{} is written otherwise now", path.display());
        golden.seen.insert(path);
    }
    // Written by the supervisor and by the sealer, whose rooms are above this one.
    let path = root().join(format!("v{FORMAT}/folder/identity.json"));
    assert_eq!(read::<Identity>(&path, &fs::read_to_string(&path).expect("identity.json")), identity());
    golden.seen.insert(path);
    golden.seen.insert(root().join(format!("v{FORMAT}/chunk/chunk.hex")));

    let unread: Vec<PathBuf> = files().into_iter().filter(|path| !golden.seen.contains(path)).collect();
    assert!(unread.is_empty(), "samples of nothing that there is: {unread:?}");
}

// ---- a newer writer ------------------------------------------------------------------------------------------------------------

/// The same with a field in every object that no reader knows. Objects whose keys are data are left as they are.
fn with_unknown_fields(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields = fields.into_iter().map(|(name, value)| match name.as_str() {
                "env" | "labels" => (name, value),
                _ => (name, with_unknown_fields(value)),
            });
            Value::Object(fields.chain([(text("of_a_newer_release"), json!({ "type": "unheard_of", "numbers": [1, 2.5] }))]).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(with_unknown_fields).collect()),
        plain => plain,
    }
}

struct Skewed;

impl Visit for Skewed {
    fn each<T: Sample>(&mut self, writer: Writer, version: u32, folder: &str, samples: Named<T>) {
        for (name, sample) in samples {
            // Their keys are data.
            if ["names", "labels"].contains(&name) {
                continue;
            }
            let current = serde_json::to_value(&sample).expect("write");
            let older = older(version, folder, name).into_iter().map(|path| read(&path, &fs::read_to_string(&path).expect("read")));
            for value in older.chain([current]) {
                let place = format!("{folder}/{name}: {value}");
                let today: T = serde_json::from_value(value.clone()).expect("read");
                match (writer, serde_json::from_value::<T>(with_unknown_fields(value))) {
                    (Writer::Release, Ok(read)) => assert_eq!(read, today, "{place}, with fields of a newer release"),
                    (Writer::Release, Err(error)) => panic!("{place}, with fields of a newer release: {error}"),
                    (Writer::People, Err(error)) => assert!(error.to_string().contains("of_a_newer_release"), "{error}"),
                    (Writer::People, Ok(read)) => panic!("{place}: what somebody mistyped is ignored: {read:?}"),
                }
            }
        }
    }
}

#[test]
fn fields_of_a_newer_release_are_ignored() {
    visit_all(&mut Skewed);
}

#[test]
fn kinds_of_a_newer_release_read_as_unknown() {
    let of = |tag: &str| json!({ tag: "unheard_of", "run": 1, "inner": { "type": "hello" } });
    assert_eq!(serde_json::from_value::<Command>(of("kind")).expect("command"), Command::Unknown);
    assert_eq!(serde_json::from_value::<Kind>(of("kind")).expect("event"), Kind::Unknown);
    assert_eq!(serde_json::from_value::<FromGuest>(of("type")).expect("from guest"), FromGuest::Unknown);
    assert_eq!(serde_json::from_value::<ToGuest>(of("type")).expect("to guest"), ToGuest::Unknown);
    assert_eq!(serde_json::from_value::<ToViewer>(of("type")).expect("to viewer"), ToViewer::Unknown);
    assert_eq!(serde_json::from_value::<FromViewer>(of("type")).expect("from viewer"), FromViewer::Unknown);
}

/// A supervisor of the next release may print it; to be kept it need not be understood.
#[test]
fn a_frame_of_an_unknown_kind_is_carried_on() {
    let mut unknown = frame_of(FrameKind::Stdout, b"of a newer release".to_vec()).encode();
    unknown[1] = 99;
    let known = frame_of(FrameKind::Stdout, b"known".to_vec()).encode();
    let bytes = [&known[..], &unknown, &known].concat();
    let frames = Frame::decode_all(&bytes).expect("frames");
    let written: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
    assert_eq!((frames.len(), written), (3, bytes));
    assert!(!frames[1].kind.is_output(), "nobody knows whether it was printed");
}
