use std::collections::HashSet;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use rustls::pki_types::CertificateDer;

use super::*;
use crate::frame::PortId;
use crate::link::sealed::pki::Pki;
use crate::link::sealed::session_tests;
use crate::link::{ANYWHERE, LinkKind, LinkOptions, Security};
use crate::stats::DiscardReason;
use crate::wire::native::Header;

const HOUR: Duration = Duration::from_secs(3600);

/// A certificate as handshakes bring it.
fn certificate() -> (Vec<CertificateDer<'static>>, CertificateInfo) {
    static CHAIN: LazyLock<Vec<CertificateDer<'static>>> = LazyLock::new(|| {
        let folder = tempfile::tempdir().unwrap();
        Pki::new(folder.path()).identity("h2").chain().to_vec()
    });
    (CHAIN.clone(), CertificateInfo::read(&CHAIN[0]).unwrap())
}

fn session(role: Role, epoch: u8, link: &Link) -> Session {
    let exported = std::array::from_fn(|at| 31_u8.wrapping_mul(at as u8).wrapping_add(epoch));
    let session = Session::new(&exported, role, epoch, link.next_number(), certificate());
    session.with_application_secret(Zeroizing::new([epoch; SECRET_LEN]))
}

fn link() -> Arc<Link> {
    let remote = "192.0.2.2:9000".parse().unwrap();
    let kind = LinkKind::default();
    let options = LinkOptions { name: "h2".into(), remote, ports: 2, networks: None, mtu: None, kind };
    let security = Security { peer: Some("h2".into()), macs: None, via: None };
    Link::with_security(options, security, PortId(0), Arc::default())
}

/// Two links whose keys of epoch 0 work.
fn pair() -> [Arc<Link>; 2] {
    let both = [link(), link()];
    for (link, role) in both.iter().zip([Role::Initiator, Role::Responder]) {
        assert!(link.seal().unwrap().accept(session(role, 0, link)));
        assert!(link.seal().unwrap().switch(0));
    }
    both
}

/// Seals a datagram like a dispatcher.
fn seal(link: &Link) -> Vec<u8> {
    session_tests::seal(link).expect("a key")
}

/// Opens one like a dispatcher.
fn open(link: &Link, datagram: &[u8]) -> Result<(), DiscardReason> {
    session_tests::open(link, datagram.to_vec())
}

fn number(datagram: &[u8]) -> u64 {
    Header::parse(datagram).unwrap().0.number
}

/// The link of the next vnetd.
fn succeed(link: &Link) -> Arc<Link> {
    link.begin_hand_over();
    let bytes = link.hand_over(5000).unwrap();
    assert!(bytes.len() <= bytes.capacity() && bytes.len() <= SEALED_STATE_MAX);
    let state = SealedState::parse(&bytes).unwrap();
    assert_eq!(state.name(), "h2");
    let heir = self::link();
    heir.resume(state, 300);
    heir
}

#[test]
fn numbers_never_repeat_and_replays_are_refused_across_take_overs() {
    let [mut near, far] = pair();
    let (mut numbers, mut from_far) = (HashSet::new(), vec![]);
    for _ in 0..5 {
        let sent: Vec<_> = (0..100).map(|_| (seal(&near), seal(&far))).collect();
        for (ours, theirs) in &sent {
            assert!(numbers.insert(number(ours)), "a nonce twice");
            assert_eq!((open(&far, ours), open(&near, theirs)), (Ok(()), Ok(())));
            from_far.push(theirs.clone());
        }
        // Still in flight while the vnetds change.
        let late = [seal(&near), seal(&far)];
        numbers.insert(number(&late[0]));
        let epoch = near.seal_view().unwrap().keys_s;
        near = succeed(&near);
        assert!(near.next_number() > *numbers.iter().max().unwrap());
        assert_eq!(near.seal_view().unwrap().keys_s, epoch);
        assert_eq!((open(&far, &late[0]), open(&near, &late[1])), (Ok(()), Ok(())));
        from_far.push(late[1].clone());
        for old in &from_far {
            assert_eq!(open(&near, old), Err(DiscardReason::Replayed));
        }
    }
}

