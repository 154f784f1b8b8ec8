//! A queue whose guest's kicks are slow: a thread wakes the dispatcher at intervals instead.
//!
//! A guest that kicks wakes the dispatcher from within its own system call. If it has added 10^5 waiters to the eventfd, the kernel walks
//! through them for 10 ms with interrupts off, and the scheduler prefers to run the woken dispatcher on that processor. So while an
//! interface's eventfds are slow (`event.rs`), its dispatcher does not watch kicks. It asks for a look before it sleeps, and the
//! interface's own thread ([`SlowWork`]) wakes it after [`INTERVAL`].
//!
//! [`SlowWork`]: super::slow_work::SlowWork

use std::sync::atomic::{AtomicBool, Ordering::AcqRel, Ordering::Release};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::queue_pairs::Device;
use super::slow_work::Slow;

/// How long a frame waits at least: 500 looks a second take 0.3 % of a dispatcher.
const INTERVAL: Duration = Duration::from_millis(2);

/// Wakes a queue's dispatcher once, later.
pub(super) struct Look {
    device: Arc<Device>,
    queue: usize,
    /// True while it waits for the interface's own thread.
    waits: AtomicBool,
}

impl Look {
    pub(super) fn new(device: Arc<Device>, queue: usize) -> Arc<Look> {
        Arc::new(Look { device, queue, waits: AtomicBool::new(false) })
    }

    /// Has the dispatcher woken later. Returns false if there is no thread to do it.
    #[cold]
    pub(super) fn later(self: &Arc<Look>) -> bool {
        if self.waits.swap(true, AcqRel) {
            return true;
        }
        let own: Arc<dyn Slow> = self.clone();
        let later: Weak<dyn Slow> = Arc::downgrade(&own);
        let is_queued = self.device.signals.slow.later(later);
        if !is_queued {
            self.waits.store(false, Release);
        }
        is_queued
    }
}

impl Slow for Look {
    fn carry_out(&self) {
        std::thread::sleep(INTERVAL);
        // Before the dispatcher wakes, which may ask again.
        self.waits.store(false, Release);
        self.device.pairs[self.queue].ring();
    }
}
