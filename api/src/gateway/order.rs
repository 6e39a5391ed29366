//! What supervisors are sent: start orders, with everything that is needed to run a command, many at a time; steers with their files.

use futures::FutureExt;
use towpath_chassis::{
    Chassis, Error, Result,
    group::{Answer, halving},
};
use towpath_run::{report::Reporter, view};
use towpath_schemas::{
    agent::Mode,
    guest::{StartOrder, SteerOrder},
    id::RunId,
};

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
    let mut outputs = towpath_file::restorable(&chassis.db, &places).await?;
    reporters
        .iter()
        .map(|reporter| {
            let origin = origins.remove(&reporter.run).ok_or_else(|| Error::broken(format!("{} is not there", reporter.run)))?;
            let definition = definitions
                .get(&(origin.agent, origin.agent_version))
                .cloned()
                .ok_or_else(|| Error::broken(format!("version {} of agent `{}` is not there", origin.agent_version, origin.agent_name)))?;
            let terminal = definition.terminal_in(origin.mode);
            Ok(StartOrder {
                run: reporter.run,
                session: origin.session,
                epoch: reporter.epoch,
                agent: origin.agent_name,
                mode: match origin.mode {
                    Mode::OneShot => "one_shot",
                    Mode::Interactive => "interactive",
                }
                .to_owned(),
                command: definition.command,
                env: definition.env,
                prompt: origin.prompt,
                instructions: definition.instructions,
                files: inputs.remove(&reporter.run).unwrap_or_default().run,
                restore: outputs.remove(&reporter.run).unwrap_or_default(),
                terminal,
                steering: definition.steering.format,
                contract: definition.contract,
                output_bytes: chassis.config.limits.file_bytes,
                grace_s: u32::try_from(origin.grace_s).unwrap_or(0),
                idle_s: definition.limits.idle_s,
                fence_s: definition.fence_after,
            })
        })
        .collect()
}

/// The next open steers of a run that its supervisor may not have yet, in order and with their files.
pub(super) async fn steers(chassis: &Chassis, reporter: &Reporter, again: bool, after: i64) -> Result<Vec<SteerOrder>> {
    let mut steers = towpath_steer::to_send(&chassis.db, reporter.run, reporter.epoch, again, after).await?;
    if steers.is_empty() {
        return Ok(steers);
    }
    let inputs = towpath_file::inputs(&chassis.db, &[(reporter.tenant, reporter.run)]).await?.remove(&reporter.run).unwrap_or_default();
    for (steer, file) in inputs.steers {
        if let Some(order) = steers.iter_mut().find(|order| order.steer == steer) {
            order.files.push(file);
        }
    }
    Ok(steers)
}
