//! A message came: read it, decide at the door, find its thread, and start or steer a run. Everything that it makes has the message's own uuid (the thread
//! that it opens, the run that it starts, the steer), so that a worker that dies half-way leaves nothing that could be made twice (invariant ONCE).

pub mod table;

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures::{FutureExt, StreamExt, stream};
use tokio::task::spawn_blocking;
use towpath_agent::start::{Start, start_all};
use towpath_chassis::{
    Chassis, Error, Result, clock,
    consume::{Handler, Outcome as Handled},
    telemetry, timer,
};
use towpath_file::Spool;
use towpath_run::accept::{NewSteerRow, cancel, steer};
use towpath_schemas::{
    ErrorCode,
    body::NewRun,
    channel::ChannelDefinition,
    command::Command,
    id::{FileId, InboundId, PrincipalId, RunId, SessionId, SteerId, ThreadId},
    limit::{PROMPT_BYTES, STEER_BYTES},
    subject,
};
use tracing::Instrument;

use crate::{
    mail::{
        read::{self, Attachment, Mail},
        trust,
    },
    state::{Door, Who, door},
    sweep::TIMER,
    token,
};
use table::{Claimed, Head, Outcome, Place, Placing};

/// Messages of one batch that are under way at a time; each may hold its bytes twice.
const AT_A_TIME: usize = 4;
/// Wait of those that did not fit into a batch.
const AGAIN: Duration = Duration::from_millis(200);
/// Wait for an earlier message of the same thread, and for a run that is about to move.
const SOON: Duration = Duration::from_secs(1);
/// Wait when a server that we stand on is away, and the longest after a failure of its own.
const PASSING: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_secs(300);
/// What is added to a text that was cut.
const CUT: &str = "\n\n[cut here; the whole text is in message.txt]";

pub fn handler() -> Handler {
    Handler::new("intake", subject::INTAKE_ALL, handle)
}

async fn handle(chassis: Chassis, batch: Vec<Command>) -> Result<Vec<Handled>> {
    let ids: Vec<InboundId> = batch
        .iter()
        .filter_map(|command| match command {
            Command::Intake { inbound, .. } => Some(*inbound),
            Command::Admit { .. }
            | Command::Host { .. }
            | Command::Seal { .. }
            | Command::Observed { .. }
            | Command::Sealed { .. }
            | Command::Deliver { .. }
            | Command::Unknown => None,
        })
        .collect();
    let now = &ids[..ids.len().min(AT_A_TIME)];
    let mut work = chassis.begin().await?;
    let claimed = table::claim(&mut work, now).await?;
    work.commit().await?;
    let results: Vec<Result<()>> =
        stream::iter(claimed).map(|claimed| take_in(chassis.clone(), claimed)).buffer_unordered(AT_A_TIME).collect().await;
    for result in results {
        // One whose outcome was not recorded is due again by itself.
        if let Err(error) = result {
            tracing::warn!(error = error.chain(), "a message is taken in again later");
        }
    }
    Ok((0..batch.len()).map(|index| if index < now.len() { Handled::Done } else { Handled::Later(AGAIN) }).collect())
}

async fn take_in(chassis: Chassis, claimed: Claimed) -> Result<()> {
    let span = telemetry::span_from("intake", claimed.traceparent.as_deref());
    async move {
        // A message that nobody can read must not stand in the way of others (field case C1).
        let considered = AssertUnwindSafe(consider(&chassis, &claimed)).catch_unwind().await;
        let outcome = match considered {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) if error.is_passing() => Outcome::Waiting { after: PASSING, reason: error.problem().detail, failed: false },
            Ok(Err(error)) => failed(&chassis, &claimed, error.chain()),
            Err(_) => failed(&chassis, &claimed, "taking it in panicked; the log tells more".to_owned()),
        };
        let mut work = chassis.begin().await?;
        let counted = table::record(&mut work, &claimed, &outcome).await?;
        if let (true, Outcome::Waiting { after, .. }) = (counted, &outcome) {
            timer::set(&mut work, &[(TIMER, claimed.id.to_string(), *after)]).await?;
        }
        work.commit().await?;
        tracing::info!(inbound = %claimed.id, ?outcome, "message taken in");
        metrics::counter!("towpath_inbound_total", "outcome" => word(&outcome)).increment(1);
        Ok(())
    }
    .instrument(span)
    .await
}

