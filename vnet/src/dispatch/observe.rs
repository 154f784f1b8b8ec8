//! What a dispatcher does more for those who look: captures, and questions about its cache.
//!
//! A capture sees a frame where it enters and at each port it is given to. What becomes of a frame at a destination is known
//! to that port alone, so a frame that somebody looks at is given by itself, and the notes of `stats::watch` tell whether it was
//! dropped there and why; those that nobody looks at still go together. The order of frames stays as it was.

use std::sync::{Arc, Mutex, PoisonError};

use super::forward::Forwarder;
use super::setup::Setup;
use crate::capture::{self, Direction, Dropped, Record, Tap};
use crate::frame::{Batch, PortId};
use crate::route::{Flow, Router};
use crate::stats::{DropReason, watch};

/// A question to every dispatcher: does your cache decide about this flow? Answered when the setup it came with is adopted.
pub struct CacheQuestion {
    flow: Flow,
    answers: Mutex<Vec<CacheAnswer>>,
}

/// What one dispatcher's cache says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheAnswer {
    /// The dispatcher.
    pub dispatcher: usize,
    /// Where the flow goes by a line of its cache.
    pub outcome: Result<Vec<PortId>, DropReason>,
}

impl CacheQuestion {
    /// Asks about `flow`.
    pub fn new(flow: Flow) -> CacheQuestion {
        CacheQuestion { flow, answers: Mutex::default() }
    }

    /// The answers of those dispatchers whose caches know the flow.
    pub fn answers(&self) -> Vec<CacheAnswer> {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        answers.sort_by_key(|answer| answer.dispatcher);
        answers
    }

    pub(super) fn ask(&self, dispatcher: usize, router: &Router, now_ms: u64) {
        if let Some(outcome) = router.cached(&self.flow, now_ms) {
            let answer = CacheAnswer { dispatcher, outcome };
            self.answers.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
        }
    }
}

/// Who looks.
#[derive(Clone, Default)]
pub struct Observers {
    /// Captures.
    pub taps: Vec<Tap>,
    /// A question for the caches.
    pub question: Option<Arc<CacheQuestion>>,
}

/// Records what was refused before it became a frame, since the last call.
pub(super) fn refusals(setup: &Setup, dispatcher: usize) {
    let at = capture::now();
    let lost = watch::take(|note| {
        if !note.refused {
            return;
        }
        let Some(port) = setup.port_of_stats(note.port) else { return };
        for tap in &setup.observers.taps {
            let Some(place) = tap.place(port) else { continue };
            let record = Record {
                at,
                place,
                direction: Direction::In,
                network: None,
                dropped: Some(Dropped { reason: note.reason, pieces: 1 }),
                segment: None,
                partial_checksum: false,
                len: u32::try_from(note.bytes).unwrap_or(u32::MAX),
                kept: 0,
            };
            // Nothing is known of its addresses, so only a capture of all frames is about it.
            if tap.session.options().filter == capture::Filter::default() {
                tap.session.lane(dispatcher).push_empty(record);
            }
        }
    });
    if lost > 0 {
        setup.observers.taps.iter().for_each(|tap| tap.session.lane(dispatcher).miss(lost));
    }
}

/// What was dropped on this thread since the last call of [`watch::take`].
pub(super) fn drops() -> Option<Dropped> {
    let mut dropped: Option<Dropped> = None;
    let lost = watch::take(|note| {
        let pieces = note.frames + dropped.map_or(0, |dropped| dropped.pieces);
        dropped = Some(Dropped { reason: note.reason, pieces });
    });
    if let Some(dropped) = &mut dropped {
        dropped.pieces += lost;
    }
    dropped
}

impl Forwarder {
    /// What [`Forwarder::run`] does, for those who look.
    #[cold]
    pub(super) fn run_observed(&mut self, batch: &Batch) {
        let setup = self.setup.clone();
        let taps = &setup.observers.taps;
        refusals(&setup, self.dispatcher);
        self.decide(batch);
        // Its drops are known frame by frame.
        watch::take(|_| ());
        for tap in taps {
            self.record_entries(tap, batch);
        }
        while let Some(port) = self.touched.pop() {
            let list = self.take_list(port);
            if taps.iter().any(|tap| tap.place(port).is_some()) {
                self.deliver_observed(port, batch, &list, taps);
            } else {
                self.deliver(port, batch, &list);
            }
            self.return_list(port, list);
        }
    }

    fn record_entries(&self, tap: &Tap, batch: &Batch) {
        let at = capture::now();
        let options = tap.session.options();
        let mut lane = tap.session.lane(self.dispatcher);
        let mut dropped = self.undelivered.iter().peekable();
        for (index, frame) in batch.frames().iter().enumerate() {
            let reason = dropped.next_if(|(at, _)| usize::from(*at) == index).map(|(_, reason)| *reason);
            let Some(place) = tap.place(frame.from) else { continue };
            if (options.drops_only && reason.is_none()) || !tap.wants(batch, frame, Direction::In) {
                continue;
            }
            let dropped = reason.map(|reason| Dropped { reason, pieces: 1 });
            lane.push(capture::record(at, place, Direction::In, frame, dropped), batch, frame, options.snap);
        }
    }

    /// Delivers, each frame that somebody looks at by itself.
    fn deliver_observed(&mut self, port: PortId, batch: &Batch, list: &[u16], taps: &[Tap]) {
        let looked_at = |index: u16| {
            let frame = batch.frame(index.into());
            taps.iter().any(|tap| tap.place(port).is_some() && tap.wants(batch, frame, Direction::Out))
        };
        let mut rest = list;
        while let Some(&first) = rest.first() {
            let unseen = rest.iter().take_while(|index| !looked_at(**index)).count();
            if unseen > 0 {
                self.deliver(port, batch, &rest[..unseen]);
                rest = &rest[unseen..];
                continue;
            }
            watch::take(|_| ());
            self.deliver(port, batch, &rest[..1]);
            rest = &rest[1..];
            self.record_exit(port, batch, first, drops(), taps);
        }
    }

    pub(super) fn record_exit(
        &self,
        port: PortId,
        batch: &Batch,
        index: u16,
        dropped: Option<Dropped>,
        taps: &[Tap],
    ) {
        let (at, frame) = (capture::now(), batch.frame(index.into()));
        for tap in taps {
            let Some(place) = tap.place(port) else { continue };
            let options = tap.session.options();
            if (options.drops_only && dropped.is_none()) || !tap.wants(batch, frame, Direction::Out) {
                continue;
            }
            let record = capture::record(at, place, Direction::Out, frame, dropped);
            tap.session.lane(self.dispatcher).push(record, batch, frame, options.snap);
        }
    }
}
