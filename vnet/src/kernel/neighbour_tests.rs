//! ARP and neighbour discovery (ND): vnetd decides about them while it lives.

use super::shared::DEAD_NS;
use super::tests::{A, B, Bench, terms};
use super::*;
use crate::wire::ethernet::{ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use crate::wire::neighbour::is_neighbours;

/// Longer than a test takes.
const HOUR_NS: u64 = 3_600_000_000_000;

/// A frame from A to B whose packet would be IPv6: with this next header, and type of an ICMPv6 message.
fn frame(ethertype: u16, next_header: u8, kind: u8) -> Vec<u8> {
    let mut frame = [&B.0[..], &A.0, &ethertype.to_be_bytes()].concat();
    frame.resize(86, 0);
    (frame[14], frame[20], frame[54]) = (0x60, next_header, kind);
    frame
}

#[test]
fn neighbours_frames_come_up_while_vnetd_lives() {
    let Some(bench) = Bench::new() else { return };
    assert!(bench.install(&terms()));
    let kinds = (0..=u8::MAX).map(|kind| frame(ETHERTYPE_IPV6, 58, kind));
    let others = [frame(ETHERTYPE_ARP, 0, 0), frame(ETHERTYPE_IPV4, 58, 135), frame(ETHERTYPE_IPV6, 17, 135)];
    let frames: Vec<_> = kinds.chain(others).collect();
    let taken = || -> Vec<bool> {
        ["from_guest", "from_container"]
            .iter()
            .flat_map(|program| frames.iter().map(|frame| bench.takes_frame(program, frame)))
            .collect()
    };
    bench.kernel.tick(now_ns() + HOUR_NS, u64::MAX);
    let wanted: Vec<_> = frames.iter().map(|frame| !is_neighbours(frame)).collect();
    assert_eq!(wanted.iter().filter(|taken| !**taken).count(), 6, "ARP, and five types of ND");
    assert_eq!(taken(), wanted.repeat(2));
    // Programs read a clock that is late by up to a tick of the kernel, 10 ms at most.
    bench.kernel.tick(now_ns() - DEAD_NS - 20_000_000, u64::MAX);
    assert!(taken().iter().all(|taken| *taken), "without vnetd, neighbours have to answer each other");
}
