//! Interrupt moderation: a guest is notified of its frames directly, or by optimistic interrupts (VNET/P+ section IV.A).
//!
//! *Direct*: one notification after each batch, if the guest wants one.
//!
//! *Optimistic*: the guest is notified *before* its frames are copied, so that it wakes up during the copy, and if needed again
//! when the source of the frames is drained:
//!
//! ```text
//!   data known to be for this guest      copied, batch by batch        source drained           up to CHECK_AFTER later
//!            before() ------------------------ give, show ------------ end_of_coalescing() -------- check()
//!   injected | discarded: notifications off               nothing owed | injected | withheld      settled | injected
//! ```
//!
//! The decision at the end of coalescing follows the paper. If the early interrupt was discarded, the guest is notified.
//! Otherwise the receive density (bytes since the early interrupt divided by the time since) decides. *Too cold* (a few frames,
//! delivered by the early interrupt) and *too hot* (a stream, in which more early interrupts follow) need no further interrupt;
//! in between the guest is notified.
//!
//! Unlike in the paper, a guest never misses frames. Its ring shows whether it wants a notification (event index, virtio 1.2
//! section 2.7.10, or no-interrupt flag), and vnet reads that after the frames are visible. A guest with notifications off at
//! that moment polls its ring again before it sleeps and needs no interrupt. A guest with notifications on whose interrupt is
//! withheld is *checked* at most [`CHECK_AFTER`] later, and before its dispatcher sleeps longer: if it has made no progress by
//! then, it is notified. So "withheld" means "later, if at all".
//!
//! Also unlike in the paper, small amounts of data are not announced early. One or two frames are in the ring before the guest's
//! processor has even taken the interrupt, so an early interrupt gains nothing, while the check after it costs a wake-up of the
//! dispatcher. If fewer than [`InterruptSettings::early_bytes`] have arrived since the last end of coalescing, the guest is
//! notified at the end, as in direct mode.

use std::time::{Duration, Instant};

use crate::stats::InterruptStats;

/// How long after the end of coalescing a guest whose interrupt was withheld is checked: longer than most guests take from an
/// interrupt to their ring, too short to be noticed as a stall.
pub const CHECK_AFTER: Duration = Duration::from_micros(100);

/// Time at which a guest is notified of its frames.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Default, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
pub enum Interrupts {
    /// The guest is notified after each batch.
    #[default]
    Direct,
    /// The guest is notified early, and again at the end of coalescing if needed.
    Optimistic,
}

/// Interrupt mode, with the thresholds of the decision at the end of coalescing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterruptSettings {
    /// Direct or optimistic.
    pub interrupts: Interrupts,
    /// The paper's alpha in bytes/s: a lower receive density is too cold.
    pub density_low: u64,
    /// The paper's beta in bytes/s: a higher receive density is too hot. Not less than `density_low`.
    pub density_high: u64,
    /// Minimum number of bytes announced by an early interrupt; 0 announces all data, as in the paper.
    pub early_bytes: u64,
}

impl Default for InterruptSettings {
    /// Too cold: less than a kilobyte in the 20 us that a guest takes to wake up. Too hot: 8 Gbit/s, which only a stream of
    /// super-frames reaches. Early interrupts announce more than one 1500-byte frame, because measurements show no gain for a
    /// single frame.
    fn default() -> InterruptSettings {
        InterruptSettings {
            interrupts: Interrupts::Direct,
            density_low: 50_000_000,
            density_high: 1_000_000_000,
            early_bytes: 2048,
        }
    }
}

/// The decision at the end of coalescing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndDecision {
    /// The guest needs no notification.
    Settled,
    /// Notify the guest now.
    Inject,
    /// Withhold the notification; check the guest within [`CHECK_AFTER`].
    Withhold,
}

/// Interrupt coalescing of one receive ring. Tracks vnet's decisions; the ring shows whether the guest wants a notification.
#[derive(Debug, Default)]
pub(super) struct Coalescing {
    settings: InterruptSettings,
    /// Time of an early interrupt to which the guest may not have reacted yet.
    early: Option<Instant>,
    /// Bytes delivered since the early interrupt, or since the last end of coalescing if there is none.
    bytes: u64,
}

impl Coalescing {
    pub(super) fn new(settings: InterruptSettings) -> Coalescing {
        Coalescing { settings, ..Coalescing::default() }
    }

