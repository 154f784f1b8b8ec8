//! The state of [`Overlay`], its clock, and this host's stations. `store_input.rs`, `publish.rs`, `compute.rs` and `vouched.rs`
//! implement the other parts.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};

use super::alarm::{Alarm, Alarms};
use super::entry::Entry;
use super::places::{Places, StationKey};
use super::record::{HostRecord, Key, StationRecord};
use crate::desired::LINKS_MAX;
use crate::desired::Topology;
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

/// Station limit: 128 on each of 1024 hosts. With sixteen addresses each they take about 100 MB.
pub const STATIONS_MAX: usize = 131_072;
/// Host limit per network: each host has a link, so the limit of links applies.
pub const HOSTS_MAX: usize = LINKS_MAX;
/// How long a host or station missing from a reachable store is kept, in milliseconds.
pub const FORGET_MS: u64 = 600_000;
/// How long a record restored from the previous run is kept while a reachable store lacks it, in milliseconds.
const RESTORED_MS: u64 = 60_000;
/// Number of snapshots that must have lacked a record before it is forgotten.
pub(super) const READINGS_MIN: u8 = 2;
/// Time after which a host deletes its own withdrawal, in milliseconds: every host has seen it by then.
pub(super) const WITHDRAWN_MS: u64 = 60_000;
/// Retry interval of a write that did not show up in the store, in milliseconds.
pub(super) const WRITE_MS: u64 = 1_000;
/// Rate limit and burst of repairs of this host's records, per second.
pub(super) const REPAIRS_PER_S: u64 = 50;
/// Maximum number of keys remembered whose value is no record; a guest at any other such key is claimed after the next snapshot.
pub(super) const OBSTACLES_MAX: usize = 8192;
/// Interval of the search for records to forget, in milliseconds.
pub(super) const SWEEP_MS: u64 = 10_000;

/// This host's settings in the overlay, from the configuration.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Which hosts have links to each other.
    pub topology: Topology,
    /// Hosts that relay for hosts behind NAT.
    pub reflectors: Vec<String>,
    /// True if only reflectors can reach this host.
    pub behind_nat: bool,
    /// Address published for links to this host; no record is published while it is unknown.
    pub address: Option<SocketAddr>,
    /// Networks of the overlay on this host.
    pub networks: BTreeSet<NetworkId>,
    /// How long a guest that has migrated stays a station of this host until another host claims it, and how long frames to it
    /// are forwarded, in milliseconds.
    pub forward_ms: u64,
}

/// An interface of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    /// Network id.
    pub network: NetworkId,
    /// The configured MAC address of its guest.
    pub mac: Option<Mac>,
    /// The guest's IP addresses.
    pub addresses: Vec<IpAddr>,
    /// True if a guest is connected.
    pub up: bool,
    /// True if the guest was stopped here because it migrates to another host, and `up` is false therefore.
    pub departed: bool,
    /// Frames received from the guest.
    pub in_frames: u64,
}

/// A conditional write: it succeeds only if the key's last revision is `expect` (0: the key does not exist).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The key.
    pub key: String,
    /// The value to put under this host's lease; `None` deletes the key.
    pub value: Option<Vec<u8>>,
    /// The key's current revision.
    pub expect: i64,
}

/// State of the connection to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Store {
    /// The store was never reached.
    Unknown,
    /// In sync with the store since this time.
    Here(u64),
    /// The store has been unreachable since this time.
    Away(u64),
}

/// The records of one network.
#[derive(Default)]
pub(super) struct Network {
    pub(super) hosts: BTreeMap<Box<str>, Entry<HostRecord>>,
    pub(super) stations: HashMap<Mac, Entry<StationRecord>>,
}

/// A station of this host.
#[derive(Debug, Default)]
pub(super) struct Guest {
    pub(super) addresses: Vec<IpAddr>,
    pub(super) in_frames: u64,
    /// The store contains this host's record of the station.
    pub(super) claimed: bool,
    /// Another host claims it.
    pub(super) rivalled: bool,
    /// The guest's frame count when the rival claim was noticed. Earlier frames may have been counted late, so only later ones
    /// prove that the guest still sends.
    pub(super) rivalled_at: Option<u64>,
    /// The station moved to another host.
    pub(super) lost: bool,
    /// The guest migrates to another host.
    pub(super) departed: bool,
    /// Time at which it was found to have departed.
    pub(super) departed_ms: Option<u64>,
}

