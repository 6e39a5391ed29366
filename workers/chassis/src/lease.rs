//! Leases: a named right for a time, judged by the database's clock alone. Each new owner gets a higher fence; what an owner writes must be guarded by something that an
//! older owner's write would violate (here: the contiguous sequence of an epoch's chunks), because a lease only keeps work from being done twice, never effects.

use std::time::Duration;

use sqlx::PgPool;
use uuid::Uuid;

use crate::Result;

/// Takes or renews the lease; false when somebody else has it.
pub async fn take(db: &PgPool, name: &str, owner: Uuid, lasts: Duration) -> Result<bool> {
    let taken = sqlx::query_scalar!(
        "insert into lease (name, owner, fence, until) values ($1, $2, 1, now() + make_interval(secs => $3))
         on conflict (name) do update set until = excluded.until, owner = excluded.owner,
             fence = lease.fence + case when lease.owner = excluded.owner then 0 else 1 end
         where lease.owner = excluded.owner or lease.until < now()
         returning fence",
        name,
        owner,
        lasts.as_secs_f64()
    )
    .fetch_optional(db)
    .await?;
    Ok(taken.is_some())
}

/// Gives it back, if it is still ours.
pub async fn release(db: &PgPool, name: &str, owner: Uuid) -> Result<()> {
    sqlx::query!("delete from lease where name = $1 and owner = $2", name, owner).execute(db).await?;
    Ok(())
}

/// A name for this process as an owner.
#[allow(clippy::disallowed_methods, reason = "an owner is no thing with an id of its own")]
pub fn owner() -> Uuid {
    Uuid::now_v7()
}
