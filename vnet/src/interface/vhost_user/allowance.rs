//! What a front end may cost in processor time on the threads that serve it alone.
//!
//! The front end decides how much work they have: it may replace its memory in a loop, or add 10^5 waiters to an eventfd. On a host with
//! few processors that time is missing elsewhere. So an interface's own threads rest once their work exceeds [`SHARE`] of a processor.
//! Work up to [`CREDIT`] needs no rest: an ordinary VM starts, changes its memory and ends within it, unless it has used many GiB.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::usage::processor_time;

/// An interface's threads may use one processor's time divided by this. At 1 % they hardly touch the 99th percentile of its neighbours'
/// round trips; at 5 % they trebled it (docs/lab-notes/2026-11-26-attacks.md).
const SHARE: u32 = 100;
/// Processor time that needs no rest, if there was little work before.
const CREDIT: Duration = Duration::from_millis(100);
/// Longest rest. A VM with very much memory makes work that is not its fault: unmapping 64 GiB takes seconds.
const REST_MAX: Duration = Duration::from_secs(1);

/// An interface's share of a processor: a token bucket (the generic cell rate algorithm, ITU-T I.371).
#[derive(Debug)]
pub(super) struct Allowance {
    /// When the bucket is full again.
    full_at: Mutex<Instant>,
}

impl Default for Allowance {
    fn default() -> Allowance {
        Allowance { full_at: Mutex::new(Instant::now()) }
    }
}

impl Allowance {
    /// Does `work` on the calling thread, and charges the processor time that it takes.
    pub(super) fn charged<R>(&self, work: impl FnOnce() -> R) -> R {
        let start = processor_time();
        let result = work();
        self.charge(processor_time().saturating_sub(start));
        result
    }

    /// Charges processor time.
    pub(super) fn charge(&self, taken: Duration) {
        self.charge_at(taken, Instant::now());
    }

    /// How long the interface's threads have to rest; `None`: they may work.
    pub(super) fn rest(&self) -> Option<Duration> {
        self.rest_at(Instant::now())
    }

    /// Empties the bucket: the next work is followed by a rest.
    pub(super) fn forfeit_credit(&self) {
        self.forfeit_credit_at(Instant::now());
    }

    fn forfeit_credit_at(&self, now: Instant) {
        let mut full_at = self.full_at.lock();
        *full_at = (*full_at).max(now + CREDIT * SHARE);
    }

    fn charge_at(&self, taken: Duration, now: Instant) {
        let mut full_at = self.full_at.lock();
        *full_at = (*full_at).max(now) + taken * SHARE;
        // A longer rest is not owed.
        *full_at = (*full_at).min(now + CREDIT * SHARE + REST_MAX);
    }

    fn rest_at(&self, now: Instant) -> Option<Duration> {
        let until = *self.full_at.lock() - CREDIT * SHARE;
        Some(until.saturating_duration_since(now)).filter(|rest| !rest.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Works `taken` at a time for a minute, resting as told; returns the time worked.
    fn worked(taken: Duration) -> Duration {
        let allowance = Allowance::default();
        let start = Instant::now();
        let (mut now, mut worked) = (start, Duration::ZERO);
        while now < start + Duration::from_secs(60) {
            now += taken;
            worked += taken;
            allowance.charge_at(taken, now);
            now += allowance.rest_at(now).unwrap_or_default();
        }
        worked
    }

    #[test]
    fn work_in_a_loop_takes_a_hundredth_of_a_processor() {
        for taken in [10, 1_000, 5_000].map(Duration::from_micros) {
            let worked = worked(taken);
            assert!((690..710).contains(&worked.as_millis()), "{worked:?} by {taken:?}");
        }
    }

    #[test]
    fn a_vm_that_starts_does_not_wait() {
        let (allowance, now) = (Allowance::default(), Instant::now());
        for _ in 0..99 {
            allowance.charge_at(Duration::from_millis(1), now);
            assert_eq!(allowance.rest_at(now), None);
        }
    }

    #[test]
    fn without_credit_work_is_followed_by_a_rest() {
        let (allowance, now) = (Allowance::default(), Instant::now());
        allowance.forfeit_credit_at(now);
        assert_eq!(allowance.rest_at(now), None, "there was no work");
        allowance.charge_at(Duration::from_millis(3), now);
        assert_eq!(allowance.rest_at(now), Some(Duration::from_millis(300)));
        allowance.forfeit_credit_at(now);
        assert_eq!(allowance.rest_at(now), Some(Duration::from_millis(300)), "no more than the credit");
    }

    #[test]
    fn no_rest_is_longer_than_a_second() {
        let (allowance, now) = (Allowance::default(), Instant::now());
        (0..10).for_each(|_| allowance.charge_at(Duration::from_secs(3), now));
        assert_eq!(allowance.rest_at(now), Some(REST_MAX));
        assert_eq!(allowance.rest_at(now + REST_MAX), None);
    }

    #[test]
    fn what_takes_processor_time_is_charged() {
        let allowance = Allowance::default();
        allowance.charged(|| std::thread::sleep(Duration::from_millis(20)));
        let full = |allowance: &Allowance| allowance.full_at.lock().saturating_duration_since(Instant::now());
        assert!(full(&allowance) < Duration::from_millis(200), "sleeping costs nothing");
        let end = processor_time() + Duration::from_millis(20);
        allowance.charged(|| while processor_time() < end {});
        assert!(full(&allowance) > Duration::from_millis(300));
    }
}
