//! Slow kicks: a thread polls the queue for the dispatcher, at intervals.
//!
//! A kick wakes the dispatcher from within the guest's write(2). If the guest has added 10^5 waiters to the eventfd, the kernel walks
//! through them for 10 ms with interrupts off, and the scheduler tends to run the woken dispatcher on that CPU, where it waits. So while an
//! interface's eventfds are slow (`event.rs`), its dispatcher removes the kick from its epoll set. Before it sleeps it asks for a
//! wake-up, which the interface's own thread ([`SlowWork`]) gives after [`INTERVAL`], or later if its CPU allowance is used up.
//!
//! [`SlowWork`]: super::slow_work::SlowWork

use std::sync::atomic::{AtomicBool, Ordering::AcqRel, Ordering::Release};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::queue_pairs::Device;
use super::slow_work::Slow;

/// Polling interval.
const INTERVAL: Duration = Duration::from_millis(2);

/// A one-shot wake-up of a queue's dispatcher.
pub(super) struct Look {
    device: Arc<Device>,
    queue: usize,
    /// True while it is queued for the interface's own thread.
    waits: AtomicBool,
}

impl Look {
    pub(super) fn new(device: Arc<Device>, queue: usize) -> Arc<Look> {
        Arc::new(Look { device, queue, waits: AtomicBool::new(false) })
    }

    /// Queues the wake-up. Returns false if no thread can be started for it.
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
        // First, because the woken dispatcher may ask for the next one.
        self.waits.store(false, Release);
        self.device.pairs[self.queue].ring();
    }
}
