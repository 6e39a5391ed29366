//! `POST /v1/runs`: checks the request, then the group commit of accepts.

use std::{collections::HashMap, time::Duration};

use towpath_chassis::{
    Chassis, Error, Result, Work,
    group::{Group, Lanes},
    idempotency::{self, Claim, Claimed, Key},
};
use towpath_delivery::TargetKind;
use towpath_run::{
    Deadline, NewRow, TargetRow,
    accept::{Accept, Accepted, accept},
};
use towpath_schemas::{
    ErrorCode, Problem,
    agent::{AgentDefinition, Backend, Mode, OnLost},
    body::{NewRun, Rerun, Target, WebhookTarget},
    id::{FileId, PrincipalId, RunId, SessionId, TenantId, ThreadId},
    limit::{FILES_PER_RUN, LABEL_BYTES, LABELS_PER_RUN, PROMPT_BYTES, TARGETS_PER_RUN},
};

use crate::table::{self, Startable};

/// Transactions at a time and accepts in each; each try of a batch has a limit of its own.
const LANES: Lanes = Lanes { lanes: 3, most: 256, limit: Duration::from_secs(30) };
/// Route name of runs for idempotency keys.
const ROUTE: &str = "run";
/// Times that a batch without an answer is tried again under the same ids.
const TRIES: usize = 3;

/// A request for a run by an authenticated caller. Ids are minted before anything is written.
#[derive(Debug, Clone)]
pub struct Start {
    pub tenant: TenantId,
    pub principal: PrincipalId,
    pub request: NewRun,
    pub key: Option<Key>,
    pub traceparent: Option<String>,
    run: RunId,
    session: SessionId,
    secrets: Vec<Option<Vec<u8>>>,
    deadline: Option<Deadline>,
    thread: Option<ThreadId>,
}

/// The run that a request made.
#[derive(Debug, Clone, PartialEq)]
pub struct Started {
    pub run: RunId,
    /// How it looks; None when the database has to tell.
    pub shown: Accepted,
    /// An earlier request with the same key made it.
    pub replay: bool,
}

impl Start {
    /// Checks what can be checked without the database.
    pub fn new(
        chassis: &Chassis,
        tenant: TenantId,
        principal: PrincipalId,
        request: NewRun,
        key: Option<Key>,
        traceparent: Option<String>,
    ) -> Result<Self> {
        let refuse = |code, detail: String| Err(Error::refused(code, detail));
        if request.prompt.len() > PROMPT_BYTES {
            return refuse(
                ErrorCode::PromptTooLong,
                format!("prompt: {} bytes, at most {PROMPT_BYTES} are possible", request.prompt.len()),
            );
        }
        let mut texts = vec![("prompt", &request.prompt), ("agent", &request.agent)];
        texts.extend(request.labels.iter().flat_map(|(key, value)| [("labels", key), ("labels", value)]));
        if let Some((field, _)) = texts.iter().find(|(_, text)| text.contains('\0')) {
            return refuse(ErrorCode::NulCharacter, format!("{field}: it holds U+0000"));
        }
        if request.labels.len() > LABELS_PER_RUN
            || request.labels.iter().any(|(key, value)| key.is_empty() || key.len() > LABEL_BYTES || value.len() > LABEL_BYTES)
        {
            return refuse(
                ErrorCode::Unprocessable,
                format!("labels: at most {LABELS_PER_RUN}, keys and values of at most {LABEL_BYTES} bytes"),
            );
        }
        if request.files.len() > FILES_PER_RUN {
            return refuse(ErrorCode::TooMany, format!("files: {}, at most {FILES_PER_RUN} are possible", request.files.len()));
        }
        if request.deliver.len() > TARGETS_PER_RUN {
            return refuse(ErrorCode::TooMany, format!("deliver: {}, at most {TARGETS_PER_RUN} are possible", request.deliver.len()));
        }
        if !(-100..=100).contains(&request.priority.unwrap_or(0)) {
            return refuse(ErrorCode::Unprocessable, "priority: from -100 to 100".to_owned());
        }
        let deadline = request.deadline.as_deref().map(deadline).transpose()?;
        let run = RunId::mint();
        let mut secrets = Vec::new();
        for (n, target) in request.deliver.iter().enumerate() {
            let Target::Webhook(webhook) = target;
            towpath_delivery::check_target(chassis, webhook)?;
            let place = towpath_delivery::secret_place(run, place_of(n));
            secrets.push(webhook.secret.as_ref().map(|secret| chassis.secrets.seal(&place, secret.as_bytes())).transpose()?);
        }
        let session = request.session.unwrap_or_else(SessionId::mint);
        Ok(Self { tenant, principal, request, key, traceparent, run, session, secrets, deadline, thread: None })
    }

