//! Fuzz entry point for peeked messages.

use super::port::{PEEK_LEN, Peeked};
use crate::frame::{FRAME_MAX, PortId};
use crate::link::socket::name::Name;
use crate::link::{Link, LinkKind, LinkOptions, Peers};
use crate::wire::native::HEADER_LEN;
use crate::wire::offload::WIRE_LEN;
use std::sync::Arc;

/// Arbitrary bytes as the next message at an underlay port: its length, its segment size and its first bytes.
///
/// Invariants: no panic; an accepted candidate's datagrams add up to the frame, and the message holds a whole number of them.
pub fn peeked(data: &[u8]) {
    let Some((sizes, bytes)) = data.split_first_chunk::<4>() else { return };
    let [len, segment] =
        [[sizes[0], sizes[1]], [sizes[2], sizes[3]]].map(|b| usize::from(u16::from_be_bytes(b)));
    let source = Name::new("127.0.0.1:9".parse().expect("an address"), false).expect("of that family");
    let mut head = [0; PEEK_LEN];
    let known = bytes.len().min(PEEK_LEN).min(len);
    head[..known].copy_from_slice(&bytes[..known]);
    let options = LinkOptions {
        name: "h2".into(),
        remote: "127.0.0.1:9".parse().expect("an address"),
        ports: 1,
        networks: None,
        mtu: None,
        kind: LinkKind::default(),
    };
    let peers = Peers::build(&[Link::new(options, PortId(0), Arc::default())]);
    let peeked = Peeked { source, len, segment: segment.max(1), head };
    let Some((_, candidate)) = peeked.candidate(&peers) else { return };
    let metadata = if candidate.offload.is_none() { 0..=WIRE_LEN } else { WIRE_LEN..=WIRE_LEN };
    let payload: usize = (0..candidate.datagrams()).map(|k| candidate.payload(k)).sum();
    assert!(metadata.contains(&(payload - candidate.len)) && candidate.len <= FRAME_MAX);
    assert!((0..candidate.datagrams()).all(|k| candidate.payload(k) > 0));
    let part = candidate.part(0, len, segment.max(1)).expect("the message is part of it");
    assert_eq!(len, (0..part).map(|k| HEADER_LEN + candidate.payload(k)).sum::<usize>());
}
