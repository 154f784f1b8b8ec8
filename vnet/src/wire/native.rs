//! The native datagram: a 16-byte header, then a fragment of a frame, a whole frame, or a bundle of small whole frames.
//!
//! ```text
//! 0      version (high 4 bits, = 1) | type (low 4): 0 frame, 1 bundle, 2 probe, 3 probe reply, 4 keepalive
//! 1      flags: 0x01 LAST, 0x02 OFFLOAD, 0x04 SEALED, 0x38 hops taken, 0xC0 key epoch
//! 2-3    fragment index k
//! 4-7    network id (24 bits) | receive-queue hint (8 bits)
//! 8-15   datagram number N
//! ```
//!
//! All fields are in network byte order. The datagrams of a frame have consecutive numbers, so `N - k` identifies the frame. All
//! fragments but the last have the same size, so fragment `k` starts at `k` times that size: the format cannot express overlaps
//! or gaps. LAST marks the last fragment; a frame in one datagram has `k = 0` and LAST.
//!
//! OFFLOAD: 12 bytes of offload metadata precede the frame, in fragment 0 (the flag has no meaning in the others). In a bundle
//! they precede *each* frame, inside the length of its entry. An entry of a bundle is a `u16` length and that many bytes. Types
//! other than frame have `k = 0`.

use super::ethernet;
use super::offload::{Offload, WIRE_LEN};

/// Bytes of the header.
pub const HEADER_LEN: usize = 16;
/// Bytes of the AEAD tag behind a sealed datagram's payload.
pub const TAG_LEN: usize = 16;
/// Protocol version.
pub const VERSION: u8 = 1;
/// Hop limit: a frame that has taken this many hops is not relayed again.
pub const HOPS_MAX: u8 = 7;
/// Bytes of the length before each frame of a bundle.
pub const ENTRY_LEN: usize = 2;

const LAST: u8 = 0x01;
const OFFLOAD: u8 = 0x02;
const SEALED: u8 = 0x04;

/// Datagram type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A frame or a fragment of one.
    Frame = 0,
    /// Several small whole frames.
    Bundle = 1,
    /// A path MTU probe (RFC 8899): tests whether a datagram of this size arrives.
    Probe = 2,
    /// The reply to a probe, of the same size.
    ProbeReply = 3,
    /// Has no payload; keeps NAT and firewall state on the path alive.
    Keepalive = 4,
}

/// A native header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Type of the payload.
    pub kind: Kind,
    /// True for the last fragment of the frame.
    pub last: bool,
    /// True when offload metadata precedes the frame.
    pub offload: bool,
    /// True when the payload is encrypted.
    pub sealed: bool,
    /// Number of hops taken, at most [`HOPS_MAX`].
    pub hops: u8,
    /// Key epoch modulo 4.
    pub epoch: u8,
    /// Fragment index k.
    pub index: u16,
    /// Network id, 24 bits.
    pub network: u32,
    /// The sender's hint for the receive queue.
    pub queue: u8,
    /// Datagram number N, at least `index + 1`.
    pub number: u64,
}

/// Reason to refuse a native header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The datagram is shorter than a header.
    #[error("shorter than the native header of {HEADER_LEN} bytes")]
    Short,
    /// Unknown version or type: the peer is newer, or the datagram is not a native one.
    #[error("unknown native version or type {0:#04x}")]
    Version(u8),
    /// Datagram number and fragment index contradict each other.
    #[error("datagram number and fragment index contradict each other")]
    Contradiction,
}

impl Header {
    /// Header of a clear datagram that is complete by itself: fragment 0, the last one, of a frame that no relay has passed on.
    pub const fn whole(kind: Kind, network: u32, number: u64) -> Header {
        Header {
            kind,
            last: true,
            offload: false,
            sealed: false,
            hops: 0,
            epoch: 0,
            index: 0,
            network,
            queue: 0,
            number,
        }
    }

