//! Handshakes that this host starts, directly or at a relay.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustls::pki_types::CertificateDer;

use super::{KeeperState, spawn};
use crate::link::sealed::handshake::{self, initiates};
use crate::link::sealed::handshake_gate::HANDSHAKES_MAX;
use crate::link::sealed::identity::tls::HandshakeError;
use crate::link::sealed::identity::{Identity, is_for};
use crate::link::sealed::session::{CurrentSession, Role, Seal};
use crate::link::{Link, normalised};
use crate::threads;

/// Initial backoff between attempts; doubled each time.
const RETRY_MIN: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(2);
/// Pause after a handshake: a keepalive must first prove that the new keys work.
const SETTLE: Duration = Duration::from_secs(1);
/// Time limit for establishing a TCP connection.
const CONNECT_MAX: Duration = Duration::from_secs(3);
/// How long the host whose name sorts second waits for the other host to connect.
const PATIENCE: Duration = Duration::from_secs(1);
/// The same wait without any keys, as after a restart: the other host cannot know that it has to connect.
const PATIENCE_WITHOUT_KEYS: Duration = Duration::from_millis(50);

impl KeeperState {
    /// True if this host starts the next handshake. `session`: the current one, and whether the peer is silent.
    pub(super) fn must_initiate(
        &self,
        link: &Link,
        seal: &Seal,
        identity: &Identity,
        (session, silent): (Option<&CurrentSession>, bool),
    ) -> bool {
        if link.via().is_some() {
            return true;
        }
        let mut all = self.progress.lock();
        let progress = all.entry(link.id).or_default();
        let lost = match session {
            Some(current) if !silent => {
                progress.lost = None;
                return current.role == Role::Initiator && link.remote().is_some();
            }
            _ => progress.lost.get_or_insert_with(Instant::now).elapsed(),
        };
        // Two hosts that begin at the same time refuse each other; after that, one of them leaves the handshake to the other.
        let first = session.is_none() && progress.failure.is_none();
        let patience = if first { PATIENCE_WITHOUT_KEYS } else { PATIENCE };
        link.remote().is_some() && (initiates(identity.name(), &seal.peer) || lost >= patience)
    }

    /// Starts a handshake for a link, unless one is in progress or the backoff has not expired.
    pub(super) fn initiate(self: &Arc<Self>, link: &Arc<Link>) {
        {
            let mut progress = self.progress.lock();
            let progress = progress.entry(link.id).or_default();
            let early = progress.not_before.is_some_and(|time| Instant::now() < time);
            if progress.under_way || early {
                return;
            }
            let initiated = self.initiated(link);
            if initiated.fetch_add(1, Relaxed) >= HANDSHAKES_MAX {
                initiated.fetch_sub(1, Relaxed);
                return;
            }
            progress.under_way = true;
        }
        let (state, on_thread) = (self.clone(), link.clone());
        let run = move || {
            threads::confine();
            let done = state.shake_hands(&on_thread);
            state.finished(&on_thread, done);
        };
        if let Err(error) = spawn("seal-connect", run) {
            self.finished(link, Err(HandshakeError(format!("cannot start a thread: {error}"))));
        }
    }

    fn shake_hands(&self, link: &Link) -> Result<(), HandshakeError> {
        let identity = self.options.identity.current();
        if link.via().is_some() {
            return self.meet(link, &identity);
        }
        let remote = link.remote().unwrap_or(link.options().remote);
        let stream = connect(self.options.listen, remote)?;
        handshake::initiate(stream, &identity, link)
    }

    /// Meets the other host of a link at its relay, and agrees on keys over the joined connection.
    fn meet(&self, link: &Link, identity: &Identity) -> Result<(), HandshakeError> {
        let (Some(via), Some(seal)) = (link.via(), link.seal()) else { return Ok(()) };
        let relay = self.links.lock().iter().find(|other| other.name() == via.link).cloned();
        let failed = |why: String| HandshakeError(format!("by way of {}: {why}", via.link));
        let relay = relay.as_ref().and_then(|relay| Some((relay.seal()?, relay.remote()?)));
        let (relay, remote) =
            relay.ok_or_else(|| failed("no sealed link of this name leads anywhere".into()))?;
        let stream = connect(self.options.listen, remote)?;
        let met = via.meet(stream, identity, &relay.peer, &seal.peer);
        let stream = met.map_err(|HandshakeError(why)| failed(why))?;
        if initiates(identity.name(), &seal.peer) {
            return handshake::initiate(stream, identity, link);
        }
        handshake::respond(stream, identity, |chain: &[CertificateDer<'_>]| {
            let right = is_for(chain, &seal.peer).then_some(link);
            right.ok_or_else(|| format!("the certificate is not for {}", seal.peer))
        })
        .map(drop)
    }

    /// Number of handshakes that this host has in progress. Those at a relay are counted separately, because they wait for the
    /// other host.
    fn initiated(&self, link: &Link) -> &AtomicUsize {
        &self.initiated[usize::from(link.via().is_some())]
    }

    /// Records the result of a handshake.
    fn finished(&self, link: &Link, done: Result<(), HandshakeError>) {
        self.initiated(link).fetch_sub(1, Relaxed);
        if done.is_ok() {
            self.announce_keys();
        }
        let mut all = self.progress.lock();
        // The link may have been removed during the handshake.
        let Some(progress) = all.get_mut(&link.id) else { return };
        progress.under_way = false;
        match done {
            Ok(()) => {
                progress.failure = None;
                progress.wait = RETRY_MIN;
                progress.not_before = Some(Instant::now() + SETTLE);
            }
            Err(HandshakeError(why)) => {
                if progress.failure.as_ref() != Some(&why) {
                    tracing::warn!(
                        "link {}: no keys from {}: {why}",
                        link.name(),
                        link.remote().map_or("anywhere".into(), |remote| remote.to_string())
                    );
                }
                progress.failure = Some(why);
                progress.lost = Some(Instant::now());
                progress.wait = (progress.wait * 2).clamp(RETRY_MIN, RETRY_MAX);
                progress.not_before = Some(Instant::now() + progress.wait);
            }
        }
    }
}

/// Opens a TCP connection to `remote`, from the address on which the bridge listens.
pub(super) fn connect(listen: SocketAddr, remote: SocketAddr) -> Result<TcpStream, HandshakeError> {
    let tried = || -> io::Result<TcpStream> {
        let local = normalised(listen).ip();
        let family = if remote.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let fd = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // On Linux this also limits connecting.
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, Some(CONNECT_MAX))?;
        if !local.is_unspecified() && local.is_ipv4() == remote.is_ipv4() {
            rustix::net::bind(&fd, &SocketAddr::new(local, 0))?;
        }
        rustix::net::connect(&fd, &remote)?;
        Ok(TcpStream::from(fd))
    };
    tried().map_err(|error| {
        let text = match error.kind() {
            // Errors of the kernel when the time limit of a connection expires.
            _ if matches!(error.raw_os_error(), Some(libc::EINPROGRESS | libc::EAGAIN | libc::ETIMEDOUT)) => {
                return HandshakeError(format!(
                    "no answer from {remote} over TCP within {} s: does a firewall block it?",
                    CONNECT_MAX.as_secs()
                ));
            }
            io::ErrorKind::ConnectionRefused => {
                "connection refused; is vnetd with a sealed link running there?".into()
            }
            _ => error.to_string(),
        };
        HandshakeError(format!("cannot connect to {remote} (TCP): {text}"))
    })
}
