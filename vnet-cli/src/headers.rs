//! A captured frame's headers in one line, similar to `tcpdump -e`. etherparse decodes the headers; if the snap length cut the
//! frame, the line ends with the last complete header.

use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr};

use etherparse::ip_number::{ICMP, IPV6_ICMP, TCP, UDP};
use etherparse::{
    ArpHardwareId, ArpOperation, ArpPacketSlice, EtherType, IpNumber, LaxIpPayloadSlice, LaxLinkExtSlice,
    LaxNetSlice, LaxSlicedPacket, LinkSlice, ether_type,
};
use vnet::wire::ethernet::Mac;

/// The headers at the start of `frame`. `None` if it is shorter than an Ethernet header.
pub fn line(frame: &[u8]) -> Option<String> {
    let packet = LaxSlicedPacket::from_ethernet(frame).ok()?;
    let Some(LinkSlice::Ethernet2(ethernet)) = &packet.link else { return None };
    let mut line = format!("{} > {}, ", Mac(ethernet.source()), Mac(ethernet.destination()));
    if ethernet.ether_type() == ether_type::VLAN_TAGGED_FRAME
        && let Some(LaxLinkExtSlice::Vlan(tag)) = packet.link_exts.first()
    {
        line += &format!("vlan {}, ", tag.vlan_identifier().value());
    }
    line += &match &packet.net {
        Some(LaxNetSlice::Arp(packet)) => arp(packet),
        Some(LaxNetSlice::Ipv4(packet)) => {
            let header = packet.header();
            let later_fragment = header.fragments_offset().value() != 0;
            let ends = (header.source_addr().into(), header.destination_addr().into());
            ip("IP", ends, packet.payload(), later_fragment)
        }
        Some(LaxNetSlice::Ipv6(packet)) => {
            let extensions = packet.extensions();
            let later_fragment = is_later_fragment(extensions.first_header(), extensions.slice());
            let header = packet.header();
            let ends = (header.source_addr().into(), header.destination_addr().into());
            ip("IP6", ends, packet.payload(), later_fragment)
        }
        None => ethertype(innermost(&packet, ethernet.ether_type())),
    };
    Some(line)
}

/// True if an IPv6 fragment header shows that the payload is not the beginning of a packet. Own code, because the iterator of
/// etherparse 0.21 reads behind the slice if an extension header occurs twice.
fn is_later_fragment(first: Option<IpNumber>, mut headers: &[u8]) -> bool {
    let mut number = first;
    while let (Some(IpNumber(is)), [next, len, a, b, ..]) = (number, headers) {
        let len = match is {
            44 if u16::from_be_bytes([*a, *b]) >> 3 != 0 => return true,
            44 => 8,
            51 => (usize::from(*len) + 2) * 4,
            0 | 43 | 60 | 135 | 139 | 140 => (usize::from(*len) + 1) * 8,
            _ => return false,
        };
        number = Some(IpNumber(*next));
        headers = headers.get(len..).unwrap_or_default();
    }
    false
}

/// The EtherType behind all decoded tags.
fn innermost(packet: &LaxSlicedPacket<'_>, outer: EtherType) -> EtherType {
    match packet.link_exts.last() {
        Some(LaxLinkExtSlice::Vlan(tag)) => tag.ether_type(),
        _ => outer,
    }
}

fn ethertype(ethertype: EtherType) -> String {
    format!("ethertype 0x{:04x}", ethertype.0)
}

fn arp(packet: &ArpPacketSlice<'_>) -> String {
    let ipv4 = |bytes: &[u8]| <[u8; 4]>::try_from(bytes).ok().map(Ipv4Addr::from);
    let hardware = <[u8; 6]>::try_from(packet.sender_hw_addr()).ok().map(Mac);
    let (sender, target) = (ipv4(packet.sender_protocol_addr()), ipv4(packet.target_protocol_addr()));
    let (Some(hardware), Some(sender), Some(target), ArpHardwareId::ETHERNET, ether_type::IPV4) =
        (hardware, sender, target, packet.hw_addr_type(), packet.proto_addr_type())
    else {
        return ethertype(ether_type::ARP);
    };
    match packet.operation() {
        ArpOperation::REQUEST => format!("ARP who-has {target} tell {sender}"),
        ArpOperation::REPLY => format!("ARP {sender} is-at {hardware}"),
        ArpOperation(other) => format!("ARP operation {other}"),
    }
}

