//! How control changes what dispatchers use: it publishes a value, and waits until all of them have adopted it.
//!
//! Publishing swaps one pointer and raises a generation number. A dispatcher compares that number once per turn and adopts the new
//! value between two batches. Readers never lock.

use std::time::{Duration, Instant};

use super::sync::{Arc, ArcSwap, AtomicBool, AtomicU64, Condvar, Mutex, Ordering};

/// A report is awaited for this long before it is checked whether its thread still exists.
const LOOK: Duration = Duration::from_millis(100);

/// A value, and how far its users have come.
pub(super) struct Publication<T> {
    value: ArcSwap<T>,
    generation: AtomicU64,
    stopping: AtomicBool,
    /// All threads are to stand still between two rounds.
    pausing: AtomicBool,
    /// A thread has panicked: its dispatchers will adopt nothing any more.
    broken: AtomicBool,
    progress: Mutex<Progress>,
    changed: Condvar,
}

/// What dispatchers and threads have reported, by dispatcher.
struct Progress {
    /// The generation that it has adopted.
    adopted: Vec<u64>,
    /// The slot of the thread that runs it.
    slots: Vec<usize>,
    /// True while its thread stands still.
    still: Vec<bool>,
}

impl<T> Publication<T> {
    /// `value`, for `count` dispatchers that run nowhere yet.
    pub(super) fn new(count: usize, value: T) -> Publication<T> {
        Publication {
            value: ArcSwap::from_pointee(value),
            generation: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            pausing: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            progress: Mutex::new(Progress {
                adopted: vec![0; count],
                slots: vec![usize::MAX; count],
                still: vec![false; count],
            }),
            changed: Condvar::new(),
        }
    }

    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The value of this generation or of a later one.
    pub(super) fn value(&self) -> Arc<T> {
        self.value.load_full()
    }

    /// Publishes a value and has dispatchers woken; returns the one before when every dispatcher has adopted the new one.
    pub(super) fn publish(&self, value: Arc<T>, wake: impl FnOnce()) -> Arc<T> {
        let before = self.value.swap(value);
        let generation = self.generation.fetch_add(1, Ordering::AcqRel) + 1;
        wake();
        self.until(|progress| progress.adopted.iter().all(|&adopted| adopted >= generation));
        before
    }

    /// Waits until `done`, the core stops or a thread has panicked.
    fn until(&self, done: impl Fn(&Progress) -> bool) {
        let mut progress = self.progress.lock();
        while !done(&progress) && !self.is_broken() && !self.is_stopping() {
            self.changed.wait_for(&mut progress, LOOK);
        }
    }

    /// Reports that dispatcher `id` has adopted the value of this generation.
    pub(super) fn adopted(&self, id: usize, generation: u64) {
        self.progress.lock().adopted[id] = generation;
        self.changed.notify_all();
    }

    /// Reports that the thread in `slot` runs dispatcher `id`.
    pub(super) fn runs(&self, id: usize, slot: usize) {
        self.progress.lock().slots[id] = slot;
        self.changed.notify_all();
    }

    /// The slots of the threads that run the dispatchers, by dispatcher.
    pub(super) fn slots(&self) -> Vec<usize> {
        self.progress.lock().slots.clone()
    }

    /// Waits until the thread in `slot` runs dispatcher `id`.
    pub(super) fn until_runs(&self, id: usize, slot: usize) {
        self.until(|progress| progress.slots[id] == slot);
    }

    #[inline]
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Ends all threads: each stops after its current round. The caller wakes them afterwards.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn is_pausing(&self) -> bool {
        self.pausing.load(Ordering::Relaxed)
    }

    /// Has all threads stand still between two rounds, once they are woken; false if one does not within `limit`. Call
    /// [`Publication::resume`] afterwards in either case. No dispatcher may be on its way to another thread.
    pub(super) fn pause(&self, wake: impl FnOnce(), limit: Duration) -> bool {
        self.pausing.store(true, Ordering::Relaxed);
        wake();
        let deadline = Instant::now() + limit;
        let mut progress = self.progress.lock();
        while !progress.still.iter().all(|still| *still) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_broken() || self.is_stopping() {
                return false;
            }
            self.changed.wait_for(&mut progress, left.min(LOOK));
        }
        true
    }

    /// Ends [`Publication::pause`].
    pub(super) fn resume(&self) {
        // Under the lock, so that a thread that is about to wait cannot miss it.
        let _progress = self.progress.lock();
        self.pausing.store(false, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Reports that a thread with these dispatchers stands still; returns when it may go on.
    pub(super) fn stand_still(&self, ids: &[usize]) {
        let mut progress = self.progress.lock();
        ids.iter().for_each(|id| progress.still[*id] = true);
        self.changed.notify_all();
        while self.is_pausing() && !self.is_stopping() {
            self.changed.wait_for(&mut progress, LOOK);
        }
        ids.iter().for_each(|id| progress.still[*id] = false);
    }

    /// Reports that a thread has panicked.
    pub(super) fn panicked(&self) {
        self.broken.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }
}
