//! What is to be told to the gateway, and what it told us: the one place where the connection and the work meet.
//!
//! The connection pulls: nothing is queued that could be derived. A report is kept until its answer came and is sent again on every
//! new connection; a question (a piece of an input file) likewise.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, VecDeque},
    io,
    time::Duration,
};

use tokio::{
    sync::{Notify, oneshot},
    time::{Instant, sleep, timeout},
};
use towpath_schemas::{
    frame::FrameKind,
    guest::{FromGuest, Identity, Phase, StartOrder, SteerOrder, ToGuest, ViewerHeard, ViewerSays},
    id::FileId,
    limit::TYPED_BYTES,
};

use crate::clock;

use super::{disk, lease::Lease, spool::Spool, steers::Ledger, upload::Uploads};

/// Bytes of frames that may be on their way without being stored.
const WINDOW_BYTES: usize = 4 * 1024 * 1024;
/// Bytes of frames in one message.
const BATCH_BYTES: usize = 256 * 1024;
/// Start steps that wait to be told.
const STEPS: usize = 64;
/// How long a question waits for its answer, and how often it is asked of a gateway that is there.
const ANSWER: Duration = Duration::from_secs(30);
const QUESTIONS: u32 = 10;
/// Wait before a file is asked for again that could not be had.
const NOT_YET: Duration = Duration::from_millis(500);

/// Steers that wait for room on the disk.
const STEERS_LATE: usize = 100;

/// What viewers said and nobody has taken yet, and answers that wait to be sent.
const VIEWERS_SAID: usize = 1024;
const VIEWER_ANSWERS: usize = 1024;

fn typed_bytes(says: &ViewerSays) -> usize {
    if let ViewerSays::Type { b64, .. } = says { b64.len() } else { 0 }
}

/// What the gateway wants of a run, beside its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stop {
    pub grace_s: u32,
    pub reason: String,
}

/// The reports that are answered one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// None: sent again on every connection.
    Never,
    Ended,
    Result,
    Release,
}

struct Report {
    message: FromGuest,
    answer: Answer,
    sent_on: u64,
}

struct Read {
    file: FileId,
    offset: u64,
    length: u32,
    sent_on: u64,
    reply: oneshot::Sender<Result<Vec<u8>, NotRead>>,
}

/// Why a piece of a file did not come.
enum NotRead {
    /// It may come when it is asked for again.
    Yet(String),
    Ever(String),
}

/// One message to send.
pub enum Outgoing {
    Text(FromGuest),
    Binary(Vec<u8>),
}

struct Inner {
    steps: VecDeque<FromGuest>,
    reports: Vec<Report>,
    reads: BTreeMap<u64, Read>,
    next_read: u64,
    order: Option<StartOrder>,
    stop: Option<Stop>,
    ledger: Ledger,
    /// Steers that came while the disk was full, in order.
    late_steers: VecDeque<SteerOrder>,
    uploads: Uploads,
    spool: Spool,
    /// Last sequence number and bytes of each batch that was sent and is not stored.
    window: VecDeque<(u64, usize)>,
    window_bytes: usize,
    identity: Identity,
    phase: Phase,
    /// Under a fence, from the start order on.
    lease: Option<Lease>,
    last_activity: Instant,
    /// What viewers of the terminal said; None while there is no terminal.
    viewers_said: Option<VecDeque<(String, ViewerSays)>>,
    viewers_said_bytes: usize,
    /// Answers to viewers; the oldest are dropped.
    viewers_hear: VecDeque<FromGuest>,
    /// Number of the connection that is up.
    connected: Option<u64>,
}

pub struct Desk {
    inner: RefCell<Inner>,
    /// Something may be there to send.
    outgoing: Notify,
    /// The gateway said something that the work may wait for.
    incoming: Notify,
    room: Notify,
    released: Cell<bool>,
    fenced: Cell<bool>,
}

