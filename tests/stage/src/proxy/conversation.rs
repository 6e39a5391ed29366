//! Follows the messages of one Postgres connection, to break it exactly at a COMMIT.
//! Format: PostgreSQL documentation, "Message Formats" (protocol 3). Every Query, Sync and FunctionCall, and the start-up, is answered by one
//! ReadyForQuery; so the answer to a COMMIT is complete when as many of those came as were asked for up to it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

const SSL_REQUEST: u32 = 80_877_103;
const GSSENC_REQUEST: u32 = 80_877_104;
const CANCEL_REQUEST: u32 = 80_877_102;
/// Enough of a message's body to know `COMMIT;` and a start-up code by.
const HEAD_BYTES: usize = 16;

/// Where a connection is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CommitFault {
    Before,
    After,
}

/// The faults that were asked for, over all connections of a proxy.
#[derive(Default)]
pub(super) struct Faults {
    /// COMMITs to go until the fault, the fault's own included; 0 is none.
    before: AtomicU64,
    after: AtomicU64,
    done: AtomicU64,
    etags: AtomicU64,
}

impl Faults {
    pub fn arm(&self, fault: CommitFault, nth: u64) {
        self.counter(fault).store(nth, Ordering::SeqCst);
    }

    pub fn done(&self) -> u64 {
        self.done.load(Ordering::SeqCst)
    }

    pub fn etags(&self) -> u64 {
        self.etags.load(Ordering::SeqCst)
    }

    pub fn etag_changed(&self) {
        self.etags.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts one COMMIT; whether this one is to be cut.
    fn due(&self, fault: CommitFault) -> bool {
        self.counter(fault).fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) == Ok(1)
    }

    fn counter(&self, fault: CommitFault) -> &AtomicU64 {
        match fault {
            CommitFault::Before => &self.before,
            CommitFault::After => &self.after,
        }
    }
}

/// What to do with the bytes just read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Pass the first so many on; the rest is held back for ever.
    Relay(usize),
    /// End the connection.
    Cut,
}

/// One connection, both directions.
pub(super) struct Conversation {
    faults: Arc<Faults>,
    client: Messages,
    server: Messages,
    /// Requests that end in a ReadyForQuery, and how many of those came.
    asked: u64,
    answered: u64,
    /// The COMMIT whose answer is withheld, by its number among the requests.
    cut_at: Option<u64>,
}

impl Conversation {
    pub fn new(faults: Arc<Faults>) -> Self {
        Self { faults, client: Messages::new(Stage::Startup), server: Messages::new(Stage::Tagged), asked: 0, answered: 0, cut_at: None }
    }

    /// To be asked before the bytes go on to the server, so that no answer can come first.
    pub fn client_sent(&mut self, bytes: &[u8]) -> Verdict {
        let mut rest = bytes;
        while let Some(message) = self.client.next(&mut rest) {
            match message {
                Message::Startup(SSL_REQUEST | GSSENC_REQUEST) => self.server.stage = Stage::Negotiation,
                Message::Startup(CANCEL_REQUEST) => self.client.stage = Stage::Opaque,
                Message::Startup(_) => {
                    self.client.stage = Stage::Tagged;
                    self.asked += 1;
                }
                Message::Tagged(b'Q', head) => {
                    self.asked += 1;
                    if is_commit(&head) && self.commit_is_cut() {
                        return Verdict::Cut;
                    }
                }
                Message::Tagged(b'S' | b'F', _) => self.asked += 1,
                Message::Tagged(..) | Message::Negotiated(_) => {}
            }
        }
        Verdict::Relay(bytes.len())
    }

    pub fn server_sent(&mut self, bytes: &[u8]) -> Verdict {
        let mut rest = bytes;
        let mut relayed = if self.withheld() { 0 } else { bytes.len() };
        while let Some(message) = self.server.next(&mut rest) {
            match message {
                Message::Negotiated(b'N') => self.server.stage = Stage::Tagged,
                Message::Negotiated(_) => (self.client.stage, self.server.stage) = (Stage::Opaque, Stage::Opaque),
                Message::Tagged(b'Z', _) => {
                    self.answered += 1;
                    if Some(self.answered) == self.cut_at {
                        self.faults.done.fetch_add(1, Ordering::SeqCst);
                        return Verdict::Cut;
                    }
                    if self.withheld() {
                        relayed = bytes.len() - rest.len();
                    }
                }
                Message::Tagged(..) | Message::Startup(_) => {}
            }
        }
        Verdict::Relay(relayed)
    }

    /// Counts a COMMIT; whether the connection ends here and now.
    fn commit_is_cut(&mut self) -> bool {
        if self.faults.due(CommitFault::After) {
            self.cut_at = Some(self.asked);
        }
        let now = self.faults.due(CommitFault::Before);
        if now {
            self.faults.done.fetch_add(1, Ordering::SeqCst);
        }
        now
    }

    /// Whether the next bytes from the server belong to the answer that must not arrive.
    fn withheld(&self) -> bool {
        self.cut_at == Some(self.answered + 1)
    }
}

fn is_commit(head: &[u8]) -> bool {
    let text = head.strip_suffix(b"\0").unwrap_or(head);
    text.strip_suffix(b";").unwrap_or(text).eq_ignore_ascii_case(b"COMMIT")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Untagged: length and code.
    Startup,
    /// One byte answers a request for encryption.
    Negotiation,
    /// Tag, length, body.
    Tagged,
    /// Not followed any more.
    Opaque,
}

