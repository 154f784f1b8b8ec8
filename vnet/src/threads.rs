//! Helpers for threads. Threads that read what guests and other hosts send open no file, so a program can have them give up that ability;
//! and the CPU time of the calling thread.

use std::sync::OnceLock;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

static CONFINE: OnceLock<fn()> = OnceLock::new();

/// Has each dispatcher, and each thread that handles other hosts' connections and datagrams, call `confine` before it reads
/// anything. It must leave sockets, netlink and open descriptors usable. Call this before the core starts; only the first call has
/// an effect.
pub fn confine_by(confine: fn()) {
    let _ = CONFINE.set(confine);
}

/// Confines the calling thread, and those that it will start.
pub(crate) fn confine() {
    if let Some(confine) = CONFINE.get() {
        confine();
    }
}

/// Processor time that the calling thread has used (CLOCK_THREAD_CPUTIME_ID).
pub fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
