//! The new vnetd's part: an engine from what a running vnetd hands over.

use std::sync::Arc;

use super::state::{Counts, Estate, LastState, Positions};
use crate::config::{self, ConfigError};
use crate::desired::*;
use crate::engine::{Engine, EngineError, Eve};
use crate::events::Asker;
use crate::open_close::Patience;
use crate::overlay::Computed;
use crate::table::{Place, Problem};
use vnet::inherit::Inheritance;
use vnet::interface::Interface;
use vnet::route::{PortKind, Sighting};
use vnet::stats::PortStats;
use vnet::wire::ethernet::Mac;

/// Everything that was handed over before the running vnetd stands still.
pub struct Taking {
    /// The running vnetd's settings.
    pub desired: Desired,
    positions: Positions,
    inheritance: Arc<Inheritance>,
}

/// An error of what the running vnetd has handed over.
fn wrong(text: impl Into<String>) -> EngineError {
    EngineError::Open(Problem::new(&Place::default(), text.into()))
}

impl Taking {
    /// Reads an estate, with its descriptors.
    ///
    /// # Errors
    /// This version does not accept the running vnetd's settings, or the positions contradict each other.
    pub fn new(estate: Estate, inheritance: Arc<Inheritance>) -> Result<Taking, ConfigError> {
        let Estate { settings, mut positions } = estate;
        let desired = config::parse("the running vnetd", &settings)?.desired;
        if !positions.is_consistent() || positions.routes.len() != desired.routes.len() {
            let text = "the running vnetd's ports and routes contradict its settings";
            return Err(Problem::new(&Place::default(), text).into());
        }
        inheritance.add_guests(std::mem::take(&mut positions.guests));
        inheritance.add_ports(std::mem::take(&mut positions.ports)).map_err(|name| {
            let text = format!("the running vnetd does not hand over all direct ports of interface {name}");
            Problem::new(&Place::default(), text)
        })?;
        Ok(Taking { desired, positions, inheritance })
    }
}

impl Engine {
    /// Starts a core with everything of a running vnetd. `last` has it stand still and gets its last state, once all is open. `begins` tells it
    /// that keys of sealed links are about to be used. `last_known` is that of [`Engine::start_in`].
    ///
    /// # Errors
    /// Something was not handed over, or cannot be used. The running vnetd then still has everything, and this process must end without
    /// publishing anything.
    pub fn take_over(
        taking: Taking,
        last_known: impl FnOnce(&Engine, &Desired) -> Computed,
        last: impl FnOnce() -> Result<LastState, String> + Send + 'static,
        begins: impl FnOnce() -> Result<(), String> + Send + 'static,
    ) -> Result<Engine, EngineError> {
        let Taking { desired, positions, inheritance } = taking;
        let mut engine = Engine::idle(&desired, Some(inheritance))?;
        engine.positions = positions;
        let computed = last_known(&engine, &desired);
        engine.join_early(&desired, computed);
        engine.plan(&desired)?;
        let kernel = engine.core.inherit_kernel();
        kernel.map_err(|why| wrong(format!("cannot take over the kernel path: {why}")))?;
        let last = Box::new(move || last().map_err(wrong));
        let begins = Box::new(move || begins().map_err(wrong));
        engine.eve = Some(Eve { last, begins });
        let plan = engine.on_behalf(Asker::Part("the running vnetd"), |engine| {
            engine.change(desired, Patience::Awaited)
        })?;
        if plan.is_empty() {
            engine.await_last()?;
            engine.resume();
            engine.publish();
            engine.keep_sealed_links();
        }
        Ok(engine)
    }

    /// Has the running vnetd stand still, if there is one to take over from.
    pub(crate) fn await_last(&mut self) -> Result<(), EngineError> {
        let Some(eve) = self.eve.take() else { return Ok(()) };
        let left = self.core.inheritance().map(|inheritance| inheritance.left()).unwrap_or_default();
        if let Some(name) = left.first() {
            return Err(wrong(format!(
                "the running vnetd hands over {name}, which this version does not use"
            )));
        }
        let state = (eve.last)()?;
        let last = &state.last;
        for counts in last.interfaces.values().chain(last.links.values()).chain([&last.bridge]) {
            PortStats::default().resume(counts).map_err(|unknown| {
                wrong(format!("the running vnetd has a counter that this version lacks: {unknown}"))
            })?;
        }
        // No step after this one fails, up to the first setup.
        (eve.begins)()?;
        self.last = Some(state);
        Ok(())
    }

    /// Goes on where the running vnetd stands still. Call it once all interfaces and links are there, before the first setup.
    pub(crate) fn resume(&mut self) {
        let Some(LastState { last, sealed, pairs }) = self.last.take() else { return };
        let Positions { routes, next_route, indices, .. } = std::mem::take(&mut self.positions);
        for (item, index) in self.current.routes.iter().zip(routes) {
            self.route_indices.insert(item.spec.clone(), index);
        }
        self.next_route = self.next_route.max(next_route);
        self.indices.resume(indices);
        // Names were checked in `await_last`.
        let resume = |stats: &PortStats, counts: Option<&Counts>| {
            counts.into_iter().for_each(|counts| _ = stats.resume(counts));
        };
        self.interfaces.iter().for_each(|(name, live)| resume(&live.stats, last.interfaces.get(name)));
        self.links.iter().for_each(|(name, live)| resume(&live.stats, last.links.get(name)));
        resume(self.core.bridge_stats(), Some(&last.bridge));
        self.retired.add(&last.removed);
        let interfaces = self.interfaces.values().map(|live| (live.port, PortKind::Interface));
        let links = self.links.values().map(|live| (live.port, PortKind::Link));
        let kinds: std::collections::HashMap<_, _> = interfaces.chain(links).collect();
        let now_ms = self.core.now_ms();
        for state in sealed {
            match self.links.get(state.name()) {
                Some(live) => live.link.resume(state, now_ms),
                None => {
                    tracing::warn!("the vnetd before had a sealed link {} that this one lacks", state.name())
                }
            }
        }
        if let Some(relay) = &self.relay {
            pairs.into_iter().for_each(|pair| relay.resume(pair));
            relay.resumed();
        }
        let kind = |port| kinds.get(&port).copied();
        self.core.learned().resume(&last.sightings, last.learned, kind, now_ms);
        self.core.resume_zero_copies(&last.zero_copies);
        self.core.succeed(last.flows);
        self.subscribe(&last.sightings);
        self.interfaces.values().for_each(|live| live.interface.start());
    }

    /// Subscribes local networks to the addresses heard elsewhere in their networks, as the running vnetd has when these sent frames there.
    fn subscribe(&self, sightings: &[Sighting]) {
        for Item { spec, .. } in &self.current.interfaces {
            let Some(live) = self.interfaces.get(&spec.name) else { continue };
            if !matches!(spec.attachment, Attachment::Local { .. }) {
                continue;
            }
            let elsewhere =
                |sighting: &&Sighting| sighting.network == spec.network.get() && sighting.port != live.port;
            let interface: &dyn Interface = &*live.interface;
            sightings.iter().filter(elsewhere).for_each(|heard| interface.forwarded_from(Mac(heard.mac)));
        }
    }

    /// The running vnetd has ended: devices, pins and socket files are this process's own. Opens interfaces that it had not opened either.
    pub fn settle(&mut self) {
        self.core.own();
        self.interfaces.values().for_each(|live| live.interface.keep());
        self.list_taps();
        self.open_absent();
    }
}
