//! What a command cannot see and cannot do.

use std::{
    fs::File,
    io::Write,
    os::fd::{AsRawFd, OwnedFd},
    process::{Command, Stdio},
};

use towpath_schemas::{
    agent::Isolation,
    frame::FrameKind,
    guest::{FromGuest, ToGuest},
};

use towpath_supervisor::wall::WallOrder;

use crate::world::{World, has_cgroups, is_root, until};

fn printed(world: &mut World) -> String {
    let gateway = world.run();
    let heard = gateway.heard();
    let error = String::from_utf8_lossy(&heard.printed(FrameKind::Stderr)).into_owned();
    format!("{}{error}", String::from_utf8_lossy(&heard.printed(FrameKind::Stdout)))
}

#[test]
fn the_host_s_files_and_processes_are_not_there() {
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("cargo tells where the package is");
    let mut world = World::shell("");
    let folder = world.folder.path().display().to_string();
    world.order.command[2] = format!(
        "for path in {here} {folder} /home /root/.bashrc /etc/shadow /var/lib /sys /boot /srv /opt; do [ -e $path ] && echo sees $path; done; \
         ls /; ls -d /proc/[0-9]* | wc -l; (touch /x || touch /usr/x || touch /etc/x) 2>/dev/null && echo writes; hostname"
    );
    // ls of /proc: process 1, the shell, ls and wc.
    let text = printed(&mut world);
    assert!(!text.contains("sees") && !text.contains("writes"), "{text}");
    assert!(text.ends_with("towpath\n"), "{text}");
    let processes: u32 = text.lines().rev().nth(1).and_then(|line| line.parse().ok()).expect("number");
    assert!(processes <= 4, "{text}");
}

#[test]
fn the_command_is_nobody_special_and_cannot_become_more() {
    let text = printed(&mut World::shell(
        "id -u; grep -E '^(CapEff|CapPrm|CapInh|CapAmb|CapBnd|NoNewPrivs)' /proc/self/status; unshare -U true 2>/dev/null && echo nested; \
         kill -9 1 2>/dev/null; cat /proc/1/environ /proc/1/maps 2>/dev/null | wc -c; ls /proc/1/fd 2>/dev/null | wc -l; echo still here",
    ));
    let zero = "0000000000000000";
    let expected = format!(
        "1000\nCapInh:\t{zero}\nCapPrm:\t{zero}\nCapEff:\t{zero}\nCapBnd:\t{zero}\nCapAmb:\t{zero}\nNoNewPrivs:\t1\n0\n0\nstill here\n"
    );
    assert_eq!(text, expected);
}

#[test]
fn on_the_host_it_is_an_unprivileged_user() {
    if !is_root() {
        return;
    }
    let mut world = World::shell("echo up; sleep 1000");
    let gateway = world.launch();
    gateway.wait("output", |heard| (!heard.frames.is_empty()).then_some(()));
    let status = std::fs::read_to_string(format!("/proc/{}/status", world.identity().init_pid.expect("init"))).expect("status");
    assert!(status.lines().any(|line| line == format!("Uid:\t{0}\t{0}\t{0}\t{0}", crate::world::UID)), "{status}");
    assert!(status.lines().any(|line| line.trim_end() == "Groups:" || line.starts_with("Groups:") && !line.contains(" 0 ")), "{status}");
}

#[test]
fn without_egress_there_is_only_a_loopback_of_its_own() {
    let mut world = World::shell("");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = listener.local_addr().expect("address").port();
    world.order.command = ["python3", "-c", &format!("import os,socket\nprint(sorted(os.listdir('/sys/class/net')) if os.path.exists('/sys') else [l.split(':')[0].strip() for l in open('/proc/net/dev').readlines()[2:]])\ntry: socket.create_connection(('127.0.0.1',{port}),2); print('reached')\nexcept OSError: print('closed')")].map(str::to_owned).to_vec();
    assert_eq!(printed(&mut world), "['lo']\nclosed\n");
}

