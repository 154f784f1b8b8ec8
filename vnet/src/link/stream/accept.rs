//! Accepting connections, and assigning each to its link.
//!
//! In clear text a connection belongs to the link whose remote address it comes from. Any other connection may belong to a sealed
//! link, whose peer can connect from any address: after the TLS handshake, the certificate identifies the link.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::connections::{ACCEPTED, Stream};
use super::tls::{Handshake, Secured};
use crate::link::Link;
use crate::link::sealed::handshake_gate::Slot;
use crate::link::sealed::identity::{Identity, is_for};

/// Time limit for the TLS handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);

/// The link in clear text to which a connection from `source` belongs; the port is ignored.
pub(super) fn owner_of(links: &[Arc<Link>], source: SocketAddr) -> Option<(&Link, &Stream)> {
    links.iter().find_map(|link| {
        let stream = link.stream()?;
        let its = stream.peer.is_none() && link.options().remote.ip() == source.ip();
        (its && !stream.is_stopping()).then_some((&**link, stream))
    })
}

/// True if `source` is the remote of a sealed link, so that its handshakes have slots of their own.
pub(super) fn is_remote(links: &[Arc<Link>], source: SocketAddr) -> bool {
    links.iter().any(|link| link.stream_peer().is_some() && link.options().remote.ip() == source.ip())
}

/// A connection whose TLS handshake is in progress.
pub(super) struct Newcomer {
    pub(super) socket: TcpStream,
    pub(super) source: SocketAddr,
    pub(super) deadline: Instant,
    handshake: Handshake,
    identity: Arc<Identity>,
    slot: Slot,
}

impl Newcomer {
    pub(super) fn new(
        socket: TcpStream,
        source: SocketAddr,
        identity: Arc<Identity>,
        slot: Slot,
    ) -> Result<Newcomer, String> {
        socket.set_nonblocking(true).map_err(|error| error.to_string())?;
        let handshake = Handshake::server(&identity)?;
        let deadline = Instant::now() + HANDSHAKE_MAX;
        Ok(Newcomer { socket, source, deadline, handshake, identity, slot })
    }

    /// Continues until the socket would block. Returns true when the handshake is complete.
    pub(super) fn advance(&mut self) -> Result<bool, String> {
        self.handshake.advance(&self.socket)
    }

    pub(super) fn timed_out() -> String {
        format!("the TLS handshake took longer than {} s", HANDSHAKE_MAX.as_secs())
    }

    /// Passes the connection to the link that is sealed with the host in the certificate. The handshake must be complete.
    pub(super) fn install(self, links: &[Arc<Link>]) -> Result<(), String> {
        let chain = self.handshake.chain()?;
        let mut streams = links.iter().filter_map(|link| Some((link, link.stream()?)));
        let owner = streams.find_map(|(link, stream)| {
            let peer = stream.peer.as_deref().filter(|peer| is_for(&chain, peer))?;
            (!stream.is_stopping()).then_some((link, stream, peer))
        });
        let (link, stream, peer) = owner.ok_or("no link here is to the host that its certificate names")?;
        let secured = self.handshake.secured_with(&self.identity, peer)?;
        self.slot.succeeded();
        install(link, stream, self.socket, Some(secured), self.source);
        Ok(())
    }
}

/// Installs an accepted connection in its link.
pub(super) fn install(
    link: &Link,
    stream: &Stream,
    socket: TcpStream,
    secured: Option<Secured>,
    source: SocketAddr,
) {
    match Connection::new(socket, secured) {
        Ok(connection) => {
            tracing::info!(link = link.name(), from = %source, "accepted");
            stream.install(ACCEPTED, connection);
        }
        Err(error) => {
            tracing::warn!(link = link.name(), %source, %error, "cannot use the accepted connection");
        }
    }
}
