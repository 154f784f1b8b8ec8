//! Where a link's other host is: where the configuration says, or where a sealed link's peer was heard last.
//!
//! A sealed native link *follows* its peer. Keepalives, five a second, carry a tag in their header, which both hosts derive
//! from the keys of the session (session.rs). A datagram of unknown source that has the size and the header of a keepalive is
//! looked up by that tag, and opened with the one key that the tag stands for. So what comes from nobody costs two look-ups
//! in hash tables, and whoever knows a tag one decryption of 24 bytes: never a search among links, however many there are, and
//! less than the same datagram costs from an address that is known.
//!
//! A keepalive that opens tells where the peer is when its number is the highest that its key has opened: one that was held
//! back or comes late is opened like any other and moves nothing, one that is repeated is not opened at all. The receiver only
//! leaves a note ([`Place::propose`]); the [keeper](crate::link::sealed::keeper) takes it up at its next look, puts the address in
//! place, and renews the [`Roster`], by which datagrams from there are found. Dispatchers load one pointer.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::{ArcSwap, ArcSwapOption};

use crate::link::rendezvous::choice::Via;
use crate::link::sealed::aead::TAG_LEN;
use crate::link::sealed::session::{KEEPALIVE_LEN, hears, sent_us};
use crate::link::socket::udp::Name;
use crate::link::{Encapsulation, Link, LinkOptions, PORTS_MAX, Tunnel, normalised};
use crate::wire::native::{HEADER_LEN, Header, Kind};

/// The remote of a link that learns it from its peer. No host has this address.
pub const ANYWHERE: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);
/// Bytes of a sealed keepalive.
const KEEPALIVE_DATAGRAM_LEN: usize = HEADER_LEN + KEEPALIVE_LEN + TAG_LEN;

/// The addresses of a host's ports, in the forms that sockets send to.
#[derive(Debug)]
struct Names {
    /// The first port.
    remote: SocketAddr,
    /// For each port the address for an IPv4 socket, if it is one, and for an IPv6 socket.
    list: Vec<[Option<Name>; 2]>,
}

impl Names {
    fn new(remote: SocketAddr, ports: u16) -> Names {
        let count = if remote == ANYWHERE { 0 } else { ports };
        let list = addresses(remote, count).map(|address| [false, true].map(|v6| Name::new(address, v6)));
        Names { remote, list: list.collect() }
    }
}

/// See the module's comment.
#[derive(Debug)]
pub(in crate::link) struct Place {
    ports: u16,
    declared: Names,
    /// Ports of the other host's guests, in the same forms, in the order of [`Tunnel::Direct`].
    direct: Vec<[Option<Name>; 2]>,
    /// Of a link that follows its peer: where that is, when it is not where it was declared.
    learned: Option<ArcSwapOption<Names>>,
    /// Where the peer was heard, and the keeper has not seen yet.
    proposed: Mutex<Option<SocketAddr>>,
}

impl Place {
    /// Where the options say; `follows` when the peer can prove to be elsewhere.
    pub(in crate::link) fn new(options: &LinkOptions, follows: bool) -> Place {
        let guests = if let Tunnel::Direct(guests) = &options.tunnel { &guests[..] } else { &[] };
        let direct = guests.iter().map(|(_, port)| {
            let mut address = options.remote;
            address.set_port(*port);
            [false, true].map(|v6| Name::new(address, v6))
        });
        Place {
            direct: direct.collect(),
            ports: options.ports,
            declared: Names::new(options.remote, options.ports),
            learned: follows.then(ArcSwapOption::empty),
            proposed: Mutex::default(),
        }
    }

    #[inline]
    fn with<R>(&self, look: impl FnOnce(&Names) -> R) -> R {
        match self.learned.as_ref().map(ArcSwapOption::load).as_deref() {
            Some(Some(names)) => look(names),
            _ => look(&self.declared),
        }
    }

