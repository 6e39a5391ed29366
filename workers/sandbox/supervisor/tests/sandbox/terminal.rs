//! Commands on a terminal: what it is to them, who types, who owns its size, and what is recorded of its screen.

use base64::{Engine, prelude::BASE64_STANDARD};
use towpath_schemas::{
    agent::Terminal,
    frame::{Frame, FrameKind, ScreenRecord, Size},
    guest::{FromGuest, ToGuest, ViewerHeard, ViewerSays},
};
use towpath_terminal::Screen;

use crate::{
    gateway::{Gateway, Heard},
    world::World,
};

fn on_terminal(mut world: World) -> World {
    world.order.terminal = Terminal::Pty;
    world.order.mode = "interactive".to_owned();
    world
}

fn bash() -> World {
    let mut world = on_terminal(World::new(&["/bin/bash", "--norc", "-i"]));
    world.order.env = [("PS1".to_owned(), "ready> ".to_owned())].into();
    world
}

fn says(gateway: &Gateway, viewer: &str, says: ViewerSays) {
    gateway.say(ToGuest::Viewer { viewer: viewer.to_owned(), says });
}

fn type_in(gateway: &Gateway, number: u64, text: &str) {
    says(gateway, "one", ViewerSays::Type { number, b64: BASE64_STANDARD.encode(text) });
}

fn heard_by(heard: &Heard, viewer: &str) -> Vec<ViewerHeard> {
    let answers = heard.messages.iter().filter_map(|message| match message {
        FromGuest::Viewer { viewer: of, heard } if of == viewer => Some(heard.clone()),
        _ => None,
    });
    answers.collect()
}

/// What somebody sees who begins at this frame.
fn screen_from(frames: &[Frame]) -> Screen {
    let first = frames.first().expect("a frame");
    let record: ScreenRecord = serde_json::from_slice(&first.payload).expect("a recorded screen");
    let mut screen = Screen::restore(&record);
    for frame in &frames[1..] {
        match frame.kind {
            FrameKind::Terminal => drop(screen.print(&frame.payload)),
            FrameKind::Resize => screen.resize(serde_json::from_slice(&frame.payload).expect("size")),
            _ => {}
        }
    }
    screen
}

fn frames(heard: &Heard) -> Vec<Frame> {
    heard.frames.values().cloned().collect()
}

/// Waits until the whole screen shows this.
fn shows(gateway: &Gateway, text: &str) {
    gateway.wait(text, |heard| {
        (!heard.frames.is_empty() && screen_from(&frames(heard)).rows().iter().any(|row| row.contains(text))).then_some(())
    });
}

#[test]
fn a_shell_has_a_terminal_of_its_own_with_a_name_a_size_and_job_control() {
    let mut world = bash();
    let gateway = world.launch();
    shows(&gateway, "ready>");
    type_in(&gateway, 1, "tty; stty size; sleep 100\r");
    shows(&gateway, "40 120");
    shows(&gateway, "/dev/pts/0");
    gateway.wait("the answer", |heard| heard_by(heard, "one").contains(&ViewerHeard::Typed { number: 1 }).then_some(()));
    // Suspended, and so a job of the shell's; ended by the key, and the shell lives.
    type_in(&gateway, 2, "\x1a");
    shows(&gateway, "Stopped");
    type_in(&gateway, 3, "kill %1; wait; echo $((6*7)) ─🦀\r");
    shows(&gateway, "42 ─🦀");
    type_in(&gateway, 4, "exit 3\r");
    gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    let heard = gateway.heard();
    assert_eq!(heard.ended().expect("ended").0.code, Some(3));
    assert_eq!(heard.end().expect("end").bytes, heard.printed(FrameKind::Terminal).len() as u64);
    let (result, _) = heard.result().expect("result");
    assert!(result.contains("42 ─🦀") && !result.contains('\x1b'), "{result}");
}

#[test]
fn whoever_joins_at_any_recorded_screen_sees_the_same_as_from_the_beginning() {
    // Colours, an alternate screen, and more bytes than a screen is kept for.
    let mut world = on_terminal(World::python(
        "import sys\nfor i in range(9000):\n  sys.stdout.write('\\x1b[%d;%dH\\x1b[38;5;%dm*%d\\x1b[0m' % (i % 39 + 1, i % 110 + 1, i % 256, i))\n  \
         i == 3000 and sys.stdout.write('\\x1b[?1049h')\nsys.stdout.write('\\x1b[?1049l\\nover\\n' * 2); sys.stdout.flush()\n\
         sys.stdout.write('x' * 400000); print('end')",
    ));
    let gateway = world.run();
    let heard = gateway.heard();
    let all = frames(&heard);
    let places: Vec<usize> = (0..all.len()).filter(|place| all[*place].kind == FrameKind::Screen).collect();
    assert!(places.len() >= 3, "{} screens", places.len());
    let whole = screen_from(&all);
    for place in places {
        let late = screen_from(&all[place..]);
        assert_eq!(late.rows(), whole.rows(), "from frame {}", all[place].seq);
        assert_eq!(late.terminal().cursor(), whole.terminal().cursor());
    }
}

