//! All SQL of `agent` and `agent_version`.

use std::collections::HashMap;

use sqlx::{PgConnection, PgPool};
use towpath_chassis::{Chassis, Error, Result, stored};
use towpath_schemas::{
    ErrorCode,
    agent::AgentDefinition,
    body::Agent,
    id::{AgentId, PrincipalId, TenantId},
    limit::PAGE_ROWS,
};
use uuid::Uuid;

fn read_definition(value: serde_json::Value) -> Result<AgentDefinition> {
    stored::read(value).map_err(|error| Error::broken(format!("stored agent definition: {error}")))
}

/// Stores a definition: a new version unless it equals the newest. `if_match` is the version that the caller saw; 0 for "none yet".
pub async fn put(
    chassis: &Chassis,
    tenant: TenantId,
    principal: PrincipalId,
    definition: &AgentDefinition,
    if_match: Option<i32>,
) -> Result<(Agent, bool)> {
    definition.check().map_err(|error| Error::refused(ErrorCode::Unprocessable, error.to_string()))?;
    let value = serde_json::to_value(definition).map_err(|error| Error::broken(format!("agent definition: {error}")))?;
    let mut work = chassis.begin().await?;
    sqlx::query!(
        "insert into agent (id, tenant_id, name, version) values ($1, $2, $3, 1) on conflict (tenant_id, name) do nothing",
        AgentId::mint().uuid(),
        tenant.uuid(),
        definition.name
    )
    .execute(work.db())
    .await?;
    let row = sqlx::query!(
        "select agent.id, agent.version, paused_at, deleted_at, agent.created_at, definition as \"definition?\" from agent
             left join agent_version on agent_id = agent.id and agent_version.version = agent.version
         where agent.tenant_id = $1 and name = $2 for update of agent",
        tenant.uuid(),
        definition.name
    )
    .fetch_one(work.db())
    .await?;
    let existing = if row.definition.is_some() && row.deleted_at.is_none() { row.version } else { 0 };
    if let Some(wanted) = if_match
        && wanted != existing
    {
        return Err(Error::refused(
            ErrorCode::VersionMismatch,
            format!("agent `{}` is at version {existing}, not {wanted}", definition.name),
        ));
    }
    let same = row.definition.as_ref() == Some(&value);
    let version = if row.definition.is_none() || same { row.version } else { row.version + 1 };
    if !same {
        sqlx::query!(
            "insert into agent_version (agent_id, version, tenant_id, definition, created_by) values ($1, $2, $3, $4, $5)",
            row.id,
            version,
            tenant.uuid(),
            value,
            principal.uuid()
        )
        .execute(work.db())
        .await?;
    }
    sqlx::query!("update agent set version = $2, deleted_at = null where id = $1", row.id, version).execute(work.db()).await?;
    work.commit().await?;
    let agent = Agent {
        name: definition.name.clone(),
        version,
        paused: row.paused_at.is_some(),
        created_at: row.created_at,
        definition: definition.clone(),
    };
    Ok((agent, existing == 0))
}

pub async fn get(db: &PgPool, tenant: TenantId, name: &str, version: Option<i32>) -> Result<Agent> {
    let row = sqlx::query!(
        "select name, agent_version.version, paused_at, agent.created_at, definition from agent
             join agent_version on agent_id = agent.id and agent_version.version = coalesce($3, agent.version)
         where agent.tenant_id = $1 and name = $2 and deleted_at is null",
        tenant.uuid(),
        name,
        version
    )
    .fetch_optional(db)
    .await?
    .ok_or_else(|| unknown(name))?;
    Ok(Agent {
        name: row.name,
        version: row.version,
        paused: row.paused_at.is_some(),
        created_at: row.created_at,
        definition: read_definition(row.definition)?,
    })
}

pub async fn list(db: &PgPool, tenant: TenantId) -> Result<Vec<Agent>> {
    let rows = sqlx::query!(
        "select name, agent.version, paused_at, agent.created_at, definition from agent
             join agent_version on agent_id = agent.id and agent_version.version = agent.version
         where agent.tenant_id = $1 and deleted_at is null order by name limit $2",
        tenant.uuid(),
        PAGE_ROWS
    )
    .fetch_all(db)
    .await?;
    rows.into_iter()
        .map(|row| {
            Ok(Agent {
                name: row.name,
                version: row.version,
                paused: row.paused_at.is_some(),
                created_at: row.created_at,
                definition: read_definition(row.definition)?,
            })
        })
        .collect()
}

