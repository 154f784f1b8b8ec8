//! Computes links and routes from settled records: which hosts this one links to, the link to each station, and the
//! neighbours that vnet answers for.
//!
//! A link carries the networks that both ends are in, so that only hosts with members receive flooded frames. In a mesh every two
//! hosts have a link. A host behind NAT has a single one, to the first available reflector. Reflectors and hubs relay between
//! their spokes and all other hosts; every other host applies split horizon, so a flooded frame reaches each host once.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::alarm::Alarm;
use super::places::{Places, StationKey};
use super::record::{HostRecord, Key};
use super::state::{Overlay, Settings, Store};
use crate::api;
use crate::desired::Topology;
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

/// A link to another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerLink {
    /// Name of the host and of the link.
    pub name: Box<str>,
    /// The host's bridge address.
    pub remote: SocketAddr,
    /// The networks that both hosts are in.
    pub networks: Vec<NetworkId>,
    /// True if this host relays for the other host.
    pub spoke: bool,
}

/// The links and routes that this host needs beyond its configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Computed {
    /// True while the overlay follows the store; learned addresses then do not override station locations.
    pub firm: bool,
    /// Links, sorted by name.
    pub links: Vec<PeerLink>,
    /// Names of the links to stations. The configuration file may define some of them, so they need not be in `links`.
    pub hops: Vec<Box<str>>,
    /// Stations on other hosts, with an index into `hops`.
    pub stations: Arc<HashMap<(NetworkId, Mac), u16>>,
    /// Owners of IP addresses.
    pub neighbours: Arc<HashMap<(NetworkId, IpAddr), Mac>>,
    /// Stations that have migrated from here to other hosts: frames for them that arrive on links are forwarded, too.
    pub forwarded: HashSet<(NetworkId, Mac)>,
    /// Number of other hosts.
    pub hosts: usize,
}

/// Another host, with its record of each network.
struct Peer<'a> {
    record: &'a HostRecord,
    networks: BTreeSet<NetworkId>,
}

type Peers<'a> = BTreeMap<&'a str, Peer<'a>>;

impl Overlay {
    /// Computes this host's links and routes. Stations are recomputed only if they or hosts have changed.
    pub fn computed(&mut self) -> Computed {
        let mut places = std::mem::take(&mut self.places);
        let mut names = std::mem::take(&mut self.hops);
        let dirty = std::mem::take(&mut self.dirty);
        let (peers, _) = self.peers();
        if self.restructured {
            (places, names) = Default::default();
        }
        let mut hops = Hops { overlay: &*self, peers: &peers, network: None, known: HashMap::new(), names };
        if self.restructured {
            self.all_places().for_each(|place| hops.put(&mut places, place));
        } else {
            dirty.into_iter().for_each(|place| hops.put(&mut places, place));
        }
        let names = hops.names;
        let computed = Computed {
            firm: self.in_step(),
            links: self.links(&peers),
            hops: names.clone(),
            stations: places.stations.clone(),
            neighbours: places.neighbours.clone(),
            forwarded: self.forwarded(),
            hosts: peers.len(),
        };
        (self.places, self.hops, self.restructured) = (places, names, false);
        computed
    }

    fn forwarded(&self) -> HashSet<StationKey> {
        self.guests.iter().filter(|(_, guest)| guest.is_forwarded()).map(|(place, _)| *place).collect()
    }

    /// All stations, local and remote.
    fn all_places(&self) -> impl Iterator<Item = StationKey> {
        let stations = self
            .networks
            .iter()
            .flat_map(|(id, network)| network.stations.keys().map(move |mac| (*id, *mac)));
        self.guests.keys().copied().chain(stations)
    }

    /// The host that has a station (`None`: this host), and the station's IP addresses.
    fn whereabouts(&self, (id, mac): StationKey) -> Option<(Option<&str>, &[IpAddr])> {
        if let Some(guest) = self.guests.get(&(id, mac)).filter(|guest| !guest.lost) {
            return Some((None, &guest.addresses[..]));
        }
        let record = self.networks.get(&id)?.stations.get(&mac)?.in_force()?;
        (self.joins(id) && record.host != self.me).then_some((Some(&*record.host), &record.addresses[..]))
    }

