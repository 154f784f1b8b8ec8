//! Proofs: the arithmetic of segments.

use super::*;
use crate::proof::{Choices, bound, proofs};

/// Largest payload of a super-frame: a frame of maximum size with the shortest headers.
const PAYLOAD_MAX: usize = 65_553 - 42;

/// Headers of any length and kind, as [`Headers::read`] accepts them.
fn any_headers(choices: &mut Choices) -> Headers {
    let (ipv4, tcp) = (choices.flag(), choices.flag());
    let ip = choices.one_of(&[14, 18, 22]);
    let ip_len = if ipv4 { choices.one_of(&[20, 24, 60]) } else { choices.one_of(&[40, 48]) };
    let transport = ip + ip_len;
    let len = transport + if tcp { choices.one_of(&[20, 32, 60]) } else { UDP_HEADER_LEN };
    Headers { bytes: [0; HEADERS_MAX], len, ip, transport, ipv4, tcp, ecn: choices.flag() }
}

/// A number up to `most`; in tests those below `few`, and those around `edges`.
fn any_number(choices: &mut Choices, few: usize, edges: &[usize], most: usize) -> usize {
    if cfg!(kani) {
        return 1 + choices.below(most as u64) as usize;
    }
    let near = choices.below((edges.len() + 1) as u64) as usize;
    match near.checked_sub(1) {
        None => 1 + choices.below(few as u64) as usize,
        Some(edge) => (edges[edge] + choices.below(7) as usize).saturating_sub(3).clamp(1, most),
    }
}

/// A cut covers the payload exactly, and every length that a header states is the segment's.
fn segments_cover_the_payload(choices: &mut Choices) {
    let headers = any_headers(choices);
    let (counted_from, len) = (headers.counted_from(), headers.len);
    let longest = counted_from + IP_LEN_MAX - len;
    let few = bound(6, 48);
    let payload = any_number(choices, few, &[CUTS_MAX, 48 * CUTS_MAX, longest, PAYLOAD_MAX - 3], PAYLOAD_MAX);
    let size = any_number(choices, few, &[48, payload.div_ceil(2), payload, longest, 65_532], 65_535);
    // The naive number of segments.
    let count = payload / size + usize::from(!payload.is_multiple_of(size));
    let counted = match headers.check(payload, size) {
        Ok(counted) => counted,
        Err(SegmentError::TooMany) => return assert!(count > CUTS_MAX),
        Err(_) => return assert!(len + payload.min(size) - counted_from > IP_LEN_MAX),
    };
    assert_eq!(counted, count);
    assert!((1..=CUTS_MAX).contains(&count));
    let cut = Cut { headers, offload: Offload::default(), payload, size, count };
    let part = |index| cut.segment_len(index) - len;
    // All but the last have `size` bytes; the last has the rest.
    for index in [0, 1, count / 2, count.saturating_sub(2)].into_iter().filter(|index| index + 1 < count) {
        assert_eq!(part(index), size);
        assert!(index * size < payload, "a segment starts inside the payload");
    }
    assert!((1..=size).contains(&part(count - 1)));
    assert_eq!((count - 1) * size + part(count - 1), payload);
    // `amend` stores these in 16 bits.
    let largest = cut.segment_len(0);
    assert!(largest - counted_from <= IP_LEN_MAX && largest - cut.headers.transport <= IP_LEN_MAX);
    assert!(usize::from(cut.offload().hdr_len) == len && usize::from(cut.offload().gso_size) == size);
}

/// Bytes and metadata of a super-frame's headers.
fn head(choices: &mut Choices) -> (Vec<u8>, Offload) {
    let (ipv4, tcp) = (choices.flag(), choices.flag());
    let mut head = vec![0; 12];
    let protocol = if tcp { TCP } else { UDP };
    match ipv4 {
        true => head.extend([&[8, 0, 0x45][..], &[0; 8], &[protocol], &[0; 10]].concat()),
        false => head.extend([&[0x86, 0xdd, 0x60][..], &[0; 5], &[protocol], &[0; 33]].concat()),
    }
    let start = head.len();
    head.resize(start + if tcp { TCP_HEADER_MIN } else { UDP_HEADER_LEN }, 0);
    if tcp {
        head[start + 12] = 0x50;
    }
    let gso_type = match (tcp, ipv4) {
        (true, true) => GSO_TCPV4,
        (true, false) => GSO_TCPV6,
        (false, _) => GSO_UDP_L4,
    };
    let csum_offset = if tcp { 16 } else { 6 };
    let offload = Offload {
        flags: F_NEEDS_CSUM,
        gso_type,
        hdr_len: 0,
        gso_size: 0,
        csum_start: start as u16,
        csum_offset,
    };
    (head, offload)
}

/// Whatever the room: TCP segments fit into it, and `finish` makes as many of the same lengths.
fn segments_fit_the_room(choices: &mut Choices) {
    let (head, mut offload) = head(choices);
    let tcp = offload.gso_type != GSO_UDP_L4;
    let most = bound(7, 20);
    let payload = 1 + choices.below(most) as usize;
    let len = head.len() + payload;
    offload.gso_size = 1 + choices.below(most + 1) as u16;
    let room = head.len() - 1 + choices.below(most + 2) as usize;
    let Ok(cut) = Cut::new(&head, len, &offload, room) else {
        return assert!(tcp && room <= head.len(), "there is room for a byte");
    };
    assert!(!tcp || (0..cut.count()).all(|index| cut.segment_len(index) <= room));
    offload.gso_size = cut.offload().gso_size;
    let mut frame = head.clone();
    frame.extend((0..payload).map(|at| at as u8));
    let (mut index, mut joined) = (0, vec![]);
    let all = finish(&mut frame, &offload, &Accepts::NOTHING, &mut |segment, _| {
        assert_eq!(segment.len(), cut.segment_len(index));
        joined.extend_from_slice(&segment[head.len()..]);
        index += 1;
    });
    assert_eq!((all, index), (Ok(()), cut.count()));
    assert!(joined.into_iter().eq((0..payload).map(|at| at as u8)));
}

proofs! {
    #[cfg_attr(kani, kani::unwind(8))]
    arithmetic: segments_cover_the_payload;
    #[cfg_attr(kani, kani::unwind(24))]
    room: segments_fit_the_room;
}
