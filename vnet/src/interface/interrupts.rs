//! When a guest hears of its frames: directly, or by optimistic interrupts (VNET/P+ section IV.A).
//!
//! *Direct*: one notification behind each batch, when the guest asks for one.
//!
//! *Optimistic*: the guest is notified *before* its frames are moved, so that it wakes up while they are, and then perhaps
//! once more when the source of the frames is drained:
//!
//! ```text
//!   data known to be for this guest      moved, batch by batch         source drained           up to CHECK_AFTER later
//!            before() ------------------------ give, show ------------ end_of_coalescing() -------- check()
//!   injected | discarded: notifications off               nothing owed | injected | withheld      settled | injected
//! ```
//!
//! The decision at the end of coalescing is the paper's: if the early interrupt was discarded, the guest is notified. Else the
//! receive density (bytes since that interrupt over the time since) decides: *too cold*, a few frames that the early
//! interrupt will have delivered, and *too hot*, a stream in which more of them will follow, need no other interrupt; in
//! between the guest is notified.
//!
//! Unlike in the paper, a guest is never left with frames it does not know of. What it wants is in its ring, and is asked for
//! after the frames are visible (the event index, virtio 1.2 section 2.7.10, or the no-interrupt flag). A guest that has
//! notifications off at that moment looks again before it sleeps, and needs nothing. One that has them on and is withheld
//! from is *checked* at most [`CHECK_AFTER`] later, and before its dispatcher sleeps any longer: has the guest not moved on by
//! then, it is notified. So "withheld" means "later, if at all".
//!
//! And unlike in the paper, little data is not announced: a frame or two are in the ring before the guest's processor has even
//! taken the interrupt, so that nothing is gained, while the check behind it costs a wake-up of the dispatcher. What is less
//! than [`InterruptSettings::early_bytes`] since the last end of coalescing is notified of at the end, as directly.

use std::time::{Duration, Instant};

use crate::stats::InterruptStats;

/// Within what time a guest that was not notified at the end of coalescing is looked after: longer than most guests take from
/// an interrupt to their ring, shorter than what anybody would notice as a stall.
pub const CHECK_AFTER: Duration = Duration::from_micros(100);

/// How a guest is notified of frames for it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Default, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
pub enum Interrupts {
    /// Behind each batch.
    #[default]
    Direct,
    /// Early, and at the end of coalescing if need be.
    Optimistic,
}

/// How a guest is notified, with the bounds of the decision at the end of coalescing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterruptSettings {
    /// Directly or optimistically.
    pub interrupts: Interrupts,
    /// alpha in bytes/s: a receive density below it is too cold.
    pub density_low: u64,
    /// beta in bytes/s: one above it is too hot. Not less than `density_low`.
    pub density_high: u64,
    /// Less data than this is not announced early; 0 announces all, as the paper does.
    pub early_bytes: u64,
}

impl Default for InterruptSettings {
    /// Too cold is less than a kilobyte within the 20 us that a guest takes to wake up; too hot is what only a stream of
    /// super-frames reaches, 8 Gbit/s. More than a frame of an Ethernet is announced early (docs/measurements.md: a lone frame
    /// gains nothing from it).
    fn default() -> InterruptSettings {
        InterruptSettings {
            interrupts: Interrupts::Direct,
            density_low: 50_000_000,
            density_high: 1_000_000_000,
            early_bytes: 2048,
        }
    }
}

/// What is done at the end of coalescing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The guest does not wait, or for nothing.
    Settled,
    /// Notify it now.
    Inject,
    /// Do not; look after it by [`CHECK_AFTER`].
    Withhold,
}

/// One receive ring's notifications. Knows what was decided; the ring knows what the guest wants.
#[derive(Debug, Default)]
pub(super) struct Coalescing {
    settings: InterruptSettings,
    /// When the early interrupt was injected that the guest may not have acted on yet.
    early: Option<Instant>,
    /// Bytes given since then; without one, since the last end of coalescing.
    bytes: u64,
}

impl Coalescing {
    pub(super) fn new(settings: InterruptSettings) -> Coalescing {
        Coalescing { settings, ..Coalescing::default() }
    }

