//! Which steers are known, what became of each, and which wait. Texts wait on disk, not in memory.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
};

use towpath_schemas::{
    guest::{FromGuest, SteerEnd, SteerOrder, SteerState},
    id::SteerId,
    limit::STEERS_OPEN,
};

use crate::folder;

/// Steers in the end record: as many of the latest as surely fit into it.
const RECORDED: usize = 4000;

pub struct Ledger {
    folder: PathBuf,
    journal: File,
    known: BTreeMap<SteerId, SteerState>,
    /// In the order of arrival.
    waiting: VecDeque<SteerId>,
    /// Not yet told on the current connection.
    untold: BTreeSet<SteerId>,
    connection: u64,
    closed: bool,
    input: bool,
}

impl Ledger {
    pub fn create(folder: PathBuf) -> io::Result<Self> {
        folder::make_private(&folder)?;
        let journal = OpenOptions::new().create(true).append(true).mode(0o600).open(folder.join("journal"))?;
        let (known, waiting, untold) = Default::default();
        Ok(Self { folder, journal, known, waiting, untold, connection: 0, closed: false, input: false })
    }

    /// Keeps a new steer; one whose id is known is dropped. After the end it has expired at once.
    pub fn take(&mut self, order: &SteerOrder) -> io::Result<()> {
        let id = order.steer;
        if self.known.contains_key(&id) {
            return Ok(());
        }
        if self.closed {
            self.set(id, SteerState::Expired);
            return Ok(());
        }
        if self.waiting.len() as i64 >= STEERS_OPEN {
            return Err(io::Error::other(format!("more than {STEERS_OPEN} steers wait")));
        }
        fs::write(self.path(id), serde_json::to_vec(order)?)?;
        self.known.insert(id, SteerState::Queued);
        self.waiting.push_back(id);
        Ok(())
    }

    fn path(&self, id: SteerId) -> PathBuf {
        self.folder.join(id.to_string())
    }

    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The next one to be written. It stays `queued` until [`Ledger::set`] says otherwise.
    pub fn pop(&mut self) -> io::Result<Option<SteerOrder>> {
        let Some(id) = self.waiting.pop_front() else { return Ok(None) };
        let order = serde_json::from_slice(&fs::read(self.path(id))?)?;
        fs::remove_file(self.path(id))?;
        Ok(Some(order))
    }

    /// Makes durable that the first byte of this one may be in the pipe from now on.
    pub fn record_intent(&mut self, id: SteerId) -> io::Result<()> {
        self.journal.write_all(format!("{id}\n").as_bytes())?;
        self.journal.sync_data()
    }

    pub fn set(&mut self, id: SteerId, state: SteerState) {
        if state == SteerState::Written {
            self.input = true;
        }
        self.known.insert(id, state);
        self.untold.insert(id);
    }

    /// Whether the command was given something since this was last asked.
    pub fn took_input(&mut self) -> bool {
        std::mem::take(&mut self.input)
    }

    /// From now on nothing is taken any more; what was not begun has surely not been taken.
    pub fn close(&mut self) -> Vec<SteerEnd> {
        self.closed = true;
        self.waiting.clear();
        let untaken: Vec<SteerId> = self.known.iter().filter(|(_, state)| **state == SteerState::Queued).map(|(id, _)| *id).collect();
        for id in untaken {
            self.set(id, SteerState::Expired);
        }
        let older = self.known.len().saturating_sub(RECORDED);
        self.known.iter().skip(older).map(|(steer, state)| SteerEnd { steer: *steer, state: *state }).collect()
    }

    pub fn next(&mut self, connection: u64) -> Option<FromGuest> {
        if self.connection != connection {
            self.connection = connection;
            self.untold = self.known.iter().filter(|(_, state)| **state != SteerState::Queued).map(|(id, _)| *id).collect();
        }
        let steer = self.untold.pop_first()?;
        self.known.get(&steer).map(|state| FromGuest::Steer { steer, state: *state })
    }
}
