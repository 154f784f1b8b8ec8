//! Proofs: the duplicate window, against a list of ended frames.

use super::*;
use crate::proof::{Choices, bound, proofs};

/// Lowest numbers of a peer, and the highest that a clock gives.
const BASES: [u64; 2] = [1, u64::MAX - 4 * SPAN];

/// Numbers around each place where something changes: the bits of a word, the window's edge, a leap over a whole window.
const AHEAD: [u64; 9] = [0, 1, 63, 64, SPAN - 64, SPAN - 1, SPAN, SPAN + 63, 2 * SPAN + 1];

/// An end of frame `id` at time `at`.
type End = (u64, u64);

fn check(window: &Window, base: u64, ends: &[End], now: u64) {
    for id in AHEAD.iter().flat_map(|ahead| [base + ahead, base + ahead + 1]) {
        let known = window.has_ended(id);
        let at = ends.iter().filter(|end| end.0 == id).map(|end| end.1).max();
        let below = id < window.low();
        match at {
            Some(at) if now - at < MEMORY_MS => {
                assert!(known, "the end of {id} at {at} is forgotten at {now}")
            }
            Some(at) if now - at >= 3 * MEMORY_MS => {
                assert!(!known || below, "{id} is remembered for too long")
            }
            Some(_) => {}
            None => assert!(!known || below, "{id} never ended"),
        }
    }
}

/// Any sequence of datagrams, ends of their frame or of an earlier one, and waits.
fn remembers_exactly_what_ended(choices: &mut Choices, steps: usize, ahead: &[u64], waits: &[u64]) {
    let base = choices.one_of(&BASES);
    let (mut window, mut now) = (Window::new(0), 0);
    let (mut ends, mut numbers): (Vec<End>, Vec<u64>) = (vec![], vec![]);
    for _ in 0..steps {
        now += choices.one_of(waits);
        window.age(now);
        let number = base + choices.one_of(ahead);
        numbers.push(number);
        window.see(number);
        // As reassembly does: only a frame with a fragment ends, and it does so in the window or below it.
        let ended = match choices.below(3) {
            0 => None,
            1 => Some(number),
            _ => numbers.first().copied(),
        };
        if let Some(id) = ended
            && id <= number
        {
            window.end(id);
            assert!(window.has_ended(id));
            ends.push((id, now));
        }
        check(&window, base, &ends, now);
    }
}

proofs! {
    #[cfg_attr(kani, kani::unwind(1026))]
    short_sequences: |choices| {
        remembers_exactly_what_ended(choices, bound(2, 3), &AHEAD, &[0, MEMORY_MS - 1, MEMORY_MS, 2 * MEMORY_MS]);
    };
    #[cfg_attr(kani, kani::unwind(1026))]
    longer_sequences: |choices| {
        let ahead = [AHEAD[0], AHEAD[1], AHEAD[5], AHEAD[6], AHEAD[8]];
        remembers_exactly_what_ended(choices, bound(3, 4), &ahead, &[0, MEMORY_MS]);
    };
}
