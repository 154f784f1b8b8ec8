//! The receiving side of a channel: tracks arrived packets, holds events until the packets before them arrive, and schedules
//! acknowledgements.

use std::collections::BTreeMap;

use super::window::{FIRST, WINDOW};
use super::wire::expand;

/// Maximum number of packets that may stay unacknowledged.
const UNACKNOWLEDGED_MAX: u32 = 32;
/// Delay of an acknowledgement, so that it can piggyback on a packet: about as long as an application needs to answer, if somebody waits for it,
/// and otherwise several times that.
const SOON_NS: u64 = 5_000;
const LATE_NS: u64 = 30_000;

/// Position of a packet's number relative to the packets that have arrived.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The next expected packet: no earlier packet is missing.
    Next(u64),
    /// A new packet, but at least one earlier packet is missing.
    Ahead(u64),
    /// A duplicate, or a packet beyond the receive window.
    Useless,
}

pub(super) struct Arrivals<E> {
    /// Next expected number: all packets before it have arrived.
    next: u64,
    /// Arrival bits of the `WINDOW` packets from `next`, indexed by packet number modulo `WINDOW`.
    bits: [u64; WINDOW / 64],
    ahead: u32,
    /// Events that wait for earlier packets. At most `WINDOW`.
    waiting: BTreeMap<u64, E>,
    /// Number of failures to report to the origin, modulo 2^16. The origin treats an acknowledgement as success only after it has
    /// received this many failure reports.
    pub(super) failures: u16,
    unacknowledged: u32,
    due: Option<u64>,
    /// A packet marked "congestion experienced" arrived since the last acknowledgement.
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

    /// Records the arrival of a packet that is `Ahead`, and holds its `event` until the packets before it arrive.
    pub(super) fn keep(&mut self, number: u64, event: Option<E>) {
        let (word, bit) = Self::bit(number);
        self.bits[word] |= bit;
        self.ahead += 1;
        if let Some(event) = event {
            self.waiting.insert(number, event);
        }
    }

    /// Records the arrival of the packet that is `Next`.
    pub(super) fn advance(&mut self) {
        self.next += 1;
    }

    /// Returns the held event of the next expected packet, if that packet arrived out of order.
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

    /// Notes that a packet arrived and schedules the acknowledgement: at once, soon or later.
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

    /// Time at which an acknowledgement has to be sent.
    pub(super) fn due(&self) -> Option<u64> {
        self.due
    }

    /// Makes a delayed acknowledgement due now.
    pub(super) fn hurry(&mut self) {
        self.due = self.due.map(|_| 0);
    }

    /// Whether packets have arrived behind a gap.
    pub(super) fn has_gaps(&self) -> bool {
        self.ahead > 0
    }

    /// Cumulative acknowledgement: the next expected number, low 32 bits.
    pub(super) fn expected(&self) -> u32 {
        self.next as u32
    }

    /// Returns the acknowledgement: the next expected number, and the map of arrived packets behind it if the packet has room
    /// for a map. Without that room the acknowledgement stays due.
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
