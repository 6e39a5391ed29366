//! Steers into the FIFO, and what is told of each.

use towpath_schemas::{
    agent::SteeringFormat,
    frame::FrameKind,
    guest::{FromGuest, InputFile, SteerEnd, SteerOrder, SteerState, ToGuest},
    id::SteerId,
};

use crate::{gateway::Gateway, world::World};

fn steer(message: &str, ordinal: i64) -> SteerOrder {
    SteerOrder { steer: SteerId::mint(), ordinal, message: message.to_owned(), files: vec![] }
}

fn started(gateway: &Gateway) {
    gateway.wait("the start", |heard| heard.has(&FromGuest::Started).then_some(()));
}

fn done(gateway: &Gateway) {
    gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
}

/// Field case A13: a follow-up that comes again starts nothing again.
#[test]
fn every_text_message_is_one_line_and_a_steer_that_is_known_is_dropped() {
    let mut world = World::shell("while read -r line; do echo \"got:$line\"; [ \"$line\" = stop ] && exit 0; done < $TOWPATH_STEER_FIFO");
    let gateway = world.launch();
    started(&gateway);
    let first = steer("one\ntwo\r\nthree", 1);
    gateway.say(ToGuest::Steer(first.clone()));
    gateway.wait("read", |heard| heard.steer(first.steer).contains(&SteerState::Read).then_some(()));
    gateway.cut();
    gateway.wait("a new connection", |heard| (heard.hellos.len() == 2).then_some(()));
    gateway.say(ToGuest::Steer(first.clone()));
    let last = steer("stop", 2);
    gateway.say(ToGuest::Steer(last.clone()));
    done(&gateway);
    let heard = gateway.heard();
    assert_eq!(heard.printed(FrameKind::Stdout), b"got:one two three\ngot:stop\n");
    let ends = [first, last].map(|order| SteerEnd { steer: order.steer, state: SteerState::Read });
    assert_eq!(heard.end().expect("end").steers, ends);
}

#[test]
fn a_json_line_names_the_files_that_were_staged_before_it() {
    let mut world = World::python(
        "import json, os\nf = open(os.environ['TOWPATH_STEER_FIFO'])\nm = json.loads(f.readline())\n\
         print(m['message'], [ (x['name'], open(x['path']).read() if 'path' in x else x['status']) for x in m['files']])\n\
         print(len(json.load(open(os.environ['TOWPATH_ATTACHMENTS_MANIFEST']))))",
    );
    world.order.steering = SteeringFormat::Json;
    let gateway = world.launch();
    started(&gateway);
    let file = gateway.add_file(b"content");
    let input = |file, name: &str| InputFile { file, name: name.to_owned(), media_type: "text/plain".to_owned(), size: 7 };
    let missing = towpath_schemas::id::FileId::mint();
    let order = SteerOrder { files: vec![input(file, "a.txt"), input(missing, "b.txt")], ..steer("two\nlines", 1) };
    gateway.say(ToGuest::Steer(order));
    done(&gateway);
    let printed = String::from_utf8(gateway.heard().printed(FrameKind::Stdout)).expect("text");
    assert_eq!(printed, "two\nlines [('a.txt', 'content'), ('b.txt', 'unavailable')]\n2\n");
}

#[test]
fn an_agent_that_never_reads_leaves_its_steers_expired_and_blocks_nobody() {
    let mut world = World::shell("while [ ! -e /workspace/end ]; do sleep 0.02; done; echo over");
    let gateway = world.launch();
    started(&gateway);
    let steers: Vec<_> = (1..=8).map(|ordinal| steer(&"x".repeat(32 * 1024), ordinal)).collect();
    for order in &steers {
        gateway.say(ToGuest::Steer(order.clone()));
    }
    gateway.wait("the first is written", |heard| heard.steer(steers[0].steer).contains(&SteerState::Written).then_some(()));
    std::fs::write(world.workspace.join("end"), "").expect("end");
    done(&gateway);
    let ends: Vec<_> = steers.iter().map(|order| SteerEnd { steer: order.steer, state: SteerState::Expired }).collect();
    assert_eq!(gateway.heard().end().expect("end").steers, ends);
}

