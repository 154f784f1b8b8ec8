//! Applies changes to the engine's state: all or nothing.
//!
//! A change is a new desired state. Its difference to the current one is applied in three steps:
//!
//! 1. open everything new; if that fails, close it again and leave the state unchanged;
//! 2. publish one new setup, which the dispatchers adopt between two batches;
//! 3. stop what was removed, once no dispatcher uses it any more.
//!
//! Objects that the plan does not name are not touched. One case needs a stop before the open: an interface that takes over the
//! socket or device of another one. The old interface is stopped first, and reopened if its successor fails.
//!
//! An interface whose namespace, device or directory does not exist yet does not block the rest of the change: it is down until
//! it can be opened (`reopen.rs`).

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;

use super::check::links;
use super::config::ConfigError;
use super::desired::*;
use super::engine::{Engine, EngineError};
use super::events::Asker;
use super::open_close::{Before, LiveInterface, LiveLink, Opened, Order, Patience, open_all};
use super::overlay::Computed;
use super::plan::{self, Plan};
use super::settings;
use super::table::Problem;
use vnet::frame::NetworkId;
use vnet::interface::State;
use vnet::link::normalised;
use vnet::stats::PortStats;

impl Engine {
    /// Starts a core and applies `desired`.
    pub fn start(desired: Desired) -> Result<Engine, EngineError> {
        Engine::start_in(desired, |_, _| Computed::default())
    }

    /// Like [`Engine::start`], with the overlay's last known links and stations from the start: `last_known` computes them before
    /// anything is open. So a guest's first frame finds a destination; a lost ARP request would be repeated only after a second.
    pub fn start_in(
        desired: Desired,
        last_known: impl FnOnce(&Engine, &Desired) -> Computed,
    ) -> Result<Engine, EngineError> {
        let mut engine = Engine::idle(&desired, None)?;
        let computed = last_known(&engine, &desired);
        engine.join_early(&desired, computed);
        // A start that fails leaves the devices of a vnetd that has died as they are: find mistakes first.
        engine.plan(&desired)?;
        engine.core.take_over();
        engine.kept.lock().sweep(&desired.interfaces);
        let plan = engine.on_behalf(Asker::Part("the configuration file"), |engine| {
            engine.change(desired, Patience::All)
        })?;
        if plan.is_empty() {
            // The first setup, without which dispatchers do not listen.
            engine.publish();
        }
        Ok(engine)
    }

    /// The changes that [`Engine::apply`] would make.
    pub fn plan(&self, desired: &Desired) -> Result<Plan, EngineError> {
        self.difference(&self.merged(desired))
    }

    fn difference(&self, desired: &Desired) -> Result<Plan, EngineError> {
        let problems = settings::restart_needed(&self.current, desired);
        if !problems.is_empty() {
            return Err(EngineError::Restart(ConfigError(problems)));
        }
        let plan = Plan::between(&self.current, desired);
        let new_links = plan.links.added.iter().chain(plan.links.changed.iter().map(|(_, wanted)| wanted));
        for Item { place, spec } in new_links {
            if self.leads_here(spec) {
                return Err(EngineError::Open(Problem::new(place, links::to_oneself(spec))));
            }
        }
        Ok(plan)
    }

