//! Records that nobody attends to.

use sqlx::PgPool;
use towpath_chassis::{
    Result,
    stuck::{self, Kind},
};
use towpath_schemas::body::Stuck;

const KINDS: [Kind; 1] = [Kind {
    word: "records_unattended",
    sql: "select count(*), extract(epoch from now() - min(opened_at))::float8, (array_agg('run_' || replace(run_id::text, '-', '') order by opened_at))[1]
          from (select run_id, opened_at from transcript where state <> 'closed' and opened_at < now() - interval '60 seconds'
                    and not exists (select 1 from lease where name = 'seal ' || run_id::text || ' ' || epoch::text and until > now() - interval '30 seconds')
                order by opened_at limit 1000) as unattended",
    told: "transcripts are open and nobody seals them",
    cure: "Does a worker with the role `transcript` run, and has it room (512 a process)?",
}];

pub async fn stuck(db: &PgPool) -> Result<Vec<Stuck>> {
    stuck::ask(db, &KINDS).await
}
