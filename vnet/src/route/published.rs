//! Stations on other hosts, as control publishes them: the link to each station, its IP addresses, and the links between which
//! this host relays.
//!
//! While control is in sync with the overlay's store, published addresses are *firm*: like configured ones, no frame can move
//! them, so a guest that spoofs another station's address attracts no traffic. While the store is unreachable they are
//! *advisory*: they never expire, but a learned address takes precedence.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use crate::frame::{NetworkId, PortId};
use crate::wire::ethernet::Mac;

/// Stations on other hosts. Part of a [`Table`](super::Table): immutable, replaced as a whole. Shares the large maps with
/// its creator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// True when learned addresses must not override `places`.
    pub firm: bool,
    /// Each station's link, as an index into `links`. Holds no station of this host.
    pub places: Arc<HashMap<(NetworkId, Mac), u16>>,
    /// Ports of the links; [`PortId::NONE`] for a link that does not exist.
    pub links: Vec<PortId>,
    /// MAC of each IP address, on this host or another, for ARP/ND suppression.
    pub neighbours: Arc<HashMap<(NetworkId, IpAddr), Mac>>,
    /// Links to hosts that this one relays for: exempt from split horizon (the spokes of RFC 4762, section 10).
    pub spokes: HashSet<PortId>,
    /// Stations that have migrated from this host: frames for them are forwarded from link to link, past split horizon.
    pub forwarded: HashSet<(NetworkId, Mac)>,
    /// Networks in which this host is configured to relay between all of its links.
    pub relayed: HashSet<NetworkId>,
}

impl Published {
    /// The link to a station.
    pub(super) fn place(&self, network: NetworkId, mac: Mac) -> Option<PortId> {
        if self.places.is_empty() {
            return None;
        }
        let link = *self.places.get(&(network, mac))?;
        self.links.get(usize::from(link)).copied().filter(|port| *port != PortId::NONE)
    }
}
