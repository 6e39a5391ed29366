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
    channel::{Access, ChannelDefinition},
    command::Command,
    id::{FileId, InboundId, PrincipalId, RunId, SessionId, SteerId, ThreadId},
    limit::{PROMPT_BYTES, STEER_BYTES},
    subject,
};
use tracing::Instrument;
use uuid::Uuid;

use crate::{
    mail::{
        dmarc::{self, Verdict},
        quote,
        read::{self, Attachment, Mail},
        trust,
    },
    notice::{self, Known},
    state::{Door, Who, door},
    sweep::TIMER,
    table::owner_of,
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
/// Waits while a channel is paused (resuming it ends them), and while it has taken as much as it may in a minute.
const PAUSED: Duration = Duration::from_secs(300);
const TOO_MANY: Duration = Duration::from_secs(10);
/// The whole text, where the agent is not told all of it.
const MESSAGE_FILE: &str = "message.txt";
/// What is added to a text that was cut, and to one without what it quoted.
const CUT: &str = "\n\n[cut here; the whole text is in message.txt]";
const QUOTED: &str = "\n\n[the quoted text is left out; the whole message is in message.txt]";

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
        let mut known = Known { first: claimed.opened, verified: false };
        let considered = AssertUnwindSafe(consider(&chassis, &claimed, &mut known)).catch_unwind().await;
        let outcome = match considered {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) if error.is_passing() => {
                Outcome::Waiting { after: PASSING, reason: error.problem().detail, failed: false, told: false }
            }
            Ok(Err(error)) => failed(&chassis, &claimed, error.chain()),
            Err(_) => failed(&chassis, &claimed, "taking it in panicked; the log tells more".to_owned()),
        };
        let mut work = chassis.begin().await?;
        let counted = table::record(&mut work, &claimed, &outcome).await?;
        if counted {
            if let Outcome::Waiting { after, .. } = &outcome {
                timer::set(&mut work, &[(TIMER, claimed.id.to_string(), *after)]).await?;
            }
            if let Some(channel) = &claimed.definition {
                towpath_delivery::create(&mut work, notice::to_author(&claimed, channel, known, &outcome).as_slice()).await?;
            }
            if let Outcome::Stopped(what) | Outcome::Dead(what) = &outcome
                && let Some(owner) = owner_of(&mut work, claimed.id).await?
            {
                notice::to_owner(&chassis, &mut work, &owner, claimed.id, None, what).await?;
            }
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
        Outcome::Answered(_) => "answered",
        Outcome::Ignored(_) => "ignored",
        Outcome::Refused(_) => "refused",
        Outcome::Stopped(_) => "stopped",
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
    Outcome::Waiting { after: clock::scaled(after), reason, failed: true, told: false }
}

/// What is to be done with it.
async fn consider(chassis: &Chassis, claimed: &Claimed, known: &mut Known) -> Result<Outcome> {
    // What an earlier attempt has made already counts, whatever the world looks like now.
    if let Some(outcome) = made(chassis, claimed).await? {
        return Ok(outcome);
    }
    let Some(channel) = claimed.definition.clone() else { return Ok(Outcome::Refused("its channel was deleted".to_owned())) };
    if claimed.paused {
        return quietly(PAUSED, "its channel is paused");
    }
    let (envelope, raw) = (claimed.envelope.clone(), Arc::new(claimed.raw.clone()));
    let mail = match spawn_blocking(move || read::read(&envelope.from, &raw)).await {
        Ok(Ok(mail)) => mail,
        Ok(Err(error)) => return Ok(Outcome::Refused(error.to_string())),
        Err(error) => return Err(Error::broken(format!("reading the mail: {error}"))),
    };
    let verified = match is_verified(chassis, claimed, &channel, &mail).await? {
        Verdict::Author => true,
        Verdict::NotProven => false,
        // Nobody is sent away because DNS was away; once the attempts are used up nobody vouches for it.
        Verdict::Unsure(why) if claimed.attempts + 1 < chassis.config.limits.attempts => return Ok(failed(chassis, claimed, why)),
        Verdict::Unsure(_) => false,
    };
    known.verified = verified;
    let mut work = chassis.begin().await?;
    table::know(&mut work, claimed, &head_of(&mail), mail.from.as_deref()).await?;
    work.commit().await?;
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
        Door::Come { who, agent } => {
            let token = tokens.into_iter().flatten().next();
            come(chassis, claimed, &Coming { channel: &channel, mail: &mail, who: &who, agent: &agent, token }, known).await
        }
    }
}

