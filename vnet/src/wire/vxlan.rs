//! The VXLAN header (RFC 7348 section 5): 8 bytes between UDP and the inner Ethernet frame.
//!
//! ```text
//! 0      flags: 0x08 I (the network identifier is valid), all others reserved
//! 1-3    reserved
//! 4-6    VXLAN network identifier (VNI)
//! 7      reserved
//! ```
//!
//! Reserved bits are sent as zero and ignored on receipt (section 5). The VNI is the overlay's network id.

use super::ethernet;

/// Bytes of the header.
pub const HEADER_LEN: usize = 8;
/// UDP port that IANA assigned to VXLAN.
pub const PORT: u16 = 4789;
/// UDP port of the wire, the kernel's own path between vnet hosts. Not [`PORT`], which other programs of the host may use.
pub const WIRE_PORT: u16 = 9789;
/// Longest TSO frame in bytes that takes the wire: with the headers of IPv4 (20), UDP (8) and VXLAN around it, it still fits into one
/// IP packet.
pub const SUPER_FRAME_MAX: usize = 65_535 - 20 - 8 - HEADER_LEN;

/// The I flag.
const VALID: u8 = 0x08;

/// Destination of a frame that vnetd writes to the wire's TAP: its last bytes, which the program `core_to_wire` removes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct WireTail {
    /// The other host's IPv4 address.
    pub remote: u32,
    /// The network id (VNI).
    pub network: u32,
    /// 0, or the underlay's device by which the frame's IP packet leaves without a tunnel.
    pub underlay: u32,
    /// IPv4 address of the router there; 0: the kernel looks it up.
    pub next_hop: u32,
}

impl WireTail {
    /// Its bytes.
    pub fn bytes(&self) -> [u8; size_of::<WireTail>()] {
        let mut bytes = [0; size_of::<WireTail>()];
        let words = [self.remote, self.network, self.underlay, self.next_hop];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

/// Reason to refuse a VXLAN packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VxlanError {
    /// The packet is shorter than a VXLAN and an Ethernet header.
    #[error("shorter than a VXLAN and an Ethernet header")]
    Short,
    /// The I flag is not set: the network identifier is invalid.
    #[error("the I flag is not set")]
    NoNetwork,
}

/// Parses the header of `datagram`. Returns the VNI and the inner frame, which has at least an Ethernet header.
#[inline]
pub fn parse(datagram: &[u8]) -> Result<(u32, &[u8]), VxlanError> {
    let (header, frame) = datagram.split_first_chunk::<HEADER_LEN>().ok_or(VxlanError::Short)?;
    if frame.len() < ethernet::HEADER_LEN {
        return Err(VxlanError::Short);
    }
    let [flags, _, _, _, v0, v1, v2, _] = *header;
    if flags & VALID == 0 {
        return Err(VxlanError::NoNetwork);
    }
    Ok((u32::from_be_bytes([0, v0, v1, v2]), frame))
}

/// Encodes the header for the low 24 bits of `vni`.
#[inline]
pub fn header(vni: u32) -> [u8; HEADER_LEN] {
    let [_, v0, v1, v2] = vni.to_be_bytes();
    [VALID, 0, 0, 0, v0, v1, v2, 0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_bits_are_sent_as_zero_and_ignored() {
        let frame = [7u8; 60];
        let datagram = [&header(0x12_3456)[..], &frame].concat();
        assert_eq!(datagram[..8], [8, 0, 0, 0, 0x12, 0x34, 0x56, 0]);
        assert_eq!(parse(&datagram), Ok((0x12_3456, &frame[..])));
        let mut other = datagram.clone();
        other[..4].copy_from_slice(&[0xff; 4]);
        other[7] = 0xff;
        assert_eq!(parse(&other), Ok((0x12_3456, &frame[..])));
    }

    #[test]
    fn short_packets_and_invalid_vnis_are_refused() {
        let datagram = [&header(1)[..], &[0; 14]].concat();
        assert!(parse(&datagram).is_ok());
        assert_eq!(parse(&datagram[..21]), Err(VxlanError::Short));
        assert_eq!(parse(&[]), Err(VxlanError::Short));
        let mut silent = datagram;
        silent[0] = 0xf7;
        assert_eq!(parse(&silent), Err(VxlanError::NoNetwork));
    }
}
