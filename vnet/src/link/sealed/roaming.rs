//! Roaming: a sealed native link follows its peer to another address.
//!
//! Keepalives, five a second, carry a tag in their header, which both hosts derive from the session's keys (session.rs). A
//! datagram from an unknown source that has the size and header of a keepalive is looked up by that tag and opened with the one
//! key that the tag stands for. So a stranger costs two hash lookups, and whoever knows a tag one decryption of 24 bytes: never
//! a search among links, and less than the same datagram costs from a known address.
//!
//! An opened keepalive moves the link when its number is the highest that its key has opened: one that was held back or comes
//! late moves nothing, and a replayed one is not opened at all. The receiver only notes the address ([`RemoteAddress::note`]);
//! the [keeper](super::keeper) moves the link at its next look and renews the [`SourceTable`], by which datagrams from there are
//! found. Dispatchers load one pointer.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::Mutex;

use super::aead::TAG_LEN;
use super::keepalive::{KEEPALIVE_LEN, Keepalive};
use crate::link::socket::udp::Name;
use crate::link::{Encapsulation, Link, LinkOptions, PORTS_MAX, Tunnel, normalised};
use crate::wire::native::{HEADER_LEN, Header, Kind};

/// The remote of a link that learns it from its peer. No host has this address.
pub const ANYWHERE: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);
/// Bytes of a sealed keepalive.
const KEEPALIVE_DATAGRAM_LEN: usize = HEADER_LEN + KEEPALIVE_LEN + TAG_LEN;

/// The addresses of a host's ports, in the kernel's form.
#[derive(Debug)]
struct Names {
    /// The first port.
    remote: SocketAddr,
    /// For each port: the form for an IPv4 socket, where there is one, and for an IPv6 socket.
    list: Vec<[Option<Name>; 2]>,
}

impl Names {
    fn new(remote: SocketAddr, ports: u16) -> Names {
        let count = if remote == ANYWHERE { 0 } else { ports };
        let list = addresses(remote, count).map(|address| [false, true].map(|v6| Name::new(address, v6)));
        Names { remote, list: list.collect() }
    }
}

/// Where a link's peer is: the configured address, or the one that a sealed link's peer was last heard at.
#[derive(Debug)]
pub(in crate::link) struct RemoteAddress {
    ports: u16,
    configured: Names,
    /// Ports of the other host's guests, in the same forms, in the order of [`Tunnel::Direct`].
    direct: Vec<[Option<Name>; 2]>,
    /// The present address, where it is not the configured one; for links that follow their peer.
    learned: Option<ArcSwapOption<Names>>,
    /// Where the peer was heard, for the keeper.
    noted: Mutex<Option<SocketAddr>>,
}

impl RemoteAddress {
    /// As configured. `follows`: the peer can prove that it is elsewhere.
    pub(in crate::link) fn new(options: &LinkOptions, follows: bool) -> RemoteAddress {
        let guests = if let Tunnel::Direct(guests) = &options.tunnel { &guests[..] } else { &[] };
        let direct = guests.iter().map(|(_, port)| {
            let mut address = options.remote;
            address.set_port(*port);
            [false, true].map(|v6| Name::new(address, v6))
        });
        RemoteAddress {
            direct: direct.collect(),
            ports: options.ports,
            configured: Names::new(options.remote, options.ports),
            learned: follows.then(ArcSwapOption::empty),
            noted: Mutex::default(),
        }
    }

    #[inline]
    fn with<R>(&self, look: impl FnOnce(&Names) -> R) -> R {
        match self.learned.as_ref().map(ArcSwapOption::load).as_deref() {
            Some(Some(names)) => look(names),
            _ => look(&self.configured),
        }
    }

    /// The other host's first port; `None` while it is unknown.
    #[inline]
    pub(in crate::link) fn remote(&self) -> Option<SocketAddr> {
        Some(self.with(|names| names.remote)).filter(|remote| *remote != ANYWHERE)
    }

