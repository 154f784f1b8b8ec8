//! IPv4 (RFC 791) and IPv6 (RFC 8200) headers, decoded in place. This is the project's only IP decoder.
//!
//! [`Header::parse`] checks the version, the IPv4 header length, and that the fixed header is complete. Everything behind the
//! fixed header may be cut off, because callers often hold only a frame's head: `len` and `total_len` are what the header
//! *claims*, so callers must slice with `get`. Checksums are not verified.
//!
//! Implemented here because the flow hash runs it for every frame, and inlining removes every field that a caller does not read.
//! A property test compares it with etherparse.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::ethernet::{self, ETHERTYPE_IPV4, ETHERTYPE_IPV6};

/// Protocol number of ICMP (IANA).
pub const ICMP: u8 = 1;
/// Protocol number of TCP.
pub const TCP: u8 = 6;
/// Protocol number of UDP.
pub const UDP: u8 = 17;
/// Protocol number of ICMPv6.
pub const ICMPV6: u8 = 58;

/// Bytes of an IPv4 header without options.
pub const IPV4_LEN_MIN: usize = 20;
/// Bytes of an IPv6 header without extension headers.
pub const IPV6_LEN: usize = 40;

/// Maximum length in bytes of an IPv4 packet, and of what its fragments carry.
pub const DATAGRAM_MAX: usize = 65_535;
/// Datagrams of this length that each queue on a frame's way holds: 4 MiB, the default limit of concurrent reassembly in the
/// receiving kernel (`net.ipv4.ipfrag_high_thresh`).
pub const BURST_DATAGRAMS: usize = 64;

/// Mask of the more-fragments flag and the fragment offset in an IPv4 header.
const IPV4_FRAGMENT: u16 = 0x3fff;
/// Mask of the fragment offset in an IPv4 header, in units of eight bytes.
const IPV4_FRAGMENT_OFFSET: u16 = 0x1fff;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;
/// True for the IPv6 extension headers that [`Header::upper_layer`] walks.
#[inline]
pub fn is_extension(protocol: u8) -> bool {
    matches!(protocol, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION_OPTIONS)
}

/// Maximum number of extension headers walked; no honest packet has more.
const EXTENSIONS_MAX: usize = 4;

/// IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// The fields of an IPv4 header, or of an IPv6 header without its extension headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header<'a> {
    /// IP version.
    pub version: Version,
    /// Bytes of the header: 20 to 60 with IPv4 options, 40 for IPv6.
    pub len: usize,
    /// Bytes of the packet as the header claims, header included: up to 65 535 for IPv4, 65 575 for IPv6.
    pub total_len: usize,
    /// Protocol number of the payload; for IPv6 the next header, which may be an extension header.
    pub protocol: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// ECN bits (RFC 3168): 0 for a transport without ECN.
    pub ecn: u8,
    /// Flags and offset of an IPv4 fragment, 0 for a whole packet. Always 0 for IPv6, which uses an extension header.
    fragment: u16,
    /// Source, then destination address, as in the pseudo-header: 8 or 32 bytes.
    pub addresses: &'a [u8],
}

/// Place of a fragment in its datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Identification: unique among datagrams of the same addresses and protocol.
    pub identification: u32,
    /// Offset in bytes of the first byte of the payload.
    pub start: u32,
    /// Offset in bytes behind the last one.
    pub end: u32,
    /// True for the datagram's last fragment.
    pub last: bool,
}

/// The upper-layer protocol of a packet, behind its extension headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpperLayer {
    /// Protocol number.
    pub protocol: u8,
    /// Offset of its header from the first byte of the IP header; may lie beyond the available bytes.
    pub offset: usize,
    /// True for a fragment other than the first, which has no upper-layer header.
    pub later_fragment: bool,
}

/// The IP header of an Ethernet frame and its offset, behind VLAN tags. `None` when the frame carries no IP or ends inside
/// the fixed header.
#[inline]
pub fn in_frame(frame: &[u8]) -> Option<(usize, Header<'_>)> {
    let payload = ethernet::payload(frame)?;
    Some((payload.offset, Header::parse(payload.ethertype, frame.get(payload.offset..)?)?))
}

