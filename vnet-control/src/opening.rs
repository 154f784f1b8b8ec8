//! How the engine opens interfaces: everything new before anything changes, all or nothing.
//!
//! The one case in which something has to go before its successor can be opened is a resource that changes hands (an interface
//! with other settings at the same socket or device): it is stopped first, and opened again as it was if the successor fails.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::desired::*;
use super::driving;
use super::engine::{Engine, EngineError, LiveInterface};
use super::plan::Plan;
use super::table::Problem;
use vnet::dispatch::mode::Drive;
use vnet::frame::{self, PortId};
use vnet::interface::Interface;
use vnet::interface::local::{Local, LocalOptions};
use vnet::interface::tap::{Tap, TapOptions};
use vnet::interface::vhost_user::{VhostUser, VhostUserOptions};
use vnet::link::Direct;
use vnet::stats::PortStats;

/// Interfaces that were opened but are not in the core yet: dropped, they are closed again.
#[derive(Default)]
pub(super) struct Opened(pub Vec<(String, LiveInterface)>);

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.iter().for_each(|(_, live)| live.interface.stop());
    }
}

impl Engine {
    /// Opens the plan's new interfaces; on an error everything is as before.
    pub(super) fn open_new(&mut self, plan: &Plan) -> Result<Opened, EngineError> {
        let added = plan.interfaces.added.iter();
        let wanted: Vec<_> = added.chain(replaced(plan).map(|(_, wanted)| wanted)).collect();
        let needed: HashSet<_> = wanted.iter().map(|item| item.spec.attachment.resource()).collect();
        let blockers: Vec<_> =
            leaving(plan).filter(|item| needed.contains(&item.spec.attachment.resource())).collect();
        let held: HashSet<_> = blockers.iter().map(|item| item.spec.attachment.resource()).collect();
        let (late, early): (Vec<&Item<_>>, Vec<&Item<_>>) =
            wanted.into_iter().partition(|item| held.contains(&item.spec.attachment.resource()));

        let mut opened = Opened::default();
        for item in early {
            self.open(item, &mut opened)?;
        }
        if late.is_empty() {
            return Ok(opened);
        }
        let stopped = self.stop_early(&blockers);
        for item in late {
            if let Err(error) = self.open(item, &mut opened) {
                drop(opened);
                return Err(self.reopen(&blockers, stopped, error));
            }
        }
        stopped.iter().for_each(|stats| self.retire(stats));
        Ok(opened)
    }

    /// Opens one interface, on a port that nothing uses.
    fn open(&self, item: &Item<InterfaceSpec>, opened: &mut Opened) -> Result<(), EngineError> {
        let spec = &item.spec;
        let port = self.free_port(opened.0.iter().map(|(_, live)| live.port));
        let live = open_interface(spec, port, self.bridge_address().ip()).map_err(|error| {
            let text = format!("interface {} cannot be opened: {error}", spec.name);
            EngineError::Open(Problem::new(&item.place, text))
        })?;
        opened.0.push((spec.name.clone(), live));
        Ok(())
    }

    /// Stops interfaces whose resources pass to others, and returns their counters.
    fn stop_early(&mut self, blockers: &[&Item<InterfaceSpec>]) -> Vec<Arc<PortStats>> {
        let gone: Vec<_> =
            blockers.iter().filter_map(|item| self.interfaces.remove(&item.spec.name)).collect();
        self.core.publish(self.setup(&self.current));
        // Dropped here, too: a TAP is free only when its file is closed.
        gone.into_iter()
            .map(|live| {
                live.interface.stop();
                live.stats
            })
            .collect()
    }

