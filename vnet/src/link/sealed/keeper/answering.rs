//! Handshakes that other hosts start, and guests that connect to meet another host.

use std::io;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::pki_types::CertificateDer;

use super::{Guest, KeeperState, TICK, seals, spawn};
use crate::link::ANYWHERE;
use crate::link::sealed::handshake::{self, initiates};
use crate::link::sealed::identity::tls::{Channel, HandshakeError};
use crate::link::sealed::identity::{is_for, two_of_one_name};
use crate::link::{Link, normalised};
use crate::log_limit::LogLimit;

/// Serves a guest; `None` after a handshake.
type Service = Option<Box<dyn FnOnce() + Send>>;

impl KeeperState {
    /// The accepting thread's loop.
    pub(super) fn accept_all(self: &Arc<Self>, listener: &TcpListener) {
        let mut refusals = LogLimit::default();
        while !self.is_stopping() {
            if self.is_resting() {
                // Connections wait for the vnetd that keeps the links.
                std::thread::sleep(Duration::from_millis(10));
                continue;
            }
            let timeout = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
            let ready = poll(&mut [PollFd::new(&listener.as_fd(), PollFlags::IN)], Some(&timeout));
            if !matches!(ready, Ok(1)) {
                continue;
            }
            match listener.accept() {
                Ok((stream, source)) => {
                    if let Err(why) = self.accept(stream, normalised(source).ip())
                        && let Some(suppressed) = refusals.allow()
                    {
                        let count = suppressed + 1;
                        tracing::warn!(
                            "refused {count} connections for sealed links, the last from {source}: {why}"
                        );
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    // Usually out of file descriptors: wait until some are free again.
                    tracing::warn!("cannot accept a connection for sealed links: {error}");
                    std::thread::sleep(TICK);
                }
            }
        }
    }

    /// Returns the links whose peer may connect, those whose remote is `source` first, and the number of the latter. A peer may
    /// have moved, even while this host was down; its certificate identifies it.
    fn candidates(&self, source: IpAddr) -> (Vec<Arc<Link>>, usize) {
        let links = self.links.lock();
        let configured =
            |link: &Arc<Link>| (link.options().remote != ANYWHERE).then_some(link.options().remote);
        let is_at = |link: &Arc<Link>| {
            [configured(link), link.remote()].iter().flatten().any(|remote| remote.ip() == source)
        };
        // Hosts that meet at a relay do not connect to each other.
        let possible = links.iter().filter(|link| link.via().is_none());
        let (known, others): (Vec<_>, Vec<_>) = possible.cloned().partition(is_at);
        let at_source = known.len();
        ([known, others].concat(), at_source)
    }

    /// Takes over a connection, or closes it and returns the reason.
    fn accept(self: &Arc<Self>, stream: TcpStream, source: IpAddr) -> Result<(), &'static str> {
        let (links, at_source) = self.candidates(source);
        if links.is_empty() {
            return Err("this host has no sealed link that waits for one");
        }
        let stranger = at_source == 0;
        let slot = self.gate.admit(source, stranger)?;
        let state = self.clone();
        let run = move || {
            // A connection from a link's remote is refused on behalf of that link only.
            let expected = if stranger { &links[..] } else { &links[..at_source] };
            match state.respond(stream, &links, expected) {
                Ok(service) => {
                    // From here on a guest no longer counts as a handshake: the relay has its own limits.
                    slot.succeeded();
                    if let Some(serve) = service {
                        serve();
                    }
                }
                Err(HandshakeError(why)) => {
                    drop(slot);
                    // An unknown address says nothing about a link whose remote is known.
                    if expected.iter().all(|link| !stranger || link.options().remote == ANYWHERE) {
                        state.refused(expected, &why);
                    }
                    let name = match expected {
                        [link] => format!("link {}", link.name()),
                        links => format!("one of {} links", links.len()),
                    };
                    if let Some(suppressed) = state.failures[usize::from(stranger)].lock().allow() {
                        tracing::warn!(suppressed, "{name}: no keys for {source}: {why}");
                    }
                }
            }
        };
        spawn("seal-respond", run).map(drop).map_err(|_| "no thread can be started")
    }

    /// Responds to a handshake or to a guest's request. `expected`: the links that record a refusal.
    fn respond(
        &self,
        stream: TcpStream,
        links: &[Arc<Link>],
        expected: &[Arc<Link>],
    ) -> Result<Service, HandshakeError> {
        // On Linux an accepted socket does not inherit O_NONBLOCK from its listener; this code does not rely on that.
        stream.set_nonblocking(false).map_err(|error| HandshakeError(error.to_string()))?;
        let identity = self.options.identity.current();
        let choose = |chain: &[CertificateDer<'_>]| {
            let link = links.iter().find(|link| link.seal().is_some_and(|seal| is_for(chain, &seal.peer)));
            link.ok_or_else(|| {
                if is_for(chain, identity.name()) {
                    return two_of_one_name(identity.name());
                }
                let peers: Vec<_> = seals(expected).map(|seal| &*seal.peer).collect();
                format!("the certificate is not for {}, which this link is sealed with", peers.join(" or "))
            })
        };
        let relay = self.options.relay.as_ref();
        let protocols: Vec<_> =
            [handshake::ALPN].into_iter().chain(relay.map(|relay| relay.alpn())).collect();
        let channel = Channel::accept(stream, &identity, &protocols)?;
        if let Some(relay) = relay.filter(|relay| channel.protocol() == Some(relay.alpn())) {
            let chain = channel.certificates()?;
            let host = choose(&chain).and_then(|link| {
                let name = link.seal().map(|seal| seal.peer.clone()).unwrap_or_default();
                identity.verify(&chain, &name).map(|_| name)
            });
            let known = seals(&self.links.lock()).map(|seal| seal.peer.clone()).collect();
            return relay.admit(Guest { channel, chain, host, known }).map(Some);
        }
        let link = handshake::agree(channel, &identity, |chain| choose(chain).map(|link| &**link))?;
        self.progress.lock().remove(&link.id);
        self.announce_keys();
        Ok(None)
    }

    /// Records on the link, if only one is possible, that the other side was refused.
    fn refused(&self, links: &[Arc<Link>], why: &str) {
        if let [link] = links
            && let Some(seal) = link.seal()
            && seal.current(link.next_number()).is_none()
            && !initiates(self.options.identity.current().name(), &seal.peer)
        {
            self.progress.lock().entry(link.id).or_default().failure = Some(why.into());
        }
    }
}
