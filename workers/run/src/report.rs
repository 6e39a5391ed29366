//! What supervisors say, applied under epoch and incarnation (FENCED). Each word may come any number of times; what many say at once shares a transaction.

mod hello;
mod take;

use std::time::Duration;

use towpath_chassis::{
    Chassis, Result,
    group::{Answer, Group, Lanes},
};
use towpath_schemas::{
    guest::{Exit, Hello, SteerEnd},
    id::{RunId, SteerId, TenantId},
};

pub use hello::hellos;
pub(crate) use take::note_steers;
pub use take::reports;

/// Transactions at a time, of hellos and of reports each, and members of one.
const LANES: Lanes = Lanes { lanes: 2, most: 256, limit: Duration::from_secs(20) };
/// A result may have a MiB, so fewer of them come together.
const RESULTS: Lanes = Lanes { most: 16, ..LANES };

/// Who reports: a supervisor process that was bound to its epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reporter {
    pub tenant: TenantId,
    pub run: RunId,
    pub epoch: i32,
    pub incarnation: String,
}

/// The answer to a hello.
#[derive(Debug, Clone)]
pub enum Greeting {
    /// Bound, now or before. `stop`: the end that is wanted already.
    Welcome {
        reporter: Reporter,
        sealed: u64,
        stop: Option<Stop>,
    },
    Fenced(&'static str),
}

/// The order to stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stop {
    pub grace_s: u32,
    pub reason: String,
}

/// One thing that a supervisor says of its run.
#[derive(Debug, Clone)]
pub enum Report {
    /// A step of the start.
    Step { step: String, detail: Option<String> },
    /// The command and all its children have ended; why, when the exit does not tell: (code, sentence).
    Ended { exit: Exit, cause: Option<(String, Option<String>)> },
    /// The result's text; the first one of an epoch counts.
    Result { text: String, truncated: bool },
    /// An output that is in the store.
    Output { name: String, size: u64, sha256: [u8; 32], object_key: String },
    /// An output that is not kept, and why.
    OutputUnavailable { name: String, size: u64, reason: String },
    /// These steers are about to be sent. They are marked before they are: at a loss they are then `unknown` and never sent again.
    SteersSent(Vec<SteerId>),
    /// What became of steers.
    Steers(Vec<SteerEnd>),
}

/// The hellos and reports of one process.
#[derive(Clone)]
pub struct Reports {
    hellos: Group<Hello, Answer<Greeting>>,
    reports: Group<(Reporter, Report), Answer<bool>>,
    results: Group<(Reporter, Report), Answer<bool>>,
}

impl Reports {
    pub fn start(chassis: &Chassis) -> Self {
        let own = chassis.clone();
        let hellos = Group::start(&chassis.tasks, LANES, move |batch: Vec<Hello>| {
            let chassis = own.clone();
            async move { hellos(&chassis, &batch).await }
        });
        let taking = |lanes| {
            let own = chassis.clone();
            Group::start(&chassis.tasks, lanes, move |batch: Vec<(Reporter, Report)>| {
                let chassis = own.clone();
                async move { reports(&chassis, &batch).await }
            })
        };
        Self { hellos, reports: taking(LANES), results: taking(RESULTS) }
    }

    /// Binds a supervisor to its epoch, or finds that it is bound, or fences it. The start order may go out only after this has returned.
    pub async fn hello(&self, hello: Hello) -> Result<Greeting> {
        Ok(self.hellos.submit(hello).await??)
    }

    /// Returns once the report is committed. False when the reporter's word does not count (any more); steers may then not be sent.
    pub async fn tell(&self, reporter: &Reporter, report: Report) -> Result<bool> {
        let group = if matches!(report, Report::Result { .. }) { &self.results } else { &self.reports };
        Ok(group.submit((reporter.clone(), report)).await??)
    }
}

/// What a gateway asks about its connections now and then, and after an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub run: RunId,
    pub epoch: i32,
    /// A newer epoch, or nobody wants it.
    pub fenced: bool,
    pub stop: Option<Stop>,
    /// Everything is kept: it may leave.
    pub release: bool,
}

pub async fn standings(chassis: &Chassis, connected: &[(RunId, i32)]) -> Result<Vec<Standing>> {
    crate::view::standings(&chassis.db, connected).await
}
