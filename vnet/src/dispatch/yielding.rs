//! Yield strategies of an idle dispatcher (VNET/P section 4.8).
//!
//! Spinning has the lowest latency but takes a core from guests; sleeping costs no CPU time but responds slowly. The adaptive
//! strategy spins for `T_nowork` after the last frame (ten times that when frames arrive at such intervals regularly). Then it
//! sleeps for `T_sleep` between polls while a queue is VMM-driven, and blocks until notified when none is: an idle daemon uses no
//! CPU time. It blocks instead of spinning
//!
//! - under streaming load: the endpoints of a stream need the core more than its frames need low latency;
//! - on a contended core: a very late return from `sched_yield`, or several late ones in a row, means that another task computed.
//!   One slightly late return means that the peer of a request/response exchange ran, which is the purpose of yielding, or some
//!   short task.

use std::time::{Duration, Instant};

/// Yield strategy.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Default, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
pub enum Strategy {
    /// Sleep in the kernel at once, until notified.
    Block,
    /// Yield the core and poll again.
    Immediate,
    /// Sleep for `T_sleep`, then poll again.
    Timed,
    /// Immediate until `T_nowork` without work, then timed; block when no queue is polled.
    #[default]
    Adaptive,
}

/// Spin-time multiplier when requests arrive at regular intervals: after a frame that had to wait for the dispatcher to wake up,
/// the next one is likely to follow after the same interval. Spinning longer saves that wake-up for exchanges with up to this
/// much computation between frames.
const REGULAR_SPIN_FACTOR: u32 = 10;
/// Minimum duration of a yield during which another task must have computed.
const CONTENDED_YIELD: Duration = Duration::from_micros(100);
/// CPU time lost to computations of other tasks after which the core counts as contended.
const LOST_MAX: Duration = Duration::from_millis(1);
/// Of the time between two long yields, one part in this many is subtracted from the time lost. So up to a fifth of the CPU may
/// be lost: a task that computes for 100 us now and then is no reason to sleep.
const LOST_SHARE: u32 = 4;
/// Initial backoff: how long the dispatcher does not spin on a contended core. The backoff grows fourfold each time the core is
/// found contended again (as beside an emulated virtual machine), because each probe delays frames for as long as the computation
/// runs.
const CONTENTION_MEMORY: Duration = Duration::from_millis(2);
/// Maximum backoff.
const CONTENTION_MEMORY_MAX: Duration = Duration::from_millis(512);
/// Time in short yields after which the backoff shrinks to a quarter.
const CALM: Duration = Duration::from_millis(1);
/// Minimum length of the window over which the load is measured.
const LOAD_WINDOW: Duration = Duration::from_millis(1);
/// Load in bytes per millisecond above which traffic counts as a stream: half a gigabit per second.
const STREAM_BYTES_PER_MS: u64 = 64 << 10;

/// Next action of an idle dispatcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Idle {
    /// Yield the core and poll again.
    Spin,
    /// Sleep this long, then poll again.
    Sleep(Duration),
    /// Request notifications from all guests, and sleep until one arrives.
    Block,
}

/// A strategy with its parameters and recent history.
pub(super) struct Yielder {
    strategy: Strategy,
    sleep: Duration,
    no_work: Duration,
    /// Current spin time: `no_work`, or [`REGULAR_SPIN_FACTOR`] times that.
    spin_time: Duration,
    idle_since: Option<Instant>,
    /// Time lost in long yields, less the forgiven share of the time between them.
    lost: Duration,
    /// End of the last long yield.
    lost_at: Option<Instant>,
    /// The core counts as contended until this time.
    contended_until: Option<Instant>,
    /// The last backoff; zero after enough undisturbed time.
    contention: Duration,
    /// Time in short yields since the last backoff change.
    calm: Duration,
    /// Bytes moved since `window_start`.
    window_bytes: u64,
    window_start: Option<Instant>,
    streaming: bool,
}

impl Yielder {
    pub(super) fn new(strategy: Strategy, sleep_us: u32, nowork_us: u32) -> Yielder {
        Yielder {
            strategy,
            sleep: Duration::from_micros(sleep_us.into()),
            no_work: Duration::from_micros(nowork_us.into()),
            spin_time: Duration::from_micros(nowork_us.into()),
            idle_since: None,
            lost: Duration::ZERO,
            lost_at: None,
            contended_until: None,
            contention: Duration::ZERO,
            calm: Duration::ZERO,
            window_bytes: 0,
            window_start: None,
            streaming: false,
        }
    }