    /// All other reachable hosts, and address conflicts. If two hosts publish the same address, or one host publishes two, the
    /// older record wins.
    fn peers(&self) -> (Peers<'_>, Vec<String>) {
        let mut entries: Vec<_> = vec![];
        for (id, network) in &self.networks {
            for (name, entry) in network.hosts.iter().filter(|(name, _)| **name != self.me) {
                // A restored record that the store no longer contains loses against records in the store.
                let since = (entry.restored && entry.missed > 0, entry.settled_revision);
                entries.extend(entry.in_force().map(|record| (since, *id, &**name, &**record)));
            }
        }
        entries.sort_by_key(|(since, id, name, _)| (*since, *name, *id));
        let (mut peers, mut taken, mut wrong) = (Peers::new(), HashMap::new(), vec![]);
        for (_, id, name, record) in entries {
            let at = record.address;
            if self.settings.address == Some(at) {
                wrong.push(format!("host {name} claims this host's address {at}"));
                continue;
            }
            let owner = *taken.entry(at).or_insert(name);
            if owner != name {
                wrong.push(format!("hosts {owner} and {name} both claim address {at}; {name} is ignored"));
                continue;
            }
            let new = || Peer { record, networks: BTreeSet::new() };
            let peer = peers.entry(name).or_insert_with(new);
            if peer.record.address == at {
                peer.networks.insert(id);
            } else {
                wrong.push(format!(
                    "host {name} claims addresses {} and {at}; the former holds",
                    peer.record.address
                ));
            }
        }
        (peers, wrong)
    }

    /// Raises alarms for hosts with conflicting addresses.
    pub fn check_addresses(&mut self, now_ms: u64) {
        let (_, wrong) = self.peers();
        wrong.into_iter().for_each(|text| self.alarm(Alarm::Address, now_ms, text));
    }

    fn links(&self, peers: &Peers<'_>) -> Vec<PeerLink> {
        let mut links = vec![];
        for (name, peer) in peers {
            let shared = |id: &&NetworkId| self.joins(**id);
            let networks: Vec<NetworkId> = peer.networks.iter().filter(shared).copied().collect();
            // A host can have a different reflector in each network.
            let direct = |id: &NetworkId| self.is_direct(peers, name, *id);
            let networks: Vec<NetworkId> = networks.into_iter().filter(direct).collect();
            if !networks.is_empty() {
                let spoke = self.is_spoke(peer);
                links.push(PeerLink { name: (*name).into(), remote: peer.record.address, networks, spoke });
            }
        }
        links
    }

    /// True if this host takes part in a network: it has interfaces there or relays for it.
    pub(super) fn joins(&self, id: NetworkId) -> bool {
        self.settings.networks.contains(&id) && (self.members.contains(&id) || self.relay())
    }

    fn relay(&self) -> bool {
        let Settings { topology, reflectors, .. } = &self.settings;
        match topology {
            Topology::Hub(name) => **name == *self.me,
            Topology::Mesh => reflectors.iter().any(|name| **name == *self.me),
            Topology::Explicit => false,
        }
    }

    /// True if this host relays for `peer`.
    fn is_spoke(&self, peer: &Peer<'_>) -> bool {
        match &self.settings.topology {
            Topology::Hub(name) => **name == *self.me,
            Topology::Mesh => self.relay() && peer.record.behind_nat,
            Topology::Explicit => false,
        }
    }

    /// The relay of a network for hosts behind NAT: the first reflector of the list that is present. Hosts that have
    /// seen the same records agree on it.
    fn reflector(&self, peers: &Peers<'_>, id: NetworkId) -> Option<&str> {
        let there = |name: &&String| {
            let here = ***name == *self.me && self.joins(id);
            here || peers.get(name.as_str()).is_some_and(|peer| peer.networks.contains(&id))
        };
        self.settings.reflectors.iter().find(there).map(String::as_str)
    }

    /// True if this host has its own link to `name` in a network.
    fn is_direct(&self, peers: &Peers<'_>, name: &str, id: NetworkId) -> bool {
        match &self.settings.topology {
            Topology::Explicit => false,
            Topology::Hub(hub) => **hub == *self.me || hub == name,
            Topology::Mesh => {
                let nat = |peer: Option<&Peer<'_>>| peer.is_some_and(|peer| peer.record.behind_nat);
                let (ours, theirs) = (self.settings.behind_nat, nat(peers.get(name)));
                let reflector = || self.reflector(peers, id);
                (!ours && !theirs)
                    || (ours && reflector() == Some(name))
                    || (theirs && reflector() == Some(&*self.me))
            }
        }
    }

