//! The life of a run, step by step, by the rooms' own functions and a pretended supervisor.

use anyhow::{Context, Result, bail};
use stage::slack;
use towpath_agent::start::{Start, start_all};
use towpath_channel::slack::event::{self, Came};
use towpath_chassis::{Chassis, Error, idempotency::Key};
use towpath_run::{
    accept::{self, NewSteerRow},
    admission,
    report::{self, Greeting, Report, Reporter},
};
use towpath_schemas::{
    agent::AgentDefinition,
    body::{NewRun, Target, WebhookTarget},
    command::Command,
    frame::{EndRecord, Frame, FrameKind},
    guest::{Exit, Hello, Identity, Phase},
    id::{ChannelId, FileId, PrincipalId, RunId, SessionId, SteerId, TenantId},
    subject,
};

use crate::{Process, World, roles, world::HOST};

/// The pool of the one host.
pub const POOL: &str = "process-local";
/// The supervisor of an epoch, as it would have drawn itself.
const INCARNATION: &str = "11111111111111111111111111111111";
const OTHER: &str = "22222222222222222222222222222222";
/// What a run prints, in two frames before its end record.
const PRINTED: [&[u8]; 2] = [b"one\n", b"two\n"];

/// A tenant with an agent, and one run of it once it was accepted.
#[derive(Debug, Clone)]
pub struct Life {
    pub tenant: TenantId,
    pub principal: PrincipalId,
    pub run: RunId,
    pub session: SessionId,
    pub epoch: i32,
    pub incarnation: String,
    pub identity: Identity,
    pub steers: Vec<SteerId>,
}

impl Life {
    /// What its supervisor signs its reports with.
    pub fn reporter(&self) -> Reporter {
        Reporter { tenant: self.tenant, run: self.run, epoch: self.epoch, incarnation: self.incarnation.clone() }
    }

    pub fn hello(&self, chassis: &Chassis) -> Hello {
        Hello {
            protocol: 1,
            run: self.run,
            epoch: self.epoch,
            incarnation: self.incarnation.clone(),
            token: Some(chassis.secrets.sandbox_token(self.run, self.epoch)),
            key: self.incarnation.repeat(2),
            phase: Phase::Fresh,
            identity: self.identity.clone(),
        }
    }

    /// The same as another supervisor would say it.
    pub fn impostor(&self) -> Self {
        Self { incarnation: OTHER.to_owned(), ..self.clone() }
    }

    pub fn observed(&self) -> Command {
        Command::Observed { tenant: self.tenant, run: self.run, epoch: self.epoch }
    }

    pub fn sealed(&self) -> Command {
        Command::Sealed { tenant: self.tenant, run: self.run, epoch: self.epoch }
    }

    pub fn seal(&self) -> Command {
        Command::Seal { tenant: self.tenant, run: self.run, epoch: self.epoch }
    }

    pub fn host(&self) -> Command {
        Command::Host { host: HOST.to_owned(), run: self.run }
    }

    /// The request that made it, as its sender sends it: always under the same key, each time under new ids.
    pub fn request(&self, process: &Process, world: &World) -> Result<Start> {
        let webhook = WebhookTarget { url: world.receiver.url.clone(), secret: None };
        let request =
            NewRun { agent: "worker".to_owned(), prompt: "work".to_owned(), deliver: vec![Target::Webhook(webhook)], ..NewRun::default() };
        let key = Key::new("first", vec![1; 32])?;
        Ok(Start::new(&process.chassis, self.tenant, self.principal, request, Some(key), None)?)
    }

    pub fn steer(&self, message: &str) -> Result<NewSteerRow> {
        Ok(NewSteerRow {
            id: SteerId::mint(),
            tenant: self.tenant,
            run: self.run,
            principal: self.principal,
            message: message.to_owned(),
            files: Vec::<FileId>::new(),
            key: Some(Key::new(message, vec![2; 32])?),
        })
    }
}

/// Where people speak with the agent in Slack.
pub const CHANNEL: &str = "C1";

/// Gives commands to the handler of that name, as JetStream would. What it did not do is an error.
pub async fn handle(process: &Process, name: &str, commands: Vec<Command>) -> Result<()> {
    for outcome in roles::handler(process, name)?.handle(&process.chassis, commands).await {
        match outcome {
            Ok(towpath_chassis::consume::Outcome::Done) => {}
            other => bail!("handler {name}: {other:?}"),
        }
    }
    Ok(())
}

