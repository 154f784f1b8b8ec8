//! Models of rekeying: whatever the order, a datagram finds the key that opens it.
//!
//! The first runs real seals: datagrams are sealed and opened at every step of rekeys that follow each other. The second runs the
//! replacement of keyrings in loom, with the accesses of [`Seal::publish`] and of dispatchers.

use super::tests::{HOUR, link, open, seal, session};
use super::*;
use crate::link::Link;
use crate::proof::{Choices, bound, prove};
use crate::stats::DiscardReason;

/// Steps of one rekey, on two hosts: ACCEPT, switch, CONFIRM, and a look at what has expired.
const STEPS: u64 = 5;

/// Takes one step of a rekey that host `from` starts. CONFIRM may get lost; then a keepalive confirms the key.
///
/// No time passes: `now` is before all of it.
fn step(hosts: &[Arc<Link>; 2], from: usize, (step, seed): (u64, u8), (confirmed, now): (bool, Instant)) {
    let [a, b] = [&hosts[from], &hosts[1 - from]].map(|link| link.seal().unwrap());
    match step {
        0 => _ = b.accept(session(Role::Responder, b.next_epoch(), seed)),
        1 => {
            let epoch = b.sessions.lock().last().unwrap().epoch;
            a.accept(session(Role::Initiator, epoch, seed));
        }
        2 => {
            let epoch = a.sessions.lock().last().unwrap().epoch;
            assert!(a.switch(epoch));
        }
        3 => {
            let epoch = a.current(0).unwrap().epoch;
            if confirmed {
                assert!(b.switch(epoch));
            } else {
                open(&hosts[1 - from], seal(&hosts[from]).unwrap()).unwrap();
            }
        }
        _ => {
            [a, b].into_iter().for_each(|seal| seal.expire(now, HOUR));
            assert_eq!(a.current(0).unwrap().epoch, b.current(0).unwrap().epoch);
        }
    }
}

/// One datagram, sealed at any step and opened at any step of the same rekey or of the next.
fn every_datagram_opens_once(choices: &mut Choices) {
    let (hosts, now) = ([link(), link()], Instant::now());
    let sender = choices.below(2) as usize;
    let sealed_at = STEPS + choices.below(STEPS * bound(1, 2));
    let opened_at = sealed_at + choices.below(STEPS + 1);
    let mut datagram = None;
    let (mut from, mut confirmed) = (0, true);
    for at in 0..=opened_at {
        if at % STEPS == 0 {
            (from, confirmed) = (choices.below(2) as usize, choices.flag());
        }
        if at == sealed_at {
            datagram = seal(&hosts[sender]);
        }
        if at == opened_at {
            let datagram = datagram.take().expect("there are keys since the first rekey");
            assert_eq!(open(&hosts[1 - sender], datagram.clone()), Ok(()));
            assert_eq!(open(&hosts[1 - sender], datagram), Err(DiscardReason::Replayed));
        }
        step(&hosts, from, (at % STEPS, (at / STEPS) as u8), (confirmed, now));
        for link in &hosts {
            let keyring = link.seal().unwrap().keyring();
            if let Some(key) = keyring.sealing(0) {
                assert!(keyring.opening(key.epoch()).is_some() && keyring.is_live(key.epoch()));
            }
        }
    }
}

#[test]
fn a_datagram_opens_at_every_step_of_a_rekey() {
    prove(every_datagram_opens_once);
}

mod weak_memory {
    use crate::alone;
    use crate::loomed::{ArcSwap, Mutex, explore};
    use loom::thread;
    use std::sync::Arc;

    /// Epochs that open, oldest first, and the one that seals.
    #[derive(Clone, Default)]
    struct Keys {
        open: Vec<u8>,
        seals: Option<u8>,
    }

    /// One host's seal.
    struct Host {
        keyring: ArcSwap<Keys>,
        sessions: Mutex<Keys>,
    }

    impl Host {
        fn new() -> Host {
            let keys = Keys { open: vec![0], seals: Some(0) };
            Host { keyring: ArcSwap::from_pointee(keys.clone()), sessions: Mutex::new(keys) }
        }

        /// Changes the sessions, and publishes their keyring before anybody else changes them.
        fn change(&self, change: impl FnOnce(&mut Keys)) {
            let mut sessions = self.sessions.lock();
            change(&mut sessions);
            self.keyring.swap(Arc::new(sessions.clone()));
        }
    }

    /// Two datagrams cross the wire while both hosts rekey, and another thread discards keys at the receiver.
    fn rekey_under_traffic() {
        let hosts = Arc::new([Host::new(), Host::new()]);
        let wire = Arc::new(Mutex::new(Vec::new()));
        let sender = thread::spawn({
            let (hosts, wire) = (hosts.clone(), wire.clone());
            move || {
                for _ in 0..2 {
                    let epoch = hosts[0].keyring.load_full().seals.unwrap();
                    wire.lock().push(epoch);
                }
            }
        });
        let receiver = thread::spawn({
            let (hosts, wire) = (hosts.clone(), wire.clone());
            move || {
                for _ in 0..2 {
                    let burst = std::mem::take(&mut *wire.lock());
                    let keyring = hosts[1].keyring.load_full();
                    assert!(burst.iter().all(|epoch| keyring.open.contains(epoch)), "no key opens {burst:?}");
                }
            }
        });
        hosts[1].change(|keys| keys.open.push(1));
        hosts[0].change(|keys| *keys = Keys { open: vec![0, 1], seals: Some(1) });
        hosts[1].change(|keys| keys.seals = Some(1));
        sender.join().unwrap();
        receiver.join().unwrap();
        let burst = std::mem::take(&mut *wire.lock());
        assert!(burst.iter().all(|epoch| hosts[1].keyring.load_full().open.contains(epoch)));
    }

    /// Two threads change the sessions: the keyring published last is that of the last change.
    fn concurrent_changes() {
        let host = Arc::new(Host::new());
        let other = thread::spawn({
            let host = host.clone();
            move || host.change(|keys| keys.open.retain(|epoch| *epoch != 0))
        });
        host.change(|keys| keys.open.push(1));
        host.change(|keys| keys.seals = Some(1));
        other.join().unwrap();
        let keyring = host.keyring.load_full();
        assert_eq!((&keyring.open[..], keyring.seals), (&[1][..], Some(1)));
    }

    #[test]
    fn keyrings_are_replaced_in_order() {
        alone("link::sealed::session::model::weak_memory::keyrings_are_replaced_in_order", || {
            explore(3, rekey_under_traffic);
            explore(3, concurrent_changes);
        });
    }
}
