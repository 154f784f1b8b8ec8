//! Links and stations that the overlay computes from the store: merged with the configuration, then validated and applied
//! like any other change.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::check::{links, security};
use super::desired::*;
use super::engine::{Engine, EngineError};
use super::open_close::Patience;
use super::overlay::{Computed, Local, PeerLink};
use super::plan::Plan;
use super::{Place, api, config};
use vnet::frame::PortId;
use vnet::interface::State;
use vnet::link::LinkKind;
use vnet::route::Published;

/// A link proves that its host is alive if it received something within this time.
const HEARD: Duration = Duration::from_secs(60);

impl Engine {
    /// Merges the overlay's computed links and stations into the running state. Unusable links are left out, with one line each
    /// returned as the reason. On an error nothing changes.
    pub fn join(&mut self, computed: Computed) -> Result<(Plan, Vec<String>), EngineError> {
        let (joined, refused) = self.usable(&self.own, computed);
        let before = std::mem::replace(&mut self.joined, joined);
        let merged = self.merged(&self.own);
        let done = config::validate(&merged)
            .map_err(EngineError::from)
            .and_then(|()| self.carry_out(merged, Patience::Awaited));
        match done {
            Ok(plan) => {
                if plan.is_empty() {
                    self.publish();
                }
                Ok((plan, refused))
            }
            Err(error) => {
                self.joined = before;
                Err(error)
            }
        }
    }

    /// Merges the overlay's last known links and stations before `desired` is applied for the first time. If the result is
    /// invalid, they are dropped; [`Engine::join`] will add them later.
    pub(super) fn join_early(&mut self, desired: &Desired, computed: Computed) {
        self.joined = self.usable(desired, computed).0;
        if config::validate(&self.merged(desired)).is_err() {
            self.joined = Computed::default();
        }
    }

    /// The usable part of the computed links and stations, and a line for each unusable link.
    fn usable(&self, own: &Desired, computed: Computed) -> (Computed, Vec<String>) {
        let mut refused = vec![];
        let links = computed.links.into_iter().filter(|peer| match self.unusable(own, peer) {
            Some(why) => {
                refused.push(why);
                false
            }
            None => true,
        });
        let usable = Computed { links: links.collect(), ..computed };
        (usable, refused)
    }

    /// Reason why a computed link is unusable; `None` if it can be added.
    fn unusable(&self, own: &Desired, peer: &PeerLink) -> Option<String> {
        let spec = link(own, peer);
        let to_oneself = || self.leads_here(&spec).then(|| links::to_oneself(&spec));
        let risky = || security::unsafe_link(own, &spec);
        links::unusable(&own.bridge.spec, &spec).or_else(to_oneself).or_else(risky)
    }

    /// `desired` plus the computed links; on a conflict `desired` wins.
    pub(super) fn merged(&self, desired: &Desired) -> Desired {
        let mut merged = desired.clone();
        if self.joined.links.is_empty() {
            return merged;
        }
        let names: HashSet<_> = desired.links.iter().map(|item| item.spec.name.as_str()).collect();
        let claims: HashSet<_> = desired.links.iter().flat_map(|item| links::claims(&item.spec)).collect();
        let declared: HashSet<_> = super::plan::networks(desired).iter().map(|item| item.spec.id).collect();
        let sealed: Vec<_> =
            desired.links.iter().filter_map(|item| item.spec.security.peer.as_ref()).collect();
        let room = LINKS_MAX.saturating_sub(desired.links.len());
        let usable = self.joined.links.iter().filter_map(|peer| {
            let mut spec = link(desired, peer);
            spec.networks.iter_mut().for_each(|ids| ids.retain(|id| declared.contains(id)));
            let empty = spec.networks.as_ref().is_some_and(Vec::is_empty);
            let claimed = links::claims(&spec).iter().any(|claim| claims.contains(claim));
            let sealed_with = |peer: &String| sealed.iter().any(|other| other.eq_ignore_ascii_case(peer));
            let known = spec.security.peer.as_ref().is_some_and(sealed_with);
            let taken = names.contains(&*peer.name) || claimed || known;
            (!empty && !taken).then_some(Item { place: Place::default(), spec })
        });
        merged.links.extend(usable.take(room));
        merged
    }

    /// Station locations from the store, as ports of existing links, for the dispatchers' lookup.
    pub(super) fn published(&self) -> Arc<Published> {
        let port = |name: &str| self.links.get(name).map(|live| live.port);
        let links = self.joined.hops.iter().map(|name| port(name).unwrap_or(PortId::NONE));
        let spokes = self.joined.links.iter().filter(|peer| peer.spoke).filter_map(|peer| port(&peer.name));
        Arc::new(Published {
            firm: self.joined.firm,
            places: self.joined.stations.clone(),
            links: links.collect(),
            neighbours: self.joined.neighbours.clone(),
            spokes: spokes.collect(),
            forwarded: self.joined.forwarded.clone(),
            relayed: self.current.networks.iter().filter(|n| n.spec.relay).map(|n| n.spec.id).collect(),
        })
    }

    /// This host's interfaces as input for the overlay, before they are open.
    pub fn planned_locals(desired: &Desired) -> Vec<Local> {
        let local = |Item { spec, .. }: &Item<InterfaceSpec>| Local {
            network: spec.network,
            mac: spec.mac,
            addresses: spec.addresses.clone(),
            up: true,
            departed: false,
            in_frames: 0,
        };
        desired.interfaces.iter().map(local).collect()
    }

    /// This host's open interfaces as input for the overlay.
    pub fn locals(&self) -> Vec<Local> {
        let local = |Item { spec, .. }: &Item<InterfaceSpec>| {
            let live = self.interfaces.get(&spec.name)?;
            let up = live.state() == State::Up;
            Some(Local {
                network: spec.network,
                mac: spec.mac,
                addresses: spec.addresses.clone(),
                up,
                departed: !up && live.interface.has_departed(),
                in_frames: live.stats.in_frames.get(),
            })
        };
        self.current.interfaces.iter().filter_map(local).collect()
    }

    /// Names of links that received something recently.
    pub fn heard(&self) -> Vec<String> {
        let now_ms = self.core.now_ms();
        let lately = |at: u64| now_ms.saturating_sub(at) < HEARD.as_millis() as u64;
        let heard = self.links.iter().filter(|(_, live)| live.link.heard_ms().is_some_and(lately));
        heard.map(|(name, _)| name.clone()).collect()
    }

    /// Keeps the overlay agent's latest report for the API.
    pub fn show_overlay(&mut self, shown: api::Overlay) {
        self.shown = Some(shown);
    }
}

/// The spec of a computed link.
fn link(own: &Desired, peer: &PeerLink) -> LinkSpec {
    let overlay = own.overlay.as_ref().map(|item| &item.spec);
    let name = peer.name.to_string();
    let security = LinkSecurity {
        trusted: overlay.is_some_and(|overlay| overlay.trusted),
        peer: overlay.is_some_and(|overlay| overlay.sealed).then(|| name.clone()),
        macs: None,
        via: None,
    };
    LinkSpec {
        name,
        remote: peer.remote,
        ports: 1,
        networks: Some(peer.networks.clone()),
        mtu: None,
        kind: LinkKind::default(),
        security,
    }
}
