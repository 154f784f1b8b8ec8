//! Compares the IP header decoder with etherparse, and checks it with packets written out by hand.

use etherparse::{IpSlice, Ipv4HeaderSlice, Ipv6ExtensionSlice, Ipv6HeaderSlice, LaxIpSlice};
use proptest::prelude::*;

use super::*;

/// Bytes that are often an IP header: a plausible first byte, then random bytes.
fn packet() -> impl Strategy<Value = Vec<u8>> {
    let first = prop_oneof![4 => Just(0x45u8), 4 => Just(0x60u8), 1 => 0x44u8..0x50, 1 => any::<u8>()];
    (first, prop::collection::vec(any::<u8>(), 0..100)).prop_map(|(first, mut rest)| {
        rest.insert(0, first);
        rest
    })
}

/// An IPv6 packet with a chain of extension headers in the order that RFC 8200 recommends, then `payload`.
fn extended(chain: &[(u8, u8)], fragment: u16, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut rest = vec![];
    for (index, (kind, units)) in chain.iter().enumerate() {
        let next = chain.get(index + 1).map_or(protocol, |next| next.0);
        if *kind == FRAGMENT {
            rest.extend([next, 0]);
            rest.extend(fragment.to_be_bytes());
            rest.extend([0, 0, 0, 7]);
        } else {
            rest.extend([next, *units]);
            rest.resize(rest.len() + 6 + 8 * usize::from(*units), 0);
        }
    }
    rest.extend(payload);
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((rest.len() as u16).to_be_bytes());
    packet.extend([chain.first().map_or(protocol, |first| first.0), 64]);
    packet.extend((0..32).map(|n| n * 5 + 1));
    packet.extend(rest);
    packet
}

proptest! {
    /// Every field of every IPv4 header matches etherparse, and both refuse the same headers, except for truncated options.
    #[test]
    fn ipv4_fields_are_those_of_etherparse(bytes in packet()) {
        let ours = Header::parse(ETHERTYPE_IPV4, &bytes);
        match Ipv4HeaderSlice::from_slice(&bytes) {
            Ok(theirs) => {
                let ours = ours.unwrap();
                prop_assert_eq!((ours.version, ours.len), (Version::V4, theirs.slice().len()));
                prop_assert_eq!(ours.total_len, usize::from(theirs.total_len()));
                prop_assert_eq!((ours.protocol, ours.hop_limit), (theirs.protocol().0, theirs.ttl()));
                prop_assert_eq!(ours.ecn, theirs.ecn().value());
                prop_assert_eq!(ours.is_fragment(), theirs.is_fragmenting_payload());
                prop_assert_eq!(ours.source(), IpAddr::from(theirs.source_addr()));
                prop_assert_eq!(ours.destination(), IpAddr::from(theirs.destination_addr()));
                let upper = ours.upper_layer(&bytes);
                prop_assert_eq!((upper.protocol, upper.offset), (ours.protocol, ours.len));
                prop_assert_eq!(upper.later_fragment, theirs.fragments_offset().value() != 0);
            }
            Err(_) => prop_assert!(ours.is_none_or(|ours| ours.len > bytes.len())),
        }
    }

    /// Every field of every IPv6 header matches etherparse, and both refuse the same headers.
    #[test]
    fn ipv6_fields_are_those_of_etherparse(bytes in packet()) {
        let ours = Header::parse(ETHERTYPE_IPV6, &bytes);
        match Ipv6HeaderSlice::from_slice(&bytes) {
            Ok(theirs) => {
                let ours = ours.unwrap();
                prop_assert_eq!((ours.version, ours.len), (Version::V6, theirs.slice().len()));
                prop_assert_eq!(ours.total_len, IPV6_LEN + usize::from(theirs.payload_length()));
                prop_assert_eq!((ours.protocol, ours.hop_limit), (theirs.next_header().0, theirs.hop_limit()));
                prop_assert_eq!(ours.ecn, theirs.ecn().value());
                prop_assert!(!ours.is_fragment());
                prop_assert_eq!(ours.source(), IpAddr::from(theirs.source_addr()));
                prop_assert_eq!(ours.destination(), IpAddr::from(theirs.destination_addr()));
            }
            Err(_) => prop_assert!(ours.is_none()),
        }
    }

    /// The upper layer begins where etherparse finds the end of the extension headers.
    #[test]
    fn extension_headers_are_walked_as_etherparse_walks_them(
        hop_by_hop in prop::option::of(0u8..3), routing in prop::option::of(0u8..3), fragment in prop::option::of(any::<u16>()),
        options in prop::option::of(0u8..3), protocol in prop::sample::select(vec![TCP, UDP, ICMPV6]),
        payload in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let chain: Vec<(u8, u8)> = [
            hop_by_hop.map(|units| (HOP_BY_HOP, units)),
            routing.map(|units| (ROUTING, units)),
            fragment.map(|_| (FRAGMENT, 0)),
            options.map(|units| (DESTINATION_OPTIONS, units)),
        ].into_iter().flatten().collect();
        let bytes = extended(&chain, fragment.unwrap_or(0), protocol, &payload);
        let ours = Header::parse(ETHERTYPE_IPV6, &bytes).unwrap();
        prop_assert_eq!(ours.total_len, bytes.len());
        let upper = ours.upper_layer(&bytes);
        let Ok(IpSlice::Ipv6(theirs)) = IpSlice::from_slice(&bytes) else { panic!("a good packet") };
        let later = theirs.extensions().clone().into_iter().any(
            |header| matches!(header, Ipv6ExtensionSlice::Fragment(header) if header.fragment_offset().value() != 0),
        );
        prop_assert_eq!(upper.later_fragment, later);
        if later {
            // The middle of the payload follows the fragment header; etherparse reads on as if it were headers.
            prop_assert_eq!(upper.protocol, if options.is_some() { DESTINATION_OPTIONS } else { protocol });
        } else {
            prop_assert_eq!(upper.protocol, theirs.payload().ip_number.0);
            prop_assert_eq!(&bytes[upper.offset..], theirs.payload().payload);
        }
    }

    /// A packet truncated anywhere is decoded as far as it goes, as by etherparse's lax reader.
    #[test]
    fn cut_packets_are_decoded_as_far_as_they_go(cut in 0usize..100) {
        let mut bytes = extended(&[(HOP_BY_HOP, 0), (FRAGMENT, 0)], 1, UDP, &[7; 20]);
        bytes.truncate(cut);
        let ours = Header::parse(ETHERTYPE_IPV6, &bytes);
        match LaxIpSlice::from_slice(&bytes) {
            Ok((LaxIpSlice::Ipv6(theirs), _)) => {
                prop_assert_eq!(ours.unwrap().upper_layer(&bytes).protocol, theirs.payload().ip_number.0);
            }
            _ => prop_assert!(ours.is_none()),
        }
    }

    #[test]
    fn arbitrary_frames_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Some((offset, header)) = in_frame(&bytes) {
            let fixed = if header.is_v4() { IPV4_LEN_MIN } else { IPV6_LEN };
            prop_assert!(offset + fixed <= bytes.len());
            header.upper_layer(&bytes[offset..]);
        }
    }
}

