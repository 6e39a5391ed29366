//! What has not moved for longer than it should. Each room knows its own kinds; this is how one of them is asked for, and those of the chassis.

use sqlx::PgPool;
use towpath_schemas::body::Stuck;

use crate::Result;

/// A kind: its word, what there is to say, and what to do.
pub struct Kind {
    pub word: &'static str,
    /// One row (number, seconds since the oldest moved, one of them); it must be a query over rows that are few or indexed.
    pub sql: &'static str,
    pub told: &'static str,
    pub cure: &'static str,
}

/// The kinds of the chassis itself.
const KINDS: [Kind; 3] = [
    Kind {
        word: "unpublished_commands",
        sql: "select count(*), extract(epoch from now() - min(created_at))::float8, min(subject) from outbox where created_at < now() - interval '30 seconds'",
        told: "commands wait to be published; the relay tries it every second",
        cure: "Does NATS take messages, and does a worker with the role `clock` run?",
    },
    Kind {
        word: "overdue_timers",
        sql: "select count(*), extract(epoch from now() - min(due_at))::float8, min(kind || ' ' || key) from timer where due_at < now() - interval '60 seconds'",
        told: "timers are due and nobody fires them",
        cure: "Does a worker with the role `clock` run? Look for `timers wait` in its log.",
    },
    Kind {
        word: "dead_letters",
        sql: "select count(*), extract(epoch from now() - min(created_at))::float8, min(id)::text from dead",
        told: "messages were laid aside after too many failures",
        cure: "towpath dead list tells why; mend it, then towpath dead redrive, or drop.",
    },
];

/// Those of the chassis.
pub async fn of_chassis(db: &PgPool) -> Result<Vec<Stuck>> {
    ask(db, &KINDS).await
}

/// Asks for each kind; those of which there are none too, with a count of 0.
pub async fn ask(db: &PgPool, kinds: &'static [Kind]) -> Result<Vec<Stuck>> {
    let mut all = Vec::with_capacity(kinds.len());
    for kind in kinds {
        let (count, oldest_s, example): (i64, Option<f64>, Option<String>) = sqlx::query_as(kind.sql).fetch_one(db).await?;
        all.push(Stuck {
            kind: kind.word.to_owned(),
            count,
            oldest_s: oldest_s.unwrap_or(0.0),
            example,
            told: kind.told.to_owned(),
            cure: kind.cure.to_owned(),
        });
    }
    Ok(all)
}