#[test]
fn a_steer_that_was_read_half_way_is_unknown_and_those_behind_it_expired() {
    let mut world = World::python(
        "import os, time\nf = os.open(os.environ['TOWPATH_STEER_FIFO'], os.O_RDONLY)\n\
         while not os.path.exists('/workspace/go'): time.sleep(0.01)\nprint(len(os.read(f, 6)))",
    );
    let gateway = world.launch();
    started(&gateway);
    let steers = [steer("abc", 1), steer("defgh", 2), steer("ijk", 3)];
    for order in &steers {
        gateway.say(ToGuest::Steer(order.clone()));
    }
    gateway.wait("all are written", |heard| heard.steer(steers[2].steer).contains(&SteerState::Written).then_some(()));
    std::fs::write(world.workspace.join("go"), "").expect("go");
    done(&gateway);
    let states: Vec<_> = gateway.heard().end().expect("end").steers.iter().map(|end| end.state).collect();
    assert_eq!(states, [SteerState::Read, SteerState::Unknown, SteerState::Expired]);
}

#[test]
fn an_agent_that_closes_and_removes_its_fifo_breaks_nothing() {
    let mut world =
        World::shell("exec 3<$TOWPATH_STEER_FIFO; read -r line <&3; exec 3<&-; rm $TOWPATH_STEER_FIFO; echo $line; sleep 0.3; echo end");
    let gateway = world.launch();
    started(&gateway);
    let orders = [steer("one", 1), steer("two", 2)];
    gateway.say(ToGuest::Steer(orders[0].clone()));
    gateway.wait("read", |heard| heard.steer(orders[0].steer).contains(&SteerState::Read).then_some(()));
    gateway.say(ToGuest::Steer(orders[1].clone()));
    done(&gateway);
    assert_eq!(gateway.heard().printed(FrameKind::Stdout), b"one\nend\n");
}

/// Field cases D9 and D10: longer than any pipe takes at once, read in small pieces by somebody who is slow.
#[test]
fn long_steers_are_written_whole_and_one_after_the_other_however_slowly_they_are_read() {
    let mut world = World::python(
        "import os, time\nf = os.open(os.environ['TOWPATH_STEER_FIFO'], os.O_RDONLY)\nheld, seen = b'', 0\n\
         while seen < 8:\n    held += os.read(f, 1777)\n    time.sleep(0.0005)\n\
         \x20   while b'\\n' in held:\n        line, held = held.split(b'\\n', 1)\n        seen += 1\n        print(len(line), line == line[:1] * len(line), line[:1].decode(), flush=True)",
    );
    let gateway = world.launch();
    started(&gateway);
    let orders: Vec<SteerOrder> =
        ('a'..='h').zip(1..).map(|(letter, ordinal)| steer(&letter.to_string().repeat(32 * 1024), ordinal)).collect();
    for order in &orders {
        gateway.say(ToGuest::Steer(order.clone()));
    }
    done(&gateway);
    let printed = String::from_utf8(gateway.heard().printed(FrameKind::Stdout)).expect("text");
    let wanted: String = ('a'..='h').map(|letter| format!("32768 True {letter}\n")).collect();
    assert_eq!(printed, wanted);
}

#[test]
fn a_file_that_cannot_be_had_for_the_moment_is_waited_for() {
    let mut world = World::shell("read line < $TOWPATH_STEER_FIFO; cat /workspace/files/a.txt");
    let gateway = world.launch();
    started(&gateway);
    let file = gateway.add_file(b"content");
    gateway.put_files_off(2);
    let input = InputFile { file, name: "a.txt".to_owned(), media_type: "text/plain".to_owned(), size: 7 };
    gateway.say(ToGuest::Steer(SteerOrder { files: vec![input], ..steer("look", 1) }));
    done(&gateway);
    assert_eq!(gateway.heard().printed(FrameKind::Stdout), b"content");
}