    /// The first port of the other host; `None` while it is not known.
    #[inline]
    pub(in crate::link) fn remote(&self) -> Option<SocketAddr> {
        Some(self.with(|names| names.remote)).filter(|remote| *remote != ANYWHERE)
    }

    /// Ports that the other host is known to have.
    #[inline]
    pub(in crate::link) fn ports(&self) -> usize {
        self.with(|names| names.list.len())
    }

    /// The `port`th of them, in the form for an IPv6 or an IPv4 socket, and whether it is an IPv4 address.
    #[inline]
    pub(in crate::link) fn name(&self, port: usize, v6: bool) -> Option<(Name, bool)> {
        self.with(|names| Some((names.list.get(port)?[usize::from(v6)]?, names.remote.is_ipv4())))
    }

    /// The own port of the `guest`th of the guests that have one, as [`Place::name`] tells it.
    #[inline]
    pub(in crate::link) fn direct(&self, guest: usize, v6: bool) -> Option<(Name, bool)> {
        Some((self.direct.get(guest)?[usize::from(v6)]?, self.declared.remote.is_ipv4()))
    }

    /// Notes where the peer has proved to be.
    #[cold]
    pub(in crate::link) fn propose(&self, remote: SocketAddr) {
        *lock(&self.proposed) = Some(remote);
    }

    /// Puts in place what was proposed, and says what that was when it is news.
    pub(in crate::link) fn follow(&self) -> Option<SocketAddr> {
        let learned = self.learned.as_ref()?;
        let remote = lock(&self.proposed).take().filter(|remote| self.remote() != Some(*remote))?;
        let names = (remote != self.declared.remote).then(|| Arc::new(Names::new(remote, self.ports)));
        learned.store(names);
        Some(remote)
    }

    /// Puts `remote` in place.
    pub(in crate::link) fn put(&self, remote: SocketAddr) {
        if let Some(learned) = &self.learned {
            learned.store(Some(Arc::new(Names::new(remote, self.ports))));
        }
    }

    /// Goes back to where the configuration says. True when it was elsewhere.
    pub(in crate::link) fn forget(&self) -> bool {
        self.learned.as_ref().is_some_and(|learned| learned.swap(None).is_some())
    }

    fn learned(&self) -> impl Iterator<Item = SocketAddr> {
        let names = self.learned.as_ref().and_then(ArcSwapOption::load_full);
        let (remote, count) = names.map_or((ANYWHERE, 0), |names| (names.remote, self.ports));
        addresses(remote, count)
    }
}

/// What this lock protects is whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The addresses of `ports` ports from that of `remote` on. Ports beyond the last one there is are nobody's.
pub(in crate::link) fn addresses(remote: SocketAddr, ports: u16) -> impl Iterator<Item = SocketAddr> {
    let ports = (0..ports.min(PORTS_MAX)).map_while(move |offset| remote.port().checked_add(offset));
    ports.map(move |port| {
        let mut address = remote;
        address.set_port(port);
        address
    })
}

/// How the datagrams of links that follow their peers are found. A part of [`Peers`](super::Peers) that changes with the
/// peers, not with the configuration.
#[derive(Debug, Default)]
pub(in crate::link) struct Roster {
    /// Links that follow, and their places among all links.
    links: Vec<(usize, Arc<Link>)>,
    found: ArcSwap<Found>,
}

#[derive(Debug, Default)]
struct Found {
    by_address: HashMap<SocketAddr, usize>,
    by_tag: HashMap<u32, usize>,
}

impl Roster {
    /// The roster of those of `links` that follow; they know it from now on.
    pub(in crate::link) fn new(links: &[Arc<Link>]) -> Arc<Roster> {
        let follow = links.iter().cloned().enumerate().filter(|(_, link)| link.place.learned.is_some());
        let roster = Arc::new(Roster { links: follow.collect(), found: ArcSwap::default() });
        for seal in roster.links.iter().filter_map(|(_, link)| link.seal()) {
            seal.set_roster(&roster);
        }
        roster.refresh();
        roster
    }

