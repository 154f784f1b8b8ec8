//! Offload metadata: checksumming and segmentation that a guest leaves to its NIC (virtio 1.2 section 5.1.6, `struct
//! virtio_net_hdr`).
//!
//! Each frame has one [`Offload`]. It has two encodings: the little-endian virtio-net header in guest memory and on a TAP, and 12
//! bytes in network byte order in native datagrams with the OFFLOAD flag (`native.rs`).

use super::ethernet::HEADER_LEN;

/// Bytes of `struct virtio_net_hdr_mrg_rxbuf` (virtio 1.2; TAP after `TUNSETVNETHDRSZ`).
pub const VIRTIO_NET_HDR_LEN: usize = 12;
/// Bytes of the metadata in a native datagram.
pub const WIRE_LEN: usize = 12;

/// `flags`: the checksum from `csum_start` is partial and has to be completed.
pub const F_NEEDS_CSUM: u8 = 1;
/// `flags`: a trusted component has verified the checksum.
pub const F_DATA_VALID: u8 = 2;

/// `gso_type`: not a super-frame.
pub const GSO_NONE: u8 = 0;
/// `gso_type`: TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// `gso_type`: TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// `gso_type`: UDP, segmented at `gso_size` (USO).
pub const GSO_UDP_L4: u8 = 5;
/// `gso_type` modifier: the first segment carries CWR (RFC 3168).
pub const GSO_ECN: u8 = 0x80;

/// Outstanding work on a frame: a partial checksum to complete, or a super-frame to segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// `F_*` bits.
    pub flags: u8,
    /// `GSO_*` value.
    pub gso_type: u8,
    /// Length of all headers in bytes: a hint of the sender, never trusted.
    pub hdr_len: u16,
    /// Payload bytes per segment of a super-frame.
    pub gso_size: u16,
    /// Offset from the frame's first byte at which the checksum starts.
    pub csum_start: u16,
    /// Offset of the checksum field from `csum_start`.
    pub csum_offset: u16,
}

/// Reason to refuse offload metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OffloadError {
    /// The checksum would cover the Ethernet header or lie beyond the end of the frame.
    #[error("checksum position lies outside the frame's payload")]
    ChecksumOutside,
    /// A super-frame with `gso_size` 0.
    #[error("super-frame with gso_size 0")]
    ZeroSegment,
    /// An unknown `gso_type`, or a super-frame without a partial checksum.
    #[error("unknown or inconsistent gso_type")]
    GsoType,
}

/// Offloads that a receiver supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accepts {
    /// Partial checksums (GUEST_CSUM).
    pub csum: bool,
    /// TCP over IPv4 super-frames (GUEST_TSO4).
    pub tso4: bool,
    /// TCP over IPv6 super-frames (GUEST_TSO6).
    pub tso6: bool,
    /// UDP super-frames (GUEST_USO4 and GUEST_USO6 together).
    pub uso: bool,
    /// CWR in super-frames (GUEST_ECN).
    pub ecn: bool,
}

impl Accepts {
    /// All offloads: native links, and TAPs with all offloads on.
    pub const ALL: Accepts = Accepts { csum: true, tso4: true, tso6: true, uso: true, ecn: true };
    /// No offloads: finished Ethernet frames only.
    pub const NOTHING: Accepts = Accepts { csum: false, tso4: false, tso6: false, uso: false, ecn: false };
}

impl Offload {
    /// True when the frame needs no work: it has no partial checksum and is not a super-frame.
    #[inline]
    pub fn is_none(&self) -> bool {
        self.flags & F_NEEDS_CSUM == 0 && self.gso_type == GSO_NONE
    }

    /// The kind of super-frame, without the ECN modifier.
    #[inline]
    pub fn gso_kind(&self) -> u8 {
        self.gso_type & !GSO_ECN
    }

    /// True when a receiver with these offloads may get the frame unchanged.
    #[inline]
    pub fn fits(&self, accepts: &Accepts) -> bool {
        if self.is_none() {
            return true;
        }
        let kind = match self.gso_kind() {
            GSO_NONE => true,
            GSO_TCPV4 => accepts.tso4,
            GSO_TCPV6 => accepts.tso6,
            GSO_UDP_L4 => accepts.uso,
            _ => false,
        };
        accepts.csum && kind && (accepts.ecn || self.gso_type & GSO_ECN == 0)
    }

    /// Checks untrusted metadata against a frame of `len` bytes and clears unused fields.
    ///
    /// Guarantees `14 <= csum_start` and `csum_start + csum_offset + 2 <= len` for a partial checksum, and for a super-frame a
    /// known kind, a positive `gso_size` and a partial checksum (required by virtio 1.2 section 5.1.6.2).
    #[inline]
    pub fn checked(mut self, len: usize) -> Result<Offload, OffloadError> {
        if self.flags & F_NEEDS_CSUM != 0 {
            // Completing the checksum must not rewrite the MAC addresses that the frame was checked and routed by.
            let start = usize::from(self.csum_start);
            if start < HEADER_LEN || start + usize::from(self.csum_offset) + 2 > len {
                return Err(OffloadError::ChecksumOutside);
            }
        } else {
            self.csum_start = 0;
            self.csum_offset = 0;
        }
        self.flags &= F_NEEDS_CSUM | F_DATA_VALID;
        match self.gso_kind() {
            GSO_NONE => {
                if self.gso_type != GSO_NONE {
                    return Err(OffloadError::GsoType);
                }
                self.gso_size = 0;
                self.hdr_len = 0;
            }
            GSO_TCPV4 | GSO_TCPV6 | GSO_UDP_L4 => {
                if self.gso_size == 0 {
                    return Err(OffloadError::ZeroSegment);
                }
                if self.flags & F_NEEDS_CSUM == 0 {
                    return Err(OffloadError::GsoType);
                }
            }
            _ => return Err(OffloadError::GsoType),
        }
        Ok(self)
    }

