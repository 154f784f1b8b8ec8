//! How a host's ports are shared out among its dispatchers, and flows among the ports.
//!
//! ```text
//!  host 1, 2 dispatchers, 2 ports                    host 2, 3 dispatchers, 3 ports
//!
//!  dispatcher 0 --- 9000 ----- flows of path 0 -----> 9000 --- dispatcher 0
//!  dispatcher 1 --- 9001 ----- flows of path 1 -----> 9001 --- dispatcher 1
//!                     `------- flows of path 2 -----> 9002 --- dispatcher 2
//! ```
//!
//! A bridge has one port, or as many in a row as it is told to. With one, every dispatcher has a socket of its own on it, and
//! the kernel spreads the *peers* over them (`SO_REUSEPORT`): all that one peer sends comes to one dispatcher. With several,
//! dispatcher `i` of `n` has ports `i`, `i + n`, … for itself, and the sender spreads its *flows* over them: the hash of a
//! frame's addresses and ports chooses one of its own sockets and one of the receiver's ports. So
//!
//! - the frames of a flow take one way through the network and through one dispatcher, in order; so do the datagrams of a
//!   frame, for which reassembly is each dispatcher's own;
//! - the underlay sees several flows between two hosts, which its own hashes spread over links and receive queues;
//! - dispatchers share nothing, neither sockets nor locks, and the two sides may have different numbers of both.
//!
//! Each side knows the other's ports from its configuration, and a datagram belongs to a link when it comes from one of them.
//! They are not learned from traffic: whoever could send from another port of the peer's host could teach himself in.
//!
//! Bare frames (`vnet`) know one port only, the first. Where there are several, each dispatcher has a socket on it to send
//! them by; what comes to it is dispatcher 0's, as its place in the order above wants.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::link::socket::udp::{Bridge, BridgeError, Socket};
use crate::link::{ReassemblyBudget, Receiver, Sender};
use crate::stats::PortStats;

/// How often another row of ports is tried when the kernel chooses the first one.
const TRIES: usize = 32;

impl Bridge {
    /// Listens on `listen`; with `shared`, beside other bridges of this process on the same address, among which the kernel
    /// spreads the peers. `stats` counts datagrams of unknown source, `budget` is the host's reassembly memory.
    ///
    /// A shared bridge cannot tell its own kind from another vnetd of the same user: use [`Bridge::bind_group`].
    pub fn bind(
        listen: SocketAddr,
        shared: bool,
        stats: Arc<PortStats>,
        budget: Arc<ReassemblyBudget>,
    ) -> Result<Bridge, BridgeError> {
        Ok(Bridge::new(vec![bind(listen, shared)?], 0, stats, budget))
    }

    /// Bridges for `dispatchers` dispatchers on `ports` ports from that of `listen` on, which must be free before. Port 0 lets
    /// the kernel choose. Of fewer ports than dispatchers, but more than one, the last dispatchers get none to receive by.
    pub fn bind_group(
        listen: SocketAddr,
        ports: u16,
        dispatchers: usize,
        stats: &Arc<PortStats>,
        budget: &Arc<ReassemblyBudget>,
    ) -> Result<Vec<Bridge>, BridgeError> {
        let tries = if listen.port() == 0 && ports > 1 { TRIES } else { 1 };
        let mut sockets = bind_all(listen, ports, dispatchers);
        for _ in 1..tries {
            if !matches!(sockets, Err(BridgeError::InUse(_))) {
                break;
            }
            sockets = bind_all(listen, ports, dispatchers);
        }
        let bridge = |(dispatcher, own): (usize, Vec<Arc<Socket>>)| {
            let native_from = usize::from(dispatcher > 0 && own.len() > 1);
            Bridge::new(own, native_from, stats.clone(), budget.clone())
        };
        Ok(sockets?.into_iter().enumerate().map(bridge).collect())
    }

    fn new(
        sockets: Vec<Arc<Socket>>,
        native_from: usize,
        stats: Arc<PortStats>,
        budget: Arc<ReassemblyBudget>,
    ) -> Bridge {
        let rx = Receiver::new(sockets.clone(), stats, budget);
        Bridge { rx, tx: Sender::new(sockets, native_from), vxlan_rx: None }
    }

    /// The address listened on, with the first port, which the kernel may have chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.tx.local_addr()
    }
}

/// The sockets of each dispatcher. The first of each is bound to the first port; where there are several ports, only that
/// of dispatcher 0 receives.
fn bind_all(
    listen: SocketAddr,
    ports: u16,
    dispatchers: usize,
) -> Result<Vec<Vec<Arc<Socket>>>, BridgeError> {
    let shared = dispatchers > 1;
    if shared {
        // A socket that does not share finds out whether anybody else is there.
        drop(bind(listen, false)?);
    }
    let first = bind(listen, shared)?;
    let listen = first.local();
    if shared && ports > 1 {
        first.receive_alone().map_err(|error| BridgeError::new(listen, error))?;
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

fn bind(listen: SocketAddr, shared: bool) -> Result<Arc<Socket>, BridgeError> {
    Socket::bind(listen, shared).map(Arc::new).map_err(|error| BridgeError::new(listen, error))
}