    /// A run that a message of a thread asks for: its ids are the caller's, so that asking twice starts one, and its result goes to the thread. The request
    /// names no targets of its own.
    pub fn for_thread(self, run: RunId, thread: ThreadId) -> Self {
        let session = self.request.session.unwrap_or(SessionId(thread.uuid()));
        Self { run, session, thread: Some(thread), ..self }
    }

    fn mode(&self, definition: &AgentDefinition) -> Mode {
        self.request.mode.unwrap_or(definition.mode)
    }

    fn accept(&self, agent: &Startable) -> Result<Accept> {
        let definition = &agent.definition;
        let json = |value: serde_json::Result<serde_json::Value>| value.map_err(|error| Error::broken(format!("run: {error}")));
        let row = NewRow {
            id: self.run,
            tenant: self.tenant,
            session: self.session,
            agent: agent.id,
            agent_name: agent.name.clone(),
            agent_version: agent.version,
            principal: self.principal,
            mode: match self.mode(definition) {
                Mode::OneShot => "one_shot",
                Mode::Interactive => "interactive",
            },
            backend: match definition.sandbox.backend {
                Backend::Process => "process",
                Backend::Container => "container",
                Backend::Kubernetes => "kubernetes",
            },
            priority: self.request.priority.unwrap_or(0),
            prompt: self.request.prompt.clone(),
            labels: json(serde_json::to_value(&self.request.labels))?,
            sandbox: agent.sandbox.clone(),
            start_s: i32::try_from(definition.limits.start_s).unwrap_or(i32::MAX),
            grace_s: i32::try_from(definition.limits.grace_s).unwrap_or(10),
            transcript_bytes: i64::try_from(definition.limits.transcript_bytes).unwrap_or(i64::MAX),
            fence_s: definition.fence_after.and_then(|fence| i32::try_from(fence).ok()),
            restartable: definition.on_lost == OnLost::Restart,
            concurrent: definition.limits.concurrent.and_then(|limit| i32::try_from(limit).ok()),
            max_s: definition.limits.max_s.and_then(|limit| i32::try_from(limit).ok()),
            deadline: self.deadline,
            traceparent: self.traceparent.clone(),
        };
        let to_thread = self.thread.map(|thread| TargetRow {
            run: self.run,
            n: place_of(self.request.deliver.len()),
            tenant: self.tenant,
            kind: TargetKind::Thread,
            url: thread.to_string(),
            secret: None,
        });
        let targets = self
            .request
            .deliver
            .iter()
            .zip(&self.secrets)
            .enumerate()
            .map(|(n, (Target::Webhook(webhook), secret))| TargetRow {
                run: self.run,
                n: place_of(n),
                tenant: self.tenant,
                kind: TargetKind::Webhook,
                url: webhook.url.clone(),
                secret: secret.clone(),
            })
            .chain(to_thread)
            .collect();
        Ok(Accept { row, targets, files: self.request.files.clone() })
    }
}

/// Longest time that a deadline may be away.
const DEADLINE: Duration = Duration::from_secs(365 * 24 * 3600);

fn deadline(text: &str) -> Result<Deadline> {
    if let Ok(at) = chrono::DateTime::parse_from_rfc3339(text) {
        return Ok(Deadline::At(at.to_utc()));
    }
    match humantime::parse_duration(text) {
        Ok(after) if (Duration::from_secs(1)..=DEADLINE).contains(&after) => Ok(Deadline::After(after)),
        Ok(_) => Err(Error::refused(ErrorCode::Unprocessable, "deadline: from 1s to 365d away")),
        Err(_) => {
            Err(Error::refused(ErrorCode::Unprocessable, "deadline: a time as 2027-03-28T03:00:00+02:00, or how long from now as 2h"))
        }
    }
}

