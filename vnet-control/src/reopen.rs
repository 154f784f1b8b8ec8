//! Interfaces that cannot be opened, or lose their device: each is down with a reason, and is reopened as soon as possible.
//!
//! A separate thread watches devices, namespaces and folders ([`vnet::interface::change_events`]) and calls [`Engine::tend`] when
//! one of them changes, or when the next attempt is due. A reopened interface keeps its port, its counters, and the MAC address of
//! the device that vnetd created for it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::absence::{Absence, Again};
use super::desired::*;
use super::engine::Engine;
use super::kept::Now;
use super::open_close::{LiveInterface, Order, open_all};
use vnet::interface::change_events::{Bell, Place};
use vnet::interface::tap::{Netns, Process};
use vnet::interface::{Interface, State};

/// Maximum time between two checks of devices, in case an event is missed.
const LOOK: Duration = Duration::from_secs(1);
/// Maximum time between two calls if no interface has a device.
const IDLE: Duration = Duration::from_secs(3600);

impl Engine {
    /// Registers `bell`, which is rung when [`watched`](Engine::watched) changes.
    pub fn call_by(&mut self, bell: Bell) {
        self.bell = Some(bell);
    }

    pub(super) fn ring(&self) {
        self.bell.iter().for_each(Bell::ring);
    }

    /// Interfaces with a device, and the places that interfaces depend on.
    pub fn watched(&self) -> (Vec<Arc<dyn Interface>>, HashSet<Place>) {
        let on_devices = self.interfaces.values().filter(|live| live.interface.device().is_some());
        let on_devices = on_devices.map(|live| live.interface.clone()).collect();
        let place = |Item { spec, .. }: &Item<InterfaceSpec>| match &spec.attachment {
            Attachment::Tap { netns, .. }
            | Attachment::Veth { netns, .. }
            | Attachment::Local { netns, .. } => Some(Place::Namespace(netns.clone())),
            Attachment::VhostUser { socket, .. } => {
                self.interfaces.get(&spec.name)?.absent.as_ref()?;
                Some(Place::Folder(socket.parent()?.to_owned()))
            }
        };
        (on_devices, self.current.interfaces.iter().filter_map(place).collect())
    }

    /// Takes down interfaces that lost their device, opens absent interfaces whose next attempt is due, and logs changed states.
    /// `stirred`: an event shows that the missing device, namespace or folder may exist now. Returns the time until the next
    /// call.
    pub fn tend(&mut self, stirred: bool) -> Duration {
        if stirred {
            self.absences().for_each(|absence| absence.stirred());
        }
        let now = Instant::now();
        self.release_lost();
        let due = |absence: &Absence| absence.next.is_some_and(|next| next <= now);
        self.open_those(|live| live.absent.as_ref().is_some_and(due));
        self.remember_macs();
        self.list_taps();
        self.log_states();
        let looked_at = self.interfaces.values().any(|live| live.interface.device().is_some());
        let next = self.absences().filter_map(|absence| absence.next).min();
        let longest = if looked_at { LOOK } else { IDLE };
        next.map_or(longest, |next| next.saturating_duration_since(Instant::now()).min(longest))
    }

    /// Tries to open all absent interfaces now, regardless of their backoff. A process id names whatever process has it now.
    pub(super) fn open_absent(&mut self) {
        self.release_lost();
        for live in self.interfaces.values_mut().filter(|live| live.absent.is_some()) {
            live.process = live.process.take().filter(|process| !process.has_exited());
        }
        self.open_those(|live| live.absent.is_some());
        self.log_states();
        self.ring();
    }

    fn absences(&mut self) -> impl Iterator<Item = &mut Absence> {
        self.interfaces.values_mut().filter_map(|live| live.absent.as_mut())
    }

    /// Closes interfaces whose device is lost: until then the kernel keeps the rest of the device and its namespace alive.
    fn release_lost(&mut self) {
        let mut gone = vec![];
        for Item { spec, .. } in &self.current.interfaces {
            let Some(live) = self.interfaces.get_mut(&spec.name) else { continue };
            let Some(reason) = live.interface.device().and_then(|device| device.lost()) else { continue };
            let before = live.before();
            let mut absent = LiveInterface::absent(spec, live.port, before, reason);
            std::mem::swap(&mut absent.logged, &mut live.logged);
            gone.push(std::mem::replace(live, absent));
            // Its device goes. Another interface can have one there soon: the kernel uses numbers of namespaces again.
            self.kept.lock().forget(spec);
        }
        if !gone.is_empty() {
            self.publish();
            for live in &gone {
                live.interface.stop();
                live.interface.let_go();
            }
            // The kernel takes a while to destroy a device. No step has to wait for it, because the next device is created in
            // another namespace.
            _ = std::thread::Builder::new().name("device-closer".into()).spawn(move || drop(gone));
        }
    }

