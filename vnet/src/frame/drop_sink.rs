//! Accounting of dropped frames: counted per port, and recorded per frame while a capture runs.
//!
//! Counters hold how many frames were dropped; a capture also needs to know which ones. Each dispatcher owns one [`DropSink`] and
//! passes it along with every batch. Code that drops a frame reports it to the sink, with the frame's index in the batch. Without
//! a capture this costs one untaken branch per drop, and nothing per delivered frame.

use super::PortId;
use crate::stats::{DropReason, PortStats};

/// Maximum number of recorded drops, and of recorded refusals: one per frame of a batch, as many refused frames, and the segments
/// of one super-frame.
const NOTES_MAX: usize = 256;

/// A frame of the current batch that was dropped, whole or in part (some of the segments it was cut into).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DroppedFrame {
    /// Index in the batch.
    pub frame: u16,
    /// Reason that counts the drop.
    pub reason: DropReason,
    /// Segments dropped; 1 for a frame that was not cut.
    pub pieces: u64,
}

/// Bytes that arrived at a port and were refused before they became a frame of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The port they arrived at.
    pub port: PortId,
    /// Reason that counts the refusal.
    pub reason: DropReason,
    /// Length in bytes; 0 when unknown.
    pub bytes: u64,
}

/// Counts dropped frames and, during a capture, records which frames they were.
#[derive(Debug, Default)]
pub struct DropSink {
    watching: bool,
    drops: Vec<DroppedFrame>,
    refusals: Vec<Refusal>,
    /// Dropped frames not recorded because the sink was full.
    missed: u64,
}

impl DropSink {
    /// A sink that counts drops and records nothing.
    pub fn new() -> DropSink {
        DropSink::default()
    }

    /// Starts or stops recording. Memory is allocated here, never while frames flow.
    pub fn watch(&mut self, on: bool) {
        self.watching = on;
        if on {
            self.drops.reserve(NOTES_MAX);
            self.refusals.reserve(NOTES_MAX);
        } else {
            (self.drops, self.refusals, self.missed) = (Vec::new(), Vec::new(), 0);
        }
    }

    /// Counts one dropped frame of the batch, or `pieces` dropped segments of it, in `stats`.
    #[inline]
    pub fn dropped(&mut self, stats: &PortStats, reason: DropReason, frame: u16, pieces: u64) {
        stats.drop_frames(reason, pieces);
        if self.watching && pieces != 0 {
            self.note(DroppedFrame { frame, reason, pieces });
        }
    }

    /// Counts all frames `which` of the batch as dropped in `stats`.
    pub fn dropped_all(&mut self, stats: &PortStats, reason: DropReason, which: &[u16]) {
        stats.drop_frames(reason, which.len() as u64);
        if self.watching {
            which.iter().for_each(|&frame| self.note(DroppedFrame { frame, reason, pieces: 1 }));
        }
    }

    /// Counts a frame of `bytes` bytes that is refused on entry, both as received and as dropped, in `stats`, the counters of
    /// `port`.
    #[cold]
    pub fn refused(&mut self, stats: &PortStats, port: PortId, reason: DropReason, bytes: u64) {
        stats.refuse(reason, bytes);
        self.note_refusal(Refusal { port, reason, bytes });
    }

    /// Like [`DropSink::refused`], for a frame that is already counted as received and leaves the batch before it is forwarded.
    #[cold]
    pub fn withdrawn(&mut self, stats: &PortStats, port: PortId, reason: DropReason, bytes: u64) {
        stats.drop_frames(reason, 1);
        self.note_refusal(Refusal { port, reason, bytes });
    }

    fn note_refusal(&mut self, refusal: Refusal) {
        if self.watching {
            match self.refusals.len() < NOTES_MAX {
                true => self.refusals.push(refusal),
                false => self.missed += 1,
            }
        }
    }

    #[cold]
    fn note(&mut self, drop: DroppedFrame) {
        match self.drops.len() < NOTES_MAX {
            true => self.drops.push(drop),
            false => self.missed += drop.pieces,
        }
    }

    /// Drops of frame `frame` recorded since [`DropSink::clear`]: the last reason and the sum of dropped pieces. `None` when the
    /// frame was delivered.
    pub fn of(&self, frame: u16) -> Option<DroppedFrame> {
        let mut found: Option<DroppedFrame> = None;
        for drop in self.drops.iter().filter(|drop| drop.frame == frame) {
            let before = found.map_or(0, |found| found.pieces);
            found = Some(DroppedFrame { pieces: before + drop.pieces, ..*drop });
        }
        found
    }

    /// Clears recorded drops, but keeps refusals.
    pub fn clear(&mut self) {
        self.drops.clear();
    }

    /// Calls `each` with every refusal since the last call, in order. Returns how many refusals the sink had no space to record.
    pub fn take_refusals(&mut self, mut each: impl FnMut(Refusal)) -> u64 {
        self.refusals.drain(..).for_each(&mut each);
        std::mem::take(&mut self.missed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_taken_only_while_watching_and_are_bounded() {
        let (stats, mut sink) = (PortStats::default(), DropSink::new());
        sink.dropped(&stats, DropReason::NoRoute, 0, 1);
        assert_eq!((sink.of(0), stats.drops(DropReason::NoRoute)), (None, 1));
        sink.watch(true);
        sink.dropped(&stats, DropReason::NoBuffer, 3, 2);
        sink.dropped(&stats, DropReason::NoBuffer, 3, 0);
        sink.dropped(&stats, DropReason::SendFailed, 3, 1);
        sink.dropped_all(&stats, DropReason::NotReady, &[4, 7]);
        assert_eq!(sink.of(3), Some(DroppedFrame { frame: 3, reason: DropReason::SendFailed, pieces: 3 }));
        assert_eq!(sink.of(7), Some(DroppedFrame { frame: 7, reason: DropReason::NotReady, pieces: 1 }));
        assert_eq!(sink.of(5), None);
        sink.clear();
        assert_eq!(sink.of(3), None);
        (0..NOTES_MAX + 5).for_each(|_| sink.refused(&stats, PortId(2), DropReason::BadChain, 99));
        let mut seen = vec![];
        assert_eq!(sink.take_refusals(|refusal| seen.push(refusal)), 5);
        assert_eq!(seen.len(), NOTES_MAX);
        assert_eq!(seen[0], Refusal { port: PortId(2), reason: DropReason::BadChain, bytes: 99 });
        assert_eq!(stats.drops(DropReason::BadChain), NOTES_MAX as u64 + 5);
        sink.watch(false);
        assert_eq!(sink.take_refusals(|_| panic!("forgotten")), 0);
    }
}
