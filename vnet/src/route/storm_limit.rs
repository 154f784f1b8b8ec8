//! The storm limit: a rate limiter for flooded frames. It applies to a port as a whole, however many dispatchers serve its queues.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::frame::PortId;

/// Default storm limit, in flooded frames per second and port; above the rate of any honest guest.
pub const STORM_FRAMES_PER_S: u32 = 20_000;

const NS_PER_S: u64 = 1_000_000_000;
const NS_PER_MS: u64 = 1_000_000;

/// A token bucket per port, one second deep: bursts of a second's worth of frames, then the rate.
///
/// Stores the time at which the bucket is full again (the "theoretical arrival time" of the generic cell rate algorithm,
/// ITU-T I.371): one word, which dispatchers share without a lock.
pub(super) struct Storm {
    full_at_ns: Box<[AtomicU64]>,
}

impl Storm {
    /// A full bucket for every possible port.
    pub(super) fn new() -> Storm {
        Storm { full_at_ns: (0..=u16::MAX).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Takes a token for one frame from `port`; false when the port's bucket is empty. Without `frames_per_s` there is no limit.
    #[inline]
    pub(super) fn admit(&self, port: PortId, frames_per_s: Option<u32>, now_ms: u64) -> bool {
        let Some(rate) = frames_per_s else { return true };
        let Some(cost) = NS_PER_S.checked_div(u64::from(rate)) else { return false };
        let now = now_ms * NS_PER_MS;
        self.full_at_ns[port.index()]
            .fetch_update(Relaxed, Relaxed, |full_at| {
                let full_at = full_at.max(now) + cost;
                (full_at - now <= NS_PER_S).then_some(full_at)
            })
            .is_ok()
    }

    /// Refills the bucket of `port`.
    pub(super) fn reset(&self, port: PortId) {
        self.full_at_ns[port.index()].store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_of_one_second_then_the_rate() {
        let storm = Storm::new();
        let admit = |n: u32, now| (0..n).filter(|_| storm.admit(PortId(4), Some(10), now)).count();
        assert_eq!(admit(100, 5000), 10);
        assert_eq!(admit(100, 5000), 0);
        assert_eq!(admit(100, 5099), 0);
        assert_eq!(admit(100, 5100), 1);
        assert_eq!(admit(100, 5500), 4);
        assert_eq!(admit(100, 60_000), 10);
        storm.reset(PortId(4));
        assert_eq!(admit(100, 60_000), 10);
    }

    #[test]
    fn no_limit_a_limit_of_zero_and_the_default() {
        let storm = Storm::new();
        assert!((0..100_000).all(|_| storm.admit(PortId(0), None, 1)));
        assert!(!storm.admit(PortId(0), Some(0), 1));
        assert_eq!(
            (0..30_000).filter(|_| storm.admit(PortId(1), Some(STORM_FRAMES_PER_S), 9)).count(),
            20_000
        );
    }
}
