//! The table of moves of a run: design section 3, "States". Pure: values in, values out. What follows from a move is returned as effects; `apply.rs` performs them in the
//! transaction that moves the row, and the database refuses whatever is not in this table.

use towpath_schemas::{
    ErrorCode,
    body::RunState,
    guest::{Exit, FENCE_RAN_OUT},
};

/// Starts of a sandbox that never bound, before the run fails.
pub const START_RETRIES: i32 = 3;
/// Epochs that a run with `on_lost = "restart"` may lose, before it fails.
pub const MAX_RESTARTS: i32 = 3;

/// What of a run decides its moves.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Machine {
    pub state: RunState,
    /// The end that was asked for; set once.
    pub wanted: Option<RunState>,
    pub epoch: i32,
    /// Epochs up to here may have been given out before a backup was restored; none of them is given out again.
    pub epoch_floor: i32,
    /// The sandbox of `epoch` may still execute.
    pub active: bool,
    /// The supervisor process bound to `epoch`.
    pub incarnation: Option<String>,
    pub starts: i32,
    pub restarts: i32,
    /// `on_lost = "restart"`, which needs the fence.
    pub restartable: bool,
    /// What its sandbox's memory is limited to.
    pub memory_bytes: Option<u64>,
    pub exited: Option<Exited>,
    pub reason: Option<String>,
    pub message: Option<String>,
}

/// How the command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exited {
    pub exit: Exit,
    /// A cause that outweighs the exit code: `command_not_found`, `disk_limit`, …
    pub reason: Option<String>,
    pub message: Option<String>,
}

impl std::hash::Hash for Exited {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (self.exit.code, self.exit.signal, self.exit.oom, &self.reason, &self.message).hash(state);
    }
}

/// What happens to a run.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum On {
    /// A slot was taken for it.
    Admitted,
    /// A supervisor said hello.
    Bound {
        epoch: i32,
        incarnation: String,
    },
    Cancel,
    /// The run's own deadline has passed.
    Deadline,
    /// It worked longer than it may (`maximum`), or nothing moved for too long (`idle`).
    TimeLimit {
        reason: &'static str,
    },
    /// The sandbox of this epoch did not bind in time.
    StartDeadline {
        epoch: i32,
    },
    /// The backend can never start it.
    Refused {
        epoch: i32,
        reason: String,
        message: String,
    },
    /// The supervisor says that the command and all its children have ended.
    Ended {
        epoch: i32,
        incarnation: String,
        exited: Exited,
    },
    /// The sandbox of this epoch is proved to be gone.
    Absent {
        epoch: i32,
    },
    /// A person's word that it is gone.
    Abandon,
    /// `settle_wanted` has passed since `wanted` was set.
    WantedOverdue,
    /// The record of this epoch is closed, by its end record or by a gap marker.
    Sealed {
        epoch: i32,
    },
    /// `seal_max` has passed since the command ended.
    SealOverdue {
        epoch: i32,
    },
}

/// The reason that a supervisor gives when it ended a command because nothing moved.
const IDLE: &str = "idle";

impl On {
    /// The word in the history.
    pub fn word(&self) -> &'static str {
        match self {
            On::Admitted => "admitted",
            On::Bound { .. } => "bound",
            On::Cancel => "cancel",
            On::Deadline => "deadline",
            On::TimeLimit { .. } => "time_limit",
            On::StartDeadline { .. } => "start_deadline",
            On::Refused { .. } => "refused",
            On::Ended { .. } => "ended",
            On::Absent { .. } => "absent",
            On::Abandon => "abandon",
            On::WantedOverdue => "wanted_overdue",
            On::Sealed { .. } => "sealed",
            On::SealOverdue { .. } => "seal_overdue",
        }
    }
}

