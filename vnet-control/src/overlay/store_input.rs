//! Input from the store: records of snapshots and watch events, and the decisions that follow.

use std::collections::BTreeSet;
use std::fmt;

use super::alarm::Alarm;
use super::entry::{Entry, Outcome};
use super::record::{HostRecord, Key, Record, StationRecord};
use super::state::{HOSTS_MAX, Network, OBSTACLES_MAX, Overlay, STATIONS_MAX, Store};
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

/// How long another host of this name is assumed to exist after its last write; both stop repairing for that long.
const NAMESAKE_MS: u64 = 2 * vnet::route::FREEZE_MS;

impl Overlay {
    /// Begins a snapshot of the store.
    pub fn begin_reading(&mut self) {
        self.reading = self.reading.wrapping_add(1);
        self.obstacles.clear();
    }

    /// Ends a snapshot: records that it did not contain are missing from the store.
    pub fn end_reading(&mut self, now_ms: u64) {
        let reading = self.reading;
        let mut lost = Lost::default();
        let me = self.me.clone();
        for network in self.networks.values_mut() {
            // This host's own records vanish with its lease; the host writes them again.
            network.hosts.retain(|name, entry| {
                let other = (**name != *me).then_some(&**name);
                !missed(entry, reading, now_ms, |_| other.map(Into::into), &mut lost)
            });
            network.stations.retain(|_, entry| {
                let host = |record: &StationRecord| (record.host != me).then(|| record.host.clone());
                !missed(entry, reading, now_ms, host, &mut lost)
            });
        }
        self.count_stations();
        let networks = &self.networks;
        self.mine.retain(|(network, mac)| {
            let entry = networks.get(network).and_then(|network| network.stations.get(mac));
            entry.is_some_and(|entry| entry.stored.is_some())
        });
        if lost.records > 0 {
            self.alarms.raise(Alarm::Vanished, now_ms, lost.to_string());
        }
        self.is_new = false;
        if !matches!(self.store, Store::Here(_)) {
            self.store = Store::Here(now_ms);
            self.changed = true;
        }
    }

    /// Takes a snapshot's or watch event's `value` of `key`, written at `revision` under `lease`.
    pub fn put(&mut self, key: &[u8], value: &[u8], lease: i64, revision: i64, now_ms: u64) {
        let Some(key) = Key::parse(key) else {
            let plain = |c: char| if c.is_control() { '\u{fffd}' } else { c };
            let shown: String = String::from_utf8_lossy(key).chars().take(80).map(plain).collect();
            return self.alarms.raise(
                Alarm::Garbage,
                now_ms,
                format!("'{shown}' is not a key of the overlay"),
            );
        };
        if !self.networks.contains_key(&key.network()) {
            return;
        }
        self.sent.remove(&key);
        let sound = match &key {
            Key::Host(network, name) => {
                let record = HostRecord::parse(value);
                let sound = record.is_some();
                self.put_host(*network, name, record, lease, revision, now_ms);
                sound
            }
            Key::Station(network, mac) => {
                let record = StationRecord::parse(value);
                let sound = record.is_some();
                self.put_station(*network, *mac, record, lease, revision, now_ms);
                sound
            }
        };
        if !sound {
            self.alarms.raise(
                Alarm::Garbage,
                now_ms,
                format!("the value of {key} is not a valid record; ignored"),
            );
        }
    }

    pub(super) fn put_host(
        &mut self,
        network: NetworkId,
        name: &str,
        record: Option<HostRecord>,
        lease: i64,
        revision: i64,
        now_ms: u64,
    ) {
        let (me, instance) = (*self.me == *name, self.instance);
        let own = me && self.recognises_write(&Key::Host(network, name.into()), record.as_ref());
        let Some(hosts) = self.networks.get_mut(&network).map(|network| &mut network.hosts) else { return };
        if !hosts.contains_key(name) && !me && (record.is_none() || hosts.len() >= HOSTS_MAX) {
            if record.is_some() {
                let text = format!("more than {HOSTS_MAX} hosts in network {network}; {name} is ignored");
                self.alarms.raise(Alarm::Limit, now_ms, text);
            }
            return;
        }
        let entry = hosts.entry(name.into()).or_default();
        entry.reading = self.reading;
        if entry.is_newer(revision) {
            return;
        }
        entry.store(record, revision, lease, own);
        if me {
            let stored = entry.stored.as_ref().and_then(|stored| stored.record.as_ref());
            if lease == self.lease && stored.is_some_and(|record| record.instance == instance) {
                self.joined.insert(network);
            } else if !own && lease != 0 && stored.is_some_and(|record| record.instance != instance) {
                // Written under another lease by another instance that is not this host's previous run: a namesake.
                self.namesake_until_ms = now_ms + NAMESAKE_MS;
            }
            return;
        }
        let was = entry.in_force().is_some();
        let outcome = entry.consider(true, !matches!(self.store, Store::Here(_)), now_ms);
        let is = entry.in_force().is_some();
        self.conclude(outcome, Key::Host(network, name.into()), now_ms);
        if is && !was {
            self.reconsider(network, name, now_ms);
        }
    }

