//! Sealed links over real sockets: which frames get through, and what attackers achieve.

use std::net::UdpSocket;
use std::sync::Arc;
use std::time::Duration;

use super::Name;
use crate::frame::{Batch, DropSink, FRAME_MAX, NetworkId, PortId, Segment, Selection};
use crate::link::sealed::aead::{MATERIAL_LEN, TAG_LEN};
use crate::link::sealed::identity::{CertificateInfo, Claims};
use crate::link::sealed::session::{Role, Session};
use crate::link::{Bridge, Link, LinkOptions, Peers, ReassemblyBudget, Security, first_number};
use crate::source::{Source, drain};
use crate::stats::{DiscardReason, DropReason, PortStats};
use crate::wire::native::{HEADER_LEN, Header};
use crate::wire::offload::{F_NEEDS_CSUM, Offload};

fn session(role: Role, epoch: u8, claims: Claims) -> Session {
    let exported: [u8; 2 * MATERIAL_LEN] = std::array::from_fn(|at| at as u8 ^ epoch);
    let info = CertificateInfo {
        names: vec![],
        claims,
        valid: (0, 0),
        serial: String::new(),
        fingerprint: String::new(),
    };
    Session::new(&exported, role, epoch, first_number(), (vec![], info))
}

struct Host {
    bridge: Bridge,
    link: Arc<Link>,
}

impl Host {
    fn new(
        bridge: Bridge,
        remote: std::net::SocketAddr,
        mtu: u16,
        macs: Option<Vec<crate::wire::ethernet::Mac>>,
    ) -> Host {
        let name = "peer".to_string();
        let options = LinkOptions {
            name,
            remote,
            ports: 1,
            networks: None,
            mtu: Some(mtu),
            kind: crate::link::LinkKind::default(),
        };
        let security = Security { peer: Some("peer".into()), macs, via: None };
        let link = Link::with_security(options, security, PortId(7), Arc::default());
        bridge.peers.store(Arc::new(Peers::build(std::slice::from_ref(&link))));
        link.path.set_route_mtu(65_536);
        Host { bridge, link }
    }

    fn key(&self, role: Role, epoch: u8, claims: Claims) {
        self.link.seal().unwrap().accept(session(role, epoch, claims));
        assert!(self.link.seal().unwrap().switch(epoch));
    }

    fn send(&mut self, frames: &[(Vec<u8>, Offload)]) {
        let mut batch = Batch::new();
        for (bytes, offload) in frames {
            let mut builder = batch.begin();
            let (head, tail) = bytes.split_at(bytes.len() / 3);
            for part in [head, tail] {
                // SAFETY: the frames outlive the batch, which ends with this call, and are not written to.
                unsafe { builder.push(Segment::new(part.as_ptr(), part.len())) };
            }
            builder.finish(PortId(1), NetworkId::DEFAULT, *offload, 0).unwrap();
        }
        let which: Vec<u16> = (0..batch.len() as u16).collect();
        let frames = Selection { batch: &batch, which: &which };
        self.bridge.tx.send(&self.link, frames, &mut DropSink::new());
    }

