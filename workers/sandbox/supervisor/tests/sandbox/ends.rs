//! How a command ends, and how that is told.

use towpath_schemas::guest::{Exit, FromGuest, InputFile, ToGuest};

use crate::world::{World, has_cgroups, until};

fn told(mut world: World) -> (Exit, Option<String>) {
    let gateway = world.run();
    let (mut exit, reason) = gateway.heard().ended().expect("ended");
    let recorded = gateway.heard().end().expect("end record");
    assert_eq!(recorded.exit, exit);
    exit.oom = None;
    (exit, reason)
}

fn code(code: i32) -> (Exit, Option<String>) {
    (Exit { code: Some(code), ..Exit::default() }, None)
}

fn signal(signal: i32) -> (Exit, Option<String>) {
    (Exit { signal: Some(signal), ..Exit::default() }, None)
}

#[test]
fn exit_codes_are_told_as_they_are_and_apart_from_signals() {
    for number in [0, 1, 126, 127, 137, 255] {
        assert_eq!(told(World::shell(&format!("exit {number}"))), code(number));
    }
    for number in [9, 15, 11] {
        assert_eq!(told(World::shell(&format!("kill -{number} $$"))), signal(number));
    }
}

#[test]
fn a_command_that_does_not_exist_or_cannot_be_executed_is_refused_by_name_and_executes_nothing() {
    let cases: [(&[&str], &str); 5] = [
        (&["no-such-program", "x"], "command_not_found"),
        (&["/usr/bin/no-such-program"], "command_not_found"),
        (&["/etc/passwd"], "command_not_executable"),
        (&["/usr"], "command_not_executable"),
        (&["/workspace/script"], "command_not_executable"),
    ];
    for (command, expected) in cases {
        let mut world = World::new(command);
        let script = world.workspace.join("script");
        std::fs::write(&script, "#!/no/such/interpreter\n").expect("script");
        std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("mode");
        let gateway = world.run();
        let heard = gateway.heard();
        let (code, message) = heard.refused().expect("refused");
        assert_eq!(code, expected, "{command:?}: {message}");
        assert!(message.contains(command[0]), "{message}");
        assert!(!heard.has(&FromGuest::Started));
        assert_eq!(
            heard.ended().expect("ended"),
            (Exit { oom: heard.ended().expect("ended").0.oom, ..Exit::default() }, Some(expected.to_owned()))
        );
    }
}

#[test]
fn a_daemonised_child_ends_with_the_main_command() {
    let mut world = World::shell("setsid sh -c 'setsid sleep 1000 & sleep 1000' >/dev/null 2>&1 & exit 3");
    let gateway = world.run();
    assert_eq!(gateway.heard().ended().expect("ended").0.code, Some(3));
    assert!(world.init_is_gone());
}

#[test]
fn a_daemonised_child_that_ignores_term_and_holds_the_pipes_is_killed() {
    let mut world = World::shell("(trap '' TERM; echo child; while true; do sleep 1; done) & sleep 0.1; echo main");
    let gateway = world.run();
    assert_eq!(gateway.heard().ended().expect("ended").0.code, Some(0));
    assert!(world.init_is_gone());
}

#[test]
fn cancel_sends_term_and_what_ignores_it_is_killed_after_the_grace() {
    for (script, expected) in [
        ("trap 'exit 5' TERM; echo up; while :; do sleep 0.05; done", code(5)),
        ("trap '' TERM; echo up; while :; do sleep 0.05; done", signal(9)),
    ] {
        let mut world = World::shell(script);
        let gateway = world.launch();
        gateway.wait("output", |heard| (!heard.frames.is_empty()).then_some(()));
        gateway.say(ToGuest::Cancel { grace_s: 1, reason: "canceled".to_owned() });
        gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
        let (mut exit, reason) = gateway.heard().ended().expect("ended");
        exit.oom = None;
        assert_eq!((exit, reason.as_deref()), (expected.0, Some("canceled")));
        assert!(world.init_is_gone());
    }
}

