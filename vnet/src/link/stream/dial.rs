//! Dialing: opens a TCP connection, directly or through a SOCKS 5 proxy, then runs TLS if the link is sealed.
//!
//! A [`Dial`] is one attempt. It never blocks: the stream thread advances it when its socket is ready, and ends it at its
//! deadline. [`Backoff`] spaces attempts.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use super::connection::Connection;
use super::connections::Stream;
use super::options::StreamOptions;
use super::proxy::{Exchange, ProxyError};
use super::tls::{Handshake, Secured};
use crate::wire::socks::{Destination, SocksError};

/// Time limit for each step: TCP, proxy, TLS.
const STEP_MAX: Duration = Duration::from_secs(5);
/// Initial backoff after a failed attempt; doubled up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Maximum backoff between attempts.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Error when dialing.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    #[error("cannot connect to {0}: {1}")]
    Connect(String, #[source] io::Error),
    #[error("the proxy at {0} broke off: {1}")]
    Proxy(String, #[source] io::Error),
    #[error(transparent)]
    Refused(#[from] SocksError),
    #[error("{0}")]
    Tls(String),
    #[error("a host name needs a proxy that resolves it")]
    Name,
}

/// One attempt to connect.
pub(super) struct Dial {
    socket: TcpStream,
    stage: Stage,
    deadline: Instant,
}

enum Stage {
    Tcp(SocketAddr),
    Proxy(Exchange),
    Tls(Box<Handshake>),
}

/// State of an attempt after a step.
pub(super) enum Progress {
    Waiting(Dial),
    Connected(Connection),
}

impl AsFd for Dial {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Dial {
    /// Starts to connect.
    pub(super) fn start(options: &StreamOptions) -> Result<Dial, DialError> {
        let to = match (&options.proxy, &options.destination) {
            (Some(proxy), _) => proxy.address,
            (None, Destination::Address(address)) => *address,
            (None, Destination::Name(..)) => return Err(DialError::Name),
        };
        let failed = |error: Errno| DialError::Connect(to.to_string(), error.into());
        let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::STREAM, flags, None).map_err(failed)?;
        match connect(&socket, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(failed(error)),
        }
        let deadline = Instant::now() + STEP_MAX;
        Ok(Dial { socket: socket.into(), stage: Stage::Tcp(to), deadline })
    }

    /// Deadline of the current step.
    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The error of an attempt that passed its deadline.
    pub(super) fn timed_out(&self, options: &StreamOptions) -> DialError {
        let late =
            || io::Error::new(io::ErrorKind::TimedOut, format!("no answer in {} s", STEP_MAX.as_secs()));
        match (&self.stage, &options.proxy) {
            (Stage::Tcp(to), _) => DialError::Connect(to.to_string(), late()),
            (Stage::Proxy(_), Some(proxy)) => DialError::Proxy(proxy.address.to_string(), late()),
            _ => DialError::Tls(format!("the TLS handshake took longer than {} s", STEP_MAX.as_secs())),
        }
    }

    /// Continues until the socket would block.
    pub(super) fn advance(mut self, stream: &Stream) -> Result<Progress, DialError> {
        loop {
            let done = match &mut self.stage {
                Stage::Tcp(to) => {
                    is_connected(&self.socket).map_err(|error| DialError::Connect(to.to_string(), error))?
                }
                Stage::Proxy(exchange) => pass(exchange, &self.socket, &stream.options)?,
                Stage::Tls(handshake) => handshake.advance(&self.socket).map_err(DialError::Tls)?,
            };
            if !done {
                return Ok(Progress::Waiting(self));
            }
            self.deadline = Instant::now() + STEP_MAX;
            self.stage = match (self.stage, &stream.options.proxy, &stream.peer) {
                (Stage::Tcp(_), Some(proxy), _) => Stage::Proxy(Exchange::new(proxy)),
                (Stage::Tcp(_) | Stage::Proxy(_), _, Some(peer)) => {
                    let identity = stream.identity().ok_or_else(no_identity)?;
                    Stage::Tls(Box::new(Handshake::client(&identity, peer).map_err(DialError::Tls)?))
                }
                (Stage::Tls(handshake), _, Some(peer)) => {
                    let identity = stream.identity().ok_or_else(no_identity)?;
                    let secured = handshake.secured_with(&identity, peer).map_err(DialError::Tls)?;
                    return connected(self.socket, Some(secured), stream);
                }
                _ => return connected(self.socket, None, stream),
            };
        }
    }
}

fn connected(socket: TcpStream, secured: Option<Secured>, stream: &Stream) -> Result<Progress, DialError> {
    let connection = Connection::new(socket, secured);
    let failed = |error| DialError::Connect(stream.options.destination.to_string(), error);
    connection.map(Progress::Connected).map_err(failed)
}

fn no_identity() -> DialError {
    DialError::Tls("this host has no certificate; see [identity]".into())
}

/// Result of a non-blocking connect; false while it is in progress.
fn is_connected(socket: &TcpStream) -> io::Result<bool> {
    sockopt::socket_error(socket)??;
    match socket.peer_addr() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(error),
    }
}

/// Continues the exchange with the proxy. Returns true once the proxy has connected.
fn pass(exchange: &mut Exchange, socket: &TcpStream, options: &StreamOptions) -> Result<bool, DialError> {
    let Some(proxy) = &options.proxy else { return Ok(true) };
    exchange.advance(socket, proxy, &options.destination).map_err(|error| match error {
        ProxyError::Io(error) => DialError::Proxy(proxy.address.to_string(), error),
        ProxyError::Refused(error) => DialError::Refused(error),
    })
}

/// Exponential backoff with jitter: each pause is half to all of a length that doubles up to [`PAUSE_MAX`].
pub(super) struct Backoff(Duration);

impl Backoff {
    pub(super) fn new() -> Backoff {
        Backoff(PAUSE_MIN)
    }

    pub(super) fn next_pause(&mut self) -> Duration {
        let whole = self.0;
        self.0 = (2 * whole).min(PAUSE_MAX);
        // Jitter, so that hosts that lost the same peer do not all reconnect at once. The operating system seeds std's hasher.
        let chance = RandomState::new().build_hasher().finish() % 1000;
        whole / 2 + whole * chance as u32 / 2000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_to_a_limit_with_jitter() {
        let mut backoff = Backoff::new();
        let mut whole = PAUSE_MIN;
        for _ in 0..12 {
            let pause = backoff.next_pause();
            assert!(whole / 2 <= pause && pause <= whole, "{pause:?} of {whole:?}");
            whole = (2 * whole).min(PAUSE_MAX);
        }
        assert_eq!(backoff.0, PAUSE_MAX);
        let some: std::collections::HashSet<_> = (0..20).map(|_| Backoff(PAUSE_MAX).next_pause()).collect();
        assert!(some.len() > 1);
    }
}
