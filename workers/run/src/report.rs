//! What supervisors report, applied under epoch and incarnation (FENCED). Each report may come any number of times.

use towpath_chassis::{Chassis, Result, Work, secret};
use towpath_file::Content;
use towpath_schemas::{
    body::RunState,
    event,
    guest::{Exit, Hello, SteerEnd, SteerState},
    id::{RunId, SteerId, TenantId},
};

use crate::{
    apply::{Applied, Happening, apply},
    state::{Exited, On},
    table::{self, Entry, Locked},
};

/// Who reports: a supervisor process that was bound to its epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reporter {
    pub tenant: TenantId,
    pub run: RunId,
    pub epoch: i32,
    pub incarnation: String,
}

/// The answer to a hello.
#[derive(Debug, Clone)]
pub enum Greeting {
    /// Bound, now or before. `stop`: the end that is wanted already.
    Welcome {
        reporter: Reporter,
        sealed: u64,
        stop: Option<Stop>,
    },
    Fenced(&'static str),
}

/// The order to stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stop {
    pub grace_s: u32,
    pub reason: String,
}

/// Binds a supervisor to its epoch, or finds that it is bound, or fences it. The start order may go out only after this has returned.
pub async fn hello(chassis: &Chassis, hello: &Hello) -> Result<Greeting> {
    let Some(credential) = towpath_sandbox::credential(&chassis.db, hello.run, hello.epoch).await? else {
        return Ok(Greeting::Fenced("there is no such sandbox"));
    };
    let key_sha256 = secret::sha256(hello.key.as_bytes());
    let knows_token = hello.token.as_deref().is_some_and(|token| chassis.secrets.is_sandbox_token(hello.run, hello.epoch, token));
    let knows_key = credential.key_sha256.as_deref().is_some_and(|known| secret::same(known, &key_sha256));
    match &credential.incarnation {
        Some(bound) if *bound != hello.incarnation => return Ok(Greeting::Fenced("another supervisor has this epoch")),
        Some(_) if !knows_key => return Ok(Greeting::Fenced("wrong key")),
        None if !knows_token => return Ok(Greeting::Fenced("wrong token")),
        Some(_) | None if credential.unwanted => return Ok(Greeting::Fenced("the sandbox is not wanted any more")),
        Some(_) | None => {}
    }
    let mut work = chassis.begin().await?;
    let bound = On::Bound { epoch: hello.epoch, incarnation: hello.incarnation.clone() };
    let run = match apply(&mut work, &[Happening::new(hello.run, bound, "supervisor")]).await?.pop() {
        Some(Applied::Moved(run)) => {
            if !towpath_sandbox::bind(&mut work, hello.run, hello.epoch, &hello.incarnation, &key_sha256, &hello.identity).await? {
                return Ok(Greeting::Fenced("the sandbox is not wanted any more"));
            }
            table::step(&mut work, &[(run.id, hello.epoch, run.tenant, "connected".to_owned(), None)]).await?;
            run
        }
        Some(Applied::Unchanged(run))
            if run.machine.epoch == hello.epoch && run.machine.incarnation.as_deref() == Some(&hello.incarnation) =>
        {
            // The same supervisor again; its identity may be completer now.
            towpath_sandbox::bind(&mut work, hello.run, hello.epoch, &hello.incarnation, &key_sha256, &hello.identity).await?;
            run
        }
        Some(Applied::Unchanged(_) | Applied::Refused(..) | Applied::NoSuchRun) | None => {
            return Ok(Greeting::Fenced("the run has gone on without it"));
        }
    };
    let stop = stop_of(&run);
    work.commit().await?;
    let sealed = towpath_transcript::record(&chassis.db, hello.run, hello.epoch).await?.map_or(0, |record| record.last_seq);
    let reporter = Reporter { tenant: run.tenant, run: run.id, epoch: hello.epoch, incarnation: hello.incarnation.clone() };
    Ok(Greeting::Welcome { reporter, sealed, stop })
}

fn stop_of(run: &Locked) -> Option<Stop> {
    let wanted = run.machine.wanted?;
    let reason = run.machine.reason.clone().unwrap_or_else(|| wanted.word().to_owned());
    run.machine.active.then(|| Stop { grace_s: u32::try_from(run.grace_s).unwrap_or(0), reason })
}

/// The run's row under its lock, if the reporter's word still counts.
async fn heard(work: &mut Work, reporter: &Reporter) -> Result<Option<Locked>> {
    let run = table::lock(work.db(), &[reporter.run]).await?.pop();
    let bound = run.filter(|run| run.machine.epoch == reporter.epoch && run.machine.incarnation.as_deref() == Some(&reporter.incarnation));
    // A sandbox that was given up as lost has the same epoch and incarnation still, and no say any more.
    match bound {
        Some(run) if towpath_sandbox::is_wanted(work, run.id, reporter.epoch).await? => Ok(Some(run)),
        Some(_) | None => Ok(None),
    }
}

/// A step of the start.
pub async fn step(chassis: &Chassis, reporter: &Reporter, step: &str, detail: Option<String>) -> Result<()> {
    let mut work = chassis.begin().await?;
    let Some(run) = heard(&mut work, reporter).await? else { return Ok(()) };
    table::step(&mut work, &[(run.id, reporter.epoch, run.tenant, clean(step, 64), detail.map(|detail| clean(&detail, 1024)))]).await?;
    work.event(run.tenant, run.id, event::Kind::Moved { revision: run.revision });
    work.commit().await
}