    /// Decodes a virtio-net header (little endian). Ignores bytes 10 and 11 (`num_buffers`).
    #[inline]
    pub fn from_virtio(bytes: &[u8; VIRTIO_NET_HDR_LEN]) -> Offload {
        Offload::read(bytes, u16::from_le_bytes)
    }

    /// Encodes a virtio-net header (little endian) with `num_buffers`.
    #[inline]
    pub fn to_virtio(&self, num_buffers: u16) -> [u8; VIRTIO_NET_HDR_LEN] {
        self.write(num_buffers, u16::to_le_bytes)
    }

    /// Encodes the same header as two integers whose little-endian bytes follow one another: 8 bytes and 4.
    ///
    /// Used on the hot path. Copying [`Offload::to_virtio`]'s bytes would load 8 bytes that were just stored in smaller pieces.
    /// Store forwarding fails in that case, and the load waits until all earlier stores have reached the cache, including those
    /// to guest memory whose cache lines another core owns.
    #[inline]
    pub fn to_virtio_words(&self, num_buffers: u16) -> (u64, u32) {
        let bytes = u64::from(self.flags) | u64::from(self.gso_type) << 8;
        let lengths = u64::from(self.hdr_len) << 16 | u64::from(self.gso_size) << 32;
        let words = bytes | lengths | u64::from(self.csum_start) << 48;
        (words, u32::from(self.csum_offset) | u32::from(num_buffers) << 16)
    }

    /// Decodes the metadata of a native datagram (network byte order). Ignores the reserved word.
    #[inline]
    pub fn from_wire(bytes: &[u8; WIRE_LEN]) -> Offload {
        Offload::read(bytes, u16::from_be_bytes)
    }

    /// Encodes the metadata of a native datagram (network byte order), reserved word zero.
    #[inline]
    pub fn to_wire(&self) -> [u8; WIRE_LEN] {
        self.write(0, u16::to_be_bytes)
    }

    #[inline]
    fn read(b: &[u8; 12], word: fn([u8; 2]) -> u16) -> Offload {
        Offload {
            flags: b[0],
            gso_type: b[1],
            hdr_len: word([b[2], b[3]]),
            gso_size: word([b[4], b[5]]),
            csum_start: word([b[6], b[7]]),
            csum_offset: word([b[8], b[9]]),
        }
    }

    #[inline]
    fn write(&self, last: u16, word: fn(u16) -> [u8; 2]) -> [u8; 12] {
        let [h0, h1] = word(self.hdr_len);
        let [g0, g1] = word(self.gso_size);
        let [s0, s1] = word(self.csum_start);
        let [o0, o1] = word(self.csum_offset);
        let [l0, l1] = word(last);
        [self.flags, self.gso_type, h0, h1, g0, g1, s0, s1, o0, o1, l0, l1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TSO: Offload = Offload {
        flags: F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
    };

    #[test]
    fn both_encodings_round_trip() {
        assert_eq!(Offload::from_virtio(&TSO.to_virtio(3)), TSO);
        assert_eq!(Offload::from_wire(&TSO.to_wire()), TSO);
        assert_eq!(TSO.to_virtio(0x0102)[10..], [2, 1]);
        assert_eq!(TSO.to_wire()[4..6], [5, 0xa8]);
        let (first, rest) = TSO.to_virtio_words(0x0102);
        assert_eq!([&first.to_le_bytes()[..], &rest.to_le_bytes()].concat(), TSO.to_virtio(0x0102));
    }

    #[test]
    fn hostile_metadata_is_refused() {
        assert_eq!(TSO.checked(51), Err(OffloadError::ChecksumOutside));
        assert_eq!(TSO.checked(52), Ok(TSO));
        assert_eq!(Offload { csum_start: 13, ..TSO }.checked(2000), Err(OffloadError::ChecksumOutside));
        let huge = Offload { csum_start: u16::MAX, csum_offset: u16::MAX, ..TSO };
        assert_eq!(huge.checked(65553), Err(OffloadError::ChecksumOutside));
        assert_eq!(Offload { gso_size: 0, ..TSO }.checked(2000), Err(OffloadError::ZeroSegment));
        assert_eq!(Offload { flags: 0, ..TSO }.checked(2000), Err(OffloadError::GsoType));
        assert_eq!(Offload { gso_type: 3, ..TSO }.checked(2000), Err(OffloadError::GsoType));
        assert_eq!(Offload { gso_type: GSO_ECN, ..TSO }.checked(2000), Err(OffloadError::GsoType));
    }

    #[test]
    fn receivers_get_only_what_they_accept() {
        let csum_only = Accepts { csum: true, ..Accepts::NOTHING };
        assert!(Offload::default().fits(&Accepts::NOTHING));
        assert!(!TSO.fits(&csum_only));
        assert!(TSO.fits(&Accepts { tso4: true, ..csum_only }));
        assert!(!Offload { gso_type: GSO_TCPV4 | GSO_ECN, ..TSO }.fits(&Accepts { tso4: true, ..csum_only }));
        assert!(TSO.fits(&Accepts::ALL));
    }
}
