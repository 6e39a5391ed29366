//! One sandbox of a test: its folder, its workspace, its gateway; gone with the test.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Command, Output},
    time::{Duration, Instant},
};

use towpath_schemas::{
    agent::{Contract, Isolation, SteeringFormat, Terminal},
    guest::{FromGuest, Identity, SandboxSpec, StartOrder, Walls},
    id::{RunId, SessionId},
};
use towpath_supervisor::{
    cgroup::{Cgroup, Controllers},
    folder::{self, Folder, IdentityRecord},
    host::{self, Alive},
};

use crate::gateway::{DEADLINE, Gateway, Sealing};

pub const UID: u32 = 219_999;

pub struct World {
    pub order: StartOrder,
    pub spec: SandboxSpec,
    pub sealing: Sealing,
    pub folder: Folder,
    pub workspace: PathBuf,
    root: tempfile::TempDir,
    gateway: Option<Gateway>,
}

/// The binary under test: the one just built, or the static one that the variable names.
pub fn supervisor() -> PathBuf {
    std::env::var_os("TOWPATH_TEST_SUPERVISOR").map_or_else(|| env!("CARGO_BIN_EXE_towpath-supervisor").into(), PathBuf::from)
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether cgroups can be made here.
pub fn has_cgroups() -> bool {
    is_root() && Controllers::find().is_ok_and(|controllers| controllers.memory.is_some() && controllers.pids.is_some())
}

impl World {
    /// A sandbox for this command; change its fields before [`World::launch`].
    pub fn new(command: &[&str]) -> Self {
        let root = tempfile::Builder::new().prefix("towpath-test-").tempdir().expect("folder");
        // So that a sandbox whose user may not even walk to its folders is the usual case.
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o700)).expect("mode");
        let (run, session, epoch) = (RunId::mint(), SessionId::mint(), 1);
        let folder = Folder::new(root.path().join(format!("{run}.{epoch}")));
        folder::make_private(folder.path()).expect("folder");
        let workspace = root.path().join("workspace");
        fs::create_dir(&workspace).expect("workspace");
        let uid = is_root().then_some(UID);
        if let Some(uid) = uid {
            std::os::unix::fs::chown(&workspace, Some(uid), Some(uid)).expect("chown");
        }
        let walls = Walls { isolation: Isolation::Bubblewrap, egress: false, memory_bytes: None, pids: None, disk_bytes: None, uid };
        let spec = SandboxSpec {
            run,
            session,
            epoch,
            gateway: String::new(),
            token: "token-for-the-first-hello".to_owned(),
            workspace: workspace.to_string_lossy().into_owned(),
            walls,
            linger_s: 60,
            spool_bytes: 64 * 1024 * 1024,
        };
        let order = StartOrder {
            run,
            session,
            epoch,
            agent: "tested".to_owned(),
            mode: "one_shot".to_owned(),
            command: command.iter().map(|word| (*word).to_owned()).collect(),
            env: Default::default(),
            prompt: "the task".to_owned(),
            instructions: "the instructions".to_owned(),
            files: vec![],
            restore: vec![],
            terminal: Terminal::Pipes,
            steering: SteeringFormat::Text,
            contract: Contract::Towpath,
            output_bytes: 1024 * 1024,
            grace_s: 1,
            fence_s: None,
            idle_s: None,
        };
        Self { order, spec, sealing: Sealing::AtOnce, folder, workspace, root, gateway: None }
    }

    pub fn shell(script: &str) -> Self {
        Self::new(&["/bin/sh", "-c", script])
    }

    pub fn python(script: &str) -> Self {
        Self::new(&["python3", "-u", "-c", script])
    }

    /// Only for the user and, with isolation `none`, for whoever has to walk through.
    pub fn let_others_walk_through(&self) {
        fs::set_permissions(self.root.path(), fs::Permissions::from_mode(0o711)).expect("mode");
    }

    /// The gateway, started when first asked for.
    pub fn gateway(&mut self) -> Gateway {
        let (order, sealing) = (self.order.clone(), self.sealing);
        self.gateway.get_or_insert_with(|| Gateway::start(order, sealing)).clone()
    }

    pub fn launch(&mut self) -> Gateway {
        let gateway = self.gateway();
        self.spec.gateway = format!("ws://{}/sandbox", gateway.address);
        folder::write_json(&self.folder.spec(), &self.spec).expect("spec");
        let output = self.launch_again();
        assert!(output.status.success(), "{output:?}: {}", self.log());
        gateway
    }

    pub fn launch_again(&self) -> Output {
        Command::new(supervisor()).args(["launch", "--dir"]).arg(self.folder.path()).output().expect("launch")
    }

    /// Launches and waits until the command has ended.
    pub fn run(&mut self) -> Gateway {
        let gateway = self.launch();
        gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
        gateway
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.log()).unwrap_or_default()
    }

    pub fn identity(&self) -> Identity {
        folder::read_json::<IdentityRecord>(&self.folder.identity()).expect("identity").expect("identity exists").identity
    }

    pub fn supervisor_is_gone(&self) -> bool {
        let identity = self.identity();
        matches!(host::alive(identity.supervisor_pid, identity.supervisor_start), Alive::No(_))
    }

    pub fn init_is_gone(&self) -> bool {
        let identity = self.identity();
        match (identity.init_pid, identity.init_start) {
            (Some(pid), Some(start)) => matches!(host::alive(pid, start), Alive::No(_)),
            _ => true,
        }
    }

    pub fn cgroup(&self) -> Option<Cgroup> {
        Cgroup::at(Controllers::find().expect("controllers"), &self.identity().cgroup?)
    }
}

/// Waits for a condition, or fails the test.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Drop for World {
    /// Nothing of a test outlives it, whatever went wrong.
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the supervisor's log:\n{}", self.log());
        }
        let Ok(Some(IdentityRecord { identity, .. })) = folder::read_json::<IdentityRecord>(&self.folder.identity()) else { return };
        let pids = [(Some(identity.supervisor_pid), Some(identity.supervisor_start)), (identity.init_pid, identity.init_start)];
        for (pid, start) in pids.into_iter().filter_map(|(pid, start)| Some((pid?, start?))) {
            let gone = Instant::now() + Duration::from_secs(10);
            while host::alive(pid, start) == Alive::Yes && Instant::now() < gone {
                rustix::process::kill_process(rustix::process::Pid::from_raw(pid).expect("pid"), rustix::process::Signal::KILL).ok();
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        if let Some(cgroup) = self.cgroup() {
            cgroup.kill().ok();
            cgroup.remove().ok();
        }
    }
}