    /// True when notifications wait for the end of coalescing.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.settings.interrupts == Interrupts::Optimistic
    }

    /// So many bytes for the guest are known to be here and not moved yet. `waits`: the guest asks to be told of the next
    /// frame. True when it is to be notified now.
    pub(super) fn before(&mut self, bytes: u64, waits: bool, now: Instant, stats: &InterruptStats) -> bool {
        if self.early.is_some() {
            // One is on its way, or has been for so short a time that nobody knows better.
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

    /// The guest has taken all it was given and waits again: the early interrupt has done its work.
    pub(super) fn caught_up(&mut self) {
        (self.early, self.bytes) = (None, 0);
    }

    /// So many bytes were given.
    #[inline]
    pub(super) fn gave(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// The source is drained. `waits`: the guest asks for a notification of what it was given.
    pub(super) fn end(&mut self, waits: bool, now: Instant, stats: &InterruptStats) -> Verdict {
        if !waits {
            // It is looking, so the early interrupt has reached it, or it needed none.
            (self.early, self.bytes) = (None, 0);
            return Verdict::Settled;
        }
        if let Some(early) = self.early {
            let us = (now.saturating_duration_since(early).as_micros() as u64).max(1);
            let density = self.bytes.saturating_mul(1_000_000) / us;
            let just_right = self.settings.density_low..=self.settings.density_high;
            if !just_right.contains(&density) {
                stats.coalesced_withheld.add(1);
                return Verdict::Withhold;
            }
        }
        (self.early, self.bytes) = (None, 0);
        stats.coalesced_injected.add(1);
        Verdict::Inject
    }

    /// The guest has had its time. True when it has not moved on and is to be notified.
    pub(super) fn check(&mut self, waits: bool, stats: &InterruptStats) -> bool {
        let early = self.early.take();
        self.bytes = 0;
        if waits {
            // Its answer to the early interrupt was to find nothing and wait again, or it is slower than we think.
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
        announced_from(0)
    }

    fn announced_from(early_bytes: u64) -> (Coalescing, InterruptStats, Instant) {
        let settings =
            InterruptSettings { interrupts: Interrupts::Optimistic, early_bytes, ..Default::default() };
        (Coalescing::new(settings), InterruptStats::default(), Instant::now())
    }

    #[test]
    fn little_data_is_not_announced() {
        let (mut coalescing, stats, now) = announced_from(2048);
        for _ in 0..3 {
            assert!(!coalescing.before(1514, true, now, &stats));
            coalescing.gave(1514);
            assert_eq!(coalescing.end(true, now, &stats), Verdict::Inject, "told of it as directly");
        }
        assert_eq!((stats.early.get(), stats.early_discarded.get()), (0, 0));
        // What was given before and not told of counts.
        assert!(!coalescing.before(1514, true, now, &stats));
        coalescing.gave(1514);
        assert!(coalescing.before(1514, true, now, &stats));
        coalescing.gave(1514);
        assert_eq!(coalescing.end(false, now, &stats), Verdict::Settled);
        assert!(!coalescing.before(1514, true, now, &stats), "counted anew");
        // Nor does what was withheld and looked after count for what comes next.
        let soon = now + Duration::from_micros(1);
        assert!(coalescing.before(9000, true, now, &stats));
        coalescing.gave(9000);
        assert_eq!(coalescing.end(true, soon, &stats), Verdict::Withhold, "too hot");
        assert!(!coalescing.check(false, &stats));
        assert!(!coalescing.before(60, true, soon, &stats));
    }

    #[test]
    fn the_density_decides_after_an_early_interrupt() {
        // Bytes in 10 us: 499 are 49.9 MB/s, 500 are 50 MB/s, 10 000 are 1 GB/s.
        let cases = [
            (499, Verdict::Withhold),
            (500, Verdict::Inject),
            (10_000, Verdict::Inject),
            (10_001, Verdict::Withhold),
        ];
        for (bytes, verdict) in cases {
            let (mut coalescing, stats, start) = optimistic();
            assert!(coalescing.before(60, true, start, &stats));
            coalescing.gave(bytes);
            let end = start + Duration::from_micros(10);
            assert_eq!(coalescing.end(true, end, &stats), verdict, "{bytes} bytes");
            let injected = u64::from(verdict == Verdict::Inject);
            assert_eq!(stats.coalesced_injected.get(), injected);
            assert_eq!(stats.coalesced_withheld.get(), 1 - injected);
        }
    }

    #[test]
    fn one_early_interrupt_at_a_time() {
        let (mut coalescing, stats, now) = optimistic();
        assert!(coalescing.before(60, true, now, &stats));
        assert!(!coalescing.before(60, true, now, &stats), "the first is still on its way");
        assert_eq!(coalescing.end(false, now, &stats), Verdict::Settled, "it has arrived");
        assert!(coalescing.before(60, true, now, &stats));
        assert_eq!((stats.early.get(), stats.early_discarded.get()), (2, 0));
    }

    #[test]
    fn a_discarded_one_is_made_good_at_the_end() {
        let (mut coalescing, stats, now) = optimistic();
        assert!(!coalescing.before(60, false, now, &stats));
        coalescing.gave(60);
        assert_eq!(coalescing.end(true, now, &stats), Verdict::Inject);
        assert_eq!((stats.early_discarded.get(), stats.coalesced_injected.get()), (1, 1));
    }

    #[test]
    fn the_check_finds_premature_ones() {
        let (mut coalescing, stats, now) = optimistic();
        assert!(coalescing.before(60, true, now, &stats));
        coalescing.gave(60);
        assert_eq!(coalescing.end(true, now + Duration::from_micros(5), &stats), Verdict::Withhold);
        assert!(coalescing.check(true, &stats));
        assert_eq!((stats.early_premature.get(), stats.coalesced_injected.get()), (1, 1));
        // And one that was in time.
        assert!(coalescing.before(60, true, now, &stats));
        assert_eq!(coalescing.end(true, now + Duration::from_micros(5), &stats), Verdict::Withhold);
        assert!(!coalescing.check(false, &stats));
        assert_eq!((stats.early_premature.get(), stats.early.get()), (1, 2));
    }
}

#[cfg(test)]
#[path = "interrupts_model.rs"]
mod model;
