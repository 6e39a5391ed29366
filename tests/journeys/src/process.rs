//! Towpath's own processes.

use std::{
    collections::HashMap,
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, ensure};

/// One running process, killed when this is dropped.
pub struct Process {
    child: Child,
    log: PathBuf,
}

/// Where the built binary is: TOWPATH_BIN, which `./dev test` sets.
fn binary() -> Result<PathBuf> {
    let path = std::env::var_os("TOWPATH_BIN").context("TOWPATH_BIN is not set: run tests by `./dev test`")?;
    Ok(path.into())
}

/// Runs a command to its end; what it printed, unless it failed.
pub fn once(arguments: &[&str], env: &HashMap<String, String>) -> Result<String> {
    let done = Command::new(binary()?)
        .args(arguments)
        .env_clear()
        .envs(env)
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .stdin(Stdio::null())
        .output()
        .context("start towpath")?;
    ensure!(done.status.success(), "{arguments:?}: {}\n{}", done.status, String::from_utf8_lossy(&done.stderr));
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

impl Process {
    pub fn spawn(arguments: &[&str], env: &HashMap<String, String>, log: &Path) -> Result<Self> {
        let output = File::options().create(true).append(true).open(log)?;
        let child = Command::new(binary()?)
            .args(arguments)
            .env_clear()
            .envs(env)
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .context("start towpath")?;
        Ok(Self { child, log: log.to_owned() })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, then gone.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// SIGTERM, then its exit code.
    pub fn terminate(&mut self) -> Result<Option<i32>> {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.child.id())?).context("pid")?;
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        Ok(self.child.wait()?.code())
    }

    /// None while it runs.
    pub fn ended(&mut self) -> Result<Option<i32>> {
        Ok(self.child.try_wait()?.map(|status| status.code().unwrap_or(-1)))
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Highest resident memory so far, in bytes (proc(5), VmHWM).
    pub fn peak_memory(&self) -> u64 {
        peak_memory(self.child.id())
    }
}

/// Highest resident memory of a process so far, in bytes.
pub fn peak_memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("0");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap_or(0) * 1024
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