    /// Parses the header of `datagram`. Returns it with the payload.
    ///
    /// Guarantees `number > index`, so [`Header::frame_id`] is at least 1, and `index == 0` for all types except frame.
    #[inline]
    pub fn parse(datagram: &[u8]) -> Result<(Header, &[u8]), HeaderError> {
        let (header, payload) = datagram.split_first_chunk::<HEADER_LEN>().ok_or(HeaderError::Short)?;
        let [first, flags, k0, k1, v0, v1, v2, queue, number @ ..] = *header;
        let kind = match first {
            0x10 => Kind::Frame,
            0x11 => Kind::Bundle,
            0x12 => Kind::Probe,
            0x13 => Kind::ProbeReply,
            0x14 => Kind::Keepalive,
            other => return Err(HeaderError::Version(other)),
        };
        let header = Header {
            kind,
            last: flags & LAST != 0,
            offload: flags & OFFLOAD != 0,
            sealed: flags & SEALED != 0,
            hops: flags >> 3 & 7,
            epoch: flags >> 6,
            index: u16::from_be_bytes([k0, k1]),
            network: u32::from_be_bytes([0, v0, v1, v2]),
            queue,
            number: u64::from_be_bytes(number),
        };
        if header.number <= u64::from(header.index) || (header.index != 0 && kind != Kind::Frame) {
            return Err(HeaderError::Contradiction);
        }
        Ok((header, payload))
    }

    /// Encodes the header. Truncates values that exceed their field.
    #[inline]
    pub fn to_bytes(&self) -> [u8; HEADER_LEN] {
        let flag = |set, bit| if set { bit } else { 0 };
        let flags = flag(self.last, LAST)
            | flag(self.offload, OFFLOAD)
            | flag(self.sealed, SEALED)
            | ((self.hops & 7) << 3)
            | ((self.epoch & 3) << 6);
        let [k0, k1] = self.index.to_be_bytes();
        let [_, v0, v1, v2] = self.network.to_be_bytes();
        let [n0, n1, n2, n3, n4, n5, n6, n7] = self.number.to_be_bytes();
        let first = (VERSION << 4) | self.kind as u8;
        [first, flags, k0, k1, v0, v1, v2, self.queue, n0, n1, n2, n3, n4, n5, n6, n7]
    }

    /// Identifies the frame within its link: the number of its fragment 0.
    #[inline]
    pub fn frame_id(&self) -> u64 {
        self.number - u64::from(self.index)
    }

    /// True when this datagram holds the whole frame.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.index == 0 && self.last
    }
}

/// Splits off the offload metadata before a frame, if `present`. `None` when it is truncated. The metadata is unchecked: pass it
/// to [`Offload::checked`].
#[inline]
pub fn metadata(bytes: &[u8], present: bool) -> Option<(Offload, &[u8])> {
    if !present {
        return Some((Offload::default(), bytes));
    }
    let (metadata, frame) = bytes.split_first_chunk::<WIRE_LEN>()?;
    Some((Offload::from_wire(metadata), frame))
}

/// The frames of a bundle, in order.
#[derive(Clone, Debug)]
pub struct Bundle<'a> {
    rest: &'a [u8],
    offload: bool,
}

impl<'a> Bundle<'a> {
    /// Checks a bundle's payload as a whole: at least one frame, all lengths within the payload, no bytes left over, metadata
    /// complete where `offload` announces it, and at least an Ethernet header in each entry. `None` otherwise: a bad bundle
    /// counts as one bad datagram, not as the 32 000 empty frames that could fit into it.
    #[inline]
    pub fn checked(payload: &'a [u8], offload: bool) -> Option<Bundle<'a>> {
        let bundle = Bundle { rest: payload, offload };
        let mut walk = bundle.clone();
        while !walk.rest.is_empty() {
            walk.step().filter(|(_, frame)| frame.len() >= ethernet::HEADER_LEN)?;
        }
        (!payload.is_empty()).then_some(bundle)
    }

    /// The entries not taken yet.
    #[inline]
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    #[inline]
    fn step(&mut self) -> Option<(Offload, &'a [u8])> {
        let (len, rest) = self.rest.split_first_chunk::<ENTRY_LEN>()?;
        let (entry, rest) = rest.split_at_checked(usize::from(u16::from_be_bytes(*len)))?;
        let frame = metadata(entry, self.offload)?;
        self.rest = rest;
        Some(frame)
    }
}

impl<'a> Iterator for Bundle<'a> {
    /// Unchecked metadata, and the frame that it belongs to.
    type Item = (Offload, &'a [u8]);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        self.step()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_header_has_the_documented_layout() {
        let header = Header {
            last: true,
            offload: true,
            hops: 5,
            epoch: 2,
            index: 0x0102,
            network: 0xa1_b2c3,
            queue: 9,
            number: 0x1122_3344_5566_7788,
            ..Header::whole(Kind::Frame, 1, 1)
        };
        let bytes = header.to_bytes();
        assert_eq!(bytes[..8], [0x10, 0x01 | 0x02 | 5 << 3 | 2 << 6, 1, 2, 0xa1, 0xb2, 0xc3, 9]);
        assert_eq!(bytes[8..], [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]);
        assert_eq!(header.frame_id(), 0x1122_3344_5566_7788 - 0x0102);
        assert!(!header.is_whole());
    }

