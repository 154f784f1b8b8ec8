//! Proof of rekeying: a datagram that is sealed and opened at any steps of rekeys that follow each other opens exactly once.

use std::sync::Arc;
use std::time::Instant;

use super::session::Role;
use super::session_tests::{HOUR, link, open, seal, session};
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
