//! All SQL of `object`, `file`, `run_file`, `steer_file` and `output`.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, PgPool};
use towpath_chassis::{Error, Result, Work};
use towpath_schemas::{
    ErrorCode,
    body::FileRef,
    guest::InputFile,
    id::{FileId, PrincipalId, RunId, SteerId, TenantId},
    limit::RESTORED_FILES,
};
use uuid::Uuid;

/// Commits the intent to write an object, before its PUT.
pub async fn object_begin(db: &PgPool, tenant: TenantId, key: &str) -> Result<()> {
    objects_begin(db, &[(tenant, key.to_owned())]).await
}

/// The same for many.
pub async fn objects_begin(db: &PgPool, objects: &[(TenantId, String)]) -> Result<()> {
    let (tenants, keys): (Vec<Uuid>, Vec<String>) = objects.iter().map(|(tenant, key)| (tenant.uuid(), key.clone())).unzip();
    sqlx::query!(
        "insert into object (key, tenant_id, state) select key, tenant, 'writing' from unnest($1::text[], $2::uuid[]) as new (key, tenant)",
        &keys,
        &tenants
    )
    .execute(db)
    .await?;
    Ok(())
}

/// Makes an object live in the transaction that refers to it. Refused when the sweep has begun to delete it.
pub async fn object_live(work: &mut Work, key: &str, size: u64) -> Result<()> {
    if objects_live(work, &[(key.to_owned(), size)]).await? {
        return Ok(());
    }
    Err(Error::refused(ErrorCode::Unavailable, "the upload took too long; send it again"))
}

/// The same for many; false when the sweep has begun to delete one of them, and nothing may be committed.
pub async fn objects_live(work: &mut Work, objects: &[(String, u64)]) -> Result<bool> {
    if objects.is_empty() {
        return Ok(true);
    }
    let (keys, sizes): (Vec<String>, Vec<i64>) = objects.iter().map(|(key, size)| (key.clone(), *size as i64)).unzip();
    let done = sqlx::query!(
        "update object set state = 'live', size = new.size from unnest($1::text[], $2::bigint[]) as new (key, size) where object.key = new.key and state = 'writing'",
        &keys,
        &sizes
    )
    .execute(work.db())
    .await?;
    Ok(done.rows_affected() == objects.len() as u64)
}

/// Gives up objects that nothing refers to from this transaction on. They go [`UNUSED_S`] later: somebody may be reading them.
pub async fn objects_unused(work: &mut Work, keys: &[String]) -> Result<()> {
    sqlx::query!("update object set state = 'deleting', unused_at = now() where key = any($1) and state = 'live'", keys)
        .execute(work.db())
        .await?;
    Ok(())
}

/// Gives up writes that nobody finished.
pub(crate) async fn stale_writes(db: &PgPool) -> Result<u64> {
    let given_up = sqlx::query!(
        "update object set state = 'deleting', unused_at = now() - make_interval(secs => $1) where key in
             (select key from object where state = 'writing' and created_at < now() - interval '24 hours' order by created_at limit 1000 for update skip locked)",
        UNUSED_S
    )
    .execute(db)
    .await?;
    Ok(given_up.rows_affected())
}

/// Seconds that an object outlives its last reference.
const UNUSED_S: f64 = 600.0;
/// Objects that are deleted at a time: what S3 takes in one request.
const DELETED_AT_ONCE: i64 = 1000;

/// Objects whose time has come.
pub(crate) async fn unused_objects(db: &PgPool) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar!(
        "select key from object where state = 'deleting' and unused_at < now() - make_interval(secs => $1) order by unused_at limit $2",
        UNUSED_S,
        DELETED_AT_ONCE
    )
    .fetch_all(db)
    .await?)
}

/// Objects that the store did not delete come up again after the others.
pub(crate) async fn put_off(db: &PgPool, keys: &[String]) -> Result<()> {
    if !keys.is_empty() {
        sqlx::query!("update object set unused_at = now() where key = any($1) and state = 'deleting'", keys).execute(db).await?;
    }
    Ok(())
}

