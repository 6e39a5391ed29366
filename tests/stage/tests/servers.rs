//! Servers that are killed, emptied and started again; leases of the shared ones.

use std::{os::unix::process::ExitStatusExt, path::Path, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use futures::TryStreamExt;
use sqlx::{Connection, PgConnection, Row};
use stage::{Servers, Which, connect_nats, fresh_bucket, fresh_database, fresh_nats, shared, wait_for};

const DEADLINE: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_killed_postgres_comes_back_on_the_same_port_with_what_was_committed() -> Result<()> {
    let servers = Servers::temporary(Which::POSTGRES).await?;
    let url = servers.database_url();
    let mut connection = PgConnection::connect(&url).await?;
    sqlx::query("CREATE TABLE item AS SELECT 1 AS number").execute(&mut connection).await?;
    servers.postgres.kill9()?;
    ensure!(PgConnection::connect(&url).await.is_err(), "it is down");
    servers.postgres.start().await?;
    let mut connection = PgConnection::connect(&url).await?;
    assert_eq!(sqlx::query("SELECT number FROM item").fetch_one(&mut connection).await?.try_get::<i32, _>(0)?, 1);
    servers.postgres.stop().await?;
    servers.postgres.start().await?;
    PgConnection::connect(&servers.postgres.admin_url()).await?;
    Ok(())
}

async fn streams(url: &str) -> Result<Vec<String>> {
    Ok(async_nats::jetstream::new(connect_nats(url).await?).stream_names().try_collect().await?)
}

async fn make_stream(url: &str, name: &str) -> Result<()> {
    let config =
        async_nats::jetstream::stream::Config { name: name.to_owned(), subjects: vec!["thing.>".to_owned()], ..Default::default() };
    async_nats::jetstream::new(connect_nats(url).await?).create_stream(config).await?;
    Ok(())
}

#[tokio::test]
async fn a_killed_nats_keeps_its_streams_and_a_wiped_one_has_none() -> Result<()> {
    let servers = Servers::temporary(Which::NATS).await?;
    let url = servers.nats_url();
    make_stream(&url, "THINGS").await?;
    servers.nats.kill9()?;
    ensure!(connect_nats(&url).await.is_err(), "it is down");
    servers.nats.start().await?;
    assert_eq!(streams(&url).await?, ["THINGS"]);
    servers.nats.wipe()?;
    servers.nats.start().await?;
    assert_eq!(streams(&url).await?, Vec::<String>::new());
    Ok(())
}

#[tokio::test]
async fn without_the_password_nobody_gets_in() -> Result<()> {
    let servers = Servers::temporary(Which { postgres: true, nats: true, s3: false }).await?;
    for url in [servers.nats_url(), servers.database_url()] {
        let mut stranger = url::Url::parse(&url)?;
        stranger.set_password(Some("guess")).ok().context("set")?;
        let refused = match stranger.scheme() {
            "nats" => connect_nats(stranger.as_str()).await.is_err(),
            _ => PgConnection::connect(stranger.as_str()).await.is_err(),
        };
        ensure!(refused, "{} let a stranger in", stranger.scheme());
    }
    Ok(())
}

#[tokio::test]
async fn each_lease_is_empty_and_its_own() -> Result<()> {
    let (first, second) = (fresh_nats().await?, fresh_nats().await?);
    assert_ne!(first.account, second.account);
    make_stream(&first.url, "THINGS").await?;
    assert_eq!(streams(&second.url).await?, Vec::<String>::new());
    assert_ne!(fresh_database().await?, fresh_database().await?);
    assert_ne!(fresh_bucket().await?.bucket, fresh_bucket().await?.bucket);
    Ok(())
}

#[tokio::test]
async fn a_template_is_filled_once_and_copied() -> Result<()> {
    let name = format!("claim_{}", std::process::id());
    let mut filled = 0;
    for _ in 0..2 {
        let url = shared()?
            .database_from(&name, async |url| {
                filled += 1;
                let mut connection = PgConnection::connect(&url).await?;
                sqlx::query("CREATE TABLE item (name text)").execute(&mut connection).await?;
                Ok(connection.close().await?)
            })
            .await?;
        sqlx::query("INSERT INTO item VALUES ('mine')").execute(&mut PgConnection::connect(&url).await?).await?;
    }
    assert_eq!(filled, 1);
    Ok(())
}

/// The process below is this test binary itself; it starts a server, says which, and is killed.
#[tokio::test]
async fn servers_die_with_the_process_that_started_them_even_when_that_is_killed() -> Result<()> {
    let dir = tempfile::tempdir()?;
    if let Some(dir) = std::env::var_os("STAGE_TEST_VICTIM") {
        let _servers = Servers::start(stage::Options { which: Which::NATS, ..stage::Options::new(dir) }).await?;
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
    }
    let me = std::env::current_exe()?;
    let name = "servers_die_with_the_process_that_started_them_even_when_that_is_killed";
    let status = Command::new(me).args([name, "--exact"]).env("STAGE_TEST_VICTIM", dir.path()).status()?;
    assert_eq!(status.signal(), Some(9));
    ensure!(Path::new(&dir.path().join("stage.json")).exists(), "it had started");
    wait_for("the server to end", DEADLINE, async || stage::Status::read(dir.path()).ok().filter(|status| status.nats.is_none())).await?;
    Ok(())
}
