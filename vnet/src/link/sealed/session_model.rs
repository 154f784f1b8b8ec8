//! Loom models of [`session`]: however keys are replaced, a datagram finds the one that opens it, and no change is lost.
//!
//! The sessions, their keyring and the keys themselves are the real ones: datagrams are encrypted and decrypted. Replay windows are
//! std's here; they have a model of their own (`replay_model.rs`).

use std::time::Instant;

use loom::cell::UnsafeCell;
use loom::sync::Arc as Shared;
use loom::thread;

use super::session_tests::{HOUR, info};
use super::{aead, identity, keepalive};
use crate::alone;
use crate::loomed::{Mutex, explore};
use crate::proof::bound;
use crate::wire::native::HEADER_LEN;

#[allow(clippy::duplicate_mod, dead_code, reason = "the real code, with loom's types")]
#[path = "session.rs"]
mod session;
mod sync {
    pub(super) use crate::loomed::{ArcSwap, Guard, Mutex, RwLock, RwLockReadGuard};
    pub(super) use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicU32};
}
use session::{Keyring, Role, Seal, Session};

/// Each epoch has other keys.
fn session(role: Role, epoch: u8) -> Session {
    let exported = std::array::from_fn(|at| epoch.wrapping_mul(73).wrapping_add(at as u8));
    Session::new(&exported, role, epoch, 0, (vec![], info()))
}

/// A seal whose key of epoch 0 works.
fn seal(role: Role) -> Seal {
    let seal = Seal::new("peer".into());
    assert!(seal.accept(session(role, 0)) && seal.switch(0));
    seal
}

/// Initiator and responder, and the datagrams on the wire to the responder.
struct Pair {
    initiator: Seal,
    responder: Seal,
    wire: Mutex<Vec<Vec<u8>>>,
}

impl Pair {
    fn new() -> Shared<Pair> {
        let (initiator, responder) = (seal(Role::Initiator), seal(Role::Responder));
        Shared::new(Pair { initiator, responder, wire: Mutex::new(vec![]) })
    }

    /// The initiator's dispatcher sends a datagram.
    fn send(&self, number: u64) {
        let keyring = self.initiator.keyring();
        let key = keyring.sealing(number).expect("there are keys since the first handshake");
        let mut datagram = vec![0; HEADER_LEN + aead::TAG_LEN];
        (datagram[0], datagram[HEADER_LEN - 1]) = (key.epoch(), number as u8);
        key.seal(&mut datagram);
        self.wire.lock().push(datagram);
    }

    /// The responder's dispatcher receives a burst, and opens it with the keys of that moment.
    fn receive(&self) -> usize {
        let mut burst = std::mem::take(&mut *self.wire.lock());
        let keyring = self.responder.keyring();
        for datagram in &mut burst {
            let key = keyring.opening(datagram[0]).expect("no key opens a datagram");
            assert_eq!(key.open(datagram), Ok(()));
        }
        burst.len()
    }
}

/// Two datagrams cross the wire, each dispatcher on a thread of its own, while `rekey` changes the sessions.
fn traffic(rekey: impl FnOnce(&Pair)) {
    let pair = Pair::new();
    let sender = thread::spawn({
        let pair = pair.clone();
        move || (1..=2).for_each(|number| pair.send(number))
    });
    let receiver = thread::spawn({
        let pair = pair.clone();
        move || pair.receive() + pair.receive()
    });
    rekey(&pair);
    sender.join().unwrap();
    let received = receiver.join().unwrap();
    assert_eq!(received + pair.receive(), 2);
}

/// The order of the handshake: ACCEPT, the initiator's switch, CONFIRM.
fn rekey(pair: &Pair) {
    assert!(pair.responder.accept(session(Role::Responder, 1)));
    assert!(pair.initiator.accept(session(Role::Initiator, 1)));
    assert!(pair.initiator.switch(1));
    assert!(pair.responder.switch(1));
}

/// CONFIRM is lost: the responder switches once a datagram has used the new key.
fn unconfirmed_rekey(pair: &Pair) {
    assert!(pair.responder.accept(session(Role::Responder, 1)));
    assert!(pair.initiator.accept(session(Role::Initiator, 1)));
    assert!(pair.initiator.switch(1));
    pair.responder.expire(Instant::now(), HOUR);
}

/// Epochs that open, and the one that seals.
fn epochs(keyring: &Keyring) -> (Vec<u8>, Option<u8>) {
    let open = (0..4).filter(|epoch| keyring.opening(*epoch).is_some());
    (open.collect(), keyring.sealing(0).map(|key| key.epoch()))
}