fn word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Started(_) => "started",
        Outcome::Steered(..) => "steered",
        Outcome::Ignored(_) => "ignored",
        Outcome::Refused(_) => "refused",
        Outcome::Waiting { .. } => "waiting",
        Outcome::Dead(_) => "dead",
    }
}

fn failed(chassis: &Chassis, claimed: &Claimed, reason: String) -> Outcome {
    tracing::warn!(inbound = %claimed.id, reason, attempt = claimed.attempts + 1, "a message cannot be taken in");
    if claimed.attempts + 1 >= chassis.config.limits.attempts {
        return Outcome::Dead(reason);
    }
    let after = Duration::from_secs(1 << claimed.attempts.clamp(0, 10)).min(LONGEST);
    Outcome::Waiting { after: clock::scaled(after), reason, failed: true }
}

/// What is to be done with it.
async fn consider(chassis: &Chassis, claimed: &Claimed) -> Result<Outcome> {
    // What an earlier attempt has made already counts, whatever the world looks like now.
    if let Some(outcome) = made(chassis, claimed).await? {
        return Ok(outcome);
    }
    let Some(channel) = claimed.definition.clone() else { return Ok(Outcome::Refused("its channel was deleted".to_owned())) };
    let (envelope, raw) = (claimed.envelope.clone(), Arc::new(claimed.raw.clone()));
    let authserv_id = channel.mail.authserv_id.clone();
    let read = spawn_blocking(move || {
        let mail = read::read(&envelope.from, &raw)?;
        let verified = match (&authserv_id, &mail.from) {
            (Some(id), Some(from)) => trust::is_author(&raw, id, from),
            _ => false,
        };
        Ok((mail, verified))
    })
    .await;
    let (mail, verified) = match read {
        Ok(Ok(read)) => read,
        Ok(Err(error)) => {
            let error: read::ReadError = error;
            return Ok(Outcome::Refused(error.to_string()));
        }
        Err(error) => return Err(Error::broken(format!("reading the mail: {error}"))),
    };
    let (to, tokens): (Vec<String>, Vec<Option<ThreadId>>) =
        claimed.envelope.to.iter().map(|address| token::split(&chassis.secrets, address)).unzip();
    match door(&channel, &mail, verified, &to) {
        Door::Ignore(reason) => Ok(Outcome::Ignored(reason)),
        Door::Refuse(reason) => Ok(Outcome::Refused(reason)),
        Door::Bounced(deliveries, why) => {
            let why = why.unwrap_or_else(|| first_line(&mail.text));
            let mut work = chassis.begin().await?;
            let mut known = Vec::new();
            for delivery in deliveries {
                if towpath_delivery::bounced(&mut work, claimed.tenant, delivery, &format!("it came back: {why}")).await? {
                    known.push(delivery.to_string());
                }
            }
            work.commit().await?;
            let what = if known.is_empty() { "nothing of ours".to_owned() } else { known.join(", ") };
            Ok(Outcome::Ignored(format!("a mail server's report on {what}")))
        }
        Door::Come { who, agent } => come(chassis, claimed, &channel, &mail, &who, &agent, tokens.into_iter().flatten().next()).await,
    }
}

/// The run or steer that carries this message's uuid.
async fn made(chassis: &Chassis, claimed: &Claimed) -> Result<Option<Outcome>> {
    let uuid = claimed.id.uuid();
    if let Some(steer) = towpath_steer::by_id(&chassis.db, claimed.tenant, SteerId(uuid)).await? {
        return Ok(Some(Outcome::Steered(steer.run, None)));
    }
    let mut connection = chassis.db.acquire().await?;
    let runs = towpath_run::existing(&mut connection, &[RunId(uuid)]).await?;
    Ok(runs.first().map(|run| Outcome::Started(*run)))
}