fn place_of(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

/// The request that would do the same as an earlier run of the tenant, by the agent's newest version: same prompt, files, labels, priority, mode and targets.
pub async fn again(chassis: &Chassis, tenant: TenantId, run: RunId, change: Rerun) -> Result<NewRun> {
    let earlier = towpath_run::view::run(&chassis.db, tenant, run).await?;
    let mut connection = chassis.db.acquire().await?;
    let targets = towpath_run::targets(&mut connection, &[run]).await?;
    // A thread is answered once, for the message that came from it.
    let deliver = targets.into_iter().filter(|target| target.kind == TargetKind::Webhook).map(|target| {
        let place = towpath_delivery::secret_place(run, target.n);
        let secret = target.secret.map(|sealed| chassis.secrets.unseal(&place, &sealed)).transpose()?;
        let secret =
            secret.map(|secret| String::from_utf8(secret).map_err(|_| Error::broken("a target's secret is not UTF-8"))).transpose()?;
        Ok(Target::Webhook(WebhookTarget { url: target.url, secret }))
    });
    Ok(NewRun {
        agent: earlier.agent,
        prompt: change.prompt.or(earlier.prompt).unwrap_or_default(),
        session: change.same_session.then_some(earlier.session),
        files: earlier.files.unwrap_or_default().into_iter().map(|file| file.id).collect(),
        mode: Some(earlier.mode),
        deliver: deliver.collect::<Result<_>>()?,
        labels: earlier.labels,
        priority: Some(earlier.priority),
        // A deadline was for that one.
        deadline: None,
    })
}

/// What became of one member of a batch.
type Answer = std::result::Result<Started, Problem>;

/// The accepts of this process.
#[derive(Clone)]
pub struct Starts(Group<Start, Answer>);

impl Starts {
    pub fn new(chassis: &Chassis) -> Self {
        let own = chassis.clone();
        Self(Group::start(&chassis.tasks, LANES, move |batch| {
            let chassis = own.clone();
            async move { start_all(&chassis, batch).await }
        }))
    }

    pub async fn start(&self, start: Start) -> Result<Started> {
        self.0.submit(start).await?.map_err(Error::from)
    }
}

/// Starts every member that can be; the others are told why not.
pub async fn start_all(chassis: &Chassis, batch: Vec<Start>) -> Vec<Answer> {
    metrics::histogram!("towpath_accept_batch").record(batch.len() as f64);
    start_halves(chassis, batch, false).await
}

/// `unanswered`: a COMMIT of these members was sent and its answer never came.
async fn start_halves(chassis: &Chassis, batch: Vec<Start>, mut unanswered: bool) -> Vec<Answer> {
    for _ in 0..TRIES {
        match start_once(chassis, &batch).await {
            Ok(answers) => return answers,
            Err(Error::OutcomeUnknown(error)) => {
                tracing::warn!(%error, members = batch.len(), "a commit without an answer: the same ids are read back and inserted again");
                unanswered = true;
            }
            Err(error) if error.is_passing() && unanswered => tracing::warn!(error = error.chain(), "trying again"),
            Err(error) if error.is_passing() || batch.len() == 1 => {
                if !error.is_passing() {
                    tracing::error!(error = error.chain(), "an accept failed");
                }
                let problem = if unanswered { Error::OutcomeUnknown(sqlx::Error::WorkerCrashed).problem() } else { error.problem() };
                return vec![Err(problem); batch.len()];
            }
            Err(error) => {
                tracing::warn!(error = error.chain(), members = batch.len(), "halving a batch");
                let mut left = batch;
                let right = left.split_off(left.len() / 2);
                let mut answers = Box::pin(start_halves(chassis, left, unanswered)).await;
                answers.extend(Box::pin(start_halves(chassis, right, unanswered)).await);
                return answers;
            }
        }
    }
    vec![Err(Problem::new(ErrorCode::OutcomeUnknown, "the database broke off during the commit, and again")); batch.len()]
}

async fn start_once(chassis: &Chassis, batch: &[Start]) -> Result<Vec<Answer>> {
    let mut work = chassis.begin().await?;
    // A database that hangs is as good as away: nothing was committed yet, so the answer is plain 503.
    let prepared = tokio::time::timeout(chassis.config.limits.database_wait, prepare(&mut work, batch)).await;
    let answers = prepared.map_err(|_| Error::Database(sqlx::Error::PoolTimedOut))??;
    work.commit().await?;
    Ok(answers)
}

/// Everything of a batch but its commit.
async fn prepare(work: &mut Work, batch: &[Start]) -> Result<Vec<Answer>> {
    let mut answers: Vec<Option<Answer>> = vec![None; batch.len()];
    claim_keys(work, batch, &mut answers).await?;
    let accepts = resolve(work, batch, &mut answers).await?;
    let sessions: Vec<towpath_session::NewRow> = accepts
        .iter()
        .filter(|(index, _)| batch[**index].request.session.is_none())
        .map(|(_, accept)| towpath_session::NewRow {
            id: accept.row.session,
            tenant: accept.row.tenant,
            agent: accept.row.agent,
            agent_name: accept.row.agent_name.clone(),
            principal: accept.row.principal,
        })
        .collect();
    towpath_session::open(work, &sessions).await?;
    let mut order: Vec<&usize> = accepts.keys().collect();
    order.sort_unstable();
    let rows: Vec<&Accept> = order.iter().map(|index| &accepts[*index]).collect();
    for (index, outcome) in order.iter().zip(accept(work, &rows).await?) {
        answers[**index] = Some(outcome.map(|shown| Started { run: batch[**index].run, shown, replay: false }));
    }
    let refused: Vec<_> = batch
        .iter()
        .zip(&answers)
        .filter(|(start, answer)| {
            start.key.is_some() && matches!(answer, Some(Err(problem)) if problem.code != ErrorCode::IdempotencyMismatch.code())
        })
        .map(|(start, _)| start.run.uuid())
        .collect();
    idempotency::forget(work.db(), ROUTE, &refused).await?;
    Ok(answers
        .into_iter()
        .map(|answer| answer.unwrap_or_else(|| Err(Problem::new(ErrorCode::Internal, "the request was not answered"))))
        .collect())
}

/// Answers members whose key was used before.
async fn claim_keys(work: &mut Work, batch: &[Start], answers: &mut [Option<Answer>]) -> Result<()> {
    let keyed: Vec<(usize, Claim<'_>)> = batch
        .iter()
        .enumerate()
        .filter_map(|(index, start)| Some((index, Claim { tenant: start.tenant, key: start.key.as_ref()?, thing: start.run.uuid() })))
        .collect();
    let (places, claims): (Vec<usize>, Vec<Claim<'_>>) = keyed.into_iter().unzip();
    let claimed = idempotency::claim(work.db(), ROUTE, &claims).await?;
    for (index, claimed) in places.into_iter().zip(claimed) {
        answers[index] = match &claimed {
            Claimed::New => None,
            // Our own row: the first COMMIT of this batch went through after all.
            Claimed::Replay(thing) => Some(Ok(Started { run: (*thing).into(), shown: None, replay: *thing != batch[index].run.uuid() })),
            Claimed::Mismatch => claimed.refuse_mismatch().map(Err),
        };
    }
    Ok(())
}

/// Finds agents, sessions and files; members that name something unknown are answered.
async fn resolve(work: &mut Work, batch: &[Start], answers: &mut [Option<Answer>]) -> Result<HashMap<usize, Accept>> {
    let open: Vec<usize> = (0..batch.len()).filter(|index| answers[*index].is_none()).collect();
    let mut names: Vec<(TenantId, String)> = open.iter().map(|index| (batch[*index].tenant, batch[*index].request.agent.clone())).collect();
    names.sort_unstable();
    names.dedup();
    let agents = table::startable(work.db(), &names).await?;
    let sessions: Vec<SessionId> = open.iter().filter_map(|index| batch[*index].request.session).collect();
    let sessions = towpath_session::agents_of(work.db(), &sessions).await?;
    let mut accepts = HashMap::new();
    for index in open {
        let start = &batch[index];
        let outcome = match find(start, &agents, &sessions) {
            Ok(agent) => missing_file(work, start).await?.map_or_else(|| Ok(start.accept(agent)), Err),
            Err(problem) => Err(problem),
        };
        match outcome {
            Ok(accept) => {
                accepts.insert(index, accept?);
            }
            Err(problem) => answers[index] = Some(Err(problem)),
        }
    }
    Ok(accepts)
}

fn find<'a>(
    start: &Start,
    agents: &'a [Startable],
    sessions: &[(SessionId, TenantId, uuid::Uuid)],
) -> std::result::Result<&'a Startable, Problem> {
    let unknown = || table::unknown(&start.request.agent).problem();
    let agent = agents.iter().find(|agent| agent.tenant == start.tenant && agent.name == start.request.agent).ok_or_else(unknown)?;
    if start.request.prompt.is_empty() && start.mode(&agent.definition) == Mode::OneShot {
        return Err(Problem::new(ErrorCode::Unprocessable, "prompt: it is empty; only an interactive run can do without"));
    }
    let Some(wanted) = start.request.session else { return Ok(agent) };
    match sessions.iter().find(|(session, tenant, _)| *session == wanted && *tenant == start.tenant) {
        None => Err(Problem::new(ErrorCode::UnknownSession, format!("there is no session {wanted}"))),
        Some((.., with)) if *with != agent.id => {
            Err(Problem::new(ErrorCode::Unprocessable, format!("{wanted} is a conversation with another agent")))
        }
        Some(_) => Ok(agent),
    }
}

async fn missing_file(work: &mut Work, start: &Start) -> Result<Option<Problem>> {
    if start.request.files.is_empty() {
        return Ok(None);
    }
    let known: Vec<FileId> = towpath_file::known(work.db(), start.tenant, &start.request.files).await?;
    Ok(start
        .request
        .files
        .iter()
        .find(|file| !known.contains(file))
        .map(|file| Problem::new(ErrorCode::UnknownFile, format!("there is no file {file}"))))
}