impl Desk {
    pub fn new(spool: Spool, ledger: Ledger, identity: Identity) -> Self {
        let inner = Inner {
            steps: VecDeque::new(),
            reports: Vec::new(),
            reads: BTreeMap::new(),
            next_read: 1,
            order: None,
            stop: None,
            ledger,
            late_steers: VecDeque::new(),
            uploads: Uploads::default(),
            spool,
            window: VecDeque::new(),
            window_bytes: 0,
            identity,
            phase: Phase::Fresh,
            lease: None,
            last_activity: Instant::now(),
            viewers_said: None,
            viewers_said_bytes: 0,
            viewers_hear: VecDeque::new(),
            connected: None,
        };
        Self {
            inner: RefCell::new(inner),
            outgoing: Notify::new(),
            incoming: Notify::new(),
            room: Notify::new(),
            released: Cell::new(false),
            fenced: Cell::new(false),
        }
    }

    // What the work does.

    /// Resolves when `get` finds what it waits for; looked at after every message of the gateway.
    async fn wait<T>(&self, get: impl Fn(&Self) -> Option<T>) -> T {
        loop {
            // Registered before looking, so that no wake-up falls in between.
            let told = self.incoming.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if let Some(value) = get(self) {
                return value;
            }
            told.await;
        }
    }

    pub async fn start_order(&self) -> StartOrder {
        self.wait(|desk| desk.inner.borrow().order.clone()).await
    }

    pub async fn stop_order(&self) -> Stop {
        self.wait(Desk::stop_asked).await
    }

    pub fn stop_asked(&self) -> Option<Stop> {
        self.inner.borrow().stop.clone()
    }

    /// From now on the command's life hangs on a lease; the connection asks for it.
    pub fn need_lease(&self, fence_s: u32) {
        self.inner.borrow_mut().lease = Some(Lease::new(fence_s));
        self.outgoing.notify_one();
    }

    /// The end of the lease, once it is after `last_us`. Without a fence it never comes.
    pub async fn lease_after(&self, last_us: u64) -> u64 {
        self.wait(|desk| desk.inner.borrow().lease.as_ref()?.until_us().filter(|until_us| *until_us > last_us)).await
    }

    pub fn has_lease_run_out(&self) -> bool {
        self.inner.borrow().lease.as_ref().is_some_and(|lease| lease.has_run_out(clock::boot_us()))
    }

    /// Until the connection has to ask for the lease again.
    pub fn lease_due_in(&self, connection: u64) -> Option<Duration> {
        self.inner.borrow().lease.as_ref().map(|lease| lease.due_in(connection, clock::boot_us()))
    }

    pub async fn fenced(&self) {
        self.wait(|desk| desk.fenced.get().then_some(())).await;
    }

    pub async fn released(&self) {
        self.wait(|desk| desk.released.get().then_some(())).await;
    }

    /// Every report has its answer and every output was taken or refused.
    pub async fn all_answered(&self) {
        self.wait(|desk| {
            let inner = desk.inner.borrow();
            (inner.reports.iter().all(|report| report.answer == Answer::Never) && inner.uploads.is_done()).then_some(())
        })
        .await;
    }

    pub async fn steer_waits(&self) {
        self.wait(|desk| desk.inner.borrow().ledger.has_waiting().then_some(())).await;
    }

    /// Asks for a piece of an input file, over as many connections as it takes. A server behind the gateway that does not answer is waited for, and not for ever.
    pub async fn read_file(&self, file: FileId, offset: u64, length: u32) -> Result<Vec<u8>, String> {
        let asked_at = Instant::now();
        loop {
            match self.read_once(file, offset, length).await {
                Ok(bytes) => return Ok(bytes),
                Err(NotRead::Yet(_)) if asked_at.elapsed() < ANSWER * QUESTIONS => sleep(NOT_YET).await,
                Err(NotRead::Yet(why) | NotRead::Ever(why)) => return Err(why),
            }
        }
    }