pub async fn versions(db: &PgPool, tenant: TenantId, name: &str) -> Result<Vec<Agent>> {
    let rows = sqlx::query!(
        "select name, agent_version.version, paused_at, agent_version.created_at, definition from agent join agent_version on agent_id = agent.id
         where agent.tenant_id = $1 and name = $2 and deleted_at is null order by agent_version.version desc limit $3",
        tenant.uuid(),
        name,
        PAGE_ROWS
    )
    .fetch_all(db)
    .await?;
    if rows.is_empty() {
        return Err(unknown(name));
    }
    rows.into_iter()
        .map(|row| {
            Ok(Agent {
                name: row.name,
                version: row.version,
                paused: row.paused_at.is_some(),
                created_at: row.created_at,
                definition: read_definition(row.definition)?,
            })
        })
        .collect()
}

/// Runs of a paused agent are accepted and wait; when it is resumed whoever waits is looked at.
pub async fn pause(chassis: &Chassis, tenant: TenantId, name: &str, paused: bool) -> Result<()> {
    let mut work = chassis.begin().await?;
    let done = sqlx::query!(
        "update agent set paused_at = case when $3 then coalesce(paused_at, now()) end where tenant_id = $1 and name = $2 and deleted_at is null",
        tenant.uuid(),
        name,
        paused
    )
    .execute(work.db())
    .await?;
    if done.rows_affected() == 0 {
        return Err(unknown(name));
    }
    if !paused {
        towpath_run::admission::announce_all(&mut work).await?;
    }
    work.commit().await
}

/// No new runs; live ones end.
pub async fn delete(db: &PgPool, tenant: TenantId, name: &str) -> Result<()> {
    let done =
        sqlx::query!("update agent set deleted_at = now() where tenant_id = $1 and name = $2 and deleted_at is null", tenant.uuid(), name)
            .execute(db)
            .await?;
    if done.rows_affected() == 0 { Err(unknown(name)) } else { Ok(()) }
}

pub(crate) fn unknown(name: &str) -> Error {
    Error::refused(ErrorCode::UnknownAgent, format!("there is no agent `{}`", name.chars().take(80).collect::<String>()))
}

/// The definitions of these versions (agent, version). Those that do not exist are left out.
pub async fn definitions(db: &PgPool, versions: &[(Uuid, i32)]) -> Result<HashMap<(Uuid, i32), AgentDefinition>> {
    let (agents, numbers): (Vec<Uuid>, Vec<i32>) = versions.iter().copied().unzip();
    let rows = sqlx::query!(
        "select agent_id, agent_version.version, definition from agent_version
         where (agent_id, version) in (select agent, version from unnest($1::uuid[], $2::int[]) as asked (agent, version))",
        &agents,
        &numbers
    )
    .fetch_all(db)
    .await?;
    rows.into_iter().map(|row| Ok(((row.agent_id, row.version), read_definition(row.definition)?))).collect()
}

/// An agent as a start needs it.
#[derive(Debug, Clone)]
pub(crate) struct Startable {
    pub id: Uuid,
    pub tenant: TenantId,
    pub name: String,
    pub version: i32,
    pub definition: AgentDefinition,
    /// Its sandbox settings as they are stored: one that this release does not know stays among them, so that no run of it is admitted without.
    pub sandbox: serde_json::Value,
}

/// Looks up agents by (tenant, name).
pub(crate) async fn startable(db: &mut PgConnection, names: &[(TenantId, String)]) -> Result<Vec<Startable>> {
    let tenants: Vec<Uuid> = names.iter().map(|(tenant, _)| tenant.uuid()).collect();
    let names: Vec<String> = names.iter().map(|(_, name)| name.clone()).collect();
    let rows = sqlx::query!(
        "select agent.id, agent.tenant_id, agent.name, agent.version, definition from agent
             join unnest($1::uuid[], $2::text[]) as asked (tenant, name) on agent.tenant_id = asked.tenant and agent.name = asked.name
             join agent_version on agent_id = agent.id and agent_version.version = agent.version
         where deleted_at is null",
        &tenants,
        &names
    )
    .fetch_all(db)
    .await?;
    rows.into_iter()
        .map(|row| {
            Ok(Startable {
                id: row.id,
                tenant: row.tenant_id.into(),
                name: row.name,
                version: row.version,
                sandbox: row.definition.get("sandbox").cloned().unwrap_or_else(|| serde_json::json!({})),
                definition: read_definition(row.definition)?,
            })
        })
        .collect()
}
