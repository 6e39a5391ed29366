//! What people are told of their messages beside the result, and the channel's owner of what nobody else hears. Owed with the transaction that makes it true.

use std::{fmt::Write, time::Duration};

use serde_json::json;
use towpath_chassis::{Chassis, Result, Work, clock};
use towpath_delivery::{About, Due, Owed, TargetKind, notice_place};
use towpath_schemas::{
    body::{Run, RunState},
    channel::{ChannelDefinition, Kind},
    id::{InboundId, RunId, TenantId},
};

use crate::{
    intake::table::{self, Claimed, Outcome, Steering},
    table::{Owner, owner_of},
};

/// An acknowledgement is left out when the answer itself comes within this.
const ACKNOWLEDGE_AFTER: Duration = Duration::from_secs(10);
const ACKNOWLEDGE_IN_CHAT_AFTER: Duration = Duration::from_secs(2);
/// That a message waits is told when it still does after this.
const WAITS_AFTER: Duration = Duration::from_secs(15);
/// Answers that were given up which are told of at a time.
const GIVEN_UP: i64 = 100;

/// What is known of a message when it was considered.
#[derive(Debug, Clone, Copy)]
pub struct Known {
    /// Its author may be told why it was refused: who called us, and is who the message says. Else the answer would go to whom somebody named (backscatter), or
    /// disturb people who speak with each other.
    pub answers: bool,
    /// It opened its thread.
    pub first: bool,
}

/// What its author is to be told of an outcome.
pub(crate) fn to_author(claimed: &Claimed, channel: &ChannelDefinition, known: Known, outcome: &Outcome) -> Option<Owed> {
    let (about, run, after, text) = match outcome {
        Outcome::Started(run) if known.first && channel.acknowledge => {
            let text = format!(
                "{run} works on this; the answer follows here. A reply adds to it, `stop` alone in a reply cancels it, and `status` alone tells how it stands."
            );
            let after = match channel.kind() {
                Some(Kind::Slack(_)) => ACKNOWLEDGE_IN_CHAT_AFTER,
                Some(Kind::Mail(_)) | None => ACKNOWLEDGE_AFTER,
            };
            (About::Accepted, Some(*run), after, text)
        }
        Outcome::Waiting { reason, told: true, .. } => {
            (About::Waits, None, WAITS_AFTER, format!("Your message is kept and waits: {reason}. Nothing more is needed."))
        }
        Outcome::Refused(reason) | Outcome::Dead(reason) if known.answers => {
            (About::Refused, None, Duration::ZERO, format!("Your message was not taken: {reason}."))
        }
        Outcome::Answered(text) => (About::Status, None, Duration::ZERO, text.clone()),
        Outcome::Started(_)
        | Outcome::Steered(..)
        | Outcome::Ignored(_)
        | Outcome::Elsewhere
        | Outcome::Refused(_)
        | Outcome::Stopped(_)
        | Outcome::Waiting { .. }
        | Outcome::Dead(_) => return None,
    };
    Some(to_thread(claimed.tenant, claimed.id, run, about, clock::scaled(after), &text, claimed.traceparent.clone()))
}

/// A run ended, and what is known of a message to it.
pub(crate) fn unread(steering: &Steering, how: &str) -> Owed {
    let text = format!("{} ended {how}. It was not sent again; write once more if it still matters.", steering.run);
    to_thread(steering.tenant, steering.message, None, About::Unread, Duration::ZERO, &text, None)
}

fn to_thread(
    tenant: TenantId,
    message: InboundId,
    run: Option<RunId>,
    about: About,
    after: Duration,
    text: &str,
    traceparent: Option<String>,
) -> Owed {
    Owed {
        tenant,
        run,
        inbound: Some(message),
        // Beside the run's own targets, which count from 0.
        n: -1,
        after,
        about,
        kind: TargetKind::Thread,
        url: message.to_string(),
        secret: None,
        body: json!({ "type": about.event(), "text": text }),
        traceparent,
    }
}

/// Tells the channel's owner, where the channel says how; else metrics and `towpath doctor` do.
pub(crate) async fn to_owner(
    chassis: &Chassis,
    work: &mut Work,
    owner: &Owner,
    message: InboundId,
    about: About,
    run: Option<RunId>,
    what: &str,
) -> Result<()> {
    let Some(url) = &owner.definition.notify else { return Ok(()) };
    let secret = owner.secret(chassis, "notify_secret")?;
    let secret = secret.map(|secret| chassis.secrets.seal(&notice_place(message), secret.as_bytes())).transpose()?;
    let body = json!({
        "type": about.event(), "timestamp": clock::wall().to_rfc3339(),
        "data": { "channel": owner.definition.name, "message": message, "run": run, "what": what },
    });
    let owed = Owed {
        tenant: owner.tenant,
        run: None,
        inbound: Some(message),
        n: -1,
        after: Duration::ZERO,
        about,
        kind: TargetKind::Webhook,
        url: url.clone(),
        secret,
        body,
        traceparent: None,
    };
    towpath_delivery::create(work, &[owed]).await
}

/// Tells owners of answers that were given up, each once.
pub(crate) async fn given_up(chassis: Chassis) -> Result<u64> {
    let mut work = chassis.begin().await?;
    let given_up = towpath_delivery::given_up(&mut work, GIVEN_UP).await?;
    for answer in &given_up {
        let Some(owner) = owner_of(&mut work, answer.inbound).await? else { continue };
        let what = format!("the answer {} was given up: {}", answer.id, answer.answer);
        to_owner(&chassis, &mut work, &owner, answer.inbound, About::ChannelNotice, answer.run, &what).await?;
    }
    let found = given_up.len() as u64;
    work.commit().await?;
    Ok(found)
}

/// Why a notice need not be sent any more.
pub(crate) async fn overtaken(chassis: &Chassis, due: &Due) -> Result<Option<&'static str>> {
    if let Some(run) = due.run.filter(|_| due.is_about(About::Accepted)) {
        let ended = towpath_run::view::run(&chassis.db, due.tenant, run).await?.ended_at.is_some();
        return Ok(ended.then_some("not needed: the run has ended"));
    }
    if let Some(message) = due.inbound.filter(|_| due.is_about(About::Waits)) {
        let waits = table::waits(&chassis.db, message).await?;
        return Ok((!waits).then_some("not needed: the message waits no longer"));
    }
    Ok(None)
}

/// How a run stands, for whoever asks in its thread.
pub(crate) fn status(run: &Run) -> String {
    let mut text = match run.state {
        RunState::Queued => format!("{} waits to be started", run.id),
        RunState::Starting => format!("{} is being started", run.id),
        RunState::Running => format!("{} works", run.id),
        RunState::Stopping => format!("{} is being stopped", run.id),
        RunState::Finishing => format!("{} is through and its record is being completed", run.id),
        RunState::Succeeded => format!("{} has succeeded", run.id),
        RunState::Failed => format!("{} has failed", run.id),
        RunState::Canceled => format!("{} was canceled", run.id),
        RunState::TimedOut => format!("{} took too long and was ended", run.id),
    };
    if let Some(what) = &run.waiting_for {
        let _ = write!(text, ", waiting for: {what}");
    }
    if let Some(ahead) = run.ahead.filter(|ahead| *ahead > 0) {
        let _ = write!(text, " ({ahead} before it)");
    }
    let since = run.started_at.unwrap_or(run.created_at);
    let _ = write!(text, ". {} {}.", if run.started_at.is_some() { "Started" } else { "Accepted" }, since.format("%Y-%m-%d %H:%M UTC"));
    if let Some(message) = &run.message {
        let _ = write!(text, " {message}");
    }
    text
}