impl World {
    /// A tenant with a person and an agent, and a host with room for four sandboxes.
    pub async fn ready(&self) -> Result<Life> {
        let chassis = &self.first.chassis;
        let tenant = towpath_tenant::create_tenant(chassis, "tenant").await?.id;
        let mut work = chassis.begin().await?;
        let principal = towpath_tenant::ensure_principal(&mut work, tenant, "user", "person").await?;
        admission::register_pool(&mut work, POOL, "process", HOST, 4).await?;
        work.commit().await?;
        let definition: AgentDefinition = serde_json::from_value(serde_json::json!({ "name": "worker", "command": ["/bin/true"] }))?;
        towpath_agent::put(chassis, tenant, principal, &definition, None).await?;
        let (run, session) = (RunId::mint(), SessionId::mint());
        Ok(Life {
            tenant,
            principal,
            run,
            session,
            epoch: 1,
            incarnation: INCARNATION.to_owned(),
            identity: Identity::default(),
            steers: Vec::new(),
        })
    }

    /// A channel that everybody may write to, whose mail server is away.
    pub async fn mail_channel(&self, life: &Life) -> Result<ChannelId> {
        let definition = serde_json::json!({
            "name": "mail", "agent": "worker", "access": "public",
            "mail": { "addresses": ["worker@example.org"], "smtp": { "host": "127.0.0.1", "port": 9, "tls": "none" } },
        });
        Ok(towpath_channel::put(&self.first.chassis, life.tenant, serde_json::from_value(definition)?).await?.0.id)
    }

    /// A Slack channel that everybody may write to, and a message to it.
    pub async fn slack_message(&self, life: &Life) -> Result<()> {
        self.slack.channel(CHANNEL);
        let definition = serde_json::json!({
            "name": "slack", "agent": "worker", "access": "public", "slack": { "api": self.slack.url },
            "secrets": { "signing_secret": slack::SIGNING_SECRET, "bot_token": slack::BOT_TOKEN },
        });
        let channel = towpath_channel::put(&self.first.chassis, life.tenant, serde_json::from_value(definition)?).await?.0.id;
        let ts = self.slack.say(CHANNEL, "U0ANN", "work", None);
        let raw = slack::mention(CHANNEL, "U0ANN", "work", &ts, None).body.into_bytes();
        let Came::Keep { keys, .. } = event::came(&raw) else { bail!("the event was not for us") };
        towpath_channel::Inbox::start(&self.first.chassis).keep(channel, keys, towpath_channel::Envelope::default(), raw).await?;
        Ok(())
    }

    /// A mail comes in.
    pub async fn write(&self, channel: ChannelId) -> Result<()> {
        let envelope = towpath_channel::Envelope { from: "ann@example.org".to_owned(), to: vec!["worker@example.org".to_owned()] };
        let mail = b"From: ann@example.org\r\nMessage-ID: <1@example.org>\r\nSubject: hi\r\n\r\nwork\r\n";
        towpath_channel::Inbox::start(&self.first.chassis).mail(channel, envelope, mail.to_vec()).await?;
        Ok(())
    }

    /// Its run is queued.
    pub async fn accepted(&self) -> Result<Life> {
        let mut life = self.ready().await?;
        let answer = start_all(&self.first.chassis, vec![life.request(&self.first, self)?]).await.pop().context("no answer")?;
        life.run = answer.map_err(Error::from)?.run;
        life.session = towpath_run::view::run(self.db(), life.tenant, life.run).await?.session;
        Ok(life)
    }

    /// It is starting; no sandbox is there yet.
    pub async fn admitted(&self) -> Result<Life> {
        let life = self.accepted().await?;
        admission::admit(&self.first.chassis, POOL).await?;
        Ok(life)
    }

    /// Its host sees a sandbox that has not said hello yet.
    pub async fn created(&self) -> Result<Life> {
        let mut life = self.admitted().await?;
        life.identity = self.pretend(life.run, life.epoch)?;
        Ok(life)
    }

    /// A supervisor is bound to it.
    pub async fn running(&self) -> Result<Life> {
        let life = self.created().await?;
        self.greet(&life).await?;
        Ok(life)
    }

    pub async fn greet(&self, life: &Life) -> Result<()> {
        match hello(&self.first.chassis, life.hello(&self.first.chassis)).await? {
            Greeting::Welcome { .. } => Ok(()),
            Greeting::Fenced(why) => bail!("fenced: {why}"),
        }
    }

    /// Its command has ended well, its result is told; its record is open.
    pub async fn finishing(&self) -> Result<Life> {
        let life = self.running().await?;
        tell(&self.first.chassis, &life.reporter(), result("done")).await?;
        tell(&self.first.chassis, &life.reporter(), ended(0)).await?;
        Ok(life)
    }

    /// Its record is closed and nobody told it.
    pub async fn sealed(&self) -> Result<Life> {
        let life = self.finishing().await?;
        self.print(&life).await?;
        seal(&self.first, &life).await?;
        Ok(life)
    }

