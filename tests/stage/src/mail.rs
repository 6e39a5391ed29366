//! A real mail server: Debian's Postfix with a configuration, queue and mailboxes of its own. It takes mail of people, hands the agents' on by LMTP and keeps everybody
//! else's in Maildirs.
//!
//! Where an installation has a DMARC milter, this one has a table of sender domains: those that count as verified get `dmarc=pass`, all others `dmarc=none`.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::{port::free_port, probe::wait_for};

const READY: Duration = Duration::from_secs(30);
const LOG_LINES: usize = 60;
const DAEMONS: &str = "/usr/lib/postfix/sbin";
/// The name that it writes into `Authentication-Results`.
pub const AUTHSERV_ID: &str = "mx.test";
/// Mail for this domain goes to the agents, for the other to mailboxes.
pub const AGENTS: &str = "agents.test";
pub const PEOPLE: &str = "people.test";
/// Mail for this domain is taken, and comes back when no channel is found to take it.
pub const NOWHERE: &str = "nowhere.test";

pub struct Postfix {
    pub port: u16,
    watcher: Child,
    folder: TempDir,
}

impl Postfix {
    /// `lmtp` is where the agents' mail goes. Mail from a domain of `verified` passes DMARC.
    pub async fn start(lmtp: u16, verified: &[&str]) -> Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "Postfix starts as root only");
        ensure!(Path::new(DAEMONS).join("master").is_file(), "Postfix is missing; run `./dev setup`");
        let folder = tempfile::Builder::new().prefix("towpath-postfix-").tempdir_in("/tmp")?;
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        let port = free_port()?;
        let root = folder.path();
        for name in ["conf", "queue", "data", "mail"] {
            fs::create_dir(root.join(name))?;
        }
        own(&root.join("data"), "postfix")?;
        own(&root.join("mail"), "postfix")?;
        let conf = root.join("conf");
        fs::write(conf.join("main.cf"), main_cf(root, lmtp)?)?;
        fs::write(conf.join("master.cf"), master_cf(port))?;
        let results: String = verified
            .iter()
            .map(|domain| {
                format!(
                    "/@{}$/ PREPEND Authentication-Results: {AUTHSERV_ID}; dmarc=pass header.from={domain}\n",
                    domain.replace('.', "\\.")
                )
            })
            .collect();
        fs::write(conf.join("results"), format!("{results}/./ PREPEND Authentication-Results: {AUTHSERV_ID}; dmarc=none\n"))?;
        // Makes the folders of the queue.
        let checked = Command::new("postfix").arg("-c").arg(&conf).arg("check").output().context("postfix check")?;
        ensure!(checked.status.success(), "postfix check: {}", String::from_utf8_lossy(&checked.stderr));
        // Its master changes users, which takes the kernel's word of a parent's death away; so a shell waits for the end of our pipe.
        let log = fs::File::create(root.join("log"))?;
        let script = "\"$0\" -c \"$1\" -s & read -r _; kill $!; wait";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(Path::new(DAEMONS).join("master")).arg(&conf);
        let watcher = command.stdin(Stdio::piped()).stdout(log.try_clone()?).stderr(log).process_group(0).spawn()?;
        let this = Self { port, watcher, folder };
        wait_for("Postfix", READY, async || TcpStream::connect(("127.0.0.1", port)).await.ok()).await.with_context(|| this.log())?;
        Ok(this)
    }

    /// The mails in Ann's mailbox, the only one of [`PEOPLE`], oldest first.
    pub fn mailbox(&self) -> Result<Vec<Vec<u8>>> {
        let folder = self.folder.path().join("mail/ann/new");
        let mut found: Vec<(std::time::SystemTime, PathBuf)> = Vec::new();
        for entry in fs::read_dir(folder).into_iter().flatten() {
            let entry = entry?;
            found.push((entry.metadata()?.modified()?, entry.path()));
        }
        found.sort();
        found.into_iter().map(|(_, path)| fs::read(&path).with_context(|| path.display().to_string())).collect()
    }

    /// The end of its log.
    pub fn log(&self) -> String {
        let text = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }
}