    pub(super) fn put_station(
        &mut self,
        network: NetworkId,
        mac: Mac,
        record: Option<StationRecord>,
        lease: i64,
        revision: i64,
        now_ms: u64,
    ) {
        let place = (network, mac);
        let own = self.guests.contains_key(&place);
        let ours = record.as_ref().is_none_or(|record| record.host == self.me);
        let written = ours && self.recognises_write(&Key::Station(network, mac), record.as_ref());
        let Some(stations) = self.networks.get_mut(&network).map(|network| &mut network.stations) else {
            return;
        };
        if !stations.contains_key(&mac) {
            if record.is_none() && !own {
                if self.obstacles.len() < OBSTACLES_MAX {
                    self.obstacles.insert(place, revision);
                }
                return;
            }
            if self.stations >= STATIONS_MAX && !own {
                let text =
                    format!("more than {STATIONS_MAX} stations; {mac} of network {network} is ignored");
                return self.alarms.raise(Alarm::Limit, now_ms, text);
            }
            self.stations += 1;
        }
        self.obstacles.remove(&place);
        let entry = stations.entry(mac).or_default();
        entry.reading = self.reading;
        if entry.is_newer(revision) {
            return;
        }
        let here = record.as_ref().is_some_and(|record| record.host == self.me && !record.withdrawn);
        if here {
            self.mine.insert(place)
        } else {
            self.mine.remove(&place)
        };
        entry.store(record, revision, lease, written);
        self.consider_station(network, mac, now_ms);
    }

    /// True for a record of this host's history: written by this host, or found at its start.
    fn recognises_write<R: Record>(&mut self, key: &Key, record: Option<&R>) -> bool {
        if self.is_new {
            return true;
        }
        let (Some(record), Some(written)) = (record, self.written.get_mut(key)) else { return false };
        let value = record.write();
        // Writes show up in the order in which they were sent; the store refused those before this one.
        let at = written.iter().position(|other| *other == value);
        at.inspect(|at| drop(written.drain(..=*at))).is_some()
    }

    /// Decides about the stored record of a station.
    pub(super) fn consider_station(&mut self, network: NetworkId, mac: Mac, now_ms: u64) {
        let away = !matches!(self.store, Store::Here(_));
        let Some(Network { hosts, stations }) = self.networks.get_mut(&network) else { return };
        let Some(entry) = stations.get_mut(&mac) else { return };
        let is_there =
            |host: &str| *host == *self.me || hosts.get(host).is_some_and(|host| host.in_force().is_some());
        let protected = entry.in_force().is_some_and(|record| is_there(&record.host));
        let stored = entry.stored.as_ref().and_then(|stored| stored.record.clone());
        if let Some(record) = stored.filter(|record| protected && !is_there(&record.host)) {
            // No host of that name is known, so the record cannot come from its owner.
            entry.pending = None;
            if self.waiting_count < STATIONS_MAX {
                let waiting = self.waiting.entry((network, record.host.clone())).or_default();
                self.waiting_count += usize::from(waiting.insert(mac));
            }
            let text = format!("{mac} of network {network} is claimed for unknown host {}", record.host);
            return self.alarms.raise(Alarm::UnknownHost, now_ms, text);
        }
        let outcome = entry.consider(protected, away, now_ms);
        self.conclude(outcome, Key::Station(network, mac), now_ms);
    }

    /// Decides again about stations claimed for a host that was unknown until now.
    pub(super) fn reconsider(&mut self, network: NetworkId, host: &str, now_ms: u64) {
        let Some(waiting) = self.waiting.remove(&(network, host.into())) else { return };
        self.waiting_count -= waiting.len();
        waiting.into_iter().for_each(|mac| self.consider_station(network, mac, now_ms));
    }

    /// Carries out a decision: timer, alarm, recomputation.
    pub(super) fn conclude(&mut self, outcome: Outcome, key: Key, now_ms: u64) {
        match outcome {
            Outcome::Settled => self.touch(&key),
            Outcome::Refused => {
                let text = format!("{key} is claimed without the next sequence number; ignored");
                self.alarms.raise(Alarm::Sequence, now_ms, text);
            }
            Outcome::Freezes => {
                let text = format!("{key} is claimed by several hosts in turn; frozen at its host for 180 s");
                self.alarms.raise(Alarm::Frozen, now_ms, text);
            }
            Outcome::Unchanged | Outcome::Waits | Outcome::Frozen => {}
        }
        self.schedule(key, now_ms);
    }