impl Guest {
    /// True if frames for the guest that still arrive here are forwarded to its new host.
    pub(super) fn is_forwarded(&self) -> bool {
        self.lost && self.departed
    }
}

/// The state machine of one host. Times are milliseconds of a monotonic clock.
pub struct Overlay {
    pub(super) me: Box<str>,
    pub(super) instance: u64,
    pub(super) settings: Settings,
    pub(super) lease: i64,
    pub(super) store: Store,
    pub(super) networks: BTreeMap<NetworkId, Network>,
    /// Number of stations in all networks.
    pub(super) stations: usize,
    /// Networks that this host has interfaces in.
    pub(super) members: BTreeSet<NetworkId>,
    /// Revisions of keys of unknown stations whose value is no record: garbage, or unsigned records of a previous run. A guest
    /// that connects with such an address overwrites the value. At most [`OBSTACLES_MAX`].
    pub(super) obstacles: HashMap<(NetworkId, Mac), i64>,
    /// Stations of this host with a connected guest.
    pub(super) guests: BTreeMap<(NetworkId, Mac), Guest>,
    /// Stations that the store places on this host, not withdrawn.
    pub(super) mine: BTreeSet<(NetworkId, Mac)>,
    /// Stations whose guest has just disconnected.
    pub(super) leaving: BTreeSet<(NetworkId, Mac)>,
    /// Stations claimed for unknown hosts, by host; at most [`STATIONS_MAX`] in all.
    pub(super) waiting: HashMap<(NetworkId, Box<str>), BTreeSet<Mac>>,
    pub(super) waiting_count: usize,
    /// Networks in which the store contains this run's record of this host.
    pub(super) joined: BTreeSet<NetworkId>,
    /// Writes in flight, with the times at which they are retried.
    pub(super) sent: HashMap<Key, u64>,
    /// Values in flight to the store, oldest first: this host recognises its own writes by them.
    pub(super) written: HashMap<Key, VecDeque<Vec<u8>>>,
    /// True until the first snapshot of this run is complete: records in it are history, not an attack.
    pub(super) is_new: bool,
    /// Time until which another host of this name is assumed to exist; its stations are not repaired.
    pub(super) namesake_until_ms: u64,
    /// This host's withdrawals, with the times at which they were written.
    pub(super) withdrawals: BTreeMap<Key, u64>,
    pub(super) timers: BTreeSet<(u64, Key)>,
    pub(super) reading: u32,
    /// Tokens of the repair rate limit, and the time of the last refill.
    pub(super) repairs: (u64, u64),
    pub(super) swept_ms: u64,
    /// Times at which hosts' links last received something.
    pub(super) heard: HashMap<Box<str>, u64>,
    pub(super) alarms: Alarms,
    /// Result of the last computation: stations, and below, the link names that they index.
    pub(super) places: Places,
    pub(super) hops: Vec<Box<str>>,
    /// Stations whose route must be recomputed.
    pub(super) dirty: HashSet<StationKey>,
    /// Hosts or networks changed: all stations must be recomputed.
    pub(super) restructured: bool,
    /// An input changed since the last computation.
    pub(super) changed: bool,
    /// A record changed since the state was saved.
    pub(super) unsaved: bool,
}

impl Overlay {
    /// Host `me` without any records. `instance` is a random number of each run of vnetd.
    pub fn new(me: Box<str>, instance: u64, settings: Settings) -> Overlay {
        let networks = settings.networks.iter().map(|network| (*network, Network::default())).collect();
        Overlay {
            me,
            instance,
            settings,
            lease: 0,
            store: Store::Unknown,
            networks,
            stations: 0,
            members: BTreeSet::new(),
            obstacles: HashMap::new(),
            guests: BTreeMap::new(),
            mine: BTreeSet::new(),
            leaving: BTreeSet::new(),
            waiting: HashMap::new(),
            waiting_count: 0,
            joined: BTreeSet::new(),
            sent: HashMap::new(),
            written: HashMap::new(),
            is_new: true,
            namesake_until_ms: 0,
            withdrawals: BTreeMap::new(),
            timers: BTreeSet::new(),
            reading: 0,
            repairs: (REPAIRS_PER_S, 0),
            swept_ms: 0,
            heard: HashMap::new(),
            alarms: Alarms::default(),
            places: Places::default(),
            hops: vec![],
            dirty: HashSet::new(),
            restructured: true,
            changed: true,
            unsaved: false,
        }
    }

