//! Interrupt moderation: a guest is notified of its frames directly, or by optimistic interrupts (VNET/P+ section IV.A).
//!
//! *Direct*: one notification after each batch, if the guest wants one.
//!
//! *Optimistic*: the guest is notified when data for it *arrives*, before vnet receives, routes and copies it, so that it wakes up
//! meanwhile, and if needed again when the source of the data is drained:
//!
//! ```text
//!   data arrives          known to be for this guest     copied, batch by batch       source drained         later, if still owed
//!   announce: before() ------------ before() ----------------- give, show ------- end_of_coalescing() ------------ check()
//!   injected | discarded: notifications off                           nothing owed | injected | withheld     settled | injected
//! ```
//!
//! The dispatcher predicts whom the data is for (`dispatch/arrival.rs`). Without a prediction, the early interrupt follows when the
//! frames are routed and before they are copied. One early interrupt is pending at a time.
//!
//! The decision at the end of coalescing follows the paper. If the early interrupt was discarded, the guest is notified.
//! Otherwise the receive density (bytes since the early interrupt divided by the time since) decides. *Too cold* (a few frames,
//! delivered by the early interrupt) and *too hot* (a stream, in which more early interrupts follow) need no further interrupt;
//! in between the guest is notified. Early interrupts go on while the one at the end is withheld.
//!
//! Unlike in the paper, a guest never misses frames. Its ring shows whether it wants a notification (event index, virtio 1.2
//! section 2.7.10, or no-interrupt flag), and vnet reads that after the frames are visible. A guest with notifications off at
//! that moment polls its ring again before it sleeps and needs no interrupt. A guest with notifications on whose interrupt is
//! withheld is *checked* later: if it has made no progress by then, it is notified. So "withheld" means "later, if at all". The
//! event index shows progress at any time: when the dispatcher is about to sleep, it drops the checks of guests that have made
//! progress, and only the others wake it up. The first check comes after [`CHECK_AFTER`]; the ring of a guest that proves slower
//! waits longer, up to [`CHECK_AFTER_MAX`].
//!
//! An early interrupt that was premature (the guest had to be notified again) makes the next ones back off.
//!
//! The end of coalescing is the end of a burst: the port that fed the guest is drained. Where one never is, because data arrives as
//! fast as it is received, it comes after as many frames as a dispatcher takes between two looks at all its ports
//! (`dispatch/dispatcher.rs`), so that a stream cannot keep its guests waiting.
//!
//! Also unlike in the paper, small amounts of data are not announced early by default, because the interrupt gains less than the
//! check costs. If fewer than [`InterruptSettings::early_bytes`] have arrived since the last end of coalescing, the guest is
//! notified at the end, as in direct mode.

use std::time::{Duration, Instant};

use crate::stats::InterruptStats;

/// How long after the end of coalescing a guest whose interrupt was withheld is first checked: longer than most guests take from
/// an interrupt to their ring, too short to be noticed as a stall.
pub const CHECK_AFTER: Duration = Duration::from_micros(100);
/// Longest time after which a guest is checked: longer than emulated guests take, and still too short to be noticed as a stall.
pub const CHECK_AFTER_MAX: Duration = Duration::from_micros(800);
/// A ring waits this share less for its next check after the guest has made progress in time.
const CHECK_SHRINKS: u32 = 64;
/// Most attempts that failures in a row suppress.
const SKIP_MAX: u16 = 256;

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

/// Exponential backoff of attempts that may fail: each failure in a row suppresses twice as many of the following attempts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Backoff {
    /// Attempts still to be suppressed.
    skip: u16,
    /// Attempts that the last failure suppressed; halved by each success.
    penalty: u16,
}

impl Backoff {
    /// True if the next attempt may be made; counts it as suppressed otherwise.
    #[inline]
    pub(crate) fn allows(&mut self) -> bool {
        if self.skip == 0 {
            return true;
        }
        self.skip -= 1;
        false
    }

    /// Records that an attempt failed, or would have.
    pub(crate) fn failed(&mut self) {
        self.penalty = (2 * self.penalty).clamp(1, SKIP_MAX);
        self.skip = self.penalty;
    }

