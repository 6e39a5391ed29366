//! Kill points: places between two effects at which a test may end a handler as `kill -9` would. The chassis passes one at every begin, commit, publish,
//! object write and outgoing request, so a handler gets them without naming any. Outside the crash harness a point costs one thread-local look.

use std::{
    future::Future,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::Notify;

tokio::task_local! {
    static PLAN: Arc<Plan>;
}

struct Plan {
    at: usize,
    passed: AtomicUsize,
    names: Mutex<Vec<&'static str>>,
    killed: Notify,
}

/// What happened to a future under [`run`].
#[derive(Debug)]
pub enum Fate<T> {
    /// It ended before its point came; `points` are those that it passed.
    Ended { value: T, points: Vec<&'static str> },
    /// It was dropped at this point.
    Killed(&'static str),
}

/// Marks a place between two effects.
pub async fn point(name: &'static str) {
    let Ok(plan) = PLAN.try_with(Arc::clone) else { return };
    let index = plan.passed.fetch_add(1, Ordering::SeqCst);
    plan.names.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(name);
    if index == plan.at {
        plan.killed.notify_one();
        std::future::pending::<()>().await;
    }
}

/// Runs `future` and drops it at its `at`th point, counted from 0.
pub async fn run<F: Future>(at: usize, future: F) -> Fate<F::Output> {
    let plan = Arc::new(Plan { at, passed: AtomicUsize::new(0), names: Mutex::default(), killed: Notify::new() });
    let names = |plan: &Plan| plan.names.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    tokio::select! {
        biased;
        () = plan.killed.notified() => Fate::Killed(names(&plan).last().copied().unwrap_or("?")),
        value = PLAN.scope(plan.clone(), future) => Fate::Ended { value, points: names(&plan) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_future_is_dropped_exactly_at_its_point() {
        let steps = || async {
            point("one").await;
            point("two").await;
            7
        };
        assert!(matches!(run(0, steps()).await, Fate::Killed("one")));
        assert!(matches!(run(1, steps()).await, Fate::Killed("two")));
        assert!(matches!(run(2, steps()).await, Fate::Ended { value: 7, points } if points == ["one", "two"]));
    }
}
