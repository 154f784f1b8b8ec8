use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::UnderlayPort;
use super::candidate::LEN_MIN;
use super::landing::{Landed, Landing};
use crate::frame::{BATCH_MAX, Batch, DropSink, HEAD_MAX, NetworkId, PortId, Room, Selection};
use crate::link::{
    Bridge, DirectOffer, DirectPort, DirectState, Link, LinkKind, LinkOptions, Peers, ReassemblyBudget,
    Receiver,
};
use crate::source::{BatchSlot, receive};
use crate::wire::native::{Header, Kind};
use crate::wire::offload::{F_NEEDS_CSUM, GSO_TCPV4, Offload};

/// A peer's bridge, and a receiver with an underlay port connected to it.
struct Pair {
    sender: Bridge,
    out: Arc<Link>,
    receiver: Receiver,
    landing: Landing,
    direct: Arc<UnderlayPort>,
    link: Arc<Link>,
    peers: Arc<Peers>,
}

fn bridge() -> Bridge {
    let budget = Arc::new(ReassemblyBudget::new(8 << 20));
    Bridge::bind("127.0.0.1:0".parse().unwrap(), false, Arc::default(), budget).unwrap()
}

fn link(remote: SocketAddr) -> Arc<Link> {
    let options = LinkOptions {
        name: "peer".into(),
        remote,
        ports: 1,
        networks: None,
        mtu: None,
        kind: LinkKind::default(),
    };
    Link::new(options, PortId(7), Arc::default())
}

impl Pair {
    fn new(path_mtu: u32) -> Pair {
        let (sender, host) = (bridge(), bridge());
        let direct = UnderlayPort::bind("127.0.0.1:0".parse().unwrap(), true).unwrap();
        direct.aim(sender.local_addr()).unwrap();
        let (out, link) = (link(direct.local_addr()), link(sender.local_addr()));
        out.assume_path_mtu(path_mtu);
        let peers = Arc::new(Peers::build(std::slice::from_ref(&link)));
        host.peers.store(peers.clone());
        let receiver = host.receivers.receiver(direct.socket().clone());
        Pair { sender, out, receiver, landing: Landing::new(), direct, link, peers }
    }

    fn send(&mut self, frames: &[(Vec<u8>, Offload)]) {
        let mut batch = Batch::new();
        for (bytes, offload) in frames {
            let mut builder = batch.begin();
            // SAFETY: the frames outlive the batch and are not written to.
            unsafe { builder.push_stable(crate::frame::Segment::new(bytes.as_ptr(), bytes.len())) };
            builder.finish(PortId(1), NetworkId::DEFAULT, *offload, 0).unwrap();
        }
        let which: Vec<u16> = (0..frames.len() as u16).collect();
        let frames = Selection { batch: &batch, which: &which };
        self.sender.tx.send(&self.out, frames, &mut DropSink::new());
    }

    /// Receives `count` frames, and returns whether each was received in place. The guest's room is split every `cut` bytes.
    fn receive(&mut self, count: usize, cut: usize) -> Vec<(Vec<u8>, Offload, bool)> {
        let mut frames = vec![];
        let end = Instant::now() + Duration::from_secs(5);
        while frames.len() < count {
            assert!(Instant::now() < end, "{} of {count} frames came", frames.len());
            let Some(peeked) = self.direct.peek() else { continue };
            if let Some((link, candidate)) = peeked.candidate(&self.peers) {
                assert!(Arc::ptr_eq(link, &self.link));
                let mut memory = vec![0xee; candidate.len];
                let room: Vec<Room> =
                    memory.chunks_mut(cut).map(|part| Room::new(part.as_mut_ptr(), part.len())).collect();
                let at = (&*self.direct, &mut self.receiver);
                // SAFETY: `memory` outlives the call and is not accessed until it returns.
                match unsafe { self.landing.land(at, link, &candidate, &room, 1) } {
                    Landed::InPlace => {
                        assert_eq!(candidate.head(), &memory[..HEAD_MAX]);
                        frames.push((memory, candidate.offload, true));
                        continue;
                    }
                    Landed::CopiedOut(0) => {}
                    Landed::CopiedOut(messages) => self.receiver.resume_with(messages),
                }
            }
            let mut run = |batch: &Batch| {
                for frame in batch.frames() {
                    let mut bytes = vec![0; frame.len()];
                    batch.copy_to(frame, &mut bytes);
                    frames.push((bytes, frame.offload, false));
                }
            };
            drain_burst(&mut self.receiver, &mut run);
        }
        frames
    }
}

