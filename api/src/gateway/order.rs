//! The start order: everything that a supervisor needs to run the command, read from where it is kept.

use towpath_chassis::{Chassis, Result};
use towpath_run::{report::Reporter, view};
use towpath_schemas::{
    agent::{AgentDefinition, Terminal},
    guest::{StartOrder, SteerOrder},
};

pub(super) async fn start(chassis: &Chassis, reporter: &Reporter) -> Result<StartOrder> {
    let origin = view::origin(&chassis.db, reporter.run).await?;
    let definition: AgentDefinition = towpath_agent::definition(&chassis.db, origin.agent, origin.agent_version).await?;
    let (files, _) = towpath_file::inputs(&chassis.db, reporter.tenant, reporter.run).await?;
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
        files,
        terminal: definition.terminal.unwrap_or(Terminal::Pipes),
        steering: definition.steering.format,
        contract: definition.contract,
        output_bytes: chassis.config.limits.file_bytes,
        grace_s: u32::try_from(origin.grace_s).unwrap_or(0),
        idle_s: definition.limits.idle_s,
    })
}

/// The run's open steers that its supervisor may not have yet, in order and with their files.
pub(super) async fn steers(chassis: &Chassis, reporter: &Reporter) -> Result<Vec<SteerOrder>> {
    let mut steers: Vec<SteerOrder> =
        towpath_steer::to_send(&chassis.db, &[(reporter.run, reporter.epoch)]).await?.into_iter().map(|(_, steer)| steer).collect();
    if steers.is_empty() {
        return Ok(steers);
    }
    let (_, files) = towpath_file::inputs(&chassis.db, reporter.tenant, reporter.run).await?;
    for (steer, file) in files {
        if let Some(order) = steers.iter_mut().find(|order| order.steer == steer) {
            order.files.push(file);
        }
    }
    Ok(steers)
}
