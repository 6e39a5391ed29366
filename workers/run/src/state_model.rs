//! An exhaustive model of the table: every machine that any order of happenings, crashes and restarts can reach, and what must hold of each.

use std::collections::{HashSet, VecDeque};

use super::*;

const INCARNATIONS: [&str; 2] = ["a", "b"];

fn exits() -> Vec<Exited> {
    let exit = |code, signal| Exit { code, signal, oom: Some(false) };
    vec![
        Exited { exit: exit(Some(0), None), reason: None, message: None },
        Exited { exit: exit(Some(127), None), reason: None, message: None },
        Exited { exit: exit(None, Some(9)), reason: None, message: None },
        Exited { exit: exit(None, Some(9)), reason: Some(FENCE_RAN_OUT.into()), message: None },
        Exited { exit: exit(None, None), reason: Some("command_not_found".into()), message: Some("no such file: x".into()) },
    ]
}

/// Everything that may happen at any time, from the newest epoch and from the one before.
fn happenings(run: &Machine) -> Vec<On> {
    let mut all = vec![On::Admitted, On::Cancel, On::Deadline, On::TimeLimit { reason: "idle" }, On::Abandon, On::WantedOverdue];
    for epoch in [run.epoch - 1, run.epoch, run.epoch + 1] {
        all.extend([On::StartDeadline { epoch }, On::Absent { epoch }, On::Sealed { epoch }, On::SealOverdue { epoch }]);
        all.push(On::Refused { epoch, reason: "wall_failed".into(), message: "no".into() });
        for incarnation in INCARNATIONS {
            all.push(On::Bound { epoch, incarnation: incarnation.into() });
            all.extend(exits().into_iter().map(|exited| On::Ended { epoch, incarnation: incarnation.into(), exited }));
        }
    }
    all
}

fn reachable() -> HashSet<Machine> {
    let mut seen = HashSet::new();
    let mut queue: VecDeque<Machine> =
        [Machine::accepted(false), Machine::accepted(true), Machine { epoch_floor: 8, ..Machine::accepted(true) }].into();
    while let Some(run) = queue.pop_front() {
        if !seen.insert(run.clone()) {
            continue;
        }
        for on in happenings(&run) {
            if let Verdict::Move(next, _) = decide(&run, &on) {
                queue.push_back(*next);
            }
        }
    }
    seen
}

/// The checks of the `run` table in schemas/migrations, said again.
fn is_possible(run: &Machine) -> bool {
    use RunState::{Finishing, Queued, Running, Starting, Stopping};
    let executing = matches!(run.state, Starting | Running | Stopping);
    (!executing || run.active)
        && (!matches!(run.state, Queued | Finishing) || !run.active)
        && (!matches!(run.state, Running | Stopping) || run.incarnation.is_some())
        && (run.state != Stopping || run.wanted.is_some())
        && (!matches!(run.state, Starting | Running | Stopping | Finishing) || run.epoch > 0)
        && run.starts <= START_RETRIES
        && run.restarts <= MAX_RESTARTS
}

#[test]
fn every_reachable_run_is_possible_and_terminal_states_are_final() {
    let all = reachable();
    assert!(all.len() > 200, "the model explores {} machines", all.len());
    for run in &all {
        assert!(is_possible(run), "{run:?}");
        for on in happenings(run) {
            let Verdict::Move(next, effects) = decide(run, &on) else { continue };
            assert!(next.epoch >= run.epoch && (next.epoch == run.epoch || on == On::Admitted), "{run:?} {on:?}");
            assert!(run.wanted.is_none() || next.wanted == run.wanted, "wanted is set once: {run:?} {on:?}");
            if run.state.ended() {
                assert_eq!((next.state, &next.reason, &next.exited), (run.state, &run.reason, &run.exited), "{on:?}");
                assert!(!effects.contains(&Effect::Settle), "settled twice: {run:?} {on:?}");
            }
            assert_eq!(effects.contains(&Effect::Settle), next.state.ended() && !run.state.ended());
            assert_eq!(effects.contains(&Effect::ReleaseSlot), run.active && !next.active, "{run:?} {on:?}");
        }
    }
}

#[test]
fn nothing_from_another_epoch_or_incarnation_changes_anything() {
    for run in reachable() {
        for on in happenings(&run) {
            let stale = match &on {
                On::Ended { epoch, incarnation, .. } => *epoch != run.epoch || run.incarnation.as_ref() != Some(incarnation),
                On::Bound { epoch, .. } => *epoch != run.epoch || run.incarnation.is_some(),
                other => epoch_of(other).is_some_and(|epoch| epoch != run.epoch),
            };
            if stale {
                assert_eq!(decide(&run, &on), Verdict::Unchanged, "{run:?} {on:?}");
            }
        }
    }
}

#[test]
fn what_is_told_twice_changes_nothing_the_second_time() {
    for run in reachable() {
        for on in happenings(&run) {
            let Verdict::Move(next, _) = decide(&run, &on) else { continue };
            // A second proof of absence asks again for the marking of the record, which is itself idempotent; a retried start has a new epoch.
            if matches!(on, On::Absent { .. } | On::Abandon | On::Deadline | On::Cancel) {
                continue;
            }
            assert!(
                matches!(decide(&next, &on), Verdict::Unchanged) || decide(&next, &on) == Verdict::Move(next.clone(), vec![]),
                "{run:?} {on:?}"
            );
        }
    }
}