/// Processes the current burst, or receives and processes the next one.
fn drain_burst(receiver: &mut Receiver, run: &mut dyn FnMut(&Batch)) {
    let (mut slot, mut drops) = (BatchSlot::new(BATCH_MAX), DropSink::new());
    loop {
        let burst = receive(receiver, &mut slot, &mut drops, 1);
        run(&burst);
        drop(burst);
        if receiver.is_done() {
            return;
        }
    }
}

/// A frame whose IP header claims `claimed` bytes.
fn frame(len: usize, claimed: usize, seed: u8) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8 ^ seed).collect();
    bytes[..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, seed & 0xfe, 8, 0]);
    bytes[14] = 0x45;
    bytes[16..18].copy_from_slice(&(claimed.saturating_sub(14) as u16).to_be_bytes());
    bytes
}

fn super_frame() -> Offload {
    Offload {
        flags: F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
    }
}

#[test]
fn large_frames_come_in_place() {
    for path_mtu in [1500, 9000, 65_536] {
        let mut pair = Pair::new(path_mtu);
        for (len, offload) in
            [(LEN_MIN, Offload::default()), (20_000, super_frame()), (65_226, super_frame())]
        {
            let sent = frame(len, len, 1);
            pair.send(&[(sent.clone(), offload)]);
            let got = pair.receive(1, 1500);
            assert_eq!(got, [(sent, offload, true)], "{len} bytes by {path_mtu}");
        }
        let stats = &pair.link.stats();
        assert_eq!(
            (stats.direct_in_place.get(), stats.direct_copied_out.get(), stats.in_frames.get()),
            (3, 0, 3)
        );
        assert_eq!(stats.in_datagrams.get(), pair.out.stats().out_datagrams.get());
    }
}

/// A frame longer or shorter than its IP header claims arrives complete, at the cost of a copy.
#[test]
fn a_wrong_guess_costs_a_copy() {
    for claimed in [0, 40, 4097, 19_000, 19_999, 20_001, 21_456, 40_000, 65_000] {
        let mut pair = Pair::new(1500);
        let sent = [frame(20_000, claimed, 1), frame(30_000, 30_000, 2)];
        pair.send(&sent.clone().map(|bytes| (bytes, super_frame())));
        let got = pair.receive(2, 4096);
        let bytes: Vec<_> = got.iter().map(|(bytes, ..)| bytes.clone()).collect();
        assert!(bytes == sent, "claimed {claimed}");
        assert!(!got[0].2, "claimed {claimed}");
    }
}

/// A guest whose buffers overlap changes received bytes before they are copied out. The frame keeps the head that was peeked.
#[test]
fn a_copied_frame_keeps_its_checked_head() {
    let (peer, direct, link) = peer_of_direct();
    let peers = Arc::new(Peers::build(std::slice::from_ref(&link)));
    let host = bridge();
    host.peers.store(peers.clone());
    let mut rx = host.receivers.receiver(direct.socket().clone());
    // Two datagrams, the second shorter than the frame's IP header claims.
    let sent = frame(7000, 8000, 1);
    let first = Header { last: false, ..WHOLE };
    let second = Header { index: 1, number: WHOLE.number + 1, ..WHOLE };
    for (header, payload) in [(first, &sent[..5000]), (second, &sent[5000..])] {
        peer.send_to(&[&header.to_bytes()[..], payload].concat(), direct.local_addr()).unwrap();
    }
    let peeked = direct.peek().unwrap();
    let (link, candidate) = peeked.candidate(&peers).unwrap();
    let mut page = vec![0xee; 1000];
    let at = page.as_mut_ptr();
    let room: Vec<Room> = (0..8).map(|_| Room::new(at, 1000)).collect();
    // SAFETY: `page` outlives the call and is not accessed until it returns.
    let landed = unsafe { Landing::new().land((&direct, &mut rx), link, &candidate, &room, 1) };
    assert_eq!(landed, Landed::CopiedOut(1));
    rx.resume_with(1);
    let mut heads = vec![];
    for _ in 0..2 {
        drain_burst(&mut rx, &mut |batch| {
            heads.extend(
                batch.frames().iter().map(|frame| (frame.len(), batch.head(frame)[..HEAD_MAX].to_vec())),
            );
        });
    }
    assert_eq!(heads, [(7000, sent[..HEAD_MAX].to_vec())]);
}

/// Receives and processes datagrams until `done`.
fn receive_until(receiver: &mut Receiver, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "it did not come");
        drain_burst(receiver, &mut |_| ());
    }
}

