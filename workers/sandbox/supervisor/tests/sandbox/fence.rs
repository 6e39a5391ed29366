//! FENCED by time: a sandbox that hears from no gateway ends its command by itself.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use towpath_schemas::guest::{FENCE_RAN_OUT, FromGuest};

use crate::world::{World, until};

/// A command that notes each tenth of a second that it lived.
fn living(fence_s: u32) -> World {
    let mut world = World::shell("while :; do date +%s.%N >> /workspace/alive; sleep 0.1; done");
    world.order.fence_s = Some(fence_s);
    world
}

fn lives(world: &World) -> usize {
    std::fs::read_to_string(world.workspace.join("alive")).map_or(0, |text| text.lines().count())
}

fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).expect("pid"), signal).expect("signal");
}

#[test]
fn nothing_is_executed_before_a_lease_is_granted() {
    let mut world = living(2);
    let gateway = world.gateway();
    gateway.heard().leases = false;
    world.launch();
    gateway.wait("questions for a lease", |heard| {
        (heard.messages.iter().filter(|message| matches!(message, FromGuest::Lease { .. })).count() >= 3).then_some(())
    });
    assert_eq!(lives(&world), 0);
    gateway.heard().leases = true;
    gateway.wait("the start", |heard| heard.has(&FromGuest::Started).then_some(()));
}

#[test]
fn a_lease_that_is_granted_again_and_again_lasts() {
    let mut world = living(2);
    let gateway = world.launch();
    gateway.wait("the start", |heard| heard.has(&FromGuest::Started).then_some(()));
    until("five seconds of life", || lives(&world) >= 40);
    assert_eq!(gateway.heard().ended(), None);
}

#[test]
fn a_sandbox_that_hears_from_nobody_ends_its_command_and_says_why_later() {
    let mut world = living(2);
    let gateway = world.launch();
    gateway.wait("the start", |heard| heard.has(&FromGuest::Started).then_some(()));
    gateway.heard().leases = false;
    gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    let (exit, reason) = gateway.heard().ended().expect("ended");
    assert_eq!((exit.signal, reason.as_deref()), (Some(Signal::KILL.as_raw()), Some(FENCE_RAN_OUT)));
    let lived = lives(&world);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(lives(&world), lived, "nothing of it lives on");
}

#[test]
fn process_1_keeps_to_the_lease_while_the_supervisor_outside_is_stopped() {
    let mut world = living(2);
    let gateway = world.launch();
    gateway.wait("the start", |heard| heard.has(&FromGuest::Started).then_some(()));
    let outside = world.identity().supervisor_pid;
    signal(outside, Signal::STOP);
    let mut lived = (lives(&world), Instant::now());
    until("the command has ended", || {
        if lives(&world) > lived.0 {
            lived = (lives(&world), Instant::now());
        }
        lived.1.elapsed() > Duration::from_secs(1)
    });
    signal(outside, Signal::CONT);
    gateway.wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    assert_eq!(gateway.heard().ended().expect("ended").1.as_deref(), Some(FENCE_RAN_OUT));
}