    /// Reports work: `bytes` moved in turns of which the first began at `now`.
    #[inline]
    pub(super) fn worked(&mut self, bytes: u64, now: Instant) {
        if let Some(since) = self.idle_since.take() {
            let pause = now.saturating_duration_since(since);
            let longer = self.no_work * REGULAR_SPIN_FACTOR;
            if pause > longer {
                self.spin_time = self.no_work;
            } else if pause > self.spin_time {
                self.spin_time = longer;
            }
        }
        self.window_bytes += bytes;
    }

    /// Judges the load at the end of a window that is long enough.
    fn judge_load(&mut self, now: Instant) {
        let start = *self.window_start.get_or_insert(now);
        let length = now.saturating_duration_since(start);
        if length >= LOAD_WINDOW {
            // No overflow: the bytes of a million seconds at 100 Gbit/s stay below 2^54.
            self.streaming = self.window_bytes * 1000 >= STREAM_BYTES_PER_MS * length.as_micros() as u64;
            self.window_start = Some(now);
            self.window_bytes = 0;
        }
    }

    /// True when the dispatcher has been idle for so long that timers may run slowly.
    pub(super) fn is_quiet(&self) -> bool {
        self.idle_since.is_some_and(|since| since.elapsed() >= self.spin_time)
    }

    /// Chooses the next action after a turn without work. `polled`: some queue must be polled because its guest does not notify.
    pub(super) fn idle(&mut self, now: Instant, polled: bool) -> Idle {
        let since = *self.idle_since.get_or_insert(now);
        match self.strategy {
            Strategy::Block => Idle::Block,
            Strategy::Immediate => Idle::Spin,
            Strategy::Timed => Idle::Sleep(self.sleep),
            Strategy::Adaptive => {
                self.judge_load(now);
                let contended = self.contended_until.is_some_and(|until| now < until);
                if now.saturating_duration_since(since) < self.spin_time {
                    if self.streaming || contended { Idle::Block } else { Idle::Spin }
                } else if polled {
                    Idle::Sleep(self.sleep)
                } else {
                    Idle::Block
                }
            }
        }
    }

    /// Reports a yield from `before` to `after`. Returns true when it was so long that another task must have computed.
    pub(super) fn yielded(&mut self, before: Instant, after: Instant) -> bool {
        let took = after.saturating_duration_since(before);
        let long = took > CONTENDED_YIELD;
        if self.contended_until.is_some_and(|until| before < until) {
            // The spin was forced (a source cannot notify), so its length is no probe of contention.
            return long;
        }
        if long && self.lose(before, after) > LOST_MAX {
            self.lost = Duration::ZERO;
            let longer = (self.contention * 4).min(CONTENTION_MEMORY_MAX);
            self.contention = longer.max(CONTENTION_MEMORY);
            self.contended_until = Some(after + self.contention);
            self.calm = Duration::ZERO;
        } else if !long && !self.contention.is_zero() {
            self.calm += took;
            if self.calm >= CALM {
                let shorter = self.contention / 4;
                self.contention = if shorter < CONTENTION_MEMORY { Duration::ZERO } else { shorter };
                self.calm = Duration::ZERO;
            }
        }
        long
    }

