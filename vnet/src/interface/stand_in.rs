//! A placeholder for an interface that cannot be opened because its device, namespace or socket folder is missing. It has a port
//! and counters, drops frames sent to it, and reports the missing part, until control opens the real interface in its place.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{Handed, Interface, State};
use crate::frame::{Batch, DropSink, Selection};
use crate::poll::Waker;
use crate::source::{Source, Taken};
use crate::stats::{DropReason, PortStats};

/// Stands in for an interface that could not be opened.
pub struct Absent {
    reason: Mutex<String>,
    stats: Arc<PortStats>,
}

impl Absent {
    /// A placeholder for an interface that is down for `reason`; `stats` are that interface's counters.
    pub fn new(reason: String, stats: Arc<PortStats>) -> Absent {
        Absent { reason: Mutex::new(reason), stats }
    }

    /// Replaces the reason.
    pub fn set_reason(&self, reason: String) {
        *self.reason.lock() = reason;
    }
}

impl Interface for Absent {
    fn queues(&self) -> usize {
        1
    }

    fn source(self: Arc<Self>, _queue: usize) -> Box<dyn Source> {
        Box::new(Nothing)
    }

    fn deliver(&self, _queue: usize, frames: Selection<'_>, drops: &mut DropSink) {
        drops.dropped_all(&self.stats, DropReason::NotReady, frames.which);
    }

    fn state(&self) -> State {
        State::Down(self.reason.lock().clone())
    }

    fn stop(&self) {}

    fn hand_over(&self) -> Result<Handed<'_>, String> {
        Ok(Handed::default())
    }
}

/// A source without frames.
struct Nothing;

impl Source for Nothing {
    // SAFETY: adds no frame, so nothing must stay readable.
    unsafe fn fill(&mut self, _batch: &mut Batch, _drops: &mut DropSink, _now_ms: u64) -> Taken {
        Taken { drained: true, ..Taken::default() }
    }

    fn watch(&mut self, _waker: Waker) {}

    fn unwatch(&mut self) {}

    fn rest(&mut self) -> bool {
        true
    }
}
