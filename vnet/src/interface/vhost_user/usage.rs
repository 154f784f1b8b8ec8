//! What a thread has used, as the kernel counts it: what else runs on the host does not show here, unlike in elapsed time.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

pub(super) use crate::threads::processor_time;

/// What a thread has used so far, for page faults.
#[derive(Clone, Copy)]
pub(super) struct Faults {
    /// Page faults, and those that waited for a disk.
    count: [u64; 2],
    processor: Duration,
    at: Instant,
}

impl Faults {
    /// Of the calling thread, until now.
    pub(super) fn now() -> Faults {
        Faults { count: page_faults(), processor: processor_time(), at: Instant::now() }
    }

    /// Page faults since then, and the time that the thread has taken: also what it has waited, if it was for a disk.
    pub(super) fn since(&self) -> (u64, Duration) {
        let Faults { count: [all, from_disk], processor, at } = Faults::now();
        let waited = from_disk > self.count[1];
        (all - self.count[0], if waited { at - self.at } else { processor.saturating_sub(self.processor) })
    }
}

/// Number of page faults of the calling thread, and of those that waited for a disk.
pub(super) fn page_faults() -> [u64; 2] {
    // SAFETY: `rusage` is plain data, for which all zeros is a valid value.
    let mut usage = unsafe { std::mem::zeroed::<libc::rusage>() };
    // SAFETY: the call writes one `rusage` to `usage`, which lives across it. It cannot fail with these arguments.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    [(usage.ru_minflt + usage.ru_majflt) as u64, usage.ru_majflt as u64]
}

/// Milliseconds since the first call, plus 1.
pub(super) fn now_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_millis() as u64 + 1
}