    /// Records that an attempt succeeded, or would have.
    #[inline]
    pub(crate) fn succeeded(&mut self) {
        if self.skip == 0 {
            self.penalty /= 2;
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
    /// Withhold the notification; check the guest after this time.
    Withhold(Duration),
}

/// Interrupt coalescing of one receive ring. Tracks vnet's decisions; the ring shows whether the guest wants a notification.
#[derive(Debug)]
pub(super) struct Coalescing {
    settings: InterruptSettings,
    /// Time of an early interrupt to which the guest may not have reacted yet.
    early: Option<Instant>,
    /// Bytes delivered since the early interrupt, or since the last end of coalescing if there is none.
    bytes: u64,
    /// True after a withheld end of coalescing: a guest that waits again gets the next early interrupt.
    withheld: bool,
    /// True if an early interrupt was discarded since the last end of coalescing.
    discarded: bool,
    /// Time from a withheld end of coalescing to the check.
    check_after: Duration,
    /// Suppresses early interrupts after premature ones.
    backoff: Backoff,
}

impl Default for Coalescing {
    fn default() -> Coalescing {
        Coalescing::new(InterruptSettings::default())
    }
}

impl Coalescing {
    pub(super) fn new(settings: InterruptSettings) -> Coalescing {
        Coalescing {
            settings,
            early: None,
            bytes: 0,
            withheld: false,
            discarded: false,
            check_after: CHECK_AFTER,
            backoff: Backoff::default(),
        }
    }

    /// True if notifications are deferred to the end of coalescing.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.settings.interrupts == Interrupts::Optimistic
    }

    /// Prepares the delivery of `bytes` bytes, or announces them when they have only arrived. `waits`: the guest wants a
    /// notification of the next frame. Returns true if it must be notified now.
    pub(super) fn before(&mut self, bytes: u64, waits: bool, now: Instant, stats: &InterruptStats) -> bool {
        if self.early.is_some() && !(self.withheld && waits) {
            // An early interrupt is still pending: the guest has not visibly reacted to it yet. Without an event index, a guest
            // with notifications on may have, so an arrival after a withheld end is announced again.
            return false;
        }
        if self.bytes.saturating_add(bytes) < self.settings.early_bytes {
            return false;
        }
        if !waits {
            if !std::mem::replace(&mut self.discarded, true) {
                stats.early_discarded.add(1);
            }
            return false;
        }
        if !self.backoff.allows() {
            return false;
        }
        stats.early.add(1);
        self.reset();
        self.early = Some(now);
        true
    }

    /// Records that the guest has made progress since frames were shown, and so has handled the early interrupt. Ignored while an
    /// early interrupt announces data that is not delivered yet.
    pub(super) fn reacted(&mut self) {
        if self.early.is_none() || self.bytes > 0 {
            self.handled();
        }
    }

    /// Ends a coalescing period of a guest that needs no notification, and learns from the early interrupt that was in time.
    fn handled(&mut self) {
        if self.early.is_some() && self.bytes > 0 {
            self.backoff.succeeded();
            self.check_after = (self.check_after - self.check_after / CHECK_SHRINKS).max(CHECK_AFTER);
        }
        self.reset();
    }

    /// Starts a new coalescing period.
    fn reset(&mut self) {
        (self.early, self.bytes, self.withheld, self.discarded) = (None, 0, false, false);
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
            self.handled();
            return EndDecision::Settled;
        }
        if let Some(early) = self.early {
            let us = (now.saturating_duration_since(early).as_micros() as u64).max(1);
            let density = self.bytes.saturating_mul(1_000_000) / us;
            let just_right = self.settings.density_low..=self.settings.density_high;
            if !just_right.contains(&density) {
                stats.coalesced_withheld.add(1);
                self.withheld = true;
                return EndDecision::Withhold(self.check_after);
            }
        }
        self.reset();
        stats.coalesced_injected.add(1);
        EndDecision::Inject
    }

    /// Checks the guest some time after a withheld end of coalescing. `waits`: it has made no progress; `exact`: it has an event
    /// index, without which a guest that has made progress and waits again cannot be told from one that has not. Returns true if
    /// the guest must be notified.
    pub(super) fn check(&mut self, waits: bool, exact: bool, stats: &InterruptStats) -> bool {
        if !waits {
            self.handled();
            return false;
        }
        if self.early.is_some() {
            // Either the guest handled the early interrupt before its frames arrived and waits again, or it is slow.
            stats.early_premature.add(1);
            if exact {
                self.backoff.failed();
                self.check_after = (2 * self.check_after).min(CHECK_AFTER_MAX);
            }
        }
        stats.coalesced_injected.add(1);
        self.reset();
        true
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
        assert_eq!(coalescing.end(true, soon, &stats), EndDecision::Withhold(CHECK_AFTER), "too hot");
        assert!(!coalescing.check(false, true, &stats));
        assert!(!coalescing.before(60, true, soon, &stats));
    }

