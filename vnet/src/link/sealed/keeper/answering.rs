//! The keeper's other half: handshakes that others begin, and hosts that come to meet each other by this one.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::pki_types::CertificateDer;

use super::{HANDSHAKES_MAX, Shared, TICK, lock, seals, spawn};
use crate::link::rendezvous::client;
use crate::link::rendezvous::relay::Guest;
use crate::link::sealed::handshake::{self, Channel, HandshakeError, initiates};
use crate::link::sealed::identity::{Identity, is_for};
use crate::link::sealed::roaming::ANYWHERE;
use crate::link::{Link, normalised};

/// Handshakes from one address.
const HANDSHAKES_PER_ADDRESS_MAX: usize = 4;
/// Those from addresses that no link has: the remotes of links find room whatever strangers do.
const HANDSHAKES_OF_STRANGERS_MAX: usize = HANDSHAKES_MAX / 2;

/// What came of a handshake: keys, or a host who wants to meet another one.
type Answered = Result<Option<Guest>, HandshakeError>;

/// Handshakes of others under way.
#[derive(Default)]
pub(super) struct Taken {
    by_address: HashMap<IpAddr, usize>,
    strangers: usize,
}

impl Shared {
    /// The accepting thread's loop.
    pub(super) fn accept_all(self: &Arc<Shared>, listener: &TcpListener) {
        let mut refused = Refused::default();
        while !self.is_stopping() {
            let timeout = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
            let ready = poll(&mut [PollFd::new(&listener.as_fd(), PollFlags::IN)], Some(&timeout));
            if !matches!(ready, Ok(1)) {
                continue;
            }
            match listener.accept() {
                Ok((stream, source)) => {
                    if let Err(why) = self.accept(stream, normalised(source).ip()) {
                        refused.tell(source, why);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    // Out of file descriptors, usually: wait until some are free again.
                    tracing::warn!("cannot accept a connection for sealed links: {error}");
                    std::thread::sleep(TICK);
                }
            }
        }
    }

    /// Takes a connection, or says why not; it is closed then.
    fn accept(self: &Arc<Shared>, stream: TcpStream, source: IpAddr) -> Result<(), &'static str> {
        let (known, anywhere): (Vec<_>, Vec<_>) = {
            let links = lock(&self.links);
            let declared =
                |link: &Arc<Link>| (link.options.remote != ANYWHERE).then_some(link.options.remote);
            let is_at = |link: &Arc<Link>| {
                [declared(link), link.remote()].iter().flatten().any(|remote| remote.ip() == source)
            };
            // With those that meet by a third host no connection begins here.
            let links = links.iter().filter(|link| link.via.is_none());
            let possible = links.filter(|link| declared(link).is_none() || is_at(link));
            possible.cloned().partition(is_at)
        };
        let stranger = known.is_empty();
        let links = [known, anywhere].concat();
        if links.is_empty() {
            return Err("no sealed link has this remote");
        }
        {
            let mut taken = lock(&self.taken);
            let all: usize = taken.by_address.values().sum();
            let full = all >= HANDSHAKES_MAX || stranger && taken.strangers >= HANDSHAKES_OF_STRANGERS_MAX;
            let own = taken.by_address.entry(source).or_default();
            if full || *own >= HANDSHAKES_PER_ADDRESS_MAX {
                if *own == 0 {
                    taken.by_address.remove(&source);
                }
                return Err("too many handshakes are under way");
            }
            *own += 1;
            taken.strangers += usize::from(stranger);
        }
        let shared = self.clone();
        let run = move || {
            let answered = shared.respond(stream, &links);
            // Who has come to meet another one is not counted among handshakes any more (meeting.rs has its own bounds).
            shared.release(source, stranger);
            match answered {
                Ok(None) => {}
                Ok(Some(guest)) => shared.host(guest, source),
                Err(HandshakeError(why)) => {
                    shared.refused(&links, &why);
                    let name = match &links[..] {
                        [link] => format!("link {}", link.name()),
                        links => format!("one of {} links", links.len()),
                    };
                    tracing::warn!("{name}: no keys for {source}: {why}");
                }
            }
        };
        spawn("seal-respond", run).map(drop).map_err(|_| {
            self.release(source, stranger);
            "no thread can be started"
        })
    }

