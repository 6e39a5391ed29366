//! WHOLE: what the gateway puts together is byte for byte what was printed.

use sha2::{Digest, Sha256};
use towpath_schemas::{
    frame::{Frame, FrameKind},
    guest::{FromGuest, ToGuest},
};

use crate::{
    gateway::Sealing,
    world::{World, until},
};

fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Frames in order without holes, offsets that add up.
fn check_frames<'a>(frames: impl Iterator<Item = &'a Frame>) {
    let mut offset = 0;
    for (frame, seq) in frames.zip(1..) {
        assert_eq!((frame.seq, frame.offset), (seq, offset));
        if frame.kind.is_output() {
            offset += frame.payload.len() as u64;
        }
    }
}

/// 50 MB: colours, multibyte characters, 1-byte writes among large ones; prints the sha256 on stderr at the end.
const FIFTY: &str = r"
import hashlib, os
total, sha, n = 0, hashlib.sha256(), 0
def put(b):
    global total
    sha.update(b); total += len(b)
    view = memoryview(b)
    while view: view = view[os.write(1, view):]
line = '\x1b[3{}m žluťoučký kůň \U0001F434 {}\x1b[0m\n'
while total < 50_000_000:
    n += 1
    put((line.format(n % 8, n) * 40).encode())
    if n % 5 == 0:
        for byte in 'é€😀'.encode(): put(bytes([byte]))
os.write(2, sha.hexdigest().encode())
";

#[test]
fn fifty_megabytes_with_a_connection_cut_half_way_come_whole_and_memory_stays_flat() {
    let mut world = World::python(FIFTY);
    let gateway = world.gateway();
    gateway.cut_at_frames(700);
    let gateway_again = world.launch();
    gateway_again.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    let heard = gateway.heard();
    let (out, err) = (heard.printed(FrameKind::Stdout), heard.printed(FrameKind::Stderr));
    assert!(out.len() >= 50_000_000);
    assert_eq!(sha256(&out), String::from_utf8(err).expect("hex"));
    check_frames(heard.frames.values());
    assert_eq!(heard.end().expect("end").bytes, out.len() as u64 + 64);
    assert!(heard.connections >= 2, "the connection was cut");
    // Frames printed before the cut and not sealed came again, and were the same.
    println!("{} frames, {} again, {} connections", heard.frames.len(), heard.again, heard.connections);
}

#[test]
fn two_hundred_megabytes_without_a_line_break_keep_the_supervisor_small() {
    let mut world = World::python("import os\nb=b'x'*65536\nfor i in range(3200): os.write(1, b)");
    let gateway = world.launch();
    gateway.wait("output", |heard| (heard.frames.len() > 3000).then_some(()));
    let status = std::fs::read_to_string(format!("/proc/{}/status", world.identity().supervisor_pid)).expect("status");
    let peak: u64 = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|rest| rest.trim().trim_end_matches(" kB").parse().ok())
        .expect("VmHWM");
    gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    println!("peak resident memory of the supervisor: {peak} kB");
    assert!(peak < 32 * 1024, "{peak} kB");
    assert_eq!(gateway.heard().printed(FrameKind::Stdout).len(), 3200 * 65536);
    let (text, truncated) = gateway.heard().result().expect("result");
    assert_eq!((text.len(), truncated), (65536, true));
}

#[test]
fn a_full_spool_blocks_the_agent_and_sealing_frees_it() {
    let mut world = World::python("import os\nfor i in range(64): os.write(1, bytes([i])*65536)\nopen('/workspace/through','w')");
    world.sealing = Sealing::Never;
    world.spec.spool_bytes = 1024 * 1024;
    let gateway = world.launch();
    let sent = gateway.wait("a full spool", |heard| (heard.frames.len() >= 28).then_some(heard.frames.len() as u64));
    assert!(!world.workspace.join("through").exists());
    gateway.say(ToGuest::Stored { seq: sent });
    let mut sealed = sent;
    while !world.workspace.join("through").exists() || gateway.heard().end().is_none() {
        gateway.say(ToGuest::Sealed { seq: sealed });
        std::thread::sleep(std::time::Duration::from_millis(5));
        sealed = gateway.heard().frames.len() as u64;
    }
    gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    let expected: Vec<u8> = (0..64_u8).flat_map(|i| vec![i; 65536]).collect();
    assert_eq!(sha256(&gateway.heard().printed(FrameKind::Stdout)), sha256(&expected));
    gateway.say(ToGuest::Release);
    until("the supervisor leaves", || world.supervisor_is_gone());
}

#[test]
fn the_end_of_a_canceled_run_is_told_although_its_spool_is_full() {
    let mut world = World::python("import os\nwhile True: os.write(1, b'x'*65536)");
    world.sealing = Sealing::Never;
    world.spec.spool_bytes = 1024 * 1024;
    let gateway = world.launch();
    gateway.wait("a full spool", |heard| (heard.frames.len() >= 28).then_some(()));
    gateway.say(ToGuest::Cancel { grace_s: 1, reason: "canceled".to_owned() });
    gateway.wait("the end record", |heard| heard.end());
    check_frames(gateway.heard().frames.values());
    let bytes = gateway.heard().end().expect("end").bytes;
    assert_eq!(gateway.heard().printed(FrameKind::Stdout).len() as u64, bytes);
}

