//! The distributed overlay: what the hosts tell each other through a store, and what this host makes of it.
//!
//! [`Overlay`] is a state machine without I/O and without a clock. It is told what the store says ([`Overlay::put`],
//! [`Overlay::delete`]), what stands on this host ([`Overlay::locals`]) and what time it is; it tells what to write
//! ([`Overlay::writes`]) and what this host's links and routes should be ([`Overlay::computed`], in `compute.rs`). `vnetd`
//! has the agent that connects it to etcd and to the engine.
//!
//! # Who writes what
//! A host writes its own part in each network it has interfaces in, and each interface that has a configured address and a
//! guest behind it, all under one lease. What guests send is never written: no guest can fill the store or take an address
//! there. An address that comes up where another host had it is claimed with the next sequence number (RFC 7432, section 7.7);
//! the host that loses it claims it back only when its own guest still sends frames.
//!
//! # Whom to believe
//! Whoever may write to the store can write anything. Three rules keep the damage small:
//!
//! - Each host watches its own records and puts them right. Changes of what is in force wait for that (`entry.rs`).
//! - Five moves within 180 s freeze an object where it is, for 180 s; nobody writes it any more, so that two who fight for it
//!   load the store no further.
//! - A guest's address that is in use here is here, whatever the store says.
//!
//! Where links are sealed, the state machine is told of sound records only that their writer's certificate vouches for
//! (`authenticator.rs`, `signed.rs`); others count as no records (`vouched.rs`).
//!
//! # What outlives the store
//! All of it. While the store is away nothing changes but what is learned from frames; when it is back, whatever is missing
//! there stays in force. A host that is silent in the store is forgotten after [`FORGET_MS`], when it was missed by two
//! whole readings and nothing came by its link meanwhile; a record that withdraws it does so at once.

mod alarm;
mod authenticator;
mod compute;
mod entry;
mod news;
#[cfg(test)]
mod oracle;
mod places;
mod publish;
pub mod record;
pub mod signed;
#[cfg(test)]
mod tests;
mod vouched;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

use crate::desired::Topology;
pub use alarm::Alarm;
use alarm::Alarms;
pub use authenticator::Authenticator;
pub use compute::{Computed, PeerLink};
use entry::Entry;
pub use entry::{HOLD_MS, SEQUENCE_STEP_MAX};
use places::{Place, Places};
use record::{HostRecord, Key, StationRecord};

use super::desired::LINKS_MAX;
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

/// Most stations that are kept: 128 on each of 1 024 hosts. With sixteen addresses each they take about 100 MB.
pub const STATIONS_MAX: usize = 131_072;
/// Most hosts that are kept in one network: each has a link.
pub const HOSTS_MAX: usize = LINKS_MAX;
/// Milliseconds for which a host or station that vanished from the store is kept while the store is there.
pub const FORGET_MS: u64 = 600_000;
/// Whole readings of the store that must have missed it, too.
const READINGS_MIN: u8 = 2;
/// Milliseconds after which a withdrawal of one's own is taken out of the store: long enough for everybody to have seen it.
const WITHDRAWN_MS: u64 = 60_000;
/// Milliseconds after which a write that nothing was heard of is made again.
const WRITE_MS: u64 = 1_000;
/// How many records of this host that others wrote are put right a second, and at once.
const REPAIRS_PER_S: u64 = 50;
/// How often what has vanished is looked through, in milliseconds.
const SWEEP_MS: u64 = 10_000;

/// What the configuration says about this host's part.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Which hosts have links to each other.
    pub topology: Topology,
    /// Hosts that relay for those behind NAT.
    pub reflectors: Vec<String>,
    /// Whether only reflectors can reach this host.
    pub behind_nat: bool,
    /// Where other hosts reach this one; nothing is published while that is not known.
    pub address: Option<SocketAddr>,
    /// The networks of the overlay that this host takes part in.
    pub networks: BTreeSet<NetworkId>,
}

/// An interface of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    /// Its network.
    pub network: NetworkId,
    /// The configured address of its guest.
    pub mac: Option<Mac>,
    /// The guest's IP addresses.
    pub addresses: Vec<IpAddr>,
    /// Whether a guest is behind it.
    pub up: bool,
    /// Frames that came from the guest so far.
    pub in_frames: u64,
}

