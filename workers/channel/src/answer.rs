//! One attempt to answer in a thread: what there is to say, said by the channel's own kind.

use towpath_chassis::{Chassis, Error, Result};
use towpath_delivery::{Due, state::Answer};
use towpath_schemas::{
    body::{Run, RunState},
    channel::Kind,
    id::{InboundId, RunId},
    limit::ANSWER_FILE_BYTES,
};

use crate::{
    circuit::{self, Attempt},
    intake, mail,
    message::{Attachment, Said},
    notice, slack, table,
};

pub async fn attempt(chassis: Chassis, due: Due) -> Result<Answer> {
    let Some(message) = due.inbound.or(due.run.map(|run| InboundId(run.uuid()))) else {
        return Ok(Answer::Refused("it answers nothing".to_owned()));
    };
    let Some(answering) = intake::table::answering(&chassis.db, due.tenant, message).await? else {
        return Ok(Answer::Refused("the channel of this thread was deleted".to_owned()));
    };
    if let Some(why) = notice::overtaken(&chassis, &due).await? {
        return Ok(Answer::Taken(why.to_owned()));
    }
    if let Some(held) = circuit::gate(&chassis, &answering).await? {
        return Ok(held);
    }
    let mut said = match (due.inbound, due.run) {
        (None, Some(run)) => match about_run(&chassis, &due, run).await {
            Ok(said) => said,
            Err(Error::Refused(problem)) => return Ok(Answer::Refused(problem.detail)),
            Err(error) => return Err(error),
        },
        _ => Said { text: due.body["text"].as_str().unwrap_or_default().to_owned(), ..Said::default() },
    };
    said.footer = due.run.map_or_else(|| answering.agent.clone(), |run| format!("{} · {run}", answering.agent));
    let secrets = match table::open_secrets(&chassis, answering.channel, answering.secrets.as_deref()) {
        Ok(secrets) => secrets,
        Err(error) => return Ok(Answer::Refused(error.to_string())),
    };
    let attempt = match answering.definition.kind() {
        Some(Kind::Mail(settings)) => mail::send::attempt(&chassis, &due, &answering, settings, &secrets, said).await?,
        Some(Kind::Slack(settings)) => slack::send::attempt(&chassis, &due, &answering, settings, &secrets, said).await?,
        None => Attempt::of(Answer::Held {
            after: circuit::LONGEST,
            why: "the channel is of a kind that this release does not know".to_owned(),
        }),
    };
    circuit::settle(&chassis, &answering, message, attempt).await
}

/// What there is to say of a run, and what goes along.
async fn about_run(chassis: &Chassis, due: &Due, id: RunId) -> Result<Said> {
    let mut run = towpath_run::view::run(&chassis.db, due.tenant, id).await?;
    if !due.is_about(towpath_delivery::About::RunEnded) {
        return Ok(Said { text: doubt(&run), ..Said::default() });
    }
    let (attachments, left_out) = outputs(chassis, due, id).await?;
    Ok(Said { text: ending(&mut run), attachments, left_out, footer: String::new() })
}

/// How the run ended, in Markdown.
fn ending(run: &mut Run) -> String {
    let result = run.result.take().filter(|result| !result.text.trim().is_empty());
    let why = run.message.take().or(run.reason.take()).unwrap_or_default();
    let mut text = match run.state {
        RunState::Succeeded => String::new(),
        RunState::Canceled => "The run was canceled.".to_owned(),
        RunState::TimedOut => format!("The run took too long and was ended. {why}"),
        _ => format!("The run failed. {why}"),
    };
    match result {
        Some(result) => {
            if !text.is_empty() {
                text.push_str("\n\n");
            }
            text.push_str(result.text.trim_end());
            if result.truncated {
                text.push_str("\n\n[cut here; the record of the run has the rest]");
            }
        }
        None if text.is_empty() => text.push_str("The run has ended without a result."),
        None => {}
    }
    text
}

fn doubt(run: &Run) -> String {
    format!("Nobody knows for 15 minutes whether the sandbox of {} is still there. It may go on by itself; an operator was told.", run.id)
}

/// The run's outputs that go along, and a line for each that does not.
async fn outputs(chassis: &Chassis, due: &Due, run: RunId) -> Result<(Vec<Attachment>, Vec<String>)> {
    let (mut taken, mut left) = (Vec::new(), Vec::new());
    let mut room = ANSWER_FILE_BYTES;
    for output in towpath_file::outputs(&chassis.db, due.tenant, run).await? {
        match output.object_key {
            None => left.push(format!("`{}` was not kept: {}", output.name, output.reason.unwrap_or_default())),
            Some(_) if output.size > room => left.push(format!("`{}` ({} bytes) is too large to go along", output.name, output.size)),
            Some(key) => {
                room -= output.size;
                let content = chassis.store.get_range(&key, 0, output.size).await?.to_vec();
                let name = output.name.rsplit('/').next().unwrap_or(&output.name).to_owned();
                taken.push(Attachment { name, media_type: "application/octet-stream".to_owned(), content });
            }
        }
    }
    Ok((taken, left))
}