    /// A gateway that is there and says nothing is asked again, and not for ever.
    async fn read_once(&self, file: FileId, offset: u64, length: u32) -> Result<Vec<u8>, NotRead> {
        let (reply, mut answer) = oneshot::channel();
        let number = {
            let mut inner = self.inner.borrow_mut();
            let number = inner.next_read;
            inner.next_read += 1;
            inner.reads.insert(number, Read { file, offset, length, sent_on: 0, reply });
            number
        };
        let mut unanswered = 0;
        while unanswered < QUESTIONS {
            self.outgoing.notify_one();
            if let Ok(told) = timeout(ANSWER, &mut answer).await {
                return told.unwrap_or_else(|_| Err(NotRead::Ever("the question was dropped".to_owned())));
            }
            unanswered += self.inner.borrow_mut().ask_again(number);
        }
        self.inner.borrow_mut().reads.remove(&number);
        Err(NotRead::Ever(format!("the gateway did not answer within {} s", ANSWER.as_secs() * u64::from(QUESTIONS))))
    }

    pub fn step(&self, step: &str, detail: Option<String>) {
        let mut inner = self.inner.borrow_mut();
        if inner.steps.len() < STEPS {
            inner.steps.push_back(FromGuest::Step { step: step.to_owned(), detail });
        }
        drop(inner);
        self.outgoing.notify_one();
    }

    pub fn report(&self, message: FromGuest) {
        let answer = match &message {
            FromGuest::Ended { .. } => Answer::Ended,
            FromGuest::Result { .. } => Answer::Result,
            FromGuest::Done => Answer::Release,
            _ => Answer::Never,
        };
        self.inner.borrow_mut().reports.push(Report { message, answer, sent_on: 0 });
        self.outgoing.notify_one();
    }

    pub fn append(&self, kind: FrameKind, payload: &[u8]) -> io::Result<()> {
        let mut inner = self.inner.borrow_mut();
        inner.spool.append(kind, payload)?;
        inner.last_activity = Instant::now();
        drop(inner);
        self.outgoing.notify_one();
        Ok(())
    }

    pub async fn spool_room(&self) {
        loop {
            let room = self.room.notified();
            tokio::pin!(room);
            room.as_mut().enable();
            if self.inner.borrow().spool.has_room() {
                return;
            }
            room.await;
        }
    }

    pub fn lift_spool_limit(&self) {
        self.inner.borrow_mut().spool.lift_limit();
        self.room.notify_waiters();
    }

    pub fn printed(&self) -> u64 {
        self.inner.borrow().spool.printed()
    }

    pub fn with_ledger<T>(&self, act: impl FnOnce(&mut Ledger) -> T) -> T {
        let mut inner = self.inner.borrow_mut();
        let result = act(&mut inner.ledger);
        if inner.ledger.took_input() {
            inner.last_activity = Instant::now();
        }
        drop(inner);
        self.outgoing.notify_one();
        result
    }

    pub fn with_uploads<T>(&self, act: impl FnOnce(&mut Uploads) -> T) -> T {
        let result = act(&mut self.inner.borrow_mut().uploads);
        self.outgoing.notify_one();
        result
    }

    /// From now on there is a terminal, or none any more.
    pub fn set_terminal(&self, there: bool) {
        let mut inner = self.inner.borrow_mut();
        inner.viewers_said = there.then(VecDeque::new);
        inner.viewers_said_bytes = 0;
    }

    /// The next thing that a viewer of the terminal said.
    pub async fn viewer_says(&self) -> (String, ViewerSays) {
        self.wait(|desk| {
            let mut inner = desk.inner.borrow_mut();
            let (viewer, says) = inner.viewers_said.as_mut()?.pop_front()?;
            inner.viewers_said_bytes -= typed_bytes(&says);
            Some((viewer, says))
        })
        .await
    }

    pub fn tell_viewer(&self, viewer: &str, heard: ViewerHeard) {
        self.inner.borrow_mut().tell_viewer(viewer, heard);
        self.outgoing.notify_one();
    }

    /// Somebody typed.
    pub fn note_activity(&self) {
        self.inner.borrow_mut().last_activity = Instant::now();
    }

    pub fn last_activity(&self) -> Instant {
        self.inner.borrow().last_activity
    }

