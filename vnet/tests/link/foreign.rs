//! A bridge and a plain socket: datagrams on the wire, and datagrams of foreign or broken peers.

use std::net::UdpSocket;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vnet::frame::{FRAME_MAX, NetworkId};
use vnet::link::{Bridge, BridgeError, Encapsulation, HOPS_UNKNOWN, ReassemblyBudget, UDP_PAYLOAD_MAX};
use vnet::stats::{DiscardReason, DropReason};
use vnet::wire::native::{Bundle, HEADER_LEN, Header, Kind};
use vnet::wire::offload::Offload;

use super::host::*;

#[test]
fn large_frames_are_fragmented() {
    let (mut host, peer) = raw_peer(Encapsulation::Native, 1500);
    let large = Got { offload: TSO, hops: 2, ..frame(FRAME_MAX, 1) };
    host.send(std::slice::from_ref(&large));
    let got = datagrams(&peer);
    assert_eq!(got.len(), (FRAME_MAX + 12).div_ceil(1456));
    let mut joined = vec![];
    let mut first = None;
    for (k, datagram) in got.iter().enumerate() {
        let (header, payload) = Header::parse(datagram).unwrap();
        let last = k + 1 == got.len();
        assert!(last || datagram.len() == 1500 - 28);
        let id = *first.get_or_insert(header.number);
        let expected = Header {
            last,
            offload: k == 0,
            hops: 2,
            index: k as u16,
            ..Header::whole(Kind::Frame, 1, id + k as u64)
        };
        assert_eq!(header, expected);
        joined.extend_from_slice(payload);
    }
    assert_eq!(joined[..12], TSO.to_wire());
    assert_eq!(joined[12..], large.bytes);
    assert_eq!(host.link.stats().out_datagrams.get(), got.len() as u64);
    // The next frame takes the next number.
    host.send(&[frame(64, 2)]);
    let next = datagrams(&peer);
    assert_eq!(Header::parse(&next[0]).unwrap().0.number, first.unwrap() + got.len() as u64);
}

#[test]
fn small_frames_travel_in_bundles() {
    let (mut host, peer) = raw_peer(Encapsulation::Native, 1500);
    let mut frames: Vec<Got> = (0..40).map(|n| frame(60 + n, n as u64)).collect();
    frames.push(Got { network: NetworkId::new(2).unwrap(), ..frame(64, 50) });
    frames.extend((0..3).map(|n| Got { offload: CSUM, ..frame(64, 60 + n) }));
    frames.push(frame(1200, 70));
    frames.push(Got { hops: 1, ..frame(64, 71) });
    frames.push(frame(64, 72));
    frames.push(frame(64, 73));
    host.send(&frames);
    let got = datagrams(&peer);
    assert!(got.len() < 12, "{} datagrams", got.len());
    let mut out = vec![];
    let mut kinds = vec![];
    for datagram in &got {
        assert!(datagram.len() <= 1500 - 28);
        let (header, payload) = Header::parse(datagram).unwrap();
        kinds.push(header.kind);
        let network = NetworkId::new(header.network).unwrap();
        let mut add = |offload, bytes: &[u8]| {
            out.push(Got { bytes: bytes.to_vec(), offload, network, hops: header.hops });
        };
        match header.kind {
            Kind::Bundle => {
                Bundle::checked(payload, header.offload).unwrap().for_each(|(o, bytes)| add(o, bytes))
            }
            _ => add(Offload::default(), payload),
        }
    }
    assert_eq!(out, frames, "in order, each once");
    let tail = [Kind::Frame, Kind::Bundle, Kind::Frame, Kind::Frame, Kind::Bundle];
    assert_eq!(kinds[kinds.len() - 5..], tail, "frames with different headers share no bundle");
    assert_eq!(host.link.stats().out_frames.get(), frames.len() as u64);
    assert_eq!(host.link.stats().out_datagrams.get(), got.len() as u64);
}

