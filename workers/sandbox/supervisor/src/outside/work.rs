//! One run inside its sandbox, from the start order to the last answer.

use std::{cell::RefCell, io, path::Path, time::Duration};

use rustix::process::Signal;
use tokio::time::{sleep, sleep_until, timeout};
use towpath_schemas::{
    agent::{Isolation, Terminal},
    frame::{EndRecord, FrameKind, Size},
    guest::{Exit, FENCE_RAN_OUT, FromGuest, InputFile, Phase, SandboxSpec, StartOrder},
};

use super::{
    Identified,
    desk::Desk,
    disk, fifo,
    fifo::Fifo,
    gather,
    gather::Tail,
    net,
    output::Outputs,
    prepare,
    prepare::Places,
    result, sandbox,
    sandbox::{Events, InitProcess, Orders, Printed, Remains},
    stage,
    stage::Inputs,
    terminal,
};
use crate::{
    cgroup::{Cgroup, CgroupLimits, Controllers},
    control::{FromInit, Go, ToInit},
    folder::{self, Folder},
    wall::WallOrder,
};

/// After TERM and the grace and KILL: how long until process 1 itself is killed from outside.
const STUBBORN: Duration = Duration::from_secs(5);
/// Bytes in /tmp and in /dev/shm, unless the memory limit is smaller.
const TMP_BYTES: u64 = 1024 * 1024 * 1024;
/// How often the end of a lease is looked for; process 1 is awake at the very moment.
const LEASE_LOOK: Duration = Duration::from_secs(1);

pub struct Work<'a> {
    pub desk: &'a Desk,
    pub spec: &'a SandboxSpec,
    pub folder: &'a Folder,
    pub identified: &'a Identified,
    /// What runs now, so that it can be ended when this work is dropped half-way.
    pub running: &'a RefCell<Option<Remains>>,
}

/// Nothing was executed, and why.
struct Refusal {
    code: String,
    message: String,
}

fn wall_failed(message: impl ToString) -> Refusal {
    Refusal { code: "wall_failed".to_owned(), message: message.to_string() }
}

/// How it went.
#[derive(Default)]
struct Outcome {
    exit: Exit,
    reason: Option<String>,
}

/// What is gathered while the command works, for after its end.
struct Kept<'a> {
    tail: &'a mut Tail,
    outputs: &'a mut Outputs,
}

/// Everything that is ready when process 1 may be told to go.
struct Raised {
    orders: Orders,
    events: Events,
    printed: Printed,
    init: InitProcess,
    _network: Option<net::Network>,
}

