//! Matching datagrams to roaming links: source addresses and keepalive tags, and how links follow their peers (roaming.rs).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;

use super::aead::TAG_LEN;
use super::keepalive::{KEEPALIVE_LEN, Keepalive};
use super::session::Sources;
use crate::link::link::Link;
use crate::link::socket::name::{Name, normalised};
use crate::wire::native::{HEADER_LEN, Header, Kind};

/// Length of a sealed keepalive in bytes.
const KEEPALIVE_DATAGRAM_LEN: usize = HEADER_LEN + KEEPALIVE_LEN + TAG_LEN;

/// Source addresses and tags of links that follow their peers. This part of [`Peers`](crate::link::Peers) changes when a peer
/// roams, not with the configuration.
#[derive(Debug, Default)]
pub(in crate::link) struct SourceTable {
    /// Links that follow their peers, with their indexes among all links.
    links: Vec<(usize, Arc<Link>)>,
    entries: ArcSwap<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    by_address: HashMap<SocketAddr, usize>,
    by_tag: HashMap<u32, usize>,
}

impl SourceTable {
    /// A table of those of `links` that follow their peers; these links keep a reference to it.
    pub(in crate::link) fn new(links: &[Arc<Link>]) -> Arc<SourceTable> {
        let follow = links
            .iter()
            .cloned()
            .enumerate()
            .filter(|(_, link)| link.native().is_some_and(|native| native.place.follows()));
        let table = Arc::new(SourceTable { links: follow.collect(), entries: ArcSwap::default() });
        for seal in table.links.iter().filter_map(|(_, link)| link.seal()) {
            let sources: Arc<dyn Sources> = table.clone();
            seal.set_sources(&sources);
        }
        table.refresh();
        table
    }

    /// Index of the link whose peer was heard at `source` (normalised).
    #[inline]
    pub(in crate::link) fn at(&self, source: SocketAddr) -> Option<usize> {
        if self.links.is_empty() {
            return None;
        }
        self.entries.load().by_address.get(&source).copied()
    }

    /// Index of the link to which a datagram from an unknown source belongs if it is the keepalive that it claims to be. The
    /// datagram is not opened yet.
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

impl Sources for SourceTable {
    /// Reads all links again. The keeper calls it when a link has new keys or has moved.
    fn refresh(&self) {
        let mut entries = Entries::default();
        for (index, link) in &self.links {
            let relayed = link.via().map(|via| via.sources()).unwrap_or_default();
            let learned = link.native().into_iter().flat_map(|native| native.place.learned());
            for address in learned.chain(relayed) {
                entries.by_address.entry(address).or_insert(*index);
            }
            let Some(seal) = link.seal() else { continue };
            for tag in seal.tags() {
                // Two sessions have the same tag: the later one could not be found, so a rekey gives it another tag.
                if *entries.by_tag.entry(tag).or_insert(*index) != *index {
                    seal.request_rekey();
                }
            }
        }
        self.entries.store(Arc::new(entries));
    }
}

/// Tag of a keepalive: it takes the place of network and queue in other datagrams.
fn tag_of(header: &Header) -> u32 {
    header.network << 8 | u32::from(header.queue)
}

impl Link {
    /// Records the source address of an opened keepalive: if it is the newest, the peer is at `source`.
    #[cold]
    pub(in crate::link) fn heard_at(&self, header: &Header, source: &Name, payload: &[u8]) {
        let (Some(seal), Some(native)) = (self.seal(), self.native()) else { return };
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
            native.place.note(source);
        }
    }
}

/// Moves links to the addresses at which their peers were heard, and refreshes the source table after a move or a rekey.
pub(in crate::link) fn follow(links: &[Arc<Link>]) {
    let mut sources = None;
    for (link, native, seal) in links.iter().filter_map(|link| Some((link, link.native()?, link.seal()?))) {
        let (moved, changed) = match link.via() {
            Some(via) => via.settle(native.place.remote()),
            None => (native.place.follow(), false),
        };
        if let Some(remote) = moved {
            let relay = link.via().filter(|via| via.is_relay(remote));
            if link.via().is_some() {
                native.place.move_to(remote);
            }
            let by = relay.map_or(String::new(), |via| format!(", by way of {}", via.link));
            tracing::info!("link {}: {} is at {remote} now{by}", link.name(), seal.peer);
            link.path.restart();
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

#[cfg(test)]
#[path = "roaming_tests.rs"]
mod tests;