/// Reassembly across two bursts: some fragments were copied from the first burst, others lie in the buffers of the second.
#[test]
fn frames_in_two_bursts_are_reassembled() {
    let (mut host, peer) = raw_peer(Encapsulation::Native, 1500);
    let frames: Vec<Got> = (0..8).map(|n| frame(4000, n)).collect();
    host.send(&frames);
    let sent = datagrams(&peer);
    assert_eq!(sent.len(), 3 * frames.len());
    for rounds in [0..2, 2..3] {
        let mut count = 0;
        for (n, datagram) in sent.iter().enumerate() {
            if rounds.contains(&(n % 3)) {
                peer.send(datagram).unwrap();
                count += 1;
            }
        }
        if rounds.end == 3 {
            assert_eq!(host.receive(frames.len()), arrived(&frames));
            continue;
        }
        let start = Instant::now();
        while count > 0 {
            assert!(start.elapsed() < Duration::from_secs(5));
            let (got, datagrams) = host.receive_once();
            assert_eq!(got, []);
            count -= datagrams;
        }
    }
    assert_eq!(host.discards(), []);
}

#[test]
fn classic_encapsulation_to_and_from_a_foreign_peer() {
    let (mut host, peer) = raw_peer(Encapsulation::Vnet, 1500);
    let long = frame(UDP_PAYLOAD_MAX, 1);
    let frames = [frame(60, 2), frame(60, 3), frame(1514, 4), long.clone(), frame(UDP_PAYLOAD_MAX + 1, 5)];
    host.send(&frames);
    let expected: Vec<Vec<u8>> = frames[..4].iter().map(|frame| frame.bytes.clone()).collect();
    assert_eq!(datagrams(&peer), expected);
    assert_eq!(host.link.stats().out_frames.get(), 4);
    assert_eq!(host.link.stats().drops(DropReason::MtuExceeded), 1);

    // A partial checksum is completed before the frame leaves.
    let mut unfinished = frame(100, 6);
    unfinished.bytes[40..42].fill(0);
    host.send(&[Got { offload: CSUM, ..unfinished.clone() }]);
    let got = datagrams(&peer);
    assert_eq!(got.len(), 1);
    assert_eq!((&got[0][..40], &got[0][42..]), (&unfinished.bytes[..40], &unfinished.bytes[42..]));
    assert_eq!(vnet::wire::checksum::Sum::default().with(&got[0][34..]).finish(), 0);

    for sent in [&frames[0], &long] {
        peer.send(&sent.bytes).unwrap();
        let got = host.receive(1);
        assert_eq!(got, [Got { hops: HOPS_UNKNOWN, ..sent.clone() }]);
    }
    peer.send(&[0; 13]).unwrap();
    let start = Instant::now();
    while host.link.stats().drops(DropReason::TooShort) == 0 {
        assert_eq!(host.receive_once().0, []);
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn hops_are_counted_and_limited() {
    let (mut host, peer) = raw_peer(Encapsulation::Native, 1500);
    let mut relayed = frame(3000, 1);
    for hops in 0..=7 {
        relayed.hops = hops;
        host.send(&[relayed.clone()]);
        for datagram in datagrams(&peer) {
            assert_eq!(Header::parse(&datagram).unwrap().0.hops, hops);
            peer.send(&datagram).unwrap();
        }
        relayed = host.receive(1).remove(0);
        assert_eq!(relayed.hops, hops + 1);
    }
    host.send(&[relayed, frame(64, 2)]);
    assert_eq!(host.link.stats().drops(DropReason::HopLimit), 1);
    assert_eq!(datagrams(&peer).len(), 1);
}

#[test]
fn datagrams_without_a_valid_frame_are_counted() {
    let (mut host, peer) = raw_peer(Encapsulation::Native, 1500);
    let good = Header::whole(Kind::Frame, 1, 1);
    let with = |header: Header, payload: &[u8]| [&header.to_bytes()[..], payload].concat();
    let body = frame(64, 1).bytes;
    let bad_offload = [&Offload { csum_start: 63, ..CSUM }.to_wire()[..], &body].concat();
    let cases = [
        (vec![], 0),
        (good.to_bytes()[..15].to_vec(), 0),
        (with(Header { number: 0, ..good }, &body), 0),
        ([&[0x2f], &with(good, &body)[1..]].concat(), 0),
        (with(Header { sealed: true, ..good }, &body), 0),
        (with(Header { kind: Kind::Bundle, ..good }, &[0, 200, 1]), 0),
        (with(Header { kind: Kind::Bundle, ..good }, &[0; 1000]), 0),
        (
            with(
                Header { kind: Kind::Bundle, ..good },
                &[&[0, 64], &body[..], &[0, 13], &body[..13]].concat(),
            ),
            0,
        ),
        (with(Header { offload: true, ..good }, &[0; 11]), 0),
        (with(Header { index: 256, number: 300, ..good }, &body), 0),
        (with(good, &body[..13]), 0),
        (with(Header { offload: true, ..good }, &bad_offload), 0),
        (with(Header { kind: Kind::Keepalive, ..good }, &[]), 0),
        (with(good, &body), 1),
    ];
    for (datagram, frames) in &cases {
        peer.send(datagram).unwrap();
        let start = Instant::now();
        let (got, count) = loop {
            let (got, count) = host.receive_once();
            if count != 0 {
                break (got, count);
            }
            assert!(start.elapsed() < Duration::from_secs(5));
        };
        assert_eq!((got.len(), count), (*frames, 1));
    }
    let stats = host.link.stats();
    use DiscardReason::{BadHeader, BadVersion, SealRequired, Truncated};
    assert_eq!(host.discards(), [(Truncated, 2), (BadVersion, 1), (BadHeader, 6), (SealRequired, 1)]);
    assert_eq!((stats.drops(DropReason::TooShort), stats.drops(DropReason::BadOffload)), (1, 1));
    assert_eq!((stats.in_frames.get(), stats.in_datagrams.get()), (3, cases.len() as u64));

    // Unknown sources: another address, and another port of the peer's address.
    for address in ["127.0.0.9:0", "127.0.0.1:0"] {
        let stranger = UdpSocket::bind(address).unwrap();
        stranger.send_to(&with(good, &body), host.bridge.local_addr()).unwrap();
    }
    let start = Instant::now();
    while host.unknown.discards(DiscardReason::UnknownSource) < 2 {
        assert_eq!(host.receive_once().0, []);
        assert!(start.elapsed() < Duration::from_secs(5));
    }
    assert_eq!(host.link.stats().in_datagrams.get(), cases.len() as u64);
}

#[test]
fn probes_are_answered() {
    let (mut host, peer) = raw_peer(Encapsulation::Native, 1500);
    let header = Header::whole(Kind::Probe, 1, 3);
    let probe = [&header.to_bytes()[..], &[0xab; 1000]].concat();
    peer.send(&probe).unwrap();
    let start = Instant::now();
    while host.receive_once().1 == 0 {
        assert!(start.elapsed() < Duration::from_secs(5));
    }
    let got = datagrams(&peer);
    assert_eq!(got.len(), 1);
    let (reply, payload) = Header::parse(&got[0]).unwrap();
    assert_eq!((reply.kind, payload), (Kind::ProbeReply, &probe[HEADER_LEN..]));
}

#[test]
fn errors_name_a_port_in_use() {
    let (first, stats) = bridge("127.0.0.1:0");
    let budget = Arc::new(ReassemblyBudget::new(1 << 20));
    let taken = first.local_addr();
    for count in [1, 2] {
        let error = Bridge::bind_group(taken, 1, count, &stats, &budget).err().unwrap();
        assert_eq!(
            error.to_string(),
            format!(
                "cannot listen on {taken}: address already in use; is another vnetd running? choose another [bridge] listen"
            )
        );
    }
    let nowhere = "192.0.2.77:9000".parse().unwrap();
    assert!(matches!(
        Bridge::bind(nowhere, false, stats.clone(), budget.clone()),
        Err(BridgeError::NotHere(..))
    ));
    let group = Bridge::bind_group("127.0.0.1:0".parse().unwrap(), 1, 3, &stats, &budget).unwrap();
    assert!(group.iter().all(|bridge| bridge.local_addr() == group[0].local_addr()));
    let error = Bridge::bind_group(group[0].local_addr(), 1, 3, &stats, &budget).err().unwrap();
    assert!(matches!(error, BridgeError::InUse(..)), "a second daemon must not join the first one's sockets");
}
