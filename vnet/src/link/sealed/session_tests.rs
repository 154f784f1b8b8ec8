use std::sync::Arc;
use std::time::{Duration, Instant};

use super::aead::TAG_LEN;
use super::identity::{CertificateInfo, Claims};
use super::keepalive::KEEPALIVE_LEN;
use super::session::*;
use crate::frame::PortId;
use crate::link::fake::{Faults, Random, Wire};
use crate::link::state::LinkState;
use crate::link::{Link, LinkOptions, Security, first_number};
use crate::stats::DiscardReason;
use crate::wire::native::{HEADER_LEN, Header, Kind};
use std::collections::HashSet;

pub(super) fn info() -> CertificateInfo {
    CertificateInfo {
        names: vec!["peer".into()],
        claims: Claims::default(),
        valid: (0, i64::MAX),
        serial: "01".into(),
        fingerprint: String::new(),
    }
}

pub(super) fn session(role: Role, epoch: u8, seed: u8) -> Session {
    let exported = std::array::from_fn(|at| seed.wrapping_mul(73).wrapping_add(at as u8));
    Session::new(&exported, role, epoch, first_number(), (vec![], info()))
}

pub(super) fn link() -> Arc<Link> {
    let remote = "127.0.0.1:9".parse().unwrap();
    let options = LinkOptions {
        name: "peer".into(),
        remote,
        ports: 1,
        networks: None,
        mtu: None,
        kind: crate::link::LinkKind::default(),
    };
    let security = Security { peer: Some("peer".into()), macs: None, via: None };
    Link::with_security(options, security, PortId(0), Arc::default())
}

/// Seals one datagram like a dispatcher; `None` without a key.
pub(in crate::link) fn seal(link: &Link) -> Option<Vec<u8>> {
    let keyring = link.seal().unwrap().keyring();
    let key = keyring.sealing(link.next_number())?;
    let header = Header {
        kind: Kind::Frame,
        last: true,
        offload: false,
        sealed: true,
        hops: 0,
        epoch: key.epoch(),
        index: 0,
        network: 1,
        queue: 0,
        number: link.take_numbers(1),
    };
    let mut datagram = [&header.to_bytes()[..], &[7; 20], &[0; TAG_LEN]].concat();
    key.seal(&mut datagram);
    Some(datagram)
}

/// Opens one datagram like a dispatcher.
pub(in crate::link) fn open(link: &Link, mut datagram: Vec<u8>) -> Result<(), DiscardReason> {
    let keyring = link.seal().unwrap().keyring();
    let (header, _) = Header::parse(&datagram).unwrap();
    keyring.opening(header.epoch).ok_or(DiscardReason::WrongEpoch)?.open(&mut datagram)
}

pub(in crate::link) const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn without_keys_nothing_goes() {
    let link = link();
    assert_eq!(seal(&link), None);
    assert!(!link.seal().unwrap().switch(0));
    assert!(matches!(link.state(), LinkState::Down(_)));
    assert_eq!(
        link.seal_view().unwrap(),
        SealView { peer: "peer".into(), keys_s: None, certificate_end: None, rtt_us: None }
    );
}

/// Rekeys in every order that the messages of a handshake allow, over a wire that loses, duplicates and reorders: every datagram
/// that arrives opens exactly once.
#[test]
fn a_rekey_under_traffic_loses_nothing() {
    let (initiator, responder) = (link(), link());
    let (a, b) = (initiator.seal().unwrap(), responder.seal().unwrap());
    let mut random = Random::new(5);
    let faults = Faults { loss: 100, duplication: 100, reordering: 300, distance: 100 };
    let mut wire = Wire::new(9, faults);
    let (mut seen, mut epochs) = (HashSet::new(), HashSet::new());
    for round in 0..40u8 {
        let epoch = b.next_epoch();
        let mut sent = vec![];
        // Datagrams are sealed with the keys of this step, and opened with those of a later one.
        let mut traffic = |sent: &mut Vec<(bool, Vec<u8>)>| {
            for _ in 0..random.below(100) {
                sent.extend(seal(&initiator).map(|datagram| (true, datagram)));
                sent.extend(seal(&responder).map(|datagram| (false, datagram)));
            }
        };
        traffic(&mut sent);
        b.accept(session(Role::Responder, epoch, round));
        traffic(&mut sent);
        a.accept(session(Role::Initiator, epoch, round));
        assert!(a.switch(epoch));
        traffic(&mut sent);
        if round % 4 != 3 {
            assert!(b.switch(epoch), "CONFIRM came");
        }
        traffic(&mut sent);
        for (forth, datagram) in wire.carry(sent) {
            let to = if forth { &responder } else { &initiator };
            let header = Header::parse(&datagram).unwrap().0;
            epochs.insert(header.epoch);
            let fresh = seen.insert((forth, header.number));
            let want = if fresh { Ok(()) } else { Err(DiscardReason::Replayed) };
            assert_eq!(open(to, datagram), want, "round {round}, {header:?}");
        }
        for seal in [a, b] {
            seal.expire(Instant::now(), HOUR);
        }
        // Without CONFIRM, the first datagram under the new key confirms the key.
        let current = b.current(0).map(|current| current.epoch);
        assert!(current == Some(epoch) || round % 4 == 3, "round {round}");
    }
    assert_eq!(epochs.len(), 4);
    assert!(seen.len() > 1000);
}