impl Work<'_> {
    /// Ends when everything was kept, or when nobody came for it.
    pub async fn run(&self) {
        let order = self.desk.start_order().await;
        // What viewers say waits for the terminal from here on.
        self.desk.set_terminal(order.terminal == Terminal::Pty);
        let mut tail = Tail::default();
        let restore = if self.is_workspace_empty() { order.restore.as_slice() } else { &[] };
        let mut outputs =
            self.prepare_workspace().map(|()| Outputs::before(Path::new(&self.spec.workspace).join("outputs"), order.output_bytes));
        let outcome = match &mut outputs {
            Ok(outputs) => self.execute(&order, restore, &mut tail, outputs).await,
            Err(error) => Err(wall_failed(format!("the workspace cannot be prepared: {error}"))),
        };
        let outcome = outcome.unwrap_or_else(|Refusal { code, message }| {
            crate::note!("refused: {code}: {message}");
            self.desk.report(FromGuest::Refused { code: code.clone(), message });
            Outcome { exit: Exit::default(), reason: Some(code) }
        });
        self.desk.set_phase(Phase::Ended);
        let steers = self.desk.with_ledger(|ledger| ledger.close());
        self.desk.report(FromGuest::Ended { exit: outcome.exit.clone(), reason: outcome.reason });
        let result = result::read(&self.folder.control(), &mut tail);
        self.desk.report(FromGuest::Result { text: result.text, truncated: result.truncated });
        drop(tail);
        if let Ok(outputs) = &mut outputs {
            outputs.collect(self.desk).await;
        }
        self.remove(&[self.folder.control(), self.folder.etc(), self.folder.steers()]);
        let linger = async {
            // The run settles when the end record is sealed, so everything else of the end is committed before the record exists.
            self.desk.all_answered().await;
            self.append_end(&EndRecord { exit: outcome.exit, bytes: self.desk.printed(), steers }).await;
            self.desk.report(FromGuest::Done);
            self.desk.released().await;
        };
        if timeout(Duration::from_secs(self.spec.linger_s), linger).await.is_err() {
            crate::note!("nobody released this sandbox within {} s; its spool stays", self.spec.linger_s);
        }
    }

    fn remove(&self, folders: &[std::path::PathBuf]) {
        for folder in folders {
            if let Err(error) = std::fs::remove_dir_all(folder)
                && error.kind() != io::ErrorKind::NotFound
            {
                crate::note!("{} cannot be removed: {error}", folder.display());
            }
        }
    }

    async fn append_end(&self, record: &EndRecord) {
        let payload = serde_json::to_vec(record).unwrap_or_default();
        while let Err(error) = self.desk.append(FrameKind::End, &payload) {
            crate::note!("the end record cannot be written: {error}");
            sleep(disk::RETRY).await;
        }
    }

    fn is_workspace_empty(&self) -> bool {
        std::fs::read_dir(&self.spec.workspace).is_ok_and(|mut entries| entries.next().is_none())
    }

    fn prepare_workspace(&self) -> io::Result<()> {
        let workspace = rustix::fs::open(
            self.spec.workspace.as_str(),
            rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )?;
        stage::own_folder(&workspace, "outputs", self.spec.walls.uid)?;
        Ok(())
    }

    /// Stages, raises the walls, gives the word and sees it through.
    async fn execute(&self, order: &StartOrder, restore: &[InputFile], tail: &mut Tail, outputs: &mut Outputs) -> Result<Outcome, Refusal> {
        let places = Places::of(self.spec, self.folder);
        let mut fifo = disk::patiently(self.desk, || prepare::control_folder(self.folder, self.spec, order))
            .await
            .map_err(|error| wall_failed(format!("control folder: {error}")))?;
        let open_inputs = || Inputs::open(Path::new(&self.spec.workspace), &self.folder.control(), places.files());
        let inputs =
            disk::patiently(self.desk, open_inputs).await.map_err(|error| wall_failed(format!("the folder for input files: {error}")))?;
        self.desk.step("inputs", Some(format!("{} files", order.files.len())));
        tokio::select! {
            () = async {
                inputs.stage(self.desk, &order.files).await;
                self.restore(restore).await;
            } => {}
            stop = self.desk.stop_order() => return Ok(Outcome { exit: Exit::default(), reason: Some(stop.reason) }),
        }
        outputs.begin_anew();
        self.desk.step("sandbox", None);
        let raised = self.raise(order.terminal).await?;
        let end = self.see_through(order, &places, raised, &mut fifo, &inputs, Kept { tail, outputs }).await;
        self.end_sandbox(end).await
    }

    /// Puts the session's outputs where they were; the run goes on without those that cannot be had, and says so.
    async fn restore(&self, files: &[InputFile]) {
        if files.is_empty() {
            return;
        }
        let failed = stage::restore(self.desk, Path::new(&self.spec.workspace), self.spec.walls.uid, files).await;
        let missing: String = failed.iter().map(|(name, reason)| format!("; {name} is not: {reason}")).collect();
        self.desk.step("outputs", Some(format!("{} are restored{missing}", files.len() - failed.len())));
    }

    async fn raise(&self, terminal: Terminal) -> Result<Raised, Refusal> {
        let walls = &self.spec.walls;
        let root = rustix::process::geteuid().is_root();
        let bubblewrap = match walls.isolation {
            Isolation::None => None,
            Isolation::Bubblewrap if root && walls.uid.is_none_or(|uid| uid == 0) => {
                return Err(wall_failed("a sandbox may not run as root, and no unprivileged user was named"));
            }
            Isolation::Bubblewrap => Some(prepare::program("bwrap").ok_or_else(|| wall_failed("bwrap is not installed"))?),
        };
        if walls.egress && bubblewrap.is_none() {
            // Without a network namespace the command has the host's network, loopback included.
            crate::note!("no isolation: the command uses the host's network");
        }
        disk::patiently(self.desk, || prepare::etc_folder(&self.folder.etc(), walls.egress))
            .await
            .map_err(|error| wall_failed(format!("etc folder: {error}")))?;
        let cgroup = self.cgroup()?;
        let binary = std::env::current_exe().map_err(wall_failed)?;
        let order = WallOrder {
            bubblewrap,
            uid: walls.uid,
            join: cgroup.as_ref().map(Cgroup::join_files).unwrap_or_default(),
            workspace: self.spec.workspace.clone().into(),
            control: self.folder.control(),
            etc: self.folder.etc(),
            binary,
            nested_users: walls.egress && !root,
            tmp_bytes: walls.memory_bytes.map_or(TMP_BYTES, |bytes| TMP_BYTES.min(bytes)),
            info_fd: -1,
            init_fds: [-1; 3],
        };
        let isolated = order.bubblewrap.is_some();
        let relative = cgroup.as_ref().map(|cgroup| cgroup.relative().to_owned());
        let (sandbox, printed) = sandbox::raise(order, cgroup, terminal).await.map_err(wall_failed)?;
        let sandbox::Sandbox { init, orders, events, remains } = sandbox;
        *self.running.borrow_mut() = Some(remains);
        // Durable before the word is given: a process 1 that is on no record has executed nothing.
        let recorded = disk::patiently(self.desk, || self.identified.complete(init, relative.clone()))
            .await
            .map(|identity| self.desk.set_identity(identity));
        let ready = match recorded.map_err(|error| wall_failed(format!("its identity cannot be recorded: {error}"))) {
            Ok(()) if walls.egress && isolated => self.network(init).await.map(Some),
            Ok(()) => Ok(None),
            Err(refusal) => Err(refusal),
        };
        match ready {
            Ok(network) => Ok(Raised { orders, events, printed, init, _network: network }),
            Err(refusal) => {
                self.take_down().await;
                Err(refusal)
            }
        }
    }

    async fn network(&self, init: InitProcess) -> Result<net::Network, Refusal> {
        let slirp = prepare::program("slirp4netns").ok_or_else(|| wall_failed("slirp4netns is not installed"))?;
        net::attach(&slirp, init.pid).await.map_err(|error| wall_failed(format!("network: {error}")))
    }

    /// None when this host has no cgroup to give and the walls ask for none.
    fn cgroup(&self) -> Result<Option<Cgroup>, Refusal> {
        let walls = &self.spec.walls;
        let limits = CgroupLimits { memory_bytes: walls.memory_bytes, pids: walls.pids };
        let made = Controllers::find().map_err(|error| error.to_string()).and_then(|controllers| {
            let cgroup = Cgroup::of_folder(controllers, self.folder.path());
            match cgroup.create(limits) {
                Ok(()) => Ok(cgroup),
                Err(error) => {
                    let source = &error.source;
                    let why = format!("{error}: {source}");
                    cgroup.remove().map_err(|error| format!("{why}; and what was made stays: {error}"))?;
                    Err(why)
                }
            }
        });
        match made {
            Ok(cgroup) => Ok(Some(cgroup)),
            Err(why) if limits.memory_bytes.is_some() || limits.pids.is_some() || walls.isolation == Isolation::None => {
                Err(wall_failed(why))
            }
            Err(why) => {
                crate::note!("no cgroup: {why}");
                Ok(None)
            }
        }
    }

    async fn take_down(&self) -> Option<Remains> {
        let mut remains = self.running.borrow_mut().take()?;
        remains.end().await;
        Some(remains)
    }

    /// Gives the word and stays until all inside have ended and all that they printed is in the spool.
    async fn see_through(
        &self,
        order: &StartOrder,
        places: &Places,
        raised: Raised,
        fifo: &mut Fifo,
        inputs: &Inputs,
        Kept { tail, outputs }: Kept<'_>,
    ) -> Result<Outcome, Refusal> {
        let Raised { mut orders, mut events, printed, init, _network } = raised;
        let lease_until_us = tokio::select! {
            biased;
            stop = self.desk.stop_order() => return Ok(Outcome { exit: Exit::default(), reason: Some(stop.reason) }),
            until_us = self.first_lease(order.fence_s) => until_us,
        };
        self.give_the_word(order, places, lease_until_us, &mut orders, &mut events).await?;
        let reason = RefCell::new(None);
        let status = {
            let life = live(&mut events);
            let gathered = self.gather(printed, tail);
            let steering = fifo::pump(self.desk, fifo, inputs, order.steering);
            let guard = self.guard(order, lease_until_us, &mut orders, init, &reason);
            let kept_up = outputs.keep_up(self.desk);
            tokio::pin!(life, gathered, steering, guard, kept_up);
            let mut all_gathered = false;
            let status = loop {
                tokio::select! {
                    status = &mut life => break status,
                    () = &mut gathered, if !all_gathered => all_gathered = true,
                    () = &mut steering => {}
                    () = &mut guard => {}
                    () = &mut kept_up => {}
                }
            };
            // Whatever is left without a process 1 to end it must not keep the pipes open.
            if let Some(remains) = self.take_down().await {
                *self.running.borrow_mut() = Some(remains);
            }
            if !all_gathered {
                self.desk.lift_spool_limit();
                gathered.await;
            }
            status
        };
        fifo.settle(self.desk);
        let oom = self.running.borrow().as_ref().and_then(Remains::oom_kills).map(|kills| kills > 0);
        // Process 1 keeps to the lease by itself, and may have been faster than this process.
        let killed = status.is_none_or(|status| exit_of(status).signal == Some(Signal::KILL.as_raw()));
        let reason = reason.take().or_else(|| (killed && self.desk.has_lease_run_out()).then(|| FENCE_RAN_OUT.to_owned()));
        Ok(match status {
            Some(status) => Outcome { exit: Exit { oom, ..exit_of(status) }, reason },
            None => Outcome { exit: Exit { oom, ..Exit::default() }, reason: reason.or(Some("sandbox_died".to_owned())) },
        })
    }

    /// Until nothing more can come out of the command.
    async fn gather(&self, printed: Printed, tail: &mut Tail) {
        match printed {
            Printed::Pipes { stdout, stderr } => gather::gather(self.desk, stdout, stderr, tail).await,
            Printed::Terminal(socket) => {
                if let Err(error) = terminal::tend(self.desk, &socket, tail).await {
                    crate::note!("the command's terminal cannot be used: {error}");
                }
            }
        }
    }

    /// Under a fence nothing is executed before a lease is granted.
    async fn first_lease(&self, fence_s: Option<u32>) -> Option<u64> {
        self.desk.need_lease(fence_s?);
        Some(self.desk.lease_after(0).await)
    }

    async fn give_the_word(
        &self,
        order: &StartOrder,
        places: &Places,
        lease_until_us: Option<u64>,
        orders: &mut Orders,
        events: &mut Events,
    ) -> Result<(), Refusal> {
        disk::patiently(self.desk, || folder::write_durably(&self.folder.started(), self.identified.incarnation().as_bytes()))
            .await
            .map_err(|error| wall_failed(format!("`started` cannot be recorded: {error}")))?;
        self.desk.set_phase(Phase::Started);
        self.desk.step("command", order.command.first().cloned());
        let go = Go {
            command: order.command.clone(),
            env: prepare::environment(order, places),
            folder: places.workspace.clone(),
            terminal: (order.terminal == Terminal::Pty).then(Size::default),
            grace_ms: u64::from(order.grace_s) * 1000,
            lease_until_us,
        };
        // The walls' own complaint tells more than a broken pipe does.
        orders.give(&ToInit::Go(go)).await.map_err(|_| wall_failed(""))?;
        match events.next().await {
            Some(FromInit::Started) => {
                self.desk.report(FromGuest::Started);
                Ok(())
            }
            Some(FromInit::Refused { code, message }) => Err(Refusal { code, message }),
            Some(FromInit::Main { .. } | FromInit::Ended) | None => Err(wall_failed("")),
        }
    }

    /// Takes the sandbox down, whatever came of it, and says why when it never stood.
    async fn end_sandbox(&self, end: Result<Outcome, Refusal>) -> Result<Outcome, Refusal> {
        let Some(mut remains) = self.take_down().await else { return end };
        let end = match end {
            Err(refusal) if refusal.message.is_empty() => {
                let complaints = remains.complaints().await;
                Err(Refusal { message: if complaints.is_empty() { "process 1 ended at once".to_owned() } else { complaints }, ..refusal })
            }
            other => other,
        };
        remains.remove_cgroup();
        end
    }

    /// Ends the command when the gateway, the disk watch, idleness or the end of its lease asks for it, and process 1 itself when that does not help.
    async fn guard(
        &self,
        order: &StartOrder,
        lease_until_us: Option<u64>,
        orders: &mut Orders,
        init: InitProcess,
        told: &RefCell<Option<String>>,
    ) {
        let asked = async {
            tokio::select! {
                stop = self.desk.stop_order() => (stop.grace_s, stop.reason),
                () = self.disk_full() => (order.grace_s, "disk_limit".to_owned()),
                () = self.idle(order.idle_s) => (order.grace_s, "idle".to_owned()),
                () = self.lease_end(), if order.fence_s.is_some() => (0, FENCE_RAN_OUT.to_owned()),
            }
        };
        tokio::pin!(asked);
        let mut known_us = lease_until_us.unwrap_or(0);
        let (grace_s, reason) = loop {
            tokio::select! {
                asked = &mut asked => break asked,
                until_us = self.desk.lease_after(known_us) => {
                    known_us = until_us;
                    if let Err(error) = orders.give(&ToInit::Lease { until_us }).await {
                        crate::note!("process 1 cannot be told of its lease: {error}");
                    }
                }
            }
        };
        crate::note!("stopping: {reason}");
        *told.borrow_mut() = Some(reason);
        let grace = Duration::from_secs(grace_s.into());
        match orders.give(&ToInit::Stop { grace_ms: grace.as_millis() as u64 }).await {
            Ok(()) => sleep(grace + STUBBORN).await,
            Err(error) => crate::note!("process 1 cannot be told to stop: {error}"),
        }
        sandbox::kill_hard(init);
        std::future::pending().await
    }

    /// Process 1 keeps to the lease too; whichever of the two is awake ends the command.
    async fn lease_end(&self) {
        while !self.desk.has_lease_run_out() {
            sleep(LEASE_LOOK).await;
        }
    }

    async fn disk_full(&self) {
        match self.spec.walls.disk_bytes {
            Some(most) => {
                let used = disk::over(vec![self.spec.workspace.clone().into(), self.folder.control()], most).await;
                crate::note!("the workspace holds {used} bytes, {most} are allowed");
            }
            None => std::future::pending().await,
        }
    }

    async fn idle(&self, idle_s: Option<u32>) {
        let Some(idle_s) = idle_s else { return std::future::pending().await };
        loop {
            let until = self.desk.last_activity() + Duration::from_secs(idle_s.into());
            if tokio::time::Instant::now() >= until {
                return;
            }
            sleep_until(until).await;
        }
    }
}

/// The main command's wait status once everything has ended; None when process 1 died without telling it.
async fn live(events: &mut Events) -> Option<i32> {
    let mut status = None;
    while let Some(event) = events.next().await {
        match event {
            FromInit::Main { status: raw } => status = Some(raw),
            FromInit::Ended => break,
            FromInit::Started | FromInit::Refused { .. } => {}
        }
    }
    status
}

/// wait(2): the low seven bits are the signal, zero when it exited by itself with the code in the next byte.
fn exit_of(status: i32) -> Exit {
    match status & 0x7f {
        0 => Exit { code: Some(status >> 8 & 0xff), signal: None, oom: None },
        signal => Exit { code: None, signal: Some(signal), oom: None },
    }
}