fn first_line(text: &str) -> String {
    text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no reason is given").chars().take(200).collect()
}

async fn come(
    chassis: &Chassis,
    claimed: &Claimed,
    channel: &ChannelDefinition,
    mail: &Mail,
    who: &Who,
    agent: &str,
    token: Option<ThreadId>,
) -> Result<Outcome> {
    let author = mail.from.clone().unwrap_or_default();
    let head = Head {
        message_id: mail.message_id.clone(),
        references: mail.references.clone(),
        to: mail.reply_to.clone().unwrap_or_else(|| author.clone()),
        subject: mail.subject.clone(),
    };
    let mut work = chassis.begin().await?;
    let principal = match who {
        Who::User(name) => towpath_tenant::ensure_principal(&mut work, claimed.tenant, "user", name).await?,
        Who::Channel => claimed.actor,
    };
    let placing = Placing { head: &head, author: &author, token, parents: &mail.parents, agent, most: channel.messages_per_hour };
    let place = table::place(&mut work, claimed, &placing).await?;
    work.commit().await?;
    let (thread, agent, first) = match place {
        Place::Thread { thread, agent, first } => (thread, agent, first),
        Place::Behind => return waiting(SOON, "an earlier message of its thread is taken in first"),
        Place::TooMany(taken) => {
            return Ok(Outcome::Refused(format!(
                "{taken} messages of this thread were taken within an hour, as many as the channel allows (messages_per_hour): do two programs answer each other?"
            )));
        }
    };
    let session = SessionId(thread.uuid());
    let mut connection = chassis.db.acquire().await?;
    let live = towpath_run::live_run(&mut connection, session).await?;
    let is_open = !towpath_session::agents_of(&mut connection, &[session]).await?.is_empty();
    drop(connection);
    match live {
        Some(run) if is_stop(&mail.text) => {
            cancel(chassis, claimed.tenant, principal, run).await?;
            Ok(Outcome::Steered(run, Some("stop: the run is canceled".to_owned())))
        }
        Some(run) => steer_live(chassis, claimed, principal, mail, run).await,
        // Also what an earlier attempt had stopped.
        None if is_stop(&mail.text) && !first => Ok(Outcome::Ignored("stop: no run of the thread is live".to_owned())),
        None => {
            let (prompt, attachments) = prompt(mail, first, PROMPT_BYTES);
            let files = keep(chassis, claimed, principal, &attachments).await?;
            let labels = [("channel".to_owned(), channel.name.clone())].into();
            let request = NewRun { agent, prompt, session: is_open.then_some(session), files, labels, ..NewRun::default() };
            start_next(chassis, claimed, principal, request, thread).await
        }
    }
}

fn waiting(after: Duration, reason: &str) -> Result<Outcome> {
    Ok(Outcome::Waiting { after: clock::scaled(after), reason: reason.to_owned(), failed: false })
}

async fn steer_live(chassis: &Chassis, claimed: &Claimed, principal: PrincipalId, mail: &Mail, run: RunId) -> Result<Outcome> {
    let (message, attachments) = prompt(mail, false, STEER_BYTES);
    let files = keep(chassis, claimed, principal, &attachments).await?;
    let new = NewSteerRow { id: SteerId(claimed.id.uuid()), tenant: claimed.tenant, run, principal, message, files, key: None };
    match steer(chassis, &new).await {
        Ok(_) => Ok(Outcome::Steered(run, None)),
        Err(Error::Refused(problem)) if problem.code == ErrorCode::RunEnding.code() => waiting(SOON, "the run before it is ending"),
        Err(Error::Refused(problem)) if problem.code == ErrorCode::RunEnded.code() => waiting(SOON / 4, "the run before it has just ended"),
        Err(Error::Refused(problem)) if !problem.retryable => Ok(Outcome::Refused(problem.detail)),
        Err(error) => Err(error),
    }
}