    /// Looks at all links anew. For the keeper, when one has got keys or has moved.
    pub(in crate::link) fn refresh(&self) {
        let mut found = Found::default();
        for (index, link) in &self.links {
            let by_another = link.via.as_ref().map(Via::sources).unwrap_or_default();
            for address in link.place.learned().chain(by_another) {
                found.by_address.entry(address).or_insert(*index);
            }
            let Some(seal) = link.seal() else { continue };
            for tag in seal.tags() {
                // Of two sessions with one tag, the later could not be found: it gets another.
                if *found.by_tag.entry(tag).or_insert(*index) != *index {
                    seal.renew();
                }
            }
        }
        self.found.store(Arc::new(found));
    }

    /// The link whose peer was heard at `source` (normalised).
    #[inline]
    pub(in crate::link) fn at(&self, source: SocketAddr) -> Option<usize> {
        if self.links.is_empty() {
            return None;
        }
        self.found.load().by_address.get(&source).copied()
    }

    /// The link that a datagram of unknown source says to be a keepalive of.
    #[cold]
    pub(in crate::link) fn tagged(&self, datagram: &[u8]) -> Option<usize> {
        if datagram.len() != KEEPALIVE_DATAGRAM_LEN || self.links.is_empty() {
            return None;
        }
        let (header, _) = Header::parse(datagram).ok()?;
        let is_keepalive = header.sealed && header.kind == Kind::Keepalive;
        is_keepalive.then(|| self.found.load().by_tag.get(&tag_of(&header)).copied())?
    }
}

/// A keepalive's tag: where other datagrams have network and queue.
fn tag_of(header: &Header) -> u32 {
    header.network << 8 | u32::from(header.queue)
}

impl Link {
    /// Where the other host is: where it was declared to be, or where it was heard; `None` while nothing is known.
    pub fn remote(&self) -> Option<SocketAddr> {
        self.place.remote()
    }

    /// Takes note of where a keepalive came from that has been opened.
    #[cold]
    pub(in crate::link) fn heard_at(&self, header: &Header, source: &Name, payload: &[u8]) {
        let Some(seal) = self.seal() else { return };
        let source = source.address().map(normalised);
        if let (Some(via), Some(source)) = (&self.via, source) {
            if seal.keyring().is_live(header.epoch) {
                via.heard(source, hears(payload), (tag_of(header), sent_us(payload)));
            }
        } else if let Some(source) = source
            && self.remote() != Some(source)
            && seal.keyring().is_newest(header.epoch, header.number)
        {
            self.place.propose(source);
        }
    }
}

/// Moves links to where their peers were heard, and has the datagrams of new sessions and new places found.
pub(in crate::link) fn follow(links: &[Arc<Link>]) {
    let mut roster = None;
    for (link, seal) in links.iter().filter_map(|link| Some((link, link.seal()?))) {
        let (moved, known) = match &link.via {
            Some(via) => via.settle(&link.place),
            None => (link.place.follow(), false),
        };
        if let Some(remote) = moved {
            let between = link.via.as_ref().filter(|via| via.is_between(remote));
            let by = between.map_or(String::new(), |via| format!(", by way of {}", via.link));
            tracing::info!("link {}: {} is at {remote} now{by}", link.name(), seal.peer);
            link.forget_path();
        }
        if seal.has_changed() || known || moved.is_some() {
            roster = seal.roster().or(roster);
        }
    }
    // All links of a host are in one.
    if let Some(roster) = roster {
        roster.refresh();
    }
}

/// Whether a link's peer can prove where it is.
pub(in crate::link) fn follows(options: &LinkOptions, is_sealed: bool) -> bool {
    is_sealed && options.encapsulation == Encapsulation::Native
}

#[cfg(test)]
#[path = "roaming_tests.rs"]
mod tests;