#[test]
fn the_running_vnetd_seals_and_changes_nothing_once_it_hands_over() {
    let [near, _far] = pair();
    let held = near.seal().unwrap();
    let turn = held.turn().unwrap();
    std::thread::scope(|scope| {
        let handing = scope.spawn(|| near.begin_hand_over());
        std::thread::sleep(Duration::from_millis(50));
        assert!(!handing.is_finished(), "a sender is waited for");
        drop(turn);
    });
    assert!(held.turn().is_none());
    assert!(!held.accept(session(Role::Initiator, 1, &near)), "a handshake under way fails");
    assert!(!held.switch(0));
    held.expire(Instant::now() + 3 * HOUR, HOUR);
    assert_eq!(held.sessions.lock().len(), 1, "nothing expires");

    let next = near.next_number();
    near.reclaim(false);
    assert!(near.next_number() == next && number(&seal(&near)) == next);
    assert!(held.turn().is_some() && held.accept(session(Role::Initiator, 1, &near)));
}

#[test]
fn keys_that_a_failed_vnetd_may_have_used_are_discarded() {
    let [near, far] = pair();
    let heir = succeed(&near);
    let datagram = seal(&far);
    assert_eq!(open(&heir, &datagram), Ok(()));
    let used = number(&seal(&heir));
    near.reclaim(true);
    assert!(near.seal().unwrap().keyring().sealing(near.next_number()).is_none());
    assert_eq!(open(&near, &datagram), Err(DiscardReason::WrongEpoch), "it would open a second time");
    assert!(near.next_number() > used);
    assert!(near.seal().unwrap().turn().is_some());
    // A link that hands nothing over loses nothing.
    far.reclaim(true);
    assert!(far.seal().unwrap().keyring().sealing(far.next_number()).is_some());
}

