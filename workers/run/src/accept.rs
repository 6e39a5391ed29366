//! Accepting runs and steers, and what people ask of them.

use towpath_chassis::{
    Chassis, Error, Result, Work,
    idempotency::{self, Claim, Claimed, Key},
    timer,
};
use towpath_schemas::{
    ErrorCode, Problem,
    agent::Mode,
    body::{Run, RunState, Transcript},
    event,
    guest::{SteerEnd, SteerState},
    id::{FileId, PrincipalId, RunId, SteerId, TenantId},
    limit::{STEER_BYTES, STEERS_OPEN},
};

use crate::{
    admission,
    apply::{self, Happening, TIMER_DEADLINE, apply_one},
    report::note_steers,
    state::On,
    table::{self, Entry, Inserted, NewRow, TargetRow},
};

/// A run with what belongs to it, ready to be written.
#[derive(Debug, Clone)]
pub struct Accept {
    pub row: NewRow,
    pub targets: Vec<TargetRow>,
    pub files: Vec<FileId>,
}

/// A run that was accepted, as it looks at that moment; None when a look at the database has to tell.
pub type Accepted = Option<Box<Run>>;

/// Writes runs; for each how it looks, or what stands in its way. The caller has written their sessions.
pub async fn accept(work: &mut Work, accepts: &[&Accept]) -> Result<Vec<std::result::Result<Accepted, Problem>>> {
    let rows: Vec<NewRow> = accepts.iter().map(|accept| accept.row.clone()).collect();
    let inserted = table::insert(work, &rows).await?;
    let written: Vec<&&Accept> = accepts.iter().filter(|accept| inserted.contains_key(&accept.row.id)).collect();
    let entries: Vec<Entry> = written
        .iter()
        .map(|accept| Entry {
            run: accept.row.id,
            tenant: accept.row.tenant,
            revision: 1,
            from: None,
            to: RunState::Queued,
            cause: "accept".to_owned(),
            actor: accept.row.principal.to_string(),
            epoch: 0,
            reason: None,
            detail: None,
        })
        .collect();
    table::history(work, &entries).await?;
    let deadlines: Vec<(&str, String, std::time::Duration)> = inserted
        .iter()
        .filter_map(|(run, row)| Some((TIMER_DEADLINE, run.to_string(), (row.deadline_at? - row.created_at).to_std().unwrap_or_default())))
        .collect();
    timer::set(work, &deadlines).await?;
    let targets: Vec<TargetRow> = written.iter().flat_map(|accept| accept.targets.clone()).collect();
    table::insert_targets(work, &targets).await?;
    let files: Vec<_> = written
        .iter()
        .flat_map(|accept| {
            accept.files.iter().enumerate().map(|(n, file)| (accept.row.id, i32::try_from(n).unwrap_or(i32::MAX), accept.row.tenant, *file))
        })
        .collect();
    towpath_file::attach_to_runs(work, &files).await?;
    let mut backends: Vec<&str> = written.iter().map(|accept| accept.row.backend).collect();
    backends.sort_unstable();
    backends.dedup();
    for backend in backends {
        admission::announce(work, backend).await?;
    }
    let mut answers = Vec::with_capacity(accepts.len());
    for accept in accepts {
        answers.push(match inserted.get(&accept.row.id) {
            Some(row) => Ok(shown(accept, row)),
            None => why_not(work, accept).await?,
        });
    }
    Ok(answers)
}

/// What was just written, without reading it back: this is the answer to most requests. Names of files are only in the database.
fn shown(accept: &Accept, inserted: &Inserted) -> Accepted {
    if !accept.files.is_empty() {
        return None;
    }
    let row = &accept.row;
    Some(Box::new(Run {
        id: row.id,
        session: row.session,
        agent: row.agent_name.clone(),
        agent_version: row.agent_version,
        principal: row.principal,
        mode: if row.mode == "interactive" { Mode::Interactive } else { Mode::OneShot },
        state: RunState::Queued,
        wanted: None,
        reason: None,
        message: None,
        prompt: Some(row.prompt.clone()),
        labels: serde_json::from_value(row.labels.clone()).unwrap_or_default(),
        priority: row.priority,
        files: Some(Vec::new()),
        result: None,
        exit: None,
        epoch: 0,
        revision: 1,
        startup: Vec::new(),
        waiting_for: Some("place".to_owned()),
        transcript: Transcript { state: "live".to_owned(), bytes: 0, missing: Some(0) },
        ahead: None,
        deadline: inserted.deadline_at,
        created_at: inserted.created_at,
        started_at: None,
        ended_at: None,
        deliveries: accept.targets.len() as i64,
    }))
}

/// A run was left out: it is there already (its first COMMIT went through after all), or its session is busy.
async fn why_not(work: &mut Work, accept: &Accept) -> Result<std::result::Result<Accepted, Problem>> {
    if !table::existing(work.db(), &[accept.row.id]).await?.is_empty() {
        return Ok(Ok(None));
    }
    let busy = Problem::new(ErrorCode::SessionBusy, format!("{} has a live run", accept.row.session));
    Ok(Err(match table::live_run(work.db(), accept.row.session).await? {
        Some(live) => busy.blocked_by(live),
        None => busy,
    }))
}

