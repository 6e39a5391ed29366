//! Sandboxes that nobody hears from, or whose host cannot tell.

use sqlx::PgPool;
use towpath_chassis::{
    Result,
    stuck::{self, Kind},
};
use towpath_schemas::body::Stuck;

const KINDS: [Kind; 2] = [
    Kind {
        word: "sandboxes_unknown",
        sql: "select count(*), extract(epoch from now() - min(unknown_since))::float8, (array_agg('run_' || replace(run_id::text, '-', '') order by unknown_since))[1]
              from sandbox where state <> 'gone' and unknown_since < now() - interval '15 minutes'",
        told: "nobody can tell whether these sandboxes are there",
        cure: "The host's log tells why. If the host is certainly gone: towpath abandon RUN.",
    },
    Kind {
        word: "sandboxes_unheard",
        sql: "select count(*), extract(epoch from now() - min(last_heard_at))::float8, (array_agg('run_' || replace(run_id::text, '-', '') order by last_heard_at))[1]
              from sandbox where state = 'bound' and last_heard_at < now() - interval '5 minutes'",
        told: "no gateway has heard from these sandboxes",
        cure: "Do they reach TOWPATH_GATEWAY_URL? Their spool keeps what they print; supervisor.log in the sandbox's folder tells what they try.",
    },
];

pub async fn stuck(db: &PgPool) -> Result<Vec<Stuck>> {
    stuck::ask(db, &KINDS).await
}