fn ip(version: &str, ends: (IpAddr, IpAddr), packet: &LaxIpPayloadSlice<'_>, later_fragment: bool) -> String {
    let (src, dst) = ends;
    // Parsed here rather than by etherparse, which needs the complete TCP or ICMP header: so a short snap length still shows the
    // ports.
    let upper = if later_fragment { &[] } else { packet.payload };
    let u16_at = |at: usize| Some(u16::from_be_bytes(*upper.get(at..)?.first_chunk()?));
    let line = match (packet.ip_number, u16_at(0), u16_at(2)) {
        (TCP | UDP, Some(from), Some(to)) => {
            format!("{version} {} > {}, ", with_port(src, from), with_port(dst, to))
        }
        _ => format!("{version} {src} > {dst}, "),
    };
    line + &match packet.ip_number {
        TCP => match upper.get(13) {
            Some(flags) => format!("TCP {}", tcp_flags(*flags)),
            None => "TCP".into(),
        },
        UDP => "UDP".into(),
        ICMP | IPV6_ICMP if later_fragment => "ICMP fragment".into(),
        ICMP | IPV6_ICMP => {
            let name = upper.first().and_then(|kind| icmp_name(packet.ip_number, *kind));
            let mut text = String::from(if packet.ip_number == ICMP { "ICMP" } else { "ICMP6" });
            if let Some(name) = name {
                text = format!("{text} {name}");
                if let (true, Some(id), Some(seq)) = (name.starts_with("echo"), u16_at(4), u16_at(6)) {
                    text += &format!(" id {id} seq {seq}");
                }
            }
            text
        }
        IpNumber(other) => format!("protocol {other}"),
    }
}

fn with_port(address: IpAddr, port: u16) -> String {
    match address {
        IpAddr::V4(address) => format!("{address}:{port}"),
        IpAddr::V6(address) => format!("[{address}]:{port}"),
    }
}

fn tcp_flags(flags: u8) -> String {
    let mut text = String::from("[");
    for (bit, letter) in [(0x02, 'S'), (0x01, 'F'), (0x04, 'R'), (0x08, 'P'), (0x20, 'U'), (0x10, '.')] {
        if flags & bit != 0 {
            text.push(letter);
        }
    }
    let _ = text.write_char(']');
    text
}