/// Two links negotiate a port over their own datagrams: frames of its guest arrive there, all others at the link's port.
#[test]
fn frames_take_a_negotiated_port() {
    let mut pair = Pair::new(9000);
    let (mut host, back) = (bridge(), pair.link.clone());
    let out = link(host.local_addr());
    out.assume_path_mtu(9000);
    host.peers.store(pair.peers.clone());
    pair.sender.peers.store(Arc::new(Peers::build(std::slice::from_ref(&out))));
    let guest = crate::wire::ethernet::Mac([2, 0, 0, 0, 0, 1]);
    let at = DirectPort { network: NetworkId::DEFAULT, mac: guest, port: pair.direct.local_addr().port() };
    assert!(back.offer_direct(vec![DirectOffer { port: at, is_up: Arc::new(|| true) }]));
    // Announcement, trial, announcement with its echo.
    host.courier().negotiate_direct(&back, 0);
    receive_until(&mut pair.sender.rx[0], || !out.direct_guests().is_empty());
    assert_eq!((out.direct_guests(), back.direct_offers(0)[0].1), (vec![(at, false)], DirectState::Untried));
    pair.sender.courier().negotiate_direct(&out, 0);
    receive_until(&mut pair.receiver, || back.direct_offers(0)[0].1 == DirectState::Tried);
    host.courier().negotiate_direct(&back, 0);
    receive_until(&mut pair.sender.rx[0], || out.direct_guests() == [(at, true)]);

    pair.out = out.clone();
    let sent = frame(20_000, 20_000, 1);
    let mut other = frame(6000, 6000, 2);
    other[5] = 9;
    pair.send(&[(sent.clone(), super_frame()), (other, Offload::default())]);
    assert_eq!(pair.receive(1, 4096), [(sent.clone(), super_frame(), true)]);
    let mut lens = vec![];
    let end = Instant::now() + Duration::from_secs(60);
    while lens.is_empty() && Instant::now() < end {
        drain_burst(&mut host.rx[0], &mut |batch| {
            lens.extend(batch.frames().iter().map(|frame| frame.len()))
        });
    }
    assert_eq!((lens, pair.direct.peek().is_none()), (vec![6000], true), "another guest's frame");

    // Withdrawn: the link's port again.
    assert!(back.offer_direct(vec![]));
    host.courier().negotiate_direct(&back, 1);
    receive_until(&mut pair.sender.rx[0], || out.direct_guests().is_empty());
    pair.send(&[(sent, super_frame())]);
    let mut lens = vec![];
    while lens.is_empty() && Instant::now() < end {
        drain_burst(&mut host.rx[0], &mut |batch| {
            lens.extend(batch.frames().iter().map(|frame| frame.len()))
        });
    }
    assert_eq!((lens, pair.direct.peek().is_none()), (vec![20_000], true));
}

/// The port receives at whatever address this host has: the peer sends to another one than before.
#[test]
fn a_port_follows_a_change_of_this_hosts_address() {
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let direct = UnderlayPort::bind("0.0.0.0:0".parse().unwrap(), true).unwrap();
    direct.aim(peer.local_addr().unwrap()).unwrap();
    for address in ["127.0.0.1", "127.0.0.2"] {
        peer.send_to(&[0x10; 6000], (address, direct.local_addr().port())).unwrap();
        assert_eq!(direct.peek().map(|peeked| peeked.len), Some(6000), "{address}");
        direct.accept_only(peer.local_addr().ok()).unwrap();
        assert!(direct.peek().is_none());
    }
}

#[test]
fn only_links_whose_ports_can_be_reached_have_direct_ports() {
    let options = link("127.0.0.1:9".parse().unwrap()).options().clone();
    let of = |via: Option<&str>| {
        let (peer, via) = (Some("peer".into()), via.map(Into::into));
        let security = crate::link::Security { peer, via, ..Default::default() };
        Link::with_security(options.clone(), security, PortId(7), Arc::default()).has_direct_ports()
    };
    assert_eq!((of(None), link(options.remote).has_direct_ports()), (Ok(()), Ok(())));
    assert_eq!(of(Some("relay")), Err("links with a rendezvous have no direct ports"));
}

/// Several frames in one message, each of which could be the first fragment of a longer frame.
#[test]
fn whole_frames_of_one_size_stay_apart() {
    let mut pair = Pair::new(9000);
    let sent: Vec<_> = (0..8).map(|seed| (frame(6000, 6000, seed), Offload::default())).collect();
    pair.send(&sent);
    let got: Vec<_> = pair.receive(8, 9000).into_iter().map(|(bytes, offload, _)| (bytes, offload)).collect();
    assert!(got == sent);
}

