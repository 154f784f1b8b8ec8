//! Observers of a core: captures, queries of dispatchers' route caches, and a recording of a guest's receptions. Part of a setup.

use std::sync::Arc;

use parking_lot::Mutex;

use super::timeline::Timeline;
use crate::capture::Tap;
use crate::frame::PortId;
use crate::route::{Flow, Router};
use crate::stats::DropReason;

/// A query whether the route cache of any dispatcher holds a flow. A dispatcher answers when it adopts the setup.
pub struct CacheQuestion {
    flow: Flow,
    answers: Mutex<Vec<CacheAnswer>>,
}

/// One dispatcher's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheAnswer {
    /// The dispatcher's number.
    pub dispatcher: usize,
    /// The cached outcome for the flow.
    pub outcome: Result<Vec<PortId>, DropReason>,
}

impl CacheQuestion {
    /// A query about `flow`.
    pub fn new(flow: Flow) -> CacheQuestion {
        CacheQuestion { flow, answers: Mutex::default() }
    }

    /// Answers of those dispatchers whose caches hold the flow.
    pub fn answers(&self) -> Vec<CacheAnswer> {
        let mut answers = self.answers.lock().clone();
        answers.sort_by_key(|answer| answer.dispatcher);
        answers
    }

    pub(super) fn ask(&self, dispatcher: usize, router: &Router, now_ms: u64) {
        if let Some(outcome) = router.cached(&self.flow, now_ms) {
            let answer = CacheAnswer { dispatcher, outcome };
            self.answers.lock().push(answer);
        }
    }
}

/// Active observers.
#[derive(Clone, Default)]
pub struct Observers {
    /// Captures.
    pub taps: Vec<Tap>,
    /// A query of the route caches.
    pub question: Option<Arc<CacheQuestion>>,
    /// A recording of when a guest receives.
    pub timeline: Option<Arc<Timeline>>,
}
