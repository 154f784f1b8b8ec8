//! One object of the store as this host knows it: what the store says of it, and what is in force.
//!
//! The two differ on purpose. Anybody may write to the store; the host that an object belongs to watches, and puts right
//! within milliseconds what others wrote. So what is new comes into force at once, but what *changes* something that is in
//! force has to stand for [`HOLD_MS`] first. And what merely vanished from the store (a lease ran out, somebody deleted the
//! tree) stays in force: only a record can withdraw one.

use std::sync::Arc;

use super::record::Record;
use vnet::route::{FREEZE_MS, MOVES_MAX, MOVES_WINDOW_MS};

/// Milliseconds for which a change has to stand before it comes into force: an owner contradicts at once, or when its
/// guest's counters were read twice (every 50 ms) and show that it still speaks; a move may take 200 ms.
pub const HOLD_MS: u64 = 150;
/// How far one claim may raise a sequence number: more than a station moves while a host is away, far less than would let
/// a forged claim exhaust the numbers.
pub const SEQUENCE_STEP_MAX: u32 = 1000;

/// What the store says.
#[derive(Clone, Debug)]
pub(super) struct Stored<R> {
    /// `None` when it is not a sound record.
    pub record: Option<Arc<R>>,
    /// The store's revision when it was written.
    pub revision: i64,
    /// The lease it is under; 0: none.
    pub lease: i64,
}

/// Counts moves: [`MOVES_MAX`] within [`MOVES_WINDOW_MS`] freeze the object (RFC 7432, section 15.1).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moves {
    count: u8,
    first_ms: u64,
    frozen_until_ms: u64,
}

impl Moves {
    /// Counts one; true when that freezes the object.
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

/// What became of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Nothing that matters differs.
    Unchanged,
    /// It has to stand for a while.
    Waits,
    /// It is in force.
    Settled,
    /// It claims another place with a sequence number that is not newer, or newer beyond belief.
    Refused,
    /// The object moved too often and stays where it is.
    Frozen,
    /// The same, from now on.
    Freezes,
}

/// One object.
#[derive(Clone, Debug)]
pub(super) struct Entry<R> {
    /// What is in force.
    pub settled: Option<Arc<R>>,
    /// The store's revision when what is in force was written: of two hosts at one address the older one is the right one.
    pub settled_revision: i64,
    /// What is about to be, and since when it stands.
    pub pending: Option<(Arc<R>, u64)>,
    pub stored: Option<Stored<R>>,
    /// Since when the store does not have it, although it is in force.
    pub silent_since_ms: Option<u64>,
    /// How many whole readings of the store have missed it since.
    pub missed: u8,
    /// The reading in which it was seen last.
    pub reading: u32,
    pub moves: Moves,
    /// It had vanished from the store, and with it the sequence number that the next claim would have gone by.
    pub orphaned: bool,
    /// When it has to be looked at again.
    pub timer_ms: Option<u64>,
}

/// True when `new` comes after `old`, by at most `step` (serial number arithmetic, RFC 1982).
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
            timer_ms: None,
        }
    }
}

impl<R: Record> Entry<R> {
    /// What is in force, unless that is a withdrawal.
    pub fn in_force(&self) -> Option<&Arc<R>> {
        self.settled.as_ref().filter(|record| !record.withdrawn())
    }

    /// True when what is known of the store is newer: a reading overtakes news that are on their way.
    pub fn is_newer(&self, revision: i64) -> bool {
        self.stored.as_ref().is_some_and(|stored| stored.revision > revision)
    }

    /// Notes what the store says; [`Entry::consider`] decides about it.
    pub fn store(&mut self, record: Option<R>, revision: i64, lease: i64) {
        self.stored = Some(Stored { record: record.map(Arc::new), revision, lease });
        (self.silent_since_ms, self.missed) = (None, 0);
    }

    /// The store has it no more. True when nothing remains to be known of it.
    pub fn vanish(&mut self, now_ms: u64) -> bool {
        (self.stored, self.pending, self.orphaned) = (None, None, true);
        self.silent_since_ms.get_or_insert(now_ms);
        self.in_force().is_none()
    }

    /// Decides about what the store says. `protected`: what is in force is worth holding on to. `away`: this host was, so
    /// that any number of moves may have been missed, and the store may have lost the numbers meanwhile.
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

    /// Brings into force what has stood long enough; true when there was something.
    pub fn mature(&mut self, now_ms: u64) -> bool {
        match self.pending.take() {
            Some((record, since_ms)) if since_ms + HOLD_MS <= now_ms => {
                let revision = self.stored.as_ref().map_or(0, |stored| stored.revision);
                self.settle(record, revision);
                true
            }
            pending => {
                self.pending = pending;
                false
            }
        }
    }

    /// When it has to be looked at again.
    pub fn next_ms(&self, now_ms: u64) -> Option<u64> {
        let thaws = Some(self.moves.frozen_until_ms).filter(|until| *until > now_ms);
        self.pending.as_ref().map(|(_, since)| since + HOLD_MS).or(thaws)
    }
}