    /// Sets the address published for links to this host.
    pub fn set_address(&mut self, address: SocketAddr) {
        self.settings.address = Some(address);
        self.restructure();
    }

    /// The address published for links to this host.
    pub fn address(&self) -> Option<SocketAddr> {
        self.settings.address
    }

    /// The store is reachable, and this host's records have `lease`. A snapshot follows.
    pub fn connected(&mut self, lease: i64, now_ms: u64) {
        self.lease = lease;
        self.sent.clear();
        // Count absence from now: the records may have been there while the store was unreachable.
        for network in self.networks.values_mut() {
            let hosts = network.hosts.values_mut().map(|entry| &mut entry.silent_since_ms);
            let stations = network.stations.values_mut().map(|entry| &mut entry.silent_since_ms);
            hosts.chain(stations).flatten().for_each(|since| *since = now_ms);
        }
    }

    /// The store is unreachable: keep all records.
    pub fn away(&mut self, now_ms: u64) {
        if matches!(self.store, Store::Here(_)) {
            self.store = Store::Away(now_ms);
            self.changed = true;
        }
        self.sent.clear();
    }

    /// True while the overlay is in sync with the store.
    pub fn in_step(&self) -> bool {
        matches!(self.store, Store::Here(_))
    }

    /// Records that a host's link received something.
    pub fn heard(&mut self, host: &str, now_ms: u64) {
        let room = self.heard.len() < HOSTS_MAX;
        match self.heard.get_mut(host) {
            Some(at) => *at = now_ms,
            None if room => {
                self.heard.insert(host.into(), now_ms);
            }
            None => {}
        }
    }

    /// Raises an alarm on behalf of the caller.
    pub fn alarm(&mut self, alarm: Alarm, now_ms: u64, text: String) {
        self.alarms.raise(alarm, now_ms, text);
    }

    /// Advances the time: pending records settle, frozen ones thaw.
    pub fn tick(&mut self, now_ms: u64) {
        while let Some((at, key)) = self.timers.first().filter(|(at, _)| *at <= now_ms).cloned() {
            self.timers.remove(&(at, key.clone()));
            let Some(network) = self.networks.get_mut(&key.network()) else { continue };
            match &key {
                Key::Host(id, name) => {
                    let Some(entry) = network.hosts.get_mut(name) else { continue };
                    entry.timer_ms = None;
                    let matured = entry.mature(now_ms);
                    let outcome = entry.consider(true, false, now_ms);
                    let is = entry.in_force().is_some();
                    if matured {
                        self.restructure();
                    }
                    self.conclude(outcome, key.clone(), now_ms);
                    if matured && is {
                        self.reconsider(*id, name, now_ms);
                    }
                }
                Key::Station(id, mac) => {
                    let Some(entry) = network.stations.get_mut(mac) else { continue };
                    entry.timer_ms = None;
                    if entry.mature(now_ms) {
                        self.touch(&key);
                    }
                    self.consider_station(*id, *mac, now_ms);
                }
            }
        }
        self.watch_losses();
        self.end_departures(now_ms);
        if now_ms >= self.swept_ms + SWEEP_MS {
            self.swept_ms = now_ms;
            self.sweep(now_ms);
        }
    }

    /// Detects stations of this host that have moved to another host.
    fn watch_losses(&mut self) {
        for ((network, mac), guest) in &mut self.guests {
            let entry = self.networks.get_mut(network).and_then(|network| network.stations.get_mut(mac));
            let elsewhere = entry.is_some_and(|entry| {
                let pending = entry.pending.as_ref().map(|(record, _)| record.host == self.me);
                // This host has nothing to contradict if its guest has departed, and frames for it arrive meanwhile.
                if guest.departed && pending == Some(false) {
                    entry.hasten();
                }
                // A guest that has just arrived stays here while all hosts hold back this host's claim.
                entry.in_force().is_some_and(|record| record.host != self.me) && pending != Some(true)
            });
            let lost = elsewhere && guest.claimed;
            if lost != guest.lost {
                guest.lost = lost;
                self.dirty.insert((*network, *mac));
                self.changed = true;
            }
        }
    }