#[test]
fn frames_that_are_asked_for_again_come_again_until_they_are_sealed() {
    let mut world = World::shell("for i in 1 2 3 4 5; do echo $i; sleep 0.1; done");
    world.sealing = Sealing::Never;
    let gateway = world.run();
    let frames = gateway.heard().frames.len() as u64;
    assert!(frames >= 5);
    gateway.say(ToGuest::Resend { from: 2 });
    gateway.wait("frames from 2 on", |heard| (heard.again == frames - 1).then_some(()));
    gateway.cut();
    gateway.wait("all frames on a new connection", |heard| (heard.again == 2 * frames - 1).then_some(()));
    gateway.say(ToGuest::Release);
    until("the supervisor leaves", || world.supervisor_is_gone());
}

#[test]
fn stdout_and_stderr_stay_apart_and_invalid_utf8_is_kept() {
    let mut world = World::python("import os\nos.write(1,b'a\\xff\\x00b');os.write(2,b'\\xc3');os.write(1,b'c')");
    let gateway = world.run();
    let heard = gateway.heard();
    assert_eq!(heard.printed(FrameKind::Stdout), b"a\xff\x00bc");
    assert_eq!(heard.printed(FrameKind::Stderr), b"\xc3");
    assert_eq!(heard.result().expect("result"), ("a\u{fffd}bc".to_owned(), false));
}

#[test]
fn the_result_file_comes_before_what_was_printed_and_a_link_is_not_followed() {
    let mut world = World::shell("echo printed; printf '# Result\\n' > $TOWPATH_RESULT_FILE");
    assert_eq!(world.run().heard().result(), Some(("# Result\n".to_owned(), false)));
    let mut world = World::shell("printf '\\033[1mprinted\\033[0m\\n'; ln -s /etc/passwd $TOWPATH_RESULT_FILE");
    assert_eq!(world.run().heard().result(), Some(("printed\n".to_owned(), false)));
    let mut world = World::python("import os\nopen(os.environ['TOWPATH_RESULT_FILE'],'w').write('y'*2000000)");
    let (text, truncated) = world.run().heard().result().expect("result");
    assert_eq!((text.len(), truncated), (1024 * 1024, true));
}

#[test]
fn outputs_that_are_new_or_changed_are_sent_and_others_are_not() {
    let mut world = World::shell(
        "cd outputs; echo new > new.txt; echo more >> old.txt; mkdir -p deep; printf '' > deep/empty; \
         head -c 600000 /dev/zero > zeros; head -c 3000000 /dev/zero > large; ln -s /etc/passwd link",
    );
    let outputs = world.workspace.join("outputs");
    std::fs::create_dir(&outputs).expect("outputs");
    std::fs::write(outputs.join("old.txt"), "old\n").expect("old");
    std::fs::write(outputs.join("same.txt"), "same\n").expect("same");
    for name in ["", "old.txt", "same.txt"] {
        std::os::unix::fs::chown(outputs.join(name), world.spec.walls.uid, world.spec.walls.uid).expect("chown");
    }
    let gateway = world.run();
    let heard = gateway.heard();
    let sizes: Vec<_> = heard.outputs.iter().map(|(name, bytes)| (name.as_str(), bytes.len())).collect();
    assert_eq!(sizes, [("deep/empty", 0), ("new.txt", 4), ("old.txt", 9), ("zeros", 600_000)]);
    assert_eq!(heard.skipped.keys().collect::<Vec<_>>(), ["large"]);
    let announced = heard.messages.iter().find_map(|message| match message {
        FromGuest::Output { name, sha256, .. } if name == "new.txt" => Some(sha256.clone()),
        _ => None,
    });
    assert_eq!(announced, Some(sha256(b"new\n")));
}

#[test]
fn outputs_come_while_the_command_works_once_they_rest_and_again_when_they_changed() {
    let mut world = World::shell(
        "cd /workspace/outputs; echo first > a; (while sleep 1; do date >> busy; done) & \
         while [ ! -e ../go ]; do sleep 0.2; done; echo second > a; kill %1; echo late > b",
    );
    let gateway = world.launch();
    gateway.wait("the first one", |heard| (heard.outputs.get("a").map(Vec::as_slice) == Some(b"first\n")).then_some(()));
    assert!(gateway.heard().ended().is_none(), "the command works still");
    assert!(!gateway.heard().outputs.contains_key("busy"), "what changes all the time waits for the end");
    std::fs::write(world.workspace.join("go"), "").expect("go");
    gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    let heard = gateway.heard();
    let content = |name: &str| heard.outputs.get(name).map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert_eq!((content("a").as_deref(), content("b").as_deref()), (Some("second\n"), Some("late\n")));
    assert!(content("busy").is_some_and(|text| text.lines().count() > 5) && heard.skipped.is_empty(), "{:?}", heard.skipped);
}
