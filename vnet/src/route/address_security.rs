//! Address security: checks the IP source addresses of a guest's frames against its configured addresses.
//!
//! It covers IPv4 and IPv6 sources, ARP senders and the targets of neighbour advertisements, also behind VLAN tags and SNAP headers.
//! Unlike a MAC address, an IP address is no part of a flow: the check runs for every frame of such a port, on the private copy of
//! its head, and the kernel's own path gets none of the port's flows.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::wire::ethernet::Mac;
use crate::wire::sender::{self, Senders};

/// The IP addresses that a guest may send from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressGuard(Box<[IpAddr]>);

impl AddressGuard {
    /// Allows `addresses`, and of IPv6 the link-local address that `mac` forms (RFC 4291, appendix A).
    pub fn new(addresses: &[IpAddr], mac: Option<Mac>) -> AddressGuard {
        let link_local = mac.map(|mac| {
            let [a, b, c, d, e, f] = mac.0;
            let octets = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f];
            IpAddr::from(Ipv6Addr::from(octets))
        });
        AddressGuard(addresses.iter().copied().chain(link_local).collect())
    }

    /// True when the frame that begins with `head` may enter. A frame whose addresses cannot be read may not.
    pub fn admits(&self, head: &[u8]) -> bool {
        match sender::senders(head) {
            Senders::NoIp => true,
            Senders::Unreadable => false,
            Senders::Of { source, claimed } => {
                self.allows(source) && claimed.is_none_or(|claimed| self.allows(claimed))
            }
        }
    }

    /// Hosts without an address send from the unspecified one (DHCP, ARP probes, duplicate address detection); nobody can answer it.
    fn allows(&self, address: IpAddr) -> bool {
        let unspecified = match address {
            IpAddr::V4(address) => address == Ipv4Addr::UNSPECIFIED,
            IpAddr::V6(address) => address == Ipv6Addr::UNSPECIFIED,
        };
        unspecified || self.0.contains(&address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([0x52, 0x54, 0, 0, 0, 1]);

    fn guard() -> AddressGuard {
        AddressGuard::new(&["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()], Some(MAC))
    }

    fn ethernet(kind: &[u8], payload: &[u8]) -> Vec<u8> {
        [&[0xff; 6], &MAC.0[..], kind, payload].concat()
    }

    fn ipv4(source: [u8; 4]) -> Vec<u8> {
        [&[0x45, 0, 0, 20, 0, 0, 0, 0, 64, 17, 0, 0][..], &source, &[10, 0, 0, 9]].concat()
    }

    fn ipv6(next: u8, source: &str, payload: &[u8]) -> Vec<u8> {
        let source: Ipv6Addr = source.parse().unwrap();
        let length = (payload.len() as u16).to_be_bytes();
        [&[0x60, 0, 0, 0][..], &length, &[next, 255], &source.octets(), &[0xff; 16], payload].concat()
    }

    fn arp(sender: [u8; 4]) -> Vec<u8> {
        [&[0, 1, 8, 0, 6, 4, 0, 1][..], &MAC.0, &sender, &[0; 6], &[10, 0, 0, 9]].concat()
    }

    fn advertisement(target: &str) -> Vec<u8> {
        let target: Ipv6Addr = target.parse().unwrap();
        [&[136, 0, 0, 0, 0, 0, 0, 0][..], &target.octets()].concat()
    }

    #[test]
    fn the_guests_own_addresses_enter() {
        let guard = guard();
        for source in [[10, 0, 0, 1], [0; 4]] {
            assert!(guard.admits(&ethernet(&[8, 0], &ipv4(source))));
            assert!(guard.admits(&ethernet(&[8, 6], &arp(source))));
        }
        for source in ["fd00::1", "::", "fe80::5054:ff:fe00:1"] {
            assert!(guard.admits(&ethernet(&[0x86, 0xdd], &ipv6(17, source, &[0; 8]))), "{source}");
        }
        let own = advertisement("fd00::1");
        assert!(guard.admits(&ethernet(&[0x86, 0xdd], &ipv6(58, "fd00::1", &own))));
        // No IP: LLDP, spanning tree.
        assert!(guard.admits(&ethernet(&[0x88, 0xcc], &[1; 46])));
        assert!(guard.admits(&ethernet(&[0, 38], &[0x42, 0x42, 3, 0, 0, 0])));
    }

    #[test]
    fn forged_addresses_do_not() {
        let guard = guard();
        let tag = [0x81, 0, 0, 5];
        for forged in [
            ethernet(&[8, 0], &ipv4([10, 0, 0, 2])),
            ethernet(&[8, 6], &arp([10, 0, 0, 2])),
            ethernet(&[0x86, 0xdd], &ipv6(17, "fd00::2", &[0; 8])),
            ethernet(&[0x86, 0xdd], &ipv6(17, "fe80::1", &[0; 8])),
            // Behind tags and a SNAP header.
            ethernet(&tag, &[&[8, 0][..], &ipv4([10, 0, 0, 2])].concat()),
            ethernet(&[0x88, 0xa8, 0, 7], &[&tag[..], &[8, 0], &ipv4([10, 0, 0, 2])].concat()),
            ethernet(&[0, 28], &[&[0xaa, 0xaa, 3, 0, 0, 0, 8, 0][..], &ipv4([10, 0, 0, 2])].concat()),
            // More tags than are read, a truncated header, and a header of another version.
            ethernet(&tag, &[&tag[..], &tag, &[8, 0], &ipv4([10, 0, 0, 1])].concat()),
            ethernet(&[8, 0], &ipv4([10, 0, 0, 1])[..19]),
            ethernet(&[8, 6], &arp([10, 0, 0, 1])[..17]),
            ethernet(&[0x86, 0xdd], &ipv4([10, 0, 0, 1])),
            // An advertisement for a neighbour's address, also behind a hop-by-hop header.
            ethernet(&[0x86, 0xdd], &ipv6(58, "fd00::1", &advertisement("fd00::2"))),
            ethernet(
                &[0x86, 0xdd],
                &ipv6(0, "fd00::1", &[&[58, 0, 1, 4, 0, 0, 0, 0][..], &advertisement("fd00::2")].concat()),
            ),
        ] {
            assert!(!guard.admits(&forged), "{forged:02x?}");
        }
    }
}