/// Asks a run to stop. The state it is in afterwards.
pub async fn cancel(chassis: &Chassis, tenant: TenantId, principal: PrincipalId, run: RunId) -> Result<RunState> {
    crate::view::state(&chassis.db, tenant, run).await?;
    let mut work = chassis.begin().await?;
    let row = apply_one(&mut work, Happening::new(run, On::Cancel, principal.to_string())).await?;
    work.commit().await?;
    Ok(row.machine.state)
}

/// A person's word that the run's sandbox is gone. Refused while its host sees it alive.
pub async fn abandon(chassis: &Chassis, tenant: TenantId, principal: PrincipalId, run: RunId) -> Result<RunState> {
    crate::view::state(&chassis.db, tenant, run).await?;
    let mut work = chassis.begin().await?;
    let row = table::lock(work.db(), &[run]).await?.pop().ok_or_else(|| apply::no_such_run(run))?;
    let epoch = row.machine.epoch;
    if towpath_sandbox::facts(&mut work, &[(run, epoch)]).await?.iter().any(|fact| fact.present) {
        return Err(Error::refused(ErrorCode::SandboxPresent, format!("the sandbox of {run} is alive on its host")));
    }
    let row = apply_one(&mut work, Happening::new(run, On::Abandon, principal.to_string())).await?;
    towpath_sandbox::abandon(&mut work, run, epoch).await?;
    work.commit().await?;
    Ok(row.machine.state)
}

/// A follow-up message for a live run.
#[derive(Debug, Clone)]
pub struct NewSteerRow {
    pub id: SteerId,
    pub tenant: TenantId,
    pub run: RunId,
    pub principal: PrincipalId,
    pub message: String,
    pub files: Vec<FileId>,
    pub key: Option<Key>,
}

/// Route of steers for idempotency keys; the run's id follows.
const STEER_ROUTE: &str = "steer";

/// Accepts a steer; its id, and whether an earlier request with the same key made it.
pub async fn steer(chassis: &Chassis, new: &NewSteerRow) -> Result<(SteerId, bool)> {
    check_steer(new)?;
    crate::view::state(&chassis.db, new.tenant, new.run).await?;
    match steer_once(chassis, new).await {
        // The same id again: if the first COMMIT went through, the key or the steer itself is found.
        Err(Error::OutcomeUnknown(_)) => steer_once(chassis, new).await,
        other => other,
    }
}

fn check_steer(new: &NewSteerRow) -> Result<()> {
    if new.message.is_empty() {
        return Err(Error::refused(ErrorCode::Unprocessable, "message: it is empty"));
    }
    if new.message.len() > STEER_BYTES {
        return Err(Error::refused(
            ErrorCode::SteerTooLong,
            format!("the message has {} bytes, at most {STEER_BYTES} are possible", new.message.len()),
        ));
    }
    if new.message.contains('\0') {
        return Err(Error::refused(ErrorCode::NulCharacter, "message: it holds U+0000"));
    }
    Ok(())
}

async fn steer_once(chassis: &Chassis, new: &NewSteerRow) -> Result<(SteerId, bool)> {
    let mut work = chassis.begin().await?;
    let run = table::lock(work.db(), &[new.run]).await?.pop().ok_or_else(|| apply::no_such_run(new.run))?;
    if let Some(key) = &new.key {
        let claim = [Claim { tenant: new.tenant, key, thing: new.id.uuid() }];
        let claimed = idempotency::claim(work.db(), &format!("{STEER_ROUTE} {}", new.run), &claim).await?.pop();
        match claimed {
            Some(Claimed::Replay(id)) => return Ok((id.into(), true)),
            Some(claimed @ Claimed::Mismatch) => return Err(claimed.refuse_mismatch().map_or_else(|| Error::broken("claim"), Error::from)),
            Some(Claimed::New) | None => {}
        }
    }
    if towpath_steer::exists(&mut work, new.id).await? {
        return Ok((new.id, false));
    }
    match run.machine.state {
        RunState::Queued | RunState::Starting | RunState::Running => {}
        RunState::Stopping | RunState::Finishing => {
            return Err(Error::refused(ErrorCode::RunEnding, format!("{} is {}", new.run, run.machine.state)));
        }
        RunState::Succeeded | RunState::Failed | RunState::Canceled | RunState::TimedOut => {
            return Err(Error::refused(ErrorCode::RunEnded, format!("{} has ended: {}", new.run, run.machine.state)));
        }
    }
    if towpath_steer::open_count(&mut work, new.run).await? >= STEERS_OPEN {
        return Err(Error::refused(ErrorCode::TooMany, format!("{} has {STEERS_OPEN} open steers", new.run)));
    }
    let known = towpath_file::known(work.db(), new.tenant, &new.files).await?;
    if let Some(missing) = new.files.iter().find(|file| !known.contains(file)) {
        return Err(Error::refused(ErrorCode::UnknownFile, format!("there is no file {missing}")));
    }
    towpath_steer::insert(&mut work, new.tenant, new.run, new.id, new.principal, &new.message, &new.files).await?;
    note_steers(&mut work, &[(&run, SteerEnd { steer: new.id, state: SteerState::Queued })]).await?;
    work.event(run.tenant, run.id, event::Kind::Moved { revision: run.revision });
    work.commit().await?;
    Ok((new.id, false))
}
