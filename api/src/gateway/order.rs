//! What supervisors are sent: start orders, with everything that is needed to run a command, and steers with their files; read from where it is kept, for many at a time.

use std::collections::HashMap;

use futures::FutureExt;
use towpath_chassis::{
    Chassis, Error, Result,
    group::{Answer, halving},
};
use towpath_run::{report::Reporter, view};
use towpath_schemas::{
    agent::Terminal,
    guest::{StartOrder, SteerOrder},
    id::RunId,
};

use super::Key;

/// Start orders for these supervisors, in order.
pub(super) async fn starts(chassis: &Chassis, reporters: &[Reporter]) -> Vec<Answer<StartOrder>> {
    halving(reporters, |part| read(chassis, part).boxed()).await
}

async fn read(chassis: &Chassis, reporters: &[Reporter]) -> Result<Vec<StartOrder>> {
    let runs: Vec<RunId> = reporters.iter().map(|reporter| reporter.run).collect();
    let mut origins = view::origins(&chassis.db, &runs).await?;
    let mut versions: Vec<_> = origins.values().map(|origin| (origin.agent, origin.agent_version)).collect();
    versions.sort_unstable();
    versions.dedup();
    let definitions = towpath_agent::definitions(&chassis.db, &versions).await?;
    let places: Vec<_> = reporters.iter().map(|reporter| (reporter.tenant, reporter.run)).collect();
    let mut inputs = towpath_file::inputs(&chassis.db, &places).await?;
    reporters
        .iter()
        .map(|reporter| {
            let origin = origins.remove(&reporter.run).ok_or_else(|| Error::broken(format!("{} is not there", reporter.run)))?;
            let definition = definitions
                .get(&(origin.agent, origin.agent_version))
                .cloned()
                .ok_or_else(|| Error::broken(format!("version {} of agent `{}` is not there", origin.agent_version, origin.agent_name)))?;
            Ok(StartOrder {
                run: reporter.run,
                session: origin.session,
                epoch: reporter.epoch,
                agent: origin.agent_name,
                mode: origin.mode,
                command: definition.command,
                env: definition.env,
                prompt: origin.prompt,
                instructions: definition.instructions,
                files: inputs.remove(&reporter.run).unwrap_or_default().run,
                terminal: definition.terminal.unwrap_or(Terminal::Pipes),
                steering: definition.steering.format,
                contract: definition.contract,
                output_bytes: chassis.config.limits.file_bytes,
                grace_s: u32::try_from(origin.grace_s).unwrap_or(0),
                idle_s: definition.limits.idle_s,
            })
        })
        .collect()
}

/// The open steers that these sandboxes' supervisors may not have yet, in order and with their files.
pub(super) async fn steers(chassis: &Chassis, keys: &[Key]) -> Result<HashMap<RunId, Vec<SteerOrder>>> {
    let mut steers: HashMap<RunId, Vec<SteerOrder>> = HashMap::new();
    for (run, order) in towpath_steer::to_send(&chassis.db, keys).await? {
        steers.entry(run).or_default().push(order);
    }
    if steers.is_empty() {
        return Ok(steers);
    }
    let runs: Vec<RunId> = steers.keys().copied().collect();
    let places: Vec<_> = view::origins(&chassis.db, &runs).await?.into_iter().map(|(run, origin)| (origin.tenant, run)).collect();
    for (run, inputs) in towpath_file::inputs(&chassis.db, &places).await? {
        for (steer, file) in inputs.steers {
            if let Some(order) = steers.get_mut(&run).and_then(|orders| orders.iter_mut().find(|order| order.steer == steer)) {
                order.files.push(file);
            }
        }
    }
    Ok(steers)
}
