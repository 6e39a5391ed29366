//! Kill points: places between two effects at which a test may end a handler as `kill -9` would. The chassis passes one at every begin, commit, publish,
//! object write and outgoing request, so a handler gets them without naming any. A background task dies with whoever spawned it. Outside the crash harness a
//! point costs one thread-local look.

use std::{
    future::Future,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio_util::{sync::CancellationToken, task::TaskTracker};

tokio::task_local! {
    static PLAN: Arc<Plan>;
}

struct Plan {
    at: usize,
    passed: AtomicUsize,
    names: Mutex<Vec<&'static str>>,
    killed: CancellationToken,
    spawned: TaskTracker,
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
        plan.killed.cancel();
        std::future::pending::<()>().await;
    }
}

/// Runs `future` and drops it at its `at`th point, counted from 0, with every task that it spawned.
pub async fn run<F: Future>(at: usize, future: F) -> Fate<F::Output> {
    let plan = Arc::new(Plan {
        at,
        passed: AtomicUsize::new(0),
        names: Mutex::default(),
        killed: CancellationToken::new(),
        spawned: TaskTracker::new(),
    });
    let names = |plan: &Plan| plan.names.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    let fate = tokio::select! {
        biased;
        () = plan.killed.cancelled() => None,
        value = PLAN.scope(plan.clone(), future) => Some(value),
    };
    match fate {
        Some(value) => Fate::Ended { value, points: names(&plan) },
        None => {
            plan.spawned.close();
            plan.spawned.wait().await;
            Fate::Killed(names(&plan).get(at).copied().unwrap_or("?"))
        }
    }
}

/// Whose kill points are passed: those of the harness's run that this was made in, or nobody's.
#[derive(Clone, Default)]
pub(crate) struct Whose(Option<Arc<Plan>>);

impl Whose {
    pub fn mine() -> Self {
        Self(PLAN.try_with(Arc::clone).ok())
    }

    pub fn or(self, other: impl FnOnce() -> Self) -> Self {
        if self.0.is_some() { self } else { other() }
    }
}

/// What a spawned task runs: it passes the points of whoever spawned it, and is dropped when that one is killed.
pub(crate) fn inherit<F: Future<Output = ()>>(future: F) -> impl Future<Output = ()> {
    on_behalf(Whose::mine(), future)
}

/// What a task runs on somebody's behalf: it passes that one's points, and is dropped when that one is killed.
pub(crate) async fn on_behalf<F: Future<Output = ()>>(whose: Whose, future: F) {
    let Some(plan) = whose.0 else { return future.await };
    let spawned = plan.spawned.token();
    tokio::select! {
        biased;
        () = plan.killed.cancelled() => {}
        () = PLAN.scope(plan.clone(), future) => {}
    }
    drop(spawned);
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

    #[tokio::test]
    async fn a_task_dies_with_whoever_spawned_it() {
        let tasks = crate::task::Tasks::default();
        let held = Arc::new(());
        let spawner = || async {
            let (inner, held) = (tasks.clone(), held.clone());
            tasks.spawn(async move {
                point("in the task").await;
                let _held = held;
                inner.stopping().cancelled().await;
            });
            std::future::pending::<()>().await;
        };
        assert!(matches!(run(0, spawner()).await, Fate::Killed("in the task")));
        assert_eq!(Arc::strong_count(&held), 1, "the task is gone");
    }
}
