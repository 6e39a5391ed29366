//! One attempt to answer in a thread. `unknown` is resolved by `same_id`: the mail is sent again under the same Message-ID, and a receiver who sees both
//! tells by it that they are one.

use std::fmt::Write;

use lettre::address::Envelope;
use towpath_chassis::{Chassis, Error, Result};
use towpath_delivery::{Due, state::Answer};
use towpath_schemas::{
    body::{Run, RunState},
    id::{InboundId, RunId},
    limit::{ANSWER_FILE_BYTES, ANSWER_TEXT_BYTES},
};

use crate::{
    intake,
    mail::{
        compose::{self, compose},
        read::Attachment,
    },
    notice, smtp, table, token,
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
    let told = match (due.inbound, due.run) {
        (None, Some(run)) => match about_run(&chassis, &due, run).await {
            Ok(told) => told,
            Err(Error::Refused(problem)) => return Ok(Answer::Refused(problem.detail)),
            Err(error) => return Err(error),
        },
        _ => (due.body["text"].as_str().unwrap_or_default().to_owned(), Vec::new()),
    };
    let (mut text, attachments) = told;
    let named = due.run.map(|run| format!(" · {run}")).unwrap_or_default();
    let _ = write!(text, "\n\n---\n\n{}{named}", answering.agent);
    let mail = &answering.definition.mail;
    let Some((from, domain)) = mail.addresses.first().and_then(|from| Some((from, from.rsplit_once('@')?.1))) else {
        return Ok(Answer::Refused("the channel has no address".to_owned()));
    };
    let message_id = format!("{}.1@{domain}", due.id);
    let answer = compose::Answer {
        from: from.clone(),
        name: answering.agent.clone(),
        reply_to: answering.thread.map_or_else(|| from.clone(), |thread| token::address(&chassis.secrets, from, thread)),
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
    if let Some(thread) = answering.thread {
        // Known before anyone can answer it.
        let mut work = chassis.begin().await?;
        intake::table::insert_message(&mut work, answering.channel, &message_id, thread, due.tenant).await?;
        work.commit().await?;
    }
    let secrets = match table::open_secrets(&chassis, answering.channel, answering.secrets.as_deref()) {
        Ok(secrets) => secrets,
        Err(error) => return Ok(Answer::Refused(error.to_string())),
    };
    let password = secrets.get("smtp_password").map(String::as_str);
    Ok(smtp::send(&chassis, &mail.smtp, password, domain, &envelope, &composed.formatted()).await)
}

/// What there is to say of a run, and what goes along.
async fn about_run(chassis: &Chassis, due: &Due, id: RunId) -> Result<(String, Vec<Attachment>)> {
    let mut run = towpath_run::view::run(&chassis.db, due.tenant, id).await?;
    if !due.is_about(towpath_delivery::About::RunEnded) {
        return Ok((doubt(&run), Vec::new()));
    }
    let (mut attachments, too_large) = outputs(chassis, due, id).await?;
    let mut text = ending(&mut run);
    if let Some(head) = beginning(&text) {
        let whole = std::mem::replace(&mut text, head);
        attachments
            .insert(0, Attachment { name: "result.md".to_owned(), media_type: "text/markdown".to_owned(), content: whole.into_bytes() });
    }
    for name in too_large {
        let _ = write!(text, "\n\n{name}");
    }
    Ok((text, attachments))
}

/// The beginning of a text that is too long for a mail, up to a paragraph's or a line's end.
fn beginning(text: &str) -> Option<String> {
    if text.len() <= ANSWER_TEXT_BYTES {
        return None;
    }
    let mut most = ANSWER_TEXT_BYTES;
    while !text.is_char_boundary(most) {
        most -= 1;
    }
    let head = text.get(..most)?;
    let end = ["\n\n", "\n"].iter().filter_map(|border| head.rfind(border)).find(|end| *end > most / 2).unwrap_or(most);
    let mut head = head.get(..end)?.to_owned();
    // A block of code that is cut is closed, or all that follows would be code (field case B3).
    if head.lines().filter(|line| line.trim_start().starts_with("```")).count() % 2 == 1 {
        head.push_str("\n```");
    }
    head.push_str("\n\n[the whole result is in result.md]");
    Some(head)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_very_long_result_is_a_beginning_and_a_file_and_its_code_stays_code_b3() {
        assert_eq!(beginning("short"), None);
        let long = format!("# Head\n\n```rust\n{}```\n", "let x = 1; // é\n".repeat(10_000));
        let head = beginning(&long).expect("cut");
        assert!(head.len() < ANSWER_TEXT_BYTES + 100 && head.starts_with("# Head"), "{}", head.len());
        assert!(head.ends_with("// é\n```\n\n[the whole result is in result.md]"), "{}", &head[head.len() - 100..]);
    }
}
