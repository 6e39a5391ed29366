//! A message came: read it, decide at the door, find its thread, and start or steer a run. Everything that it makes has the message's own uuid (the thread
//! that it opens, the run that it starts, the steer), so that a worker that dies half-way leaves nothing that could be made twice (invariant ONCE).

mod prompt;
pub mod table;

use std::{
    panic::AssertUnwindSafe,
    time::{Duration, Instant},
};

use futures::{FutureExt, StreamExt, stream};
use tokio::time::timeout;
use towpath_agent::start::{Start, start_all};
use towpath_chassis::{
    Chassis, Error, Result, clock,
    consume::{Handler, Outcome as Handled},
    telemetry, timer,
};
use towpath_delivery::About;
use towpath_run::accept::{NewSteerRow, cancel, steer};
use towpath_schemas::{
    ErrorCode,
    body::NewRun,
    channel::{ChannelDefinition, Kind, SlackChannel},
    command::Command,
    id::{DeliveryId, InboundId, PrincipalId, RunId, SessionId, SteerId, ThreadId},
    limit::{PROMPT_BYTES, STEER_BYTES},
    subject,
};
use tracing::Instrument;
use uuid::Uuid;

use crate::{
    mail::{self, dmarc::Verdict},
    message::Message,
    notice::{self, Known},
    slack,
    state::{Door, Who, door},
    sweep::TIMER,
    table::{self as channels, owner_of},
};
use prompt::{keep, prompt};
use table::{Claimed, Outcome, Place, Placing, Whose};

/// Messages of one batch that are under way at a time; each may hold its bytes twice.
const AT_A_TIME: usize = 4;
/// Wait of those that a batch did not come to.
const AGAIN: Duration = Duration::from_millis(200);
/// Wait for an earlier message of the same thread, and for a run that is about to move.
const SOON: Duration = Duration::from_secs(1);
/// Wait when a server that we stand on is away, and the longest after a failure of its own.
const PASSING: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_secs(300);
/// Waits while a channel is paused (resuming it ends them), and while it has taken as much as it may in a minute.
const PAUSED: Duration = Duration::from_secs(300);
const TOO_MANY: Duration = Duration::from_secs(10);
/// How long after a reply its root may come: as a rule, and at most (Slack's last repetition is after six minutes).
const MOMENT: Duration = Duration::from_secs(2);
const ROOT_COMES: Duration = Duration::from_secs(390);

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
    // Time is left for those that were begun with.
    let (began, most) = (Instant::now(), chassis.config.limits.handler / 4);
    let done = stream::iter(ids)
        .map(|id| {
            let chassis = chassis.clone();
            async move {
                if began.elapsed() < most {
                    claim_and_take_in(chassis, id).await.map(|()| Handled::Done)
                } else {
                    Ok(Handled::Later(AGAIN))
                }
            }
        })
        .buffered(AT_A_TIME)
        .map(|handled| {
            handled.unwrap_or_else(|error| {
                // It is due again by itself.
                tracing::warn!(error = error.chain(), "a message is taken in again later");
                Handled::Done
            })
        });
    Ok(done.collect().await)
}

async fn claim_and_take_in(chassis: Chassis, id: InboundId) -> Result<()> {
    let mut work = chassis.begin().await?;
    let claimed = table::claim(&mut work, &[id]).await?;
    work.commit().await?;
    for claimed in claimed {
        take_in(chassis.clone(), claimed).await?;
    }
    Ok(())
}