    #[test]
    fn contradictions_are_refused() {
        let good = Header::whole(Kind::Frame, 1, 1).to_bytes();
        assert!(Header::parse(&good).is_ok());
        assert_eq!(Header::parse(&good[..15]), Err(HeaderError::Short));
        for (at, value, error) in [
            (0, 0x15, HeaderError::Version(0x15)),
            (0, 0x20, HeaderError::Version(0x20)),
            (3, 1, HeaderError::Contradiction),
            (15, 0, HeaderError::Contradiction),
        ] {
            let mut bad = good;
            bad[at] = value;
            assert_eq!(Header::parse(&bad), Err(error));
        }
        let indexed = Header { index: 1, number: 5, ..Header::whole(Kind::Bundle, 1, 1) };
        assert_eq!(Header::parse(&indexed.to_bytes()), Err(HeaderError::Contradiction));
    }

    proptest! {
        #[test]
        fn any_header_round_trips(
            kind in 0u8..5, flags: u8, index: u16, network in 0u32..1 << 24, queue: u8, number in 1u64..,
        ) {
            let kinds = [Kind::Frame, Kind::Bundle, Kind::Probe, Kind::ProbeReply, Kind::Keepalive];
            let kind = kinds[usize::from(kind)];
            let index = if kind == Kind::Frame { index.min((number - 1).min(65535) as u16) } else { 0 };
            let header = Header {
                kind, index, network, queue, number,
                last: flags & 1 != 0, offload: flags & 2 != 0, sealed: flags & 4 != 0,
                hops: flags >> 3 & 7, epoch: flags >> 6,
            };
            let mut bytes = header.to_bytes().to_vec();
            bytes.push(7);
            prop_assert_eq!(Header::parse(&bytes), Ok((header, &[7u8][..])));
        }

        #[test]
        fn bundles_round_trip_and_truncation_is_noticed(
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 14..80), 1..8), offload: bool, cut in 1usize..90,
        ) {
            let metadata = Offload { hdr_len: 54, csum_start: 34, flags: 1, ..Offload::default() };
            let mut payload = vec![];
            for frame in &frames {
                payload.extend(((frame.len() + if offload { WIRE_LEN } else { 0 }) as u16).to_be_bytes());
                if offload { payload.extend(metadata.to_wire()); }
                payload.extend(frame);
            }
            let expected = if offload { metadata } else { Offload::default() };
            let got: Vec<_> = Bundle::checked(&payload, offload).unwrap().collect();
            prop_assert_eq!(got.len(), frames.len());
            for ((offload, got), frame) in got.into_iter().zip(&frames) {
                prop_assert_eq!(got, &frame[..]);
                prop_assert_eq!(offload, expected);
            }
            // One frame is shorter than an Ethernet header: the bundle is refused.
            for short in [0, 13] {
                let entry = vec![0; short + if offload { WIRE_LEN } else { 0 }];
                let with_short = [&payload[..], &(entry.len() as u16).to_be_bytes(), &entry].concat();
                prop_assert!(Bundle::checked(&with_short, offload).is_none());
            }
            // Truncated inside the last entry, the bundle is refused. Truncated between two entries, it would be a shorter, valid
            // bundle.
            let entry = frames.last().map_or(0, Vec::len) + ENTRY_LEN + if offload { WIRE_LEN } else { 0 };
            let cut = 1 + cut % entry.max(2);
            if cut < entry {
                prop_assert!(Bundle::checked(&payload[..payload.len() - cut], offload).is_none());
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), offload: bool) {
            let _ = Header::parse(&bytes);
            if let Some(bundle) = Bundle::checked(&bytes, offload) {
                let meta = if offload { WIRE_LEN } else { 0 };
                let total: usize = bundle.map(|(_, frame)| ENTRY_LEN + meta + frame.len()).sum();
                prop_assert_eq!(total, bytes.len());
            }
        }
    }
}
