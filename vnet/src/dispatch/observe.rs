//! Extra work of a dispatcher for observers: captures, and queries of its route cache.
//!
//! A capture records a frame where it enters and at each port it is delivered to. The [`DropSink`] records the outcome of each
//! frame by its index, so that observed frames are still delivered in batches.

use super::forward::Forwarder;
use super::setup::Setup;
use crate::capture::{self, Direction, Dropped, Record, Tap};
use crate::frame::{Batch, DropSink, PortId, Selection};

/// Records input refused before it became a frame, since the last call.
#[cold]
pub(super) fn refusals(setup: &Setup, dispatcher: usize, drops: &mut DropSink) {
    let at = capture::now();
    let missed = drops.take_refusals(|refusal| {
        for tap in &setup.observers.taps {
            let Some(place) = tap.place(refusal.port) else { continue };
            let record = Record {
                at,
                place,
                direction: Direction::In,
                network: None,
                dropped: Some(Dropped { reason: refusal.reason, pieces: 1 }),
                segment: None,
                partial_checksum: false,
                len: u32::try_from(refusal.bytes).unwrap_or(u32::MAX),
                kept: 0,
            };
            // The addresses are unknown, so only an unfiltered capture matches.
            if tap.session.options().filter == capture::Filter::default() {
                tap.session.lane(dispatcher).push_empty(record);
            }
        }
    });
    if missed > 0 {
        setup.observers.taps.iter().for_each(|tap| tap.session.lane(dispatcher).miss(missed));
    }
}

/// The recorded drop of frame `frame` since the sink was cleared; `None`: the frame was not dropped.
fn fate(drops: &DropSink, frame: u16) -> Option<Dropped> {
    drops.of(frame).map(|drop| Dropped { reason: drop.reason, pieces: drop.pieces })
}

impl Forwarder {
    /// Delivers decided frames while a capture is active.
    #[cold]
    pub(super) fn deliver_observed(&mut self, batch: &Batch, drops: &mut DropSink) {
        let setup = self.setup.clone();
        refusals(&setup, self.dispatcher, drops);
        for tap in &setup.observers.taps {
            self.record_entries(tap, batch, drops);
        }
        while let Some(port) = self.touched.pop() {
            let list = self.take_list(port);
            let frames = Selection { batch, which: &list };
            drops.clear();
            self.deliver(port, frames, drops);
            self.record_exits(port, frames, drops);
            self.return_list(port, list);
        }
        drops.clear();
    }

    fn record_entries(&self, tap: &Tap, batch: &Batch, drops: &DropSink) {
        let at = capture::now();
        let options = tap.session.options();
        let mut lane = tap.session.lane(self.dispatcher);
        for (index, frame) in batch.frames().iter().enumerate() {
            let Some(place) = tap.place(frame.from) else { continue };
            let dropped = fate(drops, index as u16);
            if (options.drops_only && dropped.is_none()) || !tap.wants(batch, frame, Direction::In) {
                continue;
            }
            lane.push(capture::record(at, place, Direction::In, frame, dropped), batch, frame, options.snap);
        }
    }

    /// Records frames that were delivered to `port`, or dropped there.
    pub(super) fn record_exits(&self, port: PortId, frames: Selection<'_>, drops: &DropSink) {
        let at = capture::now();
        for tap in &self.setup.observers.taps {
            let Some(place) = tap.place(port) else { continue };
            let options = tap.session.options();
            let mut lane = tap.session.lane(self.dispatcher);
            for (index, frame) in frames.frames() {
                let dropped = fate(drops, index);
                if (options.drops_only && dropped.is_none())
                    || !tap.wants(frames.batch, frame, Direction::Out)
                {
                    continue;
                }
                let record = capture::record(at, place, Direction::Out, frame, dropped);
                lane.push(record, frames.batch, frame, options.snap);
            }
        }
    }
}
