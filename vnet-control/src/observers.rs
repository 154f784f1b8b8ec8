//! Captures in progress, and the taps that dispatchers need for them.

use std::collections::HashMap;
use std::sync::Arc;

use super::desired::Target;
use vnet::capture::{Session, Tap};
use vnet::dispatch::observers::Observers;
use vnet::frame::PortId;

/// A capture in progress.
struct Capture {
    /// The captured port; `None` captures all ports. A port that is removed and added again is captured again.
    target: Option<Target>,
    session: Arc<Session>,
}

/// Captures in progress.
#[derive(Default)]
pub(super) struct Captures(Vec<Capture>);

impl Captures {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn add(&mut self, target: Option<Target>, session: Arc<Session>) {
        self.0.push(Capture { target, session });
    }

    /// Removes captures that have ended; true if there were any.
    pub fn remove_ended(&mut self) -> bool {
        let before = self.0.len();
        self.0.retain(|capture| !capture.session.is_ended());
        self.0.len() < before
    }

    /// The taps on the current ports.
    pub fn observers(&self, targets: &HashMap<PortId, Target>) -> Observers {
        let tap = |capture: &Capture| {
            let wanted = |target: &Target| capture.target.as_ref().is_none_or(|wanted| wanted == target);
            let mut tapped: Vec<(String, PortId)> = targets
                .iter()
                .filter(|(_, target)| wanted(target))
                .map(|(port, target)| (target.to_string(), *port))
                .collect();
            // pcapng interfaces are numbered by name, not in hash order.
            tapped.sort();
            Tap::new(capture.session.clone(), tapped.iter().map(|(name, port)| (*port, name.as_str())))
        };
        Observers { taps: self.0.iter().map(tap).collect(), ..Observers::default() }
    }
}