    /// The next hop for a station on `host`.
    fn next_hop<'a>(&'a self, peers: &Peers<'a>, host: &'a str, id: NetworkId) -> Option<&'a str> {
        if self.settings.topology == Topology::Explicit || self.is_direct(peers, host, id) {
            return Some(host);
        }
        match &self.settings.topology {
            Topology::Hub(hub) => Some(hub),
            _ => self.reflector(peers, id).filter(|reflector| **reflector != *self.me),
        }
    }
}

/// Caches the next hop of each host of a network.
struct Hops<'a> {
    overlay: &'a Overlay,
    peers: &'a Peers<'a>,
    /// The network whose next hops `known` holds.
    network: Option<NetworkId>,
    known: HashMap<&'a str, Option<u16>>,
    names: Vec<Box<str>>,
}

impl<'a> Hops<'a> {
    /// Records where a station is.
    fn put(&mut self, places: &mut Places, place: StationKey) {
        match self.overlay.whereabouts(place) {
            Some((None, addresses)) => places.set(place, None, addresses),
            Some((Some(host), addresses)) => match self.toward(place.0, host) {
                Some(hop) => places.set(place, Some(hop), addresses),
                None => places.set(place, None, &[]),
            },
            None => places.set(place, None, &[]),
        }
    }

    /// The index in `names` of the link to `host`; `None` if there is no such host in the network.
    fn toward(&mut self, id: NetworkId, host: &'a str) -> Option<u16> {
        if self.network.replace(id) != Some(id) {
            self.known.clear();
        }
        if let Some(hop) = self.known.get(host) {
            return *hop;
        }
        let there = self.peers.get(host).is_some_and(|peer| peer.networks.contains(&id));
        let hop = if there { self.overlay.next_hop(self.peers, host, id) } else { None };
        let place = hop.and_then(|hop| {
            let known = self.names.iter().position(|name| **name == *hop);
            let place = known.unwrap_or_else(|| {
                self.names.push(hop.into());
                self.names.len() - 1
            });
            u16::try_from(place).ok()
        });
        self.known.insert(host, place);
        place
    }
}

/// The overlay's state for `vnet overlay`.
impl Overlay {
    /// Store, hosts and alarms; `revision` is the store's latest revision that the agent has seen.
    pub fn show(&self, endpoints: &[String], revision: i64, now_ms: u64) -> api::Overlay {
        let (state, since_ms) = match self.store {
            Store::Unknown => ("starting", 0),
            Store::Here(since) => ("connected", since),
            Store::Away(since) => ("away", since),
        };
        let mut hosts = BTreeMap::<&str, api::OverlayHost>::new();
        for (id, network) in &self.networks {
            for (name, entry) in network.hosts.iter().filter(|(name, _)| **name != self.me) {
                let Some(record) = entry.in_force() else { continue };
                let new = || api::OverlayHost {
                    name: name.to_string(),
                    address: record.address.to_string(),
                    networks: vec![],
                    behind_nat: record.behind_nat,
                    silent_s: None,
                };
                let host = hosts.entry(name).or_insert_with(new);
                host.networks.push(*id);
                host.silent_s = entry.silent_since_ms.map(|since| now_ms.saturating_sub(since) / 1000);
            }
        }
        // Only frozen and pending entries have a timer.
        let frozen = self.timers.iter().filter(|(_, key)| self.is_frozen(key, now_ms)).count();
        api::Overlay {
            state: state.into(),
            since_s: now_ms.saturating_sub(since_ms) / 1000,
            etcd: endpoints.to_vec(),
            revision,
            topology: self.settings.topology.to_string(),
            address: self.settings.address.map(|address| address.to_string()),
            published: self.guests.values().filter(|guest| guest.claimed && !guest.lost).count(),
            stations: self.networks.values().map(|network| network.stations.len()).sum(),
            frozen,
            hosts: hosts.into_values().collect(),
            alarms_total: self.alarms.total(),
            alarms: self.alarms.show(now_ms),
        }
    }

    fn is_frozen(&self, key: &Key, now_ms: u64) -> bool {
        let Some(network) = self.networks.get(&key.network()) else { return false };
        let moves = match key {
            Key::Host(_, name) => network.hosts.get(name).map(|entry| &entry.moves),
            Key::Station(_, mac) => network.stations.get(mac).map(|entry| &entry.moves),
        };
        moves.is_some_and(|moves| moves.is_frozen(now_ms))
    }
}
