//! Tracks whether zero copy pays off on a link: for some devices the kernel copies anyway.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::stats::PortStats;

/// Number of messages sent by copying after the kernel reports that it copied, before the next attempt.
pub(super) const RETRY_AFTER: u32 = 4096;

/// State of one link, shared with its messages in flight.
#[derive(Debug)]
pub(super) struct Trial {
    /// Number of messages to copy before the next attempt.
    copy: AtomicU32,
    stats: Arc<PortStats>,
}

impl Trial {
    pub(super) fn new(stats: Arc<PortStats>) -> Arc<Trial> {
        Arc::new(Trial { copy: AtomicU32::new(0), stats })
    }

    /// True when zero copy is worth an attempt. Call it once per frame.
    pub(super) fn allows(&self) -> bool {
        let copy = self.copy.load(Relaxed);
        if copy > 0 {
            // Dispatchers race here; an approximate count suffices.
            self.copy.store(copy - 1, Relaxed);
        }
        copy == 0
    }

    /// Records that the kernel copied or refused `messages` zero-copy messages.
    pub(super) fn copied(&self, messages: u64) {
        self.stats.zero_copy.copied.add(messages);
        self.copy.store(RETRY_AFTER, Relaxed);
    }
}
