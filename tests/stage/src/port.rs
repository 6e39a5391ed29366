//! Free loopback ports. They are drawn below the kernel's ephemeral range (32768 and up by default): a client that keeps dialling a stopped
//! server's port inside that range can be given the very same port as its own and connect to itself, which then keeps the server from
//! coming back on it.
//!
//! A drawn port stays its drawer's until that process ends, also while nothing listens on it: a server that is killed and started again must
//! find its port free, however many other tests draw ports meanwhile.

use std::{
    net::{Ipv4Addr, TcpListener},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    sync::Mutex,
};

use anyhow::{Context, Result, bail};

const FIRST: u16 = 12_000;
const COUNT: u16 = 20_000;
const TRIES: usize = 200;

/// An abstract socket for each port of ours; the kernel frees the name when this process ends.
static KEPT: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());

/// A loopback port that nobody listens on at this moment, and that `free_port` gives to nobody else before this process has ended.
pub fn free_port() -> Result<u16> {
    for _ in 0..TRIES {
        let mut draw = [0_u8; 2];
        getrandom::fill(&mut draw).context("draw a port")?;
        let port = FIRST + u16::from_ne_bytes(draw) % COUNT;
        if is_free(port)
            && let Some(kept) = keep(port)?
        {
            KEPT.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(kept);
            return Ok(port);
        }
    }
    bail!("no free loopback port between {FIRST} and {} after {TRIES} tries", FIRST + COUNT)
}

/// None when another process keeps it.
fn keep(port: u16) -> Result<Option<UnixListener>> {
    let name = SocketAddr::from_abstract_name(format!("towpath-port-{port}")).context("name a port")?;
    match UnixListener::bind_addr(&name) {
        Ok(kept) => Ok(Some(kept)),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Ok(None),
        Err(error) => Err(error).context("keep a port"),
    }
}

/// Whether the port can be listened on now. The listener sets SO_REUSEADDR, so connections of a former server that still fade away do not count.
pub(crate) fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}
