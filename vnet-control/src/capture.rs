//! Starts and ends captures, and queries dispatchers' caches through the same observers.

use std::sync::Arc;

use super::desired::Target;
use super::engine::{Engine, EngineError, Listed};
use vnet::capture::{Options, SESSIONS_MAX, Session};
use vnet::dispatch::observers::{CacheAnswer, CacheQuestion, Observers};
use vnet::route::Flow;

impl Engine {
    /// Starts a capture at `any`, `interface NAME`, `link NAME`, or the NAME of either.
    ///
    /// # Errors
    /// Unknown or ambiguous name, or [`SESSIONS_MAX`] captures in progress.
    pub fn start_capture(&mut self, name: &str, options: Options) -> Result<Arc<Session>, EngineError> {
        let target = self.capture_target(name)?;
        self.captures.remove_ended();
        if self.captures.len() >= SESSIONS_MAX {
            return Err(EngineError::CapturesMax);
        }
        let session = Arc::new(Session::new(options, self.core.dispatchers()));
        self.captures.add(target, session.clone());
        self.core.observe(self.observers());
        tracing::info!("capture at {name} started");
        Ok(session)
    }

    /// Removes the taps of captures that have ended.
    pub fn forget_ended_captures(&mut self) {
        if self.captures.remove_ended() {
            self.core.observe(self.observers());
            tracing::info!("capture ended, {} under way", self.captures.len());
        }
    }

    fn capture_target(&self, name: &str) -> Result<Option<Target>, EngineError> {
        if name == "any" {
            return Ok(None);
        }
        let known = |target: &Target| match target {
            Target::Interface(name) => self.interfaces.contains_key(name),
            Target::Link(name) => self.links.contains_key(name),
        };
        let candidates = match name.parse::<Target>() {
            Ok(target) => vec![target],
            Err(_) => vec![Target::Interface(name.into()), Target::Link(name.into())],
        };
        let mut found = candidates.into_iter().filter(known);
        match (found.next(), found.next()) {
            (Some(target), None) => Ok(Some(target)),
            (Some(a), Some(b)) => Err(EngineError::Ambiguous(a, b)),
            (None, _) => Err(EngineError::NotFound(format!("interface or link '{name}'"), Listed::Ports)),
        }
    }

    /// The dispatchers that have `flow` in their cache, and their cached decisions. Changes neither traffic nor caches.
    pub(super) fn ask_caches(&self, flow: &Flow) -> Vec<CacheAnswer> {
        let question = Arc::new(CacheQuestion::new(*flow));
        let observers = self.observers();
        self.core.observe(Observers { question: Some(question.clone()), ..observers.clone() });
        self.core.observe(observers);
        question.answers()
    }
}
