//! UDP datagrams in Ethernet frames, for packets of a process in a virtual machine: what the machine's own kernel would send, and what it
//! would get.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;

/// A MAC address.
pub type MacAddress = [u8; 6];

pub(crate) const ETHERNET: usize = 14;
const IPV4: usize = 20;
const IPV6: usize = 40;
pub(crate) const UDP: usize = 8;
/// Headers of the largest kind.
pub(crate) const HEADERS_MAX: usize = ETHERNET + IPV6 + UDP;
const ETHERTYPE_IPV4: [u8; 2] = [8, 0];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const PROTOCOL_UDP: u8 = 17;
/// ECN-capable transport, and "congestion experienced" (RFC 3168).
const ECN_CAPABLE: u8 = 2;
const ECN_CONGESTION: u8 = 3;
const HOP_LIMIT: u8 = 64;
/// "Don't fragment", and what a fragment has in the same field.
const DONT_FRAGMENT: u16 = 0x4000;
const FRAGMENT: u16 = 0x3fff;

/// Both ends of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ends {
    pub(crate) from: SocketAddr,
    pub(crate) from_mac: MacAddress,
    pub(crate) to: SocketAddr,
    pub(crate) to_mac: MacAddress,
}

/// Headers in front of a payload; the checksum is partial: that of the pseudo-header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Headers {
    bytes: [u8; HEADERS_MAX],
    len: usize,
}

impl Headers {
    /// Headers of a datagram, or of several of one size that are to be segmented, with `payload` bytes in all. `None`: the ends are of
    /// different families, or the payload is too long.
    pub(crate) fn new(ends: &Ends, payload: usize) -> Option<Self> {
        let udp_len = u16::try_from(UDP + payload).ok()?;
        let mut bytes = [0; HEADERS_MAX];
        bytes[..6].copy_from_slice(&ends.to_mac);
        bytes[6..12].copy_from_slice(&ends.from_mac);
        let (ip, mut sum) = match (ends.from.ip(), ends.to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                bytes[12..14].copy_from_slice(&ETHERTYPE_IPV4);
                let ip = &mut bytes[ETHERNET..ETHERNET + IPV4];
                let total = u16::try_from(IPV4 + usize::from(udp_len)).ok()?;
                (ip[0], ip[1]) = (0x45, ECN_CAPABLE);
                ip[2..4].copy_from_slice(&total.to_be_bytes());
                ip[6..8].copy_from_slice(&DONT_FRAGMENT.to_be_bytes());
                (ip[8], ip[9]) = (HOP_LIMIT, PROTOCOL_UDP);
                ip[12..16].copy_from_slice(&from.octets());
                ip[16..20].copy_from_slice(&to.octets());
                let checksum = !folded(summed(ip));
                ip[10..12].copy_from_slice(&checksum.to_be_bytes());
                (IPV4, summed(&ip[12..20]))
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                bytes[12..14].copy_from_slice(&ETHERTYPE_IPV6);
                let ip = &mut bytes[ETHERNET..ETHERNET + IPV6];
                (ip[0], ip[1]) = (0x60, ECN_CAPABLE << 4);
                ip[4..6].copy_from_slice(&udp_len.to_be_bytes());
                (ip[6], ip[7]) = (PROTOCOL_UDP, HOP_LIMIT);
                ip[8..24].copy_from_slice(&from.octets());
                ip[24..40].copy_from_slice(&to.octets());
                (IPV6, summed(&ip[8..40]))
            }
            _ => return None,
        };
        sum += u64::from(PROTOCOL_UDP) + u64::from(udp_len);
        let len = ETHERNET + ip + UDP;
        let udp = &mut bytes[ETHERNET + ip..len];
        udp[..2].copy_from_slice(&ends.from.port().to_be_bytes());
        udp[2..4].copy_from_slice(&ends.to.port().to_be_bytes());
        udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
        udp[6..8].copy_from_slice(&folded(sum).to_be_bytes());
        Some(Self { bytes, len })
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Length of the headers of a datagram to this address.
pub(crate) fn headers_to(address: SocketAddr) -> usize {
    ETHERNET + UDP + if address.is_ipv4() { IPV4 } else { IPV6 }
}

/// A received datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Datagram {
    pub(crate) from: SocketAddr,
    pub(crate) from_mac: MacAddress,
    pub(crate) to: SocketAddr,
    pub(crate) payload: Range<usize>,
    pub(crate) congestion: bool,
}