    fn release(&self, source: IpAddr, stranger: bool) {
        let mut taken = lock(&self.taken);
        taken.strangers -= usize::from(stranger);
        if let Some(count) = taken.by_address.get_mut(&source) {
            *count -= 1;
            if *count == 0 {
                taken.by_address.remove(&source);
            }
        }
    }

    /// Answers a handshake, which may be that of a host who has come to meet another one here.
    fn respond(&self, stream: TcpStream, links: &[Arc<Link>]) -> Answered {
        // On Linux a stream does not take over that its listener does not wait; better said than known.
        stream.set_nonblocking(false).map_err(|error| HandshakeError(error.to_string()))?;
        let identity = self.options.identity.current();
        let choose = |chain: &[CertificateDer<'_>]| {
            let link = links.iter().find(|link| link.seal().is_some_and(|seal| is_for(chain, &seal.peer)));
            link.cloned().ok_or_else(|| {
                let peers: Vec<_> =
                    links.iter().filter_map(|link| link.seal()).map(|seal| &*seal.peer).collect();
                format!("the certificate is not for {}, which this link is sealed with", peers.join(" or "))
            })
        };
        let protocols = [handshake::ALPN, client::ALPN];
        let channel = Channel::accept(
            stream,
            &identity,
            if self.meetings.is_some() { &protocols } else { &protocols[..1] },
        )?;
        if channel.protocol() == Some(client::ALPN) {
            return self.guest(channel, &identity, choose).map(Some);
        }
        let link = handshake::agree(channel, &identity, choose)?;
        lock(&self.progress).remove(&link.id);
        Ok(None)
    }

    /// Who has come, and whom it wants to meet: both have to be hosts that this one has sealed links with.
    fn guest(
        &self,
        mut channel: Channel<TcpStream>,
        identity: &Identity,
        choose: impl FnOnce(&[CertificateDer<'_>]) -> Result<Arc<Link>, String>,
    ) -> Result<Guest, HandshakeError> {
        let chain = channel.certificates()?;
        let client::Message::Meet(wanted) = client::Message::read(&mut channel)? else {
            return Err(HandshakeError("the other host speaks out of turn".into()));
        };
        let links = lock(&self.links).clone();
        let known = choose(&chain).and_then(|link| {
            let name = link.seal().map(|seal| seal.peer.clone()).unwrap_or_default();
            identity.verify(&chain, &name)?;
            let is_known = seals(&links).any(|seal| seal.peer.eq_ignore_ascii_case(&wanted));
            let other = is_known && !wanted.eq_ignore_ascii_case(&name);
            other.then_some(name).ok_or_else(|| {
                format!("this host has no link with {}", handshake::one_line(wanted.as_bytes()))
            })
        });
        match known {
            Ok(name) => Ok(Guest { channel, chain, name, wanted }),
            Err(why) => {
                let _ = channel.send_bytes(&client::Message::Refuse(why.clone()).to_bytes());
                channel.close();
                Err(HandshakeError(why))
            }
        }
    }

    /// Lets a guest meet whom it wants to.
    fn host(&self, guest: Guest, source: IpAddr) {
        let (name, wanted) = (guest.name.clone(), guest.wanted.clone());
        if let Some(meetings) = &self.meetings
            && let Err(HandshakeError(why)) = meetings.host(guest)
        {
            tracing::debug!("{name} at {source} has not met {wanted}: {why}");
        }
    }

    /// Notes that the other side could not be let in; where it is clear which link that was for, the link says so.
    fn refused(&self, links: &[Arc<Link>], why: &str) {
        if let [link] = links
            && let Some(seal) = link.seal()
            && seal.current(link.next_number()).is_none()
            && !initiates(self.options.identity.current().name(), &seal.peer)
        {
            lock(&self.progress).entry(link.id).or_default().failure = Some(why.into());
        }
    }
}

/// Connections that were refused at once: told, but not one by one.
#[derive(Default)]
struct Refused {
    count: u64,
    told: Option<Instant>,
}

impl Refused {
    fn tell(&mut self, source: SocketAddr, why: &str) {
        const EVERY: Duration = Duration::from_secs(10);
        self.count += 1;
        if self.told.is_none_or(|told| told.elapsed() >= EVERY) {
            let count = std::mem::take(&mut self.count);
            tracing::warn!("refused {count} connections for sealed links, the last from {source}: {why}");
            self.told = Some(Instant::now());
        }
    }
}
