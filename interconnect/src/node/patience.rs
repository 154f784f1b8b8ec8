//! How long a thread that waits for a completion polls before it sleeps.
//!
//! Waking a thread costs its peer the time of a system call that interrupts another processor, in a virtual machine 20 us and more. So where
//! completions and packets have come soon, a thread polls for longer before it sleeps, and begins anew with each packet that arrives.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Polled for at the beginning of a wait.
const SPIN_NS: u64 = 50_000;
/// Polled for after each sleep of a wait: what has woken the thread may not have been what it waits for.
const AFTER_SLEEP_NS: u64 = SPIN_NS / 10;
/// Up to this average, packets come soon: a thread that waits for them polls for a third of the time anyway.
const SOON_NS: u64 = 150_000;
/// Where packets come soon, a thread polls for so many times the average.
const SOON_FACTOR: u64 = 5;
/// A longer wait counts as this: a single one, such as of a thread that had lost its processor, changes little, and a few change all.
const LONGEST_NS: u64 = 2 * SOON_NS;
/// Part of the average that the last wait is.
const LAST: u64 = 8;

/// The waits of an endpoint.
pub(super) struct Patience {
    /// Moving average of the waits that took longer than a few polls, of the sleeps, and of the intervals between packets.
    average_ns: AtomicU64,
}

impl Patience {
    pub(super) fn new() -> Self {
        Self { average_ns: AtomicU64::new(LONGEST_NS) }
    }

    /// How long a wait polls at its beginning.
    pub(super) fn first(&self) -> u64 {
        self.soon().unwrap_or(SPIN_NS).max(SPIN_NS)
    }

    /// How long a wait polls after a sleep, or after a packet.
    pub(super) fn after_sleep(&self) -> u64 {
        self.soon().unwrap_or(AFTER_SLEEP_NS).max(AFTER_SLEEP_NS)
    }

    fn soon(&self) -> Option<u64> {
        let average_ns = self.average_ns.load(Relaxed);
        (average_ns <= SOON_NS).then_some(average_ns * SOON_FACTOR)
    }

    /// Counts a wait, a sleep, or an interval without packets. If threads do so at once, one of their waits may not count.
    pub(super) fn waited(&self, ns: u64) {
        let average_ns = self.average_ns.load(Relaxed);
        self.average_ns.store((average_ns * (LAST - 1) + ns.min(LONGEST_NS)) / LAST, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(waits: &[(usize, u64)]) -> Patience {
        let patience = Patience::new();
        waits
            .iter()
            .flat_map(|&(times, ns)| std::iter::repeat_n(ns, times))
            .for_each(|ns| patience.waited(ns));
        patience
    }

    #[test]
    fn who_got_completions_soon_polls_for_longer() {
        let of = |waits: &[(usize, u64)]| {
            let patience = after(waits);
            (patience.first(), patience.after_sleep())
        };
        let usual = (SPIN_NS, AFTER_SLEEP_NS);
        assert_eq!(of(&[]), usual);
        assert_eq!(of(&[(4, 60_000)]), usual, "four are no rule");
        let (first, after_sleep) = of(&[(100, 60_000)]);
        assert_eq!(first, after_sleep);
        assert!((300_000..310_000).contains(&first), "{first}");
        assert!(of(&[(100, 60_000), (1, 1_000_000_000)]).0 >= first, "one late completion");
        assert_eq!(of(&[(100, 60_000), (4, 1_000_000_000)]), usual, "four");
        assert_eq!(of(&[(100, 160_000)]), usual);
        assert_eq!(of(&[(100, 1_000)]).0, SPIN_NS, "never less than usual");
    }
}
