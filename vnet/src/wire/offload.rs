//! Offload metadata: what a guest asks its NIC to finish (virtio 1.2 section 5.1.6, `struct virtio_net_hdr`).
//!
//! One [`Offload`] travels with each frame. It has two outer forms: the little-endian virtio-net header in guest memory
//! and on a TAP, and 12 bytes in network byte order at the start of a native datagram whose OFFLOAD flag is set
//! (DESIGN.md section 6).

use super::ethernet::HEADER_LEN;

/// Bytes of `struct virtio_net_hdr_mrg_rxbuf` (virtio 1.2; TAP after `TUNSETVNETHDRSZ`).
pub const VIRTIO_NET_HDR_LEN: usize = 12;
/// Bytes of the metadata in a native datagram.
pub const WIRE_LEN: usize = 12;

/// `flags`: the checksum from `csum_start` is still to be completed.
pub const F_NEEDS_CSUM: u8 = 1;
/// `flags`: the checksum was verified by somebody the receiver may trust.
pub const F_DATA_VALID: u8 = 2;

/// `gso_type`: not a super-frame.
pub const GSO_NONE: u8 = 0;
/// `gso_type`: TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// `gso_type`: TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// `gso_type`: UDP datagrams to be cut at `gso_size` (USO).
pub const GSO_UDP_L4: u8 = 5;
/// `gso_type` modifier: the first segment carries CWR (RFC 3168).
pub const GSO_ECN: u8 = 0x80;

/// What is left to do on a frame: complete a checksum, cut a super-frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// `F_*` bits.
    pub flags: u8,
    /// `GSO_*` value.
    pub gso_type: u8,
    /// Bytes of all headers, a hint from the sender; never trusted.
    pub hdr_len: u16,
    /// Payload bytes of each segment of a super-frame.
    pub gso_size: u16,
    /// Where summing starts, from the frame's first byte.
    pub csum_start: u16,
    /// Where the checksum goes, from `csum_start`.
    pub csum_offset: u16,
}

/// Why offload metadata was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OffloadError {
    /// The checksum would be read or written past the end of the frame, or in its Ethernet header.
    #[error("checksum position lies outside the frame's payload")]
    ChecksumOutside,
    /// A super-frame with segments of no size.
    #[error("super-frame with gso_size 0")]
    ZeroSegment,
    /// A `gso_type` this version does not know, or one without its checksum request.
    #[error("unknown or inconsistent gso_type")]
    GsoType,
}

/// What a receiver is able to take unfinished.
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
    /// Takes everything; native links and TAPs with all offloads.
    pub const ALL: Accepts = Accepts { csum: true, tso4: true, tso6: true, uso: true, ecn: true };
    /// Takes only finished Ethernet frames.
    pub const NOTHING: Accepts = Accepts { csum: false, tso4: false, tso6: false, uso: false, ecn: false };
}

impl Offload {
    /// True when the frame is finished: nothing to sum, nothing to cut.
    #[inline]
    pub fn is_none(&self) -> bool {
        self.flags & F_NEEDS_CSUM == 0 && self.gso_type == GSO_NONE
    }

    /// The kind of super-frame, without the ECN modifier.
    #[inline]
    pub fn gso_kind(&self) -> u8 {
        self.gso_type & !GSO_ECN
    }

    /// True when a receiver that accepts `accepts` may get the frame as it is.
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

    /// Checks foreign metadata against a frame of `len` bytes and strips what means nothing.
    ///
    /// After this, `14 <= csum_start` and `csum_start + csum_offset + 2 <= len` hold for a partial checksum, and a
    /// super-frame has a known kind,
    /// a positive `gso_size` and a partial checksum (virtio 1.2 section 5.1.6.2 requires it).
    #[inline]
    pub fn checked(mut self, len: usize) -> Result<Offload, OffloadError> {
        if self.flags & F_NEEDS_CSUM != 0 {
            // Completing a checksum must never rewrite the addresses that the frame was checked and routed by.
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

    /// Reads a virtio-net header (little endian). Bytes 10 and 11 (`num_buffers`) are ignored.
    #[inline]
    pub fn from_virtio(bytes: &[u8; VIRTIO_NET_HDR_LEN]) -> Offload {
        Offload::read(bytes, u16::from_le_bytes)
    }

    /// Writes a virtio-net header (little endian) with `num_buffers`.
    #[inline]
    pub fn to_virtio(&self, num_buffers: u16) -> [u8; VIRTIO_NET_HDR_LEN] {
        self.write(num_buffers, u16::to_le_bytes)
    }

    /// The same header as two numbers whose little-endian bytes follow one another: 8 bytes and 4.
    ///
    /// To be written as they are where frames are many. A copy of [`Offload::to_virtio`]'s bytes would load what was just stored
    /// in smaller pieces, which processors do only when all earlier stores have reached the cache: those into a
    /// guest's memory, which another core has.
    #[inline]
    pub fn to_virtio_words(&self, num_buffers: u16) -> (u64, u32) {
        let bytes = u64::from(self.flags) | u64::from(self.gso_type) << 8;
        let lengths = u64::from(self.hdr_len) << 16 | u64::from(self.gso_size) << 32;
        let words = bytes | lengths | u64::from(self.csum_start) << 48;
        (words, u32::from(self.csum_offset) | u32::from(num_buffers) << 16)
    }

    /// Reads the metadata of a native datagram (network byte order); the reserved word is ignored.
    #[inline]
    pub fn from_wire(bytes: &[u8; WIRE_LEN]) -> Offload {
        Offload::read(bytes, u16::from_be_bytes)
    }

    /// Writes the metadata of a native datagram (network byte order), reserved word zero.
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
    fn both_forms_round_trip() {
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
