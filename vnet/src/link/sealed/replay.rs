//! The replay window of a key: each datagram number is accepted once (as RFC 6479 does for IPsec, but without a lock).
//!
//! Numbers are grouped in blocks of 16, and blocks share the slots of a ring. A slot is one atomic word: the number of the block
//! that owns it, and a bit for each number of that block. A newer block takes the slot of an older one, whose numbers are below
//! the window from then on. A number whose slot a newer block owns is too late. There is no highest number and no shifting, so
//! any number of threads can mark concurrently, each with one compare-and-swap. A slot never returns to an older block, so no
//! number is accepted twice.
//!
//! The window spans at least [`SPAN`] numbers below the highest one. While numbers come in sequence it spans up to 15 more, depending
//! on where blocks begin. After a leap, a number further below is still accepted, once, until a newer block takes its slot.

use super::sync::{AtomicU64, Relaxed};

/// Size of the window: how far below the highest number a number is still accepted, once.
pub const SPAN: u64 = 8192;
pub(super) const BLOCK_BITS: u32 = 4;
/// One more than the span has blocks, because the highest number may be the first of its block.
pub const SLOTS: u64 = (SPAN >> BLOCK_BITS) + 1;
/// Bits of a slot that mark numbers; the others are the low 48 bits of the block number.
const MARKS: u64 = 0xffff;

/// The numbers that a key has opened.
pub struct ReplayWindow {
    slots: Box<[AtomicU64]>,
}

/// The block of a number as slots store it, its slot, and its bit.
#[inline]
fn position(number: u64) -> (u64, usize, u64) {
    let block = number >> BLOCK_BITS;
    ((block << 16) >> 16, (block % SLOTS) as usize, 1 << (number & 15))
}

/// State of a number in its slot.
enum Slot {
    /// New. Holds the word that marks it.
    Free(u64),
    /// Marked before, or below the window.
    Seen,
}

#[inline]
fn look(word: u64, block: u64, bit: u64) -> Slot {
    let owner = word >> 16;
    // Block numbers wrap after 2^52 numbers, 2^20 times as many as a key seals, so the shorter distance is always the correct
    // one.
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
    /// An empty window, which accepts any first number.
    pub fn new() -> ReplayWindow {
        ReplayWindow { slots: (0..SLOTS).map(|_| AtomicU64::new(0)).collect() }
    }

    /// A window that goes on with the [`slots`](ReplayWindow::slots) of another one; `None` if they are not as many.
    pub fn resumed(slots: &[u64]) -> Option<ReplayWindow> {
        let has_all = slots.len() as u64 == SLOTS;
        has_all.then(|| ReplayWindow { slots: slots.iter().map(|slot| AtomicU64::new(*slot)).collect() })
    }

    /// The slots, for the next vnetd; none may be marked meanwhile.
    pub fn slots(&self) -> impl ExactSizeIterator<Item = u64> {
        self.slots.iter().map(|slot| slot.load(Relaxed))
    }

    /// True when `number` was marked, or is below the window.
    #[inline]
    pub fn has_seen(&self, number: u64) -> bool {
        let (block, slot, bit) = position(number);
        matches!(look(self.slots[slot].load(Relaxed), block, bit), Slot::Seen)
    }

    /// True when any number was marked.
    pub fn has_marks(&self) -> bool {
        self.slots.iter().any(|slot| slot.load(Relaxed) != 0)
    }

    /// True when no higher number was marked.
    pub fn is_highest(&self, number: u64) -> bool {
        let (own, ..) = position(number);
        self.slots.iter().map(|slot| slot.load(Relaxed)).filter(|word| word & MARKS != 0).all(|word| {
            match ((word >> 16).wrapping_sub(own) << 16) as i64 {
                0 => 15 - (word as u16).leading_zeros() <= (number & 15) as u32,
                ahead => ahead < 0,
            }
        })
    }

    /// Marks `number`. Returns false when it was already marked or is below the window: of all calls with one number, exactly one
    /// returns true.
    #[inline]
    pub fn mark(&self, number: u64) -> bool {
        let (block, slot, bit) = position(number);
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