    /// Forgets guests that departed long ago.
    fn end_departures(&mut self, now_ms: u64) {
        let mut ended = vec![];
        for (place, guest) in self.guests.iter_mut().filter(|(_, guest)| guest.departed) {
            let since_ms = *guest.departed_ms.get_or_insert(now_ms);
            if since_ms + self.settings.forward_ms <= now_ms {
                ended.push(*place);
            }
        }
        for place in ended {
            self.guests.remove(&place);
            self.dirty.insert(place);
            self.changed = true;
            if self.mine.contains(&place) {
                self.leaving.insert(place);
            }
        }
    }

    /// Forgets records that have been missing from the store for too long.
    fn sweep(&mut self, now_ms: u64) {
        if !self.in_step() {
            return;
        }
        let Overlay { written, sent, guests, mine, me, .. } = self;
        written.retain(|key, _| match key {
            Key::Host(_, name) => name == me,
            Key::Station(id, mac) => {
                sent.contains_key(key) || guests.contains_key(&(*id, *mac)) || mine.contains(&(*id, *mac))
            }
        });
        let due = |since: Option<u64>, missed, restored| {
            let (after_ms, readings) = if restored { (RESTORED_MS, 1) } else { (FORGET_MS, READINGS_MIN) };
            since.is_some_and(|since| since + after_ms <= now_ms) && missed >= readings
        };
        let heard = |name: &str| self.heard.get(name).is_some_and(|at| at + FORGET_MS > now_ms);
        let mut gone = vec![];
        for (id, network) in &self.networks {
            let hosts = network.hosts.iter().filter(|(name, entry)| {
                due(entry.silent_since_ms, entry.missed, entry.restored) && !heard(name) && **name != self.me
            });
            gone.extend(hosts.map(|(name, _)| Key::Host(*id, name.clone())));
            let stations = network.stations.iter().filter(|(_, entry)| {
                let host = entry.in_force().map(|record| &record.host);
                due(entry.silent_since_ms, entry.missed, entry.restored)
                    && !host.is_some_and(|host| heard(host))
            });
            gone.extend(stations.map(|(mac, _)| Key::Station(*id, *mac)));
        }
        gone.iter().for_each(|key| self.remove(key));
    }

    /// Sets the stations of this host.
    pub fn locals(&mut self, locals: &[Local]) {
        let is_ours = |local: &&Local| self.settings.networks.contains(&local.network);
        let ours: Vec<&Local> = locals.iter().filter(is_ours).collect();
        let mut before = std::mem::take(&mut self.guests);
        for local in ours.iter().filter(|local| local.up || local.departed) {
            let Some(mac) = local.mac else { continue };
            let place = (local.network, mac);
            // A guest that comes back from its new host arrives like any other.
            let known = before.remove(&place).filter(|guest| !(local.up && guest.is_forwarded()));
            if local.departed && known.is_none() {
                continue;
            }
            if known.as_ref().is_none_or(|guest| guest.addresses != local.addresses) {
                self.dirty.insert(place);
                self.changed = true;
            }
            let (addresses, in_frames, departed) = (local.addresses.clone(), local.in_frames, local.departed);
            self.changed |= known.as_ref().is_some_and(|guest| guest.departed != departed);
            let mut guest = Guest { addresses, in_frames, departed, ..known.unwrap_or_default() };
            if !departed {
                guest.departed_ms = None;
            }
            if guest.rivalled && guest.rivalled_at.is_none() {
                guest.rivalled_at = Some(in_frames);
            }
            self.guests.insert(place, guest);
        }
        // A departed guest's interface may be deleted at once.
        let (departed, before): (BTreeMap<_, _>, BTreeMap<_, _>) =
            before.into_iter().partition(|(_, guest)| guest.departed);
        self.guests.extend(departed);
        let departed = self.guests.iter().filter(|(_, guest)| guest.departed).map(|((id, _), _)| *id);
        let members: BTreeSet<NetworkId> = ours.iter().map(|local| local.network).chain(departed).collect();
        if members != self.members {
            self.members = members;
            self.restructure();
        }
        self.changed |= !before.is_empty();
        self.dirty.extend(before.keys());
        self.leaving.extend(before.into_keys());
        let Overlay { mine, sent, guests, leaving, .. } = self;
        leaving.retain(|place| {
            let written = mine.contains(place) || sent.contains_key(&Key::Station(place.0, place.1));
            written && !guests.contains_key(place)
        });
    }

    /// True once after a change that may affect the computed links and routes.
    pub fn take_changed(&mut self) -> bool {
        self.unsaved |= self.changed;
        std::mem::take(&mut self.changed)
    }
}