/// Reads a frame with a UDP datagram. `None`: it is none, a fragment, or damaged. `is_verified`: its checksum need not be looked at.
pub(crate) fn parse(frame: &[u8], is_verified: bool) -> Option<Datagram> {
    let (ethernet, packet) = frame.split_first_chunk::<ETHERNET>()?;
    let from_mac: MacAddress = *ethernet[6..].first_chunk()?;
    let (ips, congestion, start, udp_len, sum) = match *ethernet[12..].first_chunk()? {
        ETHERTYPE_IPV4 => {
            let ip: &[u8; IPV4] = packet.first_chunk()?;
            let [len, total] = [usize::from(ip[0] & 15) * 4, u16::from_be_bytes([ip[2], ip[3]]).into()];
            let fragment = u16::from_be_bytes([ip[6], ip[7]]) & FRAGMENT;
            if ip[0] >> 4 != 4 || len < IPV4 || fragment != 0 || ip[9] != PROTOCOL_UDP {
                return None;
            }
            let v4 =
                |at: usize| ip[at..].first_chunk::<4>().map(|octets| IpAddr::V4(Ipv4Addr::from(*octets)));
            (
                (v4(12)?, v4(16)?),
                ip[1] & 3 == ECN_CONGESTION,
                len,
                total.checked_sub(len)?,
                summed(&ip[12..20]),
            )
        }
        ETHERTYPE_IPV6 => {
            let ip: &[u8; IPV6] = packet.first_chunk()?;
            if ip[0] >> 4 != 6 || ip[6] != PROTOCOL_UDP {
                return None;
            }
            let v6 =
                |at: usize| ip[at..].first_chunk::<16>().map(|octets| IpAddr::V6(Ipv6Addr::from(*octets)));
            let len = usize::from(u16::from_be_bytes([ip[4], ip[5]]));
            ((v6(8)?, v6(24)?), ip[1] >> 4 & 3 == ECN_CONGESTION, IPV6, len, summed(&ip[8..40]))
        }
        _ => return None,
    };
    // A short frame may be padded.
    let datagram = packet.get(start..start.checked_add(udp_len)?)?;
    let udp: &[u8; UDP] = datagram.first_chunk()?;
    let word = |at: usize| u16::from_be_bytes([udp[at], udp[at + 1]]);
    if usize::from(word(4)) != udp_len {
        return None;
    }
    let has_checksum = word(6) != 0 || matches!(ips.0, IpAddr::V6(_));
    let pseudo = sum + u64::from(PROTOCOL_UDP) + udp_len as u64;
    if !is_verified && has_checksum && folded(pseudo + summed(datagram)) != 0xffff {
        return None;
    }
    let at = ETHERNET + start + UDP;
    Some(Datagram {
        from: SocketAddr::new(ips.0, word(0)),
        from_mac,
        to: SocketAddr::new(ips.1, word(2)),
        payload: at..at + udp_len - UDP,
        congestion,
    })
}

/// Sum of 16-bit words (RFC 1071), not folded. A frame has at most 2^15 of them.
fn summed(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<2>();
    let last = rest.first().map_or(0, |byte| u64::from(*byte) << 8);
    words.iter().map(|word| u64::from(u16::from_be_bytes(*word))).sum::<u64>() + last
}

fn folded(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(from: &str, to: &str) -> Ends {
        let [from, to] = [from, to].map(|text| text.parse().unwrap());
        Ends { from, from_mac: [2, 0, 0, 0, 0, 1], to, to_mac: [2, 0, 0, 0, 0, 2] }
    }

    /// The finished frame, as the core completes it.
    fn frame(ends: &Ends, payload: &[u8]) -> Vec<u8> {
        let headers = Headers::new(ends, payload.len()).unwrap();
        let mut frame = [headers.as_bytes(), payload].concat();
        let at = headers.len - UDP;
        let sum = !folded(summed(&frame[at..]));
        let sum = if sum == 0 { 0xffff } else { sum };
        frame[at + 6..at + 8].copy_from_slice(&sum.to_be_bytes());
        frame
    }

    #[test]
    fn what_is_written_is_read() {
        for ends in [ends("10.0.0.1:7000", "10.0.0.2:9"), ends("[fd00::1]:7000", "[fd00::2]:65535")] {
            for len in [0, 1, 2, 1399, 60_001] {
                let payload: Vec<u8> = (0..len).map(|place| (place * 31) as u8).collect();
                let mut frame = frame(&ends, &payload);
                let read = parse(&frame, false).unwrap();
                assert_eq!((read.from, read.to, read.from_mac), (ends.from, ends.to, ends.from_mac));
                assert_eq!((&frame[read.payload.clone()], read.congestion), (&payload[..], false));
                assert_eq!(headers_to(ends.to), read.payload.start);
                frame.extend([0; 10]);
                assert_eq!(parse(&frame, false), Some(read.clone()), "padding is ignored");
                if len > 0 {
                    frame[read.payload.start] ^= 4;
                    assert_eq!(parse(&frame, false), None, "damaged");
                    assert_eq!(parse(&frame, true), Some(read));
                }
            }
        }
        assert!(Headers::new(&ends("10.0.0.1:1", "[fd00::2]:1"), 0).is_none());
        assert!(Headers::new(&ends("10.0.0.1:1", "10.0.0.2:1"), 65_508).is_none());
    }

    #[test]
    fn congestion_and_fragments_are_seen() {
        let ends = ends("10.0.0.1:7000", "10.0.0.2:9");
        let mut congested = frame(&ends, b"x");
        congested[15] |= 3;
        assert!(parse(&congested, false).unwrap().congestion);
        for flags in [0x20, 0x1f] {
            let mut fragment = frame(&ends, b"x");
            fragment[20] |= flags;
            assert_eq!(parse(&fragment, true), None);
        }
        // No prefix is taken for a datagram.
        let whole = frame(&ends, b"payload");
        assert!((0..whole.len()).all(|len| parse(&whole[..len], true).is_none()));
    }
}
