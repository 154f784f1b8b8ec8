//! Duplicate suppression: records which frames of a link have ended.
//!
//! The number of its first datagram identifies a frame (its *name*). The window covers the last [`SPAN`] numbers below the
//! highest one seen, one bit each: set when that frame has ended, complete or not. A fragment of such a frame, or of one below
//! the window, is late and is ignored.
//!
//! Entries also age: bits and highest number live in two generations, and the older one is cleared every [`MEMORY_MS`]. So a
//! frame's end is remembered for one to two such periods, and a peer that restarts its numbers at 1 is accepted after two at the
//! latest (at once when it is far enough from its old numbers: see [`Window::restarted`]).

/// Number of datagram numbers covered: 94 MB at an MTU of 1500, or 19 ms at 40 Gbit/s. A link spread over paths whose delays
/// differ by more than that would lose frames on the slower path.
pub(in crate::link) const SPAN: u64 = 1 << 16;
/// Length of a generation in ms; twice the time for which a frame may stay incomplete.
pub(in crate::link) const MEMORY_MS: u64 = 400;

/// Frames that ended within one generation.
struct Generation {
    /// Highest number seen in this generation; no bit above it is set.
    highest: u64,
    ended: Box<[u64]>,
}

impl Generation {
    fn new() -> Generation {
        Generation { highest: 0, ended: vec![0; (SPAN / 64) as usize].into_boxed_slice() }
    }

    fn clear(&mut self) {
        self.highest = 0;
        self.ended.fill(0);
    }

    /// Clears the bits of `count` names from `first` on, which reuse the bits of names that left the window.
    fn forget(&mut self, first: u64, count: u64) {
        if count >= SPAN {
            self.ended.fill(0);
            return;
        }
        let mut id = first % SPAN;
        let mut left = count;
        while left > 0 {
            let (word, bit) = ((id / 64) as usize, id % 64);
            let step = left.min(64 - bit);
            self.ended[word] &= !((u64::MAX >> (64 - step)) << bit);
            id = (id + step) % SPAN;
            left -= step;
        }
    }
}

/// The duplicate window, see the comment of the module.
pub(in crate::link) struct Window {
    young: Generation,
    old: Generation,
    since_ms: u64,
}

impl Window {
    pub(in crate::link) fn new(now_ms: u64) -> Window {
        Window { young: Generation::new(), old: Generation::new(), since_ms: now_ms }
    }

    /// Drops an expired generation.
    #[inline]
    pub(in crate::link) fn age(&mut self, now_ms: u64) {
        let age_ms = now_ms.saturating_sub(self.since_ms);
        if age_ms < MEMORY_MS {
            return;
        }
        std::mem::swap(&mut self.young, &mut self.old);
        self.young.clear();
        if age_ms >= 2 * MEMORY_MS {
            self.old.clear();
        }
        self.since_ms = now_ms;
    }

    #[inline]
    fn highest(&self) -> u64 {
        self.young.highest.max(self.old.highest)
    }

    /// Lowest name in the window.
    #[inline]
    pub(in crate::link) fn low(&self) -> u64 {
        self.highest().saturating_sub(SPAN - 1)
    }

    /// True when frame `id` has ended, or is too old for the window.
    #[inline]
    pub(in crate::link) fn has_ended(&self, id: u64) -> bool {
        if id > self.highest() {
            return false;
        }
        let (word, bit) = ((id % SPAN / 64) as usize, id % 64);
        id < self.low() || (self.young.ended[word] | self.old.ended[word]) >> bit & 1 != 0
    }

    /// True when `number` can only come from a peer that restarted at 1: it is one of the first numbers, on a link whose numbers
    /// are further ahead than any path delay explains.
    #[inline]
    pub(in crate::link) fn restarted(&self, number: u64) -> bool {
        number < SPAN && self.highest() >= 2 * SPAN
    }

    /// Records a datagram number; a new highest number moves the window.
    #[inline]
    pub(in crate::link) fn see(&mut self, number: u64) {
        let highest = self.highest();
        if number > highest {
            self.young.forget(highest.wrapping_add(1), number - highest);
            self.old.forget(highest.wrapping_add(1), number - highest);
        }
        self.young.highest = self.young.highest.max(number);
    }

    /// Records the end of frame `id`; a number at or above it must have been seen.
    #[inline]
    pub(in crate::link) fn end(&mut self, id: u64) {
        if id >= self.low() {
            self.young.highest = self.young.highest.max(id);
            self.young.ended[(id % SPAN / 64) as usize] |= 1 << (id % 64);
        }
    }

    /// Clears the whole window.
    pub(in crate::link) fn clear(&mut self) {
        self.young.clear();
        self.old.clear();
    }
}

#[cfg(any(test, kani))]
#[path = "duplicates_proofs.rs"]
mod proofs;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        /// Compared with a plain map from names to end times: within one generation and the span no end is forgotten, and no
        /// frame is reported as ended that has not.
        #[test]
        fn remembers_what_a_map_remembers(
            start in prop::sample::select(vec![1, 60_000, u64::MAX / 2, u64::MAX - 300_000]),
            steps in prop::collection::vec((0u64..400, 0u64..300, 0u64..150, any::<bool>()), 1..300),
            leap in 0u64..200_000,
        ) {
            let mut window = Window::new(0);
            let mut ends: HashMap<u64, u64> = HashMap::new();
            let (mut now, mut highest) = (0, start);
            for (step, (advance, back, wait, end)) in steps.into_iter().enumerate() {
                now += wait;
                window.age(now);
                highest += if step == 150 { leap } else { advance };
                window.see(highest);
                let id = highest.saturating_sub(back);
                if end && id >= start {
                    window.end(id);
                    ends.insert(id, now);
                }
                for (&id, &at) in &ends {
                    let known = window.has_ended(id);
                    prop_assert!(known || now - at >= MEMORY_MS, "end of {} at {} forgotten at {}", id, at, now);
                    if known && highest - id < SPAN {
                        prop_assert!(now - at < 3 * MEMORY_MS, "{} remembered too long", id);
                    }
                }
                for id in highest.saturating_sub(300).max(start)..=highest {
                    if !ends.contains_key(&id) {
                        prop_assert!(!window.has_ended(id), "{} never ended", id);
                    }
                }
                prop_assert!(highest < SPAN || window.has_ended(highest - SPAN));
            }
        }
    }

    #[test]
    fn a_restart_is_noticed_or_outlived() {
        let mut window = Window::new(0);
        window.see(10);
        window.end(3);
        assert!(window.has_ended(3) && !window.restarted(1));
        window.age(MEMORY_MS);
        assert!(window.has_ended(3));
        window.age(2 * MEMORY_MS);
        assert!(!window.has_ended(3));
        window.see(2 * SPAN);
        assert!(window.has_ended(1) && window.restarted(1) && !window.restarted(SPAN));
        window.clear();
        assert!(!window.has_ended(1));
    }
}
