//! Free loopback ports. They are drawn below the kernel's ephemeral range (32768 and up by default): a client that keeps dialling a stopped
//! server's port inside that range can be given the very same port as its own and connect to itself, which then keeps the server from
//! coming back on it.

use std::net::{Ipv4Addr, TcpListener};

use anyhow::{Context, Result, bail};

const FIRST: u16 = 12_000;
const COUNT: u16 = 20_000;
const TRIES: usize = 200;

/// A loopback port that nobody listens on at this moment.
pub fn free_port() -> Result<u16> {
    for _ in 0..TRIES {
        let mut draw = [0_u8; 2];
        getrandom::fill(&mut draw).context("draw a port")?;
        let port = FIRST + u16::from_ne_bytes(draw) % COUNT;
        if is_free(port) {
            return Ok(port);
        }
    }
    bail!("no free loopback port between {FIRST} and {} after {TRIES} tries", FIRST + COUNT)
}

/// Whether the port can be listened on now. The listener sets SO_REUSEADDR, so connections of a former server that still fade away do not count.
pub(crate) fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}
