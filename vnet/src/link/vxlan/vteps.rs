//! The VTEPs of a VXLAN link, and MAC learning among them.
//!
//! A link leads to one VTEP, its `remote`, or to several of one network, listed in `flood`. Multicast and unknown destinations
//! are flooded to all of them (RFC 7348 section 4.2 with head-end replication in place of the multicast group, as in `bridge fdb
//! append 00:00:00:00:00:00 … dst …`), or sent once to a multicast group if there is one. Other frames go to the VTEP where their
//! destination was last heard.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::frame::Frame;
use crate::link::socket::name::{Name, Target, normalised};
use crate::link::socket::udp::Socket;
use crate::wire::ethernet::Mac;

/// Maximum number of further VTEPs of one link. Each gets a copy of every flooded frame; beyond some hundred, use multicast.
pub const FLOOD_MAX: usize = 255;
/// Number of entries in the learning table of a link with several VTEPs. Colliding addresses evict each other, and frames to an
/// evicted address are flooded.
const PLACES: usize = 4096;
/// Ageing period in ms: an address that sends nothing for one to two periods is removed.
const AGEING_MS: u64 = 300_000;
/// Bit of an entry: the address was heard since the last ageing.
const FRESH: u64 = 0x8000;

/// Destinations of a VXLAN link besides its remote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VxlanOptions {
    /// Further VTEPs of the network, at the remote's port; at most [`FLOOD_MAX`].
    pub flood: Vec<IpAddr>,
    /// Multicast group for flooded frames, at the remote's port.
    pub group: Option<Ipv4Addr>,
    /// True to send TCP streams through a kernel VXLAN device if one can be created (kernel_device.rs).
    pub offload: bool,
}

impl Default for VxlanOptions {
    fn default() -> VxlanOptions {
        VxlanOptions { flood: vec![], group: None, offload: true }
    }
}

/// The VTEPs of one link; number 0 is the remote.
#[derive(Debug)]
pub(in crate::link) struct Vteps {
    addresses: Vec<IpAddr>,
    /// Destinations in the same order; the multicast group, if any, comes last.
    names: Vec<Target>,
    group: Option<Ipv4Addr>,
    /// Entries: address (48 bits), [`FRESH`], VTEP number plus 1; 0: empty. A link with only one VTEP has no table.
    places: Box<[AtomicU64]>,
    aged_ms: AtomicU64,
}

impl Vteps {
    pub(in crate::link) fn new(remote: SocketAddr, options: &VxlanOptions) -> Vteps {
        let address = |ip| normalised(SocketAddr::new(ip, remote.port()));
        let all: Vec<SocketAddr> =
            [remote.ip()].into_iter().chain(options.flood.iter().copied()).map(address).collect();
        let group = options.group.map(|group| address(group.into()));
        let places = if all.len() == 1 { 0 } else { PLACES };
        Vteps {
            addresses: all.iter().map(SocketAddr::ip).collect(),
            names: all.iter().chain(&group).copied().map(Target::new).collect(),
            group: options.group,
            places: (0..places).map(|_| AtomicU64::new(0)).collect(),
            aged_ms: AtomicU64::new(0),
        }
    }

    pub(in crate::link) fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// Numbers of the frame's destinations: one, or all (the group counts as one).
    #[inline]
    pub(in crate::link) fn destinations(&self, frame: &Frame) -> std::ops::Range<u16> {
        if let Some(vtep) = self.find(frame.dst) {
            return vtep..vtep + 1;
        }
        let all = self.addresses.len() as u16;
        if self.group.is_some() { all..all + 1 } else { 0..all }
    }

    fn find(&self, mac: Mac) -> Option<u16> {
        if self.places.is_empty() && self.group.is_none() {
            return Some(0);
        }
        let known = self.places.get(place(mac))?.load(Relaxed);
        (known >> 16 == mac.to_u64()).then_some((known & (FRESH - 1)) as u16).and_then(|n| n.checked_sub(1))
    }

    /// Learns that `mac` is behind VTEP `number`.
    #[inline]
    pub(in crate::link) fn heard(&self, mac: Mac, number: u16) {
        if let Some(place) = self.places.get(place(mac))
            && mac.is_unicast()
        {
            let known = mac.to_u64() << 16 | FRESH | u64::from(number + 1);
            if place.load(Relaxed) != known {
                place.store(known, Relaxed);
            }
        }
    }

    /// Removes addresses that have been silent too long.
    pub(in crate::link) fn age(&self, now_ms: u64) {
        let aged_ms = self.aged_ms.load(Relaxed);
        if now_ms.saturating_sub(aged_ms) < AGEING_MS
            || self.aged_ms.compare_exchange(aged_ms, now_ms, Relaxed, Relaxed).is_err()
        {
            return;
        }
        for place in &self.places {
            // An address heard at this moment may lose its mark: it then has one period left instead of two.
            let known = place.load(Relaxed);
            place.store(if known & FRESH != 0 { known & !FRESH } else { 0 }, Relaxed);
        }
    }

    /// The socket address of VTEP `number`; `None` when the socket cannot reach it.
    pub(in crate::link) fn name(&self, number: u16, socket: &Socket) -> Option<&Name> {
        socket.form_of(self.names.get(usize::from(number))?)
    }

    /// The multicast group for flooded frames.
    pub(in crate::link) fn group(&self) -> Option<Ipv4Addr> {
        self.group
    }
}

fn place(mac: Mac) -> usize {
    (mac.to_u64().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52) as usize % PLACES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vteps(flood: &[&str], group: Option<Ipv4Addr>) -> Vteps {
        let flood = flood.iter().map(|ip| ip.parse().unwrap()).collect();
        Vteps::new("10.0.0.2:4789".parse().unwrap(), &VxlanOptions { flood, group, ..Default::default() })
    }

    #[test]
    fn one_vtep_gets_everything() {
        let one = vteps(&[], None);
        assert_eq!(one.find(Mac::BROADCAST), Some(0));
        one.heard(Mac([2, 0, 0, 0, 0, 1]), 0);
        assert!(one.places.is_empty());
    }

    #[test]
    fn addresses_are_found_where_they_were_heard_last() {
        let all = vteps(&["10.0.0.3", "10.0.0.4"], None);
        let (a, b) = (Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]));
        assert_eq!((all.find(a), all.find(Mac::BROADCAST)), (None, None));
        all.heard(a, 2);
        all.heard(b, 0);
        all.heard(Mac::BROADCAST, 1);
        assert_eq!((all.find(a), all.find(b), all.find(Mac::BROADCAST)), (Some(2), Some(0), None));
        all.heard(a, 1);
        assert_eq!(all.find(a), Some(1));
        all.age(AGEING_MS);
        all.heard(b, 0);
        assert_eq!((all.find(a), all.find(b)), (Some(1), Some(0)), "one period is not enough");
        all.age(AGEING_MS + 1);
        assert_eq!(all.find(a), Some(1));
        all.age(2 * AGEING_MS);
        assert_eq!((all.find(a), all.find(b)), (None, Some(0)));
    }
}