    /// Receives until the socket stays silent for a while.
    fn receive(&mut self) -> Vec<(Vec<u8>, Offload)> {
        let (mut got, mut idle) = (vec![], 0);
        while idle < 3 {
            let mut run = |batch: &Batch| {
                for frame in batch.frames() {
                    let mut bytes = vec![0; frame.len()];
                    batch.copy_to(frame, &mut bytes);
                    got.push((bytes, frame.offload));
                }
            };
            let datagrams = drain(&mut self.bridge.rx[0], 1, &mut run);
            idle = if datagrams == 0 { idle + 1 } else { 0 };
            if idle != 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        got
    }

    fn discards(&self) -> Vec<(DiscardReason, u64)> {
        let all = DiscardReason::ALL.iter().map(|reason| (*reason, self.link.stats().discards(*reason)));
        all.filter(|(_, n)| *n != 0).collect()
    }
}

fn bridge() -> Bridge {
    let budget = Arc::new(ReassemblyBudget::new(ReassemblyBudget::HOST));
    Bridge::bind("127.0.0.1:0".parse().unwrap(), false, Arc::default(), budget).unwrap()
}

/// Two hosts with keys.
fn pair(mtu: u16, claims: Claims) -> [Host; 2] {
    let (a, b) = (bridge(), bridge());
    let (at_a, at_b) = (a.local_addr(), b.local_addr());
    let [a, b] = [Host::new(a, at_b, mtu, None), Host::new(b, at_a, mtu, None)];
    a.key(Role::Initiator, 1, Claims::default());
    b.key(Role::Responder, 1, claims);
    [a, b]
}

fn frame(len: usize) -> (Vec<u8>, Offload) {
    let mut bytes: Vec<u8> = b"\x52\x54\0\0\0\x02\x52\x54\0\0\0\x01\x88\xb5CLEAR TEXT".to_vec();
    bytes.extend((bytes.len()..len.max(60)).map(|at| (at * 7 + len) as u8));
    (bytes, Offload::default())
}

#[test]
fn every_size_crosses_sealed() {
    for mtu in [576, 1500, 9000, 65_535] {
        let [mut a, mut b] = pair(mtu, Claims::default());
        let mut frames: Vec<_> =
            [60, 61, 62, 63, 600, 1414, 1426, 1427, 1428, 9000, 64, 64, FRAME_MAX, 60, 30_000]
                .into_iter()
                .map(frame)
                .collect();
        frames[3].1 = Offload { flags: F_NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..Offload::default() };
        a.send(&frames);
        assert_eq!(b.receive(), frames, "MTU {mtu}");
        b.send(&frames);
        assert_eq!(a.receive(), frames, "MTU {mtu}");
        assert_eq!((a.discards(), b.discards()), (vec![], vec![]));
        assert_eq!(b.link.stats().in_frames.get(), frames.len() as u64);
        assert_eq!(a.link.stats().out_frames.get(), frames.len() as u64);
    }
}

/// Puts a raw socket in the peer's place, and returns the datagrams it receives and the key that decrypts them.
fn tapped(mtu: u16) -> (Host, UdpSocket) {
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    peer.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let host = Host::new(bridge(), peer.local_addr().unwrap(), mtu, None);
    host.key(Role::Initiator, 1, Claims::default());
    peer.connect(host.bridge.local_addr()).unwrap();
    (host, peer)
}

fn datagrams(peer: &UdpSocket) -> Vec<Vec<u8>> {
    let mut buffer = vec![0; 65_536];
    std::iter::from_fn(|| peer.recv(&mut buffer).ok().map(|len| buffer[..len].to_vec())).collect()
}

#[test]
fn no_clear_text_leaves_a_sealed_link() {
    let (mut host, peer) = tapped(1500);
    host.send(&[frame(60), frame(64), frame(1400), frame(9000)]);
    let sent = datagrams(&peer);
    assert!(sent.len() >= 8);
    let mut numbers: Vec<u64> =
        sent.iter().map(|datagram| Header::parse(datagram).unwrap().0.number).collect();
    for datagram in &sent {
        let header = Header::parse(datagram).unwrap().0;
        assert!(header.sealed && header.epoch == 1 && datagram.len() + 28 <= 1500);
        assert!(!datagram.windows(5).any(|window| window == b"CLEAR"));
    }
    numbers.dedup();
    assert_eq!(numbers.len(), sent.len());
}

#[test]
fn without_a_key_frames_are_dropped_and_counted() {
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    peer.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let mut host = Host::new(bridge(), peer.local_addr().unwrap(), 1500, None);
    host.send(&[frame(60), frame(9000)]);
    assert_eq!(host.link.stats().drops(DropReason::NoKey), 2);
    assert_eq!(datagrams(&peer), Vec::<Vec<u8>>::new());
}

/// Clear text, forgeries, bit flips, truncation, replays and unknown epochs: none is delivered, each is counted once under its
/// reason, and none takes reassembly memory; genuine datagrams still get through.
#[test]
fn forged_and_replayed_datagrams_are_discarded() {
    const EACH: usize = 5_000;
    let (mut host, peer) = tapped(1500);
    // The peer's datagrams, as an on-path attacker would record them.
    let (mut real, tap) = tapped(1500);
    real.link.seal().unwrap().accept(session(Role::Responder, 1, Claims::default()));
    assert!(real.link.seal().unwrap().switch(1));
    real.send(&[frame(9000), frame(60)]);
    let recorded = datagrams(&tap);
    assert_eq!(recorded.len(), 8);
    let attack = |host: &mut Host, reason: DiscardReason, make: &mut dyn FnMut(usize) -> Vec<u8>| {
        let before = host.link.stats().discards(reason);
        let total: u64 = host.discards().iter().map(|(_, n)| n).sum();
        for chunk in 0..EACH / 50 {
            for n in 0..50 {
                peer.send(&make(chunk * 50 + n)).unwrap();
            }
            assert_eq!(host.receive_at_once(), 0, "{reason:?}");
        }
        assert_eq!(host.link.stats().discards(reason) - before, EACH as u64, "{reason:?}");
        let now: u64 = host.discards().iter().map(|(_, n)| n).sum();
        assert_eq!(now - total, EACH as u64, "{reason:?}: each is counted once");
        assert_eq!(host.link.heard_ms(), None, "{reason:?}: nobody was heard");
        assert_eq!(host.link.native().unwrap().budget.used(), 0, "{reason:?}");
    };
    let numbered = |bytes: &[u8], n: usize| {
        let mut bytes = bytes.to_vec();
        bytes[8..16].copy_from_slice(&(u64::MAX / 2 + n as u64).to_be_bytes());
        bytes
    };
    let first = recorded[0].clone();
    attack(&mut host, DiscardReason::Forged, &mut |n| numbered(&first, n));
    attack(&mut host, DiscardReason::Forged, &mut |n| {
        let mut flipped = recorded[n % 8].clone();
        // Any bit after the version, type and flags.
        let bit = 16 + (n * 31) % (flipped.len() * 8 - 16);
        flipped[bit / 8] ^= 1 << (bit % 8);
        // A bundle with a fragment index has no valid header; numbers here are large, so only bundles matter.
        if flipped[0] == 0x11 { numbered(&first, n) } else { flipped }
    });
    attack(&mut host, DiscardReason::SealRequired, &mut |n| {
        let mut clear = recorded[n % 8].clone();
        clear[1] &= !0x04;
        clear
    });
    attack(&mut host, DiscardReason::WrongEpoch, &mut |n| {
        let mut other = recorded[n % 8].clone();
        other[1] ^= 0x40 << (n % 2);
        other
    });
    attack(&mut host, DiscardReason::Truncated, &mut |n| {
        recorded[n % 8][..n % (HEADER_LEN + TAG_LEN)].to_vec()
    });
    // The genuine datagrams, followed by their replays.
    recorded.iter().for_each(|datagram| assert_eq!(peer.send(datagram).unwrap(), datagram.len()));
    assert_eq!(host.receive(), [frame(9000), frame(60)]);
    assert!(host.link.heard_ms().is_some());
    host.link.forget_heard();
    attack(&mut host, DiscardReason::Replayed, &mut |n| recorded[n % 8].clone());
}

/// A million datagrams of each attack pass the first step of a sealed link's receive path: none decrypts, each is counted once
/// under its reason, and genuine datagrams still decrypt afterwards.
#[test]
fn a_million_of_each_attack() {
    const EACH: usize = 1_000_000;
    const TOGETHER: usize = 100;
    let (mut host, _peer) = tapped(1500);
    let (mut real, tap) = tapped(1500);
    real.link.seal().unwrap().accept(session(Role::Responder, 1, Claims::default()));
    assert!(real.link.seal().unwrap().switch(1));
    real.send(&[frame(60)]);
    let recorded = datagrams(&tap).remove(0);
    let (link, whole) = (host.link.clone(), recorded.len());
    assert!(link.seal().is_some());
    let receiver = &mut host.bridge.rx[0];
    let mut open = |len: usize, count: usize, make: &mut dyn FnMut(usize, &mut [u8])| {
        for (n, place) in receiver.burst.buffer(0)[..len * count].chunks_exact_mut(len).enumerate() {
            place.copy_from_slice(&recorded[..len]);
            make(n, place);
        }
        receiver.burst.set(0, Name::unknown(), len * count, len);
        receiver.progress.begin(1);
        let message = receiver.burst.message(0);
        receiver.open(&link, &message);
        let opened = &receiver.progress.opened;
        assert_eq!(opened.len(), count);
        opened.iter().filter(|opened| **opened).count()
    };
    let all =
        || -> Vec<u64> { DiscardReason::ALL.iter().map(|reason| link.stats().discards(*reason)).collect() };
    let mut attack = |reason: DiscardReason,
                      len: &dyn Fn(usize) -> usize,
                      make: &dyn Fn(usize, &mut [u8])| {
        let before = all();
        for first in (0..EACH).step_by(TOGETHER) {
            assert_eq!(
                open(len(first / TOGETHER), TOGETHER, &mut |n, bytes| make(first + n, bytes)),
                0,
                "{reason:?}"
            );
        }
        let grown: Vec<u64> = all().iter().zip(before).map(|(now, before)| now - before).collect();
        let counted = DiscardReason::ALL.iter().map(|other| if *other == reason { EACH as u64 } else { 0 });
        assert_eq!(grown, counted.collect::<Vec<_>>(), "{reason:?}");
    };
    // A fresh number, with any other byte changed.
    attack(DiscardReason::Forged, &|_| whole, &|n, bytes| {
        bytes[8..16].copy_from_slice(&(u64::MAX / 2 + n as u64).to_be_bytes());
        bytes[HEADER_LEN..].iter_mut().for_each(|byte| *byte = byte.wrapping_mul(167).wrapping_add(n as u8));
    });
    // One bit of payload or tag.
    attack(DiscardReason::Forged, &|_| whole, &|n, bytes| {
        let bit = HEADER_LEN * 8 + n % ((whole - HEADER_LEN) * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
    });
    attack(DiscardReason::WrongEpoch, &|_| whole, &|n, bytes| bytes[1] ^= 0x40 << (n % 2));
    attack(DiscardReason::Truncated, &|batch| 1 + batch % (HEADER_LEN + TAG_LEN - 1), &|_, _| {});
    // A truncated datagram ends in a wrong tag.
    attack(
        DiscardReason::Forged,
        &|batch| HEADER_LEN + TAG_LEN + batch % (whole - HEADER_LEN - TAG_LEN),
        &|_, _| {},
    );
    attack(DiscardReason::SealRequired, &|_| whole, &|_, bytes| bytes[1] &= !0x04);
    assert_eq!(open(whole, 1, &mut |_, _| {}), 1, "the real one");
    let replayed = link.stats().discards(DiscardReason::Replayed);
    for _ in 0..EACH / TOGETHER {
        assert_eq!(open(whole, TOGETHER, &mut |_, _| {}), 0);
    }
    assert_eq!(link.stats().discards(DiscardReason::Replayed) - replayed, EACH as u64);
    assert_eq!(link.native().unwrap().budget.used(), 0);
}

impl Host {
    /// Receives waiting datagrams; returns the number of frames.
    fn receive_at_once(&mut self) -> usize {
        let (mut frames, mut datagrams) = (0, 0);
        while datagrams < 50 {
            let mut run = |batch: &Batch| frames += batch.len();
            datagrams += drain(&mut self.bridge.rx[0], 1, &mut run);
        }
        frames
    }
}

/// An authenticated peer that floods fragments takes no more than its share of memory, and may use only what its certificate
/// allows.
#[test]
fn a_peer_is_held_to_its_certificate_and_configuration() {
    let network = |id| NetworkId::new(id).unwrap();
    let ours = "52:54:00:00:00:01".parse().unwrap();
    for (claims, macs, reason) in [
        (
            Claims { networks: Some(vec![network(2), network(3)]), macs: None },
            None,
            Some(DropReason::WrongNetwork),
        ),
        (Claims { networks: Some(vec![network(1)]), macs: Some(vec![ours]) }, None, None),
        (
            Claims { networks: None, macs: Some(vec!["52:54:00:00:00:09".parse().unwrap()]) },
            None,
            Some(DropReason::BadSource),
        ),
        (Claims::default(), Some(vec!["52:54:00:00:00:09".parse().unwrap()]), Some(DropReason::BadSource)),
        (Claims::default(), Some(vec!["52:54:00:00:00:09".parse().unwrap(), ours]), None),
    ] {
        let (a, b) = (bridge(), bridge());
        let (at_a, at_b) = (a.local_addr(), b.local_addr());
        let [mut a, mut b] = [Host::new(a, at_b, 1500, None), Host::new(b, at_a, 1500, macs)];
        a.key(Role::Initiator, 1, Claims::default());
        b.key(Role::Responder, 1, claims.clone());
        let mut frames = [frame(60), frame(61), frame(9000), frame(1400)];
        frames[2].1 = Offload { flags: F_NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..Offload::default() };
        a.send(&frames);
        let got = b.receive();
        match reason {
            None => assert_eq!(got, frames, "{claims:?}"),
            Some(reason) => {
                assert_eq!(got, [], "{claims:?}");
                assert_eq!(
                    (b.link.stats().drops(reason), b.link.stats().in_frames.get()),
                    (4, 4),
                    "{claims:?}"
                );
            }
        }
    }
}

#[test]
fn datagrams_that_the_kernel_drops_are_counted() {
    const SENT: u64 = 1000;
    let (stats, budget) =
        (Arc::<PortStats>::default(), Arc::new(ReassemblyBudget::new(ReassemblyBudget::HOST)));
    let mut bridge = Bridge::bind("127.0.0.1:0".parse().unwrap(), false, stats.clone(), budget).unwrap();
    let receiver = &mut bridge.rx[0];
    receiver.socket().set_buffers(1 << 14).unwrap();
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    for _ in 0..SENT {
        stranger.send_to(&[0; 1000], receiver.local_addr()).unwrap();
    }
    receiver.tick(0);
    let lost = stats.discards(DiscardReason::Overflow);
    assert!((1..SENT).contains(&lost), "{lost}");
    while drain(receiver, 1, &mut |_: &Batch| {}) != 0 {}
    receiver.tick(1);
    assert_eq!(stats.discards(DiscardReason::Overflow), lost, "once");
    assert_eq!(stats.discards(DiscardReason::UnknownSource) + lost, SENT);
}
