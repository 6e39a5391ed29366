//! Messages that nobody takes in, those that were given up, and channels by which nothing goes out.

use sqlx::PgPool;
use towpath_chassis::{
    Result,
    stuck::{self, Kind},
};
use towpath_schemas::body::Stuck;

const KINDS: [Kind; 3] = [
    Kind {
        word: "inbound_overdue",
        sql: "select count(*), extract(epoch from now() - min(created_at))::float8, (array_agg('inb_' || replace(id::text, '-', '') order by created_at))[1]
              from (select id, created_at from inbound where next_attempt_at is not null and created_at < now() - interval '10 minutes' order by created_at limit 1000) as overdue",
        told: "messages came in more than ten minutes ago and have neither started nor steered a run",
        cure: "towpath inbound tells what they wait for. Do workers with the roles `intake` and `clock` run?",
    },
    Kind {
        word: "inbound_given_up",
        sql: "select count(*), extract(epoch from now() - min(handled_at))::float8, (array_agg('inb_' || replace(id::text, '-', '') order by handled_at desc))[1]
              from (select id, handled_at from inbound where state = 'dead' and handled_at > now() - interval '24 hours' limit 1000) as given_up",
        told: "messages of the last day could not be taken in",
        cure: "towpath inbound tells why; mend it, then towpath inbound --replay ID.",
    },
    Kind {
        word: "channel_broken",
        sql: "select count(*), extract(epoch from now() - min(broken_at))::float8, (array_agg(name || ': ' || broken_why order by broken_at))[1]
              from (select name, broken_at, broken_why from channel where broken_at < now() - interval '5 minutes' and deleted_at is null order by broken_at limit 1000) as broken",
        told: "channels have not been able to send anything for more than five minutes; what they owe is kept and waits",
        cure: "The example says why. Once the provider, the account or the secret is in order again, what waits goes out within five minutes; `towpath channel apply` tries at once.",
    },
];

pub async fn stuck(db: &PgPool) -> Result<Vec<Stuck>> {
    stuck::ask(db, &KINDS).await
}
