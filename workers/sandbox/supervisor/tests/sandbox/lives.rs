//! ONCE and FENCED at the supervisor: who may start, and what is left when one dies.

use rustix::process::{Pid, Signal, kill_process};
use towpath_schemas::guest::{FromGuest, Phase};
use towpath_supervisor::{exit, folder};

use crate::world::{World, until};

pub fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).expect("pid"), Signal::KILL).expect("kill");
}

#[test]
fn a_start_that_is_asked_for_twice_executes_once() {
    let mut world = World::shell("echo x >> /workspace/witness; sleep 0.3");
    let gateway = world.gateway();
    gateway.heard().start_twice = true;
    world.launch();
    gateway.wait("the start", |heard| heard.has(&FromGuest::Started).then_some(()));
    gateway.cut();
    gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    assert_eq!(std::fs::read_to_string(world.workspace.join("witness")).expect("witness"), "x\n");
    assert!(gateway.heard().hellos.len() >= 2);
}

#[test]
fn a_sandbox_starts_within_a_second_or_two() {
    let mut world = World::shell("exit 0");
    world.gateway();
    let began = std::time::Instant::now();
    let gateway = world.launch();
    let launched = began.elapsed();
    gateway.wait("the start", |heard| heard.has(&FromGuest::Started).then_some(()));
    let started = began.elapsed();
    println!("launched after {launched:?}, command started after {started:?}");
    assert!(started < std::time::Duration::from_secs(5));
}

#[test]
fn the_token_is_sent_until_the_first_welcome_and_then_forgotten() {
    let mut world = World::shell("sleep 0.5");
    let gateway = world.launch();
    gateway.wait("the start", |heard| heard.has(&FromGuest::Started).then_some(()));
    gateway.cut();
    gateway.wait("a new connection", |heard| (heard.hellos.len() == 2).then_some(()));
    let heard = gateway.heard();
    let tokens: Vec<_> = heard.hellos.iter().map(|hello| hello.token.as_deref()).collect();
    assert_eq!(tokens, [Some("token-for-the-first-hello"), None]);
    let (first, second) = (&heard.hellos[0], &heard.hellos[1]);
    assert_eq!((&first.key, &first.incarnation), (&second.key, &second.incarnation));
    assert_eq!((first.phase, second.phase), (Phase::Fresh, Phase::Started));
    assert_eq!((first.key.len(), first.incarnation.len()), (64, 32));
    for entry in std::fs::read_dir(world.folder.path()).expect("folder") {
        let text = std::fs::read(entry.expect("entry").path()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        assert!(!text.contains("token-for-the-first-hello") && !text.contains(&first.key) && !text.contains(&first.incarnation));
    }
}

#[test]
fn a_second_supervisor_on_the_same_folder_leaves_at_once() {
    let mut world = World::shell("sleep 0.5");
    let gateway = world.launch();
    gateway.wait("the start", |heard| heard.has(&FromGuest::Started).then_some(()));
    assert_eq!(world.launch_again().status.code(), Some(exit::HELD.into()));
    gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    assert_eq!(gateway.heard().hellos.len(), 1);
}

#[test]
fn a_supervisor_that_finds_started_or_gone_never_starts() {
    for name in ["started", "gone"] {
        let mut world = World::shell("touch /workspace/witness");
        let gateway = world.gateway();
        folder::write_durably(&world.folder.path().join(name), b"").expect("mark");
        folder::write_json(&world.folder.spec(), &world.spec).expect("spec");
        assert_eq!(world.launch_again().status.code(), Some(exit::SPENT.into()));
        assert_eq!(gateway.heard().connections, 0);
    }
}

#[test]
fn a_killed_supervisor_takes_the_whole_sandbox_with_it() {
    let mut world = World::shell("trap '' TERM; (setsid sleep 1000) & echo up; while :; do sleep 0.05; done");
    let gateway = world.launch();
    gateway.wait("output", |heard| (!heard.frames.is_empty()).then_some(()));
    assert!(!world.init_is_gone());
    kill(world.identity().supervisor_pid);
    until("process 1 ends", || world.init_is_gone());
    assert_eq!(world.launch_again().status.code(), Some(exit::SPENT.into()));
}

#[test]
fn a_killed_process_1_is_told_as_a_sandbox_that_died() {
    let mut world = World::shell("echo up; sleep 1000");
    let gateway = world.launch();
    gateway.wait("output", |heard| (!heard.frames.is_empty()).then_some(()));
    kill(world.identity().init_pid.expect("init"));
    gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    let (exit, reason) = gateway.heard().ended().expect("ended");
    assert_eq!((exit.code, exit.signal, reason.as_deref()), (None, None, Some("sandbox_died")));
}

#[test]
fn the_first_connection_may_fail_for_a_while() {
    let mut world = World::shell("exit 0");
    let gateway = world.gateway();
    world.spec.gateway = "ws://127.0.0.1:1/sandbox".to_owned();
    folder::write_json(&world.folder.spec(), &world.spec).expect("spec");
    assert!(world.launch_again().status.success());
    until("a failed connection is written down", || world.log().contains("connection 1"));
    assert!(!world.supervisor_is_gone());
    assert_eq!(gateway.heard().connections, 0);
}
