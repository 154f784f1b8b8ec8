//! A dispatcher's own statistics: batch sizes, and the latency of deciding and delivering a batch.
//!
//! Each dispatcher writes its own counters, with plain loads and stores: no other thread adds to them, so the data path never
//! waits for a cache line. Every batch's size is counted; one batch in [`SAMPLED`] is timed.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// One batch in this many is timed.
pub const SAMPLED: u64 = 16;
/// Upper bounds of the latency histogram's buckets, in microseconds; the last bucket is unbounded.
pub const LATENCY_BOUNDS_US: [u32; 14] =
    [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000];
/// Upper bounds of the batch histogram's buckets, in frames; the last bucket is unbounded.
pub const BATCH_BOUNDS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];

/// A counter that one thread adds to and others read.
#[derive(Default, Debug)]
struct Own(AtomicU64);

impl Own {
    #[inline]
    fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A histogram with `N` bounded buckets, written by one thread.
#[derive(Debug)]
struct Histogram<const N: usize> {
    buckets: [Own; N],
    beyond: Own,
    sum: Own,
}

impl<const N: usize> Default for Histogram<N> {
    fn default() -> Histogram<N> {
        Histogram {
            buckets: [const { Own(AtomicU64::new(0)) }; N],
            beyond: Own::default(),
            sum: Own::default(),
        }
    }
}

impl<const N: usize> Histogram<N> {
    #[inline]
    fn observe(&self, value: u64, bucket: usize) {
        self.buckets.get(bucket).unwrap_or(&self.beyond).add(1);
        self.sum.add(value);
    }

    fn read(&self) -> Counts {
        let buckets: Vec<u64> = self.buckets.iter().chain([&self.beyond]).map(Own::get).collect();
        Counts { sum: self.sum.get(), buckets }
    }
}

/// A histogram's values at the time of reading.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sum of all observed values.
    pub sum: u64,
    /// Observations per bucket, not cumulative; the last bucket is unbounded.
    pub buckets: Vec<u64>,
}

/// One dispatcher's counters.
#[derive(Default, Debug)]
pub struct DispatcherStats {
    frames: Own,
    batches: Histogram<{ BATCH_BOUNDS.len() }>,
    latency_ns: Histogram<{ LATENCY_BOUNDS_US.len() }>,
    turn: Own,
    busy_turns: Own,
    busy_ns: Own,
    ticked_ms: Own,
}

impl DispatcherStats {
    /// Counts a batch of `frames` that is about to be forwarded. Returns the start time of a sampled batch.
    #[inline]
    pub(super) fn begin(&self, frames: usize) -> Option<Instant> {
        let frames = frames as u64;
        self.frames.add(frames);
        // The bounds are powers of two: the bucket's index is the binary logarithm, rounded up.
        let bucket = u64::BITS - frames.saturating_sub(1).leading_zeros();
        self.batches.observe(frames, bucket as usize);
        self.turn.add(1);
        self.turn.get().is_multiple_of(SAMPLED).then(Instant::now)
    }

    /// Ends the batch that `begin` started.
    #[inline]
    pub(super) fn end(&self, begun: Option<Instant>) {
        if let Some(begun) = begun {
            self.timed(begun.elapsed());
        }
    }

    fn timed(&self, time: Duration) {
        let ns = time.as_nanos() as u64;
        let bucket = LATENCY_BOUNDS_US.partition_point(|bound| u64::from(*bound) * 1000 < ns);
        self.latency_ns.observe(ns, bucket);
    }

    /// Adds `turns` busy turns that took `ns` nanoseconds.
    pub(super) fn busy(&self, turns: u64, ns: u64) {
        self.busy_turns.add(turns);
        self.busy_ns.add(ns);
    }

    /// Records a tick of the dispatcher at `now_ms` on the core's clock.
    pub(super) fn ticked(&self, now_ms: u64) {
        self.ticked_ms.set(now_ms);
    }

    /// Time of the last tick in milliseconds on the core's clock. An idle dispatcher ticks once a second.
    pub fn ticked_ms(&self) -> u64 {
        self.ticked_ms.get()
    }

    /// Turns of the loop that had work.
    pub fn busy_turns(&self) -> u64 {
        self.busy_turns.get()
    }

    /// Wall-clock nanoseconds of busy turns: includes preemption, excludes idle polling.
    pub fn busy_ns(&self) -> u64 {
        self.busy_ns.get()
    }

    /// Frames decided.
    pub fn frames(&self) -> u64 {
        self.frames.get()
    }

    /// Batches by their size in frames; bounds are [`BATCH_BOUNDS`].
    pub fn batches(&self) -> Counts {
        self.batches.read()
    }

    /// Nanoseconds from a batch's arrival at the dispatcher to its delivery, for one batch in [`SAMPLED`]; bounds are
    /// [`LATENCY_BOUNDS_US`].
    pub fn latency_ns(&self) -> Counts {
        self.latency_ns.read()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_batch_is_in_the_bucket_of_its_size() {
        for frames in 1..=300_usize {
            let stats = DispatcherStats::default();
            stats.begin(frames);
            let Counts { sum, buckets } = stats.batches();
            let want =
                BATCH_BOUNDS.iter().position(|bound| frames <= *bound as usize).unwrap_or(BATCH_BOUNDS.len());
            assert_eq!(sum, frames as u64);
            assert_eq!(buckets.iter().position(|count| *count == 1), Some(want), "{frames}");
            assert_eq!(buckets.iter().sum::<u64>(), 1);
        }
    }

    #[test]
    fn one_batch_in_so_many_is_timed() {
        let stats = DispatcherStats::default();
        let timed = (0..10 * SAMPLED).filter(|_| stats.begin(1).is_some()).count();
        assert_eq!(timed, 10);
        assert_eq!(stats.frames(), 10 * SAMPLED);
    }

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        for (ns, bucket) in [(0, 0), (1_000, 0), (1_001, 1), (100_000_000, 13), (100_000_001, 14)] {
            let stats = DispatcherStats::default();
            stats.timed(Duration::from_nanos(ns));
            let Counts { sum, buckets } = stats.latency_ns();
            assert_eq!((sum, buckets[bucket]), (ns, 1), "{ns}");
        }
    }
}