/// Those of these keys that have a row, and how many of them a live one.
pub async fn known_objects(db: &PgPool, keys: &[String]) -> Result<(HashSet<String>, u64)> {
    let rows = sqlx::query!("select key, state from object where key = any($1)", keys).fetch_all(db).await?;
    let live = rows.iter().filter(|row| row.state == "live").count() as u64;
    Ok((rows.into_iter().map(|row| row.key).collect(), live))
}

pub async fn live_objects(db: &PgPool) -> Result<u64> {
    let count = sqlx::query_scalar!(r#"select count(*) as "count!" from object where state = 'live'"#).fetch_one(db).await?;
    Ok(u64::try_from(count).unwrap_or(0))
}

pub(crate) async fn objects_gone(db: &PgPool, keys: &[String]) -> Result<()> {
    sqlx::query!("delete from object where key = any($1) and state = 'deleting'", keys).execute(db).await?;
    Ok(())
}

pub(crate) async fn insert_file(
    work: &mut Work,
    tenant: TenantId,
    principal: PrincipalId,
    file: &FileRef,
    original_name: &str,
    sha256: &[u8],
    object_key: &str,
) -> Result<()> {
    sqlx::query!(
        "insert into file (id, tenant_id, principal_id, name, original_name, media_type, size, sha256, object_key) values ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        file.id.uuid(),
        tenant.uuid(),
        principal.uuid(),
        file.name,
        original_name.replace('\0', "\u{fffd}"),
        file.media_type,
        file.size as i64,
        sha256,
        object_key
    )
    .execute(work.db())
    .await?;
    Ok(())
}

/// The ones of `ids` that the tenant has.
pub async fn known(db: &mut PgConnection, tenant: TenantId, ids: &[FileId]) -> Result<Vec<FileId>> {
    let ids: Vec<Uuid> = ids.iter().map(|id| id.uuid()).collect();
    let known =
        sqlx::query_scalar!("select id from file where tenant_id = $1 and id = any($2) and expired_at is null", tenant.uuid(), &ids)
            .fetch_all(db)
            .await?;
    Ok(known.into_iter().map(FileId).collect())
}

/// Ties input files to runs: (run, place among its files, tenant, file).
pub async fn attach_to_runs(work: &mut Work, rows: &[(RunId, i32, TenantId, FileId)]) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let runs: Vec<Uuid> = rows.iter().map(|row| row.0.uuid()).collect();
    let places: Vec<i32> = rows.iter().map(|row| row.1).collect();
    let tenants: Vec<Uuid> = rows.iter().map(|row| row.2.uuid()).collect();
    let files: Vec<Uuid> = rows.iter().map(|row| row.3.uuid()).collect();
    sqlx::query!(
        "insert into run_file (run_id, n, tenant_id, file_id) select * from unnest($1::uuid[], $2::int[], $3::uuid[], $4::uuid[]) on conflict do nothing",
        &runs,
        &places,
        &tenants,
        &files
    )
    .execute(work.db())
    .await?;
    Ok(())
}

pub async fn attach_to_steer(work: &mut Work, tenant: TenantId, steer: SteerId, files: &[FileId]) -> Result<()> {
    let files: Vec<Uuid> = files.iter().map(|id| id.uuid()).collect();
    sqlx::query!(
        "insert into steer_file (steer_id, n, tenant_id, file_id) select $1, n::int, $2, file from unnest($3::uuid[]) with ordinality as t (file, n)",
        steer.uuid(),
        tenant.uuid(),
        &files
    )
    .execute(work.db())
    .await?;
    Ok(())
}

