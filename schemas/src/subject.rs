//! The only builder of NATS subjects. The tenant's id stands in every subject that carries a tenant's data (invariant WALLED).

use crate::{
    id::{DeliveryId, InboundId, RunId, TenantId},
    limit::FRAMES_PER_BLOCK,
};

/// The three streams, by name.
pub const COMMAND: &str = "COMMAND";
pub const OUTPUT: &str = "OUTPUT";
pub const EVENT: &str = "EVENT";

pub const COMMAND_ALL: &str = "command.>";
pub const OUTPUT_ALL: &str = "output.>";
pub const EVENT_ALL: &str = "event.>";

/// A pool's name or a host's as one subject token: anything but ASCII letters, digits and dashes becomes `-`.
pub fn token(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' }).collect()
}

/// Admit as many waiting runs as fit into this pool.
pub fn admit(pool: &str) -> String {
    format!("command.admit.{}", token(pool))
}
pub const ADMIT_ALL: &str = "command.admit.>";

/// Something about a sandbox on this host is to be done; no other host may take it.
pub fn host(host: &str, run: RunId) -> String {
    format!("command.host.{}.{run}", token(host))
}
pub fn host_all(host: &str) -> String {
    format!("command.host.{}.>", token(host))
}

/// An epoch's frames wait to be sealed.
pub fn seal(tenant: TenantId, run: RunId, epoch: i32) -> String {
    format!("command.seal.{tenant}.{run}.{epoch}")
}
pub const SEAL_ALL: &str = "command.seal.>";

/// A sandbox is gone or cannot be.
pub fn observed(tenant: TenantId, run: RunId, epoch: i32) -> String {
    format!("command.run.{tenant}.{run}.observed.{epoch}")
}
/// Everything that is for the run room.
pub const RUN_ALL: &str = "command.run.>";

/// An epoch's record is closed.
pub fn sealed(tenant: TenantId, run: RunId, epoch: i32) -> String {
    format!("command.run.{tenant}.{run}.sealed.{epoch}")
}

/// A delivery is due.
pub fn deliver(tenant: TenantId, delivery: DeliveryId) -> String {
    format!("command.deliver.{tenant}.{delivery}")
}
pub const DELIVER_ALL: &str = "command.deliver.>";

/// A message came in.
pub fn intake(tenant: TenantId, inbound: InboundId) -> String {
    format!("command.intake.{tenant}.{inbound}")
}
pub const INTAKE_ALL: &str = "command.intake.>";

/// One transcript frame. The block number lets a purge name whole sealed blocks, which means the same in any incarnation of the stream.
pub fn output(tenant: TenantId, run: RunId, epoch: i32, seq: u64) -> String {
    output_block(tenant, run, epoch, block(seq))
}
pub fn output_block(tenant: TenantId, run: RunId, epoch: i32, block: u64) -> String {
    format!("output.{tenant}.{run}.{epoch}.{block}")
}
pub fn output_epoch(tenant: TenantId, run: RunId, epoch: i32) -> String {
    format!("output.{tenant}.{run}.{epoch}.*")
}
pub fn output_run(tenant: TenantId, run: RunId) -> String {
    format!("output.{tenant}.{run}.>")
}
/// Frame `seq` of an epoch lives in this block.
pub fn block(seq: u64) -> u64 {
    seq / FRAMES_PER_BLOCK
}

/// What viewers of a run's terminal say, for the gateway that its sandbox is connected to. The body is a viewer's id and [`crate::guest::ViewerSays`], the reply subject is the viewer's own.
pub fn terminal(tenant: TenantId, run: RunId) -> String {
    format!("terminal.{tenant}.{run}")
}

/// A fact about a run, for listeners; `kind` is [`crate::event::Kind::token`].
pub fn event(tenant: TenantId, run: RunId, kind: &str) -> String {
    format!("event.{tenant}.{run}.{kind}")
}
pub fn event_run(tenant: TenantId, run: RunId) -> String {
    format!("event.{tenant}.{run}.*")
}
