//! Distribution of a host's ports among its dispatchers, and of flows among the ports.
//!
//! ```text
//!  host 1, 2 dispatchers, 2 ports                    host 2, 3 dispatchers, 3 ports
//!
//!  dispatcher 0 --- 9000 ----- flows of path 0 -----> 9000 --- dispatcher 0
//!  dispatcher 1 --- 9001 ----- flows of path 1 -----> 9001 --- dispatcher 1
//!                     `------- flows of path 2 -----> 9002 --- dispatcher 2
//! ```
//!
//! A bridge has one port or several consecutive ones. With one, every dispatcher has its own socket on it, and the kernel spreads
//! the *peers* over them (`SO_REUSEPORT`): all datagrams of a peer reach one dispatcher. With several, dispatcher `i` of `n` owns
//! ports `i`, `i + n`, … and the sender spreads its *flows* over them: the hash of a frame's addresses and ports chooses one of
//! its own sockets and one of the receiver's ports. So
//!
//! - a flow's frames take one path through the network and through one dispatcher, in order; so do a frame's datagrams, because
//!   each dispatcher reassembles separately;
//! - the underlay sees several flows between two hosts and can hash them over links and receive queues;
//! - dispatchers share neither sockets nor locks, and the two sides may have different numbers of dispatchers and ports.
//!
//! Each side knows the other's ports from its configuration, and a datagram belongs to a link when it comes from one of them.
//! Ports are not learned from traffic: otherwise any user who can send from another port of the peer's host could inject frames.
//!
//! Bare frames (`vnet`) use the first port only. With several ports, each dispatcher has a socket on the first port for sending
//! them; dispatcher 0 receives there.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use super::tcp::listening;
use super::udp::Socket;
use crate::inherit::{self, Inheritance};
use crate::listen::until;

/// Maximum number of attempts to get free ports when the kernel chooses the first one.
const TRIES: usize = 32;

/// The setting that names the bridge's address.
const LISTEN: &str = "[bridge] listen";

/// Error when the bridge cannot listen. The first two have the setting that names the address.
#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    /// The port is in use.
    #[error("cannot listen on {0}: address already in use; is another vnetd running? choose another {1}")]
    InUse(SocketAddr, &'static str),
    /// The address does not belong to this host.
    #[error("cannot listen on {0}: not an address of this host; choose another {1}")]
    NotHere(SocketAddr, &'static str),
    /// The port is privileged, and the process lacks the privilege.
    #[error("cannot listen on {0}: permission denied; run vnetd as root or choose a port above 1023")]
    Denied(SocketAddr),
    /// Any other error of the kernel.
    #[error("cannot listen on {0}: {1}")]
    Other(SocketAddr, #[source] io::Error),
}

impl BridgeError {
    /// `key` is the setting that names the address.
    pub(crate) fn new(key: &'static str, listen: SocketAddr, error: io::Error) -> BridgeError {
        match error.raw_os_error() {
            Some(libc::EADDRINUSE) => BridgeError::InUse(listen, key),
            Some(libc::EADDRNOTAVAIL) => BridgeError::NotHere(listen, key),
            Some(libc::EACCES | libc::EPERM) => BridgeError::Denied(listen),
            _ => BridgeError::Other(listen, error),
        }
    }
}

/// Binds the sockets of `dispatchers` dispatchers on `ports` ports from that of `listen` on, see
/// [`Bridge::bind_group`](crate::link::Bridge::bind_group).
pub(in crate::link) fn bind_group(
    listen: SocketAddr,
    ports: u16,
    dispatchers: usize,
) -> Result<Vec<Vec<Arc<Socket>>>, BridgeError> {
    let in_use = |error: &BridgeError| matches!(error, BridgeError::InUse(..));
    if listen.port() != 0 {
        return until(|| bind_all(listen, ports, dispatchers), in_use);
    }
    let mut sockets = bind_all(listen, ports, dispatchers);
    for _ in 1..TRIES {
        match &sockets {
            // Sealed links listen on the TCP port of the same number. The kernel checks only the UDP port.
            Ok(sockets) if listening(sockets[0][0].local()).is_ok() => break,
            Err(error) if !in_use(error) => break,
            _ => sockets = bind_all(listen, ports, dispatchers),
        }
    }
    sockets
}

/// The sockets that a running vnetd with the same options hands over, as [`bind_group`] has bound them.
pub(in crate::link) fn inherit_group(
    inheritance: &Inheritance,
    listen: SocketAddr,
    ports: u16,
    dispatchers: usize,
) -> Result<Vec<Vec<Arc<Socket>>>, BridgeError> {
    let socket = |name: String| {
        let missing = || io::Error::other(format!("the running vnetd has no socket {name}"));
        let descriptor = inheritance.take_one(&name).ok_or_else(missing);
        let socket =
            descriptor.and_then(Socket::inherit).map_err(|error| BridgeError::Other(listen, error))?;
        Ok(Arc::new(socket))
    };
    let of = |dispatcher: usize| {
        let more = (1..ports).filter(|offset| usize::from(*offset) % dispatchers.max(1) == dispatcher);
        (0..=more.count()).map(|index| socket(inherit::bridge(dispatcher, index))).collect()
    };
    (0..dispatchers).map(of).collect()
}

/// Binds the sockets of each dispatcher. Each dispatcher's first socket is bound to the first port; with several ports, only
/// dispatcher 0 receives there.
fn bind_all(
    listen: SocketAddr,
    ports: u16,
    dispatchers: usize,
) -> Result<Vec<Vec<Arc<Socket>>>, BridgeError> {
    let shared = dispatchers > 1;
    if shared {
        // An unshared socket detects other users of the port.
        drop(bind(listen, false)?);
    }
    let first = bind(listen, shared)?;
    let listen = first.local();
    if shared && ports > 1 {
        first.receive_alone().map_err(|error| BridgeError::new(LISTEN, listen, error))?;
    }
    let mut all = vec![vec![first]];
    while all.len() < dispatchers {
        all.push(vec![bind(listen, true)?]);
    }
    for offset in 1..ports {
        let port = listen.port().checked_add(offset);
        let port = port.ok_or_else(|| BridgeError::Other(listen, io::ErrorKind::InvalidInput.into()))?;
        let mut address = listen;
        address.set_port(port);
        all[usize::from(offset) % dispatchers.max(1)].push(bind(address, false)?);
    }
    Ok(all)
}

pub(in crate::link) fn bind(listen: SocketAddr, shared: bool) -> Result<Arc<Socket>, BridgeError> {
    Socket::bind(listen, shared).map(Arc::new).map_err(|error| BridgeError::new(LISTEN, listen, error))
}