    #[test]
    fn the_receive_density_decides_after_an_early_interrupt() {
        // Bytes in 10 us: 499 are 49.9 MB/s, 500 are 50 MB/s, 10 000 are 1 GB/s.
        let cases = [
            (499, EndDecision::Withhold(CHECK_AFTER)),
            (500, EndDecision::Inject),
            (10_000, EndDecision::Inject),
            (10_001, EndDecision::Withhold(CHECK_AFTER)),
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
        let end = now + Duration::from_micros(5);
        assert!(coalescing.before(60, true, now, &stats));
        coalescing.gave(60);
        assert_eq!(coalescing.end(true, end, &stats), EndDecision::Withhold(CHECK_AFTER));
        assert!(coalescing.check(true, true, &stats));
        assert_eq!((stats.early_premature.get(), stats.coalesced_injected.get()), (1, 1));
        // The next one backs off: the guest is notified at the end, as in direct mode.
        assert!(!coalescing.before(60, true, now, &stats));
        coalescing.gave(60);
        assert_eq!(coalescing.end(true, end, &stats), EndDecision::Inject);
        // An early interrupt that was in time, found by a later check.
        assert!(coalescing.before(60, true, now, &stats));
        coalescing.gave(60);
        assert_eq!(coalescing.end(true, end, &stats), EndDecision::Withhold(2 * CHECK_AFTER));
        assert!(!coalescing.check(false, true, &stats));
        assert_eq!((stats.early_premature.get(), stats.early.get()), (1, 2));
    }

    #[test]
    fn checks_wait_longer_for_slow_guests() {
        let (mut coalescing, stats, now) = optimistic();
        let mut round = |late| loop {
            if !coalescing.before(60, true, now, &stats) {
                assert_eq!(coalescing.end(false, now, &stats), EndDecision::Settled);
                continue;
            }
            coalescing.gave(60);
            let EndDecision::Withhold(time) = coalescing.end(true, now + Duration::from_micros(5), &stats)
            else {
                panic!("too cold");
            };
            assert_eq!(coalescing.check(late, true, &stats), late);
            break time;
        };
        let times: Vec<u32> =
            (0..5).map(|_| (round(true).as_micros() / CHECK_AFTER.as_micros()) as u32).collect();
        assert_eq!(times, [1, 2, 4, 8, 8]);
        let last = (0..200).map(|_| round(false)).last();
        assert_eq!(last, Some(CHECK_AFTER), "the guest has become fast");
    }

    #[test]
    fn without_an_event_index_a_check_proves_nothing() {
        let (mut coalescing, stats, now) = optimistic();
        for _ in 0..3 {
            assert!(coalescing.before(60, true, now, &stats));
            coalescing.gave(60);
            let end = coalescing.end(true, now + Duration::from_micros(5), &stats);
            assert_eq!(end, EndDecision::Withhold(CHECK_AFTER));
            assert!(coalescing.check(true, false, &stats));
        }
    }

    #[test]
    fn early_interrupts_go_on_while_the_end_is_withheld() {
        let (mut coalescing, stats, start) = optimistic();
        for n in 0..10 {
            let now = start + Duration::from_micros(10 * n);
            // The guest has consumed the frames before and waits again.
            assert!(coalescing.before(60_000, true, now, &stats), "arrival {n}");
            coalescing.gave(60_000);
            let end = coalescing.end(true, now + Duration::from_micros(5), &stats);
            assert_eq!(end, EndDecision::Withhold(CHECK_AFTER), "too hot");
            // It has not yet: one is enough.
            assert!(!coalescing.before(60_000, false, now, &stats));
        }
        assert_eq!((stats.early.get(), stats.early_discarded.get()), (10, 0));
        assert_eq!((stats.coalesced_withheld.get(), stats.coalesced_injected.get()), (10, 0));
    }

    #[test]
    fn an_announcement_without_frames_ends_quietly() {
        let (mut coalescing, stats, now) = optimistic();
        assert!(coalescing.before(60, true, now, &stats), "at arrival");
        assert!(!coalescing.before(60, true, now, &stats), "before the copy");
        coalescing.reacted();
        assert!(!coalescing.before(60, true, now, &stats), "still on the way");
        assert_eq!(
            coalescing.end(false, now, &stats),
            EndDecision::Settled,
            "the frames were for somebody else"
        );
        assert!(coalescing.before(60, true, now, &stats));
        assert_eq!((stats.early.get(), stats.early_premature.get()), (2, 0));
    }

    #[test]
    fn failures_in_a_row_back_off_exponentially() {
        let mut backoff = Backoff::default();
        for suppressed in [1, 2, 4, 8, 16, 32, 64, 128, 256, 256] {
            assert!(backoff.allows());
            backoff.failed();
            for _ in 0..suppressed {
                assert!(!backoff.allows());
            }
        }
        for _ in 0..9 {
            assert!(backoff.allows());
            backoff.succeeded();
        }
        backoff.failed();
        assert!(!backoff.allows() && backoff.allows());
    }
}

#[cfg(test)]
#[path = "interrupts_model.rs"]
mod model;
