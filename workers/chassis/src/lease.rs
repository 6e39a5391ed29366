//! Leases: a named right for a time, judged by the database's clock alone. Each new owner gets a higher fence; what an owner writes must be guarded by something that an
//! older owner's write would violate (here: the contiguous sequence of an epoch's chunks), because a lease only keeps work from being done twice, never effects.

use std::{collections::HashSet, time::Duration};

use sqlx::PgPool;
use uuid::Uuid;

use crate::{Result, Work};

/// Takes or renews the lease; false when somebody else has it.
pub async fn take(db: &PgPool, name: &str, owner: Uuid, lasts: Duration) -> Result<bool> {
    Ok(!take_all(db, &[name.to_owned()], owner, lasts).await?.is_empty())
}

/// Takes or renews leases, no name twice; the names of those that are the owner's now.
pub async fn take_all(db: &PgPool, names: &[String], owner: Uuid, lasts: Duration) -> Result<HashSet<String>> {
    let taken = sqlx::query_scalar!(
        "insert into lease (name, owner, fence, until) select name, $2, 1, now() + make_interval(secs => $3) from unnest($1::text[]) as name order by name
         on conflict (name) do update set until = excluded.until, owner = excluded.owner,
             fence = lease.fence + case when lease.owner = excluded.owner then 0 else 1 end
         where lease.owner = excluded.owner or lease.until < now()
         returning name",
        names,
        owner,
        lasts.as_secs_f64()
    )
    .fetch_all(db)
    .await?;
    Ok(taken.into_iter().collect())
}

/// Gives it back, if it is still ours.
pub async fn release(db: &PgPool, name: &str, owner: Uuid) -> Result<()> {
    sqlx::query!("delete from lease where name = $1 and owner = $2", name, owner).execute(db).await?;
    Ok(())
}

/// Gives leases (name, owner) back with the transaction that ends their work.
pub async fn release_all(work: &mut Work, leases: &[(String, Uuid)]) -> Result<()> {
    if leases.is_empty() {
        return Ok(());
    }
    let (names, owners): (Vec<String>, Vec<Uuid>) = leases.iter().cloned().unzip();
    sqlx::query!(
        "delete from lease where name in (
             select lease.name from lease join unnest($1::text[], $2::uuid[]) as done (name, owner) on lease.name = done.name and lease.owner = done.owner
             order by lease.name for update of lease)",
        &names,
        &owners
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// A name for this process as an owner.
#[allow(clippy::disallowed_methods, reason = "an owner is no thing with an id of its own")]
pub fn owner() -> Uuid {
    Uuid::now_v7()
}
