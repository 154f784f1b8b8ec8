//! Counters of sealing.

use std::ops::AddAssign;

/// Counters of sealing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SealCounters {
    /// Sessions that began.
    pub sessions: u64,
    /// Packets that were sealed.
    pub packets_out: u64,
    /// Packets that were opened.
    pub packets_in: u64,
    /// Packets in clear text from peers behind sealed links, which were dropped.
    pub clear: u64,
    /// Packets with a wrong tag.
    pub forged: u64,
    /// Packets that were opened before, or are too old.
    pub replayed: u64,
    /// Parts of packets that were dropped: other parts had not arrived, a duplicate, or the wrong length. Complete packets in parts count as
    /// one packet each under the other names.
    pub incomplete: u64,
    /// Packets without a key here.
    pub unknown: u64,
    /// Packets that were not sent, because there were no keys.
    pub unsent: u64,
}

impl SealCounters {
    /// Packets and parts that were dropped, each under one reason.
    pub fn drops(&self) -> [(&'static str, u64); 6] {
        let Self { clear, forged, replayed, incomplete, unknown, unsent, .. } = *self;
        [
            ("clear", clear),
            ("forged", forged),
            ("replayed", replayed),
            ("incomplete", incomplete),
            ("unknown", unknown),
            ("unsent", unsent),
        ]
    }
}

impl AddAssign for SealCounters {
    fn add_assign(&mut self, other: Self) {
        self.sessions += other.sessions;
        self.packets_out += other.packets_out;
        self.packets_in += other.packets_in;
        self.clear += other.clear;
        self.forged += other.forged;
        self.replayed += other.replayed;
        self.incomplete += other.incomplete;
        self.unknown += other.unknown;
        self.unsent += other.unsent;
    }
}