pub async fn of_run(db: &PgPool, tenant: TenantId, run: RunId) -> Result<Vec<FileRef>> {
    let rows = sqlx::query!(
        "select file.id, file.name, file.media_type, file.size, expired_at from run_file join file on file.id = file_id where run_id = $1 and run_file.tenant_id = $2 order by n",
        run.uuid(),
        tenant.uuid()
    )
    .fetch_all(db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| FileRef {
            id: row.id.into(),
            name: row.name,
            media_type: row.media_type,
            size: row.size as u64,
            status: if row.expired_at.is_none() { "stored" } else { "unavailable" }.to_owned(),
            reason: row.expired_at.map(|_| EXPIRED.to_owned()),
        })
        .collect())
}

/// Why something that was kept is not there any more.
const EXPIRED: &str = "its time to be kept is over";

/// What the sandbox of a run shall stage.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Inputs {
    pub run: Vec<InputFile>,
    pub steers: Vec<(SteerId, InputFile)>,
}

/// The files of these runs (tenant, run) and of their steers as their sandboxes shall stage them, no two of one run of the same name.
pub async fn inputs(db: &PgPool, runs: &[(TenantId, RunId)]) -> Result<HashMap<RunId, Inputs>> {
    let (tenants, ids): (Vec<Uuid>, Vec<Uuid>) = runs.iter().map(|(tenant, run)| (tenant.uuid(), run.uuid())).unzip();
    let rows = sqlx::query!(
        r#"with asked as (select * from unnest($1::uuid[], $2::uuid[]) as asked (tenant, run))
           select run as "run!", null::uuid as "steer?", file.id as "id!", file.name as "name!", file.media_type as "media_type!", file.size as "size!", 0::bigint as "ordinal!", n as "n!"
           from asked join run_file on run_id = run and run_file.tenant_id = tenant join file on file.id = file_id
           union all
           select run, steer.id, file.id, file.name, file.media_type, file.size, steer.ordinal, n
           from asked join steer on steer.run_id = run and steer.tenant_id = tenant join steer_file on steer_id = steer.id join file on file.id = file_id
           order by 1, 7, 8"#,
        &tenants,
        &ids
    )
    .fetch_all(db)
    .await?;
    let mut taken: HashMap<RunId, Vec<String>> = HashMap::new();
    let mut inputs: HashMap<RunId, Inputs> = HashMap::new();
    for row in rows {
        let run = RunId(row.run);
        let taken = taken.entry(run).or_default();
        let name = crate::name::distinct(&row.name, taken);
        taken.push(name.clone());
        let file = InputFile { file: row.id.into(), name, media_type: row.media_type, size: row.size as u64 };
        let of_run = inputs.entry(run).or_default();
        match row.steer {
            None => of_run.run.push(file),
            Some(steer) => of_run.steers.push((steer.into(), file)),
        }
    }
    Ok(inputs)
}

pub(crate) async fn input_object(db: &PgPool, tenant: TenantId, run: RunId, file: FileId) -> Result<Option<(String, u64)>> {
    let row = sqlx::query!(
        r#"select object_key as "object_key!", size as "size!" from file where expired_at is null and id = $1 and tenant_id = $2 and (
             exists (select 1 from run_file where run_id = $3 and file_id = $1)
             or exists (select 1 from steer_file join steer on steer.id = steer_id where steer.run_id = $3 and file_id = $1))
           union all
           select object_key, size from output join run as earlier on earlier.id = output.run_id join run on run.id = $3
           where output.id = $1 and output.tenant_id = $2 and output.status = 'stored' and earlier.session_id = run.session_id
           limit 1"#,
        file.uuid(),
        tenant.uuid(),
        run.uuid()
    )
    .fetch_optional(db)
    .await?;
    Ok(row.map(|row| (row.object_key, row.size as u64)))
}

/// The object behind a file of the tenant that is still kept, with its name and media type.
pub async fn object_of(db: &PgPool, tenant: TenantId, file: FileId) -> Result<Option<(String, FileRef)>> {
    let row = sqlx::query!(
        r#"select object_key as "object_key!", name, media_type, size from file where id = $1 and tenant_id = $2 and expired_at is null"#,
        file.uuid(),
        tenant.uuid()
    )
    .fetch_optional(db)
    .await?;
    Ok(row.map(|row| {
        let file = FileRef {
            id: file,
            name: row.name,
            media_type: row.media_type,
            size: row.size as u64,
            status: "stored".to_owned(),
            reason: None,
        };
        (row.object_key, file)
    }))
}

