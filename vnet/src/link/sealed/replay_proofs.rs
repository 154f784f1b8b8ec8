//! Proofs: the replay window, against a list of the numbers that it has accepted.

use super::replay::{BLOCK_BITS, ReplayWindow, SLOTS, SPAN};
use crate::proof::{Choices, bound, proofs};

/// First numbers of a key: the lowest, around the wrap of the stored block numbers, and the highest that a clock gives.
const BASES: [u64; 3] = [1, (1 << 52) - SPAN, u64::MAX - 4 * SPAN];

/// Numbers around each place where something changes: a word's first and last bit, the window's edge, the reuse of a slot.
const AHEAD: [u64; 12] = [
    0,
    1,
    14,
    15,
    16,
    SPAN - 1,
    SPAN,
    SPAN + 15,
    SPAN + 16,
    SLOTS << BLOCK_BITS,
    2 * SPAN + 1,
    2 * (SLOTS << BLOCK_BITS),
];

/// Any sequence of numbers: each is accepted once, unless a newer block has its slot, which happens only below the window.
fn accepts_each_number_once(choices: &mut Choices) {
    let base = choices.one_of(&BASES);
    let window = ReplayWindow::new();
    let mut accepted: Vec<u64> = vec![];
    for _ in 0..bound(4, 6) {
        let number = base + choices.one_of(&AHEAD);
        let highest = accepted.iter().copied().fold(number, u64::max);
        let block = number >> BLOCK_BITS;
        let overtakes = |other: &u64| {
            let other = other >> BLOCK_BITS;
            other > block && other % SLOTS == block % SLOTS
        };
        let overtaken = accepted.iter().any(overtakes);
        assert!(!overtaken || highest - number >= SPAN, "{number} is refused inside the window");
        let expected = !overtaken && !accepted.contains(&number);
        assert_eq!(window.has_seen(number), !expected);
        assert_eq!(window.mark(number), expected);
        assert!(!window.mark(number), "accepted twice at once");
        if expected {
            accepted.push(number);
        }
        assert_eq!(window.is_highest(number), number == highest);
        assert!(window.has_marks());
    }
}

proofs! {
    #[cfg_attr(kani, kani::unwind(514))]
    replay_window: accepts_each_number_once;
}