    /// Adds a long yield to the time lost to computations; returns the sum.
    fn lose(&mut self, before: Instant, after: Instant) -> Duration {
        let since = self.lost_at.map_or(Duration::ZERO, |at| before.saturating_duration_since(at));
        self.lost = self.lost.saturating_sub(since / LOST_SHARE) + after.saturating_duration_since(before);
        self.lost_at = Some(after);
        self.lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adaptive_spins_first() {
        let mut yielder = Yielder::new(Strategy::Adaptive, 50, 200);
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        assert_eq!(yielder.idle(start, false), Idle::Spin);
        assert_eq!(yielder.idle(at(199), false), Idle::Spin);
        assert_eq!(yielder.idle(at(200), false), Idle::Block);
        yielder.worked(60, at(300));
        assert_eq!(yielder.idle(at(300), false), Idle::Spin);
    }

    #[test]
    fn adaptive_sleeps_between_polls_of_polled_queues() {
        let mut yielder = Yielder::new(Strategy::Adaptive, 50, 200);
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        assert_eq!(yielder.idle(at(0), true), Idle::Spin);
        assert_eq!(yielder.idle(at(200), true), Idle::Sleep(Duration::from_micros(50)));
        assert_eq!(yielder.idle(at(5000), true), Idle::Sleep(Duration::from_micros(50)));
        assert_eq!(yielder.idle(at(5050), false), Idle::Block);
    }

    #[test]
    fn adaptive_blocks_on_a_contended_core() {
        let mut yielder = Yielder::new(Strategy::Adaptive, 50, 200);
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        assert_eq!(yielder.idle(at(0), false), Idle::Spin);
        yielder.yielded(at(0), at(1));
        assert_eq!(yielder.idle(at(1), false), Idle::Spin);
        yielder.yielded(at(1), at(90));
        assert_eq!(yielder.idle(at(90), false), Idle::Spin);
        yielder.yielded(at(90), at(1100));
        yielder.worked(60, at(1100));
        assert_eq!(yielder.idle(at(1100), false), Idle::Block);
        yielder.worked(60, at(3050));
        assert_eq!(yielder.idle(at(3050), false), Idle::Block);
        yielder.worked(60, at(3101));
        assert_eq!(yielder.idle(at(3101), false), Idle::Spin);
    }

    #[test]
    fn adaptive_tolerates_a_share_of_contention() {
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        // 200 us of every 1 ms or 0.5 ms: a fifth of the time, or two fifths.
        for (period, wanted) in [(1000, false), (500, true)] {
            let mut yielder = Yielder::new(Strategy::Adaptive, 50, 200);
            let mut contended = false;
            for turn in 0..100 {
                assert!(yielder.yielded(at(turn * period), at(turn * period + 200)));
                yielder.worked(60, at(turn * period + 200));
                contended |= yielder.idle(at(turn * period + 200), false) == Idle::Block;
            }
            assert_eq!(contended, wanted, "each {period} us");
        }
    }

    #[test]
    fn adaptive_backs_off_exponentially_on_a_contended_core() {
        let mut yielder = Yielder::new(Strategy::Adaptive, 50, 200);
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        let mut now = 0;
        for ms in [2, 8, 32, 128, 512, 512] {
            yielder.worked(60, at(now));
            assert_eq!(yielder.idle(at(now), false), Idle::Spin);
            yielder.yielded(at(now), at(now + 3000));
            now += 3000;
            for us in [0, 1000 * ms - 1] {
                yielder.worked(60, at(now + us));
                assert_eq!(yielder.idle(at(now + us), false), Idle::Block, "{ms} ms");
            }
            now += 1000 * ms;
        }
        // A forced spin does not change the backoff.
        assert!(yielder.yielded(at(now - 1000), at(now + 1000)));
        now += 1000;
        // After the contention ends, the backoff becomes short again.
        for _ in 0..5 * 20 {
            assert!(!yielder.yielded(at(now), at(now + 50)));
            now += 50;
        }
        yielder.yielded(at(now), at(now + 3000));
        yielder.worked(60, at(now + 4999));
        assert_eq!(yielder.idle(at(now + 4999), false), Idle::Block);
        yielder.worked(60, at(now + 5000));
        assert_eq!(yielder.idle(at(now + 5000), false), Idle::Spin);
    }

    #[test]
    fn adaptive_blocks_under_streaming_load() {
        let mut yielder = Yielder::new(Strategy::Adaptive, 50, 200);
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        assert_eq!(yielder.idle(start, false), Idle::Spin);
        yielder.worked(1 << 20, at(500));
        assert_eq!(yielder.idle(at(500), false), Idle::Spin, "too early to tell");
        yielder.worked(1 << 20, at(1000));
        assert_eq!(yielder.idle(at(1000), false), Idle::Block);
        // The stream has ended: request/response traffic follows.
        for us in (1100..2000).step_by(100) {
            yielder.worked(100, at(us));
            assert_eq!(yielder.idle(at(us), false), Idle::Block);
        }
        yielder.worked(100, at(2000));
        assert_eq!(yielder.idle(at(2000), false), Idle::Spin);
    }

    #[test]
    fn adaptive_spins_longer_for_regular_requests() {
        let mut yielder = Yielder::new(Strategy::Adaptive, 50, 200);
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        // One frame per millisecond: only the first has to wake the dispatcher.
        assert_eq!(yielder.idle(at(0), false), Idle::Spin);
        assert_eq!(yielder.idle(at(999), false), Idle::Block);
        for ms in 1..4 {
            yielder.worked(60, at(1000 * ms));
            assert_eq!(yielder.idle(at(1000 * ms + 1), false), Idle::Spin);
            assert_eq!(yielder.idle(at(1000 * ms + 999), false), Idle::Spin);
        }
        // The yielder stops spinning; after a long pause it starts again.
        assert_eq!(yielder.idle(at(5001), false), Idle::Block);
        yielder.worked(60, at(9000));
        assert_eq!(yielder.idle(at(9001), false), Idle::Spin);
        assert_eq!(yielder.idle(at(9999), false), Idle::Block);
    }

    #[test]
    fn fixed_strategies_never_change() {
        let now = Instant::now();
        assert_eq!(Yielder::new(Strategy::Block, 50, 200).idle(now, false), Idle::Block);
        assert_eq!(Yielder::new(Strategy::Immediate, 50, 200).idle(now, false), Idle::Spin);
        assert_eq!(
            Yielder::new(Strategy::Timed, 50, 200).idle(now, false),
            Idle::Sleep(Duration::from_micros(50))
        );
    }
}
