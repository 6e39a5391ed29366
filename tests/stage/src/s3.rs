//! An S3 server: SeaweedFS with master, volume server, filer and S3 gateway in one process.

use std::{fs, process::Command, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use crate::{http, probe, process::Slot, record::write_private, servers::Home, tool};

const READY: Duration = Duration::from_secs(30);
/// It rarely ends by itself within any reasonable time; what it answered for is on disk by then.
const STOP: Duration = Duration::from_secs(2);
const REGION: &str = "us-east-1";
const BUCKET: &str = "towpath";
/// A bucket that readiness probes write into, apart from everybody's objects.
const PROBE_BUCKET: &str = "stage-probe";

/// What a client needs to use a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3Access {
    pub endpoint: String,
    pub region: String,
    pub bucket: String,
    pub access_key: String,
    pub secret_key: String,
}

/// An S3 server of ours. The S3 port demands signed requests; the ports behind it are open on loopback, as SeaweedFS has it.
pub struct S3 {
    home: Arc<Home>,
    pub(crate) slot: Slot,
}

impl S3 {
    pub(crate) fn new(home: Arc<Home>) -> Self {
        let slot = Slot::new("s3", home.log("s3"), home.detached, home.record().running.s3.clone());
        Self { home, slot }
    }

    /// The bucket `towpath`.
    pub fn access(&self) -> S3Access {
        access(&self.home, BUCKET)
    }

    /// Starts it unless it runs, on the same ports and data as before, and returns once objects can be written.
    pub async fn start(&self) -> Result<()> {
        if !self.slot.alive() {
            self.remove_sockets();
            let command = self.command()?;
            self.slot.spawn(command)?;
            self.home.update(|record| record.running.s3 = self.slot.identity())?;
        }
        let [.., filer, _, s3, _] = self.home.record().s3_ports;
        probe::ready(&self.slot, READY, async || {
            make_bucket(&self.home, BUCKET).await?;
            http::demand(filer, "PUT", &format!("/buckets/{PROBE_BUCKET}/probe"), b"probe").await?;
            let (status, _) = http::request(s3, "GET", "/", b"").await?;
            ensure!(status == 403, "S3 answers {status} to an unsigned request");
            Ok(())
        })
        .await
    }

    /// SIGKILL.
    pub fn kill9(&self) -> Result<()> {
        self.slot.kill9()?;
        self.remove_sockets();
        self.home.update(|record| record.running.s3 = None)
    }

    /// An orderly stop.
    pub async fn stop(&self) -> Result<()> {
        self.slot.stop(Signal::TERM, STOP).await?;
        self.remove_sockets();
        self.home.update(|record| record.running.s3 = None)
    }

    fn command(&self) -> Result<Command> {
        let record = self.home.record();
        let data = self.home.dir.join("s3");
        fs::create_dir_all(&data).with_context(|| format!("make {}", data.display()))?;
        let config = self.home.dir.join("s3.json");
        let identities = serde_json::json!({"identities": [{
            "name": "towpath",
            "credentials": [{"accessKey": record.s3_access_key, "secretKey": record.s3_secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }]});
        write_private(&config, identities.to_string().as_bytes())?;
        let mut command = Command::new(tool::find("weed", "TOWPATH_WEED")?);
        command.arg("server").arg(format!("-dir={}", data.display())).current_dir(&data);
        command.args(["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.peers=none", "-master.telemetry=false", "-filer", "-s3"]);
        let names = [
            "master.port",
            "master.port.grpc",
            "volume.port",
            "volume.port.grpc",
            "filer.port",
            "filer.port.grpc",
            "s3.port",
            "s3.port.grpc",
        ];
        command.args(names.iter().zip(record.s3_ports).map(|(name, port)| format!("-{name}={port}")));
        command.args(["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"]).arg(format!("-s3.config={}", config.display()));
        for kind in ["filer", "s3"] {
            command.arg(format!("-{kind}.localSocket=/tmp/seaweedfs-{kind}-{}.sock", record.s3_ports[6]));
        }
        // Every bucket takes volumes of its own: one at a time, and as many as there are buckets.
        command.args(["-volume.max=10000", "-master.volumeSizeLimitMB=1024", "-volume.preStopSeconds=0"]);
        command.env("WEED_MASTER_VOLUME_GROWTH_COPY_1", "1");
        Ok(command)
    }

    /// SeaweedFS leaves its Unix sockets in /tmp, with names made from its ports.
    fn remove_sockets(&self) {
        let [_, master, _, volume, _, filer, s3, s3_grpc] = self.home.record().s3_ports;
        let grpc =
            [("master", master), ("volume", volume), ("filer", filer), ("s3", s3_grpc)].map(|(kind, port)| format!("{kind}-grpc-{port}"));
        for name in grpc.into_iter().chain(["filer", "s3"].map(|kind| format!("{kind}-{s3}"))) {
            // Mostly there is none.
            fs::remove_file(format!("/tmp/seaweedfs-{name}.sock")).ok();
        }
    }
}

/// The credentials with a bucket's name.
pub(crate) fn access(home: &Home, bucket: &str) -> S3Access {
    let record = home.record();
    S3Access {
        endpoint: format!("http://127.0.0.1:{}", record.s3_ports[6]),
        region: REGION.to_owned(),
        bucket: bucket.to_owned(),
        access_key: record.s3_access_key.clone(),
        secret_key: record.s3_secret_key.clone(),
    }
}

/// Makes a bucket unless there is one of that name. To SeaweedFS a bucket is a folder under `/buckets` of its filer.
pub(crate) async fn make_bucket(home: &Home, bucket: &str) -> Result<()> {
    let filer = home.record().s3_ports[4];
    let (status, answer) = http::request(filer, "POST", &format!("/buckets/{bucket}/"), b"").await?;
    ensure!(status == 201 || status == 409, "making the bucket {bucket} answered {status}: {answer}");
    Ok(())
}
