//! Two bridges: every frame crosses, at every path MTU.

use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use vnet::frame::{BATCH_MAX, FRAME_MAX, NetworkId, PortId};
use vnet::link::fake::{Faults, Random, Relay, Wire};
use vnet::link::{Encapsulation, Link, LinkOptions, LinkState, Peers};
use vnet::stats::{DiscardReason, DropReason};
use vnet::wire::offload::Offload;

use super::host::*;

const SIZES: [usize; 22] = [
    14, 15, 60, 64, 127, 128, 129, 476, 514, 532, 533, 1024, 1025, 1456, 1457, 1514, 9014, 30_000, 64_000,
    65_491, 65_550, FRAME_MAX,
];

#[test]
fn frames_of_all_sizes_cross_paths_of_all_mtus() {
    let paths = [
        ("127.0.0.1:0", vec![576, 577, 1280, 1500, 9000, 65_535]),
        ("[::1]:0", vec![1280, 1500, 9000, 65_535]),
    ];
    for (ip, mtus) in paths {
        for mtu in mtus {
            let [mut a, mut b] = Host::pair(ip, Encapsulation::Native, Some(mtu));
            let mut frames = vec![];
            for (n, len) in SIZES.into_iter().enumerate() {
                let network = NetworkId::new(if n % 5 == 0 { 0xff_fffe } else { 1 }).unwrap();
                frames.push(Got { network, hops: (n % 3) as u8, ..frame(len, n as u64) });
                if len >= 60 {
                    frames.push(Got {
                        offload: if len > 2000 { TSO } else { CSUM },
                        ..frame(len, !(n as u64))
                    });
                }
            }
            for chunk in frames.chunks(5) {
                a.send(chunk);
                assert_eq!(b.receive(chunk.len()), arrived(chunk), "{ip} mtu {mtu}");
            }
            let (out, into) = (a.link.stats(), b.link.stats());
            assert_eq!(out.out_frames.get(), frames.len() as u64);
            assert_eq!((out.out_bytes.get(), into.in_bytes.get()), (bytes(&frames), bytes(&frames)));
            assert_eq!(into.in_frames.get(), frames.len() as u64);
            assert_eq!(out.out_datagrams.get(), into.in_datagrams.get());
            assert_eq!((out.drops_total(), into.drops_total(), b.discards()), (0, 0, vec![]));
        }
    }
}

#[test]
fn both_directions_and_an_ipv4_peer_of_an_ipv6_socket() {
    let (a, b) = (bridge("[::]:0"), bridge("127.0.0.1:0"));
    let a_addr = SocketAddr::new("127.0.0.1".parse().unwrap(), a.0.local_addr().port());
    let b_addr = b.0.local_addr();
    let mut a = Host::new(a, options(b_addr, Encapsulation::Native, Some(1500)));
    let mut b = Host::new(b, options(a_addr, Encapsulation::Native, Some(1500)));
    let frames = [frame(5000, 1), frame(64, 2)];
    a.send(&frames);
    assert_eq!(b.receive(2), arrived(&frames));
    b.send(&frames);
    assert_eq!(a.receive(2), arrived(&frames));
    assert_eq!(a.link.state(), LinkState::Up);
    assert_eq!(b.link.heard_ms(), Some(1));

    let remote = "[::1]:9".parse().unwrap();
    let unreachable = Link::new(options(remote, Encapsulation::Native, None), PortId(8), Arc::default());
    b.link = unreachable;
    b.send(&frames);
    assert_eq!(b.link.stats().drops(DropReason::SendFailed), 2);
    assert!(matches!(b.link.state(), LinkState::Unreachable(_)), "an IPv4 socket reaches no IPv6 address");
    // A route for another address family does not change that.
    b.peers = Arc::new(Peers::build(std::slice::from_ref(&b.link)));
    b.ask_routes(10_000);
    assert!(matches!(b.link.state(), LinkState::Unreachable(_)));
    // A socket bound to a specific IPv6 address cannot reach IPv4 either.
    let mut c = Host::new(bridge("[::1]:0"), options(b_addr, Encapsulation::Native, None));
    c.send(&frames);
    assert_eq!(c.link.stats().drops(DropReason::SendFailed), 2);
    assert!(matches!(c.link.state(), LinkState::Unreachable(_)));
}

/// The kernel refuses UDP_SEGMENT on a socket without checksums, with the error that kernels before Linux 6.14 return for
/// segments larger than the path MTU.
#[test]
fn refused_segmentation_falls_back_to_single_datagrams() {
    for encapsulation in [Encapsulation::Native, Encapsulation::Vnet] {
        let [mut a, mut b] = Host::pair("127.0.0.1:0", encapsulation, Some(1500));
        let on: libc::c_int = 1;
        let len = size_of_val(&on) as libc::socklen_t;
        let fd = a.bridge.rx[0].fd().as_raw_fd();
        // SAFETY: `on` is readable for the stated `len` bytes.
        let set =
            unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_NO_CHECK, (&raw const on).cast(), len) };
        assert_eq!(set, 0);
        let frames: Vec<Got> =
            (0..40).map(|n| frame(if n < 30 { 1400 } else { 1100 + n }, n as u64)).collect();
        a.send(&frames);
        let got: Vec<Vec<u8>> = b.receive(frames.len()).into_iter().map(|got| got.bytes).collect();
        assert_eq!(got, frames.iter().map(|frame| frame.bytes.clone()).collect::<Vec<_>>());
        assert_eq!((a.link.stats().out_frames.get(), a.link.stats().out_datagrams.get()), (40, 40));
        assert_eq!((a.link.stats().out_bytes.get(), a.link.stats().drops_total()), (bytes(&frames), 0));
    }
}

