//! Infers offload metadata that an encapsulation lost: a partial inner checksum, an inner TCP super-frame.
//!
//! A kernel that encapsulates a local program's frame leaves its checksum, and the segmentation of a TCP super-frame, to the
//! device underneath. A virtual device (veth, a bridge within one machine, a virtual NIC) does neither: the datagram arrives with
//! the inner frame unfinished, and no header says so. A finished checksum is the complement of the sum over pseudo-header *and*
//! payload; a partial one is the plain sum over the pseudo-header alone, and this module tests for that. One finished frame in 65
//! 536 also passes the test. That is harmless: completing its checksum yields the value that the field already holds.

use super::checksum::Sum;
use super::ip::{self, TCP, UDP};
use super::offload::{F_NEEDS_CSUM, GSO_NONE, GSO_TCPV4, GSO_TCPV6, Offload};

/// Infers offload metadata for `frame`, which arrived without any. `whole_max` is the maximum length in bytes of a frame that the
/// path carries unsegmented: a longer TCP frame with a partial checksum is a super-frame, and its segments are at most that long.
///
/// The result passes [`Offload::checked`] for the frame's length.
#[inline]
pub fn inferred(frame: &[u8], whole_max: usize) -> Offload {
    find(frame, whole_max).unwrap_or_default()
}

fn find(frame: &[u8], whole_max: usize) -> Option<Offload> {
    let (offset, ip) = ip::in_frame(frame)?;
    let checksum_at = match ip.protocol {
        TCP => 16,
        UDP => 6,
        _ => return None,
    };
    if ip.is_fragment() {
        return None;
    }
    let start = offset + ip.len;
    let transport = frame.get(start..offset + ip.total_len)?;
    let field = transport.get(checksum_at..checksum_at + 2)?;
    let sum =
        Sum::default().with(ip.addresses).with_u16(u16::from(ip.protocol)).with_u16(transport.len() as u16);
    if field != sum.partial().to_be_bytes() {
        return None;
    }
    let mut offload = Offload {
        flags: F_NEEDS_CSUM,
        gso_type: GSO_NONE,
        csum_start: start as u16,
        csum_offset: checksum_at as u16,
        ..Offload::default()
    };
    if ip.protocol == TCP && frame.len() > whole_max {
        let headers = start + usize::from(*transport.get(12)? >> 4) * 4;
        offload.gso_type = if ip.is_v4() { GSO_TCPV4 } else { GSO_TCPV6 };
        offload.hdr_len = headers as u16;
        offload.gso_size = u16::try_from(whole_max.checked_sub(headers).filter(|size| *size > 0)?).ok()?;
    }
    Some(offload)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::offload::Accepts;
    use crate::wire::segment;
    use proptest::prelude::*;

    fn frame(ipv4: bool, protocol: u8, payload: &[u8]) -> (Vec<u8>, usize) {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        let transport_len = if protocol == TCP { 20 } else { 8 } + payload.len();
        if ipv4 {
            frame.extend([0x08, 0x00, 0x45, 0]);
            frame.extend(((20 + transport_len) as u16).to_be_bytes());
            frame.extend([0, 1, 0x40, 0, 64, protocol, 0, 0, 10, 77, 1, 1, 10, 77, 2, 1]);
        } else {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend((transport_len as u16).to_be_bytes());
            frame.extend([protocol, 64]);
            frame.extend((0..32).map(|n| n * 3 + 1));
        }
        let start = frame.len();
        let addresses = if ipv4 { start - 8..start } else { start - 32..start };
        let sum = Sum::default()
            .with(&frame[addresses])
            .with_u16(u16::from(protocol))
            .with_u16(transport_len as u16)
            .partial()
            .to_be_bytes();
        if protocol == TCP {
            frame.extend([0, 80, 0, 81, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 1, 0, sum[0], sum[1], 0, 0]);
        } else {
            let [high, low] = (transport_len as u16).to_be_bytes();
            frame.extend([0, 80, 0, 81, high, low, sum[0], sum[1]]);
        }
        frame.extend(payload);
        (frame, start)
    }

    proptest! {
        #[test]
        fn partial_checksums_are_found_and_finished_frames_left_alone(
            ipv4: bool, tcp: bool, payload in prop::collection::vec(any::<u8>(), 1..1000), padding in 0usize..6,
        ) {
            let (bytes, start) = frame(ipv4, if tcp { TCP } else { UDP }, &payload);
            let padded = [&bytes[..], &vec![0; padding]].concat();
            let found = inferred(&padded, 2000);
            prop_assert_eq!((found.flags, usize::from(found.csum_start)), (F_NEEDS_CSUM, start));
            prop_assert_eq!(found.checked(padded.len()), Ok(found));
            let mut finished = bytes.clone();
            let offload = inferred(&bytes, 2000);
            segment::finish(&mut finished.clone(), &offload, &Accepts::NOTHING, &mut |out, _| {
                finished.copy_from_slice(out);
            }).unwrap();
            let at = start + usize::from(offload.csum_offset);
            if finished[at..at + 2] != bytes[at..at + 2] {
                prop_assert!(inferred(&finished, 2000).is_none());
            }
        }

        #[test]
        fn foreign_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..120), whole_max in 0usize..100) {
            let offload = inferred(&bytes, whole_max);
            if bytes.len() >= 14 {
                prop_assert_eq!(offload.checked(bytes.len()), Ok(offload));
            }
        }
    }

    #[test]
    fn a_tcp_frame_longer_than_the_path_carries_is_a_super_frame() {
        for ipv4 in [true, false] {
            let (bytes, start) = frame(ipv4, TCP, &[5; 4000]);
            let offload = inferred(&bytes, 1450);
            assert_eq!(usize::from(offload.gso_size), 1450 - start - 20);
            assert_eq!(offload.checked(bytes.len()), Ok(offload));
            assert_eq!(inferred(&bytes, bytes.len()).gso_type, GSO_NONE);
            assert!(inferred(&bytes, start + 20).is_none(), "no room for a segment");
        }
    }
}
