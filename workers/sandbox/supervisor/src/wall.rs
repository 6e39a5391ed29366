//! The role between outside and inside: joins the cgroup, switches to the unprivileged user, and becomes bubblewrap
//! (or, without isolation, the copy inside itself). Its order comes as JSON on stdin.

use std::{
    fs,
    io::{self, Read},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{fs::PermissionsExt, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

use rustix::{
    fs::{Gid, Mode, OFlags, Uid},
    mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change},
    thread::{set_no_new_privs, set_thread_gid, set_thread_groups, set_thread_res_gid, set_thread_res_uid, set_thread_uid},
};
use serde::{Deserialize, Serialize};

/// User and group inside.
pub const INSIDE_ID: u32 = 1000;
/// Where the paths of a sandbox are inside.
pub const INSIDE_WORKSPACE: &str = "/workspace";
pub const INSIDE_CONTROL: &str = "/run/towpath";
const INSIDE_INIT: &str = "/run/towpath-init";
/// As root the sources are bound here first, in a mount namespace of ours, because the unprivileged user may not walk to them.
const STAGE: &str = "/tmp";
/// The files of /etc that a sandbox sees, where the host has them. Users, hosts and name servers are made for it.
const ETC: [&str; 17] = [
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "os-release",
    "pki",
    "protocols",
    "services",
    "ssl",
    "terminfo",
    "timezone",
];

#[derive(Debug, Serialize, Deserialize)]
pub struct WallOrder {
    /// Path of `bwrap`; None for no isolation.
    pub bubblewrap: Option<PathBuf>,
    pub uid: Option<u32>,
    /// Write `0` here to join the cgroup.
    pub join: Vec<PathBuf>,
    pub workspace: PathBuf,
    pub control: PathBuf,
    pub etc: PathBuf,
    /// The supervisor's own binary.
    pub binary: PathBuf,
    /// Whether the sandbox may make user namespaces of its own.
    pub nested_users: bool,
    /// Most bytes in /tmp and /dev/shm each.
    pub tmp_bytes: u64,
    /// Descriptors left open: bubblewrap's report, the copy's socket, the command's stdout and stderr.
    pub info_fd: i32,
    pub init_fds: [i32; 3],
}

pub fn run() -> ExitCode {
    match become_sandbox() {
        Ok(never) => match never {},
        Err(error) => {
            crate::note!("{error}");
            ExitCode::from(crate::exit::FAILED)
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum WallError {
    #[error("the order cannot be read: {0}")]
    Order(String),
    #[error("cannot {0}: {1}")]
    Step(&'static str, io::Error),
}

fn step<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> WallError {
    move |error| WallError::Step(doing, error.into())
}

fn become_sandbox() -> Result<std::convert::Infallible, WallError> {
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).map_err(|error| WallError::Order(error.to_string()))?;
    let order: WallOrder = serde_json::from_str(&text).map_err(|error| WallError::Order(error.to_string()))?;
    for file in &order.join {
        fs::write(file, "0").map_err(step("join the cgroup"))?;
    }
    let root = rustix::process::geteuid().is_root();
    let _reader = order.bubblewrap.is_some().then(|| report_reader(order.info_fd)).transpose().map_err(step("keep the report readable"))?;
    let sources = if root && order.bubblewrap.is_some() {
        Sources::staged(&order).map_err(step("bind the sandbox's folders"))?
    } else {
        Sources::direct(&order)
    };
    if let (true, Some(uid)) = (root, order.uid) {
        switch_user(uid).map_err(step("switch to the unprivileged user"))?;
    }
    set_no_new_privs(true).map_err(step("give up new privileges"))?;
    let [socket, stdout, stderr] = order.init_fds;
    let init = ["init".to_owned(), "--fds".to_owned(), format!("{socket},{stdout},{stderr}")];
    let mut command = match &order.bubblewrap {
        Some(bubblewrap) => {
            let mut command = Command::new(bubblewrap);
            command.args(bubblewrap_arguments(&order, &sources)).arg("--").arg(INSIDE_INIT).args(init);
            command
        }
        None => {
            let mut command = Command::new("/proc/self/exe");
            command.arg0("towpath-supervisor").args(init).arg("--subreaper");
            command
        }
    };
    Err(WallError::Step("execute the wall", command.env_clear().current_dir("/").stdin(Stdio::null()).exec()))
}

/// Another reader of bubblewrap's report, left open for bubblewrap. Without one it dies of a report that nobody reads, because the supervisor
/// was killed in that moment, and the child that it has made already waits for ever for its user.
fn report_reader(info_fd: i32) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(format!("/proc/self/fd/{info_fd}"), OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty())
}

/// This process has one thread, so the thread's ids are the process's.
fn switch_user(uid: u32) -> rustix::io::Result<()> {
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
    set_thread_groups(&[])?;
    set_thread_gid(group)?;
    set_thread_res_gid(group, group, group)?;
    set_thread_uid(user)?;
    set_thread_res_uid(user, user, user)
}

/// Where bubblewrap finds what it binds.
struct Sources {
    workspace: PathBuf,
    control: PathBuf,
    etc: PathBuf,
    init: PathBuf,
}

impl Sources {
    fn direct(order: &WallOrder) -> Self {
        Self { workspace: order.workspace.clone(), control: order.control.clone(), etc: order.etc.clone(), init: order.binary.clone() }
    }

    fn staged(order: &WallOrder) -> io::Result<Self> {
        crate::sys::own_mounts()?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        // Opened in this mount namespace (a bind from another is refused), and before the stage may cover one of them.
        let folder = |path: &Path| -> io::Result<OwnedFd> {
            Ok(rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
        };
        let opened = [("workspace", folder(&order.workspace)?), ("control", folder(&order.control)?), ("etc", folder(&order.etc)?)];
        mount("towpath", STAGE, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, Some(c"mode=0755,size=16m"))?;
        let stage = Path::new(STAGE);
        for (name, source) in &opened {
            let target = stage.join(name);
            fs::create_dir(&target)?;
            mount_bind(format!("/proc/self/fd/{}", source.as_raw_fd()), &target)?;
        }
        // A copy, not a bind: an upgrade may replace the file on disk at any moment, and a bind to a file that was replaced fails.
        let init = stage.join("init");
        fs::copy("/proc/self/exe", &init)?;
        fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;
        Ok(Self { workspace: stage.join("workspace"), control: stage.join("control"), etc: stage.join("etc"), init })
    }
}

struct Arguments(Vec<String>);

impl Arguments {
    fn add<const N: usize>(&mut self, words: [&str; N]) {
        self.0.extend(words.map(str::to_owned));
    }

    fn bind(&mut self, how: &str, source: &Path, target: &str) {
        self.add([how, &source.to_string_lossy(), target]);
    }
}

fn bubblewrap_arguments(order: &WallOrder, sources: &Sources) -> Vec<String> {
    let id = INSIDE_ID.to_string();
    let size = order.tmp_bytes.to_string();
    let mut arguments = Arguments(Vec::new());
    arguments.add(["--unshare-all", "--unshare-user", "--as-pid-1", "--new-session", "--cap-drop", "ALL", "--clearenv"]);
    if !order.nested_users {
        arguments.add(["--disable-userns"]);
    }
    arguments.add(["--uid", &id, "--gid", &id, "--hostname", "towpath", "--info-fd", &order.info_fd.to_string()]);
    add_system(&mut arguments);
    arguments.add(["--dir", "/etc"]);
    for name in ETC {
        let path = format!("/etc/{name}");
        arguments.add(["--ro-bind-try", &path, &path]);
    }
    for name in ["passwd", "group", "hosts", "nsswitch.conf", "resolv.conf"] {
        arguments.bind("--ro-bind-try", &sources.etc.join(name), &format!("/etc/{name}"));
    }
    arguments.add(["--proc", "/proc", "--dev", "/dev"]);
    arguments.add(["--perms", "1777", "--size", &size, "--tmpfs", "/dev/shm", "--perms", "1777", "--size", &size, "--tmpfs", "/tmp"]);
    arguments.bind("--bind", &sources.workspace, INSIDE_WORKSPACE);
    arguments.bind("--ro-bind", &sources.workspace.join("files"), "/workspace/files");
    arguments.bind("--bind", &sources.control, INSIDE_CONTROL);
    arguments.bind("--ro-bind", &sources.init, INSIDE_INIT);
    arguments.add(["--symlink", "/run", "/var/run", "--symlink", "/tmp", "/var/tmp", "--remount-ro", "/"]);
    arguments.0
}

/// Programs and libraries, links as on the host.
fn add_system(arguments: &mut Arguments) {
    arguments.add(["--ro-bind", "/usr", "/usr"]);
    for name in ["bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
        let path = format!("/{name}");
        match fs::read_link(&path) {
            Ok(target) => arguments.add(["--symlink", &target.to_string_lossy(), &path]),
            Err(_) if Path::new(&path).is_dir() => arguments.add(["--ro-bind", &path, &path]),
            Err(_) => {}
        }
    }
}
