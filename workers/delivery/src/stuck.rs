//! Deliveries that nobody sends, and those that were given up.

use sqlx::PgPool;
use towpath_chassis::{
    Result,
    stuck::{self, Kind},
};
use towpath_schemas::body::Stuck;

const KINDS: [Kind; 2] = [
    Kind {
        word: "deliveries_overdue",
        sql: "select count(*), extract(epoch from now() - min(next_attempt_at))::float8, (array_agg('dlv_' || replace(id::text, '-', '') order by next_attempt_at))[1]
              from (select id, next_attempt_at from delivery where next_attempt_at < now() - interval '2 minutes' order by next_attempt_at limit 1000) as overdue",
        told: "deliveries are due and nobody sends them",
        cure: "Do workers with the roles `deliver` and `clock` run?",
    },
    Kind {
        word: "deliveries_given_up",
        sql: "select count(*), extract(epoch from now() - min(ended_at))::float8, (array_agg('dlv_' || replace(id::text, '-', '') order by ended_at desc))[1]
              from (select id, ended_at from delivery where state = 'dead' and ended_at > now() - interval '24 hours' limit 1000) as given_up",
        told: "deliveries of the last day were given up",
        cure: "towpath deliveries RUN tells what the receiver answered; towpath redeliver sends one again.",
    },
];

pub async fn stuck(db: &PgPool) -> Result<Vec<Stuck>> {
    stuck::ask(db, &KINDS).await
}