#[test]
fn a_cancel_before_the_word_executes_nothing() {
    let mut world = World::shell("touch /workspace/witness");
    let file = towpath_schemas::id::FileId::mint();
    world.order.files = vec![InputFile { file, name: "late.txt".to_owned(), media_type: "text/plain".to_owned(), size: 1 }];
    let gateway = world.gateway();
    gateway.keep_files_back();
    world.launch();
    gateway.wait("a question for the file", |heard| {
        heard.messages.iter().any(|message| matches!(message, FromGuest::ReadFile { .. })).then_some(())
    });
    gateway.say(ToGuest::Cancel { grace_s: 1, reason: "canceled".to_owned() });
    gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    assert_eq!(gateway.heard().ended(), Some((Exit::default(), Some("canceled".to_owned()))));
    assert!(!world.workspace.join("witness").exists());
}

#[test]
fn fenced_kills_what_runs_and_the_supervisor_leaves() {
    let mut world = World::shell("trap '' TERM; echo up; while :; do sleep 0.05; done");
    let gateway = world.launch();
    gateway.wait("output", |heard| (!heard.frames.is_empty()).then_some(()));
    gateway.say(ToGuest::Fenced);
    until("the supervisor leaves", || world.supervisor_is_gone());
    assert!(world.init_is_gone());
    assert!(!gateway.heard().messages.iter().any(|message| matches!(message, FromGuest::Ended { .. })));
}

#[test]
fn a_fork_bomb_stays_within_its_limit_and_ends_with_the_run() {
    if !has_cgroups() {
        return;
    }
    let mut world = World::shell("echo up; b() { b | b & }; b 2>/dev/null; sleep 1000");
    world.spec.walls.pids = Some(64);
    let gateway = world.launch();
    gateway.wait("output", |heard| (!heard.frames.is_empty()).then_some(()));
    gateway.say(ToGuest::Cancel { grace_s: 1, reason: "canceled".to_owned() });
    gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    assert!(world.init_is_gone());
}

/// Field case E16, with process 1 alive.
#[test]
fn a_command_that_takes_too_much_memory_is_told_as_out_of_memory() {
    if !has_cgroups() {
        return;
    }
    let mut world = World::python("x = bytearray(200 * 1024 * 1024); print(len(x))");
    world.spec.walls.memory_bytes = Some(64 * 1024 * 1024);
    let gateway = world.run();
    let (exit, _) = gateway.heard().ended().expect("ended");
    assert_eq!(exit, Exit { code: None, signal: Some(9), oom: Some(true) });
}

#[test]
fn a_workspace_over_its_limit_ends_the_run() {
    let mut world = World::shell("dd if=/dev/zero of=/workspace/big bs=1M count=64 2>/dev/null; sleep 1000");
    world.spec.walls.disk_bytes = Some(16 * 1024 * 1024);
    let gateway = world.run();
    assert_eq!(gateway.heard().ended().expect("ended").1.as_deref(), Some("disk_limit"));
}

#[test]
fn a_silent_command_is_ended_when_the_agent_limits_idleness() {
    let mut world = World::shell("echo up; sleep 1000");
    world.order.idle_s = Some(1);
    let gateway = world.run();
    assert_eq!(gateway.heard().ended().expect("ended").1.as_deref(), Some("idle"));
}

#[test]
fn after_release_only_the_record_of_who_it_was_remains() {
    let mut world = World::shell("echo done");
    world.run();
    until("the supervisor leaves", || world.supervisor_is_gone());
    let mut left: Vec<_> = std::fs::read_dir(world.folder.path()).expect("folder").map(|entry| entry.expect("entry").file_name()).collect();
    left.sort();
    assert_eq!(left, ["identity.json", "lock", "spec.json", "started", "supervisor.log"]);
    if let Some(cgroup) = world.cgroup() {
        assert_eq!(cgroup.processes().expect("processes"), [] as [i32; 0]);
        assert!(!cgroup.join_files()[0].exists());
    }
}
