//! What the first bytes of a frame say: enough to choose frames by and to show one in a line.
//!
//! A view, not a protocol stack: Ethernet with up to two tags, ARP, IPv4, IPv6 with its common extension headers, ports, TCP
//! flags, ICMP types. Everything is read with bounds checked; what is cut off or malformed is absent.

use std::fmt::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::wire::ethernet::{self, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_VLAN, Mac};

/// IP protocol numbers (IANA).
pub const ICMP: u8 = 1;
/// TCP.
pub const TCP: u8 = 6;
/// UDP.
pub const UDP: u8 = 17;
/// ICMP for IPv6.
pub const ICMPV6: u8 = 58;

/// IPv6 extension headers looked through: hop-by-hop, routing, fragment, destination options. More in one packet is abuse.
const EXTENSIONS_MAX: usize = 4;

/// What is inside the Ethernet frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inside {
    /// ARP for IPv4 (RFC 826): operation, sender's and target's protocol addresses.
    Arp {
        /// 1 asks, 2 answers.
        operation: u16,
        /// Who asks or answers.
        sender: Ipv4Addr,
        /// Who is asked for or answered.
        target: Ipv4Addr,
        /// The sender's hardware address.
        hardware: Mac,
    },
    /// IPv4 or IPv6.
    Ip {
        /// Source.
        src: IpAddr,
        /// Destination.
        dst: IpAddr,
        /// What it carries, behind extension headers.
        protocol: u8,
        /// A fragment other than the first: there is no transport header.
        later_fragment: bool,
        /// Where the transport header begins in the frame.
        transport: usize,
    },
    /// Anything else, or cut off.
    Other,
}

/// A frame's headers.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    bytes: &'a [u8],
    /// Destination address.
    pub dst: Mac,
    /// Source address.
    pub src: Mac,
    /// VLAN id of the outermost tag.
    pub vlan: Option<u16>,
    /// EtherType behind all tags; 0 when the frame ends before it.
    pub ethertype: u16,
    /// What is inside.
    pub inside: Inside,
}