    /// Opens interfaces again that were stopped for successors which failed with `error`.
    fn reopen(
        &mut self,
        blockers: &[&Item<InterfaceSpec>],
        stopped: Vec<Arc<PortStats>>,
        error: EngineError,
    ) -> EngineError {
        stopped.iter().for_each(|stats| self.retire(stats));
        let mut lost = String::new();
        for item in blockers {
            let mut opened = Opened::default();
            match self.open(item, &mut opened) {
                Ok(()) => self.interfaces.extend(std::mem::take(&mut opened.0)),
                Err(again) => {
                    let name = &item.spec.name;
                    lost += &format!("; interface {name} had to stop for it and is lost: {again}");
                    self.forget(name);
                }
            }
        }
        self.core.publish(self.setup(&self.current));
        match error {
            EngineError::Open(problem) => {
                EngineError::Open(Problem { text: problem.text + &lost, ..problem })
            }
            error => error,
        }
    }

    /// Takes an interface that is lost, and the rules that name it, out of the current state.
    fn forget(&mut self, name: &str) {
        let target = Target::Interface(name.into());
        self.indices.forget_interface(&name.into());
        for desired in [&mut self.current, &mut self.own] {
            desired.interfaces.retain(|item| item.spec.name != name);
            desired.routes.retain(|item| !item.spec.names(&target));
        }
        self.route_indices.retain(|spec, _| !spec.names(&target));
    }
}

/// The interfaces that have to be opened anew because of what changes: as they are, as they should be.
fn replaced(plan: &Plan) -> impl Iterator<Item = &(Item<InterfaceSpec>, Item<InterfaceSpec>)> {
    // What is not part of this is the core's, or can be changed while frames flow.
    let fixed = driving::fixed_part;
    plan.interfaces.changed.iter().filter(move |(is, wanted)| fixed(&is.spec) != fixed(&wanted.spec))
}

/// The interfaces that are stopped: those that go for good and those that are opened anew.
pub(super) fn leaving(plan: &Plan) -> impl Iterator<Item = &Item<InterfaceSpec>> {
    plan.interfaces.removed.iter().chain(replaced(plan).map(|(is, _)| is))
}

fn open_interface(spec: &InterfaceSpec, port: PortId, listen: IpAddr) -> Result<LiveInterface, String> {
    let mut direct = None;
    let stats = Arc::new(PortStats::default());
    let (mac, mtu, queues) = (spec.mac, spec.mtu as usize, spec.queues as usize);
    let (interface, mtu): (Arc<dyn Interface>, u32) = match &spec.attachment {
        Attachment::VhostUser { socket, server, direct: own } => {
            if let Some(DirectSpec { port, .. }) = own {
                direct = Some(Direct::bind(SocketAddr::new(listen, *port)).map_err(|e| e.to_string())?);
            }
            let (socket, server, name) = (socket.clone(), *server, spec.name.clone());
            let options = VhostUserOptions { name, socket, server, mac, mtu, queues };
            let interface =
                VhostUser::start(options, port, spec.network, stats.clone()).map_err(|e| e.to_string())?;
            (interface, spec.mtu)
        }
        Attachment::Tap { device, netns } => {
            let (device, netns) = (device.clone(), netns.clone());
            let origin = frame::Origin { port, network: spec.network };
            let options = TapOptions { device, netns, mac, mtu, queues };
            let tap = Tap::open(&options, origin, stats.clone()).map_err(|e| e.to_string())?;
            let mtu = tap.mtu() as u32;
            (tap, mtu)
        }
        Attachment::Local { device, netns, promiscuous } => {
            let (device, netns, promiscuous) = (device.clone(), netns.clone(), *promiscuous);
            let origin = frame::Origin { port, network: spec.network };
            let options = LocalOptions { device, netns, promiscuous, mtu };
            let local = Local::open(&options, origin, stats.clone()).map_err(|e| e.to_string())?;
            let mtu = local.mtu() as u32;
            (local, mtu)
        }
    };
    interface.set_interrupts(spec.driving.interrupts);
    let drive = Drive::new(spec.driving.mode, queues);
    Ok(LiveInterface { port, mtu, stats, drive, interface, direct })
}
