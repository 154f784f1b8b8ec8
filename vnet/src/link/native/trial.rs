//! Whether sending without a copy pays on a link: the kernel copies all the same where the path's device wants it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::stats::PortStats;

/// Messages that are copied after the kernel said that it copies them anyway, before another one is tried.
pub(super) const RETRY_AFTER: u32 = 4096;

/// What is known of one link. Shared with its messages under way.
#[derive(Debug)]
pub(super) struct Trial {
    /// Messages to copy before the next try.
    copy: AtomicU32,
    stats: Arc<PortStats>,
}

impl Trial {
    pub(super) fn new(stats: Arc<PortStats>) -> Arc<Trial> {
        Arc::new(Trial { copy: AtomicU32::new(0), stats })
    }

    /// True when it is worth a try. Called once a frame.
    pub(super) fn allows(&self) -> bool {
        let copy = self.copy.load(Relaxed);
        if copy > 0 {
            // Two dispatchers may count one frame together: it is a rough number.
            self.copy.store(copy - 1, Relaxed);
        }
        copy == 0
    }

    /// The kernel copied `messages` of those it was to read in place, or refused them.
    pub(super) fn copied(&self, messages: u64) {
        self.stats.zero_copy.copied.add(messages);
        self.copy.store(RETRY_AFTER, Relaxed);
    }
}
