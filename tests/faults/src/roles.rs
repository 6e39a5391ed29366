//! What every process of Towpath would run, enumerated: a role that is not in here cannot be covered, and one that is in here must be.

use anyhow::{Context, Result};
use towpath_chassis::{consume::Handler, idempotency, outbox, sweep::Sweep, timer::Timers};

use crate::{Process, world::HOST};

/// All handlers of a process.
pub fn handlers(process: &Process) -> Vec<Handler> {
    let mut handlers = towpath_run::handlers();
    handlers.extend([
        process.sealers.handler(),
        towpath_delivery::handler(towpath_channel::to_thread()),
        towpath_channel::handler(),
        process.host.handler(HOST),
    ]);
    handlers
}

/// The handler of that name.
pub fn handler(process: &Process, name: &str) -> Result<Handler> {
    handlers(process).into_iter().find(|handler| handler.name == name).with_context(|| format!("no handler {name}"))
}

/// All sweeps of the clock.
pub fn sweeps() -> Vec<Sweep> {
    let own = [
        Sweep::new("outbox relay", std::time::Duration::from_secs(1), outbox::relay),
        Sweep::new("old idempotency keys", std::time::Duration::from_secs(600), idempotency::sweep),
    ];
    let rooms = [
        towpath_session::sweeps(),
        towpath_run::sweep::sweeps(),
        towpath_run::retention::sweeps(),
        towpath_sandbox::sweeps(),
        towpath_transcript::sweeps(),
        towpath_delivery::sweeps(),
        towpath_file::sweeps(),
        towpath_channel::sweeps(),
    ];
    own.into_iter().chain(rooms.into_iter().flatten()).collect()
}

/// All sweeps of a host.
pub fn host_sweeps(process: &Process) -> Vec<Sweep> {
    let host = process.host.clone();
    let workspaces = towpath_run::retention::host_sweep(move |session| {
        let host = host.clone();
        async move { host.remove_workspace(session).await }
    });
    process.host.sweeps().into_iter().chain([workspaces]).collect()
}

/// The sweep of that name, of the clock or of the process's host.
pub fn sweep(process: &Process, name: &str) -> Result<Sweep> {
    sweeps().into_iter().chain(host_sweeps(process)).find(|sweep| sweep.name == name).with_context(|| format!("no sweep {name}"))
}

/// All timers.
pub fn timers() -> Timers {
    towpath_channel::timers(towpath_delivery::timers(towpath_run::sweep::timers(Timers::default())))
}

/// Every name that a scene must cover: `handler …`, `sweep …`, `timer …`.
pub fn names(process: &Process) -> Vec<String> {
    let handlers = handlers(process).into_iter().map(|handler| format!("handler {}", handler.name));
    let sweeps = sweeps().into_iter().chain(host_sweeps(process)).map(|sweep| format!("sweep {}", sweep.name));
    let timers = timers().kinds().into_iter().map(|kind| format!("timer {kind}"));
    handlers.chain(sweeps).chain(timers).collect()
}