/// What follows from a move, beside the row itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// A sandbox of the new epoch is to be created and must bind in time.
    CreateSandbox,
    /// The record of the epoch begins.
    OpenRecord,
    ReleaseSlot,
    ReleaseWorkspace,
    /// Nothing executes any more: the sandbox may be cut off for as long as it takes to hand over what it has.
    LiftFence,
    /// Nothing that the epoch still says counts: take what JetStream holds, then mark the gap.
    LoseEpoch,
    /// The sandbox is not wanted: fence it when it comes.
    DropSandbox,
    /// It waits for a slot again.
    Requeue,
    /// Tell the sandbox to stop; settle in any case a while later.
    Stop,
    /// The record is awaited, `seal_max` at most.
    AwaitRecord,
    /// It has ended: deliveries are owed, open steers end.
    Settle,
}

/// The answer of [`decide`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Move(Box<Machine>, Vec<Effect>),
    /// Nothing more happens: it came late, twice, or from an older epoch or another incarnation (FENCED, ONCE).
    Unchanged,
    /// The asker is told that it cannot be.
    Refused(ErrorCode, &'static str),
}

/// What `on` makes of a run.
pub fn decide(run: &Machine, on: &On) -> Verdict {
    use RunState::{Canceled, Failed, Finishing, Queued, Running, Starting, Stopping, TimedOut};
    if let Some(epoch) = epoch_of(on)
        && epoch != run.epoch
    {
        return Verdict::Unchanged;
    }
    let mut next = run.clone();
    match (run.state, on) {
        (Queued, On::Admitted) => {
            next.state = Starting;
            next.epoch = run.epoch.max(run.epoch_floor) + 1;
            next.active = true;
            next.incarnation = None;
            next.exited = None;
            next.explain(None, None);
        }
        (Queued, On::Cancel) => next.end(Canceled, "canceled", "canceled before it was started"),
        (Queued, On::Deadline) => next.end(TimedOut, "deadline", "its deadline passed before it was started"),

        (Starting, On::Bound { incarnation, .. }) => {
            next.state = Running;
            next.incarnation = Some(incarnation.clone());
        }
        (Starting, On::Cancel) => next.end(Canceled, "canceled", "canceled before the command was started"),
        (Starting, On::Deadline) => next.end(TimedOut, "deadline", "its deadline passed before the command was started"),
        (Starting, On::StartDeadline { .. }) => next.end(Failed, "start_deadline", "the sandbox did not start in time"),
        (Starting, On::Refused { reason, message, .. }) => next.end(Failed, reason, message),
        (Starting, On::Absent { .. } | On::Abandon) if run.starts < START_RETRIES => {
            next.state = Queued;
            next.active = false;
            next.starts += 1;
            next.explain(Some("start_retry"), Some("the sandbox was gone before it started anything; it is started again"));
        }
        (Starting, On::Absent { .. } | On::Abandon) => {
            next.end(Failed, "start_failed", "the sandbox was gone before it started anything, each time it was tried")
        }

        // Its lease ran out and it ended the command by itself; that it could still tell so makes no difference.
        (Running, On::Ended { incarnation, exited, .. })
            if run.is_bound_to(incarnation) && exited.reason.as_deref() == Some(FENCE_RAN_OUT) && run.may_restart() =>
        {
            next.restart();
        }
        (Running, On::Ended { incarnation, exited, .. }) if run.is_bound_to(incarnation) => next.command_ended(exited),
        (Running, On::Cancel) => next.want(Canceled, "canceled", "asked to stop"),
        (Running, On::Deadline) => next.want(TimedOut, "deadline", "its deadline has passed"),
        (Running, On::TimeLimit { reason }) => next.want(TimedOut, reason, "it ran into a time limit"),
        (Running, On::Absent { .. } | On::Abandon) if run.may_restart() => next.restart(),
        (Running, On::Absent { .. } | On::Abandon) => {
            next.state = Finishing;
            next.active = false;
            next.explain(Some("sandbox_lost"), Some("its sandbox was lost"));
        }

        (Stopping, On::Ended { incarnation, exited, .. }) if run.is_bound_to(incarnation) => next.command_ended(exited),
        (Stopping, On::Absent { .. } | On::Abandon) => {
            next.state = Finishing;
            next.active = false;
        }
        (Stopping | Finishing, On::WantedOverdue) if run.wanted.is_some() => next.settle_as_wanted(),

        (Finishing, On::Sealed { .. }) => next.settle(),
        (Finishing, On::SealOverdue { .. }) => match run.wanted {
            Some(_) => next.settle_as_wanted(),
            None => {
                next.state = Failed;
                next.explain(Some("record_incomplete"), Some("its transcript could not be completed in time"));
            }
        },
        // The command has ended; only its record can still be lost.
        (Finishing, On::Absent { .. } | On::Abandon) => return Verdict::Move(Box::new(next), vec![Effect::LoseEpoch, Effect::DropSandbox]),
        (Finishing, On::Cancel) => return Verdict::Unchanged,

        // Settled by `wanted` while the sandbox went on: the late report frees slot and workspace and changes nothing that was said.
        (state, On::Ended { incarnation, .. }) if state.ended() && run.active && run.is_bound_to(incarnation) => next.active = false,
        (state, On::Absent { .. } | On::Abandon) if state.ended() && run.active => next.active = false,
        (state, On::Absent { .. }) if state.ended() && run.incarnation.is_some() => {
            return Verdict::Move(Box::new(next), vec![Effect::LoseEpoch, Effect::DropSandbox]);
        }

        (Queued, On::Abandon) => return Verdict::Refused(ErrorCode::BadRequest, "the run has no sandbox that could be gone"),
        (
            Queued | Starting | Running | Stopping | Finishing | RunState::Succeeded | Failed | Canceled | TimedOut,
            On::Admitted
            | On::Bound { .. }
            | On::Cancel
            | On::Deadline
            | On::TimeLimit { .. }
            | On::StartDeadline { .. }
            | On::Refused { .. }
            | On::Ended { .. }
            | On::Absent { .. }
            | On::Abandon
            | On::WantedOverdue
            | On::Sealed { .. }
            | On::SealOverdue { .. },
        ) => return Verdict::Unchanged,
    }
    let effects = effects(run, &next, on);
    Verdict::Move(Box::new(next), effects)
}