async fn take_in(chassis: Chassis, claimed: Claimed) -> Result<()> {
    let span = telemetry::span_from("intake", claimed.traceparent.as_deref());
    async move {
        // A message that nobody can read must not stand in the way of others (field case C1).
        let mut known = Known { first: claimed.opened, answers: false };
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
                notice::to_owner(&chassis, &mut work, &owner, claimed.id, About::ChannelNotice, None, what).await?;
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
        Outcome::Elsewhere => "elsewhere",
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
    let read = match channel.kind() {
        Some(Kind::Mail(settings)) => mail::message(chassis, claimed, settings).await?,
        Some(Kind::Slack(_)) => slack::event::message(&claimed.raw),
        None => return quietly(PAUSED, "its channel is of a kind that this release does not know"),
    };
    let message = match read {
        Ok(message) => message,
        Err(reason) => return Ok(Outcome::Refused(reason)),
    };
    let verdict = match channel.kind() {
        Some(Kind::Mail(settings)) => mail::verdict(chassis, claimed, &channel, settings, &message).await?,
        // Slack has signed who wrote it.
        Some(Kind::Slack(_)) => Verdict::Author,
        None => Verdict::NotProven,
    };
    let verified = match verdict {
        Verdict::Author => true,
        Verdict::NotProven => false,
        // Nobody is sent away because DNS was away; once the attempts are used up nobody vouches for it.
        Verdict::Unsure(why) if claimed.attempts + 1 < chassis.config.limits.attempts => return Ok(failed(chassis, claimed, why)),
        Verdict::Unsure(_) => false,
    };
    known.answers = verified && message.calls;
    let mut work = chassis.begin().await?;
    table::know(&mut work, claimed, &message.head, message.author.as_deref()).await?;
    work.commit().await?;
    if !message.calls
        && let Some(outcome) = elsewhere(chassis, claimed, &message).await?
    {
        return Ok(outcome);
    }
    match door(&channel, &message, verified) {
        Door::Ignore(reason) => Ok(Outcome::Ignored(reason)),
        Door::Refuse(reason) => Ok(Outcome::Refused(reason)),
        Door::Bounced(deliveries, why) => bounced(chassis, claimed, deliveries, &why).await,
        Door::Come { who, agent } => {
            come(chassis, claimed, &Coming { channel: &channel, message: &message, who: &who, agent: &agent }, known).await
        }
    }
}

/// A message that calls nobody is only of interest in a thread of ours. Its root may come after it, for as long as a provider sends again what it could not hand
/// in at first.
async fn elsewhere(chassis: &Chassis, claimed: &Claimed, message: &Message) -> Result<Option<Outcome>> {
    match table::whose(&chassis.db, claimed.channel, claimed.id, &message.parents).await? {
        Whose::Ours => Ok(None),
        Whose::Open => quietly(SOON, "an earlier message of its thread is taken in first").map(Some),
        Whose::Nobodys => {
            let left = [MOMENT, ROOT_COMES].into_iter().find_map(|until| clock::scaled(until).checked_sub(claimed.age));
            Ok(Some(match left.filter(|left| !left.is_zero()) {
                Some(after) => {
                    let reason = "it calls nobody, and no agent was called in its thread yet".to_owned();
                    Outcome::Waiting { after, reason, failed: false, told: false }
                }
                None => Outcome::Elsewhere,
            }))
        }
    }
}

/// Deliveries of ours came back.
async fn bounced(chassis: &Chassis, claimed: &Claimed, deliveries: Vec<DeliveryId>, why: &str) -> Result<Outcome> {
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

/// A message that may come in.
struct Coming<'a> {
    channel: &'a ChannelDefinition,
    message: &'a Message,
    who: &'a Who,
    agent: &'a str,
}

async fn come(chassis: &Chassis, claimed: &Claimed, coming: &Coming<'_>, known: &mut Known) -> Result<Outcome> {
    let (channel, message) = (coming.channel, coming.message);
    let mut work = chassis.begin().await?;
    let principal = match coming.who {
        Who::User(name) => towpath_tenant::ensure_principal(&mut work, claimed.tenant, "user", name).await?,
        Who::Channel => claimed.actor,
    };
    let placing = Placing {
        head: &message.head,
        token: message.token,
        parents: &message.parents,
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
    let command = Word::of(&message.text).filter(|_| !known.first);
    if message.cancels.is_some_and(|run| Some(run) != live) {
        return Ok(Outcome::Ignored("stop: its run is not live".to_owned()));
    }
    let fetched = match channel.kind() {
        Some(Kind::Slack(settings)) if command.is_none() && !message.remote.is_empty() => {
            match fetch(chassis, claimed, settings, message).await? {
                Ok(fetched) => fetched,
                Err(why) => return Ok(failed(chassis, claimed, why)),
            }
        }
        _ => message.clone(),
    };
    let message = &fetched;
    match (live, command) {
        (Some(run), Some(Word::Stop)) => {
            cancel(chassis, claimed.tenant, principal, run).await?;
            Ok(Outcome::Steered(run, Some("stop: the run is canceled".to_owned())))
        }
        (Some(run), Some(Word::Status)) => {
            Ok(Outcome::Answered(notice::status(&towpath_run::view::run(&chassis.db, claimed.tenant, run).await?)))
        }
        (Some(run), None) => steer_live(chassis, claimed, principal, message, run).await,
        // Also what an earlier attempt had stopped.
        (None, Some(Word::Stop)) => Ok(Outcome::Ignored("stop: no run of the thread is live".to_owned())),
        (None, Some(Word::Status)) => {
            Ok(Outcome::Answered("Nothing works on this thread now; a reply starts the next run in the same workspace.".to_owned()))
        }
        (None, None) => {
            let (prompt, attachments) = prompt(message, known.first, PROMPT_BYTES);
            let files = keep(chassis, claimed, principal, &attachments).await?;
            let labels = [("channel".to_owned(), channel.name.clone())].into();
            let request = NewRun { agent, prompt, session: is_open.then_some(session), files, labels, ..NewRun::default() };
            start_next(chassis, claimed, principal, request, thread).await
        }
    }
}

/// The message with its files; Err(why) when they are to be asked for later.
async fn fetch(
    chassis: &Chassis,
    claimed: &Claimed,
    slack: &SlackChannel,
    message: &Message,
) -> Result<std::result::Result<Message, String>> {
    let secrets = channels::open_secrets(chassis, claimed.channel, claimed.secrets.as_deref())?;
    let Some(token) = secrets.get("bot_token") else { return Ok(Err("the channel has no bot_token".to_owned())) };
    let last = claimed.attempts + 1 >= chassis.config.limits.attempts;
    // Shorter than a batch may take, or it would never be through.
    match timeout(chassis.config.limits.handler / 2, slack::fetch(chassis, slack, token, message, last)).await {
        Ok(fetched) => fetched,
        Err(_) if last => {
            let mut without = message.clone();
            without.left_out.extend(without.remote.drain(..).map(|file| format!("{}: it took too long to fetch", file.name)));
            Ok(Ok(without))
        }
        Err(_) => Ok(Err("its files take too long to fetch".to_owned())),
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

async fn steer_live(chassis: &Chassis, claimed: &Claimed, principal: PrincipalId, message: &Message, run: RunId) -> Result<Outcome> {
    let (text, attachments) = prompt(message, false, STEER_BYTES);
    let files = keep(chassis, claimed, principal, &attachments).await?;
    let new =
        NewSteerRow { id: steer_id(claimed.id, claimed.steers), tenant: claimed.tenant, run, principal, message: text, files, key: None };
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
        let first = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
        [(Word::Stop, "stop"), (Word::Status, "status")]
            .into_iter()
            .find(|(_, word)| first.eq_ignore_ascii_case(word))
            .map(|(word, _)| word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_message_whose_first_line_is_the_word_is_a_command() {
        assert_eq!(Word::of("\nStop\n\n-- \nAnn\n> what you wrote"), Some(Word::Stop));
        assert_eq!(Word::of("status"), Some(Word::Status));
        assert_eq!(Word::of("Stop the press, then go on"), None);
        assert_eq!(Word::of("Please\nstop"), None);
    }
}
