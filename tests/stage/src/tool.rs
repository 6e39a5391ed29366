//! Where the servers' programs are.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// A program by, in this order: the variable that names it, PATH, the folder that `./dev setup` fills.
pub(crate) fn find(name: &str, variable: &str) -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(variable).map(PathBuf::from) {
        if path.is_file() {
            return Ok(path);
        }
        bail!("{variable} names {}, and there is no such file", path.display());
    }
    let installed = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache/towpath/tools/bin"));
    match on_path(name).or_else(|| installed.map(|dir| dir.join(name)).filter(|path| path.is_file())) {
        Some(path) => Ok(path),
        None => bail!("{name} was not found; run `./dev setup`, or set {variable} to where it is"),
    }
}

/// The folder with Postgres's programs: TOWPATH_POSTGRES_BIN, Debian's newest release from 15 on, or where `postgres` is on PATH.
pub fn postgres_bin() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("TOWPATH_POSTGRES_BIN").map(PathBuf::from) {
        return Ok(dir);
    }
    let debian = (15..=30).rev().map(|version| PathBuf::from(format!("/usr/lib/postgresql/{version}/bin")));
    let found = debian.into_iter().find(|dir| dir.join("postgres").is_file() && dir.join("initdb").is_file());
    match found.or_else(|| on_path("postgres")?.parent().map(Path::to_path_buf)) {
        Some(dir) => Ok(dir),
        None => bail!(
            "Postgres 15 or newer was not found; run `./dev setup`, or set TOWPATH_POSTGRES_BIN to the folder with `postgres` and `initdb`"
        ),
    }
}

fn on_path(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join(name)).find(|path| path.is_file())
}
