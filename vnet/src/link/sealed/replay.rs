//! Which datagram numbers have been opened under a key: each is accepted once (as RFC 6479 does for IPsec, without a lock).
//!
//! Numbers are grouped in blocks of 16, and blocks share the slots of a ring. A slot is one atomic word: the number of the
//! block that has it, and a bit for each of its numbers. A newer block takes a slot over, and then its older ones are
//! below the window; a block finds its own slot, or one that is older and can be taken over, or one that is newer: too late.
//! There is no highest number and nothing to shift, so that any number of threads mark at once, each by one
//! compare-and-swap. Since a slot never goes back to an older block, no number is ever accepted twice.
//!
//! At least [`SPAN`] numbers below the highest one are told apart; up to 15 more, depending on where blocks begin.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Numbers below the highest one that may still come, once each.
pub const SPAN: u64 = 8192;
const BLOCK_BITS: u32 = 4;
/// One more than the span has blocks: the highest number may be the first of its block.
const SLOTS: u64 = (SPAN >> BLOCK_BITS) + 1;
/// Bits of a slot that mark numbers; the others name the block, of which 48 bits are kept.
const MARKS: u64 = 0xffff;

/// See the module's comment.
pub struct ReplayWindow {
    slots: Box<[AtomicU64]>,
}

/// A number's block as a slot names it, its slot, and its bit.
#[inline]
fn place(number: u64) -> (u64, usize, u64) {
    let block = number >> BLOCK_BITS;
    ((block << 16) >> 16, (block % SLOTS) as usize, 1 << (number & 15))
}

/// What a slot says about a number.
enum Slot {
    /// Its block has the slot, or may take it: the word that marks it.
    Free(u64),
    /// It was there, or is below the window.
    Seen,
}

#[inline]
fn look(word: u64, block: u64, bit: u64) -> Slot {
    let owner = word >> 16;
    // Block numbers go round after 2^52 numbers, 2^20 times as many as a key seals: the nearer way is the right one.
    let newer = (owner.wrapping_sub(block) << 16) as i64 > 0;
    if word & MARKS == 0 {
        Slot::Free(block << 16 | bit)
    } else if owner == block {
        if word & bit == 0 { Slot::Free(word | bit) } else { Slot::Seen }
    } else if newer {
        Slot::Seen
    } else {
        Slot::Free(block << 16 | bit)
    }
}

impl Default for ReplayWindow {
    fn default() -> ReplayWindow {
        ReplayWindow::new()
    }
}

impl ReplayWindow {
    /// Nothing seen yet; takes any first number.
    pub fn new() -> ReplayWindow {
        ReplayWindow { slots: (0..SLOTS).map(|_| AtomicU64::new(0)).collect() }
    }

    /// True when `number` was marked, or is too old to tell.
    #[inline]
    pub fn has_seen(&self, number: u64) -> bool {
        let (block, slot, bit) = place(number);
        matches!(look(self.slots[slot].load(Relaxed), block, bit), Slot::Seen)
    }

    /// True when any number was marked.
    pub fn has_marks(&self) -> bool {
        self.slots.iter().any(|slot| slot.load(Relaxed) != 0)
    }

    /// True when no higher number was marked.
    pub fn is_highest(&self, number: u64) -> bool {
        let (own, ..) = place(number);
        self.slots.iter().map(|slot| slot.load(Relaxed)).filter(|word| word & MARKS != 0).all(|word| {
            match ((word >> 16).wrapping_sub(own) << 16) as i64 {
                0 => 15 - (word as u16).leading_zeros() <= (number & 15) as u32,
                ahead => ahead < 0,
            }
        })
    }

    /// Marks `number`. False when it was marked, or is too old to tell: of all calls with one number, one gets true.
    #[inline]
    pub fn mark(&self, number: u64) -> bool {
        let (block, slot, bit) = place(number);
        let slot = &self.slots[slot];
        let mut word = slot.load(Relaxed);
        loop {
            let Slot::Free(marked) = look(word, block, bit) else { return false };
            match slot.compare_exchange_weak(word, marked, Relaxed, Relaxed) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        /// Against a set: nothing is accepted twice, and whatever lies within the span and is new is accepted.
        #[test]
        fn each_number_once(
            start in prop::sample::select(vec![1u64, 100_000, 1 << 60, (1 << 52) - 5000, u64::MAX - 2_000_000]),
            steps in prop::collection::vec((0u64..600, 0u64..9000), 1..2000),
            leap in 0u64..100_000,
        ) {
            let window = ReplayWindow::new();
            let (mut highest, mut accepted) = (start, HashSet::new());
            for (step, (ahead, back)) in steps.into_iter().enumerate() {
                highest += if step % 700 == 699 { leap } else { ahead };
                for number in [highest, highest.saturating_sub(back).max(start)] {
                    let seen = window.has_seen(number);
                    let marked = window.mark(number);
                    prop_assert_eq!(seen, !marked);
                    prop_assert_eq!(window.is_highest(number), number == highest);
                    if marked {
                        prop_assert!(accepted.insert(number), "{} was accepted twice", number);
                    } else if highest - number < SPAN {
                        prop_assert!(accepted.contains(&number), "{} was refused, {} below", number, highest - number);
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_far_below_a_stream_is_refused() {
        let window = ReplayWindow::new();
        let start = 1_700_000_000_000_000_000;
        assert!((start..start + 3 * SPAN).all(|number| number % 1000 == 7 || window.mark(number)));
        let highest = start + 3 * SPAN - 1;
        let late = |number: &u64| number % 1000 == 7;
        for number in (start..highest).filter(late) {
            let below = highest - number;
            if below < SPAN {
                assert!(window.mark(number), "{below} below");
            }
            if below >= SPAN + 16 {
                assert!(!window.mark(number), "{below} below");
            }
            assert!(!window.mark(number));
        }
    }

    #[test]
    fn threads_share_a_window() {
        let window = ReplayWindow::new();
        let accepted: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| (1..=4000u64).filter(|number| window.mark(*number)).count()))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(accepted, 4000);
    }
}
