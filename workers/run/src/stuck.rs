//! Runs that have not moved for longer than they should.

use sqlx::PgPool;
use towpath_chassis::{
    Result,
    stuck::{self, Kind},
};
use towpath_schemas::body::Stuck;

const KINDS: [Kind; 4] = [
    Kind {
        word: "runs_without_a_host",
        sql: "select count(*), extract(epoch from now() - min(created_at))::float8, (array_agg('run_' || replace(id::text, '-', '') order by created_at))[1] from (
                  select id, created_at from run where state = 'queued' and created_at < now() - interval '60 seconds'
                      and not exists (select 1 from pool where pool.backend = run.backend and heard_at > now() - interval '30 seconds') order by created_at limit 1000) as waiting",
        told: "runs are queued and no host of their backend is there",
        cure: "Start a worker with the role `provision` and TOWPATH_SUPERVISOR on a host.",
    },
    Kind {
        word: "runs_not_starting",
        sql: "select count(*), extract(epoch from now() - min(created_at))::float8, (array_agg('run_' || replace(run_id::text, '-', '') order by created_at))[1]
              from (select run_id, sandbox.created_at from sandbox join run on run.id = run_id and run.epoch = sandbox.epoch
                    where run.state = 'starting' and sandbox.created_at < now() - make_interval(secs => start_s + 60) order by sandbox.created_at limit 1000) as starting",
        told: "runs are starting for longer than they may",
        cure: "Does a worker with the role `clock` run? Look into the log of the host that is named by towpath show.",
    },
    Kind {
        word: "records_not_sealed",
        sql: "select count(*), extract(epoch from now() - min(at))::float8, (array_agg('run_' || replace(id::text, '-', '') order by at))[1]
              from (select run.id, max(run_history.at) as at from run join run_history on run_id = run.id
                    where run.state = 'finishing' group by run.id having max(run_history.at) < now() - interval '10 minutes' limit 1000) as finishing",
        told: "runs have ended and wait for their record",
        cure: "Does S3 take objects, does NATS answer, does a worker with the role `transcript` run? Is the sandbox connected to a gateway?",
    },
    Kind {
        word: "ended_runs_that_hold_something",
        sql: "select count(*), extract(epoch from now() - min(ended_at))::float8, (array_agg('run_' || replace(id::text, '-', '') order by ended_at))[1]
              from (select id, ended_at from run where active and state in ('succeeded', 'failed', 'canceled', 'timed_out') and ended_at < now() - interval '15 minutes' limit 1000) as held",
        told: "runs have settled while their sandbox is not known to be gone: slot and workspace are held",
        cure: "Bring their host's worker back; or, if the sandbox is certainly gone, towpath abandon RUN.",
    },
];

pub async fn stuck(db: &PgPool) -> Result<Vec<Stuck>> {
    stuck::ask(db, &KINDS).await
}
