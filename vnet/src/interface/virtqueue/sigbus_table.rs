//! The table of mapped regions that the SIGBUS handler reads without locks.

use super::sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Size of a page in bytes.
pub(super) const PAGE: u64 = 4096;
/// Bits of a slot that hold the number of pages.
pub(super) const PAGES_BITS: u32 = 28;
/// Marks a slot that is taken but not filled in yet; page 0 is never mapped.
const CLAIMED: u64 = 1;

/// One region: first page number and page count in one word, so that readers never see a partial change.
pub(super) struct Slot {
    pub(super) range: AtomicU64,
    pub(super) poisoned: AtomicBool,
}

pub(super) struct Table<'a> {
    pub(super) slots: &'a [Slot],
    /// Index of the first slot that has never been used.
    pub(super) used: &'a AtomicUsize,
}

impl Table<'_> {
    /// Enters the region of `len` bytes at `start`, whole pages. Returns its slot; `None` if all are taken.
    pub(super) fn enter(&self, start: u64, len: u64) -> Option<usize> {
        let claim =
            |slot: &Slot| slot.range.compare_exchange(0, CLAIMED, Ordering::Acquire, Ordering::Relaxed);
        let index = self.slots.iter().position(|slot| claim(slot).is_ok())?;
        let slot = &self.slots[index];
        slot.poisoned.store(false, Ordering::Relaxed);
        self.used.fetch_max(index + 1, Ordering::Relaxed);
        slot.range.store(((start / PAGE) << PAGES_BITS) | (len / PAGE), Ordering::Release);
        Some(index)
    }

    /// Frees a slot. The region must still be mapped.
    pub(super) fn leave(&self, index: usize) {
        self.slots[index].range.store(0, Ordering::Release);
    }

    /// True once the region was replaced.
    #[inline]
    pub(super) fn is_poisoned(&self, index: usize) -> bool {
        self.slots[index].poisoned.load(Ordering::Acquire)
    }

    /// Marks the region around `address` as poisoned and has its start and length replaced. Returns false if there is no such
    /// region, or the result of `replace`.
    pub(super) fn replace_around(&self, address: u64, replace: impl FnOnce(u64, u64) -> bool) -> bool {
        let used = self.used.load(Ordering::Relaxed).min(self.slots.len());
        for slot in &self.slots[..used] {
            let range = slot.range.load(Ordering::Acquire);
            let start = (range >> PAGES_BITS) * PAGE;
            let len = (range & ((1 << PAGES_BITS) - 1)) * PAGE;
            if start != 0 && address.wrapping_sub(start) < len {
                // First the mark, then the pages: a thread that reads a replaced page sees the mark afterwards. Sequentially
                // consistent: the mark is visible before the system call that changes the page tables.
                slot.poisoned.store(true, Ordering::SeqCst);
                return replace(start, len);
            }
        }
        false
    }
}
