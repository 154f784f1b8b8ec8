use std::net::UdpSocket;
use std::time::Duration;

use super::*;
use crate::frame::{Batch, PortId};
use crate::link::sealed::identity::{CertificateInfo, Claims};
use crate::link::sealed::session::{Role, Session};
use crate::link::{ANYWHERE, Bridge, LinkKind, LinkOptions, Peers, ReassemblyBudget, Security};
use crate::source::drain;
use crate::stats::DiscardReason;

fn session(role: Role, epoch: u8) -> Session {
    let exported = std::array::from_fn(|at| (at as u8).wrapping_mul(7) ^ epoch);
    let info = CertificateInfo {
        names: vec![],
        claims: Claims::default(),
        valid: (0, 0),
        serial: String::new(),
        fingerprint: String::new(),
    };
    Session::new(&exported, role, epoch, 1, (vec![], info))
}

fn link(remote: SocketAddr, role: Role) -> Arc<Link> {
    let options = LinkOptions {
        name: "peer".into(),
        remote,
        ports: 1,
        networks: None,
        mtu: None,
        kind: LinkKind::default(),
    };
    let security = Security { peer: Some("peer".into()), macs: None, via: None };
    let link = Link::with_security(options, security, PortId(7), Arc::default());
    link.seal().unwrap().accept(session(role, 0));
    assert!(link.seal().unwrap().switch(0));
    link
}

/// A host whose peer is played by plain sockets.
struct Waiting {
    bridge: Bridge,
    link: Arc<Link>,
    /// The peer's link, which seals its datagrams.
    peer: Arc<Link>,
    stats: Arc<crate::stats::PortStats>,
}

impl Waiting {
    fn new(remote: SocketAddr) -> Waiting {
        let stats = Arc::<crate::stats::PortStats>::default();
        let listen = "127.0.0.1:0".parse().unwrap();
        let bridge = Bridge::bind(listen, false, stats.clone(), Arc::new(ReassemblyBudget::new(0))).unwrap();
        let link = link(remote, Role::Responder);
        let peers = Peers::build(std::slice::from_ref(&link));
        bridge.peers.store(Arc::new(peers));
        Waiting { peer: self::link(bridge.local_addr(), Role::Initiator), bridge, link, stats }
    }

    /// A datagram of the peer, sealed with its keys of `epoch` if it has them.
    fn sealed(&self, kind: Kind) -> Vec<u8> {
        let seal = self.peer.seal().unwrap();
        let keyring = seal.keyring();
        let key = keyring.sealing(1).unwrap();
        let (tag, body) = match kind {
            Kind::Keepalive => (keyring.tag(), seal.keepalive(false, false).to_bytes().to_vec()),
            _ => (0, vec![0; 60]),
        };
        let header = Header {
            kind,
            last: true,
            offload: false,
            sealed: true,
            hops: 0,
            epoch: key.epoch(),
            index: 0,
            network: if kind == Kind::Frame { 1 } else { tag >> 8 },
            queue: tag as u8,
            number: self.peer.take_numbers(1),
        };
        let mut datagram = [&header.to_bytes()[..], &body, &[0; TAG_LEN]].concat();
        key.seal(&mut datagram);
        datagram
    }