    /// It has ended, and its result is owed to the receiver.
    pub async fn settled(&self) -> Result<Life> {
        let life = self.sealed().await?;
        handle(&self.first, "run", vec![life.sealed()]).await?;
        Ok(life)
    }

    /// One steer of it is open.
    pub async fn steered(&self) -> Result<Life> {
        let mut life = self.running().await?;
        let (steer, _) = accept::steer(&self.first.chassis, &life.steer("turn left")?).await?;
        life.steers.push(steer);
        Ok(life)
    }

    /// It was asked to stop.
    pub async fn stopping(&self) -> Result<Life> {
        let life = self.running().await?;
        accept::cancel(&self.first.chassis, life.tenant, life.principal, life.run).await?;
        Ok(life)
    }

    /// Its sandbox is gone for its host, and nobody told it.
    pub async fn lost(&self) -> Result<Life> {
        let life = self.running().await?;
        self.vanish(life.run, life.epoch)?;
        self.first.host.attend(&self.first.chassis, None).await?;
        Ok(life)
    }

    /// The frames of its epoch, to the end record, come to JetStream.
    pub async fn print(&self, life: &Life) -> Result<()> {
        let end = serde_json::to_vec(&EndRecord { exit: exit(0), bytes: 8, steers: Vec::new() })?;
        let kinds = [FrameKind::Stdout, FrameKind::Stderr, FrameKind::End];
        for (place, (kind, payload)) in (0_u64..).zip(kinds.into_iter().zip(PRINTED.into_iter().chain([&end[..]]))) {
            let epoch = u32::try_from(life.epoch)?;
            let frame = Frame { kind, epoch, seq: place + 1, offset: place * 4, wall_us: place, mono_us: place, payload: payload.to_vec() };
            let subject = subject::output(life.tenant, life.run, life.epoch, frame.seq);
            self.first.chassis.jetstream.publish(subject, frame.encode().into()).await?.await?;
        }
        self.note_end(life.run, life.epoch);
        Ok(())
    }

    /// Its epoch is lost, the next one is at work, and everything of the old one is done with.
    pub async fn raise(&mut self, life: &Life) -> Result<()> {
        sqlx::query("update run set restartable = true, fence_s = 60").execute(self.db()).await?;
        self.vanish(life.run, life.epoch)?;
        self.second.host.attend(&self.second.chassis, None).await?;
        self.recover().await?;
        let next = Life { epoch: life.epoch + 1, ..life.impostor() };
        self.pretend(next.run, next.epoch)?;
        self.greet(&next).await?;
        self.recover().await
    }

    /// Every run has come to its end, and every sandbox is gone.
    pub async fn finish(&mut self) -> Result<()> {
        let rows: Vec<(sqlx::types::Uuid, sqlx::types::Uuid, sqlx::types::Uuid)> =
            sqlx::query_as("select tenant_id, principal_id, id from run where ended_at is null").fetch_all(self.db()).await?;
        for (tenant, principal, run) in rows {
            accept::cancel(&self.second.chassis, tenant.into(), principal.into(), run.into()).await?;
        }
        sqlx::query("update timer set due_at = now() where kind = 'run_wanted'").execute(self.db()).await?;
        self.end_supervisors().await?;
        self.recover().await?;
        let sandboxes: Vec<(sqlx::types::Uuid, i32)> =
            sqlx::query_as("select run_id, epoch from sandbox where state <> 'gone'").fetch_all(self.db()).await?;
        for (run, epoch) in sandboxes {
            self.vanish(run.into(), epoch)?;
        }
        self.second.host.attend(&self.second.chassis, None).await?;
        self.recover().await
    }
}

/// Seals its record to the end.
pub async fn seal(process: &Process, life: &Life) -> Result<()> {
    handle(process, "transcript", vec![life.seal()]).await?;
    crate::recover::closed(&process.chassis, life.run, life.epoch).await
}

/// Says hello as a gateway takes it.
pub async fn hello(chassis: &Chassis, hello: Hello) -> Result<Greeting> {
    Ok(report::hellos(chassis, &[hello]).await.pop().context("no answer")?.map_err(Error::from)?)
}

/// Reports as a gateway takes it; whether the reporter's word counts.
pub async fn tell(chassis: &Chassis, reporter: &Reporter, report: Report) -> Result<bool> {
    Ok(report::reports(chassis, &[(reporter.clone(), report)]).await.pop().context("no answer")?.map_err(Error::from)?)
}

pub fn step(step: &str) -> Report {
    Report::Step { step: step.to_owned(), detail: None }
}

pub fn result(text: &str) -> Report {
    Report::Result { text: text.to_owned(), truncated: false }
}

pub fn ended(code: i32) -> Report {
    Report::Ended { exit: exit(code), cause: None }
}

pub fn exit(code: i32) -> Exit {
    Exit { code: Some(code), signal: None, oom: None }
}