fn epoch_of(on: &On) -> Option<i32> {
    match on {
        On::Bound { epoch, .. }
        | On::StartDeadline { epoch }
        | On::Refused { epoch, .. }
        | On::Ended { epoch, .. }
        | On::Absent { epoch }
        | On::Sealed { epoch }
        | On::SealOverdue { epoch } => Some(*epoch),
        On::Admitted | On::Cancel | On::Deadline | On::TimeLimit { .. } | On::Abandon | On::WantedOverdue => None,
    }
}

/// Everything that follows from the difference of two rows.
fn effects(old: &Machine, new: &Machine, on: &On) -> Vec<Effect> {
    use RunState::{Finishing, Queued, Running, Starting};
    let mut effects = Vec::new();
    let entered = |state| old.state != state && new.state == state;
    if entered(Starting) {
        effects.push(Effect::CreateSandbox);
    }
    if entered(Running) {
        effects.push(Effect::OpenRecord);
    }
    if old.wanted.is_none() && new.wanted.is_some() {
        effects.push(Effect::Stop);
    }
    let lost = matches!(on, On::Absent { .. } | On::Abandon) || new.restarts > old.restarts;
    if lost && old.incarnation.is_some() {
        effects.push(Effect::LoseEpoch);
    }
    if lost || (old.state == Starting && new.state != Running) {
        effects.push(Effect::DropSandbox);
    }
    if old.active && !new.active {
        effects.push(Effect::ReleaseSlot);
        if matches!(on, On::Ended { .. }) && !lost {
            effects.push(Effect::LiftFence);
        }
    }
    if old.holds_workspace() && !new.holds_workspace() {
        effects.push(Effect::ReleaseWorkspace);
    }
    if entered(Queued) {
        effects.push(Effect::Requeue);
    }
    if entered(Finishing) {
        effects.push(Effect::AwaitRecord);
    }
    if !old.state.ended() && new.state.ended() {
        effects.push(Effect::Settle);
    }
    effects
}

impl Machine {
    /// A run as it is accepted.
    pub fn accepted(restartable: bool) -> Self {
        Self {
            state: RunState::Queued,
            wanted: None,
            epoch: 0,
            epoch_floor: 0,
            active: false,
            incarnation: None,
            starts: 0,
            restarts: 0,
            restartable,
            memory_bytes: None,
            exited: None,
            reason: None,
            message: None,
        }
    }

