//! Messages that were laid aside: seen, given back to be handled, or dropped for good.

use sqlx::PgPool;
use towpath_schemas::{ErrorCode, body::Dead, limit::PAGE_ROWS};

use crate::{Chassis, Error, Result, outbox};

fn no_such(id: i64) -> Error {
    Error::refused(ErrorCode::NotFound, format!("there is no dead letter {id}"))
}

/// A page, newest first, of those older than `before`.
pub async fn list(db: &PgPool, before: Option<i64>) -> Result<Vec<Dead>> {
    let rows = sqlx::query!(
        "select id, role, subject, reason, attempts, created_at from dead where $1::bigint is null or id < $1 order by id desc limit $2",
        before,
        PAGE_ROWS
    )
    .fetch_all(db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| Dead {
            id: row.id,
            role: row.role,
            subject: row.subject,
            body: None,
            reason: row.reason,
            attempts: row.attempts,
            created_at: row.created_at,
        })
        .collect())
}

pub async fn get(db: &PgPool, id: i64) -> Result<Dead> {
    let row = sqlx::query!("select role, subject, body, reason, attempts, created_at from dead where id = $1", id)
        .fetch_optional(db)
        .await?
        .ok_or_else(|| no_such(id))?;
    Ok(Dead {
        id,
        role: row.role,
        subject: row.subject,
        body: Some(row.body),
        reason: row.reason,
        attempts: row.attempts,
        created_at: row.created_at,
    })
}

/// Gives a message back: it is handled again, with all its attempts before it.
pub async fn redrive(chassis: &Chassis, id: i64) -> Result<()> {
    let mut work = chassis.begin().await?;
    let row = sqlx::query!("delete from dead where id = $1 returning subject, body", id)
        .fetch_optional(work.db())
        .await?
        .ok_or_else(|| no_such(id))?;
    let known = serde_json::from_value(row.body).ok().filter(|command| outbox::subject_of(command).is_some());
    let command = known.ok_or_else(|| {
        Error::refused(
            ErrorCode::Unprocessable,
            format!("dead letter {id} on {} is no command that this release knows; drop it", row.subject),
        )
    })?;
    work.command(command);
    work.commit().await
}

/// Forgets a message. What it was about is still looked after by the sweeps.
pub async fn forget(db: &PgPool, id: i64) -> Result<()> {
    let done = sqlx::query!("delete from dead where id = $1", id).execute(db).await?;
    if done.rows_affected() == 0 { Err(no_such(id)) } else { Ok(()) }
}
