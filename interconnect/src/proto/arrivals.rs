//! The receiver's side of a channel: which packets have arrived, what waits for those before it, and what to acknowledge.

use std::collections::BTreeMap;

use super::window::{FIRST, WINDOW};
use super::wire::expand;

/// Packets that may stay without acknowledgement.
const UNACKNOWLEDGED_MAX: u32 = 32;
/// How long an acknowledgement waits for a packet to travel with: as long as an application needs to answer.
const SOON_NS: u64 = 5_000;
const LATE_NS: u64 = 100_000;

/// How a packet's number stands to those that have arrived.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Expected: nothing before it is missing.
    Next(u64),
    /// New, but some before it are missing.
    Ahead(u64),
    /// It has arrived before, or is too far ahead.
    Useless,
}

pub(super) struct Arrivals<E> {
    /// All before have arrived.
    next: u64,
    /// Which of the `WINDOW` from `next` have, by number modulo `WINDOW`.
    bits: [u64; WINDOW / 64],
    ahead: u32,
    /// What waits for packets before it. At most `WINDOW`.
    waiting: BTreeMap<u64, E>,
    /// Packets that failed, modulo 2^16. The origin waits for the news of so many before it takes an acknowledgement for success.
    pub(super) failures: u16,
    unacknowledged: u32,
    due: Option<u64>,
    /// A packet marked "congestion experienced" came since the last acknowledgement.
    pub(super) congestion: bool,
}

impl<E> Arrivals<E> {
    pub(super) fn new() -> Self {
        Self {
            next: FIRST,
            bits: [0; WINDOW / 64],
            ahead: 0,
            waiting: BTreeMap::new(),
            failures: 0,
            unacknowledged: 0,
            due: None,
            congestion: false,
        }
    }

    fn bit(number: u64) -> (usize, u64) {
        let place = number as usize % WINDOW;
        (place / 64, 1 << (place % 64))
    }

    fn has(&self, number: u64) -> bool {
        let (word, bit) = Self::bit(number);
        self.bits[word] & bit != 0
    }

    pub(super) fn place(&self, number: u32) -> Place {
        let number = expand(self.next, number);
        if number < self.next || number >= self.next + WINDOW as u64 {
            Place::Useless
        } else if number == self.next {
            Place::Next(number)
        } else if self.has(number) {
            Place::Useless
        } else {
            Place::Ahead(number)
        }
    }

    /// A packet that is `Ahead` has arrived; `event` waits for those before it.
    pub(super) fn keep(&mut self, number: u64, event: Option<E>) {
        let (word, bit) = Self::bit(number);
        self.bits[word] |= bit;
        self.ahead += 1;
        if let Some(event) = event {
            self.waiting.insert(number, event);
        }
    }

    /// The packet that is `Next` has arrived.
    pub(super) fn advance(&mut self) {
        self.next += 1;
    }

    /// What waited for the packet that arrived earlier and is next now.
    pub(super) fn pop(&mut self) -> Option<Option<E>> {
        if self.ahead == 0 || !self.has(self.next) {
            return None;
        }
        let number = self.next;
        let (word, bit) = Self::bit(number);
        self.bits[word] &= !bit;
        self.ahead -= 1;
        self.next += 1;
        Some(self.waiting.remove(&number))
    }

    /// Notes that a packet came: an acknowledgement is due at once, soon or later.
    pub(super) fn note(&mut self, now: u64, soon: bool, useful: bool) {
        self.unacknowledged += 1;
        let at_once = !useful || self.ahead > 0 || self.unacknowledged >= UNACKNOWLEDGED_MAX;
        let due = now
            + if at_once {
                0
            } else if soon {
                SOON_NS
            } else {
                LATE_NS
            };
        self.due = Some(self.due.map_or(due, |old| old.min(due)));
    }

    /// When an acknowledgement is to be sent.
    pub(super) fn due(&self) -> Option<u64> {
        self.due
    }

    /// Makes the waiting acknowledgement due now.
    pub(super) fn hurry(&mut self) {
        self.due = self.due.map(|_| 0);
    }

    /// Whether packets have arrived ahead of missing ones.
    pub(super) fn has_gaps(&self) -> bool {
        self.ahead > 0
    }

    /// What to acknowledge: the number expected next, and what has arrived from there if the packet has room for a map. Without room
    /// for it, the acknowledgement stays due.
    pub(super) fn acknowledge(&mut self, has_map_room: bool) -> (u32, Option<[u64; 4]>) {
        let base = self.next;
        let has_map = self.ahead > 0;
        if has_map && !has_map_room {
            return (base as u32, None);
        }
        (self.due, self.unacknowledged) = (None, 0);
        if !has_map {
            return (base as u32, None);
        }
        let mut map = [0u64; 4];
        for place in 1..256 {
            let number = base + place;
            if self.has(number) {
                map[place as usize / 64] |= 1 << (place % 64);
            }
        }
        (base as u32, Some(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_kept() {
        let mut arrivals = Arrivals::new();
        let number = |n: u64| (FIRST + n) as u32;
        assert_eq!(arrivals.place(number(1)), Place::Ahead(FIRST + 1));
        arrivals.keep(FIRST + 1, Some('b'));
        arrivals.keep(FIRST + 3, None);
        assert_eq!(arrivals.place(number(1)), Place::Useless);
        assert_eq!(arrivals.place(number(WINDOW as u64)), Place::Useless);
        assert_eq!(arrivals.acknowledge(true), (number(0), Some([0b1010, 0, 0, 0])));
        assert_eq!(arrivals.place(number(0)), Place::Next(FIRST));
        arrivals.advance();
        assert_eq!(arrivals.pop(), Some(Some('b')));
        assert_eq!(arrivals.pop(), None);
        arrivals.advance();
        assert_eq!(arrivals.pop(), Some(None));
        assert_eq!(arrivals.acknowledge(true), (number(4), None));
        assert_eq!(arrivals.place(number(3)), Place::Useless);
    }
}