impl<'a> Header<'a> {
    /// Decodes the header at the start of `packet`, the payload of an Ethernet frame of this type.
    ///
    /// `None` when the type is neither IPv4 nor IPv6, the version field contradicts it, an IPv4 header claims fewer than 20
    /// bytes, or the fixed header is truncated.
    #[inline]
    pub fn parse(ethertype: u16, packet: &'a [u8]) -> Option<Header<'a>> {
        match ethertype {
            ETHERTYPE_IPV4 => Header::parse_v4(packet.first_chunk()?),
            ETHERTYPE_IPV6 => Header::parse_v6(packet.first_chunk()?),
            _ => None,
        }
    }

    #[inline]
    fn parse_v4(fixed: &'a [u8; IPV4_LEN_MIN]) -> Option<Header<'a>> {
        let len = usize::from(fixed[0] & 0xf) * 4;
        if fixed[0] >> 4 != 4 || len < IPV4_LEN_MIN {
            return None;
        }
        Some(Header {
            version: Version::V4,
            len,
            total_len: usize::from(u16::from_be_bytes([fixed[2], fixed[3]])),
            protocol: fixed[9],
            hop_limit: fixed[8],
            ecn: fixed[1] & 3,
            fragment: u16::from_be_bytes([fixed[6], fixed[7]]) & IPV4_FRAGMENT,
            addresses: &fixed[12..20],
        })
    }

    #[inline]
    fn parse_v6(fixed: &'a [u8; IPV6_LEN]) -> Option<Header<'a>> {
        if fixed[0] >> 4 != 6 {
            return None;
        }
        Some(Header {
            version: Version::V6,
            len: IPV6_LEN,
            total_len: IPV6_LEN + usize::from(u16::from_be_bytes([fixed[4], fixed[5]])),
            protocol: fixed[6],
            hop_limit: fixed[7],
            ecn: fixed[1] >> 4 & 3,
            fragment: 0,
            addresses: &fixed[8..40],
        })
    }

    /// True for IPv4.
    #[inline]
    pub fn is_v4(&self) -> bool {
        self.version == Version::V4
    }

    /// True for a fragment of an IPv4 packet, the first one included.
    #[inline]
    pub fn is_fragment(&self) -> bool {
        self.fragment != 0
    }

    /// The place of `packet`, from which this header was parsed, in its datagram (RFC 791; RFC 8200, section 4.5). `None` if it is no
    /// fragment. An IPv6 fragment header is found directly behind the fixed header.
    pub fn fragment(&self, packet: &[u8]) -> Option<Fragment> {
        let (identification, units, more, header_len) = if self.is_v4() {
            let identification = u16::from_be_bytes([*packet.get(4)?, *packet.get(5)?]);
            let (units, more) =
                (self.fragment & IPV4_FRAGMENT_OFFSET, self.fragment & !IPV4_FRAGMENT_OFFSET != 0);
            (u32::from(identification), units, more, self.len)
        } else {
            let header: &[u8; 8] =
                packet.get(IPV6_LEN..)?.first_chunk().filter(|_| self.protocol == FRAGMENT)?;
            let place = u16::from_be_bytes([header[2], header[3]]);
            let identification = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
            (identification, place >> 3, place & 1 != 0, IPV6_LEN + 8)
        };
        let start = u32::from(units) * 8;
        let end = start + self.total_len.saturating_sub(header_len) as u32;
        (start != 0 || more).then_some(Fragment { identification, start, end, last: !more })
    }

    /// Source address.
    pub fn source(&self) -> IpAddr {
        address(&self.addresses[..self.addresses.len() / 2])
    }

    /// Destination address.
    pub fn destination(&self) -> IpAddr {
        address(&self.addresses[self.addresses.len() / 2..])
    }

    /// Finds the upper layer of `packet`, from which this header was parsed, behind hop-by-hop options, routing, fragment and
    /// destination options headers (RFC 8200, section 4).
    pub fn upper_layer(&self, packet: &[u8]) -> UpperLayer {
        let later_fragment = self.fragment & IPV4_FRAGMENT_OFFSET != 0;
        let mut upper = UpperLayer { protocol: self.protocol, offset: self.len, later_fragment };
        if self.is_v4() {
            return upper;
        }
        for _ in 0..EXTENSIONS_MAX {
            let header: Option<&[u8; 8]> = packet.get(upper.offset..).and_then(<[u8]>::first_chunk);
            let (HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION_OPTIONS, Some(header)) =
                (upper.protocol, header)
            else {
                break;
            };
            if upper.protocol == FRAGMENT {
                upper.later_fragment = u16::from_be_bytes([header[2], header[3]]) >> 3 != 0;
                upper.offset += 8;
            } else {
                // The length field counts units of eight bytes beyond the first.
                upper.offset += 8 * (usize::from(header[1]) + 1);
            }
            upper.protocol = header[0];
            if upper.later_fragment {
                break;
            }
        }
        upper
    }
}

fn address(bytes: &[u8]) -> IpAddr {
    match (<[u8; 4]>::try_from(bytes), <[u8; 16]>::try_from(bytes)) {
        (Ok(octets), _) => Ipv4Addr::from(octets).into(),
        (_, Ok(octets)) => Ipv6Addr::from(octets).into(),
        _ => unreachable!("addresses have 4 or 16 bytes"),
    }
}

#[cfg(test)]
#[path = "ip_tests.rs"]
mod tests;