    /// True if a link's remote is one of the bridge's ports on this host.
    pub(super) fn leads_here(&self, link: &LinkSpec) -> bool {
        let bridge = self.core.bridge_address();
        let ports = self.current.bridge.spec.ports;
        if !links::arrives_at_bridge(link)
            || !link.has_port_of(bridge.port(), ports)
            || !bridge.ip().is_unspecified()
        {
            return false;
        }
        // The kernel's route to a local address has that address as its source. Connecting a UDP socket sends nothing.
        let any: IpAddr = match link.remote {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let start = UdpSocket::bind((any, 0)).and_then(|socket| {
            socket.connect(link.remote)?;
            socket.local_addr()
        });
        link.remote.ip().is_loopback() || start.is_ok_and(|start| start.ip() == link.remote.ip())
    }

    /// Changes the configured state to `desired`, and retries interfaces that are down for lack of a device or namespace; returns
    /// the changes. On an error nothing has changed.
    pub fn apply(&mut self, desired: Desired) -> Result<Plan, EngineError> {
        let plan = self.change(desired, Patience::Awaited)?;
        self.open_absent();
        Ok(plan)
    }

    /// Changes the configured state to `desired`.
    pub(super) fn change(&mut self, desired: Desired, patience: Patience) -> Result<Plan, EngineError> {
        let plan = self.carry_out(self.merged(&desired), patience)?;
        self.own = desired;
        Ok(plan)
    }

    /// Changes the host's state to exactly `desired`.
    pub(super) fn carry_out(&mut self, desired: Desired, patience: Patience) -> Result<Plan, EngineError> {
        let plan = self.difference(&desired)?;
        if plan.is_empty() {
            // Nothing to apply, but the new items have the current line numbers for messages.
            self.current = desired;
            return Ok(plan);
        }
        let mut opened = self.open_new(&plan, patience)?;
        self.await_last()?;
        // Point of no return: no step below can fail.
        let gone: Vec<_> =
            leaving(&plan).filter_map(|item| self.interfaces.remove(&item.spec.name)).collect();
        self.interfaces.extend(std::mem::take(&mut opened.0));
        let gone_links = self.change_links(&plan.links);
        self.change_routes(&plan.routes);
        self.indices.follow(&plan);
        self.change_driving(&plan.interfaces);
        if let Some((_, wanted)) = &plan.dispatch {
            self.core.recruit(wanted.recruiting);
        }
        self.current = desired;
        self.resume();
        // Before frames flow: a local network discards frames to addresses that it does not know.
        self.announce_addresses();
        self.publish();
        self.keep_sealed_links();
        for live in gone {
            live.interface.stop();
            live.interface.let_go();
            self.retire(&live.stats);
        }
        for live in gone_links {
            live.link.stop();
            self.retire(&live.stats);
        }
        self.list_taps();
        self.open_drivers();
        self.witness.report(&plan);
        self.log_states();
        self.ring();
        Ok(plan)
    }

    /// Passes each interface the MAC addresses configured in its network.
    pub(super) fn announce_addresses(&self) {
        let here = |network| {
            let specs = self.current.interfaces.iter().map(|item| &item.spec);
            specs.filter(move |spec| spec.network == network).filter_map(|spec| spec.mac)
        };
        for Item { spec, .. } in &self.current.interfaces {
            if let Some(live) = self.interfaces.get(&spec.name) {
                live.interface.expect(&here(spec.network).collect::<Vec<_>>());
            }
        }
    }

    /// Replaces changed links; returns the old ones. A sealed link of which only the remote changes keeps its keys.
    fn change_links(&mut self, diff: &plan::Diff<LinkSpec>) -> Vec<LiveLink> {
        let misplaced = self.misplaced(diff);
        let changed: Vec<_> = diff
            .changed
            .iter()
            .filter(|(is, wanted)| !self.aim(is, wanted, diff))
            .chain(&misplaced)
            .collect();
        let new: Vec<_> = diff.added.iter().chain(changed.iter().map(|(_, wanted)| wanted)).collect();
        // Ports are chosen while the old links are live, so new links get other ports.
        let names = new.iter().map(|item| Target::Link(item.spec.name.clone()));
        let ports = self.ports_for(names, &[]);
        let mut made: Vec<(String, LiveLink)> = vec![];
        for (Item { spec, .. }, port) in new.into_iter().zip(ports) {
            let live = LiveLink::new(spec, port, &self.inbox);
            live.link.name_host(&self.current.host.spec.name);
            if let Some(keeper) = &self.keeper {
                live.link.set_identity(keeper.identity().clone());
            }
            made.push((spec.name.clone(), live));
        }
        let old = diff.removed.iter().chain(changed.iter().map(|(is, _)| is));
        let gone = old.filter_map(|item| self.links.remove(&item.spec.name)).collect();
        self.links.extend(made);
        gone
    }

    /// Changes a link's remote in place, if nothing else of it changes. False: the link must be recreated.
    fn aim(&self, is: &Item<LinkSpec>, wanted: &Item<LinkSpec>, diff: &plan::Diff<LinkSpec>) -> bool {
        let moved = LinkSpec { remote: wanted.spec.remote, ..is.spec.clone() } == wanted.spec;
        let live =
            self.links.get(&is.spec.name).filter(|live| moved && !is_claimed(live, &is.spec.name, diff));
        live.is_some_and(|live| live.link.aim(wanted.spec.remote))
    }

    /// Links that have roamed away from their first remote, where another link now takes that address. They must be recreated,
    /// because the first remote identifies a link's datagrams on receive.
    fn misplaced(&self, diff: &plan::Diff<LinkSpec>) -> Vec<(Item<LinkSpec>, Item<LinkSpec>)> {
        let in_diff: HashSet<_> = diff
            .removed
            .iter()
            .chain(diff.changed.iter().map(|(is, _)| is))
            .map(|item| &item.spec.name)
            .collect();
        let is_misplaced = |item: &&Item<LinkSpec>| {
            let live = self.links.get(&item.spec.name);
            !in_diff.contains(&item.spec.name)
                && live.is_some_and(|live| {
                    live.link.options().remote != normalised(item.spec.remote)
                        && is_claimed(live, &item.spec.name, diff)
                })
        };
        self.current.links.iter().filter(is_misplaced).map(|item| (item.clone(), item.clone())).collect()
    }

    /// Opens the kernel's VXLAN devices for TCP streams on VXLAN links, in a separate thread: creating them blocks on the kernel.
    fn open_drivers(&self) {
        let Some(listen) = self.current.bridge.spec.vxlan_listen else { return };
        let declared = self.current.networks.iter().map(|item| item.spec.id);
        let networks: Vec<_> = std::iter::once(NetworkId::default()).chain(declared).collect();
        let links = self.links.values().map(|live| live.link.clone());
        let links: Vec<_> = links.filter(|link| link.has_drivers().is_some()).collect();
        if links.is_empty() {
            return;
        }
        let open = move || links.iter().for_each(|link| link.open_drivers(listen.ip(), &networks));
        if let Err(error) = std::thread::Builder::new().name("vxlan-drivers".into()).spawn(open) {
            tracing::warn!(%error, "cannot start a thread: vnetd segments the streams on VXLAN links");
        }
    }

    /// Applies mode and interrupt settings to open interfaces; dispatchers adopt them with the next setup.
    fn change_driving(&mut self, diff: &plan::Diff<InterfaceSpec>) {
        for (is, Item { spec, .. }) in &diff.changed {
            if let Some(live) = self.interfaces.get_mut(&spec.name)
                && is.spec.driving != spec.driving
            {
                (live.drive.settings, live.drive.share) = (spec.driving.mode, spec.driving.share);
                if let Some(guest) = live.interface.coalesce() {
                    guest.set_interrupts(spec.driving.interrupts);
                }
            }
        }
    }

    fn change_routes(&mut self, diff: &plan::Diff<RouteSpec>) {
        for Item { spec, .. } in &diff.removed {
            self.route_indices.remove(spec);
        }
        for Item { spec, .. } in &diff.added {
            self.route_indices.insert(spec.clone(), self.next_route);
            self.next_route += 1;
        }
    }

    /// Opens the plan's new interfaces; on an error nothing has changed.
    fn open_new(&mut self, plan: &Plan, patience: Patience) -> Result<Opened, EngineError> {
        let added = plan.interfaces.added.iter();
        let wanted: Vec<_> = added.chain(replaced(plan).map(|(_, wanted)| wanted)).collect();
        let needed: HashSet<_> = wanted.iter().map(|item| item.spec.attachment.resource()).collect();
        let blockers: Vec<_> =
            leaving(plan).filter(|item| needed.contains(&item.spec.attachment.resource())).collect();
        let held: HashSet<_> = blockers.iter().map(|item| item.spec.attachment.resource()).collect();
        let (late, early): (Vec<&Item<_>>, Vec<&Item<_>>) =
            wanted.into_iter().partition(|item| held.contains(&item.spec.attachment.resource()));

        let mut opened = Opened::default();
        self.open(&early, patience, &mut opened)?;
        if late.is_empty() {
            return Ok(opened);
        }
        let stopped = self.stop_early(&blockers, &late);
        if let Err(error) = self.open(&late, patience, &mut opened) {
            drop(opened);
            return Err(self.reopen(&blockers, stopped, error));
        }
        stopped.iter().for_each(|stats| self.retire(stats));
        Ok(opened)
    }

    /// Opens interfaces on free ports. An interface that cannot be opened is down if `patience` allows that, else an error.
    fn open(
        &self,
        items: &[&Item<InterfaceSpec>],
        patience: Patience,
        opened: &mut Opened,
    ) -> Result<(), EngineError> {
        let taken: Vec<_> = opened.0.iter().map(|(_, live)| live.port).collect();
        let names = items.iter().map(|item| Target::Interface(item.spec.name.clone()));
        let ports = self.ports_for(names, &taken);
        let specs = items.iter().map(|item| &item.spec);
        let mut kept = self.kept.lock();
        kept.expect(specs.clone());
        let order = |(spec, port)| Order { spec, port, before: Before::default(), keep: kept.keep(spec) };
        let orders: Vec<_> = specs.zip(ports).map(order).collect();
        drop(kept);
        let mut failed = None;
        for (index, result) in open_all(&orders, &self.core).into_iter().enumerate() {
            let Order { spec, port, before, .. } = &orders[index];
            let live = result.or_else(|why| match patience.bears(&why) {
                Some(reason) => Ok(LiveInterface::absent(spec, *port, before.clone(), reason)),
                None => {
                    let text = format!("interface {} cannot be opened: {}", spec.name, why.error);
                    Err(EngineError::Open(Problem::new(&items[index].place, text)))
                }
            });
            match live {
                Ok(live) => opened.0.push((spec.name.clone(), live)),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Stops interfaces whose socket or device one of `late` needs; returns their counters. A TAP stays for another interface that has one.
    fn stop_early(
        &mut self,
        blockers: &[&Item<InterfaceSpec>],
        late: &[&Item<InterfaceSpec>],
    ) -> Vec<Arc<PortStats>> {
        let stays = |spec: &InterfaceSpec| {
            let mut next = late.iter().map(|item| &item.spec.attachment);
            next.any(|next| next.may_have_tap() && next.resource() == spec.attachment.resource())
        };
        let remove =
            |item: &&Item<InterfaceSpec>| Some((stays(&item.spec), self.interfaces.remove(&item.spec.name)?));
        let gone: Vec<_> = blockers.iter().filter_map(remove).collect();
        self.core.publish(self.setup(&self.current));
        // The interfaces are dropped here, too: a TAP is free only once its file is closed.
        gone.into_iter()
            .map(|(stays, live)| {
                live.interface.stop();
                if !stays {
                    live.interface.let_go();
                }
                live.stats
            })
            .collect()
    }

    /// Opens stopped interfaces again after their successor failed with `error`.
    fn reopen(
        &mut self,
        blockers: &[&Item<InterfaceSpec>],
        stopped: Vec<Arc<PortStats>>,
        error: EngineError,
    ) -> EngineError {
        stopped.iter().for_each(|stats| self.retire(stats));
        let mut reopened = Opened::default();
        let done = self.open(blockers, Patience::All, &mut reopened);
        debug_assert!(done.is_ok(), "an interface that cannot be opened is down");
        let mut lost = String::new();
        for (name, live) in &reopened.0 {
            if let (Some(_), State::Down(reason)) = (&live.absent, live.state()) {
                lost += &format!("; interface {name} was stopped for it and is down: {reason}");
            }
        }
        self.interfaces.extend(std::mem::take(&mut reopened.0));
        self.core.publish(self.setup(&self.current));
        match error {
            EngineError::Open(problem) => {
                EngineError::Open(Problem { text: problem.text + &lost, ..problem })
            }
            error => error,
        }
    }
}

/// True if the plan gives another link the remote that `live` was created with.
fn is_claimed(live: &LiveLink, name: &str, diff: &plan::Diff<LinkSpec>) -> bool {
    let new = diff.added.iter().chain(diff.changed.iter().map(|(_, wanted)| wanted));
    let remote = live.link.options().remote;
    new.into_iter().any(|item| item.spec.name != name && normalised(item.spec.remote) == remote)
}

/// Changed interfaces that must be reopened: old and new.
fn replaced(plan: &Plan) -> impl Iterator<Item = &(Item<InterfaceSpec>, Item<InterfaceSpec>)> {
    plan.interfaces.changed.iter().filter(|(is, wanted)| settings::reopens(&is.spec, &wanted.spec))
}

/// Interfaces to stop: removed and reopened ones.
fn leaving(plan: &Plan) -> impl Iterator<Item = &Item<InterfaceSpec>> {
    plan.interfaces.removed.iter().chain(replaced(plan).map(|(is, _)| is))
}

#[cfg(test)]
#[path = "apply_tests.rs"]
mod tests;
