//! The supervisor outside: one for each sandbox, alive until everything that it has to tell is kept.

mod desk;
mod disk;
mod fifo;
mod gather;
mod lease;
mod link;
mod net;
mod output;
mod prepare;
mod result;
mod sandbox;
mod spool;
mod stage;
mod steers;
mod terminal;
mod upload;
mod work;

use std::{
    cell::RefCell,
    fs::File,
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

use tokio::signal::unix::{SignalKind, signal};
use towpath_schemas::{
    guest::{Identity, SandboxSpec},
    id::RunId,
};

use crate::{
    exit,
    folder::{self, Folder, IdentityRecord},
    host, launch,
};
use desk::Desk;
use sandbox::InitProcess;
use spool::Spool;
use steers::Ledger;
use work::Work;

pub use link::host_and_port;
pub use prepare::program;

/// Who this supervisor is to the gateway. Neither incarnation nor key is ever written down.
pub struct Secrets {
    run: RunId,
    epoch: i32,
    incarnation: String,
    key: String,
    token: RefCell<Option<String>>,
    folder: Folder,
    spec: SandboxSpec,
}

impl Secrets {
    fn draw(spec: &SandboxSpec, folder: &Folder) -> io::Result<Self> {
        let token = Some(spec.token.clone()).filter(|token| !token.is_empty());
        Ok(Self {
            run: spec.run,
            epoch: spec.epoch,
            incarnation: random_hex::<16>()?,
            key: random_hex::<32>()?,
            token: RefCell::new(token),
            folder: folder.clone(),
            spec: SandboxSpec { token: String::new(), ..spec.clone() },
        })
    }

    fn token(&self) -> Option<String> {
        self.token.borrow().clone()
    }

    /// The token was exchanged for the key: it is of no more use to us, and must be of none to anyone.
    fn welcomed(&self) {
        if self.token.take().is_some()
            && let Err(error) = folder::write_json(&self.folder.spec(), &self.spec)
        {
            crate::note!("the used token cannot be removed: {error}");
        }
    }

    /// Between 0 and 1.
    fn jitter(&self) -> f64 {
        let mut bytes = [0; 2];
        // Without randomness all wait the same time, which is no error.
        fill_random(&mut bytes).ok();
        f64::from(u16::from_be_bytes(bytes)) / f64::from(u16::MAX)
    }
}

fn random_hex<const N: usize>() -> io::Result<String> {
    let mut bytes = [0; N];
    fill_random(&mut bytes)?;
    Ok(hex::encode(bytes))
}

/// From the kernel by a raw system call: there may be no /dev, and no libc of ours.
fn fill_random(bytes: &mut [u8]) -> io::Result<()> {
    match rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty())? {
        filled if filled == bytes.len() => Ok(()),
        _ => Err(io::Error::other("the kernel gave fewer random bytes than asked for")),
    }
}

/// Who this sandbox is to its host.
pub struct Identified {
    folder: Folder,
    record: IdentityRecord,
    mark: String,
}

impl Identified {
    fn record(folder: &Folder) -> io::Result<Self> {
        let pid = std::process::id() as i32;
        let stat = host::process_stat(pid)?.ok_or_else(|| io::Error::other("/proc does not know this process"))?;
        let identity = Identity { boot_id: host::boot_id()?, supervisor_pid: pid, supervisor_start: stat.start, ..Identity::default() };
        let record = IdentityRecord { identity, numbers_in: host::pid_namespace("self")? };
        folder::write_json(&folder.identity(), &record)?;
        let mark = format!("{pid} {}\n", stat.start);
        Ok(Self { folder: folder.clone(), record, mark })
    }

    /// Adds process 1, durably.
    fn complete(&self, init: InitProcess, cgroup: Option<String>) -> io::Result<Identity> {
        let InitProcess { pid, start, pid_namespace } = init;
        let mut record = self.record.clone();
        (record.identity.init_pid, record.identity.init_start) = (Some(pid), Some(start));
        (record.identity.pid_namespace, record.identity.cgroup) = (Some(pid_namespace), cgroup);
        folder::write_json(&self.folder.identity(), &record)?;
        Ok(record.identity)
    }

    /// What `started` holds: which supervisor process started the command.
    fn incarnation(&self) -> &str {
        &self.mark
    }
}

/// Files that belong to the sandbox's user when we may give them away.
fn give_to(path: &Path, owner: Option<u32>) -> io::Result<()> {
    match owner {
        Some(owner) if rustix::process::geteuid().is_root() => std::os::unix::fs::chown(path, Some(owner), Some(owner)),
        _ => Ok(()),
    }
}

pub fn run(dir: &Path) -> ExitCode {
    match serve(dir) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            crate::note!("{}: {error}", dir.display());
            ExitCode::from(exit::FAILED)
        }
    }
}

fn serve(dir: &Path) -> io::Result<u8> {
    crate::sys::close_at_exec_from(3);
    // Fails for the leader of a group; `launch` has seen to it that the group is ours alone.
    rustix::process::setsid().ok();
    // The same for every run, whatever the worker was started with.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let folder = Folder::new(std::path::absolute(dir)?);
    let Some(_lock) = folder.try_lock()? else { return Ok(exit::HELD) };
    for spent in [folder.gone(), folder.started()] {
        if spent.try_exists()? {
            crate::note!("{} exists: nothing is ever started here again", spent.display());
            return Ok(exit::SPENT);
        }
    }
    let spec: SandboxSpec = folder::read_json(&folder.spec())?.ok_or_else(|| io::Error::other("there is no spec.json"))?;
    host_and_port(&spec.gateway).map_err(io::Error::other)?;
    let secrets = Secrets::draw(&spec, &folder)?;
    let epoch = u32::try_from(spec.epoch).map_err(io::Error::other)?;
    let spool = Spool::create(folder.spool(), epoch, spec.spool_bytes)?;
    let ledger = Ledger::create(folder.steers())?;
    let identified = Identified::record(&folder)?;
    let desk = Desk::new(spool, ledger, identified.record.identity.clone());
    io::stdout().write_all(launch::READY.as_bytes())?;
    io::stdout().flush()?;
    silence_stdout()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(4).build()?;
    runtime.block_on(tend(&desk, &secrets, &spec, &folder, &identified))?;
    Ok(0)
}

/// Nobody reads it after `ready`.
fn silence_stdout() -> io::Result<()> {
    let null = File::options().write(true).open("/dev/null")?;
    Ok(rustix::stdio::dup2_stdout(&null)?)
}

async fn tend(desk: &Desk, secrets: &Secrets, spec: &SandboxSpec, folder: &Folder, identified: &Identified) -> io::Result<()> {
    // A handler and not "ignore": an ignored signal would stay ignored in the command.
    let _hangup = signal(SignalKind::hangup())?;
    let running = RefCell::new(None);
    {
        let work = Work { desk, spec, folder, identified, running: &running };
        tokio::select! {
            () = link::keep(desk, secrets, &spec.gateway) => {}
            () = work.run() => {}
            () = desk.fenced() => {}
        }
    }
    let remains = running.borrow_mut().take();
    if let Some(mut remains) = remains {
        remains.end().await;
        remains.remove_cgroup();
    }
    let mut spent = vec![folder.control(), folder.etc(), folder.steers()];
    if desk.is_over() {
        spent.push(folder.spool());
    }
    for path in spent {
        if let Err(error) = std::fs::remove_dir_all(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            crate::note!("{} cannot be removed: {error}", path.display());
        }
    }
    Ok(())
}