    /// True if notifications are deferred to the end of coalescing.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.settings.interrupts == Interrupts::Optimistic
    }

    /// Prepares the delivery of `bytes` bytes. `waits`: the guest wants a notification of the next frame. Returns true if it must
    /// be notified now.
    pub(super) fn before(&mut self, bytes: u64, waits: bool, now: Instant, stats: &InterruptStats) -> bool {
        if self.early.is_some() {
            // An early interrupt is still pending: the guest has not visibly reacted to it yet.
            return false;
        }
        if self.bytes.saturating_add(bytes) < self.settings.early_bytes {
            return false;
        }
        if !waits {
            stats.early_discarded.add(1);
            return false;
        }
        stats.early.add(1);
        (self.early, self.bytes) = (Some(now), 0);
        true
    }

    /// Records that the guest has consumed all delivered frames and waits again, and so has handled the early interrupt.
    pub(super) fn caught_up(&mut self) {
        (self.early, self.bytes) = (None, 0);
    }

    /// Records the delivery of `bytes` bytes.
    #[inline]
    pub(super) fn gave(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// Decides at the end of coalescing, when the source is drained. `waits`: the guest wants a notification of delivered frames.
    pub(super) fn end(&mut self, waits: bool, now: Instant, stats: &InterruptStats) -> EndDecision {
        if !waits {
            // The guest is polling: the early interrupt reached it, or it needed none.
            (self.early, self.bytes) = (None, 0);
            return EndDecision::Settled;
        }
        if let Some(early) = self.early {
            let us = (now.saturating_duration_since(early).as_micros() as u64).max(1);
            let density = self.bytes.saturating_mul(1_000_000) / us;
            let just_right = self.settings.density_low..=self.settings.density_high;
            if !just_right.contains(&density) {
                stats.coalesced_withheld.add(1);
                return EndDecision::Withhold;
            }
        }
        (self.early, self.bytes) = (None, 0);
        stats.coalesced_injected.add(1);
        EndDecision::Inject
    }

    /// Checks the guest after [`CHECK_AFTER`]. Returns true if it has made no progress and must be notified.
    pub(super) fn check(&mut self, waits: bool, stats: &InterruptStats) -> bool {
        let early = self.early.take();
        self.bytes = 0;
        if waits {
            // Either the guest handled the early interrupt before its frames arrived and waits again, or it is slow.
            stats.early_premature.add(u64::from(early.is_some()));
            stats.coalesced_injected.add(1);
        }
        waits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn optimistic() -> (Coalescing, InterruptStats, Instant) {
        optimistic_from(0)
    }

    fn optimistic_from(early_bytes: u64) -> (Coalescing, InterruptStats, Instant) {
        let settings =
            InterruptSettings { interrupts: Interrupts::Optimistic, early_bytes, ..Default::default() };
        (Coalescing::new(settings), InterruptStats::default(), Instant::now())
    }

    #[test]
    fn small_data_is_not_announced_early() {
        let (mut coalescing, stats, now) = optimistic_from(2048);
        for _ in 0..3 {
            assert!(!coalescing.before(1514, true, now, &stats));
            coalescing.gave(1514);
            assert_eq!(
                coalescing.end(true, now, &stats),
                EndDecision::Inject,
                "notified at the end, as in direct mode"
            );
        }
        assert_eq!((stats.early.get(), stats.early_discarded.get()), (0, 0));
        // Bytes delivered earlier without a notification count, too.
        assert!(!coalescing.before(1514, true, now, &stats));
        coalescing.gave(1514);
        assert!(coalescing.before(1514, true, now, &stats));
        coalescing.gave(1514);
        assert_eq!(coalescing.end(false, now, &stats), EndDecision::Settled);
        assert!(!coalescing.before(1514, true, now, &stats), "the count was reset");
        // A check resets the count as well.
        let soon = now + Duration::from_micros(1);
        assert!(coalescing.before(9000, true, now, &stats));
        coalescing.gave(9000);
        assert_eq!(coalescing.end(true, soon, &stats), EndDecision::Withhold, "too hot");
        assert!(!coalescing.check(false, &stats));
        assert!(!coalescing.before(60, true, soon, &stats));
    }

    #[test]
    fn the_receive_density_decides_after_an_early_interrupt() {
        // Bytes in 10 us: 499 are 49.9 MB/s, 500 are 50 MB/s, 10 000 are 1 GB/s.
        let cases = [
            (499, EndDecision::Withhold),
            (500, EndDecision::Inject),
            (10_000, EndDecision::Inject),
            (10_001, EndDecision::Withhold),
        ];
        for (bytes, verdict) in cases {
            let (mut coalescing, stats, start) = optimistic();
            assert!(coalescing.before(60, true, start, &stats));
            coalescing.gave(bytes);
            let end = start + Duration::from_micros(10);
            assert_eq!(coalescing.end(true, end, &stats), verdict, "{bytes} bytes");
            let injected = u64::from(verdict == EndDecision::Inject);
            assert_eq!(stats.coalesced_injected.get(), injected);
            assert_eq!(stats.coalesced_withheld.get(), 1 - injected);
        }
    }

    #[test]
    fn one_early_interrupt_pending_at_a_time() {
        let (mut coalescing, stats, now) = optimistic();
        assert!(coalescing.before(60, true, now, &stats));
        assert!(!coalescing.before(60, true, now, &stats), "the first is still pending");
        assert_eq!(coalescing.end(false, now, &stats), EndDecision::Settled, "the guest has handled it");
        assert!(coalescing.before(60, true, now, &stats));
        assert_eq!((stats.early.get(), stats.early_discarded.get()), (2, 0));
    }

    #[test]
    fn a_discarded_early_interrupt_is_injected_at_the_end() {
        let (mut coalescing, stats, now) = optimistic();
        assert!(!coalescing.before(60, false, now, &stats));
        coalescing.gave(60);
        assert_eq!(coalescing.end(true, now, &stats), EndDecision::Inject);
        assert_eq!((stats.early_discarded.get(), stats.coalesced_injected.get()), (1, 1));
    }

    #[test]
    fn the_check_finds_premature_early_interrupts() {
        let (mut coalescing, stats, now) = optimistic();
        assert!(coalescing.before(60, true, now, &stats));
        coalescing.gave(60);
        assert_eq!(coalescing.end(true, now + Duration::from_micros(5), &stats), EndDecision::Withhold);
        assert!(coalescing.check(true, &stats));
        assert_eq!((stats.early_premature.get(), stats.coalesced_injected.get()), (1, 1));
        // An early interrupt that was in time.
        assert!(coalescing.before(60, true, now, &stats));
        assert_eq!(coalescing.end(true, now + Duration::from_micros(5), &stats), EndDecision::Withhold);
        assert!(!coalescing.check(false, &stats));
        assert_eq!((stats.early_premature.get(), stats.early.get()), (1, 2));
    }
}

#[cfg(test)]
#[path = "interrupts_model.rs"]
mod model;