impl Drop for Postfix {
    fn drop(&mut self) {
        drop(self.watcher.stdin.take());
        // It ends as soon as the master has; nothing can be done about one that does not.
        self.watcher.wait().ok();
    }
}

fn own(path: &Path, user: &str) -> Result<()> {
    let done = Command::new("chown").arg(user).arg(path).status()?;
    if !done.success() {
        bail!("chown {user} {}", path.display());
    }
    Ok(())
}

fn id_of(user: &str) -> Result<String> {
    let output = Command::new("id").args(["-u", user]).output()?;
    ensure!(output.status.success(), "there is no user {user}");
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn main_cf(root: &Path, lmtp: u16) -> Result<String> {
    let (root, uid) = (root.display(), id_of("postfix")?);
    Ok(format!(
        "compatibility_level = 3.6\nqueue_directory = {root}/queue\ndata_directory = {root}/data\ncommand_directory = /usr/sbin\n\
         daemon_directory = {DAEMONS}\nmail_owner = postfix\nsetgid_group = postdrop\nmyhostname = {AUTHSERV_ID}\nmydestination =\n\
         inet_interfaces = 127.0.0.1\ninet_protocols = ipv4\nmynetworks = 127.0.0.0/8\nsmtpd_relay_restrictions = permit_mynetworks, reject\n\
         smtpd_sender_restrictions = check_sender_access regexp:{root}/conf/results\nalias_maps =\nlocal_recipient_maps =\n\
         relay_domains = {AGENTS}, {NOWHERE}\n\
         transport_maps = inline:{{ {{ {AGENTS} = lmtp:inet:127.0.0.1:{lmtp} }}, {{ {NOWHERE} = lmtp:inet:127.0.0.1:{lmtp} }} }}\nrecipient_delimiter = +\n\
         virtual_mailbox_domains = {PEOPLE}\nvirtual_mailbox_base = {root}/mail\nvirtual_mailbox_maps = inline:{{ann@{PEOPLE}=ann/}}\n\
         virtual_minimum_uid = 1\nvirtual_uid_maps = static:{uid}\nvirtual_gid_maps = static:{uid}\nvirtual_mailbox_limit = 0\n\
         message_size_limit = 62914560\nmaillog_file = /dev/stdout\nqueue_run_delay = 1s\nminimal_backoff_time = 1s\nmaximal_backoff_time = 2s\n\
         smtpd_tls_security_level = none\nsmtpd_peername_lookup = no\nsmtp_dns_support_level = disabled\n"
    ))
}

fn master_cf(port: u16) -> String {
    let mut text = format!("127.0.0.1:{port} inet n - n - - smtpd\n");
    // Service, private, wake-up time in seconds, most processes, program.
    for (name, private, wakeup, most, program) in [
        ("pickup", "n", "60", "1", "pickup"),
        ("cleanup", "n", "-", "0", "cleanup"),
        ("qmgr", "n", "1", "1", "qmgr"),
        ("rewrite", "-", "-", "-", "trivial-rewrite"),
        ("bounce", "-", "-", "0", "bounce"),
        ("defer", "-", "-", "0", "bounce"),
        ("trace", "-", "-", "0", "bounce"),
        ("verify", "-", "-", "1", "verify"),
        ("proxymap", "-", "-", "-", "proxymap"),
        ("smtp", "-", "-", "-", "smtp"),
        ("relay", "-", "-", "-", "smtp"),
        ("error", "-", "-", "-", "error"),
        ("retry", "-", "-", "-", "error"),
        ("virtual", "-", "-", "-", "virtual"),
        ("lmtp", "-", "-", "-", "lmtp"),
        ("anvil", "-", "-", "1", "anvil"),
        ("scache", "-", "-", "1", "scache"),
    ] {
        // Only what writes into mailboxes as their owners needs root.
        let unprivileged = if name == "virtual" { "n" } else { "-" };
        text.push_str(&format!("{name} unix {private} {unprivileged} n {wakeup} {most} {program}\n"));
    }
    text.push_str("postlog unix-dgram n - n - 1 postlogd\n");
    text
}