#[test]
fn sessions_of_all_stages_go_on() {
    let [near, far] = pair();
    let held = near.seal().unwrap();
    assert!(held.accept(session(Role::Initiator, 1, &near)));
    assert!(held.switch(1));
    // The other host has accepted the next keys, and switches to them after the take-over.
    assert!(held.accept(session(Role::Responder, 2, &near)));
    let stages = |link: &Link| {
        let sessions = link.seal().unwrap().sessions.lock();
        sessions
            .iter()
            .map(|session| (session.epoch, session.role, format!("{:.7?}", session.stage)))
            .collect::<Vec<_>>()
    };
    let keys = held.application_keys(None, true, b"context").unwrap();
    let before = (stages(&near), held.tags());
    held.request_rekey();
    near.heard(4000);
    near.native().unwrap().place.move_to("192.0.2.9:9000".parse().unwrap());
    let heir = succeed(&near);
    let now = heir.seal().unwrap();
    assert_eq!(before.0.iter().map(|(epoch, ..)| *epoch).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(
        stages(&heir)
            .iter()
            .map(|(epoch, role, stage)| (*epoch, *role, &stage[..5] == "Retir"))
            .collect::<Vec<_>>(),
        [(0, Role::Initiator, true), (1, Role::Initiator, false), (2, Role::Responder, false)]
    );
    assert_eq!(now.tags(), before.1);
    assert_eq!(now.application_keys(None, true, b"context").unwrap(), keys);
    assert!(now.is_rekey_requested());
    assert_eq!(heir.remote(), "192.0.2.9:9000".parse().ok());
    assert_eq!(heir.heard_ms(), Some(0), "heard before this clock began");
    let theirs = session(Role::Initiator, 2, &far);
    assert!(far.seal().unwrap().accept(theirs) && far.seal().unwrap().switch(2));
    assert_eq!(open(&heir, &seal(&far)), Ok(()));
    now.expire(Instant::now(), HOUR);
    assert_eq!(open(&far, &seal(&heir)), Ok(()));
    assert_eq!(number(&seal(&heir)) + 1, heir.next_number());
    assert!(now.keyring().sealing(heir.next_number()).is_some_and(|key| key.epoch() == 2));
}

#[test]
fn addresses_of_all_families_go_on() {
    for address in ["192.0.2.7:9000", "[2001:db8::7]:9001", "[fe80::7%3]:9000"] {
        let [near, _far] = pair();
        near.native().unwrap().place.move_to(address.parse().unwrap());
        assert_eq!(succeed(&near).remote(), address.parse().ok());
    }
}

/// The state of a link's choice of paths, as the next vnetd has it.
fn path_state(link: &Link) -> Vec<u8> {
    let mut out = vec![];
    link.via().expect("a link with a rendezvous").hand_over(&mut out);
    out
}

#[test]
fn the_choice_of_the_path_goes_on() {
    let by_relay = || {
        let kind = LinkKind::default();
        let (name, remote) = ("h2".into(), ANYWHERE);
        let options = LinkOptions { name, remote, ports: 1, networks: None, mtu: None, kind };
        let security = Security { peer: Some("h2".into()), macs: None, via: Some("r".into()) };
        Link::with_security(options, security, PortId(0), Arc::default())
    };
    let near = by_relay();
    assert!(near.seal().unwrap().accept(session(Role::Initiator, 0, &near)));
    let (relay, direct) = ("192.0.2.3:9001".parse().unwrap(), "192.0.2.9:9000".parse().unwrap());
    near.via().unwrap().pretend(relay, Some(direct));
    near.native().unwrap().place.move_to(direct);
    near.begin_hand_over();
    let heir = by_relay();
    heir.resume(SealedState::parse(&near.hand_over(0).unwrap()).unwrap(), 0);
    assert_eq!(heir.remote(), Some(direct));
    let via = heir.via().unwrap();
    assert_eq!(via.sources(), [relay, direct]);
    assert!(via.is_relay(relay));
    assert_eq!(via.settle(Some(direct)), (None, false), "frames still go directly");
    assert_eq!(via.other_paths(Some(direct)), (true, vec![relay]));
    let number = |link: &Link| {
        let (to, bytes) = link.via().unwrap().registration().unwrap();
        assert_eq!(to, relay);
        u64::from_be_bytes(bytes[16..24].try_into().unwrap())
    };
    assert!(number(&near) < number(&heir));
    // Without anything known, too.
    let bare = by_relay();
    bare.begin_hand_over();
    let heir = by_relay();
    heir.resume(SealedState::parse(&bare.hand_over(0).unwrap()).unwrap(), 0);
    assert_eq!(path_state(&heir), path_state(&by_relay()));
}

#[test]
fn a_link_without_keys_goes_on_without() {
    let bare = link();
    let heir = succeed(&bare);
    assert_eq!(heir.seal_view().unwrap().keys_s, None);
    assert_eq!(heir.heard_ms(), None);
    assert!(matches!(heir.state(), LinkState::Down(_)));
    let mut options = bare.options().clone();
    options.name = "clear".into();
    assert!(Link::new(options, PortId(1), Arc::default()).hand_over(0).is_none());
}

#[test]
fn other_encodings_are_refused() {
    let [near, _far] = pair();
    near.begin_hand_over();
    let good = near.hand_over(0).unwrap();
    assert!(SealedState::parse(&good).is_ok());
    for len in 0..good.len() {
        assert!(SealedState::parse(&good[..len]).is_err(), "{len} bytes");
    }
    let longer = [&good[..], &[0]].concat();
    assert_eq!(SealedState::parse(&longer).unwrap_err(), SuccessionError("bytes follow it"));
    assert!(SealedState::parse(&vec![0; SEALED_STATE_MAX + 1]).is_err());
    // version, name, number, silence, round trip; then flags, family and address, no choice of paths, sessions, epoch, stage, role, first number.
    let flags = 1 + 2 + 2 + 8 + 8 + 4;
    let sessions = flags + 1 + 1 + 4 + 2 + 1;
    for (at, wrong) in [
        (0, 2),
        (3, 0xff),
        (flags, 0x80),
        (flags + 1, 5),
        (sessions - 1, 2),
        (sessions, 5),
        (sessions + 1, 4),
        (sessions + 2, 3),
        (sessions + 3, 2),
        (sessions + 4 + 7, 0xff),
        (sessions + 12 + 7, 0x7f),
    ] {
        let mut bad = good.to_vec();
        bad[at] = wrong;
        assert!(SealedState::parse(&bad).is_err(), "byte {at}");
    }
    let twice = [&good[..sessions], &[2], &good[sessions + 1..], &good[sessions + 1..]].concat();
    let error = SealedState::parse(&twice).unwrap_err();
    assert_eq!(error, SuccessionError("sessions that contradict each other"));
}

#[test]
fn keys_are_not_shown() {
    let [near, _far] = pair();
    near.begin_hand_over();
    let shown = format!("{:?}", SealedState::parse(&near.hand_over(0).unwrap()).unwrap());
    assert_eq!(shown, "SealedState(h2, [Session(epoch 0, Current)])");
}