#[test]
fn a_command_is_started_at_most_once_for_each_epoch() {
    for run in reachable() {
        for on in happenings(&run) {
            let Verdict::Move(next, effects) = decide(&run, &on) else { continue };
            if effects.contains(&Effect::OpenRecord) {
                assert!(run.incarnation.is_none() && next.incarnation.is_some(), "{run:?} {on:?}");
            }
            if effects.contains(&Effect::CreateSandbox) {
                assert_eq!(next.epoch, run.epoch.max(run.epoch_floor) + 1);
            }
        }
    }
}

/// Whatever happened, the happenings that Towpath itself brings about (admission, loss, timers, the closed record) end the run and free all it holds.
#[test]
fn every_reachable_run_can_still_end_and_let_go_of_everything() {
    for start in reachable() {
        let mut run = start.clone();
        for _ in 0..40 {
            if run.state.ended() && !run.active {
                break;
            }
            let epoch = run.epoch;
            let own = [On::Admitted, On::Absent { epoch }, On::Sealed { epoch }, On::WantedOverdue, On::SealOverdue { epoch }];
            for on in own {
                if let Verdict::Move(next, _) = decide(&run, &on) {
                    run = *next;
                }
            }
        }
        assert!(run.state.ended() && !run.holds_workspace(), "stuck: {start:?} → {run:?}");
    }
}

#[test]
fn exit_codes_signals_and_causes_are_told_apart() {
    let running = |exited: Exited| {
        let mut run = Machine::accepted(false);
        for on in [
            On::Admitted,
            On::Bound { epoch: 1, incarnation: "a".into() },
            On::Ended { epoch: 1, incarnation: "a".into(), exited },
            On::Sealed { epoch: 1 },
        ] {
            match decide(&run, &on) {
                Verdict::Move(next, _) => run = *next,
                other => panic!("{on:?}: {other:?}"),
            }
        }
        (run.state, run.reason, run.message)
    };
    let exit = |code, signal, oom| Exited { exit: Exit { code, signal, oom: Some(oom) }, reason: None, message: None };
    let failed = |reason: &str, message: &str| (RunState::Failed, Some(reason.to_owned()), Some(message.to_owned()));
    assert_eq!(running(exit(Some(0), None, false)), (RunState::Succeeded, None, None));
    for code in [1, 126, 127, 137] {
        assert_eq!(running(exit(Some(code), None, false)), failed("exit_code", &format!("the command exited with code {code}")));
    }
    assert_eq!(running(exit(None, Some(9), false)), failed("signal", "the command was ended by signal 9"));
    assert_eq!(running(exit(None, Some(9), true)).1.as_deref(), Some("out_of_memory"));
    let absent = Exited { exit: Exit::default(), reason: Some("command_not_found".into()), message: Some("no such file: frob".into()) };
    assert_eq!(running(absent), failed("command_not_found", "no such file: frob"));
}

#[test]
fn a_canceled_run_never_starts_and_a_running_one_stops_as_wanted() {
    let cancel = |run: &Machine| match decide(run, &On::Cancel) {
        Verdict::Move(next, _) => *next,
        other => panic!("{other:?}"),
    };
    let queued = Machine::accepted(false);
    assert_eq!(cancel(&queued).state, RunState::Canceled);
    assert_eq!(decide(&cancel(&queued), &On::Admitted), Verdict::Unchanged);
    let Verdict::Move(starting, _) = decide(&queued, &On::Admitted) else { panic!("admitted") };
    let canceled = cancel(&starting);
    assert_eq!((canceled.state, canceled.active), (RunState::Canceled, false));
    assert_eq!(decide(&canceled, &On::Bound { epoch: 1, incarnation: "a".into() }), Verdict::Unchanged);
    let Verdict::Move(running, _) = decide(&starting, &On::Bound { epoch: 1, incarnation: "a".into() }) else { panic!("bound") };
    let stopping = cancel(&running);
    assert_eq!((stopping.state, stopping.wanted, stopping.active), (RunState::Stopping, Some(RunState::Canceled), true));
    let Verdict::Move(overdue, effects) = decide(&stopping, &On::WantedOverdue) else { panic!("overdue") };
    assert_eq!((overdue.state, overdue.active), (RunState::Canceled, true), "slot and workspace wait for the sandbox");
    assert_eq!(effects, [Effect::Settle]);
}

/// Field case E16.
#[test]
fn who_ran_out_of_memory_is_told_the_limit() {
    let exit = Exit { code: None, signal: Some(9), oom: Some(true) };
    for (memory_bytes, sentence) in [
        (Some(512 << 20), "out of memory (limit 512 MiB)"),
        (Some(1_000_000), "out of memory (limit 1000000 bytes)"),
        (None, "out of memory (its sandbox has no limit of its own: its host had none left)"),
    ] {
        let exited = Some(Exited { exit: exit.clone(), reason: None, message: None });
        let run = Machine { state: RunState::Finishing, epoch: 1, memory_bytes, exited, ..Machine::accepted(false) };
        let Verdict::Move(ended, _) = decide(&run, &On::Sealed { epoch: 1 }) else { panic!("it does not end") };
        assert_eq!(ended.message.as_deref(), Some(sentence));
    }
}
