//! An object of the store: the record stored there, and the settled record that is in force.
//!
//! The two differ on purpose. Anyone with write access can write to the store, and an object's owner repairs foreign writes
//! within milliseconds. So a new record settles at once, but a *change* of a settled record must stand for [`HOLD_MS`] first. A
//! record that only vanishes (lease expired, tree deleted) stays in force: only a withdrawal removes it.

use std::sync::Arc;

use super::record::Record;
use vnet::route::{FREEZE_MS, MOVES_MAX, MOVES_WINDOW_MS};

/// How long a change must stand before it settles, in milliseconds. The owner contradicts it at once, or after two readings of
/// its guest's counters (every 50 ms) prove that the guest still sends; a move may take 200 ms.
pub const HOLD_MS: u64 = 150;
/// Largest increment of a sequence number in one claim: more than the moves that happen while a host is away, but far too few for
/// a forged claim to exhaust the number space.
pub const SEQUENCE_STEP_MAX: u32 = 1000;

/// The record in the store.
#[derive(Clone, Debug)]
pub(super) struct Stored<R> {
    /// `None` if it is malformed.
    pub record: Option<Arc<R>>,
    /// Revision of its last write.
    pub revision: i64,
    /// Lease of the key; 0 for none.
    pub lease: i64,
    /// The record belongs to this host's history: this host wrote it, or found it at start.
    pub own: bool,
}

/// Move counter: [`MOVES_MAX`] moves within [`MOVES_WINDOW_MS`] freeze the object (RFC 7432, section 15.1).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moves {
    count: u8,
    first_ms: u64,
    frozen_until_ms: u64,
}

impl Moves {
    /// Counts a move; true if that freezes the object.
    pub fn count(&mut self, now_ms: u64) -> bool {
        if self.count == 0 || now_ms >= self.first_ms + MOVES_WINDOW_MS {
            (self.count, self.first_ms) = (0, now_ms);
        }
        self.count += 1;
        let freezes = self.count == MOVES_MAX;
        if freezes {
            (self.count, self.frozen_until_ms) = (0, now_ms + FREEZE_MS);
        }
        freezes
    }

    pub fn is_frozen(&self, now_ms: u64) -> bool {
        now_ms < self.frozen_until_ms
    }
}

/// The decision about a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The record does not differ in any relevant way.
    Unchanged,
    /// The record is held back until it has stood for [`HOLD_MS`].
    Waits,
    /// The record has settled.
    Settled,
    /// The record is refused: it claims the station for another host without the next sequence number.
    Refused,
    /// The record is ignored while the object is frozen.
    Frozen,
    /// The record is ignored, and its move freezes the object.
    Freezes,
}

/// An object of the store.
#[derive(Clone, Debug)]
pub(super) struct Entry<R> {
    /// The record in force.
    pub settled: Option<Arc<R>>,
    /// Revision at which the settled record was written: if two hosts publish the same address, the older record wins.
    pub settled_revision: i64,
    /// The record that is held back, and the time at which it appeared.
    pub pending: Option<(Arc<R>, u64)>,
    pub stored: Option<Stored<R>>,
    /// Time at which the record in force vanished from the store.
    pub silent_since_ms: Option<u64>,
    /// Number of snapshots since then that did not contain it.
    pub missed: u8,
    /// Number of the last snapshot that contained it.
    pub reading: u32,
    pub moves: Moves,
    /// The record had vanished from the store, and with it the sequence number that the next claim builds on.
    pub orphaned: bool,
    /// The record is from this host's previous run, and was not seen in the store since.
    pub restored: bool,
    /// Time of the next timer.
    pub timer_ms: Option<u64>,
}

/// True if `new` follows `old` by at most `step` (serial number arithmetic, RFC 1982).
pub(super) fn is_next(old: u32, new: u32, step: u32) -> bool {
    (1..=step).contains(&new.wrapping_sub(old))
}

impl<R> Default for Entry<R> {
    fn default() -> Entry<R> {
        Entry {
            settled: None,
            settled_revision: 0,
            pending: None,
            stored: None,
            silent_since_ms: None,
            missed: 0,
            reading: 0,
            moves: Moves::default(),
            orphaned: false,
            restored: false,
            timer_ms: None,
        }
    }
}

