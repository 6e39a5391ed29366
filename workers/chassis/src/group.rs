//! Group commit: callers hand in one item each, what arrived together shares a transaction. No item waits for others to come: a batch is what queued
//! up while the lanes were busy.

use std::{future::Future, sync::Arc};

use futures::future::BoxFuture;
use tokio::sync::{Semaphore, mpsc, oneshot};
use towpath_schemas::{ErrorCode, Problem};

use crate::{Error, Result, kill, task::Tasks};

/// Callers that may wait for a lane; beyond it they are told to come again.
const QUEUE: usize = 4096;

/// What became of one item of a batch; a problem can be told to many.
pub type Answer<T> = std::result::Result<T, Problem>;

/// Answers a batch by `once`, in order. Passing trouble is the answer of all; any other error halves the batch until the item that it is about stands alone.
pub async fn halving<'a, T, R, F>(batch: &'a [T], once: F) -> Vec<Answer<R>>
where
    F: Fn(&'a [T]) -> BoxFuture<'a, Result<Vec<R>>>,
{
    let mut answers = Vec::with_capacity(batch.len());
    let mut left = vec![batch];
    while let Some(part) = left.pop() {
        match once(part).await {
            Ok(some) if some.len() == part.len() => answers.extend(some.into_iter().map(Ok)),
            Ok(some) => {
                let error = Error::broken(format!("{} answers for {} items", some.len(), part.len()));
                answers.extend(part.iter().map(|_| Err(error.problem())));
            }
            Err(error) if part.len() <= 1 || error.is_passing() => {
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
    /// `run` answers each item of a batch, in order. At most `lanes` batches of at most `most` items run at a time.
    pub fn start<F, Fut>(tasks: &Tasks, lanes: usize, most: usize, run: F) -> Self
    where
        F: Fn(Vec<T>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Vec<R>> + Send + 'static,
    {
        let (sender, mut receiver) = mpsc::channel::<Item<T, R>>(QUEUE);
        let lanes = Arc::new(Semaphore::new(lanes));
        let run = Arc::new(run);
        let spawner = tasks.clone();
        let stop = tasks.stopping();
        tasks.spawn(async move {
            let mut batch = Vec::with_capacity(most);
            loop {
                let Ok(permit) = lanes.clone().acquire_owned().await else { return };
                let received = tokio::select! {
                    received = receiver.recv_many(&mut batch, most) => received,
                    () = stop.cancelled() => receiver.try_recv().map(|item| { batch.push(item); 1 }).unwrap_or(0),
                };
                if received == 0 {
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
                    for (answer, result) in answers.into_iter().zip(run(items).await) {
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