#[test]
fn old_keys_expire() {
    let link = link();
    let held = link.seal().unwrap();
    let opens = || (0..4).filter(|epoch| held.keyring().opening(*epoch).is_some()).collect::<Vec<_>>();
    held.accept(session(Role::Initiator, 0, 1));
    held.switch(0);
    held.accept(session(Role::Initiator, 1, 2));
    held.switch(1);
    held.accept(session(Role::Initiator, 2, 3));
    let now = Instant::now();
    held.expire(now, HOUR);
    assert_eq!((opens(), held.next_epoch()), (vec![0, 1, 2], 3));
    held.expire(now + OVERLAP, HOUR);
    assert_eq!(opens(), [1, 2], "the retired key is forgotten first");
    held.expire(now + PENDING_MAX, HOUR);
    assert_eq!(opens(), [1], "then the key that nobody used");
    assert!(seal(&link).is_some());
    held.expire(now + HOUR, HOUR);
    assert_eq!((opens(), seal(&link)), (vec![], None), "and in the end the last one");
}

#[test]
fn a_refused_certificate_ends_its_session() {
    let link = link();
    let held = link.seal().unwrap();
    held.accept(session(Role::Initiator, 0, 1));
    held.switch(0);
    assert!(!held.retain(|_| true));
    assert!(seal(&link).is_some());
    assert!(held.retain(|_| false));
    assert_eq!(seal(&link), None);
}

/// Many threads seal for one link across rekeys and restarts of the link: no key seals a number twice.
#[test]
fn nonces_are_never_repeated() {
    let mut nonces = HashSet::new();
    for life in 0..3u8 {
        let link = link();
        let held = link.seal().unwrap();
        held.accept(session(Role::Initiator, 0, 10 * life));
        held.switch(0);
        let sent: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| (0..2000).filter_map(|_| seal(&link)).collect::<Vec<_>>()))
                .collect();
            for epoch in 1..4 {
                held.accept(session(Role::Initiator, epoch, 10 * life + epoch));
                held.switch(epoch);
            }
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(sent.len(), 8000);
        for datagram in sent {
            let header = Header::parse(&datagram).unwrap().0;
            assert!(nonces.insert((life, header.epoch, header.number)), "{header:?}");
        }
    }
}

#[test]
fn keepalives_measure_the_round_trip_and_ask_for_a_rekey() {
    let (a, b) = (link(), link());
    let (a, b) = (a.seal().unwrap(), b.seal().unwrap());
    b.hear(&a.keepalive(false, false).to_bytes(), true);
    assert_eq!(b.rtt_us(), None, "nothing came back yet");
    std::thread::sleep(Duration::from_millis(30));
    a.hear(&b.keepalive(false, false).to_bytes(), true);
    let rtt = a.rtt_us().unwrap();
    assert!(rtt < 20_000, "{rtt} us: the time that the other side held the clock does not count");
    assert!(!a.is_rekey_requested());
    a.hear(&b.keepalive(true, false).to_bytes(), false);
    assert!(!a.is_rekey_requested(), "the rekey that it asks for has been done");
    a.hear(&b.keepalive(true, false).to_bytes(), true);
    assert!(a.is_rekey_requested());
    // An authenticated peer may send invalid bodies.
    for body in [&[][..], &[0xff; KEEPALIVE_LEN], &[0; KEEPALIVE_LEN - 1]] {
        a.hear(body, true);
    }
    assert_eq!(KEEPALIVE_LEN + HEADER_LEN + TAG_LEN, 56);
}
