//! What control says of stations on other hosts: behind which link each is, which IP addresses it has, and between which links
//! this host relays.
//!
//! While control is in step with its store, what is published is *firm*: like a configured address it is found where it is
//! said to be, and no frame can move it, so that a guest that uses another's address draws no traffic to itself. While the
//! store is away it is *advisory*: it still holds for ever, but a station that is heard elsewhere is found there.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use crate::frame::{NetworkId, PortId};
use crate::wire::ethernet::Mac;

/// Stations on other hosts. Part of a [`Table`](super::Table): immutable, replaced as a whole. The large maps are shared with
/// whoever made it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// Whether nothing that is learned overrides `places`.
    pub firm: bool,
    /// The link behind which each station is, by its place in `links`. None of the stations is on this host.
    pub places: Arc<HashMap<(NetworkId, Mac), u16>>,
    /// Links; [`PortId::NONE`] for one that is not there.
    pub links: Vec<PortId>,
    /// The station that has an IP address, on this host or another. ARP and ND requests are answered from it.
    pub neighbours: Arc<HashMap<(NetworkId, IpAddr), Mac>>,
    /// Links for whose hosts this one relays: exempt from split horizon (the spokes of RFC 4762, section 10).
    pub spokes: HashSet<PortId>,
    /// Networks in which this host relays between all of its links, because it was told to.
    pub relayed: HashSet<NetworkId>,
}

impl Published {
    /// The link behind which a station is.
    pub(super) fn place(&self, network: NetworkId, mac: Mac) -> Option<PortId> {
        if self.places.is_empty() {
            return None;
        }
        let link = *self.places.get(&(network, mac))?;
        self.links.get(usize::from(link)).copied().filter(|port| *port != PortId::NONE)
    }
}