    fn schedule(&mut self, key: Key, now_ms: u64) {
        let Some(network) = self.networks.get_mut(&key.network()) else { return };
        let (timer, next) = match &key {
            Key::Host(_, name) => match network.hosts.get_mut(name) {
                Some(entry) => {
                    let next = entry.next_ms(now_ms);
                    (&mut entry.timer_ms, next)
                }
                None => return,
            },
            Key::Station(_, mac) => match network.stations.get_mut(mac) {
                Some(entry) => {
                    let next = entry.next_ms(now_ms);
                    (&mut entry.timer_ms, next)
                }
                None => return,
            },
        };
        if *timer != next {
            let before = std::mem::replace(timer, next);
            before.map(|at| self.timers.remove(&(at, key.clone())));
            next.map(|at| self.timers.insert((at, key)));
        }
    }

    /// Handles the deletion of a key at `revision`.
    pub fn delete(&mut self, key: &[u8], revision: i64, now_ms: u64) {
        let Some(key) = Key::parse(key) else { return };
        self.sent.remove(&key);
        if let Key::Station(id, mac) = &key {
            self.obstacles.remove(&(*id, *mac));
        }
        let Some(network) = self.networks.get_mut(&key.network()) else { return };
        let gone = match &key {
            Key::Host(_, name) => match network.hosts.get_mut(name) {
                Some(entry) if !entry.is_newer(revision) => entry.vanish(now_ms),
                _ => return,
            },
            Key::Station(id, mac) => match network.stations.get_mut(mac) {
                Some(entry) if !entry.is_newer(revision) => {
                    self.mine.remove(&(*id, *mac));
                    entry.vanish(now_ms)
                }
                _ => return,
            },
        };
        self.withdrawals.remove(&key);
        self.schedule(key.clone(), now_ms);
        if gone {
            self.remove(&key);
        }
    }

    pub(super) fn remove(&mut self, key: &Key) {
        let Some(network) = self.networks.get_mut(&key.network()) else { return };
        let timer = match key {
            Key::Host(_, name) => network.hosts.remove(name).and_then(|entry| entry.timer_ms),
            Key::Station(_, mac) => network.stations.remove(mac).and_then(|entry| entry.timer_ms),
        };
        timer.map(|at| self.timers.remove(&(at, key.clone())));
        self.count_stations();
        self.touch(key);
    }

    /// Marks an object for recomputation.
    pub(super) fn touch(&mut self, key: &Key) {
        match key {
            Key::Host(..) => self.restructure(),
            Key::Station(id, mac) => {
                self.dirty.insert((*id, *mac));
                self.changed = true;
            }
        }
    }

    pub(super) fn restructure(&mut self) {
        (self.restructured, self.changed) = (true, true);
        self.dirty.clear();
    }

    fn count_stations(&mut self) {
        self.stations = self.networks.values().map(|network| network.stations.len()).sum();
    }
}

/// Records of other hosts that a snapshot lacked.
#[derive(Default)]
struct Lost {
    records: usize,
    all: usize,
    hosts: BTreeSet<Box<str>>,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMED_MAX: usize = 3;
        let Lost { records, all, hosts } = self;
        let named: Vec<&str> = hosts.iter().take(NAMED_MAX).map(|name| &**name).collect();
        let more = if hosts.len() > NAMED_MAX { ", …" } else { "" };
        let named = named.join(", ");
        write!(
            f,
            "the store lost {records} of {all} records without a withdrawal, of {named}{more}: they cannot reach the \
             store, or somebody deleted them; keeping them"
        )
    }
}

/// Marks an entry that a snapshot lacked; true if the entry can be dropped. `host`: name of the other host that wrote the record.
fn missed<R: Record>(
    entry: &mut Entry<R>,
    reading: u32,
    now_ms: u64,
    host: impl Fn(&R) -> Option<Box<str>>,
    lost: &mut Lost,
) -> bool {
    let host = entry.in_force().and_then(|record| host(record));
    lost.all += usize::from(entry.in_force().is_some());
    if entry.reading == reading {
        return false;
    }
    entry.missed = entry.missed.saturating_add(1);
    let gone = entry.vanish(now_ms);
    // A restored record raises no alarm: the store may have changed while this host was down.
    if let Some(host) = host.filter(|_| !gone && !entry.restored) {
        lost.records += 1;
        lost.hosts.insert(host);
    }
    gone
}