    /// Receives datagrams, follows the peer like the keeper, and returns the number of frames.
    fn take(&mut self) -> usize {
        let (mut frames, mut idle) = (0, 0);
        while idle < 2 {
            let mut run = |batch: &Batch| frames += batch.len();
            let got = drain(&mut self.bridge.rx[0], 1, &mut run);
            if got == 0 {
                idle += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let seal = self.link.seal().unwrap();
        if self.link.native().unwrap().place.follow().is_some() | seal.has_changed() {
            seal.sources().unwrap().refresh();
        }
        frames
    }

    fn discards(&self, reason: DiscardReason) -> (u64, u64) {
        (self.stats.discards(reason), self.link.stats().discards(reason))
    }
}

fn socket() -> (UdpSocket, Option<SocketAddr>) {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().ok();
    (socket, address)
}

#[test]
fn a_peer_is_learned_and_followed() {
    let mut host = Waiting::new(ANYWHERE);
    let to = host.bridge.local_addr();
    let ((one, at_one), (other, at_other), (thief, _)) = (socket(), socket(), socket());
    assert_eq!((host.link.remote(), host.link.native().unwrap().place.ports()), (None, 0));
    // Frames have no tag, and trying every link's key would cost too much.
    one.send_to(&host.sealed(Kind::Frame), to).unwrap();
    assert_eq!((host.take(), host.discards(DiscardReason::UnknownSource)), (0, (1, 0)));
    one.send_to(&host.sealed(Kind::Keepalive), to).unwrap();
    host.take();
    assert_eq!((host.link.remote(), host.link.native().unwrap().place.ports()), (at_one, 1));
    one.send_to(&host.sealed(Kind::Frame), to).unwrap();
    assert_eq!(host.take(), 1);

    let held_back = host.sealed(Kind::Keepalive);
    let moved = host.sealed(Kind::Keepalive);
    other.send_to(&moved, to).unwrap();
    host.take();
    assert_eq!(host.link.remote(), at_other);
    other.send_to(&host.sealed(Kind::Frame), to).unwrap();
    assert_eq!(host.take(), 1);

    // Replayed and late keepalives move nothing.
    thief.send_to(&moved, to).unwrap();
    host.take();
    assert_eq!(host.link.remote(), at_other);
    assert_eq!(host.discards(DiscardReason::Replayed), (0, 1));
    thief.send_to(&held_back, to).unwrap();
    host.take();
    assert_eq!(host.link.remote(), at_other);

    assert!(host.link.native().unwrap().place.forget() && !host.link.native().unwrap().place.forget());
    assert_eq!(host.link.remote(), None);
}

#[test]
fn a_declared_peer_moves_and_comes_back() {
    let ((home, at_home), (away, at_away)) = (socket(), socket());
    let mut host = Waiting::new(at_home.unwrap());
    let to = host.bridge.local_addr();
    for (from, at) in [(&away, at_away), (&home, at_home), (&away, at_away)] {
        from.send_to(&host.sealed(Kind::Keepalive), to).unwrap();
        host.take();
        assert_eq!(host.link.remote(), at);
    }
    host.link.native().unwrap().place.forget();
    assert_eq!(host.link.remote(), at_home);
    // With a new configured address the link moves at once and keeps its keys, and silence does not move it back.
    assert!(host.link.aim(at_away.unwrap()));
    assert_eq!(host.link.remote(), at_away);
    assert!(!host.link.native().unwrap().place.forget());
    home.send_to(&host.sealed(Kind::Keepalive), to).unwrap();
    host.take();
    assert_eq!(host.link.remote(), at_home, "it follows as before");
    host.link.native().unwrap().place.forget();
    assert_eq!(host.link.remote(), at_away);
}

/// Garbage and forged keepalives move nothing, and each of them is counted.
#[test]
fn strangers_move_nothing() {
    let mut host = Waiting::new(ANYWHERE);
    let to = host.bridge.local_addr();
    let ((home, at_home), (thief, _)) = (socket(), socket());
    home.send_to(&host.sealed(Kind::Keepalive), to).unwrap();
    host.take();
    let forge = |flip: usize| {
        let mut datagram = host.sealed(Kind::Keepalive);
        datagram[flip] ^= 0x40;
        datagram
    };
    // Flips a bit of the number, of the ciphertext, and of the AEAD tag.
    let forged: Vec<_> = [8, 20, 50].map(forge).into();
    // Flips a bit of the version, and of the keepalive's tag: no link has that tag.
    let strange: Vec<_> = [0, 4, 7].map(forge).into();
    let other_epoch = forge(1);
    let short = host.sealed(Kind::Keepalive)[..55].to_vec();
    for datagram in forged.iter().chain(&strange).chain([&other_epoch, &short]) {
        thief.send_to(datagram, to).unwrap();
        host.take();
    }
    assert_eq!(host.discards(DiscardReason::Forged), (0, 3));
    assert_eq!(host.discards(DiscardReason::WrongEpoch), (0, 1));
    assert_eq!(host.discards(DiscardReason::UnknownSource), (4, 0));
    assert_eq!(host.link.remote(), at_home);
}

/// A retired key opens datagrams in flight, but keepalives under it do not move the link.
#[test]
fn retired_keys_move_nothing() {
    let mut host = Waiting::new(ANYWHERE);
    let to = host.bridge.local_addr();
    let ((home, at_home), (thief, _)) = (socket(), socket());
    let held_back = host.sealed(Kind::Keepalive);
    for link in [&host.link, &host.peer] {
        let role = if Arc::ptr_eq(link, &host.peer) { Role::Initiator } else { Role::Responder };
        link.seal().unwrap().accept(session(role, 1));
        link.seal().unwrap().switch(1);
    }
    host.take();
    home.send_to(&host.sealed(Kind::Keepalive), to).unwrap();
    host.take();
    assert_eq!(host.link.remote(), at_home);
    thief.send_to(&held_back, to).unwrap();
    host.take();
    assert_eq!(host.link.remote(), at_home);
    assert_eq!(host.discards(DiscardReason::UnknownSource), (1, 0), "no link has its tag any more");
}