/// The command and all its children have ended.
pub async fn ended(chassis: &Chassis, reporter: &Reporter, exit: Exit, cause: Option<(String, Option<String>)>) -> Result<()> {
    let (reason, message) = match cause {
        Some((reason, message)) => (Some(clean(&reason, 64)), message.map(|message| clean(&message, 1024))),
        None => (None, None),
    };
    let on = On::Ended { epoch: reporter.epoch, incarnation: reporter.incarnation.clone(), exited: Exited { exit, reason, message } };
    let mut work = chassis.begin().await?;
    apply(&mut work, &[Happening::new(reporter.run, on, "supervisor")]).await?;
    work.commit().await
}

/// The result's text; the first one of an epoch counts.
pub async fn result(chassis: &Chassis, reporter: &Reporter, text: &str, truncated: bool) -> Result<()> {
    let mut work = chassis.begin().await?;
    let Some(run) = heard(&mut work, reporter).await? else { return Ok(()) };
    let most = towpath_schemas::limit::RESULT_BYTES;
    let cleaned = clean(text, most);
    let truncated = truncated || text.len() > most;
    table::result(&mut work, &run, &cleaned, truncated).await?;
    work.commit().await
}

/// Text from a sandbox made fit for the database: U+0000 replaced, cut at `most` bytes.
fn clean(text: &str, most: usize) -> String {
    let mut text = text.replace('\0', "\u{fffd}");
    let mut cut = most.min(text.len());
    while !text.is_char_boundary(cut) {
        cut -= 1;
    }
    text.truncate(cut);
    text
}

/// An output that is in the store, or why it is not.
pub enum OutputReport<'a> {
    Stored { name: &'a str, content: Content<'a> },
    Unavailable { name: &'a str, size: u64, reason: &'a str },
}

/// Records an output; false when the reporter's word does not count any more.
pub async fn output(chassis: &Chassis, reporter: &Reporter, report: OutputReport<'_>) -> Result<bool> {
    let mut work = chassis.begin().await?;
    let Some(run) = heard(&mut work, reporter).await? else { return Ok(false) };
    match report {
        OutputReport::Stored { name, content } => {
            towpath_file::output_stored(&mut work, run.tenant, run.id, reporter.epoch, name, content).await?;
        }
        OutputReport::Unavailable { name, size, reason } => {
            let name = clean(name, 1024);
            towpath_file::output_unavailable(&mut work, run.tenant, run.id, reporter.epoch, &name, size, &clean(reason, 256)).await?;
        }
    }
    work.commit().await?;
    Ok(true)
}

/// Marks steers as sent, before they are: at a loss they are then `unknown` and never sent again. Those that may go out.
pub async fn steers_sent(chassis: &Chassis, reporter: &Reporter, steers: &[SteerId]) -> Result<bool> {
    let mut work = chassis.begin().await?;
    let Some(run) = heard(&mut work, reporter).await? else { return Ok(false) };
    if !matches!(run.machine.state, RunState::Running | RunState::Stopping) {
        return Ok(false);
    }
    let moved = towpath_steer::sent(&mut work, run.id, reporter.epoch, steers).await?;
    let ends: Vec<SteerEnd> = moved.into_iter().map(|steer| SteerEnd { steer, state: SteerState::Sent }).collect();
    note_steers(&mut work, &run, &ends).await?;
    work.commit().await?;
    Ok(true)
}

/// What became of steers.
pub async fn steers(chassis: &Chassis, reporter: &Reporter, ends: &[SteerEnd]) -> Result<()> {
    let mut work = chassis.begin().await?;
    let Some(run) = heard(&mut work, reporter).await? else { return Ok(()) };
    let moved = towpath_steer::report(&mut work, run.id, reporter.epoch, ends).await?;
    note_steers(&mut work, &run, &moved).await?;
    work.commit().await
}

/// Writes moves of steers into the run's history, so that event streams have one order for both.
pub(crate) async fn note_steers(work: &mut Work, run: &Locked, ends: &[SteerEnd]) -> Result<()> {
    for end in ends {
        let revision = table::next_revision(work, run.id).await?;
        let state = towpath_steer::state::word(end.state);
        let ordinal = towpath_steer::ordinal(work, end.steer).await?;
        table::history(
            work,
            &[Entry {
                run: run.id,
                tenant: run.tenant,
                revision,
                from: Some(run.machine.state),
                to: run.machine.state,
                cause: "steer".to_owned(),
                actor: "supervisor".to_owned(),
                epoch: run.machine.epoch,
                reason: None,
                detail: Some(serde_json::json!({ "steer": end.steer, "ordinal": ordinal, "state": state })),
            }],
        )
        .await?;
        work.event(run.tenant, run.id, event::Kind::Moved { revision });
    }
    Ok(())
}

/// What a gateway asks about its connections now and then, and after an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub run: RunId,
    pub epoch: i32,
    /// A newer epoch, or nobody wants it.
    pub fenced: bool,
    pub stop: Option<Stop>,
    /// Everything is kept: it may leave.
    pub release: bool,
}

pub async fn standings(chassis: &Chassis, connected: &[(RunId, i32)]) -> Result<Vec<Standing>> {
    crate::view::standings(&chassis.db, connected).await
}
