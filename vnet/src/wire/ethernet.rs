//! Ethernet II addresses and headers (IEEE 802.3). VLAN tags (802.1Q, 802.1ad) are skipped and left unchanged.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Bytes of an untagged Ethernet header: destination, source, type.
pub const HEADER_LEN: usize = 14;
/// Bytes of one 802.1Q tag.
pub const VLAN_TAG_LEN: usize = 4;

/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of ARP.
pub const ETHERTYPE_ARP: u16 = 0x0806;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;
/// EtherType of an 802.1Q tag.
pub const ETHERTYPE_VLAN: u16 = 0x8100;
/// EtherType of an 802.1ad service tag.
pub const ETHERTYPE_QINQ: u16 = 0x88a8;

/// A 48-bit MAC address, in transmission order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[cfg_attr(
    feature = "openapi",
    derive(utoipa::ToSchema),
    schema(value_type = String, pattern = "^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$", examples("52:54:00:12:34:56"))
)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// `ff:ff:ff:ff:ff:ff`
    pub const BROADCAST: Mac = Mac([0xff; 6]);

    /// True for group addresses (broadcast included): the I/G bit is set.
    #[inline]
    pub fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// True for a station's address: neither a group address nor all zeros.
    #[inline]
    pub fn is_unicast(self) -> bool {
        !self.is_multicast() && self.0 != [0; 6]
    }

    /// The address as the low 48 bits of an integer, first byte most significant.
    #[inline]
    pub(crate) fn to_u64(self) -> u64 {
        let [a, b, c, d, e, f] = self.0;
        u64::from_be_bytes([0, 0, a, b, c, d, e, f])
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Error for a string that is not a MAC address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a MAC address; write six hexadecimal bytes, as in 52:54:00:12:34:56")]
pub struct MacError(pub String);

impl FromStr for Mac {
    type Err = MacError;

    /// Parses `xx:xx:xx:xx:xx:xx`, either case, exactly two digits per byte.
    fn from_str(text: &str) -> Result<Mac, MacError> {
        let error = || MacError(text.chars().take(64).collect());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or_else(error)?;
            if part.len() != 2 || !part.bytes().all(|c| c.is_ascii_hexdigit()) {
                return Err(error());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| error())?;
        }
        if parts.next().is_some() { Err(error()) } else { Ok(Mac(bytes)) }
    }
}

impl TryFrom<String> for Mac {
    type Error = MacError;
    fn try_from(text: String) -> Result<Mac, MacError> {
        text.parse()
    }
}

impl From<Mac> for String {
    fn from(mac: Mac) -> String {
        mac.to_string()
    }
}

/// The payload behind the Ethernet header and its tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload {
    /// EtherType behind all tags.
    pub ethertype: u16,
    /// Offset of the payload's first byte.
    pub offset: usize,
}

/// Destination and source address. `None` when `frame` is shorter than a header.
#[inline]
pub fn addresses(frame: &[u8]) -> Option<(Mac, Mac)> {
    let header: &[u8; HEADER_LEN] = frame.first_chunk()?;
    let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, ..] = *header;
    Some((Mac([d0, d1, d2, d3, d4, d5]), Mac([s0, s1, s2, s3, s4, s5])))
}

/// Finds the EtherType behind at most two tags (802.1Q, 802.1ad). `None` when the frame ends before it or has more tags.
#[inline]
pub fn payload(frame: &[u8]) -> Option<Payload> {
    let mut offset = HEADER_LEN - 2;
    for _ in 0..=2 {
        let ethertype = u16::from_be_bytes(*frame.get(offset..)?.first_chunk()?);
        offset += 2;
        if ethertype != ETHERTYPE_VLAN && ethertype != ETHERTYPE_QINQ {
            return Some(Payload { ethertype, offset });
        }
        offset += 2;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_text_round_trip() {
        let mac: Mac = "52:54:00:AB:cd:ef".parse().unwrap();
        assert_eq!(mac.to_string(), "52:54:00:ab:cd:ef");
        assert_eq!(mac.to_u64(), 0x5254_00ab_cdef);
        for bad in [
            "",
            "52:54:00:ab:cd",
            "52:54:00:ab:cd:ef:01",
            "5:54:00:ab:cd:ef",
            "52-54-00-ab-cd-ef",
            "+1:54:00:ab:cd:ef",
        ] {
            assert!(bad.parse::<Mac>().is_err(), "{bad}");
        }
    }

    #[test]
    fn group_addresses() {
        assert!(Mac::BROADCAST.is_multicast());
        assert!(!Mac([0; 6]).is_unicast());
        assert!(Mac([2, 0, 0, 0, 0, 1]).is_unicast());
    }

    #[test]
    fn tags_are_skipped() {
        let mut frame = vec![0u8; 12];
        frame.extend([0x81, 0x00, 0x00, 0x05, 0x08, 0x00]);
        assert_eq!(payload(&frame), Some(Payload { ethertype: ETHERTYPE_IPV4, offset: 18 }));
        frame.truncate(17);
        assert_eq!(payload(&frame), None);
        assert_eq!(addresses(&frame[..13]), None);
    }

    #[test]
    fn more_than_two_tags_are_refused() {
        let frame: Vec<u8> = [0u8; 12].into_iter().chain([0x81, 0x00, 0, 1].repeat(8)).collect();
        assert_eq!(payload(&frame), None);
    }
}
