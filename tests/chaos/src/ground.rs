//! The servers behind breakable proxies, and Towpath's processes over them.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stage::{Mode, Options, Proxy, S3Access, Servers};
use tempfile::TempDir;
use towpath_journeys::World;

use crate::job::PROGRAM;

/// Leases and claims are so much shorter here: a sealer's of 10 s lasts 2 s, a sender's of 60 s 12 s.
const TIME_SCALE: &str = "0.2";
/// Sandboxes at a time.
const SLOTS: &str = "12";
/// How far the clock of one process is off.
const SKEW: &str = "+300s";

/// A process of Towpath: its name and what it is started with.
pub struct Role {
    pub name: &'static str,
    pub arguments: &'static [&'static str],
    /// It listens for clients and sandboxes.
    pub listens: bool,
    /// Its clock is five minutes off.
    pub skewed: bool,
}

pub const ROLES: [Role; 5] = [
    Role { name: "api1", arguments: &["api"], listens: true, skewed: false },
    Role { name: "api2", arguments: &["api"], listens: true, skewed: false },
    Role { name: "worker1", arguments: &["worker"], listens: false, skewed: false },
    Role { name: "worker2", arguments: &["worker"], listens: false, skewed: false },
    Role { name: "worker3", arguments: &["worker", "--roles", "clock,transcript,deliver"], listens: false, skewed: true },
];

pub struct Ground {
    pub world: World,
    pub servers: Servers,
    pub database: Proxy,
    pub nats: Proxy,
    pub s3: Proxy,
    /// Before the gateways of the two APIs.
    pub gateways: [Proxy; 2],
    pub urls: [String; 2],
    pub admin_url: String,
    faketime: PathBuf,
    _folder: TempDir,
}

impl Ground {
    pub async fn start() -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("towpath-chaos-").tempdir_in("/tmp")?;
        std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        let servers = Servers::start(Options::new(folder.path())).await?;
        let address = |url: &str| -> Result<std::net::SocketAddr> {
            let url: reqwest::Url = url.parse()?;
            Ok(format!("{}:{}", url.host_str().context("host")?, url.port().context("port")?).parse()?)
        };
        let database = Proxy::postgres(address(&servers.database_url())?).await?;
        let nats = Proxy::tcp(address(&servers.nats_url())?).await?;
        let s3 = Proxy::tcp(address(&servers.s3().endpoint)?).await?;
        let straight = towpath_journeys::Ground::own(servers.database_url(), servers.nats_url(), servers.s3());
        let mut world = World::prepare(straight, &[("TOWPATH_TIME_SCALE", TIME_SCALE), ("TOWPATH_SLOTS", SLOTS)]).await?;
        let through: S3Access = S3Access { endpoint: s3.through(&servers.s3().endpoint)?, ..servers.s3() };
        world.env.insert("TOWPATH_DATABASE_URL".to_owned(), database.through(&servers.database_url())?);
        world.env.insert("TOWPATH_NATS_URL".to_owned(), nats.through(&servers.nats_url())?);
        world.env.insert("TOWPATH_S3_ENDPOINT".to_owned(), through.endpoint);
        let ports = [stage::free_port()?, stage::free_port()?];
        let listen = ports.map(|port| format!("127.0.0.1:{port}"));
        let gateways = [Proxy::tcp(listen[0].parse()?).await?, Proxy::tcp(listen[1].parse()?).await?];
        let urls = listen.map(|listen| format!("http://{listen}"));
        world.url.clone_from(&urls[0]);
        let admin_url = servers.postgres.admin_url();
        let ground = Self { world, database, nats, s3, gateways, urls, admin_url, servers, faketime: faketime()?, _folder: folder };
        for role in &ROLES {
            ground.spawn(role)?;
        }
        ground.world.ready().await?;
        let agent = json!({ "limits": { "grace_s": 1 } });
        ground.world.agent("chaos", &["/usr/bin/python3", "-c", PROGRAM], agent).await?;
        Ok(ground)
    }

    pub fn spawn(&self, role: &Role) -> Result<()> {
        let number = usize::from(role.name.ends_with('2'));
        let listen = self.urls[number].trim_start_matches("http://").to_owned();
        let gateway = format!("ws://{}", self.gateways[number].address());
        let mut env = vec![("TOWPATH_GATEWAY_URL", gateway.as_str())];
        if role.listens {
            env.push(("TOWPATH_LISTEN", &listen));
        }
        let faketime = self.faketime.display().to_string();
        if role.skewed {
            env.extend([
                ("LD_PRELOAD", faketime.as_str()),
                ("FAKETIME", SKEW),
                ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
                ("DONT_FAKE_MONOTONIC", "1"),
            ]);
        }
        self.world.spawn_with(role.name, role.arguments, &env)
    }

    /// Copies what the processes wrote to where it stays; the folder.
    pub fn keep_logs(&self) -> Result<String> {
        let folder = tempfile::Builder::new().prefix("towpath-chaos-logs-").tempdir_in("/tmp")?.keep();
        for role in &ROLES {
            let log = self.world.process(role.name, |process| Ok(process.log()))?;
            std::fs::write(folder.join(format!("{}.log", role.name)), log)?;
        }
        Ok(folder.display().to_string())
    }

    /// Everything passes again and everybody is there.
    pub async fn heal(&self) -> Result<()> {
        for proxy in [&self.database, &self.nats, &self.s3, &self.gateways[0], &self.gateways[1]] {
            proxy.set(Mode::Pass).await;
        }
        for role in &ROLES {
            let ended = self.world.process(role.name, |process| process.ended())?;
            ensure!(ended.is_none(), "{} ended by itself with {ended:?}\n{}", role.name, self.world.logs());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        Ok(())
    }
}

/// Debian's libfaketime.
fn faketime() -> Result<PathBuf> {
    let place = format!("/usr/lib/{}-linux-gnu/faketime/libfaketimeMT.so.1", std::env::consts::ARCH);
    let path = PathBuf::from(place);
    ensure!(path.is_file(), "{} is not there; `./dev setup` installs libfaketime", path.display());
    Ok(path)
}
