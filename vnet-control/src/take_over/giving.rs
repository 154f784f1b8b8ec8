//! The running vnetd's part: what it hands over, and what it does if the new one fails.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use parking_lot::MutexGuard;

use super::state::{Estate, Last, Positions};
use crate::desired::*;
use crate::engine::Engine;
use crate::settings;
use vnet::dispatch::core::Still;
use vnet::frame::Batch;
use vnet::inherit;
use vnet::interface::Handed;

/// What is handed over first. Until it is dropped, no front end of a guest changes anything.
pub struct Given<'a> {
    /// Settings and positions.
    pub estate: Estate,
    /// Duplicates of all descriptors by name.
    pub descriptors: Vec<(String, OwnedFd)>,
    _turns: Vec<MutexGuard<'a, ()>>,
    _quiet: Vec<MutexGuard<'a, Batch>>,
}

impl Engine {
    /// What is handed over first. It stays valid as long as the engine is not changed.
    ///
    /// # Errors
    /// Why this host cannot be taken over, in one line.
    pub fn estate(&self) -> Result<Given<'_>, String> {
        if self.identity().is_some() {
            return Err("keys of sealed links cannot be handed over: restart vnetd instead".into());
        }
        let mut descriptors = self.core.descriptors()?;
        let (mut guests, mut turns, mut quiets) = (BTreeMap::new(), vec![], vec![]);
        for (name, live) in &self.interfaces {
            let failed = |why: String| format!("interface {name}: {why}; restart vnetd instead");
            if live.direct.is_some() || self.direct.lock().has(name) {
                return Err(failed("its own underlay port cannot be handed over".into()));
            }
            let Handed { files, guest, turn, quiet } = live.interface.hand_over().map_err(failed)?;
            let named = files.into_iter().map(|(kind, file)| (inherit::interface(name, kind), file));
            descriptors.extend(named);
            guests.extend(guest.map(|guest| (name.clone(), guest)));
            turns.extend(turn);
            quiets.extend(quiet);
        }
        let index = |item: &Item<RouteSpec>| self.route_indices.get(&item.spec).copied().unwrap_or(0);
        let positions = Positions {
            interfaces: self.interfaces.iter().map(|(name, live)| (name.clone(), live.port)).collect(),
            links: self.links.iter().map(|(name, live)| (name.clone(), live.port)).collect(),
            guests,
            routes: self.own.routes.iter().map(index).collect(),
            next_route: self.next_route,
            indices: self.indices.assigned(),
        };
        let estate = Estate { settings: settings::save(&self.own), positions };
        Ok(Given { estate, descriptors, _turns: turns, _quiet: quiets })
    }

    /// Has all dispatchers stand still until the result is dropped; `None` if one of them does not in time.
    pub fn stand_still(&self) -> Option<Still<'_>> {
        self.core.stand_still()
    }

    /// The last state, while all stands still.
    pub fn last(&self) -> Last {
        // Counts what the kernel has forwarded, before the counters are read.
        let flows = self.core.counted();
        Last {
            interfaces: self
                .interfaces
                .iter()
                .map(|(name, live)| (name.clone(), live.stats.read()))
                .collect(),
            links: self.links.iter().map(|(name, live)| (name.clone(), live.stats.read())).collect(),
            bridge: self.core.bridge_stats().read(),
            removed: self.retired.clone(),
            sightings: self.core.learned().sightings(self.core.now_ms()),
            learned: self.core.learned().stats(),
            flows,
        }
    }

    /// Goes on after a take-over that failed: the new vnetd may have installed flows in the kernel.
    pub fn go_on(&self) {
        self.interfaces.values().for_each(|live| live.interface.go_on());
        // Ends all flows of the kernel's own path. Programs and ports are the same in both vnetds.
        self.publish();
    }
}