/// By the mail server in front when the channel names one, else by ourselves.
async fn is_verified(chassis: &Chassis, claimed: &Claimed, channel: &ChannelDefinition, mail: &Mail) -> Result<Verdict> {
    // Automatic mail is decided without its author.
    let Some(from) = mail.from.as_deref().filter(|_| mail.automatic.is_none()) else { return Ok(Verdict::NotProven) };
    match &channel.mail.authserv_id {
        Some(id) => Ok(if trust::is_author(&claimed.raw, id, from) { Verdict::Author } else { Verdict::NotProven }),
        // Nobody of a public channel needs to be known, but its users.
        None if channel.access == Access::Public && !channel.users.contains_key(from) => Ok(Verdict::NotProven),
        None => Ok(dmarc::judge(dmarc::resolver(chassis)?, from, &claimed.raw).await),
    }
}

fn head_of(mail: &Mail) -> Head {
    Head {
        message_id: mail.message_id.clone(),
        references: mail.references.clone(),
        to: mail.reply_to.clone().or(mail.from.clone()).unwrap_or_default(),
        subject: mail.subject.clone(),
    }
}

/// The run or steer that carries this message's uuid.
async fn made(chassis: &Chassis, claimed: &Claimed) -> Result<Option<Outcome>> {
    if let Some(steer) = towpath_steer::by_id(&chassis.db, claimed.tenant, steer_id(claimed.id, claimed.steers)).await? {
        return Ok(Some(Outcome::Steered(steer.run, None)));
    }
    let mut connection = chassis.db.acquire().await?;
    let runs = towpath_run::existing(&mut connection, &[RunId(claimed.id.uuid())]).await?;
    Ok(runs.first().map(|run| Outcome::Started(*run)))
}

/// The message's own uuid; when the run before did not take it, one made of it and of how often that was.
pub(crate) fn steer_id(message: InboundId, steers: i32) -> SteerId {
    let uuid = message.uuid();
    SteerId(if steers == 0 { uuid } else { Uuid::new_v5(&uuid, &steers.to_be_bytes()) })
}

fn first_line(text: &str) -> String {
    text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no reason is given").chars().take(200).collect()
}

/// A message that may come in.
struct Coming<'a> {
    channel: &'a ChannelDefinition,
    mail: &'a Mail,
    who: &'a Who,
    agent: &'a str,
    token: Option<ThreadId>,
}

async fn come(chassis: &Chassis, claimed: &Claimed, coming: &Coming<'_>, known: &mut Known) -> Result<Outcome> {
    let (channel, mail) = (coming.channel, coming.mail);
    let head = head_of(mail);
    let mut work = chassis.begin().await?;
    let principal = match coming.who {
        Who::User(name) => towpath_tenant::ensure_principal(&mut work, claimed.tenant, "user", name).await?,
        Who::Channel => claimed.actor,
    };
    let placing = Placing {
        head: &head,
        token: coming.token,
        parents: &mail.parents,
        agent: coming.agent,
        most_an_hour: channel.messages_per_hour,
        most_a_minute: channel.messages_per_minute,
    };
    let place = table::place(&mut work, claimed, &placing).await?;
    work.commit().await?;
    let (thread, agent) = match place {
        Place::Thread { thread, agent, first } => {
            known.first = first;
            (thread, agent)
        }
        Place::Behind => return quietly(SOON, "an earlier message of its thread is taken in first"),
        Place::TooManyOfChannel => {
            metrics::counter!("towpath_limit_reached_total", "limit" => "messages_per_minute").increment(1);
            return quietly(TOO_MANY, "the channel takes no more messages in a minute (messages_per_minute)");
        }
        Place::TooMany(taken) => {
            metrics::counter!("towpath_limit_reached_total", "limit" => "messages_per_hour").increment(1);
            return Ok(Outcome::Stopped(format!(
                "{taken} messages of this thread were taken within an hour, as many as the channel allows (messages_per_hour): do two programs answer each other?"
            )));
        }
    };
    let session = SessionId(thread.uuid());
    let mut connection = chassis.db.acquire().await?;
    let live = towpath_run::live_run(&mut connection, session).await?;
    let is_open = !towpath_session::agents_of(&mut connection, &[session]).await?.is_empty();
    drop(connection);
    let command = Word::of(&mail.text).filter(|_| !known.first);
    match (live, command) {
        (Some(run), Some(Word::Stop)) => {
            cancel(chassis, claimed.tenant, principal, run).await?;
            Ok(Outcome::Steered(run, Some("stop: the run is canceled".to_owned())))
        }
        (Some(run), Some(Word::Status)) => {
            Ok(Outcome::Answered(notice::status(&towpath_run::view::run(&chassis.db, claimed.tenant, run).await?)))
        }
        (Some(run), None) => steer_live(chassis, claimed, principal, mail, run).await,
        // Also what an earlier attempt had stopped.
        (None, Some(Word::Stop)) => Ok(Outcome::Ignored("stop: no run of the thread is live".to_owned())),
        (None, Some(Word::Status)) => {
            Ok(Outcome::Answered("Nothing works on this thread now; a reply starts the next run in the same workspace.".to_owned()))
        }
        (None, None) => {
            let (prompt, attachments) = prompt(mail, known.first, PROMPT_BYTES);
            let files = keep(chassis, claimed, principal, &attachments).await?;
            let labels = [("channel".to_owned(), channel.name.clone())].into();
            let request = NewRun { agent, prompt, session: is_open.then_some(session), files, labels, ..NewRun::default() };
            start_next(chassis, claimed, principal, request, thread).await
        }
    }
}