#[derive(Debug, PartialEq, Eq)]
enum Message {
    Startup(u32),
    Negotiated(u8),
    /// Tag and the beginning of the body.
    Tagged(u8, Vec<u8>),
}

/// Cuts one direction's bytes into messages, wherever the pieces end.
struct Messages {
    stage: Stage,
    header: Vec<u8>,
    head: Vec<u8>,
    /// Bytes of the present message's body still to come.
    left: Option<usize>,
}

impl Messages {
    fn new(stage: Stage) -> Self {
        Self { stage, header: Vec::new(), head: Vec::new(), left: None }
    }

    /// The next message that is complete within these bytes; they shrink to what comes behind it.
    fn next(&mut self, bytes: &mut &[u8]) -> Option<Message> {
        match self.stage {
            Stage::Opaque => None,
            Stage::Negotiation => {
                let (first, rest) = bytes.split_first()?;
                *bytes = rest;
                Some(Message::Negotiated(*first))
            }
            Stage::Startup => {
                let _: u8 = self.whole(bytes, 0)?;
                let code = self.head.first_chunk().map_or(0, |code| u32::from_be_bytes(*code));
                self.begin();
                Some(Message::Startup(code))
            }
            Stage::Tagged => {
                let tag = self.whole(bytes, 1)?;
                let head = std::mem::take(&mut self.head);
                self.begin();
                Some(Message::Tagged(tag, head))
            }
        }
    }

    /// Takes bytes until a message with `tags` bytes of tag before its length is complete; its first byte.
    fn whole(&mut self, bytes: &mut &[u8], tags: usize) -> Option<u8> {
        while self.left.is_none() {
            let (first, rest) = bytes.split_first()?;
            self.header.push(*first);
            *bytes = rest;
            if let Some(length) = self.header.get(tags..).and_then(|length| length.first_chunk()) {
                self.left = Some((u32::from_be_bytes(*length) as usize).saturating_sub(4));
            }
        }
        let left = self.left?;
        let (body, rest) = bytes.split_at(left.min(bytes.len()));
        let room = HEAD_BYTES.saturating_sub(self.head.len());
        self.head.extend_from_slice(&body[..body.len().min(room)]);
        *bytes = rest;
        self.left = Some(left - body.len());
        (left == body.len()).then(|| self.header[0])
    }

    fn begin(&mut self) {
        self.header.clear();
        self.head.clear();
        self.left = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tagged(tag: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).expect("length").to_be_bytes();
        [&[tag][..], &length, body].concat()
    }

    fn startup(code: u32) -> Vec<u8> {
        [8_u32.to_be_bytes(), code.to_be_bytes()].concat()
    }

    fn begun(faults: &Arc<Faults>) -> Conversation {
        let mut conversation = Conversation::new(faults.clone());
        assert_eq!(conversation.client_sent(&startup(SSL_REQUEST)), Verdict::Relay(8));
        assert_eq!(conversation.server_sent(b"N"), Verdict::Relay(1));
        assert_eq!(conversation.client_sent(&startup(196_608)), Verdict::Relay(8));
        assert_eq!(conversation.server_sent(&tagged(b'Z', b"I")), Verdict::Relay(6));
        conversation
    }

    #[test]
    fn only_the_answer_to_the_commit_is_withheld_however_the_pieces_fall() {
        let question = [tagged(b'Q', b"SELECT 1\0"), tagged(b'Q', b"COMMIT\0")].concat();
        let first = [tagged(b'C', b"SELECT 1\0"), tagged(b'Z', b"T")].concat();
        let answer = [first.clone(), tagged(b'C', b"COMMIT\0"), tagged(b'Z', b"I")].concat();
        for piece in 1..=answer.len() {
            let faults = Arc::new(Faults::default());
            let mut conversation = begun(&faults);
            faults.arm(CommitFault::After, 1);
            for bytes in question.chunks(piece) {
                assert_eq!(conversation.client_sent(bytes), Verdict::Relay(bytes.len()));
            }
            let mut relayed = 0;
            let mut cut = false;
            for bytes in answer.chunks(piece) {
                match conversation.server_sent(bytes) {
                    Verdict::Relay(count) => relayed += count,
                    Verdict::Cut => cut = true,
                }
            }
            assert!(cut, "pieces of {piece}");
            // A piece that holds the end of the COMMIT's answer is withheld as a whole.
            assert!(relayed == first.len() || piece > tagged(b'C', b"COMMIT\0").len(), "pieces of {piece}: {relayed} relayed");
            assert_eq!(faults.done(), 1);
        }
    }

    #[test]
    fn the_counted_commit_is_cut_and_no_other() {
        let faults = Arc::new(Faults::default());
        let mut conversation = begun(&faults);
        faults.arm(CommitFault::Before, 2);
        let commit = tagged(b'Q', b"COMMIT\0");
        assert_eq!(conversation.client_sent(&tagged(b'Q', b"COMMIT PREPARED 'x'\0")), Verdict::Relay(25));
        assert_eq!(conversation.client_sent(&commit), Verdict::Relay(commit.len()));
        assert_eq!(conversation.client_sent(&commit), Verdict::Cut);
        assert_eq!(begun(&faults).client_sent(&commit), Verdict::Relay(commit.len()));
    }
}