impl<R: Record> Entry<R> {
    /// The record in force, unless it is a withdrawal.
    pub fn in_force(&self) -> Option<&Arc<R>> {
        self.settled.as_ref().filter(|record| !record.withdrawn())
    }

    /// True if the known revision is newer: a snapshot may overtake watch events.
    pub fn is_newer(&self, revision: i64) -> bool {
        self.stored.as_ref().is_some_and(|stored| stored.revision > revision)
    }

    /// Stores a record; [`Entry::consider`] decides about it.
    pub fn store(&mut self, record: Option<R>, revision: i64, lease: i64, own: bool) {
        // The same write again, delivered by a snapshot.
        let again = self.stored.as_ref().is_some_and(|stored| stored.own && stored.revision == revision);
        self.stored = Some(Stored { record: record.map(Arc::new), revision, lease, own: own || again });
        (self.silent_since_ms, self.missed, self.restored) = (None, 0, false);
    }

    /// Handles a deletion from the store. True if no record is in force, so the entry can be dropped.
    pub fn vanish(&mut self, now_ms: u64) -> bool {
        (self.stored, self.pending, self.orphaned) = (None, None, true);
        self.silent_since_ms.get_or_insert(now_ms);
        self.in_force().is_none()
    }

    /// Decides about the stored record. `protected`: the settled record may only be replaced after a delay. `away`: the store was
    /// unreachable, so moves may have been missed and sequence numbers lost.
    pub fn consider(&mut self, protected: bool, away: bool, now_ms: u64) -> Outcome {
        let Some(Stored { record: Some(record), revision, .. }) = self.stored.clone() else {
            self.pending = None;
            return Outcome::Unchanged;
        };
        let Some(settled) = self.in_force().filter(|_| protected).cloned() else {
            let same = self.settled.as_ref().is_some_and(|settled| settled.same_effect(&record));
            self.settle(record, revision);
            return if same { Outcome::Unchanged } else { Outcome::Settled };
        };
        if settled.same_effect(&record) {
            self.settled = Some(record);
            (self.pending, self.orphaned) = (None, false);
            return Outcome::Unchanged;
        }
        if self.moves.is_frozen(now_ms) {
            self.pending = None;
            return Outcome::Frozen;
        }
        if !settled.same_place(&record) {
            let numbers = settled.sequence().zip(record.sequence());
            let next = |(old, new)| is_next(old, new, SEQUENCE_STEP_MAX);
            let newer = away || self.orphaned || numbers.is_none_or(next);
            if !newer {
                self.pending = None;
                return Outcome::Refused;
            }
            let known = self.pending.as_ref().is_some_and(|(pending, _)| pending.same_place(&record));
            if !known && self.moves.count(now_ms) {
                self.pending = None;
                return Outcome::Freezes;
            }
        }
        let since_ms = match &self.pending {
            Some((pending, since_ms)) if pending.same_effect(&record) => *since_ms,
            _ => now_ms,
        };
        self.pending = Some((record, since_ms));
        Outcome::Waits
    }

    fn settle(&mut self, record: Arc<R>, revision: i64) {
        if !self.settled.as_ref().is_some_and(|settled| settled.same_place(&record)) {
            self.settled_revision = revision;
        }
        self.settled = Some(record);
        (self.pending, self.orphaned) = (None, false);
    }

    /// Settles a record that has been held back long enough; true if there was one.
    pub fn mature(&mut self, now_ms: u64) -> bool {
        let is_due = self.pending.as_ref().is_some_and(|(_, since_ms)| since_ms + HOLD_MS <= now_ms);
        is_due && self.hasten()
    }

    /// Settles the record that is held back; true if there was one.
    pub fn hasten(&mut self) -> bool {
        let Some((record, _)) = self.pending.take() else { return false };
        let revision = self.stored.as_ref().map_or(0, |stored| stored.revision);
        self.settle(record, revision);
        true
    }

    /// Time of the entry's next timer.
    pub fn next_ms(&self, now_ms: u64) -> Option<u64> {
        let thaws = Some(self.moves.frozen_until_ms).filter(|until| *until > now_ms);
        self.pending.as_ref().map(|(_, since)| since + HOLD_MS).or(thaws)
    }
}