impl<'a> Packet<'a> {
    /// Looks at the first bytes of a frame. `None` when they are fewer than an Ethernet header.
    pub fn new(bytes: &'a [u8]) -> Option<Packet<'a>> {
        let (dst, src) = ethernet::addresses(bytes)?;
        let tag = (u16_at(bytes, 12)? == ETHERTYPE_VLAN).then(|| u16_at(bytes, 14)).flatten();
        let payload = ethernet::payload(bytes);
        let ethertype = payload.map_or(0, |payload| payload.ethertype);
        let inside = payload.and_then(|payload| match payload.ethertype {
            ETHERTYPE_ARP => arp(bytes, payload.offset),
            ETHERTYPE_IPV4 => ipv4(bytes, payload.offset),
            ETHERTYPE_IPV6 => ipv6(bytes, payload.offset),
            _ => None,
        });
        let vlan = tag.map(|tag| tag & 0xfff);
        Some(Packet { bytes, dst, src, vlan, ethertype, inside: inside.unwrap_or(Inside::Other) })
    }

    /// The IP protocol, or `None` when it is no IP.
    pub fn protocol(&self) -> Option<u8> {
        match self.inside {
            Inside::Ip { protocol, .. } => Some(protocol),
            _ => None,
        }
    }

    /// Source and destination protocol addresses: of IP, or of ARP's sender and target.
    pub fn hosts(&self) -> Option<(IpAddr, IpAddr)> {
        match self.inside {
            Inside::Ip { src, dst, .. } => Some((src, dst)),
            Inside::Arp { sender, target, .. } => Some((sender.into(), target.into())),
            Inside::Other => None,
        }
    }

    /// Source and destination ports of TCP and UDP.
    pub fn ports(&self) -> Option<(u16, u16)> {
        let at = self.transport(&[TCP, UDP])?;
        Some((u16_at(self.bytes, at)?, u16_at(self.bytes, at + 2)?))
    }

    /// Where the transport header is, if it is there and one of these.
    fn transport(&self, protocols: &[u8]) -> Option<usize> {
        match self.inside {
            Inside::Ip { protocol, later_fragment: false, transport, .. }
                if protocols.contains(&protocol) =>
            {
                Some(transport)
            }
            _ => None,
        }
    }

    fn write_ip(&self, f: &mut fmt::Formatter<'_>, src: IpAddr, dst: IpAddr, protocol: u8) -> fmt::Result {
        let kind = if src.is_ipv6() { "IP6" } else { "IP" };
        if let Some((from, to)) = self.ports() {
            write!(f, "{kind} {} > {}, ", with_port(src, from), with_port(dst, to))?;
        } else {
            write!(f, "{kind} {src} > {dst}, ")?;
        }
        match protocol {
            TCP => {
                f.write_str("TCP")?;
                match self.transport(&[TCP]).and_then(|at| self.bytes.get(at + 13)) {
                    Some(flags) => write!(f, " {}", tcp_flags(*flags)),
                    None => Ok(()),
                }
            }
            UDP => f.write_str("UDP"),
            ICMP | ICMPV6 => {
                let Some(at) = self.transport(&[ICMP, ICMPV6]) else { return f.write_str("ICMP fragment") };
                let name = self.bytes.get(at).and_then(|kind| icmp_name(protocol, *kind));
                write!(f, "{}", if protocol == ICMP { "ICMP" } else { "ICMP6" })?;
                let Some(name) = name else { return Ok(()) };
                write!(f, " {name}")?;
                let echo = name.starts_with("echo");
                match (echo, u16_at(self.bytes, at + 4), u16_at(self.bytes, at + 6)) {
                    (true, Some(id), Some(seq)) => write!(f, " id {id} seq {seq}"),
                    _ => Ok(()),
                }
            }
            other => write!(f, "protocol {other}"),
        }
    }
}

impl fmt::Display for Packet<'_> {
    /// One line, in the manner of `tcpdump -e`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} > {}, ", self.src, self.dst)?;
        if let Some(vlan) = self.vlan {
            write!(f, "vlan {vlan}, ")?;
        }
        match self.inside {
            Inside::Arp { operation: 1, sender, target, .. } => {
                write!(f, "ARP who-has {target} tell {sender}")
            }
            Inside::Arp { operation: 2, sender, hardware, .. } => {
                write!(f, "ARP {sender} is-at {hardware}")
            }
            Inside::Arp { operation, .. } => write!(f, "ARP operation {operation}"),
            Inside::Ip { src, dst, protocol, .. } => self.write_ip(f, src, dst, protocol),
            Inside::Other => write!(f, "ethertype 0x{:04x}", self.ethertype),
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn arp(bytes: &[u8], at: usize) -> Option<Inside> {
    let arp: &[u8; 28] = bytes.get(at..)?.first_chunk()?;
    // Ethernet, IPv4, and their lengths.
    if arp[..6] != [0, 1, 8, 0, 6, 4] {
        return None;
    }
    let address = |at: usize| Ipv4Addr::new(arp[at], arp[at + 1], arp[at + 2], arp[at + 3]);
    let hardware = Mac([arp[8], arp[9], arp[10], arp[11], arp[12], arp[13]]);
    let operation = u16::from_be_bytes([arp[6], arp[7]]);
    Some(Inside::Arp { operation, sender: address(14), target: address(24), hardware })
}

fn ipv4(bytes: &[u8], at: usize) -> Option<Inside> {
    let ip: &[u8; 20] = bytes.get(at..)?.first_chunk()?;
    let header = usize::from(ip[0] & 0xf) * 4;
    if ip[0] >> 4 != 4 || header < 20 {
        return None;
    }
    let address = |at: usize| Ipv4Addr::new(ip[at], ip[at + 1], ip[at + 2], ip[at + 3]).into();
    Some(Inside::Ip {
        src: address(12),
        dst: address(16),
        protocol: ip[9],
        later_fragment: u16::from_be_bytes([ip[6], ip[7]]) & 0x1fff != 0,
        transport: at + header,
    })
}

fn ipv6(bytes: &[u8], at: usize) -> Option<Inside> {
    let ip: &[u8; 40] = bytes.get(at..)?.first_chunk()?;
    if ip[0] >> 4 != 6 {
        return None;
    }
    let address = |at: usize| {
        let octets: [u8; 16] = *ip[at..].first_chunk()?;
        Some(IpAddr::from(Ipv6Addr::from(octets)))
    };
    let (mut protocol, mut transport, mut later_fragment) = (ip[6], at + 40, false);
    for _ in 0..EXTENSIONS_MAX {
        let header: Option<&[u8; 8]> = bytes.get(transport..).and_then(<[u8]>::first_chunk);
        let (0 | 43 | 44 | 60, Some(header)) = (protocol, header) else { break };
        let fragment = protocol == 44;
        later_fragment |= fragment && u16::from_be_bytes([header[2], header[3]]) >> 3 != 0;
        transport += if fragment { 8 } else { 8 * (usize::from(header[1]) + 1) };
        protocol = header[0];
        if later_fragment {
            break;
        }
    }
    Some(Inside::Ip { src: address(8)?, dst: address(24)?, protocol, later_fragment, transport })
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

fn icmp_name(protocol: u8, kind: u8) -> Option<&'static str> {
    Some(match (protocol, kind) {
        (ICMP, 0) | (ICMPV6, 129) => "echo reply",
        (ICMP, 8) | (ICMPV6, 128) => "echo request",
        (ICMP, 3) | (ICMPV6, 1) => "unreachable",
        (ICMP, 11) | (ICMPV6, 3) => "time exceeded",
        (ICMPV6, 2) => "packet too big",
        (ICMPV6, 133) => "router solicitation",
        (ICMPV6, 134) => "router advertisement",
        (ICMPV6, 135) => "neighbor solicitation",
        (ICMPV6, 136) => "neighbor advertisement",
        (ICMPV6, 143) => "multicast listener report",
        _ => return None,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    const MACS: [u8; 12] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];

    /// An IPv4 packet from 10.0.0.1 to 10.0.0.2 in a frame; `vlan` puts a tag before it.
    pub fn ipv4_frame(protocol: u8, fragment: u16, vlan: Option<u16>, transport: &[u8]) -> Vec<u8> {
        let mut frame = MACS.to_vec();
        if let Some(vlan) = vlan {
            frame.extend([0x81, 0, (vlan >> 8) as u8, vlan as u8]);
        }
        frame.extend([8, 0, 0x45, 0, 0, 40, 0, 0, (fragment >> 8) as u8, fragment as u8, 64, protocol, 0, 0]);
        frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend(transport);
        frame
    }

    pub fn arp_frame() -> Vec<u8> {
        let mut frame = MACS.to_vec();
        frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1]);
        frame.extend([0, 0, 0, 0, 0, 0, 10, 0, 0, 2]);
        frame
    }

    pub fn ipv6_frame(next: u8, rest: &[u8]) -> Vec<u8> {
        let mut frame = MACS.to_vec();
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 8, next, 64]);
        for last in [1, 2] {
            frame.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
        }
        frame.extend(rest);
        frame
    }

    fn line(frame: &[u8]) -> String {
        Packet::new(frame).unwrap().to_string()
    }

    #[test]
    fn frames_are_told_in_a_line() {
        let macs = "02:00:00:00:00:01 > 02:00:00:00:00:02, ";
        let tcp = [0, 80, 0x1f, 0x90, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x12, 0, 0];
        let cases = [
            (ipv4_frame(TCP, 0, None, &tcp), "IP 10.0.0.1:80 > 10.0.0.2:8080, TCP [S.]"),
            (ipv4_frame(UDP, 0, Some(7), &tcp), "vlan 7, IP 10.0.0.1:80 > 10.0.0.2:8080, UDP"),
            (
                ipv4_frame(ICMP, 0, None, &[8, 0, 0, 0, 0, 3, 0, 9]),
                "IP 10.0.0.1 > 10.0.0.2, ICMP echo request id 3 seq 9",
            ),
            (ipv4_frame(TCP, 5, None, &tcp), "IP 10.0.0.1 > 10.0.0.2, TCP"),
            (arp_frame(), "ARP who-has 10.0.0.2 tell 10.0.0.1"),
            (ipv6_frame(UDP, &tcp), "IP6 [fd00::1]:80 > [fd00::2]:8080, UDP"),
            (
                ipv6_frame(0, &[&[58, 0, 0, 0, 0, 0, 0, 0][..], &[135, 0, 0, 0, 0, 0, 0, 0]].concat()),
                "IP6 fd00::1 > fd00::2, ICMP6 neighbor solicitation",
            ),
            ([&MACS[..], &[0x88, 0xb5, 1]].concat(), "ethertype 0x88b5"),
        ];
        for (frame, want) in cases {
            assert_eq!(line(&frame), format!("{macs}{want}"));
        }
        assert!(Packet::new(&MACS).is_none());
    }

    proptest! {
        /// However a frame is cut, what is left is told without a panic.
        #[test]
        fn cut_frames_do_no_harm(cut in 0usize..80, noise in prop::collection::vec(any::<u8>(), 0..80), which in 0usize..4) {
            let mut frame = match which {
                0 => arp_frame(),
                1 => ipv4_frame(TCP, 0, Some(1), &noise),
                2 => ipv6_frame(noise.first().copied().unwrap_or(0), &noise),
                _ => [&MACS[..], &noise].concat(),
            };
            frame.truncate(cut);
            if let Some(packet) = Packet::new(&frame) {
                prop_assert!(!packet.to_string().contains('\n'));
            }
        }
    }
}
