//! Captures, as control starts and ends them: who is captured where, and what dispatchers are told of it.

use std::sync::Arc;

use super::desired::Target;
use super::engine::{Engine, EngineError};
use vnet::capture::{Options, SESSIONS_MAX, Session, Tap};
use vnet::dispatch::observe::{CacheAnswer, CacheQuestion, Observers};
use vnet::frame::PortId;
use vnet::route::Flow;

/// A capture under way.
pub(super) struct Capture {
    /// Where; everywhere when `None`. A place that goes and comes again under its name is looked at again.
    target: Option<Target>,
    session: Arc<Session>,
}

impl Engine {
    /// Starts a capture at `place`: `any`, `interface NAME`, `link NAME`, or the NAME of either.
    ///
    /// # Errors
    /// Nothing of that name, something of each kind, or [`SESSIONS_MAX`] captures under way.
    pub fn start_capture(&mut self, place: &str, options: Options) -> Result<Arc<Session>, EngineError> {
        let target = self.capture_target(place)?;
        self.forget_ended();
        if self.captures.len() >= SESSIONS_MAX {
            return Err(EngineError::CapturesMax);
        }
        let session = Arc::new(Session::new(options, self.core.dispatchers()));
        self.captures.push(Capture { target, session: session.clone() });
        self.core.observe(self.observers());
        tracing::info!("capture at {place} starts");
        Ok(session)
    }

    /// Has the dispatchers forget captures that ended.
    pub fn forget_ended_captures(&mut self) {
        if self.forget_ended() {
            self.core.observe(self.observers());
            tracing::info!("capture ended, {} under way", self.captures.len());
        }
    }

    fn forget_ended(&mut self) -> bool {
        let before = self.captures.len();
        self.captures.retain(|capture| !capture.session.is_ended());
        self.captures.len() < before
    }

    fn capture_target(&self, place: &str) -> Result<Option<Target>, EngineError> {
        if place == "any" {
            return Ok(None);
        }
        let known = |target: &Target| match target {
            Target::Interface(name) => self.interfaces.contains_key(name),
            Target::Link(name) => self.links.contains_key(name),
        };
        let candidates = match place.parse::<Target>() {
            Ok(target) => vec![target],
            Err(_) => vec![Target::Interface(place.into()), Target::Link(place.into())],
        };
        let mut found = candidates.into_iter().filter(known);
        match (found.next(), found.next()) {
            (Some(target), None) => Ok(Some(target)),
            (Some(a), Some(b)) => Err(EngineError::Ambiguous(a, b)),
            (None, _) => Err(EngineError::NotFound(format!("interface or link '{place}'"))),
        }
    }

    /// Who looks at the ports as they are.
    pub(super) fn observers(&self) -> Observers {
        let places: Vec<(PortId, Target)> = self.places().into_iter().collect();
        let tap = |capture: &Capture| {
            let wanted = |target: &Target| capture.target.as_ref().is_none_or(|wanted| wanted == target);
            let mut seen: Vec<(String, PortId)> = places
                .iter()
                .filter(|(_, target)| wanted(target))
                .map(|(port, target)| (target.to_string(), *port))
                .collect();
            // Names are numbered in their own order, not in that of a hash.
            seen.sort();
            Tap::new(capture.session.clone(), seen.iter().map(|(name, port)| (*port, name.as_str())))
        };
        Observers { taps: self.captures.iter().map(tap).collect(), question: None }
    }

    /// Which dispatchers' caches decide about `flow`, and how. Disturbs neither traffic nor caches.
    pub(super) fn ask_caches(&self, flow: &Flow) -> Vec<CacheAnswer> {
        let question = Arc::new(CacheQuestion::new(*flow));
        let observers = self.observers();
        self.core.observe(Observers { question: Some(question.clone()), ..observers.clone() });
        self.core.observe(observers);
        question.answers()
    }
}
