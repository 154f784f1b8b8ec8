//! The IP addresses that a frame claims to come from: the source of an IP packet, the sender of an ARP packet, and the address that a
//! neighbour advertisement announces.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::ethernet::{self, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use super::ip::{self, ICMPV6};

/// EtherTypes below this are lengths (IEEE 802.3, 3.2.6).
const LENGTH_MAX: u16 = 1500;
/// LLC and SNAP headers of encapsulated EtherTypes (RFC 1042).
const SNAP: [u8; 6] = [0xaa, 0xaa, 3, 0, 0, 0];
/// Hardware type Ethernet, protocol type IPv4, and the address length of each.
const ARP_KIND: [u8; 6] = [0, 1, 8, 0, 6, 4];
const ADVERTISEMENT: u8 = 136;

/// The IP addresses that a frame claims to come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Senders {
    /// It carries neither IP nor ARP.
    NoIp,
    /// It claims to, but its addresses cannot be read.
    Unreadable,
    /// It comes from `source`.
    Of {
        /// Source of the packet or sender of the ARP packet.
        source: IpAddr,
        /// Address that a neighbour advertisement announces.
        claimed: Option<IpAddr>,
    },
}

/// Reads the senders of a frame that begins with `head`.
pub fn senders(head: &[u8]) -> Senders {
    let Some(mut payload) = ethernet::payload(head) else { return Senders::Unreadable };
    if payload.ethertype <= LENGTH_MAX {
        match head.get(payload.offset..).and_then(|llc| llc.split_first_chunk()) {
            Some((&SNAP, rest)) => {
                let Some(ethertype) = rest.first_chunk() else { return Senders::Unreadable };
                payload.ethertype = u16::from_be_bytes(*ethertype);
                payload.offset += SNAP.len() + 2;
            }
            _ => return Senders::NoIp,
        }
    }
    let packet = head.get(payload.offset..).unwrap_or_default();
    let read = match payload.ethertype {
        ETHERTYPE_ARP => arp(packet),
        ETHERTYPE_IPV4 | ETHERTYPE_IPV6 => of_packet(payload.ethertype, packet),
        _ => return Senders::NoIp,
    };
    read.unwrap_or(Senders::Unreadable)
}

fn arp(packet: &[u8]) -> Option<Senders> {
    let packet: &[u8; 18] = packet.first_chunk()?;
    let [.., a, b, c, d] = *packet;
    let source = Ipv4Addr::new(a, b, c, d).into();
    (packet[..6] == ARP_KIND).then_some(Senders::Of { source, claimed: None })
}

fn of_packet(ethertype: u16, packet: &[u8]) -> Option<Senders> {
    let header = ip::Header::parse(ethertype, packet)?;
    let source = header.source();
    if header.is_v4() {
        return Some(Senders::Of { source, claimed: None });
    }
    let upper = header.upper_layer(packet);
    let claimed = match upper.protocol {
        // Receivers ignore neighbour discovery in fragments (RFC 6980).
        _ if upper.later_fragment => None,
        // Behind what the head has of the packet.
        protocol if ip::is_extension(protocol) => return None,
        ICMPV6 => advertised(packet.get(upper.offset..)?)?,
        _ => None,
    };
    Some(Senders::Of { source, claimed })
}

/// The address that an ICMPv6 message announces: none unless it is a neighbour advertisement. `None` if the message is cut off.
fn advertised(message: &[u8]) -> Option<Option<IpAddr>> {
    let (kind, rest) = message.split_first()?;
    if *kind != ADVERTISEMENT {
        return Some(None);
    }
    Some(Some(Ipv6Addr::from(*rest.get(7..)?.first_chunk::<16>()?).into()))
}