    /// Its sandbox may still touch the session's files, or its outputs are still being taken from there.
    pub fn holds_workspace(&self) -> bool {
        self.active || matches!(self.state, RunState::Starting | RunState::Running | RunState::Stopping | RunState::Finishing)
    }

    fn may_restart(&self) -> bool {
        self.restartable && self.restarts < MAX_RESTARTS
    }

    fn restart(&mut self) {
        self.state = RunState::Queued;
        self.active = false;
        self.restarts += 1;
        self.explain(Some("restart"), Some("its sandbox was lost; it is started again"));
    }

    fn is_bound_to(&self, incarnation: &str) -> bool {
        self.incarnation.as_deref() == Some(incarnation)
    }

    fn explain(&mut self, reason: Option<&str>, message: Option<&str>) {
        self.reason = reason.map(str::to_owned);
        self.message = message.map(str::to_owned);
    }

    fn end(&mut self, state: RunState, reason: &str, message: &str) {
        self.state = state;
        self.active = false;
        self.explain(Some(reason), Some(message));
    }

    fn want(&mut self, wanted: RunState, reason: &str, message: &str) {
        self.state = RunState::Stopping;
        self.wanted = Some(wanted);
        self.explain(Some(reason), Some(message));
    }

    fn command_ended(&mut self, exited: &Exited) {
        self.state = RunState::Finishing;
        self.active = false;
        self.exited = Some(exited.clone());
    }

    fn settle_as_wanted(&mut self) {
        if let Some(wanted) = self.wanted {
            self.state = wanted;
        }
    }

    fn settle(&mut self) {
        if self.wanted.is_some() {
            return self.settle_as_wanted();
        }
        let Some(exited) = self.exited.clone() else {
            self.state = RunState::Failed;
            return self.explain(Some("sandbox_lost"), Some("its sandbox was lost before the command's end was known"));
        };
        let (state, reason, message) = match exited {
            Exited { reason: Some(reason), .. } if reason == IDLE => {
                (RunState::TimedOut, Some(reason), Some("nothing was printed or typed for as long as its agent allows".to_owned()))
            }
            Exited { reason: Some(reason), .. } if reason == FENCE_RAN_OUT => (
                RunState::Failed,
                Some(reason),
                Some("it was cut off from every gateway for as long as its agent's fence_after allows".to_owned()),
            ),
            Exited { reason: Some(reason), message, .. } => (RunState::Failed, Some(reason), message),
            Exited { exit: Exit { code: Some(0), .. }, .. } => (RunState::Succeeded, None, None),
            Exited { exit: Exit { oom: Some(true), .. }, .. } => {
                (RunState::Failed, Some("out_of_memory".to_owned()), Some(out_of_memory(self.memory_bytes)))
            }
            Exited { exit: Exit { code: Some(code), .. }, .. } => {
                (RunState::Failed, Some("exit_code".to_owned()), Some(format!("the command exited with code {code}")))
            }
            Exited { exit: Exit { signal: Some(signal), .. }, .. } => {
                (RunState::Failed, Some("signal".to_owned()), Some(format!("the command was ended by signal {signal}")))
            }
            Exited { .. } => (RunState::Failed, Some("exit_unknown".to_owned()), Some("the command's exit is not known".to_owned())),
        };
        self.state = state;
        self.explain(reason.as_deref(), message.as_deref());
    }
}

/// The sentence for a command that the kernel killed for its memory.
fn out_of_memory(limit: Option<u64>) -> String {
    const MIB: u64 = 1024 * 1024;
    match limit {
        Some(bytes) if bytes % MIB == 0 => format!("out of memory (limit {} MiB)", bytes / MIB),
        Some(bytes) => format!("out of memory (limit {bytes} bytes)"),
        None => "out of memory (its sandbox has no limit of its own: its host had none left)".to_owned(),
    }
}

#[cfg(test)]
#[path = "state_model.rs"]
mod model;
