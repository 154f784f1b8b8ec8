//! Ethernet headers, checksums, offload metadata and software segmentation of arbitrary bytes.
//!
//! Input: a virtio-net header of 12 bytes, a byte with the offloads that the receiver accepts, and a frame.
//!
//! Invariants: no panic; offsets lie within the frame; the fast checksum equals the plain one; software offload produces frames
//! whose metadata the receiver accepts and that pass the check again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vnet::frame::FRAME_MAX;
use vnet::wire::checksum::Sum;
use vnet::wire::ethernet::{self, HEADER_LEN};
use vnet::wire::ip;
use vnet::wire::offload::{Accepts, Offload, VIRTIO_NET_HDR_LEN};
use vnet::wire::{flow, partial, segment};

fuzz_target!(|data: &[u8]| {
    let Some((header, rest)) = data.split_first_chunk::<VIRTIO_NET_HDR_LEN>() else { return };
    let Some((&bits, frame)) = rest.split_first() else { return };
    views(frame);
    assert_eq!(Sum::default().with(frame).finish(), plain_checksum(frame));
    let offload = Offload::from_virtio(header);
    assert_eq!(Offload::from_wire(&offload.to_wire()), offload);
    let Ok(offload) = offload.checked(frame.len()) else { return };
    assert_eq!(offload.checked(frame.len()), Ok(offload));
    if !(HEADER_LEN..=FRAME_MAX).contains(&frame.len()) {
        return;
    }
    let bit = |n: u8| bits >> n & 1 != 0;
    let accepts = Accepts { csum: bit(0), tso4: bit(1), tso6: bit(2), uso: bit(3), ecn: bit(4) };
    let mut copy = frame.to_vec();
    let mut emitted = 0;
    let result = segment::finish(&mut copy, &offload, &accepts, &mut |piece, left| {
        emitted += 1;
        assert!((HEADER_LEN..=frame.len()).contains(&piece.len()));
        assert_eq!(piece[..HEADER_LEN], frame[..HEADER_LEN]);
        assert!(left.fits(&accepts), "{left:?} for {accepts:?}");
        assert_eq!(left.checked(piece.len()), Ok(left));
    });
    assert_eq!(result.is_ok(), emitted >= 1, "all or nothing");
    assert!(emitted <= frame.len());
    if offload.fits(&accepts) {
        assert!(result.is_ok() && emitted == 1);
    }
});

fn views(frame: &[u8]) {
    match ethernet::addresses(frame) {
        Some((dst, src)) => assert_eq!([dst.0, src.0].concat(), frame[..12]),
        None => assert!(frame.len() < HEADER_LEN),
    }
    if let Some(payload) = ethernet::payload(frame) {
        assert!(payload.offset <= frame.len());
        assert_eq!(payload.ethertype.to_be_bytes(), frame[payload.offset - 2..payload.offset]);
        assert!(
            payload.ethertype != ethernet::ETHERTYPE_VLAN && payload.ethertype != ethernet::ETHERTYPE_QINQ
        );
    }
    flow::hash(frame);
    let inferred = partial::inferred(frame, 1514);
    if let Some((offset, header)) = ip::in_frame(frame) {
        assert_eq!(header.addresses.len(), if header.is_v4() { 8 } else { 32 });
        assert!(
            frame[offset..].starts_with(&[if header.is_v4() { 0x40 } else { 0x60 } | frame[offset] & 0xf])
        );
        assert!(header.upper_layer(&frame[offset..]).offset >= header.len);
        assert_eq!(inferred.checked(frame.len()), Ok(inferred));
    } else {
        assert!(inferred.is_none(), "no IP, no checksum");
    }
}

/// The Internet checksum, word by word (RFC 1071).
fn plain_checksum(bytes: &[u8]) -> u16 {
    let mut sum = 0u64;
    for pair in bytes.chunks(2) {
        sum += u64::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