/// Its author hears of it when it takes long.
fn waiting(after: Duration, reason: &str) -> Result<Outcome> {
    Ok(Outcome::Waiting { after: clock::scaled(after), reason: reason.to_owned(), failed: false, told: true })
}

/// Its author hears nothing: it ends within a moment, or nobody has judged yet whether the author may write, or too many do.
fn quietly(after: Duration, reason: &str) -> Result<Outcome> {
    Ok(Outcome::Waiting { after: clock::scaled(after), reason: reason.to_owned(), failed: false, told: false })
}

async fn steer_live(chassis: &Chassis, claimed: &Claimed, principal: PrincipalId, mail: &Mail, run: RunId) -> Result<Outcome> {
    let (message, attachments) = prompt(mail, false, STEER_BYTES);
    let files = keep(chassis, claimed, principal, &attachments).await?;
    let new = NewSteerRow { id: steer_id(claimed.id, claimed.steers), tenant: claimed.tenant, run, principal, message, files, key: None };
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

/// A message that says no more than one of these, above what it quotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    Stop,
    Status,
}

impl Word {
    fn of(text: &str) -> Option<Self> {
        let first = first_line(text);
        [(Word::Stop, "stop"), (Word::Status, "status")]
            .into_iter()
            .find(|(_, word)| first.eq_ignore_ascii_case(word))
            .map(|(word, _)| word)
    }
}

/// What the agent is told, and the files beside it. Nothing of the message is left out: what is too long for its place is a file.
fn prompt(mail: &Mail, first: bool, most: usize) -> (String, Vec<Attachment>) {
    let mut text = String::new();
    if first && !mail.subject.is_empty() {
        text = format!("Subject: {}\n\n", mail.subject);
    }
    let mut attachments = mail.attachments.clone();
    match quote::new_part(&mail.text).filter(|_| !first) {
        // The thread knows what is quoted; whoever doubts that finds the whole beside it (C18).
        Some(new) => {
            text.push_str(new);
            text.push_str(QUOTED);
            attachments.insert(0, message_file(&mail.text));
        }
        None => text.push_str(&mail.text),
    }
    for left_out in &mail.left_out {
        text.push_str(&format!("\n[not taken over: {left_out}]"));
    }
    if text.trim().is_empty() {
        text = if mail.attachments.is_empty() { "(an empty message)".to_owned() } else { "(see the attached files)".to_owned() };
    }
    if text.len() > most {
        if attachments.first().is_none_or(|first| first.name != MESSAGE_FILE) {
            attachments.insert(0, message_file(&text));
        }
        let mut keep = most - CUT.len();
        while !text.is_char_boundary(keep) {
            keep -= 1;
        }
        text.truncate(keep);
        text.push_str(CUT);
    }
    (text, attachments)
}

fn message_file(text: &str) -> Attachment {
    Attachment { name: MESSAGE_FILE.to_owned(), media_type: "text/plain".to_owned(), content: text.to_owned().into_bytes() }
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
    fn a_reply_is_told_without_what_it_quotes_and_the_whole_goes_along_c18() {
        let reply = mail("Yes.\n\nOn Tue, 1 Dec 2026 at 10:00, Helper wrote:\n> Shall I?");
        let (text, files) = prompt(&reply, false, 1000);
        assert_eq!(text, format!("Yes.{QUOTED}"));
        assert!(files[0].content.ends_with(b"> Shall I?"));
        // A first message may forward what it is about.
        assert!(prompt(&reply, true, 1000).0.ends_with("> Shall I?"));
    }

    #[test]
    fn only_a_message_whose_first_line_is_the_word_is_a_command() {
        assert_eq!(Word::of("\nStop\n\n-- \nAnn\n> what you wrote"), Some(Word::Stop));
        assert_eq!(Word::of("status"), Some(Word::Status));
        assert_eq!(Word::of("Stop the press, then go on"), None);
        assert_eq!(Word::of("Please\nstop"), None);
    }
}
