//! Timers: rows with a due time of the database. The clock takes those that are due in batches (SKIP LOCKED: any number of clocks may run), moves what they
//! are for and deletes them in one transaction. A kind that this release does not know stays for one that does.

use std::{collections::HashMap, future::Future, sync::Arc, time::Duration};

use futures::future::BoxFuture;

use crate::{Chassis, Result, Work};

/// Timers taken by one transaction.
const BATCH: i64 = 200;
/// Wait before a timer that failed is tried again.
const AGAIN_S: f64 = 30.0;

type Fire = dyn for<'a> Fn(&'a mut Work, Vec<String>) -> BoxFuture<'a, Result<()>> + Send + Sync;

/// What each kind of timer does.
#[derive(Clone, Default)]
pub struct Timers(HashMap<&'static str, Arc<Fire>>);

impl Timers {
    /// `fire` gets the keys that are due; it must change nothing when it is too late.
    pub fn on<F>(mut self, kind: &'static str, fire: F) -> Self
    where
        F: for<'a> Fn(&'a mut Work, Vec<String>) -> BoxFuture<'a, Result<()>> + Send + Sync + 'static,
    {
        self.0.insert(kind, Arc::new(fire));
        self
    }

    /// What is registered.
    pub fn kinds(&self) -> Vec<String> {
        self.0.keys().map(|kind| (*kind).to_owned()).collect()
    }
}

/// Sets timers (kind, key, after), or moves them when they are set already. Of equal ones the last counts.
pub async fn set(work: &mut Work, timers: &[(&str, String, Duration)]) -> Result<()> {
    let last: HashMap<(&str, &String), Duration> = timers.iter().map(|(kind, key, after)| ((*kind, key), *after)).collect();
    if last.is_empty() {
        return Ok(());
    }
    let kinds: Vec<String> = last.keys().map(|(kind, _)| (*kind).to_owned()).collect();
    let keys: Vec<String> = last.keys().map(|(_, key)| (*key).clone()).collect();
    let after: Vec<f64> = last.values().map(Duration::as_secs_f64).collect();
    sqlx::query!(
        "insert into timer (kind, key, due_at) select kind, key, now() + make_interval(secs => after)
         from unnest($1::text[], $2::text[], $3::float8[]) as new (kind, key, after) order by kind, key
         on conflict (kind, key) do update set due_at = excluded.due_at",
        &kinds,
        &keys,
        &after
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// Removes timers (kind, key) that are not needed any more; one that fires all the same changes nothing.
pub async fn clear(work: &mut Work, timers: &[(&str, String)]) -> Result<()> {
    if timers.is_empty() {
        return Ok(());
    }
    let (kinds, keys): (Vec<String>, Vec<String>) = timers.iter().map(|(kind, key)| ((*kind).to_owned(), key.clone())).unzip();
    sqlx::query!(
        "delete from timer where (kind, key) in (
             select kind, key from timer join unnest($1::text[], $2::text[]) as old (kind, key) using (kind, key) for update of timer skip locked)",
        &kinds,
        &keys
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// Fires what is due; the number of timers taken.
pub async fn fire(chassis: Chassis, timers: Timers) -> Result<u64> {
    let mut work = chassis.begin().await?;
    let due = take(&mut work, &timers, BATCH).await?;
    let taken = due.len() as u64;
    if taken == 0 {
        return Ok(0);
    }
    match apply(&mut work, &timers, due).await {
        Ok(()) => work.commit().await?,
        Err(error) if error.is_passing() => return Err(error),
        Err(error) => {
            drop(work);
            tracing::warn!(error = error.chain(), "a batch of timers failed; each by itself now");
            for _ in 0..taken {
                fire_one(&chassis, &timers).await?;
            }
        }
    }
    Ok(taken)
}

async fn take(work: &mut Work, timers: &Timers, most: i64) -> Result<Vec<(String, String)>> {
    let rows = sqlx::query!(
        "delete from timer using (select kind, key from timer where due_at <= now() and kind = any($1) order by due_at limit $2 for update skip locked) as due
         where timer.kind = due.kind and timer.key = due.key returning timer.kind, timer.key",
        &timers.kinds(),
        most
    )
    .fetch_all(work.db())
    .await?;
    Ok(rows.into_iter().map(|row| (row.kind, row.key)).collect())
}

async fn apply(work: &mut Work, timers: &Timers, due: Vec<(String, String)>) -> Result<()> {
    let mut by_kind: HashMap<String, Vec<String>> = HashMap::new();
    for (kind, key) in due {
        by_kind.entry(kind).or_default().push(key);
    }
    for (kind, keys) in by_kind {
        if let Some(fire) = timers.0.get(kind.as_str()) {
            fire(work, keys).await?;
        }
    }
    Ok(())
}

async fn fire_one(chassis: &Chassis, timers: &Timers) -> Result<()> {
    let mut work = chassis.begin().await?;
    let due = take(&mut work, timers, 1).await?;
    let Some((kind, key)) = due.first().cloned() else { return Ok(()) };
    match apply(&mut work, timers, due).await {
        Ok(()) => work.commit().await,
        Err(error) => {
            drop(work);
            tracing::error!(kind, key, error = error.chain(), "a timer failed; again later");
            sqlx::query!("update timer set due_at = now() + make_interval(secs => $3) where kind = $1 and key = $2", kind, key, AGAIN_S)
                .execute(&chassis.db)
                .await?;
            Ok(())
        }
    }
}

/// The clock's loop over timers.
pub async fn run(chassis: Chassis, timers: Timers, idle: Duration) {
    loop {
        let wait = match fire(chassis.clone(), timers.clone()).await {
            Ok(0) => idle,
            Ok(_) => Duration::ZERO,
            Err(error) => {
                tracing::warn!(error = error.chain(), "timers wait");
                idle
            }
        };
        if !chassis.tasks.sleep(wait).await {
            return;
        }
    }
}

/// Boxes an async closure body; keeps the registrations readable.
pub fn boxed<'a, F>(future: F) -> BoxFuture<'a, Result<()>>
where
    F: Future<Output = Result<()>> + Send + 'a,
{
    Box::pin(future)
}