    /// Opens the absent interfaces that `chosen` selects.
    fn open_those(&mut self, chosen: impl Fn(&LiveInterface) -> bool) {
        let mut orders = vec![];
        for Item { spec, .. } in &self.current.interfaces {
            if let Some(live) = self.interfaces.get(&spec.name).filter(|live| chosen(live)) {
                let (before, keep) = (live.before(), self.kept.lock().keep(spec));
                orders.push(Order { spec, port: live.port, before, keep });
            }
        }
        self.kept.lock().expect(orders.iter().map(|order| order.spec));
        let results = open_all(&orders, &self.core);
        let mut opened = false;
        for (order, result) in orders.iter().zip(results) {
            let Some(live) = self.interfaces.get_mut(&order.spec.name) else { continue };
            match (result, &mut live.absent) {
                (Ok(mut open), _) => {
                    std::mem::swap(&mut open.logged, &mut live.logged);
                    *live = open;
                    opened = true;
                }
                (Err(why), Some(absence)) => {
                    let again = if live.process.as_ref().is_some_and(Process::has_exited) {
                        Again::Never
                    } else if order.spec.attachment.netns().is_some_and(Netns::is_unfinished) {
                        Again::Soon
                    } else {
                        Again::Later
                    };
                    absence.failed(why.reason(), again);
                }
                (Err(_), None) => {}
            }
        }
        if opened {
            self.announce_addresses();
            self.publish();
            self.ring();
        }
    }

    /// Lists TAP devices and where they are, for the next vnetd. Removes those that no interface has any more.
    pub(super) fn list_taps(&self) {
        self.list_taps_of(|_| true);
    }

    /// Removes the TAPs of containers that have no kernel path, as their pairs are removed when vnetd is stopped.
    pub(super) fn remove_containers_taps(&self) {
        self.list_taps_of(|spec| matches!(spec.attachment, Attachment::Tap { .. }));
    }

    fn list_taps_of(&self, stays: impl Fn(&InterfaceSpec) -> bool) {
        let now = |spec: &InterfaceSpec| match self.interfaces.get(&spec.name) {
            Some(live) if live.absent.is_none() => {
                match live.interface.device().map_or(Ok(None), |device| device.place()) {
                    Ok(place) => place.map_or(Now::None, Now::At),
                    Err(_) => Now::Unknown,
                }
            }
            _ => Now::Unknown,
        };
        let specs = self.current.interfaces.iter().map(|item| &item.spec).filter(|spec| stays(spec));
        self.kept.lock().update(specs.map(|spec| (spec, now(spec))));
    }

    fn remember_macs(&mut self) {
        for live in self.interfaces.values_mut() {
            let now = live.interface.device().and_then(|device| device.mac());
            live.mac = now.or(live.mac);
        }
    }

    /// Logs changed states of interfaces that are absent or have a device; other interfaces log their states themselves.
    pub(super) fn log_states(&mut self) {
        for (name, live) in &mut self.interfaces {
            let state = match (&live.absent, live.interface.device()) {
                (None, None) => State::Up,
                _ => live.state(),
            };
            if state == live.logged.state {
                continue;
            }
            // A state over the rate limit is logged by a later call.
            if !live.logged.allow() {
                continue;
            }
            match &state {
                State::Up => tracing::info!("interface {name} is up"),
                State::Down(reason) | State::Broken(reason) => {
                    tracing::warn!("interface {name} is down: {reason}")
                }
            }
            live.logged.state = state;
        }
    }

    /// Warnings about interfaces of a plan that could not be opened yet.
    pub fn absent_in(&self, plan: &super::plan::Plan) -> Vec<String> {
        let changed = plan.interfaces.changed.iter().map(|(_, wanted)| wanted);
        let absent = |Item { spec, .. }: &Item<InterfaceSpec>| {
            let live = self.interfaces.get(&spec.name).filter(|live| live.absent.is_some())?;
            let State::Down(reason) = live.state() else { return None };
            Some(format!("interface {} is down: {reason}", spec.name))
        };
        plan.interfaces.added.iter().chain(changed).filter_map(absent).collect()
    }
}
