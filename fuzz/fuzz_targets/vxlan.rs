//! VXLAN datagrams from arbitrary bytes: the header, and the offloads inferred for the inner frame.
//!
//! Input: two bytes with the maximum frame length of the path, then the datagram.
//!
//! Invariants: no panic; a header re-encodes to the same bytes except for reserved bits; inferred offload metadata passes the
//! check; segmentation with it loses no byte.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vnet::frame::FRAME_MAX;
use vnet::wire::offload::{Accepts, GSO_NONE};
use vnet::wire::segment::{self, Cut};
use vnet::wire::{partial, vxlan};

fuzz_target!(|data: &[u8]| {
    let Some((whole_max, datagram)) = data.split_first_chunk::<2>() else { return };
    let whole_max = usize::from(u16::from_be_bytes(*whole_max));
    let Ok((vni, frame)) = vxlan::parse(datagram) else { return };
    assert!(vni < 1 << 24 && frame.len() >= 14);
    let again = [&vxlan::header(vni)[..], frame].concat();
    assert_eq!(vxlan::parse(&again), Ok((vni, frame)));
    assert_eq!(again[8..], datagram[8..]);
    let offload = partial::inferred(frame, whole_max);
    assert_eq!(offload.checked(frame.len()), Ok(offload));
    if frame.len() > FRAME_MAX || offload.is_none() {
        return;
    }
    assert!(offload.gso_kind() == GSO_NONE || frame.len() > whole_max);
    let _ = segment::finish(&mut frame.to_vec(), &offload, &Accepts::NOTHING, &mut |piece, left| {
        assert!(left.is_none() && piece.len() <= frame.len());
    });
    let Ok(cut) = Cut::new(&frame[..frame.len().min(128)], frame.len(), &offload, whole_max) else { return };
    let mut total = 0;
    for index in 0..cut.count() {
        let mut segment = vec![0; cut.segment_len(index)];
        cut.write_headers(index, &mut segment);
        assert!(segment.len() <= whole_max, "a segment exceeds the path");
        assert_eq!(segment[..12], frame[..12]);
        total += segment.len() - cut.headers_len();
    }
    assert_eq!(total + cut.headers_len(), frame.len());
});
