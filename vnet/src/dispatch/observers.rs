//! Observers of a core: captures, and questions about dispatchers' route caches. Part of a setup.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::capture::Tap;
use crate::frame::PortId;
use crate::route::{Flow, Router};
use crate::stats::DropReason;

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

/// Who looks.
#[derive(Clone, Default)]
pub struct Observers {
    /// Captures.
    pub taps: Vec<Tap>,
    /// A question for the caches.
    pub question: Option<Arc<CacheQuestion>>,
}
