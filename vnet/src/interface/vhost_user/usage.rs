//! What a thread has used, as the kernel counts it: what else runs on the host does not show here, unlike in elapsed time.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Processor time that the calling thread has taken.
pub(super) fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Number of page faults of the calling thread.
pub(super) fn page_faults() -> u64 {
    // SAFETY: `rusage` is plain data, for which all zeros is a valid value.
    let mut usage = unsafe { std::mem::zeroed::<libc::rusage>() };
    // SAFETY: the call writes one `rusage` to `usage`, which lives across it. It cannot fail with these arguments.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    (usage.ru_minflt + usage.ru_majflt) as u64
}

/// Milliseconds since the first call, plus 1.
pub(super) fn now_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_millis() as u64 + 1
}