#[test]
fn egress_is_a_network_of_its_own_without_the_host_s_loopback() {
    if towpath_supervisor::outside::program("slirp4netns").is_none()
        || std::fs::File::options().read(true).write(true).open("/dev/net/tun").is_err()
    {
        return;
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = listener.local_addr().expect("address").port();
    let script = format!(
        "import socket\nprint(sorted(l.split(':')[0].strip() for l in open('/proc/net/dev').readlines()[2:]))\n\
         for host in ('127.0.0.1', '10.0.2.2'):\n try: socket.create_connection((host,{port}),2); print('reached')\n except OSError: print('closed')\n\
         print(open('/etc/resolv.conf').read().strip())"
    );
    let mut world = World::python(&script);
    world.spec.walls.egress = true;
    assert_eq!(printed(&mut world), "['lo', 'tap0']\nclosed\nclosed\nnameserver 10.0.2.3\n");
}

#[test]
fn a_wall_that_does_not_stand_is_told_with_its_reason_and_nothing_is_executed() {
    let mut world = World::shell("touch /workspace/witness");
    world.spec.walls.uid = None;
    if !is_root() {
        return;
    }
    let gateway = world.run();
    let (code, message) = gateway.heard().refused().expect("refused");
    assert_eq!(code, "wall_failed");
    assert!(message.contains("root"), "{message}");
    assert!(!world.workspace.join("witness").exists());
}

#[test]
fn bubblewrap_s_own_complaint_is_what_the_owner_reads() {
    if !is_root() {
        return;
    }
    let mut world = World::shell("touch /workspace/witness");
    std::os::unix::fs::chown(&world.workspace, Some(0), Some(0)).expect("chown");
    std::fs::set_permissions(&world.workspace, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("mode");
    let gateway = world.run();
    let (code, message) = gateway.heard().refused().expect("refused");
    assert!(code == "wall_failed" && message.starts_with("bwrap:"), "{code}: {message}");
}

#[test]
fn without_isolation_the_paths_are_the_host_s_and_all_processes_still_end() {
    if !has_cgroups() {
        return;
    }
    let mut world = World::shell(
        "pwd; echo $TOWPATH_STEER_FIFO; id -u; (trap '' TERM; setsid sleep 1000) & (setsid sh -c 'sleep 1000 & sleep 1000') & exit 4",
    );
    world.spec.walls.isolation = Isolation::None;
    world.let_others_walk_through();
    let workspace = world.workspace.display().to_string();
    let fifo = world.folder.control().join("steer").display().to_string();
    let gateway = world.run();
    let heard = gateway.heard();
    assert_eq!(heard.ended().expect("ended").0.code, Some(4));
    assert_eq!(String::from_utf8_lossy(&heard.printed(FrameKind::Stdout)), format!("{workspace}\n{fifo}\n{}\n", crate::world::UID));
    drop(heard);
    assert_eq!(world.cgroup().expect("cgroup").processes().expect("processes"), [] as [i32; 0]);
}

#[test]
fn without_isolation_a_killed_supervisor_takes_everything_with_it() {
    if !has_cgroups() {
        return;
    }
    let mut world = World::shell("(trap '' TERM; setsid sleep 1000) & echo up; sleep 1000");
    world.spec.walls.isolation = Isolation::None;
    world.let_others_walk_through();
    let gateway = world.launch();
    gateway.wait("output", |heard| (!heard.frames.is_empty()).then_some(()));
    let cgroup = world.cgroup().expect("cgroup");
    assert!(!cgroup.processes().expect("processes").is_empty());
    crate::lives::kill(world.identity().supervisor_pid);
    until("an empty cgroup", || cgroup.processes().expect("processes").is_empty());
}

#[test]
fn a_late_cancel_changes_nothing() {
    let mut world = World::shell("exit 2");
    let gateway = world.run();
    gateway.say(ToGuest::Cancel { grace_s: 1, reason: "canceled".to_owned() });
    until("the supervisor leaves", || world.supervisor_is_gone());
    let ends = gateway.heard().messages.iter().filter(|message| matches!(message, FromGuest::Ended { reason: None, .. })).count();
    assert_eq!(ends, 1);
}

#[test]
fn walls_that_lose_their_supervisor_while_they_are_raised_leave_no_process() {
    let world = World::shell("true");
    for folder in [world.folder.control(), world.folder.etc(), world.workspace.join("files")] {
        std::fs::create_dir(folder).expect("folder");
    }
    // Whatever the walls leave behind becomes a child of this process.
    rustix::process::set_child_subreaper(rustix::process::Pid::from_raw(std::process::id() as i32)).expect("subreaper");
    let (report, report_end) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("pipe");
    let (socket, socket_end) = std::os::unix::net::UnixStream::pair().expect("socket");
    let null = || File::options().write(true).open("/dev/null").expect("null");
    let ends: [OwnedFd; 4] = [report_end, socket_end.into(), null().into(), null().into()];
    for end in &ends {
        rustix::io::fcntl_setfd(end, rustix::io::FdFlags::empty()).expect("inherit");
    }
    let [info_fd, init_fds @ ..] = ends.each_ref().map(AsRawFd::as_raw_fd);
    let order = WallOrder {
        bubblewrap: Some(towpath_supervisor::outside::program("bwrap").expect("bwrap")),
        uid: world.spec.walls.uid,
        join: vec![],
        workspace: world.workspace.clone(),
        control: world.folder.control(),
        etc: world.folder.etc(),
        binary: crate::world::supervisor(),
        nested_users: false,
        tmp_bytes: 1024 * 1024,
        info_fd,
        init_fds,
    };
    let mut wall = Command::new(crate::world::supervisor()).arg("wall").stdin(Stdio::piped()).spawn().expect("wall");
    drop((report, socket, ends));
    let mut stdin = wall.stdin.take().expect("stdin");
    stdin.write_all(&serde_json::to_vec(&order).expect("order")).expect("write");
    drop(stdin);
    wall.wait().expect("wait");
    let left = towpath_supervisor::host::descendants(std::process::id() as i32);
    for pid in left.iter().copied().filter_map(rustix::process::Pid::from_raw) {
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("kill");
    }
    assert_eq!(left, [] as [i32; 0]);
}
