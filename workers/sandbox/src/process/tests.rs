//! Against real processes of this host.

use std::{
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use towpath_schemas::{
    agent::Isolation,
    guest::{Identity, SandboxSpec, Walls},
    id::{RunId, SessionId},
};
use towpath_supervisor::{
    cgroup::{Cgroup, CgroupLimits, Controllers},
    folder::{self, Folder, IdentityRecord},
    host::{self, Alive},
};

use super::{CreateError, Observed, ProcessBackend, RemoveError};

const DEADLINE: Duration = Duration::from_secs(30);

struct World {
    state: tempfile::TempDir,
    backend: ProcessBackend,
    run: RunId,
    session: SessionId,
}

fn supervisor() -> PathBuf {
    let tests = std::env::current_exe().expect("own path");
    let path = tests.ancestors().nth(2).expect("target folder").join("towpath-supervisor");
    if !path.exists() {
        let built = Command::new(env!("CARGO")).args(["build", "-p", "towpath-supervisor"]).status().expect("cargo");
        assert!(built.success());
    }
    path
}

impl World {
    fn new() -> Self {
        let state = tempfile::Builder::new().prefix("towpath-test-").tempdir().expect("folder");
        std::fs::set_permissions(state.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("mode");
        let backend = ProcessBackend::new(state.path(), supervisor()).expect("backend");
        Self { state, backend, run: RunId::mint(), session: SessionId::mint() }
    }

    fn folder(&self) -> Folder {
        self.backend.folder(self.run, 1)
    }

    /// Its gateway is not there, so its supervisor waits and starts nothing.
    fn spec(&self) -> SandboxSpec {
        SandboxSpec {
            run: self.run,
            session: self.session,
            epoch: 1,
            gateway: "ws://127.0.0.1:1/sandbox".to_owned(),
            token: "token".to_owned(),
            workspace: self.backend.workspace(self.session).expect("workspace").display().to_string(),
            walls: Walls {
                isolation: Isolation::Bubblewrap,
                egress: false,
                memory_bytes: None,
                pids: None,
                disk_bytes: None,
                uid: self.backend.uid_for(self.session),
            },
            linger_s: 60,
            spool_bytes: 1024 * 1024,
        }
    }

    fn identity(&self) -> Identity {
        folder::read_json::<IdentityRecord>(&self.folder().identity()).expect("identity").expect("identity exists").identity
    }

    async fn observe(&self) -> Observed {
        self.backend.observe(self.run, 1).await
    }

    /// A folder as a supervisor that died would leave it, naming a living process as process 1.
    fn leave(&self, init: &Child, change: impl FnOnce(&mut IdentityRecord, &mut SandboxSpec)) {
        let pid = init.id() as i32;
        let start = host::process_stat(pid).expect("stat").expect("child").start;
        let identity = Identity {
            boot_id: host::boot_id().expect("boot"),
            supervisor_pid: pid,
            // A process of that number, but another one.
            supervisor_start: start - 1,
            init_pid: Some(pid),
            init_start: Some(start),
            pid_namespace: Some(1),
            cgroup: None,
        };
        let mut record = IdentityRecord { identity, numbers_in: host::pid_namespace("self").expect("namespace") };
        let mut spec = self.spec();
        change(&mut record, &mut spec);
        folder::make_private(self.folder().path()).expect("folder");
        folder::write_json(&self.folder().spec(), &spec).expect("spec");
        folder::write_json(&self.folder().identity(), &record).expect("identity");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Ok(Some(record)) = folder::read_json::<IdentityRecord>(&self.folder().identity()) {
            kill(record.identity.supervisor_pid, record.identity.supervisor_start);
        }
    }
}

fn kill(pid: i32, start: u64) {
    let until = Instant::now() + DEADLINE;
    while host::alive(pid, start) == Alive::Yes && Instant::now() < until {
        rustix::process::kill_process(rustix::process::Pid::from_raw(pid).expect("pid"), rustix::process::Signal::KILL).ok();
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn sleeper() -> Child {
    Command::new("/bin/sleep").arg("1000").spawn().expect("sleep")
}

fn end(mut child: Child) {
    child.kill().expect("kill");
    child.wait().expect("wait");
}

#[tokio::test]
async fn creating_twice_starts_one_supervisor_and_it_is_present_until_it_dies() {
    let world = World::new();
    assert_eq!(world.observe().await, Observed::NeverCreated);
    world.backend.create(&world.spec()).await.expect("create");
    let identity = world.identity();
    world.backend.create(&world.spec()).await.expect("create again");
    assert_eq!(world.identity(), identity);
    assert_eq!(world.observe().await, Observed::Present(identity.clone()));
    assert!(matches!(world.backend.remove(world.run, 1).await, Err(RemoveError::NotGone(Observed::Present(_)))));
    kill(identity.supervisor_pid, identity.supervisor_start);
    let Observed::Absent { proof } = world.observe().await else { panic!("the supervisor is dead") };
    assert!(proof.contains("never started"), "{proof}");
    // Nothing ever starts there again, and the proof stays.
    world.backend.create(&world.spec()).await.expect("nothing more to create");
    assert_eq!(world.observe().await, Observed::Absent { proof });
    world.backend.remove(world.run, 1).await.expect("remove");
    assert_eq!(world.observe().await, Observed::NeverCreated);
    world.backend.remove(world.run, 1).await.expect("remove again");
}

#[tokio::test]
async fn a_supervisor_outlives_the_worker_and_its_process_group_and_leaves_no_zombie() {
    let world = World::new();
    folder::make_private(world.folder().path()).expect("folder");
    folder::write_json(&world.folder().spec(), &world.spec()).expect("spec");
    let script = "\"$0\" launch --dir \"$1\"; echo up; exec sleep 1000";
    let mut worker = Command::new("/bin/sh");
    worker.args(["-c", script]).arg(supervisor()).arg(world.folder().path()).process_group(0).stdout(Stdio::piped());
    let mut worker = worker.spawn().expect("worker");
    let mut up = [0; 3];
    std::io::Read::read_exact(worker.stdout.as_mut().expect("stdout"), &mut up).expect("up");
    let identity = world.identity();
    let stat = host::process_stat(identity.supervisor_pid).expect("stat").expect("supervisor");
    assert_ne!(stat.parent, worker.id() as i32);
    let group = rustix::process::Pid::from_raw(worker.id() as i32).expect("pid");
    rustix::process::kill_process_group(group, rustix::process::Signal::KILL).expect("kill");
    worker.wait().expect("wait");
    assert_eq!(world.observe().await, Observed::Present(identity));
}

#[tokio::test]
async fn process_1_that_lives_is_present_and_one_that_died_is_absent_with_proof() {
    let world = World::new();
    let init = sleeper();
    world.leave(&init, |_, _| {});
    assert!(matches!(world.observe().await, Observed::Present(_)));
    end(init);
    let Observed::Absent { proof } = world.observe().await else { panic!("process 1 is dead") };
    assert!(proof.contains("process 1: process "), "{proof}");
}

#[tokio::test]
async fn another_boot_is_absent_and_another_pid_namespace_is_unknown() {
    let (rebooted, elsewhere) = (World::new(), World::new());
    let init = sleeper();
    rebooted.leave(&init, |record, _| record.identity.boot_id = "another".to_owned());
    elsewhere.leave(&init, |record, _| record.numbers_in += 1);
    assert!(matches!(rebooted.observe().await, Observed::Absent { .. }));
    assert!(matches!(elsewhere.observe().await, Observed::Unknown { .. }));
    end(init);
    assert!(matches!(elsewhere.observe().await, Observed::Unknown { .. }));
}

#[tokio::test]
async fn without_isolation_only_an_empty_cgroup_is_proof() {
    let controllers = Controllers::find().expect("controllers");
    let world = World::new();
    let cgroup = Cgroup::named(controllers, &format!("{}.1", world.run));
    if cgroup.create(CgroupLimits::default()).is_err() {
        return;
    }
    let (init, left) = (sleeper(), sleeper());
    world.leave(&init, |record, spec| {
        record.identity.cgroup = Some(cgroup.relative().to_owned());
        spec.walls.isolation = Isolation::None;
    });
    for file in cgroup.join_files() {
        std::fs::write(file, left.id().to_string()).expect("join");
    }
    end(init);
    assert!(matches!(world.observe().await, Observed::Present(_)));
    end(left);
    let Observed::Absent { proof } = world.observe().await else { panic!("all are dead") };
    assert!(proof.contains("is empty"), "{proof}");
    world.backend.remove(world.run, 1).await.expect("remove");
    assert!(!cgroup.join_files()[0].exists());
}

#[tokio::test]
async fn what_a_supervisor_left_that_died_while_it_raised_the_walls_is_ended_before_it_is_absent() {
    let world = World::new();
    let cgroup = Cgroup::named(Controllers::find().expect("controllers"), &format!("{}.1", world.run));
    if cgroup.create(CgroupLimits::default()).is_err() {
        return;
    }
    let mut half = sleeper();
    world.leave(&half, |record, _| (record.identity.init_pid, record.identity.init_start) = (None, None));
    for file in cgroup.join_files() {
        std::fs::write(file, half.id().to_string()).expect("join");
    }
    // Its parent, this process, has to reap it before the cgroup is empty.
    let reaper = std::thread::spawn(move || half.wait().expect("wait"));
    let Observed::Absent { proof } = world.observe().await else { panic!("nothing is left") };
    assert!(proof.contains("never started"), "{proof}");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&reaper.join().expect("reaper")), Some(9));
    world.backend.remove(world.run, 1).await.expect("remove");
    assert!(!cgroup.join_files()[0].exists());
}

#[tokio::test]
async fn what_cannot_be_read_is_unknown_and_never_absent() {
    let world = World::new();
    folder::make_private(world.folder().path()).expect("folder");
    assert_eq!(world.observe().await, Observed::NeverCreated);
    folder::write_json(&world.folder().spec(), &world.spec()).expect("spec");
    assert!(matches!(world.observe().await, Observed::Unknown { .. }), "it is being created");
    std::fs::write(world.folder().identity(), "{").expect("identity");
    assert!(matches!(world.observe().await, Observed::Unknown { .. }));
    std::fs::remove_file(world.folder().identity()).expect("remove");
}

#[tokio::test]
async fn a_host_that_cannot_refuses_with_the_reason() {
    let world = World::new();
    let nowhere = ProcessBackend::new(world.state.path(), "/no/such/supervisor").expect("backend");
    let Err(CreateError::Refused(refused)) = nowhere.create(&world.spec()).await else { panic!("there is no supervisor") };
    assert!(refused.reason.contains("/no/such/supervisor"), "{refused}");
    if rustix::process::geteuid().is_root() {
        // The state folder of this test is closed to others.
        let walls = Walls { isolation: Isolation::None, ..world.spec().walls };
        assert!(world.backend.check(&walls).is_err_and(|refused| refused.reason.contains("closed to others")));
    }
}

#[test]
fn a_workspace_belongs_to_its_session_s_user_alone() {
    use std::os::unix::fs::MetadataExt;
    let world = World::new();
    let path = world.backend.workspace(world.session).expect("workspace");
    assert_eq!(world.backend.workspace(world.session).expect("again"), path);
    let meta = std::fs::metadata(path).expect("metadata");
    assert_eq!(meta.mode() & 0o777, 0o700);
    if let Some(uid) = world.backend.uid_for(world.session) {
        assert_eq!((meta.uid(), meta.gid()), (uid, uid));
        assert!(uid >= super::FIRST_UID);
    }
}
