//! Taking connections: one thread that accepts, and asks whose they are.
//!
//! One from the remote of a link in clear text is that link's. Any other may be a sealed link's, whose peer can come from
//! anywhere: a thread of its own makes TLS with it, and the certificate says whose it is. Such threads are bounded in number,
//! and each in time and bytes (handshake.rs).

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};

use super::connection::Connection;
use super::tls::{self, Secured};
use super::{ACCEPTED, Stream};
use crate::link::sealed::identity::{Identity, is_for};
use crate::link::socket::udp;
use crate::link::{Link, normalised};
use crate::stats::{DiscardReason, PortStats};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// TLS handshakes under way; more are refused and counted.
const HANDSHAKES_MAX: usize = 32;

/// Why streams are not listened for.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address} (TCP): {error}; choose another [bridge] stream_listen")]
pub struct ListenError {
    /// Where.
    pub address: SocketAddr,
    /// What the kernel said.
    pub error: io::Error,
}

/// The stream links there are.
pub type Roster = Vec<Arc<Link>>;

/// Accepts connections for stream links. Stops when it is dropped.
pub struct Listener {
    shared: Arc<Shared>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    roster: Mutex<Roster>,
    stopping: AtomicBool,
    handshakes: AtomicUsize,
    bell: OwnedFd,
    /// Counts what belongs to no link.
    stats: Arc<PortStats>,
}

impl Listener {
    /// Listens on `address`.
    pub fn bind(address: SocketAddr, stats: Arc<PortStats>) -> Result<Listener, ListenError> {
        let failed = |error: io::Error| ListenError { address, error };
        let socket = listening(address).map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        let bell =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| failed(e.into()))?;
        let (roster, stopping) = (Mutex::default(), AtomicBool::new(false));
        let handshakes = AtomicUsize::new(0);
        let shared = Arc::new(Shared { roster, stopping, handshakes, bell, stats });
        let thread = std::thread::Builder::new().name("streams".into()).spawn({
            let shared = shared.clone();
            move || shared.run(&socket)
        });
        Ok(Listener { shared, address, thread: Some(thread.map_err(failed)?) })
    }

    /// Where it listens, with the port that the kernel chose.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Takes connections for these links from now on.
    pub fn adopt(&self, roster: Roster) {
        *self.shared.roster.lock().unwrap_or_else(PoisonError::into_inner) = roster;
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Relaxed);
        // An eventfd write fails only when the counter is full, and then the bell is ringing already.
        let _ = rustix::io::write(&self.shared.bell, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that accepts streams ended in a panic");
        }
    }
}

fn listening(address: SocketAddr) -> io::Result<TcpListener> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    // A daemon that starts again need not wait for the connections of its former life.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    bind(&socket, &address)?;
    udp::answer_briefly(&socket)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

impl Shared {
    fn run(self: &Arc<Shared>, socket: &TcpListener) {
        while !self.stopping.load(Relaxed) {
            let mut waiting = [
                PollFd::new(socket, PollFlags::IN),
                PollFd::from_borrowed_fd(self.bell.as_fd(), PollFlags::IN),
            ];
            if let Err(error) = poll(&mut waiting, None)
                && error != rustix::io::Errno::INTR
            {
                tracing::error!(%error, "cannot wait for streams");
                return;
            }
            match socket.accept() {
                Ok((connection, source)) => self.take(connection, normalised(source)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    // Out of descriptors, most likely: a pause keeps the log readable.
                    tracing::warn!(%error, "cannot accept a stream");
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
            }
        }
    }

    /// Gives a connection to the link whose remote it comes from; any port will do.
    fn take(self: &Arc<Shared>, connection: TcpStream, source: SocketAddr) {
        let roster = self.roster.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let found = roster.iter().find_map(|link| {
            let stream = link.stream.as_ref()?;
            let its = stream.peer.is_none() && link.options().remote.ip() == source.ip();
            (its && !stream.is_stopping()).then_some((link, stream))
        });
        match found {
            Some((link, stream)) => install(link, stream, connection, None, source),
            None => self.secure(connection, source, roster),
        }
    }

    /// Finds out by TLS whose connection it is.
    fn secure(self: &Arc<Shared>, connection: TcpStream, source: SocketAddr, roster: Roster) {
        let sealed = roster.iter().filter_map(|link| link.stream.as_ref()?.identity.get());
        let Some(identity) = sealed.map(|store| store.current()).next() else {
            return self.stats.discard(DiscardReason::UnknownSource, 1);
        };
        if self.handshakes.fetch_add(1, Relaxed) >= HANDSHAKES_MAX {
            self.handshakes.fetch_sub(1, Relaxed);
            return self.stats.discard(DiscardReason::UnknownSource, 1);
        }
        let shared = self.clone();
        let spawned = std::thread::Builder::new().name("stream-accept".into()).spawn(move || {
            if let Err(why) = shared.introduce(connection, source, &roster, &identity) {
                shared.stats.discard(DiscardReason::UnknownSource, 1);
                tracing::warn!(%source, "a stream was refused: {why}");
            }
            shared.handshakes.fetch_sub(1, Relaxed);
        });
        if let Err(error) = spawned {
            self.handshakes.fetch_sub(1, Relaxed);
            self.stats.discard(DiscardReason::UnknownSource, 1);
            tracing::warn!(%source, %error, "cannot start a thread for a stream");
        }
    }

    fn introduce(
        &self,
        connection: TcpStream,
        source: SocketAddr,
        roster: &Roster,
        identity: &Identity,
    ) -> Result<(), String> {
        let (tls, chain) = tls::accept(&connection, identity)?;
        let mut streams = roster.iter().filter_map(|link| Some((link, link.stream.as_ref()?)));
        let named = |(_, stream): &(&Arc<Link>, &Stream)| {
            !stream.is_stopping() && stream.peer.as_ref().is_some_and(|peer| is_for(&chain, peer))
        };
        let (link, stream) =
            streams.find(named).ok_or("no link here is to the host that its certificate names")?;
        let info = identity.verify(&chain, stream.peer.as_deref().unwrap_or_default())?;
        let secured = Secured { tls, chain, claims: Arc::new(info.claims) };
        install(link, stream, connection, Some(secured), source);
        Ok(())
    }
}

fn install(
    link: &Link,
    stream: &Stream,
    connection: TcpStream,
    secured: Option<Secured>,
    source: SocketAddr,
) {
    match Connection::new(connection, secured) {
        Ok(connection) => {
            tracing::info!(link = link.name(), from = %source, "accepted");
            stream.install(ACCEPTED, connection);
        }
        Err(error) => tracing::warn!(link = link.name(), %source, %error, "cannot take a stream"),
    }
}