    /// Number of the other host's ports; 0 while its address is unknown.
    #[inline]
    pub(in crate::link) fn ports(&self) -> usize {
        self.with(|names| names.list.len())
    }

    /// The `port`th of them, in the form for an IPv6 or an IPv4 socket, and whether it is an IPv4 address.
    #[inline]
    pub(in crate::link) fn name(&self, port: usize, v6: bool) -> Option<(Name, bool)> {
        self.with(|names| Some((names.list.get(port)?[usize::from(v6)]?, names.remote.is_ipv4())))
    }

    /// The own port of the `guest`th guest that has one, in the form of [`RemoteAddress::name`].
    #[inline]
    pub(in crate::link) fn direct(&self, guest: usize, v6: bool) -> Option<(Name, bool)> {
        Some((self.direct.get(guest)?[usize::from(v6)]?, self.configured.remote.is_ipv4()))
    }

    /// Notes where the peer was heard by a keepalive that was opened.
    #[cold]
    pub(in crate::link) fn note(&self, remote: SocketAddr) {
        *self.noted.lock() = Some(remote);
    }

    /// Moves to the noted address. Returns it when it is another one than before.
    pub(in crate::link) fn follow(&self) -> Option<SocketAddr> {
        let learned = self.learned.as_ref()?;
        let remote = self.noted.lock().take().filter(|remote| self.remote() != Some(*remote))?;
        let names = (remote != self.configured.remote).then(|| Arc::new(Names::new(remote, self.ports)));
        learned.store(names);
        Some(remote)
    }

    /// Moves to `remote`.
    pub(in crate::link) fn move_to(&self, remote: SocketAddr) {
        if let Some(learned) = &self.learned {
            learned.store(Some(Arc::new(Names::new(remote, self.ports))));
        }
    }

    /// Returns to the configured address. True when the peer was elsewhere.
    pub(in crate::link) fn forget(&self) -> bool {
        self.learned.as_ref().is_some_and(|learned| learned.swap(None).is_some())
    }

    fn learned(&self) -> impl Iterator<Item = SocketAddr> {
        let names = self.learned.as_ref().and_then(ArcSwapOption::load_full);
        let (remote, count) = names.map_or((ANYWHERE, 0), |names| (names.remote, self.ports));
        addresses(remote, count)
    }
}

/// The addresses of `ports` ports from that of `remote` on, up to port 65535.
pub(in crate::link) fn addresses(remote: SocketAddr, ports: u16) -> impl Iterator<Item = SocketAddr> {
    let ports = (0..ports.min(PORTS_MAX)).map_while(move |offset| remote.port().checked_add(offset));
    ports.map(move |port| {
        let mut address = remote;
        address.set_port(port);
        address
    })
}

/// Source addresses and tags of links that follow their peers. The part of [`Peers`](crate::link::Peers) that changes when a peer
/// roams, not with the configuration.
#[derive(Debug, Default)]
pub(in crate::link) struct SourceTable {
    /// Links that follow, with their indexes among all links.
    links: Vec<(usize, Arc<Link>)>,
    entries: ArcSwap<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    by_address: HashMap<SocketAddr, usize>,
    by_tag: HashMap<u32, usize>,
}

impl SourceTable {
    /// The table of those of `links` that follow; they keep a reference to it.
    pub(in crate::link) fn new(links: &[Arc<Link>]) -> Arc<SourceTable> {
        let follow = links.iter().cloned().enumerate().filter(|(_, link)| link.place.learned.is_some());
        let table = Arc::new(SourceTable { links: follow.collect(), entries: ArcSwap::default() });
        for seal in table.links.iter().filter_map(|(_, link)| link.seal()) {
            seal.set_sources(&table);
        }
        table.refresh();
        table
    }

