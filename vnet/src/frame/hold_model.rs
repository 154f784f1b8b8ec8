//! Loom model of [`hold`]: memory goes back to the guest only after the last reader is done, and is not kept forever.
//!
//! The guest's memory is a cell that loom watches: a write of the guest that is not ordered behind every read of the kernel is an
//! error. The queue reclaims as `TakenChains` does.

use loom::cell::UnsafeCell;
use loom::sync::Arc as Shared;
use loom::thread;

use crate::alone;
use crate::loomed::explore;
use crate::proof::bound;

#[allow(clippy::duplicate_mod, dead_code, reason = "the real code, with loom's types")]
#[path = "hold.rs"]
mod hold;
mod sync {
    pub(super) use loom::sync::atomic::{AtomicU32, Ordering};
    pub(super) use std::sync::Arc;
}
use hold::{Hold, Holds};

/// The memory behind each slot's chain.
struct Memory([UnsafeCell<u8>; 2]);

// SAFETY: loom reports every unordered access.
unsafe impl Sync for Memory {}

impl Memory {
    fn new() -> Shared<Memory> {
        Shared::new(Memory([UnsafeCell::new(0), UnsafeCell::new(0)]))
    }

    /// The kernel or a device reads.
    fn read(&self, slot: u16) {
        // SAFETY: loom reports an access that is not ordered with this one.
        self.0[usize::from(slot)].with(|byte| unsafe { byte.read() });
    }

    /// The guest uses memory that it got back.
    fn reuse(&self, slot: u16) {
        // SAFETY: as above.
        self.0[usize::from(slot)].with_mut(|byte| unsafe { byte.write(1) });
    }
}

/// A thread that finishes a zero-copy message: reads, then drops its hold.
fn complete(memory: &Shared<Memory>, hold: Hold, slot: u16) -> thread::JoinHandle<()> {
    let memory = memory.clone();
    thread::spawn(move || {
        memory.read(slot);
        drop(hold);
    })
}

/// Chains return in order: the queue waits for the oldest, then for the next.
fn reclaims_in_order() {
    let (memory, holds) = (Memory::new(), Holds::new(2));
    // Two messages of the first chain, one of the second.
    let hold = |slot| Hold::new(&holds, slot).unwrap();
    let readers = [(hold(0), 0), (hold(0), 0), (hold(1), 1)];
    let threads = readers.map(|(hold, slot)| complete(&memory, hold, slot));
    for slot in 0..2 {
        while holds.is_held(slot) {
            thread::yield_now();
        }
        memory.reuse(slot);
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(!holds.any());
}

/// The fast way: no slot is held if the sum is 0, so all chains return without a look at each.
fn returns_all_if_none_is_held() {
    let (memory, holds) = (Memory::new(), Holds::new(2));
    let hold = |slot| Hold::new(&holds, slot).unwrap();
    let threads = [(hold(0), 0), (hold(1), 1)].map(|(hold, slot)| complete(&memory, hold, slot));
    while holds.any() {
        thread::yield_now();
    }
    (0..2).for_each(|slot| {
        assert!(!holds.is_held(slot));
        memory.reuse(slot);
    });
    // Then a later burst takes a hold.
    let hold = hold(1);
    assert!(holds.any() && holds.is_held(1) && !holds.is_held(0));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    drop(hold);
    assert!(!holds.any());
}

#[test]
fn memory_returns_after_the_last_reader() {
    alone("frame::hold_model::memory_returns_after_the_last_reader", || {
        explore(bound(2, 3), reclaims_in_order);
        explore(3, returns_all_if_none_is_held);
    });
}

/// Verifies the model itself: without the hold, the guest writes what the kernel reads.
#[test]
fn the_model_finds_memory_that_returns_early() {
    let careless = || {
        let (memory, holds) = (Memory::new(), Holds::new(2));
        let thread = complete(&memory, Hold::new(&holds, 1).unwrap(), 0);
        while holds.is_held(0) {
            thread::yield_now();
        }
        memory.reuse(0);
        thread.join().unwrap();
    };
    alone("frame::hold_model::the_model_finds_memory_that_returns_early", || {
        assert!(std::panic::catch_unwind(|| explore(3, careless)).is_err());
    });
}
