//! Records when a guest receives (`vnet interface timeline`): one interface at a time.

use std::sync::Arc;

use vnet::dispatch::timeline::{StepTimes, Timeline};

use super::api;
use super::desired::Target;
use super::engine::{Engine, EngineError};

impl Engine {
    /// Starts to record receptions of an interface's guest, until [`Engine::end_timeline`].
    ///
    /// # Errors
    /// There is no such interface, or a recording is in progress.
    pub fn start_timeline(&mut self, name: &str) -> Result<(), EngineError> {
        let unknown = || EngineError::no(&Target::Interface(name.into()));
        let port = self.interfaces.get(name).ok_or_else(unknown)?.port;
        if self.timeline.is_some() {
            return Err(EngineError::TimelinesMax);
        }
        self.timeline = Some(Arc::new(Timeline::new(port)));
        self.core.observe(self.observers());
        Ok(())
    }

    /// Ends the recording, and returns its medians.
    pub fn end_timeline(&mut self, name: &str) -> api::Timeline {
        let timeline = self.timeline.take();
        self.core.observe(self.observers());
        let (receptions, steps) = timeline.map(|timeline| timeline.summary()).unwrap_or_default();
        let step = |StepTimes { step, count, us: (median_us, ninth_decile_us) }| api::TimelineStep {
            step: step.to_string(),
            count,
            median_us,
            ninth_decile_us,
        };
        api::Timeline { interface: name.into(), receptions, steps: steps.into_iter().map(step).collect() }
    }
}
