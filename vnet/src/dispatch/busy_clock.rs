//! The time that a dispatcher spends in turns with work. The clock is read once per turn, at its start, which is also the end of
//! the turn before.

use std::time::Instant;

use super::dispatcher_stats::DispatcherStats;

/// Time spent in busy turns.
pub(super) struct BusyClock {
    started: Instant,
    /// Start of the current turn.
    pub(super) now: Instant,
    /// True when the current turn had work.
    pub(super) busy: bool,
    busy_ns: u64,
    turns: u64,
}

impl BusyClock {
    pub(super) fn new(started: Instant) -> BusyClock {
        BusyClock { started, now: started, busy: false, busy_ns: 0, turns: 0 }
    }

    /// Ends the current turn, if it had work.
    #[inline]
    pub(super) fn end(&mut self, now: Instant) {
        if self.busy {
            self.busy_ns += now.saturating_duration_since(self.now).as_nanos() as u64;
            self.turns += 1;
            self.busy = false;
        }
    }

    /// Starts a turn.
    #[inline]
    pub(super) fn begin(&mut self, now: Instant) {
        self.now = now;
    }

    /// Milliseconds from the core's start to the start of this turn.
    #[inline]
    pub(super) fn now_ms(&self) -> u64 {
        self.ms(self.now)
    }

    /// Milliseconds from the core's start to `now`.
    pub(super) fn ms(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started).as_millis() as u64
    }

    /// Adds the accumulated time to the counters.
    pub(super) fn publish(&mut self, stats: &DispatcherStats) {
        stats.busy(std::mem::take(&mut self.turns), std::mem::take(&mut self.busy_ns));
    }
}