    pub fn set_phase(&self, phase: Phase) {
        self.inner.borrow_mut().phase = phase;
    }

    pub fn set_identity(&self, identity: Identity) {
        self.inner.borrow_mut().identity = identity;
    }

    // What the connection does.

    pub fn phase(&self) -> Phase {
        self.inner.borrow().phase
    }

    pub fn identity(&self) -> Identity {
        self.inner.borrow().identity.clone()
    }

    pub fn is_over(&self) -> bool {
        self.released.get() || self.fenced.get()
    }

    pub async fn something_to_send(&self) {
        self.outgoing.notified().await;
    }

    pub fn connection_ended(&self) {
        self.inner.borrow_mut().connected = None;
    }

    /// The next message of this connection (numbered from 1); None when there is nothing to say.
    pub fn next(&self, connection: u64) -> io::Result<Option<Outgoing>> {
        let mut inner = self.inner.borrow_mut();
        inner.connected = Some(connection);
        inner.take_late_steers();
        if inner.phase != Phase::Ended
            && let Some(number) = inner.lease.as_mut().and_then(|lease| lease.ask(connection, clock::boot_us()))
        {
            return Ok(Some(Outgoing::Text(FromGuest::Lease { number })));
        }
        if let Some(step) = inner.steps.pop_front() {
            return Ok(Some(Outgoing::Text(step)));
        }
        if let Some(answer) = inner.viewers_hear.pop_front() {
            return Ok(Some(Outgoing::Text(answer)));
        }
        if let Some((number, read)) = inner.reads.iter_mut().find(|(_, read)| read.sent_on != connection) {
            read.sent_on = connection;
            let message = FromGuest::ReadFile { request: *number, file: read.file, offset: read.offset, length: read.length };
            return Ok(Some(Outgoing::Text(message)));
        }
        if let Some(message) = inner.ledger.next(connection) {
            return Ok(Some(Outgoing::Text(message)));
        }
        let drained = inner.spool.is_drained();
        if let Some(report) =
            inner.reports.iter_mut().find(|report| report.sent_on != connection && (drained || report.answer != Answer::Release))
        {
            report.sent_on = connection;
            return Ok(Some(Outgoing::Text(report.message.clone())));
        }
        if inner.window_bytes < WINDOW_BYTES
            && let Some((frames, last)) = inner.spool.read(BATCH_BYTES)?
        {
            inner.window.push_back((last, frames.len()));
            inner.window_bytes += frames.len();
            let mut message = Vec::with_capacity(1 + frames.len());
            message.push(towpath_schemas::guest::binary::FRAMES);
            message.extend_from_slice(&frames);
            return Ok(Some(Outgoing::Binary(message)));
        }
        inner.uploads.next(connection)
    }

    /// Applies what the gateway said after its welcome.
    pub fn hear(&self, message: ToGuest) {
        let mut inner = self.inner.borrow_mut();
        match message {
            ToGuest::Welcome { sealed } => {
                inner.spool.sealed(sealed);
                inner.resend(sealed.saturating_add(1));
            }
            ToGuest::Start(order) => inner.order = inner.order.take().or(Some(*order)),
            ToGuest::Fenced => self.fenced.set(true),
            ToGuest::Stored { seq } => inner.stored(seq),
            ToGuest::Sealed { seq } => {
                inner.stored(seq);
                inner.spool.sealed(seq);
            }
            ToGuest::Resend { from } => inner.resend(from),
            ToGuest::Steer(order) => inner.take_steer(order),
            ToGuest::Viewer { viewer, says } => inner.hear_viewer(viewer, says),
            ToGuest::Cancel { grace_s, reason } => inner.stop = inner.stop.take().or(Some(Stop { grace_s, reason })),
            ToGuest::Leased { number } => {
                if let Some(lease) = &mut inner.lease {
                    lease.granted(number, clock::boot_us());
                }
            }
            ToGuest::EndedStored => inner.answered(Answer::Ended),
            ToGuest::ResultStored => inner.answered(Answer::Result),
            ToGuest::FileRefused { request, code, detail, again } => {
                let why = format!("{code}: {detail}");
                inner.piece(request, Err(if again { NotRead::Yet(why) } else { NotRead::Ever(why) }));
            }
            ToGuest::OutputStored { upload } => inner.uploads.answered(upload),
            ToGuest::OutputRefused { upload, code, detail } => {
                crate::note!("output {upload} was refused: {code}: {detail}");
                inner.uploads.answered(upload);
            }
            ToGuest::Release => self.released.set(true),
            ToGuest::Later { .. } | ToGuest::Unknown => {}
        }
        drop(inner);
        self.incoming.notify_waiters();
        self.room.notify_waiters();
        self.outgoing.notify_one();
    }

