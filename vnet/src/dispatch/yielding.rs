//! What a dispatcher does when there is nothing to do (VNET/P section 4.8).
//!
//! Spinning answers the next frame soonest and takes a core from guests; sleeping costs nothing and answers late. The
//! adaptive strategy spins for `T_nowork` after the last frame (ten times that where frames come that regularly), then sleeps
//! for `T_sleep` between looks as long as a queue is VMM-driven, and blocks until somebody notifies once none is: an idle
//! daemon costs nothing. It blocks instead of spinning
//!
//! - while much is moved: a stream's ends need the core more than its frames need to be met at once;
//! - on a core that a computation wants: a `sched_yield` that comes back very late has let one run, and so have several that
//!   come back late soon after each other. One that is a little late has let the peer of a question and answer run, which is
//!   what yielding is for, or somebody who looked in shortly, whom frames need not wait for.

use std::time::{Duration, Instant};

/// How to yield.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Default, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
pub enum Strategy {
    /// Sleep in the kernel at once, until notified.
    Block,
    /// Give the core to whoever wants it and look again.
    Immediate,
    /// Sleep for `T_sleep`, then look again.
    Timed,
    /// Immediate until `T_nowork` without work, then timed; block once nothing is polled.
    #[default]
    Adaptive,
}

/// How many times `T_nowork` is spun where questions come that regularly: what has just had to wait for a dispatcher to wake
/// up will most likely come again after as long. Exchanges with up to so long a computation between them are met at once.
const PATIENCE: u32 = 10;
/// A yield that takes longer has let a computation run.
const CONTENDED_YIELD: Duration = Duration::from_micros(100);
/// How much computations may take at once before the core counts as contended...
const LOST_MAX: Duration = Duration::from_millis(1);
/// ...and one part to so many of the time in between, a fifth of all: who computes for 100 us now and then is no reason to sleep.
const LOST_SHARE: u32 = 4;
/// How long a contended core is not spun on at first. Where it is found contended again and again, as beside a virtual machine
/// that is emulated, four times as long each time: each try lets frames wait for as long as the computation is let run.
const CONTENTION_MEMORY: Duration = Duration::from_millis(2);
/// The same at most.
const CONTENTION_MEMORY_MAX: Duration = Duration::from_millis(512);
/// After so much time in yields that came back soon, the next such pause is a quarter of what it would have been.
const CALM: Duration = Duration::from_millis(1);
/// Over how long the load is judged, at least.
const LOAD_WINDOW: Duration = Duration::from_millis(1);
/// Bytes a millisecond above which the load is a stream: half a gigabit a second.
const STREAM_BYTES_PER_MS: u64 = 64 << 10;

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Idle {
    /// Yield the core and look again.
    Spin,
    /// Sleep so long, then look again.
    Sleep(Duration),
    /// Have everybody notify, and sleep until one does.
    Block,
}

/// A strategy with its times and its memory of the last work.
pub(super) struct Yielder {
    strategy: Strategy,
    sleep: Duration,
    no_work: Duration,
    /// For how long it is spun at present: `no_work`, or [`PATIENCE`] times that.
    reach: Duration,
    idle_since: Option<Instant>,
    /// What long yields took, less the part of the time between them that they may take.
    lost: Duration,
    /// The end of the last long yield.
    lost_at: Option<Instant>,
    /// Until when the core counts as wanted by others.
    contended_until: Option<Instant>,
    /// How long it counted so last; nothing when it was left alone for long enough since.
    contention: Duration,
    /// Time spent in short yields since that was set.
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
            reach: Duration::from_micros(nowork_us.into()),
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

    /// Turns had work, the first of them at `now`: so many bytes were moved.
    #[inline]
    pub(super) fn worked(&mut self, bytes: u64, now: Instant) {
        if let Some(since) = self.idle_since.take() {
            let pause = now.saturating_duration_since(since);
            let patient = self.no_work * PATIENCE;
            if pause > patient {
                self.reach = self.no_work;
            } else if pause > self.reach {
                self.reach = patient;
            }
        }
        self.window_bytes += bytes;
    }

    /// Judges the load of the window that ends now, when it was long enough to tell.
    fn judge_load(&mut self, now: Instant) {
        let start = *self.window_start.get_or_insert(now);
        let length = now.saturating_duration_since(start);
        if length >= LOAD_WINDOW {
            // No overflow: a million seconds at 100 Gbit/s stay below 2^54 bytes.
            self.streaming = self.window_bytes * 1000 >= STREAM_BYTES_PER_MS * length.as_micros() as u64;
            self.window_start = Some(now);
            self.window_bytes = 0;
        }
    }

