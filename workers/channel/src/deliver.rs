//! One attempt to answer in a thread. `unknown` is resolved by `same_id`: the mail is sent again under the same Message-ID, and a receiver who sees both
//! tells by it that they are one.

use std::fmt::Write;

use lettre::address::Envelope;
use towpath_chassis::{Chassis, Error, Result};
use towpath_delivery::{Due, state::Answer};
use towpath_schemas::{
    body::{Run, RunState},
    id::ThreadId,
    limit::ANSWER_FILE_BYTES,
};

use crate::{
    intake,
    mail::{
        compose::{self, compose},
        read::Attachment,
    },
    smtp, table, token,
};

pub async fn attempt(chassis: Chassis, due: Due) -> Result<Answer> {
    let Ok(thread) = due.target.parse::<ThreadId>() else { return Ok(Answer::Refused("the target is no thread".to_owned())) };
    let Some(answering) = intake::table::answering(&chassis.db, due.tenant, thread, due.run).await? else {
        return Ok(Answer::Refused("the channel of this thread was deleted".to_owned()));
    };
    let mut run = match towpath_run::view::run(&chassis.db, due.tenant, due.run).await {
        Ok(run) => run,
        Err(Error::Refused(problem)) => return Ok(Answer::Refused(problem.detail)),
        Err(error) => return Err(error),
    };
    let ended = due.body["type"] == towpath_delivery::About::RunEnded.event();
    let (attachments, too_large) = if ended { outputs(&chassis, &due).await? } else { (Vec::new(), Vec::new()) };
    let mut text = if ended { ending(&mut run) } else { doubt(&run) };
    for name in too_large {
        let _ = write!(text, "\n\n{name}");
    }
    let _ = write!(text, "\n\n---\n\n{} · {}", answering.agent, run.id);
    let mail = &answering.definition.mail;
    let Some((from, domain)) = mail.addresses.first().and_then(|from| Some((from, from.rsplit_once('@')?.1))) else {
        return Ok(Answer::Refused("the channel has no address".to_owned()));
    };
    let message_id = format!("{}.1@{domain}", due.id);
    let answer = compose::Answer {
        from: from.clone(),
        name: answering.agent.clone(),
        reply_to: token::address(&chassis.secrets, from, thread),
        to: answering.head.to.clone(),
        subject: answering.head.subject.clone(),
        message_id: message_id.clone(),
        in_reply_to: answering.head.message_id.clone(),
        references: answering.head.references.clone(),
        text,
        attachments,
    };
    let composed = match compose(&answer) {
        Ok(composed) => composed,
        Err(error) => return Ok(Answer::Refused(error.to_string())),
    };
    // A bounce comes back to the channel's own address; its report carries the Message-ID.
    let Ok(envelope) = envelope(from, &answer.to) else { return Ok(Answer::Refused(format!("`{}` is no mail address", answer.to))) };
    // Known before anyone can answer it.
    let mut work = chassis.begin().await?;
    intake::table::insert_message(&mut work, answering.channel, &message_id, thread, due.tenant).await?;
    work.commit().await?;
    let secrets = match table::open_secrets(&chassis, answering.channel, answering.secrets.as_deref()) {
        Ok(secrets) => secrets,
        Err(error) => return Ok(Answer::Refused(error.to_string())),
    };
    let password = secrets.get("smtp_password").map(String::as_str);
    Ok(smtp::send(&chassis, &mail.smtp, password, domain, &envelope, &composed.formatted()).await)
}

fn envelope(from: &str, to: &str) -> std::result::Result<Envelope, lettre::error::Error> {
    let address = |text: &str| text.parse().map_err(|_| lettre::error::Error::MissingTo);
    Envelope::new(Some(address(from)?), vec![address(to)?])
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
async fn outputs(chassis: &Chassis, due: &Due) -> Result<(Vec<Attachment>, Vec<String>)> {
    let (mut taken, mut left) = (Vec::new(), Vec::new());
    let mut room = ANSWER_FILE_BYTES;
    for output in towpath_file::outputs(&chassis.db, due.tenant, due.run).await? {
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
