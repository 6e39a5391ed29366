//! The servers behind breakable proxies, and Towpath's processes over them.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stage::{Mode, Options, Proxy, S3Access, Servers};
use tempfile::TempDir;
use tokio::task::JoinSet;
use towpath_journeys::World;

use crate::job::PROGRAM;

/// Leases and claims are so much shorter here: a sealer's of 10 s lasts 2 s, a sender's of 60 s 12 s.
const TIME_SCALE: &str = "0.2";
/// Sandboxes at a time.
const SLOTS: &str = "12";
/// The fence of those agents that have one, in seconds.
pub const FENCE_S: u32 = 15;
/// Bytes of the disk that holds the spools, so that it can be filled.
const SPOOL_DISK_BYTES: u64 = 256 << 20;
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
    /// Supervisors that are stopped, until their tasks have woken them.
    pub frozen: Mutex<JoinSet<()>>,
    pub spools: Option<SpoolDisk>,
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
        let gateways = [Proxy::websocket(listen[0].parse()?).await?, Proxy::websocket(listen[1].parse()?).await?];
        let urls = listen.map(|listen| format!("http://{listen}"));
        world.url.clone_from(&urls[0]);
        let admin_url = servers.postgres.admin_url();
        let spools = SpoolDisk::mount(&world.state.join("sandboxes"))?;
        let faketime = faketime()?;
        let frozen = Mutex::default();
        let ground = Self { world, database, nats, s3, gateways, urls, admin_url, frozen, spools, servers, faketime, _folder: folder };
        for role in &ROLES {
            ground.spawn(role)?;
        }
        ground.world.ready().await?;
        let agent = json!({ "limits": { "grace_s": 1 } });
        ground.world.agent("chaos", &["/usr/bin/python3", "-c", PROGRAM], agent).await?;
        let fenced = json!({ "limits": { "grace_s": 1 }, "on_lost": "restart", "fence_after": FENCE_S });
        ground.world.agent("fenced", &["/usr/bin/python3", "-c", PROGRAM], fenced).await?;
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
        let mut frozen = std::mem::take(&mut *self.frozen.lock().unwrap_or_else(PoisonError::into_inner));
        while frozen.join_next().await.is_some() {}
        for role in &ROLES {
            let ended = self.world.process(role.name, |process| process.ended())?;
            ensure!(ended.is_none(), "{} ended by itself with {ended:?}\n{}", role.name, self.world.logs());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        Ok(())
    }
}

/// A small disk of its own for the folders of sandboxes, gone with this value.
pub struct SpoolDisk(PathBuf);

impl SpoolDisk {
    /// None for who may not mount: then no disk is filled.
    fn mount(path: &Path) -> Result<Option<Self>> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        std::fs::create_dir_all(path)?;
        let options = format!("size={SPOOL_DISK_BYTES},mode=711");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "towpath-chaos"]).arg(path).output().context("mount")?;
        // A container may be root and still not mount.
        Ok(mounted.status.success().then(|| Self(path.to_owned())))
    }

    /// Takes all that is left of it for so long.
    pub async fn fill(&self, time: Duration) -> Result<()> {
        let path = self.0.join("filler");
        let mut file = std::fs::File::create(&path)?;
        let piece = vec![0; 64 * 1024];
        for size in [piece.len(), 4096, 1] {
            // Until the disk is full: that is what it is for.
            while file.write_all(&piece[..size]).is_ok() {}
        }
        tokio::time::sleep(time).await;
        Ok(std::fs::remove_file(path)?)
    }
}

impl Drop for SpoolDisk {
    fn drop(&mut self) {
        // Lazily: what still stands in it goes with it.
        if let Err(error) = Command::new("umount").arg("--lazy").arg(&self.0).status() {
            eprintln!("{} stays mounted: {error}", self.0.display());
        }
    }
}

/// Debian's libfaketime.
fn faketime() -> Result<PathBuf> {
    let place = format!("/usr/lib/{}-linux-gnu/faketime/libfaketimeMT.so.1", std::env::consts::ARCH);
    let path = PathBuf::from(place);
    ensure!(path.is_file(), "{} is not there; `./dev setup` installs libfaketime", path.display());
    Ok(path)
}