    /// A piece of an input file.
    pub fn hear_piece(&self, request: u64, bytes: Vec<u8>) {
        self.inner.borrow_mut().piece(request, Ok(bytes));
    }
}

impl Inner {
    /// Counts one when the question was asked on the connection that is up.
    fn ask_again(&mut self, number: u64) -> u32 {
        let connected = self.connected;
        self.reads.get_mut(&number).filter(|read| Some(read.sent_on) == connected).map_or(0, |read| {
            read.sent_on = 0;
            1
        })
    }

    fn stored(&mut self, seq: u64) {
        while let Some((last, bytes)) = self.window.front().copied()
            && last <= seq
        {
            self.window_bytes -= bytes;
            self.window.pop_front();
        }
    }

    fn resend(&mut self, from: u64) {
        self.spool.rewind(from);
        self.window.clear();
        self.window_bytes = 0;
    }

    fn tell_viewer(&mut self, viewer: &str, heard: ViewerHeard) {
        if self.viewers_hear.len() >= VIEWER_ANSWERS {
            self.viewers_hear.pop_front();
        }
        self.viewers_hear.push_back(FromGuest::Viewer { viewer: viewer.to_owned(), heard });
    }

    fn hear_viewer(&mut self, viewer: String, says: ViewerSays) {
        let bytes = typed_bytes(&says);
        let why = match &self.viewers_said {
            None => "the command has no terminal, or has ended",
            Some(said) if said.len() >= VIEWERS_SAID || self.viewers_said_bytes + bytes > 2 * TYPED_BYTES => {
                "the command does not read what is typed"
            }
            Some(_) => {
                self.viewers_said_bytes += bytes;
                self.viewers_said.get_or_insert_default().push_back((viewer, says));
                return;
            }
        };
        if let ViewerSays::Type { number, .. } = says {
            self.tell_viewer(&viewer, ViewerHeard::Refused { number, reason: why.to_owned() });
        }
    }

    fn take_steer(&mut self, order: SteerOrder) {
        self.late_steers.push_back(order);
        self.take_late_steers();
    }

    /// Those that the disk has no room for stay; they are tried again whenever there may be something to say, and come again with the next hello in any case.
    fn take_late_steers(&mut self) {
        while let Some(order) = self.late_steers.front() {
            if let Err(error) = self.ledger.take(order) {
                if disk::is_full(&error) && self.late_steers.len() <= STEERS_LATE {
                    return;
                }
                // Not known to us, so the gateway still counts it as sent, and the next hello brings it again.
                crate::note!("{} cannot be kept: {error}", order.steer);
            }
            self.late_steers.pop_front();
        }
    }

    fn answered(&mut self, answer: Answer) {
        for report in self.reports.iter_mut().filter(|report| report.answer == answer) {
            report.answer = Answer::Never;
            report.sent_on = u64::MAX;
        }
        self.reports.retain(|report| report.sent_on != u64::MAX);
    }

    fn piece(&mut self, request: u64, answer: Result<Vec<u8>, NotRead>) {
        if let Some(read) = self.reads.remove(&request) {
            let bounded = answer.map(|mut bytes| {
                bytes.truncate(read.length as usize);
                bytes
            });
            // Nobody waits any more when the start was given up.
            read.reply.send(bounded).ok();
        }
    }
}
