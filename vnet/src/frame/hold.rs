//! Holds on guest memory that outlive a batch (zero-copy transmit).
//!
//! vnet returns a descriptor to the guest once nothing reads the memory behind it any more. Usually that is at the end of the
//! batch, but the kernel and the network device keep reading the memory of a zero-copy message after that. The sender of such a
//! message takes a [`Hold`] on the frame and drops it when the message is complete. The frame's interface counts holds per *slot*
//! of its chains, and returns a chain when its count is 0.
//!
//! ```text
//!   interface: Holds, a count a slot                     sender: a Hold for every message that has bytes of the frame
//!        take -> frame names its slot  -- batch -->  hold +1 ... the kernel reads ... -1
//!        give back while the oldest slot's count is 0  <------------------------------'
//! ```
//!
//! Holds are taken while the batch is processed and dropped by any thread at any time; both sides share only the counts.

use super::sync::{Arc, AtomicU32, Ordering};

/// Hold counts of one queue's chains, by slot.
#[derive(Debug)]
pub struct Holds {
    slots: Box<[AtomicU32]>,
    /// Sum of the counts of all slots.
    total: AtomicU32,
}

impl Holds {
    /// Creates slots `0..slots`, each with a count of 0.
    pub fn new(slots: u16) -> Arc<Holds> {
        let slots = (0..slots).map(|_| AtomicU32::new(0)).collect();
        Arc::new(Holds { slots, total: AtomicU32::new(0) })
    }

    /// Number of slots.
    #[inline]
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// True when there are no slots.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// True when any slot is held.
    #[inline]
    pub fn any(&self) -> bool {
        self.total.load(Ordering::Acquire) != 0
    }

    /// True when the memory behind `slot` is held. False for an unknown slot.
    #[inline]
    pub fn is_held(&self, slot: u16) -> bool {
        // Acquire: all reads under the hold happen before the guest gets its memory back.
        self.slots.get(usize::from(slot)).is_some_and(|count| count.load(Ordering::Acquire) != 0)
    }
}

/// Keeps the memory of one frame from being returned to the guest for as long as this value lives.
#[derive(Debug)]
pub struct Hold {
    holds: Arc<Holds>,
    slot: u16,
}

impl Hold {
    /// Holds `slot`; `None` when there is no such slot.
    pub fn new(holds: &Arc<Holds>, slot: u16) -> Option<Hold> {
        let count = holds.slots.get(usize::from(slot))?;
        holds.total.fetch_add(1, Ordering::Relaxed);
        count.fetch_add(1, Ordering::Relaxed);
        Some(Hold { holds: holds.clone(), slot })
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // The slot is decremented first: a total of 0 then implies that every slot is 0.
        self.holds.slots[usize::from(self.slot)].fetch_sub(1, Ordering::Release);
        self.holds.total.fetch_sub(1, Ordering::Release);
    }
}
