//! The running vnetd's part: what it hands over, and what it does if the new one fails.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

use parking_lot::MutexGuard;

use super::state::{Estate, Last, Positions};
use crate::desired::*;
use crate::engine::Engine;
use crate::open_close::LiveInterface;
use crate::settings;
use vnet::dispatch::core::Still;
use vnet::frame::Batch;
use vnet::inherit::{self, PortState};
use vnet::interface::Handed;
use vnet::link::rendezvous::relay_succession::Frozen;
use vnet::link::sealed::keeper::Keeper;
use vnet::link::succession::SealedBytes;

/// What is handed over first. Until it is dropped, no front end of a guest changes anything, and no pair of hosts that meet here is added
/// or removed.
pub struct Given<'a> {
    /// Settings and positions.
    pub estate: Estate,
    /// Duplicates of all descriptors by name.
    pub descriptors: Vec<(String, OwnedFd)>,
    _turns: Vec<MutexGuard<'a, ()>>,
    _quiet: Vec<MutexGuard<'a, Batch>>,
    _frozen: Option<Frozen<'a>>,
}

impl Engine {
    /// What is handed over first. It stays valid as long as the engine is not changed.
    ///
    /// # Errors
    /// Why this host cannot be taken over, in one line.
    pub fn estate(&self) -> Result<Given<'_>, String> {
        let mut descriptors = self.core.descriptors()?;
        let failed = |error| format!("cannot duplicate a descriptor: {error}");
        if let Some(keeper) = &self.keeper {
            descriptors.push((inherit::SEALED.into(), keeper.descriptor().map_err(failed)?));
        }
        let (sockets, frozen) =
            self.relay.as_ref().map(|relay| relay.hand_over()).transpose().map_err(failed)?.unzip();
        descriptors.extend(sockets.into_iter().flatten().map(|socket| (inherit::RELAY.into(), socket)));
        let (mut guests, mut ports) = (BTreeMap::new(), BTreeMap::new());
        let (mut turns, mut quiets) = (vec![], vec![]);
        for (name, live) in &self.interfaces {
            let failed = |why: String| format!("interface {name}: {why}; restart vnetd instead");
            let Handed { files, guest, turn, quiet } = live.interface.hand_over().map_err(failed)?;
            let named = files.into_iter().map(|(kind, file)| (inherit::interface(name, kind), file));
            descriptors.extend(named);
            let (states, sockets) = self
                .direct_ports(name, live)
                .map_err(|error| failed(format!("cannot duplicate a descriptor: {error}")))?;
            if !states.is_empty() {
                ports.insert(name.clone(), states);
            }
            let socket = |socket| (inherit::interface(name, inherit::DIRECT), socket);
            descriptors.extend(sockets.into_iter().map(socket));
            guests.extend(guest.map(|guest| (name.clone(), guest)));
            turns.extend(turn);
            quiets.extend(quiet);
        }
        let index = |item: &Item<RouteSpec>| self.route_indices.get(&item.spec).copied().unwrap_or(0);
        let positions = Positions {
            interfaces: self.interfaces.iter().map(|(name, live)| (name.clone(), live.port)).collect(),
            links: self.links.iter().map(|(name, live)| (name.clone(), live.port)).collect(),
            guests,
            ports,
            routes: self.own.routes.iter().map(index).collect(),
            next_route: self.next_route,
            indices: self.indices.assigned(),
        };
        let estate = Estate { settings: settings::save(&self.own), positions };
        Ok(Given { estate, descriptors, _turns: turns, _quiet: quiets, _frozen: frozen })
    }

    /// The direct ports of an interface, and their sockets in the same order.
    fn direct_ports(&self, name: &str, live: &LiveInterface) -> io::Result<(Vec<PortState>, Vec<OwnedFd>)> {
        let mut all = self.direct.lock().hand_over(name)?;
        let specs = self.current.interfaces.iter().map(|item| &item.spec);
        let wanted = specs.filter(|spec| spec.name == name).find_map(|spec| spec.attachment.direct());
        if let (Some(socket), Some(wanted)) = (&live.direct, wanted) {
            let (socket, peer) = socket.hand_over()?;
            all.push((PortState { link: wanted.link.clone(), negotiated: false, peer }, socket));
        }
        Ok(all.into_iter().unzip())
    }

    /// Has all dispatchers stand still until the result is dropped, and sealed links until [`Engine::reclaim`]; `None` if a dispatcher does
    /// not in time.
    pub fn stand_still(&self) -> Option<Still<'_>> {
        let still = self.core.stand_still()?;
        self.keeper.iter().for_each(Keeper::rest);
        self.links.values().for_each(|live| live.link.begin_hand_over());
        self.relay.iter().for_each(|relay| relay.rest());
        Some(still)
    }

    /// The last state, while dispatchers stand still.
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
            zero_copies: self.core.zero_copies(),
            flows,
        }
    }

    /// The sealed links with their keys, while dispatchers stand still.
    pub fn sealed_states(&self) -> Vec<SealedBytes> {
        let now_ms = self.core.now_ms();
        self.links.values().filter_map(|live| live.link.hand_over(now_ms)).collect()
    }

    /// The pairs of hosts that meet here with their keys, while dispatchers stand still.
    pub fn pair_states(&self) -> Vec<SealedBytes> {
        self.relay.as_ref().map(|relay| relay.states()).unwrap_or_default()
    }

    /// Uses the sealed links again, after a take-over that failed and while dispatchers still stand still. `used`: the new vnetd may have used the
    /// keys, which are therefore replaced.
    pub fn reclaim(&self, used: bool) {
        self.links.values().for_each(|live| live.link.reclaim(used));
        self.keeper.iter().for_each(Keeper::go_on);
        self.relay.iter().for_each(|relay| relay.go_on());
        if used && self.keeper.is_some() {
            tracing::warn!("sealed links get new keys, because the other vnetd may have used the old ones");
        }
    }

    /// Goes on after a take-over that failed: the new vnetd may have installed flows in the kernel.
    pub fn go_on(&self) {
        self.interfaces.values().for_each(|live| live.interface.go_on());
        // Ends all flows of the kernel's own path. Programs and ports are the same in both vnetds.
        self.publish();
    }
}
