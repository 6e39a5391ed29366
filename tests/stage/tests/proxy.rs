//! The proxy before a real Postgres.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use sqlx::{Connection, PgConnection, Row};
use stage::{Mode, Proxy, fresh_database};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

const PATIENCE: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(300);

struct World {
    proxy: Proxy,
    /// Past the proxy.
    direct: String,
    /// Through it.
    broken: String,
}

impl World {
    async fn new() -> Result<Self> {
        let direct = fresh_database().await?;
        let upstream: SocketAddr = format!("127.0.0.1:{}", url::Url::parse(&direct)?.port().context("port")?).parse()?;
        let proxy = Proxy::postgres(upstream).await?;
        let broken = proxy.through(&direct)?;
        let mut connection = PgConnection::connect(&direct).await?;
        sqlx::query("CREATE TABLE item (name text)").execute(&mut connection).await?;
        Ok(Self { proxy, direct, broken })
    }

    async fn connect(&self) -> Result<PgConnection> {
        Ok(timeout(PATIENCE, PgConnection::connect(&self.broken)).await??)
    }

    async fn items(&self) -> Result<i64> {
        let mut connection = PgConnection::connect(&self.direct).await?;
        Ok(sqlx::query("SELECT count(*) FROM item").fetch_one(&mut connection).await?.try_get(0)?)
    }
}

async fn insert(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let mut transaction = connection.begin().await?;
    sqlx::query("INSERT INTO item (name) VALUES ($1)").bind("x").execute(&mut *transaction).await?;
    transaction.commit().await
}

#[tokio::test]
async fn a_commit_cut_after_the_server_answered_is_committed_and_the_client_cannot_know() -> Result<()> {
    let world = World::new().await?;
    let mut connection = world.connect().await?;
    insert(&mut connection).await?;
    world.proxy.cut_after_commit(2);
    insert(&mut connection).await?;
    assert_eq!(world.proxy.commits_cut(), 0);
    let lost = timeout(PATIENCE, insert(&mut connection)).await?;
    ensure!(matches!(lost, Err(sqlx::Error::Io(_))), "{lost:?}");
    assert_eq!((world.items().await?, world.proxy.commits_cut()), (3, 1));
    insert(&mut world.connect().await?).await?;
    assert_eq!(world.items().await?, 4);
    Ok(())
}

#[tokio::test]
async fn a_commit_cut_before_it_arrives_is_rolled_back_and_looks_the_same() -> Result<()> {
    let world = World::new().await?;
    let mut connection = world.connect().await?;
    world.proxy.cut_before_commit(1);
    let lost = timeout(PATIENCE, insert(&mut connection)).await?;
    ensure!(matches!(lost, Err(sqlx::Error::Io(_))), "{lost:?}");
    assert_eq!((world.items().await?, world.proxy.commits_cut()), (0, 1));
    Ok(())
}

#[tokio::test]
async fn while_it_refuses_nobody_connects_and_afterwards_the_same_port_serves() -> Result<()> {
    let world = World::new().await?;
    let mut connection = world.connect().await?;
    world.proxy.set(Mode::Refuse).await;
    let refused = PgConnection::connect(&world.broken).await.err().context("connected")?;
    ensure!(matches!(&refused, sqlx::Error::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused), "{refused:?}");
    insert(&mut connection).await.context("a connection that exists goes on")?;
    world.proxy.down().await;
    ensure!(timeout(PATIENCE, insert(&mut connection)).await?.is_err(), "down ends connections");
    world.proxy.up().await;
    insert(&mut world.connect().await?).await?;
    assert_eq!(world.items().await?, 2);
    Ok(())
}

#[tokio::test]
async fn a_black_hole_keeps_the_connection_and_lets_go_of_its_bytes_when_it_heals() -> Result<()> {
    let world = World::new().await?;
    let mut connection = world.connect().await?;
    world.proxy.set(Mode::BlackHole).await;
    let mut insertion = Box::pin(insert(&mut connection));
    ensure!(timeout(SHORT, &mut insertion).await.is_err(), "nothing comes through");
    let mut fresh = Box::pin(PgConnection::connect(&world.broken));
    ensure!(timeout(SHORT, &mut fresh).await.is_err(), "a new connection hangs and is not refused");
    assert_eq!(world.items().await?, 0);
    world.proxy.up().await;
    timeout(PATIENCE, insertion).await??;
    timeout(PATIENCE, fresh).await??;
    assert_eq!(world.items().await?, 1);
    Ok(())
}

#[tokio::test]
async fn cut_ends_what_exists_and_nothing_else() -> Result<()> {
    let world = World::new().await?;
    let mut connection = world.connect().await?;
    world.proxy.cut().await;
    ensure!(timeout(PATIENCE, insert(&mut connection)).await?.is_err(), "the connection is gone");
    insert(&mut world.connect().await?).await?;
    assert_eq!(world.items().await?, 1);
    Ok(())
}

#[tokio::test]
async fn delay_and_throttle_take_their_time() -> Result<()> {
    let world = World::new().await?;
    let mut connection = world.connect().await?;
    world.proxy.set(Mode::Delay(Duration::from_millis(100))).await;
    let began = Instant::now();
    sqlx::query("SELECT 1").execute(&mut connection).await?;
    ensure!(began.elapsed() >= Duration::from_millis(200), "both ways: {:?}", began.elapsed());
    world.proxy.set(Mode::Throttle { bytes_per_s: 100_000 }).await;
    let began = Instant::now();
    let text: String = sqlx::query("SELECT repeat('x', 50000)").fetch_one(&mut connection).await?.try_get(0)?;
    assert_eq!(text.len(), 50_000);
    ensure!(began.elapsed() >= Duration::from_millis(450), "half a second's worth: {:?}", began.elapsed());
    Ok(())
}

#[tokio::test]
async fn lost_answers_arrive_and_are_not_answered() -> Result<()> {
    let world = World::new().await?;
    let mut connection = world.connect().await?;
    world.proxy.set(Mode::LoseAnswers).await;
    let lost = timeout(PATIENCE, sqlx::raw_sql("INSERT INTO item (name) VALUES ('x')").execute(&mut connection)).await?;
    ensure!(matches!(lost, Err(sqlx::Error::Io(_))), "{lost:?}");
    world.proxy.up().await;
    let arrived = stage::wait_for("what was sent", PATIENCE, async || (world.items().await.ok()? == 1).then_some(())).await;
    ensure!(arrived.is_ok(), "what was sent did not arrive");
    Ok(())
}

#[tokio::test]
async fn a_proxy_that_answers_itself_cuts_the_others() -> Result<()> {
    const ANSWER: &str = "HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let world = World::new().await?;
    let mut connection = world.connect().await?;
    world.proxy.set(Mode::Answer(ANSWER)).await;
    let mut client = tokio::net::TcpStream::connect(world.proxy.address()).await?;
    client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await?;
    let mut told = String::new();
    timeout(PATIENCE, client.read_to_string(&mut told)).await??;
    assert_eq!(told, ANSWER);
    ensure!(timeout(PATIENCE, insert(&mut connection)).await?.is_err(), "a connection that existed goes on");
    Ok(())
}