#[test]
fn one_viewer_owns_the_size_until_it_leaves_or_another_takes_it() {
    let mut world = bash();
    let gateway = world.launch();
    shows(&gateway, "ready>");
    let here = |cols, rows, may_resize| ViewerSays::Here { size: Size { cols, rows }, may_resize };
    let told = |viewer: &'static str, cols, rows, owner| {
        let wanted = ViewerHeard::Size { size: Size { cols, rows }, owner };
        gateway.wait(&format!("{viewer}: {wanted:?}"), move |heard| (heard_by(heard, viewer).last() == Some(&wanted)).then_some(()));
    };
    says(&gateway, "watcher", here(80, 24, false));
    told("watcher", 120, 40, false);
    says(&gateway, "one", here(100, 30, true));
    told("one", 100, 30, true);
    says(&gateway, "two", here(50, 20, true));
    told("two", 100, 30, false);
    says(&gateway, "two", ViewerSays::Own { size: Size { cols: 60, rows: 20 } });
    told("two", 60, 20, true);
    says(&gateway, "one", here(100, 30, true));
    told("one", 60, 20, false);
    says(&gateway, "two", ViewerSays::Leave);
    says(&gateway, "one", here(90, 25, true));
    told("one", 90, 25, true);
    type_in(&gateway, 1, "stty size\r");
    shows(&gateway, "25 90");
    let heard = gateway.heard();
    let sizes: Vec<Size> = heard
        .frames
        .values()
        .filter(|frame| frame.kind == FrameKind::Resize)
        .map(|frame| serde_json::from_slice(&frame.payload).expect("size"))
        .collect();
    assert_eq!(sizes, [(100, 30), (60, 20), (100, 30), (90, 25)].map(|(cols, rows)| Size { cols, rows }));
}

#[test]
fn the_terminal_answers_what_it_is_asked_and_typing_into_a_command_that_reads_nothing_is_refused_in_time() {
    let mut world = on_terminal(World::python(
        "import os, sys, termios, time, tty\ntty.setraw(0)\nsys.stdout.write('\\x1b[5;7H\\x1b[6n'); sys.stdout.flush()\n\
         answer = os.read(0, 100)\nsys.stdout.write('\\r\\nasked:%r\\r\\n' % answer); sys.stdout.flush()\ntime.sleep(100)",
    ));
    let gateway = world.launch();
    shows(&gateway, "asked:b'\\x1b[5;7R'");
    let flood = "x".repeat(16 * 1024);
    for number in 1..=12 {
        type_in(&gateway, number, &flood);
    }
    let refused = gateway.wait("a refusal", |heard| {
        heard_by(heard, "one")
            .into_iter()
            .find_map(|heard| if let ViewerHeard::Refused { reason, .. } = heard { Some(reason) } else { None })
    });
    assert!(refused.contains("does not read"), "{refused}");
    gateway.say(ToGuest::Cancel { grace_s: 1, reason: "canceled".to_owned() });
    gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    type_in(&gateway, 99, "late");
}

#[test]
fn a_shell_that_does_not_hear_term_ends_at_once_when_its_terminal_goes() {
    let mut world = bash();
    world.order.grace_s = 8;
    let gateway = world.launch();
    shows(&gateway, "ready>");
    gateway.say(ToGuest::Cancel { grace_s: 8, reason: "canceled".to_owned() });
    gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    let (exit, reason) = gateway.heard().ended().expect("ended");
    // By the hangup, and not by the KILL that the grace would have ended in.
    assert_ne!(exit.signal, Some(9), "{exit:?}");
    assert_eq!(reason.as_deref(), Some("canceled"));
}

#[test]
fn a_shell_where_nothing_moves_is_ended_for_being_idle() {
    let mut world = bash();
    world.order.idle_s = Some(1);
    let gateway = world.run();
    assert_eq!(gateway.heard().ended().expect("ended").1.as_deref(), Some("idle"));
}

#[test]
fn a_command_on_pipes_has_no_terminal_to_type_into() {
    let mut world = World::shell("tty || true; sleep 2");
    let gateway = world.launch();
    gateway.wait("the start", |heard| heard.has(&FromGuest::Started).then_some(()));
    type_in(&gateway, 1, "x");
    let answer = gateway.wait("a refusal", |heard| heard_by(heard, "one").first().cloned());
    assert!(matches!(answer, ViewerHeard::Refused { number: 1, .. }), "{answer:?}");
}