/// Only the peer's datagrams reach the port, from the first one on.
#[test]
fn other_sources_cannot_reach_the_port() {
    let direct = UnderlayPort::bind("127.0.0.1:0".parse().unwrap(), true).unwrap();
    let (early, stranger) =
        (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
    early.send_to(&[0x10; 6000], direct.local_addr()).unwrap();
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    direct.aim(peer.local_addr().unwrap()).unwrap();
    stranger.send_to(&[0x10; 6000], direct.local_addr()).unwrap();
    assert!(direct.peek().is_none());
    peer.send_to(&[0x10; 6000], direct.local_addr()).unwrap();
    let peeked = direct.peek().unwrap();
    assert_eq!((peeked.len, peeked.source.address()), (6000, peer.local_addr().ok()));
    // No link has this source address, or its link was removed.
    assert!(peeked.candidate(&Peers::default()).is_none());
}

/// The header of a datagram that holds a whole frame.
const WHOLE: Header = Header::whole(Kind::Frame, 1, 5);

/// A peer's socket, an underlay port connected to it, and the link.
fn peer_of_direct() -> (UdpSocket, Arc<UnderlayPort>, Arc<Link>) {
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let direct = UnderlayPort::bind("127.0.0.1:0".parse().unwrap(), true).unwrap();
    direct.aim(peer.local_addr().unwrap()).unwrap();
    let link = link(peer.local_addr().unwrap());
    (peer, direct, link)
}

/// Forged bytes cause no panic, and every message that is not a frame is discarded.
#[test]
fn headers_are_accepted_only_when_consistent() {
    let (peer, direct, link) = peer_of_direct();
    let peers = Arc::new(Peers::build(std::slice::from_ref(&link)));
    let good = WHOLE;
    let bad_number = Header { number: u64::MAX, last: false, ..good };
    for (header, possible) in [
        (good, true),
        (Header { kind: Kind::Bundle, ..good }, false),
        (Header { sealed: true, ..good }, false),
        (Header { index: 1, ..good }, false),
        (Header { last: false, ..good }, true),
        (bad_number, true),
        (Header { network: 0, number: 0, ..good }, false),
    ] {
        let claimed = if header.last { 5000 } else { 8000 };
        peer.send_to(&[&header.to_bytes()[..], &frame(5000, claimed, 1)].concat(), direct.local_addr())
            .unwrap();
        let peeked = direct.peek().unwrap();
        assert_eq!(peeked.candidate(&peers).is_some(), possible, "{header:?}");
        let host = bridge();
        host.peers.store(peers.clone());
        let mut rx = host.receivers.receiver(direct.socket().clone());
        if let Some((link, candidate)) = peeked.candidate(&peers) {
            let mut memory = vec![0; candidate.len];
            let room = [Room::new(memory.as_mut_ptr(), memory.len())];
            // SAFETY: only this test accesses `memory`.
            let landed = unsafe { Landing::new().land((&direct, &mut rx), link, &candidate, &room, 1) };
            assert_eq!(landed == Landed::InPlace, header.last);
            if landed != Landed::InPlace {
                rx.resume_with(1);
                drain_burst(&mut rx, &mut |batch| assert!(batch.is_empty(), "no frame"));
            }
        } else {
            drain_burst(&mut rx, &mut |_| ());
        }
        assert!(direct.peek().is_none(), "each message is taken once");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    /// Any mix of frames, guessed right or wrong, arrives unchanged and in order.
    #[test]
    fn any_mix_comes_out_as_it_went_in(
        path_mtu in prop_oneof![Just(1500u32), Just(9000), Just(65_536), Just(1280)],
        frames in prop::collection::vec((prop_oneof![60usize..1500, 3000usize..12_000, 30_000usize..65_535], 0u8..6, any::<bool>()), 1..12),
        cut in prop_oneof![Just(1526usize), Just(4096), 100usize..70_000],
    ) {
        let mut pair = Pair::new(path_mtu);
        let frames: Vec<_> = frames.iter().enumerate().map(|(n, (len, claim, offloaded))| {
            let claimed = match claim { 0 => 2 * len, 1 => len / 2, 2 => len + 1, _ => *len };
            let offload = if *offloaded { super_frame() } else { Offload::default() };
            (frame(*len, claimed.min(65_535), n as u8), offload)
        }).collect();
        pair.send(&frames);
        let got: Vec<_> = pair.receive(frames.len(), cut).into_iter().map(|(bytes, offload, _)| (bytes, offload)).collect();
        prop_assert!(got == frames);
        prop_assert!(pair.direct.peek().is_none());
        prop_assert_eq!(pair.link.stats().in_frames.get(), frames.len() as u64);
        prop_assert_eq!(pair.link.stats().in_datagrams.get(), pair.out.stats().out_datagrams.get());
    }
}