    /// Reads all links again: called by the keeper when one has new keys or has moved.
    pub(in crate::link) fn refresh(&self) {
        let mut entries = Entries::default();
        for (index, link) in &self.links {
            let relayed = link.via().map(|via| via.sources()).unwrap_or_default();
            for address in link.place.learned().chain(relayed) {
                entries.by_address.entry(address).or_insert(*index);
            }
            let Some(seal) = link.seal() else { continue };
            for tag in seal.tags() {
                // Two sessions with one tag: the later one could not be found, so it gets another by a rekey.
                if *entries.by_tag.entry(tag).or_insert(*index) != *index {
                    seal.request_rekey();
                }
            }
        }
        self.entries.store(Arc::new(entries));
    }

    /// Index of the link whose peer was heard at `source` (normalised).
    #[inline]
    pub(in crate::link) fn at(&self, source: SocketAddr) -> Option<usize> {
        if self.links.is_empty() {
            return None;
        }
        self.entries.load().by_address.get(&source).copied()
    }

    /// Index of the link whose keepalive a datagram from an unknown source claims to be. Nothing of it has been opened.
    #[cold]
    pub(in crate::link) fn tagged(&self, datagram: &[u8]) -> Option<usize> {
        if datagram.len() != KEEPALIVE_DATAGRAM_LEN || self.links.is_empty() {
            return None;
        }
        let (header, _) = Header::parse(datagram).ok()?;
        let is_keepalive = header.sealed && header.kind == Kind::Keepalive;
        is_keepalive.then(|| self.entries.load().by_tag.get(&tag_of(&header)).copied())?
    }
}

/// A keepalive's tag: it stands where other datagrams have network and queue.
fn tag_of(header: &Header) -> u32 {
    header.network << 8 | u32::from(header.queue)
}

impl Link {
    /// The other host's address: as configured, or where it was heard; `None` while it is unknown.
    pub fn remote(&self) -> Option<SocketAddr> {
        self.place.remote()
    }

    /// Takes the source address of a keepalive that was opened: `source` is where the peer is, if it is the newest.
    #[cold]
    pub(in crate::link) fn heard_at(&self, header: &Header, source: &Name, payload: &[u8]) {
        let Some(seal) = self.seal() else { return };
        let source = source.address().map(normalised);
        if let (Some(via), Some(source)) = (self.via(), source) {
            if seal.keyring().is_live(header.epoch)
                && let Some(keepalive) = Keepalive::parse(payload)
            {
                via.heard(source, keepalive.hears_directly, (tag_of(header), keepalive.sent_us));
            }
        } else if let Some(source) = source
            && self.remote() != Some(source)
            && seal.keyring().is_newest(header.epoch, header.number)
        {
            self.place.note(source);
        }
    }
}

/// Moves links to where their peers were heard, and refreshes the source table after a move or a rekey.
pub(in crate::link) fn follow(links: &[Arc<Link>]) {
    let mut sources = None;
    for (link, seal) in links.iter().filter_map(|link| Some((link, link.seal()?))) {
        let (moved, changed) = match link.via() {
            Some(via) => via.settle(link.place.remote()),
            None => (link.place.follow(), false),
        };
        if let Some(remote) = moved {
            let relay = link.via().filter(|via| via.is_relay(remote));
            if link.via().is_some() {
                link.place.move_to(remote);
            }
            let by = relay.map_or(String::new(), |via| format!(", by way of {}", via.link));
            tracing::info!("link {}: {} is at {remote} now{by}", link.name(), seal.peer);
            link.forget_path();
        }
        if seal.has_changed() || changed || moved.is_some() {
            sources = seal.sources().or(sources);
        }
    }
    // One table lists all links of a host.
    if let Some(sources) = sources {
        sources.refresh();
    }
}

/// Whether a link's peer can prove where it is.
pub(in crate::link) fn follows(options: &LinkOptions, is_sealed: bool) -> bool {
    is_sealed && options.encapsulation == Encapsulation::Native
}

#[cfg(test)]
#[path = "roaming_tests.rs"]
mod tests;
