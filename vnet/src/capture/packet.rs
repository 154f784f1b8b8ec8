//! The header fields that a filter tests. A truncated or malformed field counts as absent.

use std::net::{IpAddr, Ipv4Addr};

use crate::wire::ethernet::{self, ETHERTYPE_ARP, ETHERTYPE_VLAN, Mac};
use crate::wire::ip::{self, TCP, UDP};

/// Header fields of one frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet<'a> {
    bytes: &'a [u8],
    pub(super) dst: Mac,
    pub(super) src: Mac,
    /// VLAN id of the outermost tag.
    pub(super) vlan: Option<u16>,
    /// EtherType behind all tags; 0 when the frame ends before it.
    pub(super) ethertype: u16,
    network: Network,
}

/// The network layer.
#[derive(Clone, Copy, Debug)]
enum Network {
    /// ARP for IPv4 over Ethernet (RFC 826).
    Arp { sender: Ipv4Addr, target: Ipv4Addr },
    /// IPv4 or IPv6. `upper.offset` counts from the start of the frame.
    Ip { src: IpAddr, dst: IpAddr, upper: ip::UpperLayer },
    /// Any other protocol, or a truncated header.
    Other,
}

impl<'a> Packet<'a> {
    /// Decodes the start of a frame. `None` when it is shorter than an Ethernet header.
    pub(super) fn new(bytes: &'a [u8]) -> Option<Packet<'a>> {
        let (dst, src) = ethernet::addresses(bytes)?;
        let tag = (u16_at(bytes, 12)? == ETHERTYPE_VLAN).then(|| u16_at(bytes, 14)).flatten();
        let payload = ethernet::payload(bytes);
        let ethertype = payload.map_or(0, |payload| payload.ethertype);
        let network = payload.and_then(|payload| match payload.ethertype {
            ETHERTYPE_ARP => arp(bytes.get(payload.offset..)?),
            ethertype => {
                let packet = bytes.get(payload.offset..)?;
                let header = ip::Header::parse(ethertype, packet)?;
                let upper = header.upper_layer(packet);
                let upper = ip::UpperLayer { offset: payload.offset + upper.offset, ..upper };
                Some(Network::Ip { src: header.source(), dst: header.destination(), upper })
            }
        });
        let vlan = tag.map(|tag| tag & 0xfff);
        Some(Packet { bytes, dst, src, vlan, ethertype, network: network.unwrap_or(Network::Other) })
    }

    /// IP protocol number behind extension headers; `None` when the frame is not IP.
    pub(super) fn protocol(&self) -> Option<u8> {
        match self.network {
            Network::Ip { upper, .. } => Some(upper.protocol),
            _ => None,
        }
    }

    /// Source and destination address of IP, sender and target of ARP.
    pub(super) fn hosts(&self) -> Option<(IpAddr, IpAddr)> {
        match self.network {
            Network::Ip { src, dst, .. } => Some((src, dst)),
            Network::Arp { sender, target } => Some((sender.into(), target.into())),
            Network::Other => None,
        }
    }

    /// Source and destination port of TCP and UDP. Only the first fragment has them.
    pub(super) fn ports(&self) -> Option<(u16, u16)> {
        let Network::Ip { upper, .. } = self.network else { return None };
        if upper.later_fragment || !matches!(upper.protocol, TCP | UDP) {
            return None;
        }
        Some((u16_at(self.bytes, upper.offset)?, u16_at(self.bytes, upper.offset + 2)?))
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn arp(packet: &[u8]) -> Option<Network> {
    let packet: &[u8; 28] = packet.first_chunk()?;
    // Hardware type Ethernet, protocol type IPv4, and the address length of each.
    if packet[..6] != [0, 1, 8, 0, 6, 4] {
        return None;
    }
    let address = |at: usize| Ipv4Addr::new(packet[at], packet[at + 1], packet[at + 2], packet[at + 3]);
    Some(Network::Arp { sender: address(14), target: address(24) })
}