fn icmp_name(protocol: IpNumber, kind: u8) -> Option<&'static str> {
    Some(match (protocol, kind) {
        (ICMP, 0) | (IPV6_ICMP, 129) => "echo reply",
        (ICMP, 8) | (IPV6_ICMP, 128) => "echo request",
        (ICMP, 3) | (IPV6_ICMP, 1) => "unreachable",
        (ICMP, 11) | (IPV6_ICMP, 3) => "time exceeded",
        (IPV6_ICMP, 2) => "packet too big",
        (IPV6_ICMP, 133) => "router solicitation",
        (IPV6_ICMP, 134) => "router advertisement",
        (IPV6_ICMP, 135) => "neighbor solicitation",
        (IPV6_ICMP, 136) => "neighbor advertisement",
        (IPV6_ICMP, 143) => "multicast listener report",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MACS: [u8; 12] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];

    /// An IPv4 packet from 10.0.0.1 to 10.0.0.2 in a frame, with a VLAN tag if `vlan` is given.
    fn ipv4_frame(protocol: IpNumber, fragment: u16, vlan: Option<u16>, transport: &[u8]) -> Vec<u8> {
        let mut frame = MACS.to_vec();
        if let Some(vlan) = vlan {
            frame.extend([0x81, 0, (vlan >> 8) as u8, vlan as u8]);
        }
        frame.extend([
            8,
            0,
            0x45,
            0,
            0,
            40,
            0,
            0,
            (fragment >> 8) as u8,
            fragment as u8,
            64,
            protocol.0,
            0,
            0,
        ]);
        frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend(transport);
        frame
    }

    fn arp_frame() -> Vec<u8> {
        let mut frame = MACS.to_vec();
        frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1]);
        frame.extend([0, 0, 0, 0, 0, 0, 10, 0, 0, 2]);
        frame
    }

    fn ipv6_frame(next: u8, rest: &[u8]) -> Vec<u8> {
        let mut frame = MACS.to_vec();
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, rest.len() as u8, next, 64]);
        for last in [1, 2] {
            frame.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
        }
        frame.extend(rest);
        frame
    }

    #[test]
    fn a_frame_is_one_line() {
        let macs = "02:00:00:00:00:01 > 02:00:00:00:00:02, ";
        let tcp = [0, 80, 0x1f, 0x90, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x12, 0, 0];
        let cases = [
            (ipv4_frame(TCP, 0, None, &tcp), "IP 10.0.0.1:80 > 10.0.0.2:8080, TCP [S.]"),
            (ipv4_frame(TCP, 0, None, &tcp[..4]), "IP 10.0.0.1:80 > 10.0.0.2:8080, TCP"),
            (ipv4_frame(UDP, 0, Some(7), &tcp), "vlan 7, IP 10.0.0.1:80 > 10.0.0.2:8080, UDP"),
            (
                ipv4_frame(ICMP, 0, None, &[8, 0, 0, 0, 0, 3, 0, 9]),
                "IP 10.0.0.1 > 10.0.0.2, ICMP echo request id 3 seq 9",
            ),
            (ipv4_frame(TCP, 5, None, &tcp), "IP 10.0.0.1 > 10.0.0.2, TCP"),
            (ipv4_frame(ICMP, 5, None, &tcp), "IP 10.0.0.1 > 10.0.0.2, ICMP fragment"),
            (ipv4_frame(IpNumber(47), 0, None, &tcp), "IP 10.0.0.1 > 10.0.0.2, protocol 47"),
            (arp_frame(), "ARP who-has 10.0.0.2 tell 10.0.0.1"),
            (arp_frame()[..30].to_vec(), "ethertype 0x0806"),
            (ipv6_frame(17, &tcp), "IP6 [fd00::1]:80 > [fd00::2]:8080, UDP"),
            (
                ipv6_frame(0, &[&[58, 0, 0, 0, 0, 0, 0, 0][..], &[135, 0, 0, 0, 0, 0, 0, 0]].concat()),
                "IP6 fd00::1 > fd00::2, ICMP6 neighbor solicitation",
            ),
            (ipv6_frame(44, &[&[17, 0, 0, 8, 0, 0, 0, 7][..], &tcp].concat()), "IP6 fd00::1 > fd00::2, UDP"),
            ([&MACS[..], &[0x88, 0xb5, 1]].concat(), "ethertype 0x88b5"),
        ];
        for (frame, want) in cases {
            assert_eq!(line(&frame).unwrap(), format!("{macs}{want}"));
        }
        assert_eq!(line(&MACS), None);
    }

    proptest! {
        /// A frame cut at any length gives one line and no panic.
        #[test]
        fn cut_frames_are_shown_as_far_as_they_go(
            cut in 0usize..80, noise in prop::collection::vec(any::<u8>(), 0..80), which in 0usize..4,
        ) {
            let mut frame = match which {
                0 => arp_frame(),
                1 => ipv4_frame(TCP, 0, Some(1), &noise),
                2 => ipv6_frame(noise.first().copied().unwrap_or(0), &noise),
                _ => [&MACS[..], &noise].concat(),
            };
            frame.truncate(cut);
            if let Some(line) = line(&frame) {
                prop_assert!(!line.contains('\n'));
            }
        }
    }
}
