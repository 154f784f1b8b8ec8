//! Loom model of [`table`]: a fault finds its own region and no other, while regions come, go and take each other's slots.

use loom::sync::Arc;
use loom::sync::atomic::AtomicU64 as Word;
use loom::thread;

use crate::alone;
use crate::loomed::{Mutex, explore};

#[allow(clippy::duplicate_mod, reason = "the real code, with loom's types")]
#[path = "sigbus_table.rs"]
mod table;
mod sync {
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
}
use sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use table::{PAGE, Slot, Table};

/// A table of two slots.
struct Regions {
    slots: [Slot; 2],
    used: AtomicUsize,
}

impl Regions {
    fn new() -> Arc<Regions> {
        let slot = || Slot { range: AtomicU64::new(0), poisoned: AtomicBool::new(false) };
        Arc::new(Regions { slots: [slot(), slot()], used: AtomicUsize::new(0) })
    }

    fn table(&self) -> Table<'_> {
        Table { slots: &self.slots, used: &self.used }
    }

    /// A fault in the region of one page at `start`: that region is replaced, and marked before.
    fn fault(&self, start: u64) {
        let found = self.table().replace_around(start + 7, |replaced, len| {
            assert_eq!((replaced, len), (start, PAGE));
            true
        });
        assert!(found, "the region at {start:#x} is not found");
    }
}

/// Guest A faults while the regions of guest B come and go.
fn neighbours() {
    let regions = Regions::new();
    let other = thread::spawn({
        let regions = regions.clone();
        move || {
            for start in [2 * PAGE, 3 * PAGE] {
                let slot = regions.table().enter(start, PAGE).unwrap();
                assert!(!regions.table().is_poisoned(slot), "poisoned by another guest's fault");
                regions.table().leave(slot);
            }
        }
    });
    let slot = regions.table().enter(PAGE, PAGE).unwrap();
    regions.fault(PAGE);
    assert!(regions.table().is_poisoned(slot));
    other.join().unwrap();
    assert!(regions.table().is_poisoned(slot));
    regions.table().leave(slot);
}

/// The kernel maps a new region where another was unmapped, once that has left the table: a fault there is the new one's.
fn same_address() {
    let regions = Regions::new();
    let unmapped = Arc::new(Mutex::new(false));
    let first = regions.table().enter(PAGE, PAGE).unwrap();
    let other = thread::spawn({
        let (regions, unmapped) = (regions.clone(), unmapped.clone());
        move || {
            let elsewhere = regions.table().enter(2 * PAGE, PAGE).unwrap();
            if *unmapped.lock() {
                let slot = regions.table().enter(PAGE, PAGE).unwrap();
                regions.fault(PAGE);
                assert!(regions.table().is_poisoned(slot));
                regions.table().leave(slot);
            }
            regions.fault(2 * PAGE);
            assert!(regions.table().is_poisoned(elsewhere));
        }
    });
    regions.table().leave(first);
    *unmapped.lock() = true;
    other.join().unwrap();
}

/// Two threads use one region. Whoever reads a replaced page also sees the mark, whichever of them faults.
fn readers() {
    const GUEST: u64 = 9;
    let regions = Regions::new();
    let slot = regions.table().enter(PAGE, PAGE).unwrap();
    let page = Arc::new(Word::new(GUEST));
    let faults = |regions: Arc<Regions>, page: Arc<Word>| {
        move || {
            // The system call replaces the page for all threads.
            regions.table().replace_around(PAGE, |_, _| {
                page.store(0, Ordering::Release);
                true
            });
        }
    };
    let threads = [0, 1].map(|_| thread::spawn(faults(regions.clone(), page.clone())));
    if page.load(Ordering::Acquire) != GUEST {
        assert!(regions.table().is_poisoned(slot), "zeros were read without the mark");
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_fault_finds_its_own_region() {
    alone("interface::virtqueue::sigbus::model::a_fault_finds_its_own_region", || {
        explore(3, neighbours);
        explore(3, same_address);
        explore(3, readers);
    });
}

/// Verifies the model itself: a region that is unmapped before it leaves the table takes another one's fault.
#[test]
fn the_model_finds_a_region_that_leaves_too_late() {
    let careless = || {
        let regions = Regions::new();
        let first = regions.table().enter(PAGE, PAGE).unwrap();
        let other = thread::spawn({
            let regions = regions.clone();
            move || {
                let slot = regions.table().enter(PAGE, PAGE).unwrap();
                regions.fault(PAGE);
                assert!(regions.table().is_poisoned(slot));
            }
        });
        regions.table().leave(first);
        other.join().unwrap();
    };
    alone("interface::virtqueue::sigbus::model::the_model_finds_a_region_that_leaves_too_late", || {
        assert!(std::panic::catch_unwind(|| explore(3, careless)).is_err());
    });
}
