//! A delivery in parts: which of them were sent, so that one that is tried again goes on where it stopped. All SQL of `delivery_part`.

use std::time::Duration;

use sqlx::PgPool;
use towpath_chassis::{Chassis, Result};
use towpath_schemas::id::InboundId;

use crate::table::Due;

/// What is known of a part that is about to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Nobody has tried.
    Fresh,
    /// Somebody began to send it so long ago, and nobody knows whether it arrived. `name`: what the receiver would call it, where that is known before.
    Unsure { ago: Duration, name: Option<String> },
    /// It arrived; the receiver calls it so.
    Sent(String),
    /// The delivery was claimed by somebody else meanwhile, who goes on.
    Lost,
}

/// Notes that a part is going to be sent.
pub async fn begin(chassis: &Chassis, due: &Due, n: i32) -> Result<Part> {
    let row = sqlx::query!(
        r#"with mine as (select id, tenant_id from delivery where id = $1 and claim = $3 and ended_at is null for update),
                fresh as (insert into delivery_part (delivery_id, n, tenant_id) select id, $2, tenant_id from mine on conflict do nothing returning n)
           select exists (select 1 from mine) as "mine!", exists (select 1 from fresh) as "fresh!", sent_at is not null as "sent!", receiver_id as "receiver_id?",
               extract(epoch from now() - sending_at)::float8 as "ago?"
           from (select 1) as one left join delivery_part on delivery_id = $1 and n = $2"#,
        due.id.uuid(),
        n,
        due.claim
    )
    .fetch_one(&chassis.db)
    .await?;
    Ok(match (row.mine, row.fresh, row.sent, row.receiver_id) {
        (false, ..) => Part::Lost,
        (true, true, ..) => Part::Fresh,
        (true, false, true, Some(id)) => Part::Sent(id),
        (true, false, _, name) => Part::Unsure { ago: Duration::try_from_secs_f64(row.ago.unwrap_or_default()).unwrap_or_default(), name },
    })
}

/// It is going to be sent once more.
pub async fn again(chassis: &Chassis, due: &Due, n: i32) -> Result<()> {
    sqlx::query!("update delivery_part set sending_at = now() where delivery_id = $1 and n = $2 and sent_at is null", due.id.uuid(), n)
        .execute(&chassis.db)
        .await?;
    Ok(())
}

/// Notes what the receiver is going to call it; false when the delivery was claimed by somebody else meanwhile.
pub async fn name(chassis: &Chassis, due: &Due, n: i32, receiver_id: &str) -> Result<bool> {
    let done = sqlx::query!(
        "update delivery_part set receiver_id = $4, sending_at = now() from delivery
         where delivery_id = $1 and delivery_part.n = $2 and sent_at is null and delivery.id = delivery_id and claim = $3 and ended_at is null",
        due.id.uuid(),
        n,
        due.claim,
        receiver_id
    )
    .execute(&chassis.db)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// It arrived. A late word of it counts.
pub async fn sent(chassis: &Chassis, due: &Due, n: i32, receiver_id: &str) -> Result<()> {
    sqlx::query!(
        "update delivery_part set sent_at = coalesce(sent_at, now()), receiver_id = case when sent_at is null then $3 else receiver_id end where delivery_id = $1 and n = $2",
        due.id.uuid(),
        n,
        receiver_id
    )
    .execute(&chassis.db)
    .await?;
    Ok(())
}

/// It surely did not arrive, and nobody is on the way with it.
pub async fn unsent(chassis: &Chassis, due: &Due, n: i32) -> Result<()> {
    sqlx::query!("delete from delivery_part where delivery_id = $1 and n = $2 and sent_at is null", due.id.uuid(), n)
        .execute(&chassis.db)
        .await?;
    Ok(())
}

/// What the receiver calls the first part of the acknowledgement of a message, if it was sent.
pub async fn acknowledgement(db: &PgPool, message: InboundId) -> Result<Option<String>> {
    Ok(sqlx::query_scalar!(
        r#"select receiver_id as "receiver_id!" from delivery join delivery_part on delivery_id = delivery.id
           where inbound_id = $1 and about = 'accepted' and delivery_part.n = 0 and sent_at is not null"#,
        message.uuid()
    )
    .fetch_optional(db)
    .await?)
}
