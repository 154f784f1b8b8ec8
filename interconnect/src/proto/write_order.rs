//! Order in which the target's application learns of large writes.
//!
//! The target pulls the bytes of several writes at once, and a later one may end first. The arrival of a write with immediate data is
//! reported once all writes that the peer offered to the endpoint before have ended.

use std::collections::{BTreeMap, BTreeSet};

/// Immediate data of a peer's write, which the application gets as an arrival.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WriteNotice {
    /// Origin endpoint.
    pub(super) from: u16,
    pub(super) data: u64,
    pub(super) len: u64,
}

/// Large writes of one peer to one endpoint.
#[derive(Default)]
pub(super) struct WriteOrder {
    next: u64,
    /// Places of writes under way. A channel has at most `WRITES_OFFERED_MAX`.
    writing: BTreeSet<u64>,
    /// Arrivals that wait for the end of a write in `writing`. Each holds a credit, so there are at most `CREDITS`.
    waiting: BTreeMap<u64, WriteNotice>,
}

impl WriteOrder {
    /// A write begins. Returns its place.
    pub(super) fn begin(&mut self) -> u64 {
        self.next += 1;
        self.writing.insert(self.next);
        self.next
    }

    /// The write at this place has ended, with or without an arrival to report.
    pub(super) fn end(&mut self, place: u64, notice: Option<WriteNotice>) {
        self.writing.remove(&place);
        if let Some(notice) = notice {
            self.waiting.insert(place, notice);
        }
    }

    /// Takes the first arrival, even if earlier writes are under way.
    pub(super) fn take_any(&mut self) -> Option<WriteNotice> {
        self.waiting.pop_first().map(|(_, notice)| notice)
    }

    /// Takes the first arrival if no earlier write is under way.
    pub(super) fn take_ready(&mut self) -> Option<WriteNotice> {
        let first = self.waiting.first_entry()?;
        let is_next = self.writing.first().is_none_or(|earlier| earlier > first.key());
        is_next.then(|| first.remove())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(data: u64) -> WriteNotice {
        WriteNotice { from: 0, data, len: 1 }
    }

    #[test]
    fn an_arrival_waits_for_all_earlier_writes() {
        let mut order = WriteOrder::default();
        let places: Vec<u64> = (0..4).map(|_| order.begin()).collect();
        order.end(places[1], Some(notice(1)));
        order.end(places[3], Some(notice(3)));
        assert_eq!(order.take_ready(), None);
        // The first one has no immediate data, or has failed.
        order.end(places[0], None);
        assert_eq!(order.take_ready(), Some(notice(1)));
        assert_eq!(order.take_ready(), None);
        order.end(places[2], Some(notice(2)));
        assert_eq!(
            (order.take_ready(), order.take_ready(), order.take_ready()),
            (Some(notice(2)), Some(notice(3)), None)
        );
    }
}