async fn start_next(chassis: &Chassis, claimed: &Claimed, principal: PrincipalId, request: NewRun, thread: ThreadId) -> Result<Outcome> {
    let run = RunId(claimed.id.uuid());
    let answer = match Start::new(chassis, claimed.tenant, principal, request, None, telemetry::traceparent()) {
        Ok(start) => start_all(chassis, vec![start.for_thread(run, thread)]).await.pop().ok_or_else(|| Error::broken("no answer"))?,
        Err(Error::Refused(problem)) => Err(*problem),
        Err(error) => return Err(error),
    };
    match answer {
        Ok(started) => Ok(Outcome::Started(started.run)),
        Err(problem) if problem.code == ErrorCode::SessionBusy.code() => waiting(SOON, "the run before it has not settled"),
        Err(problem) if !problem.retryable => Ok(Outcome::Refused(problem.detail)),
        Err(problem) => Err(problem.into()),
    }
}

/// A message that says no more than that.
fn is_stop(text: &str) -> bool {
    first_line(text).eq_ignore_ascii_case("stop")
}

/// What the agent is told, and the files beside it. Nothing of the message is left out: what is too long for its place is a file.
fn prompt(mail: &Mail, first: bool, most: usize) -> (String, Vec<Attachment>) {
    let mut text = String::new();
    if first && !mail.subject.is_empty() {
        text = format!("Subject: {}\n\n", mail.subject);
    }
    text.push_str(&mail.text);
    for left_out in &mail.left_out {
        text.push_str(&format!("\n[not taken over: {left_out}]"));
    }
    if text.trim().is_empty() {
        text = if mail.attachments.is_empty() { "(an empty message)".to_owned() } else { "(see the attached files)".to_owned() };
    }
    let mut attachments = mail.attachments.clone();
    if text.len() > most {
        attachments.insert(
            0,
            Attachment { name: "message.txt".to_owned(), media_type: "text/plain".to_owned(), content: text.clone().into_bytes() },
        );
        let mut keep = most - CUT.len();
        while !text.is_char_boundary(keep) {
            keep -= 1;
        }
        text.truncate(keep);
        text.push_str(CUT);
    }
    (text, attachments)
}

/// Keeps attachments as files; those that an earlier attempt has kept stay.
async fn keep(chassis: &Chassis, claimed: &Claimed, principal: PrincipalId, attachments: &[Attachment]) -> Result<Vec<FileId>> {
    let mut files = table::files(&chassis.db, claimed.id).await?;
    for (n, attachment) in attachments.iter().enumerate().skip(files.len()) {
        let mut spool = Spool::new(attachment.content.len() as u64)?;
        spool.write(&attachment.content).await?;
        let spooled = spool.finish().await?;
        let file = towpath_file::store(chassis, claimed.tenant, principal, &attachment.name, &attachment.media_type, spooled).await?;
        table::insert_file(&chassis.db, claimed, i32::try_from(n).unwrap_or(i32::MAX), file.id).await?;
        files.push(file.id);
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mail(text: &str) -> Mail {
        read::read("a@x.org", format!("From: a@x.org\r\nSubject: hi\r\n\r\n{text}").as_bytes()).expect("mail")
    }

    #[test]
    fn the_agent_is_told_everything_and_what_is_too_long_is_a_file() {
        assert_eq!(prompt(&mail("hello"), true, 1000).0, "Subject: hi\n\nhello");
        assert_eq!(prompt(&mail("hello"), false, 1000).0, "hello");
        assert_eq!(prompt(&mail(""), false, 1000).0, "(an empty message)");
        let long = "é".repeat(1000);
        let (text, files) = prompt(&mail(&long), false, 1000);
        assert!(text.len() <= 1000 && text.ends_with(CUT), "{text}");
        assert_eq!((files[0].name.as_str(), files[0].content.as_slice()), ("message.txt", long.as_bytes()));
    }

    #[test]
    fn only_a_message_whose_first_line_is_the_word_stops_a_run() {
        assert!(is_stop("\nStop\n\n-- \nAnn\n> what you wrote"));
        assert!(!is_stop("Stop the press, then go on"));
        assert!(!is_stop("Please\nstop"));
    }
}