/// A handshake completes while a refused certificate ends another session: the keyring published last is that of the last change.
fn concurrent_changes(discard: impl Fn(&Seal) + Send + Copy + 'static) {
    let held = Shared::new(seal(Role::Initiator));
    let other = thread::spawn({
        let held = held.clone();
        move || discard(&held)
    });
    assert!(held.accept(session(Role::Initiator, 1)) && held.switch(1));
    other.join().unwrap();
    assert_eq!(epochs(&held.keyring()), (vec![1], Some(1)));
}

fn discard(held: &Seal) {
    held.retain(|session| session.epoch != 0);
}

/// What is handed over stays as it is, and the keyring has it: a handshake that completes meanwhile is refused, or is part of it.
fn hand_over() {
    let held = Shared::new(seal(Role::Initiator));
    let handshake = thread::spawn({
        let held = held.clone();
        move || (held.accept(session(Role::Initiator, 1)), held.switch(1))
    });
    let look = || {
        let sessions = held.sessions.lock();
        let current = sessions.iter().find(|session| session.stage == session::Stage::Current);
        (sessions.iter().map(|session| session.epoch).collect(), current.map(|session| session.epoch))
    };
    held.begin_hand_over();
    let handed: (Vec<u8>, Option<u8>) = look();
    assert_eq!(epochs(&held.keyring()), handed);
    let (accepted, switched) = handshake.join().unwrap();
    assert_eq!(look(), handed);
    let expected = if accepted { vec![0, 1] } else { vec![0] };
    assert_eq!(handed, (expected, Some(u8::from(switched))));
    held.end_hand_over(false);
    assert!(held.accept(session(Role::Initiator, 2)));
}

/// Of two handshakes that begin at the same time, the later one sees what the earlier one has done, or does not begin.
fn one_handshake_at_a_time() {
    struct State(Seal, UnsafeCell<u32>);
    // SAFETY: loom reports every unordered access.
    unsafe impl Sync for State {}
    let state = Shared::new(State(Seal::new("peer".into()), UnsafeCell::new(0)));
    let attempt = |state: &State| {
        let Some(_under_way) = state.0.begin_handshake() else { return 0 };
        // SAFETY: loom reports an access that is not ordered with this one.
        state.1.with_mut(|done| unsafe { *done += 1 });
        1
    };
    let other = thread::spawn({
        let state = state.clone();
        move || attempt(&state)
    });
    let begun = attempt(&state) + other.join().unwrap();
    // SAFETY: as above.
    assert_eq!(state.1.with(|done| unsafe { *done }), begun);
    assert!(begun >= 1);
}

#[test]
fn a_datagram_finds_its_key_during_a_rekey() {
    alone("link::sealed::session_model::a_datagram_finds_its_key_during_a_rekey", || {
        explore(bound(2, 3), || traffic(rekey));
        explore(bound(2, 3), || traffic(unconfirmed_rekey));
    });
}

#[test]
fn keyrings_are_replaced_in_order() {
    alone("link::sealed::session_model::keyrings_are_replaced_in_order", || {
        explore(3, || concurrent_changes(discard));
    });
}

#[test]
fn what_is_handed_over_does_not_change() {
    alone("link::sealed::session_model::what_is_handed_over_does_not_change", || explore(3, hand_over));
}

#[test]
fn handshakes_exclude_each_other() {
    alone("link::sealed::session_model::handshakes_exclude_each_other", || {
        explore(3, one_handshake_at_a_time);
    });
}

/// Runs a model that must fail, and returns what it said.
fn failure(model: impl Fn() + Sync + Send + 'static) -> String {
    let explored = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| explore(3, model)));
    let panic = explored.expect_err("the model found nothing");
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).into())).unwrap_or_default()
}

/// Verifies the model itself: an initiator that seals with a key before the responder opens with it.
#[test]
fn the_model_finds_a_switch_that_is_early() {
    let careless = || {
        traffic(|pair| {
            assert!(pair.initiator.accept(session(Role::Initiator, 1)) && pair.initiator.switch(1));
            assert!(pair.responder.accept(session(Role::Responder, 1)));
        });
    };
    alone("link::sealed::session_model::the_model_finds_a_switch_that_is_early", || {
        let said = failure(careless);
        assert!(said.contains("no key opens"), "{said}");
    });
}

/// Verifies the model itself: a keyring that is made under the lock and published after it replaces a later one.
#[test]
fn the_model_finds_a_keyring_that_is_published_late() {
    let careless = |held: &Seal| {
        let keyring = {
            let mut sessions = held.sessions.lock();
            sessions.retain(|session| session.epoch != 0);
            Keyring::of(&sessions)
        };
        held.replace(keyring);
    };
    alone("link::sealed::session_model::the_model_finds_a_keyring_that_is_published_late", || {
        let said = failure(move || concurrent_changes(careless));
        assert!(said.contains("left == right"), "{said}");
    });
}
