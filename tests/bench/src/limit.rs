//! What this machine could do at all: bare rows, sharing commits.

use std::time::{Duration, Instant};

use anyhow::Result;
use futures::future::try_join_all;
use sqlx::types::Uuid;
use towpath_schemas::{AgentId, RunId, SessionId};

use crate::ground::Ground;

/// Transactions at a time, as the API has.
const LANES: usize = 3;
const MOST: usize = 256;

/// The rows of accepted runs in shared commits; runs in a second.
pub async fn accepts(ground: &Ground, in_flight: usize, span: Duration) -> Result<f64> {
    let lanes = LANES.min(in_flight);
    lanes_of(ground, lanes, (in_flight / lanes).clamp(1, MOST), span).await
}

/// The same, each in a commit of its own.
pub async fn singles(ground: &Ground, lanes: usize, span: Duration) -> Result<f64> {
    lanes_of(ground, lanes, 1, span).await
}

async fn lanes_of(ground: &Ground, lanes: usize, batch: usize, span: Duration) -> Result<f64> {
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(u32::try_from(lanes)?).connect(&ground.servers_url()).await?;
    let agent = AgentId::mint().uuid();
    sqlx::query("insert into agent (id, tenant_id, name, version) values ($1, $2, $3, 1)")
        .bind(agent)
        .bind(ground.tenant.uuid())
        .bind(agent.to_string())
        .execute(&pool)
        .await?;
    let started = Instant::now();
    let counts = try_join_all((0..lanes).map(|_| async {
        let mut count = 0;
        while started.elapsed() < span {
            write(ground, &pool, agent, batch).await?;
            count += batch;
        }
        anyhow::Ok(count)
    }))
    .await?;
    let per_s = counts.iter().sum::<usize>() as f64 / started.elapsed().as_secs_f64();
    pool.close().await;
    Ok(per_s)
}

async fn write(ground: &Ground, pool: &sqlx::PgPool, agent: Uuid, batch: usize) -> Result<()> {
    let runs: Vec<Uuid> = (0..batch).map(|_| RunId::mint().uuid()).collect();
    let sessions: Vec<Uuid> = (0..batch).map(|_| SessionId::mint().uuid()).collect();
    let (tenant, principal) = (ground.tenant.uuid(), ground.principal.uuid());
    let mut transaction = pool.begin().await?;
    sqlx::query("insert into session (id, tenant_id, agent_id, agent_name, principal_id) select id, $2, $3, 'bench', $4 from unnest($1::uuid[]) as id")
        .bind(&sessions)
        .bind(tenant)
        .bind(agent)
        .bind(principal)
        .execute(&mut *transaction)
        .await?;
    sqlx::query(
        "insert into run (id, tenant_id, session_id, agent_id, agent_name, agent_version, principal_id, mode, backend, prompt, sandbox, start_s, grace_s, state, waiting_for, revision)
         select id, $3, session, $4, 'bench', 1, $5, 'one_shot', 'container', 'count the code', '{}', 60, 10, 'queued', 'place', 1 from unnest($1::uuid[], $2::uuid[]) as t (id, session)",
    )
    .bind(&runs)
    .bind(&sessions)
    .bind(tenant)
    .bind(agent)
    .bind(principal)
    .execute(&mut *transaction)
    .await?;
    sqlx::query("insert into run_history (run_id, revision, tenant_id, to_state, cause, actor, epoch) select id, 1, $2, 'queued', 'accept', 'bench', 0 from unnest($1::uuid[]) as id")
        .bind(&runs)
        .bind(tenant)
        .execute(&mut *transaction)
        .await?;
    transaction.commit().await?;
    Ok(())
}

/// `rows` small rows for each run, a hundred runs in each commit; runs in a second.
pub async fn rows(ground: &Ground, rows: f64, span: Duration) -> Result<f64> {
    const RUNS: f64 = 100.0;
    sqlx::query("create table if not exists bench_row (id uuid primary key, state text not null, at timestamptz not null default now())")
        .execute(&ground.db)
        .await?;
    let count = (rows * RUNS).round() as i32;
    let started = Instant::now();
    let counts = try_join_all((0..LANES).map(|_| async {
        let mut commits = 0_u32;
        while started.elapsed() < span {
            sqlx::query("insert into bench_row (id, state) select gen_random_uuid(), 'queued' from generate_series(1, $1)")
                .bind(count)
                .execute(&ground.db)
                .await?;
            commits += 1;
        }
        anyhow::Ok(f64::from(commits))
    }))
    .await?;
    Ok(counts.iter().sum::<f64>() * RUNS / started.elapsed().as_secs_f64())
}