/// One change of the store, to be made if the key was last written in revision `expect` (0: is not there).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The key.
    pub key: String,
    /// The value, to be put under this host's lease; `None`: the key goes.
    pub value: Option<Vec<u8>>,
    /// Its revision now.
    pub expect: i64,
}

/// The store, as seen from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Store {
    /// Never reached.
    Unknown,
    /// In step since then.
    Here(u64),
    /// Out of reach since then.
    Away(u64),
}

/// What is known of one network.
#[derive(Default)]
struct Network {
    hosts: BTreeMap<Box<str>, Entry<HostRecord>>,
    stations: HashMap<Mac, Entry<StationRecord>>,
}

/// A station of this host.
#[derive(Debug, Default)]
struct Guest {
    addresses: Vec<IpAddr>,
    in_frames: u64,
    /// The store has said that it is here.
    claimed: bool,
    /// Another host claims it.
    rivalled: bool,
    /// How many frames it had sent when that was noticed; of those before, some may just not have been counted.
    rivalled_at: Option<u64>,
    /// It is elsewhere now.
    lost: bool,
}

/// The state machine of one host. Times are milliseconds of one monotonic clock.
pub struct Overlay {
    me: Box<str>,
    instance: u64,
    settings: Settings,
    lease: i64,
    store: Store,
    networks: BTreeMap<NetworkId, Network>,
    /// How many stations are kept, in all networks.
    stations: usize,
    /// Networks that this host has interfaces in.
    members: BTreeSet<NetworkId>,
    /// Stations of this host that have a guest.
    guests: BTreeMap<(NetworkId, Mac), Guest>,
    /// Stations that the store says are on this host, and not withdrawn.
    mine: BTreeSet<(NetworkId, Mac)>,
    /// Stations whose guest has just gone.
    leaving: BTreeSet<(NetworkId, Mac)>,
    /// Stations that are claimed for hosts which are not there, by host; all together at most [`STATIONS_MAX`].
    waiting: HashMap<(NetworkId, Box<str>), BTreeSet<Mac>>,
    waiting_count: usize,
    /// Networks in which the store has had this life's record of this host.
    joined: BTreeSet<NetworkId>,
    /// Writes under way, and until when they are waited for.
    sent: HashMap<Key, u64>,
    /// Withdrawals of this host, and since when they stand.
    withdrawals: BTreeMap<Key, u64>,
    timers: BTreeSet<(u64, Key)>,
    reading: u32,
    /// Repairs that may be made, and when they were counted last.
    repairs: (u64, u64),
    swept_ms: u64,
    /// Hosts that were heard by their links, and when.
    heard: HashMap<Box<str>, u64>,
    alarms: Alarms,
    /// What was computed last of stations, and the names of the links that it counts by.
    places: Places,
    hops: Vec<Box<str>>,
    /// Stations that have to be computed anew.
    dirty: HashSet<Place>,
    /// Hosts or networks have changed: all stations have to be.
    restructured: bool,
    /// Anything has changed.
    changed: bool,
}