/// What the sessions of these runs (tenant, run) have put out so far, the newest of each name, the first [`RESTORED_FILES`] names.
pub async fn restorable(db: &PgPool, runs: &[(TenantId, RunId)]) -> Result<HashMap<RunId, Vec<InputFile>>> {
    let (tenants, ids): (Vec<Uuid>, Vec<Uuid>) = runs.iter().map(|(tenant, run)| (tenant.uuid(), run.uuid())).unzip();
    let rows = sqlx::query!(
        r#"select distinct on (run.id, output.name) run.id as "run!", output.id as "id!", output.name as "name!", output.size as "size!"
           from unnest($1::uuid[], $2::uuid[]) as asked (tenant, run) join run on run.id = asked.run and run.tenant_id = asked.tenant
               join run as earlier on earlier.session_id = run.session_id join output on output.run_id = earlier.id and output.status = 'stored'
           order by run.id, output.name, earlier.created_at desc"#,
        &tenants,
        &ids
    )
    .fetch_all(db)
    .await?;
    let mut all: HashMap<RunId, Vec<InputFile>> = HashMap::new();
    for row in rows {
        let of_run = all.entry(row.run.into()).or_default();
        if of_run.len() < RESTORED_FILES {
            of_run.push(InputFile { file: row.id.into(), name: row.name, media_type: String::new(), size: row.size as u64 });
        }
    }
    Ok(all)
}

/// What a run left in its outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    pub name: String,
    pub size: u64,
    pub sha256: Option<String>,
    pub status: String,
    pub reason: Option<String>,
    pub object_key: Option<String>,
}

/// Content that was put for an output.
#[derive(Debug, Clone, Copy)]
pub struct Content<'a> {
    pub size: u64,
    pub sha256: &'a [u8],
    pub object_key: &'a str,
}

/// Records an output that is in the store, in place of an older one of that name, whose object the sweep deletes. One of an older epoch than what is
/// there does not count, and its object is never live.
pub async fn output_stored(work: &mut Work, tenant: TenantId, run: RunId, epoch: i32, name: &str, content: Content<'_>) -> Result<()> {
    let stored = sqlx::query!(
        r#"with old as (select object_key from output where run_id = $1 and name = $2),
             stored as (
                 insert into output (run_id, name, tenant_id, epoch, size, sha256, object_key, status) values ($1, $2, $3, $4, $5, $6, $7, 'stored')
                 on conflict (run_id, name) do update set epoch = excluded.epoch, size = excluded.size, sha256 = excluded.sha256,
                     object_key = excluded.object_key, status = 'stored', reason = null where output.epoch <= excluded.epoch
                 returning name)
           select (select object_key from old) as replaced from stored"#,
        run.uuid(),
        name,
        tenant.uuid(),
        epoch,
        content.size as i64,
        content.sha256,
        content.object_key
    )
    .fetch_optional(work.db())
    .await?;
    let Some(stored) = stored else { return Ok(()) };
    object_live(work, content.object_key, content.size).await?;
    if let Some(replaced) = stored.replaced.filter(|replaced| replaced != content.object_key) {
        objects_unused(work, &[replaced]).await?;
    }
    Ok(())
}

/// Records an output that is not kept, and why (TOLD).
pub async fn output_unavailable(
    work: &mut Work,
    tenant: TenantId,
    run: RunId,
    epoch: i32,
    name: &str,
    size: u64,
    reason: &str,
) -> Result<()> {
    sqlx::query!(
        "insert into output (run_id, name, tenant_id, epoch, size, status, reason) values ($1, $2, $3, $4, $5, 'unavailable', $6)
         on conflict (run_id, name) do nothing",
        run.uuid(),
        name,
        tenant.uuid(),
        epoch,
        size as i64,
        reason
    )
    .execute(work.db())
    .await?;
    Ok(())
}