    /// True when nothing has happened for so long that timers may run slowly.
    pub(super) fn is_quiet(&self) -> bool {
        self.idle_since.is_some_and(|since| since.elapsed() >= self.reach)
    }

    /// A turn had no work. `polled` says that some queue has to be looked at, since its guest does not notify.
    pub(super) fn idle(&mut self, now: Instant, polled: bool) -> Idle {
        let since = *self.idle_since.get_or_insert(now);
        match self.strategy {
            Strategy::Block => Idle::Block,
            Strategy::Immediate => Idle::Spin,
            Strategy::Timed => Idle::Sleep(self.sleep),
            Strategy::Adaptive => {
                self.judge_load(now);
                let contended = self.contended_until.is_some_and(|until| now < until);
                if now.saturating_duration_since(since) < self.reach {
                    if self.streaming || contended { Idle::Block } else { Idle::Spin }
                } else if polled {
                    Idle::Sleep(self.sleep)
                } else {
                    Idle::Block
                }
            }
        }
    }

    /// A yield that began at `before` came back at `after`. True when it took so long that somebody else has computed.
    pub(super) fn yielded(&mut self, before: Instant, after: Instant) -> bool {
        let took = after.saturating_duration_since(before);
        let long = took > CONTENDED_YIELD;
        if self.contended_until.is_some_and(|until| before < until) {
            // Not a try: there was no other way than to spin.
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

    /// Adds a long yield to what was lost to computations; gives the sum.
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
    fn adaptive_looks_at_what_is_polled_now_and_then() {
        let mut yielder = Yielder::new(Strategy::Adaptive, 50, 200);
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        assert_eq!(yielder.idle(at(0), true), Idle::Spin);
        assert_eq!(yielder.idle(at(200), true), Idle::Sleep(Duration::from_micros(50)));
        assert_eq!(yielder.idle(at(5000), true), Idle::Sleep(Duration::from_micros(50)));
        assert_eq!(yielder.idle(at(5050), false), Idle::Block);
    }

    #[test]
    fn adaptive_leaves_a_wanted_core_alone() {
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
    fn adaptive_gives_others_a_part_of_the_time_before_it_sleeps() {
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        // 200 us of every millisecond, or of every half: a fifth of the time, or two fifths.
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
    fn adaptive_tries_a_core_less_and_less_that_stays_wanted() {
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
        // What was no try says nothing.
        assert!(yielder.yielded(at(now - 1000), at(now + 1000)));
        now += 1000;
        // Nobody wants it any more: it is tried as at first, after some time.
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
    fn adaptive_sleeps_between_the_frames_of_a_stream() {
        let mut yielder = Yielder::new(Strategy::Adaptive, 50, 200);
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        assert_eq!(yielder.idle(start, false), Idle::Spin);
        yielder.worked(1 << 20, at(500));
        assert_eq!(yielder.idle(at(500), false), Idle::Spin, "too early to tell");
        yielder.worked(1 << 20, at(1000));
        assert_eq!(yielder.idle(at(1000), false), Idle::Block);
        // Over: questions and answers again.
        for us in (1100..2000).step_by(100) {
            yielder.worked(100, at(us));
            assert_eq!(yielder.idle(at(us), false), Idle::Block);
        }
        yielder.worked(100, at(2000));
        assert_eq!(yielder.idle(at(2000), false), Idle::Spin);
    }

    #[test]
    fn adaptive_waits_longer_for_what_comes_regularly() {
        let mut yielder = Yielder::new(Strategy::Adaptive, 50, 200);
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        // Once a millisecond: only the first one finds it asleep.
        assert_eq!(yielder.idle(at(0), false), Idle::Spin);
        assert_eq!(yielder.idle(at(999), false), Idle::Block);
        for ms in 1..4 {
            yielder.worked(60, at(1000 * ms));
            assert_eq!(yielder.idle(at(1000 * ms + 1), false), Idle::Spin);
            assert_eq!(yielder.idle(at(1000 * ms + 999), false), Idle::Spin);
        }
        // It gives up, and after a long pause begins as it began.
        assert_eq!(yielder.idle(at(5001), false), Idle::Block);
        yielder.worked(60, at(9000));
        assert_eq!(yielder.idle(at(9001), false), Idle::Spin);
        assert_eq!(yielder.idle(at(9999), false), Idle::Block);
    }

    #[test]
    fn the_others_do_what_they_are_called() {
        let now = Instant::now();
        assert_eq!(Yielder::new(Strategy::Block, 50, 200).idle(now, false), Idle::Block);
        assert_eq!(Yielder::new(Strategy::Immediate, 50, 200).idle(now, false), Idle::Spin);
        assert_eq!(
            Yielder::new(Strategy::Timed, 50, 200).idle(now, false),
            Idle::Sleep(Duration::from_micros(50))
        );
    }
}