impl Overlay {
    /// Host `me`, which knows nothing yet. `instance` is drawn at random for each life of a daemon.
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
            guests: BTreeMap::new(),
            mine: BTreeSet::new(),
            leaving: BTreeSet::new(),
            waiting: HashMap::new(),
            waiting_count: 0,
            joined: BTreeSet::new(),
            sent: HashMap::new(),
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
        }
    }

    /// The address at which other hosts reach this one is known now.
    pub fn set_address(&mut self, address: SocketAddr) {
        self.settings.address = Some(address);
        self.restructure();
    }

    /// The address at which other hosts reach this one.
    pub fn address(&self) -> Option<SocketAddr> {
        self.settings.address
    }

    /// The store is there, and holds this host's records under `lease`. A whole reading follows.
    pub fn connected(&mut self, lease: i64, now_ms: u64) {
        self.lease = lease;
        self.sent.clear();
        // What vanished while the store was away has only now been seen to be missing.
        for network in self.networks.values_mut() {
            let hosts = network.hosts.values_mut().map(|entry| &mut entry.silent_since_ms);
            let stations = network.stations.values_mut().map(|entry| &mut entry.silent_since_ms);
            hosts.chain(stations).flatten().for_each(|since| *since = now_ms);
        }
    }

    /// The store is out of reach: everything stays as it is.
    pub fn away(&mut self, now_ms: u64) {
        if matches!(self.store, Store::Here(_)) {
            self.store = Store::Away(now_ms);
            self.changed = true;
        }
        self.sent.clear();
    }

    /// True while what is computed follows the store.
    pub fn in_step(&self) -> bool {
        matches!(self.store, Store::Here(_))
    }

    /// Notes that something came by the link of a host.
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

    /// Raises an alarm that the caller has found.
    pub fn alarm(&mut self, alarm: Alarm, now_ms: u64, text: String) {
        self.alarms.raise(alarm, now_ms, text);
    }

    /// Lets time pass: what has stood long enough comes into force, what is frozen thaws.
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
        if now_ms >= self.swept_ms + SWEEP_MS {
            self.swept_ms = now_ms;
            self.sweep(now_ms);
        }
    }

    /// Notes which stations of this host are elsewhere now.
    fn watch_losses(&mut self) {
        for ((network, mac), guest) in &mut self.guests {
            let entry = self.networks.get(network).and_then(|network| network.stations.get(mac));
            let elsewhere = entry.and_then(Entry::in_force).is_some_and(|record| record.host != self.me);
            let lost = elsewhere && guest.claimed;
            if lost != guest.lost {
                guest.lost = lost;
                self.dirty.insert((*network, *mac));
                self.changed = true;
            }
        }
    }

    /// Forgets what vanished from the store long ago.
    fn sweep(&mut self, now_ms: u64) {
        if !self.in_step() {
            return;
        }
        let due = |since: Option<u64>, missed| {
            since.is_some_and(|since| since + FORGET_MS <= now_ms) && missed >= READINGS_MIN
        };
        let heard = |name: &str| self.heard.get(name).is_some_and(|at| at + FORGET_MS > now_ms);
        let mut gone = vec![];
        for (id, network) in &self.networks {
            let hosts = network.hosts.iter().filter(|(name, entry)| {
                due(entry.silent_since_ms, entry.missed) && !heard(name) && **name != self.me
            });
            gone.extend(hosts.map(|(name, _)| Key::Host(*id, name.clone())));
            let stations = network.stations.iter().filter(|(_, entry)| {
                let host = entry.in_force().map(|record| &record.host);
                due(entry.silent_since_ms, entry.missed) && !host.is_some_and(|host| heard(host))
            });
            gone.extend(stations.map(|(mac, _)| Key::Station(*id, *mac)));
        }
        gone.iter().for_each(|key| self.remove(key));
    }

    /// What stands on this host now.
    pub fn locals(&mut self, locals: &[Local]) {
        let is_ours = |local: &&Local| self.settings.networks.contains(&local.network);
        let ours: Vec<&Local> = locals.iter().filter(is_ours).collect();
        let members: BTreeSet<NetworkId> = ours.iter().map(|local| local.network).collect();
        if members != self.members {
            self.members = members;
            self.restructure();
        }
        let mut before = std::mem::take(&mut self.guests);
        for local in ours.into_iter().filter(|local| local.up) {
            let Some(mac) = local.mac else { continue };
            let place = (local.network, mac);
            let known = before.remove(&place);
            if known.as_ref().is_none_or(|guest| guest.addresses != local.addresses) {
                self.dirty.insert(place);
                self.changed = true;
            }
            let (addresses, in_frames) = (local.addresses.clone(), local.in_frames);
            let mut guest = Guest { addresses, in_frames, ..known.unwrap_or_default() };
            if guest.rivalled && guest.rivalled_at.is_none() {
                guest.rivalled_at = Some(in_frames);
            }
            self.guests.insert(place, guest);
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

    /// True, once, when what is computed may differ from what it was.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }
}