pub async fn outputs(db: &PgPool, tenant: TenantId, run: RunId) -> Result<Vec<Output>> {
    let rows = sqlx::query!(
        "select name, size, sha256, status, reason, object_key from output where run_id = $1 and tenant_id = $2 order by name",
        run.uuid(),
        tenant.uuid()
    )
    .fetch_all(db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| Output {
            name: row.name,
            size: row.size as u64,
            sha256: row.sha256.map(hex::encode),
            status: row.status,
            reason: row.reason,
            object_key: row.object_key,
        })
        .collect())
}

/// Gives up the content of runs' outputs; what there was is still told. How many.
pub async fn expire_outputs(work: &mut Work, runs: &[RunId]) -> Result<u64> {
    let runs: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    let keys = sqlx::query_scalar!(
        r#"with old as (select run_id, name, object_key from output where run_id = any($1) and object_key is not null order by run_id, name for update)
           update output set object_key = null, status = 'unavailable', reason = $2 from old
           where output.run_id = old.run_id and output.name = old.name returning old.object_key as "object_key!""#,
        &runs,
        EXPIRED
    )
    .fetch_all(work.db())
    .await?;
    objects_unused(work, &keys).await?;
    Ok(keys.len() as u64)
}

/// Files that are given up in one transaction.
const EXPIRE_FILES: i64 = 1000;

/// Gives up uploaded files that are older, and that no run uses which goes on or ended later; how many.
pub async fn expire_files(work: &mut Work, tenant: TenantId, before: DateTime<Utc>) -> Result<u64> {
    let rows = sqlx::query!(
        r#"with old as (
               select id, object_key from file where tenant_id = $1 and created_at < $2 and expired_at is null
                   and not exists (select 1 from run_file join run on run.id = run_file.run_id where file_id = file.id and (run.ended_at is null or run.ended_at >= $2))
                   and not exists (select 1 from steer_file join steer on steer.id = steer_id join run on run.id = steer.run_id
                                   where file_id = file.id and (run.ended_at is null or run.ended_at >= $2))
               order by created_at limit $3 for update of file)
           update file set object_key = null, expired_at = now() from old where file.id = old.id returning old.object_key as "object_key!""#,
        tenant.uuid(),
        before,
        EXPIRE_FILES
    )
    .fetch_all(work.db())
    .await?;
    let keys: Vec<String> = rows.into_iter().map(|row| row.object_key).collect();
    objects_unused(work, &keys).await?;
    Ok(keys.len() as u64)
}

/// Forgets expired files that no run refers to any more.
pub async fn forget_files(work: &mut Work, tenant: TenantId) -> Result<u64> {
    let done = sqlx::query!(
        "delete from file where id in (
             select id from file where tenant_id = $1 and expired_at is not null
                 and not exists (select 1 from run_file where file_id = file.id) and not exists (select 1 from steer_file where file_id = file.id) limit $2)",
        tenant.uuid(),
        EXPIRE_FILES
    )
    .execute(work.db())
    .await?;
    Ok(done.rows_affected())
}

/// Forgets what removed runs had to do with files. Their outputs were given up before.
pub async fn remove(work: &mut Work, runs: &[RunId]) -> Result<()> {
    let runs: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    sqlx::query!("delete from run_file where run_id = any($1)", &runs).execute(work.db()).await?;
    sqlx::query!("delete from output where run_id = any($1)", &runs).execute(work.db()).await?;
    Ok(())
}

/// The same for their steers.
pub async fn detach_steers(work: &mut Work, runs: &[RunId]) -> Result<()> {
    let runs: Vec<Uuid> = runs.iter().map(|run| run.uuid()).collect();
    sqlx::query!("delete from steer_file using steer where steer.id = steer_id and steer.run_id = any($1)", &runs)
        .execute(work.db())
        .await?;
    Ok(())
}