#[test]
fn full_batches_of_every_kind_arrive_in_order() {
    // One burst fills several batches.
    const FRAMES: usize = 3 * BATCH_MAX;
    let [mut a, mut b] = Host::pair("127.0.0.1:0", Encapsulation::Native, Some(1500));
    let mut random = Random::new(5);
    let mut sent = 0;
    for round in 0..60 {
        let frames: Vec<Got> = (0..FRAMES)
            .map(|n| {
                let len = match round % 3 {
                    0 => 60 + random.below(4) as usize,
                    1 => 1400,
                    _ => [64, 1514, 600, 9000, 1456, 7000][random.below(6) as usize],
                };
                let offload = if random.below(4) == 0 { CSUM } else { Offload::default() };
                Got { offload, ..frame(len, (round * 1000 + n) as u64) }
            })
            .collect();
        a.send(&frames);
        assert_eq!(b.receive(FRAMES), arrived(&frames));
        sent += FRAMES as u64;
    }
    assert_eq!((a.link.stats().out_frames.get(), b.link.stats().in_frames.get()), (sent, sent));
    assert_eq!(a.link.stats().out_datagrams.get(), b.link.stats().in_datagrams.get());
}

#[test]
fn a_faulty_wire_corrupts_no_frame_and_counters_add_up() {
    for seed in 0..8 {
        let (a, b) = (bridge("127.0.0.1:0"), bridge("127.0.0.1:0"));
        let faults = Faults { loss: 10, duplication: 10, reordering: 50, distance: 20 };
        let mut relay = Relay::new(a.0.local_addr(), b.0.local_addr(), Wire::new(seed, faults)).unwrap();
        let mut a = Host::new(a, options(relay.near().unwrap(), Encapsulation::Native, Some(1500)));
        let mut b = Host::new(b, options(relay.far().unwrap(), Encapsulation::Native, Some(1500)));
        let mut random = Random::new(seed);
        let (mut sent, mut got) = (vec![], vec![]);
        for round in 0..40u64 {
            // Longer than a datagram, so that every loss leaves an incomplete frame.
            let frames: Vec<Got> = (0..4)
                .map(|n| frame(1500 + random.below(18_000) as usize, seed << 32 | round << 8 | n))
                .collect();
            a.send(&frames);
            relay.pump().unwrap();
            loop {
                let (more, datagrams) = b.receive_once();
                got.extend(more);
                if datagrams == 0 {
                    break;
                }
            }
            sent.extend(frames);
        }
        b.tick(b.now_ms + 200);
        let stats = b.link.stats();
        let mut left: Vec<Got> = arrived(&sent);
        for frame in &got {
            let at = left
                .iter()
                .position(|other| other == frame)
                .expect("a frame that was sent, and arrived once");
            left.swap_remove(at);
        }
        assert!(!left.is_empty() && got.len() > sent.len() / 2, "{} of {} came", got.len(), sent.len());
        assert_eq!(stats.in_frames.get(), got.len() as u64 + stats.drops_total());
        assert_eq!(stats.drops(DropReason::Reassembly), stats.drops_total());
        // A frame whose datagrams are all lost is not counted on the receiving side.
        assert!(stats.in_frames.get() <= sent.len() as u64);
        assert!(stats.drops_total() > 0 && stats.discards(DiscardReason::Stale) > 0);
        assert_eq!(a.link.stats().out_frames.get(), sent.len() as u64);
    }
}

#[test]
fn a_link_refuses_networks_it_does_not_carry() {
    let [mut a, b] = Host::pair("127.0.0.1:0", Encapsulation::Native, Some(1500));
    let networks = Some(vec![NetworkId::new(5).unwrap()]);
    let peer = a.bridge.local_addr();
    let mut b = Host::new(
        (b.bridge, b.unknown),
        LinkOptions { networks, ..options(peer, Encapsulation::Native, None) },
    );
    let other = |len, network| Got { network: NetworkId::new(network).unwrap(), ..frame(len, 1) };
    a.send(&[other(64, 6), other(5000, 6), other(64, 5), other(5000, 5)]);
    assert_eq!(b.receive(2), arrived(&[other(64, 5), other(5000, 5)]));
    assert_eq!(b.link.stats().drops(DropReason::WrongNetwork), 2);
    assert_eq!(b.link.stats().in_frames.get(), 4);
}
