//! Group commit: callers hand in one item each, what arrived together shares a transaction. No item waits for others to come: a batch is what queued
//! up while the lanes were busy.

use std::{future::Future, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures::{FutureExt, future::BoxFuture};
use tokio::sync::{Semaphore, mpsc, oneshot};
use towpath_schemas::{ErrorCode, Problem};

use crate::{Error, Result, kill, task::Tasks};

/// Callers that may wait for a lane; beyond it they are told to come again.
const QUEUE: usize = 4096;

/// What became of one item of a batch; a problem can be told to many.
pub type Answer<T> = std::result::Result<T, Problem>;

/// Answers a batch by `once`, in order. Trouble of a server is the answer of all; any other error, and contention over a row, halves the batch until the item that
/// it is about stands alone.
pub async fn halving<'a, T, R, F>(batch: &'a [T], once: F) -> Vec<Answer<R>>
where
    F: Fn(&'a [T]) -> BoxFuture<'a, Result<Vec<R>>>,
{
    let mut answers = Vec::with_capacity(batch.len());
    let mut left = vec![batch];
    while let Some(part) = left.pop() {
        let once = AssertUnwindSafe(once(part)).catch_unwind().await.unwrap_or_else(|_| Err(Error::broken("a batch panicked")));
        match once {
            Ok(some) if some.len() == part.len() => answers.extend(some.into_iter().map(Ok)),
            Ok(some) => {
                let error = Error::broken(format!("{} answers for {} items", some.len(), part.len()));
                answers.extend(part.iter().map(|_| Err(error.problem())));
            }
            Err(error) if part.len() <= 1 || (error.is_passing() && !error.is_contention()) => {
                tracing::warn!(error = error.chain(), items = part.len(), "a batch was not done");
                answers.extend(part.iter().map(|_| Err(error.problem())));
            }
            Err(error) => {
                tracing::warn!(error = error.chain(), items = part.len(), "halving a batch");
                let (first, second) = part.split_at(part.len() / 2);
                left.extend([second, first]);
            }
        }
    }
    answers
}

/// How many batches a group works on at a time, how many items each has at most, and how long one may take.
#[derive(Debug, Clone, Copy)]
pub struct Lanes {
    pub lanes: usize,
    pub most: usize,
    pub limit: Duration,
}

/// Hands items to batches and their answers back.
pub struct Group<T, R>(mpsc::Sender<Item<T, R>>);

/// An item, where its answer goes, and in whose name the batch works (the first item's).
type Item<T, R> = (T, oneshot::Sender<R>, kill::Whose);

impl<T, R> Clone for Group<T, R> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Send + 'static, R: Send + 'static> Group<T, R> {
    /// `run` answers each item of a batch, in order. At most `lanes` batches of at most `most` items run at a time, none longer than `limit`: a connection that went
    /// away without a word must not keep a lane. The group lives as long as somebody can submit to it, so that what drains can still hand in what it holds.
    pub fn start<F, Fut>(tasks: &Tasks, Lanes { lanes, most, limit }: Lanes, run: F) -> Self
    where
        F: Fn(Vec<T>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Vec<R>> + Send + 'static,
    {
        let (sender, mut receiver) = mpsc::channel::<Item<T, R>>(QUEUE);
        let lanes = Arc::new(Semaphore::new(lanes));
        let run = Arc::new(run);
        let spawner = tasks.clone();
        tasks.spawn_unwaited(async move {
            let mut batch = Vec::with_capacity(most);
            loop {
                let Ok(permit) = lanes.clone().acquire_owned().await else { return };
                if receiver.recv_many(&mut batch, most).await == 0 {
                    return;
                }
                let mut whose = kill::Whose::default();
                let (items, answers): (Vec<T>, Vec<_>) = batch
                    .drain(..)
                    .map(|(item, answer, submitter)| {
                        whose = std::mem::take(&mut whose).or(|| submitter);
                        (item, answer)
                    })
                    .unzip();
                let run = run.clone();
                spawner.spawn(kill::on_behalf(whose, async move {
                    let Ok(results) = tokio::time::timeout(limit, run(items)).await else {
                        // Whoever waits is told that nobody knows.
                        tracing::warn!(?limit, items = answers.len(), "a batch took too long");
                        return;
                    };
                    for (answer, result) in answers.into_iter().zip(results) {
                        // A caller that has gone away does not want its answer.
                        let _ = answer.send(result);
                    }
                    drop(permit);
                }));
            }
        });
        Self(sender)
    }

    pub async fn submit(&self, item: T) -> Result<R> {
        let (answer, result) = oneshot::channel();
        self.0.try_send((item, answer, kill::Whose::mine())).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Error::refused(ErrorCode::Unavailable, format!("{QUEUE} requests wait already")),
            mpsc::error::TrySendError::Closed(_) => Error::refused(ErrorCode::Draining, "this process is shutting down"),
        })?;
        result.await.map_err(|_| Error::refused(ErrorCode::OutcomeUnknown, "the batch broke off"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE_LANE: Lanes = Lanes { lanes: 1, most: 8, limit: Duration::from_secs(5) };

    fn odd(part: &[u32]) -> BoxFuture<'_, Result<Vec<u32>>> {
        async move {
            match part.iter().find(|item| **item % 10 == 7) {
                Some(item) => Err(Error::broken(format!("{item} is bad"))),
                None => Ok(part.iter().map(|item| item * 2).collect()),
            }
        }
        .boxed()
    }

    #[tokio::test]
    async fn bad_items_stand_alone_and_every_answer_keeps_its_place() {
        let batch: Vec<u32> = (0..100).collect();
        let answers = halving(&batch, odd).await;
        for (item, answer) in batch.iter().zip(&answers) {
            assert_eq!(answer.as_ref().ok().copied(), (item % 10 != 7).then_some(item * 2), "{item}");
        }
        assert_eq!(answers.len(), 100);
        assert!(halving(&[], odd).await.is_empty());
    }

    #[tokio::test]
    async fn trouble_that_passes_is_asked_about_once() {
        let asked = std::sync::atomic::AtomicUsize::new(0);
        let answers = halving(&[1, 2, 3, 4], |_| {
            asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            async { Err::<Vec<()>, _>(Error::Database(sqlx::Error::PoolTimedOut)) }.boxed()
        })
        .await;
        assert_eq!(asked.into_inner(), 1);
        assert!(answers.iter().all(|answer| answer.as_ref().is_err_and(|problem| problem.retryable)));
    }

    #[tokio::test]
    async fn what_arrives_while_a_batch_is_at_work_is_the_next_batch() {
        let tasks = Tasks::default();
        let sizes = Arc::new(std::sync::Mutex::new(Vec::new()));
        let (seen, gate) = (sizes.clone(), Arc::new(Semaphore::new(0)));
        let opened = gate.clone();
        let group = Group::start(&tasks, ONE_LANE, move |batch: Vec<u32>| {
            seen.lock().expect("sizes").push(batch.len());
            let gate = opened.clone();
            async move {
                gate.acquire().await.expect("gate").forget();
                batch
            }
        });
        let calls: Vec<_> = (0..12).map(|item| group.submit(item)).collect();
        gate.add_permits(100);
        let answers = futures::future::join_all(calls).await;
        assert!(answers.into_iter().enumerate().all(|(place, answer)| answer.expect("answer") == place as u32));
        assert_eq!(sizes.lock().expect("sizes").iter().sum::<usize>(), 12);
        assert!(sizes.lock().expect("sizes").iter().all(|size| *size <= 8));
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_that_hangs_gives_its_lane_back_and_nobody_says_what_became_of_it() {
        let tasks = Tasks::default();
        let group = Group::start(&tasks, ONE_LANE, |batch: Vec<u32>| async move {
            if batch.contains(&13) {
                std::future::pending::<()>().await;
            }
            batch
        });
        let hung = group.submit(13).await.expect_err("nobody knows");
        assert_eq!(hung.problem().code, ErrorCode::OutcomeUnknown.code());
        assert_eq!(group.submit(2).await.expect("answer"), 2);
    }

    #[tokio::test]
    async fn what_drains_can_still_hand_in_what_it_holds() {
        let tasks = Tasks::default();
        let group = Group::start(&tasks, ONE_LANE, |batch: Vec<u32>| async move { batch });
        assert!(tasks.drain(Duration::from_secs(1)).await, "a group is nothing to wait for");
        assert_eq!(group.submit(1).await.expect("answer"), 1);
    }

    #[tokio::test]
    async fn an_item_that_panics_stands_alone() {
        let answers = halving(&[1, 2, 3, 4], |part| {
            async move {
                assert!(!part.contains(&3), "three");
                Ok(part.to_vec())
            }
            .boxed()
        })
        .await;
        assert_eq!(answers.iter().map(Answer::is_ok).collect::<Vec<_>>(), [true, true, false, true]);
    }

    #[tokio::test]
    async fn a_batch_dies_with_whoever_asked_for_it() {
        let tasks = Tasks::default();
        let group = Group::start(&tasks, ONE_LANE, |batch: Vec<u32>| async move {
            kill::point("in the batch").await;
            batch
        });
        assert!(matches!(kill::run(0, group.submit(1)).await, kill::Fate::Killed("in the batch")));
        assert_eq!(group.submit(2).await.expect("answer"), 2, "the lane is free again");
    }
}