#[test]
fn tags_are_skipped_and_other_types_are_not_ip() {
    let packet = extended(&[], 0, UDP, &[]);
    let frame = |types: &[u8]| [&[2; 12][..], types, &packet].concat();
    assert_eq!(in_frame(&frame(&[0x86, 0xdd])).unwrap().0, 14);
    assert_eq!(in_frame(&frame(&[0x81, 0, 0, 5, 0x86, 0xdd])).unwrap().0, 18);
    assert_eq!(in_frame(&frame(&[0x08, 0x00])), None, "the version contradicts the type");
    assert_eq!(in_frame(&frame(&[0x08, 0x06])), None);
    assert_eq!(in_frame(&frame(&[0x86, 0xdd])[..53]), None, "the fixed header is cut off");
}

#[test]
fn endless_extension_headers_are_not_walked() {
    let bytes = extended(&[(DESTINATION_OPTIONS, 0); 6], 0, UDP, &[]);
    let upper = Header::parse(ETHERTYPE_IPV6, &bytes).unwrap().upper_layer(&bytes);
    assert_eq!((upper.protocol, upper.offset), (DESTINATION_OPTIONS, IPV6_LEN + 8 * EXTENSIONS_MAX));
}

#[test]
fn fragments_tell_their_place() {
    let v6 = extended(&[(FRAGMENT, 0)], 185 << 3 | 1, UDP, &[0; 16]);
    let place = |packet: &[u8], ethertype| Header::parse(ethertype, packet).unwrap().fragment(packet);
    let middle = Fragment { identification: 7, start: 1480, end: 1496, last: false };
    assert_eq!(place(&v6, ETHERTYPE_IPV6), Some(middle));
    let v4 = |flags_and_offset: u16| {
        let mut packet = vec![0x45, 0, 0, 36, 0, 7];
        packet.extend(flags_and_offset.to_be_bytes());
        packet.resize(36, 1);
        packet
    };
    assert_eq!(place(&v4(0x2000 | 185), ETHERTYPE_IPV4), Some(middle));
    assert_eq!(place(&v4(185), ETHERTYPE_IPV4), Some(Fragment { last: true, ..middle }));
    assert_eq!(place(&v4(0x4000), ETHERTYPE_IPV4), None, "don't fragment");
    assert_eq!(place(&extended(&[], 0, UDP, &[0; 16]), ETHERTYPE_IPV6), None);
}
