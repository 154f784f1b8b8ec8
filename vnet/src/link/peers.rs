//! Finds the link that a datagram came by, from its source address.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::link::Link;
use super::sealed::source_table::SourceTable;
use super::socket::name::normalised;
use super::vxlan::vteps::Vteps;

/// Which link a datagram came by. Control builds a new one when links change; but for where peers have moved to, it is immutable.
#[derive(Debug, Default)]
pub struct Peers {
    links: Vec<Arc<Link>>,
    by_address: HashMap<SocketAddr, usize>,
    /// VXLAN links by the addresses of their VTEPs, with the VTEP's number: a VTEP sends from many ports.
    by_vtep: HashMap<IpAddr, (usize, u16)>,
    ids: HashSet<u64>,
    pub(super) any_sealed: bool,
    sources: Arc<SourceTable>,
}

impl Peers {
    /// The table of `links`. Where two have the same remote address and a port in common, the first one gets the datagrams;
    /// control refuses such a configuration.
    pub fn build(links: &[Arc<Link>]) -> Peers {
        let mut peers = Peers { links: links.to_vec(), sources: SourceTable::new(links), ..Peers::default() };
        for (index, link) in links.iter().enumerate() {
            peers.ids.insert(link.id);
            peers.any_sealed |= link.seal().is_some();
            for (number, address) in (0..).zip(link.vteps().map_or(&[][..], Vteps::addresses)) {
                peers.by_vtep.entry(*address).or_insert((index, number));
            }
            for source in link.sources() {
                peers.by_address.entry(source).or_insert(index);
            }
        }
        peers
    }

    /// The link that a datagram from `source` came by: the one whose remote is this address and this port, or one of its ports
    /// where it has several. All of them are bound by the peer's bridge: other programs and users of its host have others.
    pub fn link(&self, source: SocketAddr) -> Option<&Arc<Link>> {
        let source = normalised(source);
        let index = self.by_address.get(&source).copied().or_else(|| self.sources.at(source))?;
        self.links.get(index)
    }

    /// The link that a datagram of unknown source says to be a keepalive of. Nothing of it has been opened.
    pub(super) fn tagged(&self, datagram: &[u8]) -> Option<&Arc<Link>> {
        self.links.get(self.sources.tagged(datagram)?)
    }

    /// The VXLAN link that a datagram from `source` came by, and the number of its VTEP: the one that lists this address,
    /// whatever the port.
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
