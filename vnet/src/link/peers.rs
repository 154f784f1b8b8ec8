//! Maps a datagram's source address to its link.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::link::Link;
use super::sealed::source_table::SourceTable;
use super::socket::name::normalised;
use super::vxlan::vteps::Vteps;

/// Table from source addresses to links. Control builds a new table when links change; it is immutable except for roaming peers.
#[derive(Debug, Default)]
pub struct Peers {
    links: Vec<Arc<Link>>,
    by_address: HashMap<SocketAddr, usize>,
    /// VXLAN links by VTEP address alone, with the VTEP's number: a VTEP sends from many ports.
    by_vtep: HashMap<IpAddr, (usize, u16)>,
    /// `vnet` links by address alone, for datagrams from ports that no link has.
    by_host: HashMap<IpAddr, usize>,
    ids: HashSet<u64>,
    pub(super) any_sealed: bool,
    sources: Arc<SourceTable>,
}

impl Peers {
    /// Builds the table of `links`. If two links share a remote address and port, the first one gets the datagrams; control
    /// refuses such configurations.
    pub fn build(links: &[Arc<Link>]) -> Peers {
        let mut peers = Peers { links: links.to_vec(), sources: SourceTable::new(links), ..Peers::default() };
        for (index, link) in links.iter().enumerate() {
            peers.ids.insert(link.id);
            peers.any_sealed |= link.seal().is_some();
            for (number, address) in (0..).zip(link.vteps().map_or(&[][..], Vteps::addresses)) {
                peers.by_vtep.entry(*address).or_insert((index, number));
            }
            if link.takes_any_port() {
                peers.by_host.entry(link.options().remote.ip()).or_insert(index);
            }
            for source in link.sources() {
                peers.by_address.entry(source).or_insert(index);
            }
        }
        peers
    }

    /// The link of a datagram from `source`: matches the remote's address and any of its configured ports. The peer's bridge
    /// binds all of these ports; other programs on its host use other ports.
    pub fn link(&self, source: SocketAddr) -> Option<&Arc<Link>> {
        let source = normalised(source);
        let index = self.by_address.get(&source).copied().or_else(|| self.sources.at(source))?;
        self.links.get(index)
    }

    /// The `vnet` link that accepts any port of the host at `source`. Call [`Peers::link`] first.
    pub(super) fn host(&self, source: SocketAddr) -> Option<&Arc<Link>> {
        if self.by_host.is_empty() {
            return None;
        }
        self.links.get(*self.by_host.get(&normalised(source).ip())?)
    }

    /// True if a link takes datagrams from `source`.
    pub fn knows(&self, source: SocketAddr) -> bool {
        self.link(source).or_else(|| self.host(source)).is_some() || self.vtep(source).is_some()
    }

    /// The link to which a datagram of unknown source belongs if it is the keepalive that it claims to be. Not authenticated yet.
    pub(super) fn tagged(&self, datagram: &[u8]) -> Option<&Arc<Link>> {
        self.links.get(self.sources.tagged(datagram)?)
    }

    /// The VXLAN link that lists this source address, whatever the port, and the number of its VTEP.
    pub fn vtep(&self, source: SocketAddr) -> Option<(&Arc<Link>, u16)> {
        let (link, number) = self.by_vtep.get(&normalised(source).ip())?;
        Some((&self.links[*link], *number))
    }

    /// All links.
    pub fn links(&self) -> &[Arc<Link>] {
        &self.links
    }

    pub(super) fn contains(&self, id: u64) -> bool {
        self.ids.contains(&id)
    }
}
