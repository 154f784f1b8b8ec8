//! This host's writes to the store: its host records, its stations, and repairs of foreign writes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use super::alarm::Alarm;
use super::entry::{Entry, SEQUENCE_STEP_MAX, Stored, is_next};
use super::record::{HostRecord, Key, Record, StationRecord};
use super::state::{Network, Overlay, REPAIRS_PER_S, WITHDRAWN_MS, WRITE_MS, Write};
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

/// Values of one key that may be in flight to the store: one a second for the maximum duration of a request.
const WRITTEN_MAX: usize = 4;

/// Reason for writing a record.
enum Why {
    /// A change on this host.
    Own,
    /// Repair of a foreign write, with the alarm to raise and its text.
    Repair(Alarm, String),
}

/// The stored record of a station, as seen by a host that decides whether to write its own.
struct Seen {
    id: NetworkId,
    mac: Mac,
    /// `None` if the record is missing or malformed.
    record: Option<Arc<StationRecord>>,
    /// The key's revision; 0 if the key does not exist.
    expect: i64,
    /// The store has no record of the station.
    unknown: bool,
    /// The record has this host's lease.
    leased: bool,
    /// The record belongs to this host's history.
    own: bool,
}

impl Seen {
    fn new((id, mac): (NetworkId, Mac), entry: &Entry<StationRecord>, lease: i64, obstacle: i64) -> Seen {
        let stored = entry.stored.as_ref();
        Seen {
            id,
            mac,
            record: stored.and_then(|stored| stored.record.clone()),
            expect: stored.map_or(obstacle, |stored| stored.revision),
            unknown: stored.is_none(),
            leased: stored.is_some_and(|stored| stored.lease == lease),
            own: stored.is_some_and(|stored| stored.own),
        }
    }

    fn write(&self, record: &StationRecord) -> Write {
        let key = Key::Station(self.id, self.mac).to_string();
        Write { key, value: Some(record.write()), expect: self.expect }
    }

    fn forged(&self, what: &str) -> Why {
        let Seen { id, mac, .. } = self;
        let text =
            format!("{mac} of network {id} was {what}; restored. Who but the hosts may write to the store?");
        Why::Repair(Alarm::Forged, text)
    }

    fn duplicate(&self, other: &str) -> Why {
        let Seen { id, mac, .. } = self;
        let text = format!(
            "{mac} of network {id} sends frames on this host, and {other} claims it: give one of the two guests another address"
        );
        Why::Repair(Alarm::Duplicate, text)
    }

    /// The reason to write `record` of this host again for a connected guest; `None` if the stored one is right.
    fn own_record(&self, record: &StationRecord, addresses: &[IpAddr], has_namesake: bool) -> Option<Why> {
        let same = !record.withdrawn && record.addresses == addresses;
        // Another host of this name has a guest of this address, too: repairing its record would start an endless fight.
        let left_alone = has_namesake && !record.withdrawn && !self.own;
        if same && self.leased || left_alone && !self.leased {
            return None;
        }
        let own = same || self.own || has_namesake;
        Some(if own { Why::Own } else { self.forged("overwritten in the name of this host") })
    }
}

impl Overlay {
    /// The writes due now. A write is not returned again until it shows up in the store or times out.
    pub fn writes(&mut self, now_ms: u64) -> Vec<Write> {
        if !self.in_step() || self.lease == 0 {
            return vec![];
        }
        self.refill(now_ms);
        self.sent.retain(|_, until_ms| *until_ms > now_ms);
        let mut writes = vec![];
        for id in self.settings.networks.clone() {
            if let Some((write, why)) = self.host_write(id, now_ms) {
                self.send(Key::Host(id, self.me.clone()), write, why, now_ms, &mut writes);
            }
        }
        // Stations of connected guests, disconnected guests, and as many wrongly claimed stations as the repair limit allows.
        let forged = self.mine.iter().take(self.repairs.0 as usize + self.sent.len());
        let places: BTreeSet<_> = self.guests.keys().chain(&self.leaving).chain(forged).copied().collect();
        for (id, mac) in places {
            // Write host records before station records: other hosts need the certificate in the host's record to verify
            // stations.
            if self.joins(id) && self.settings.address.is_some() && !self.joined.contains(&id) {
                continue;
            }
            if let Some((write, why)) = self.station_write(id, mac, now_ms) {
                self.send(Key::Station(id, mac), write, why, now_ms, &mut writes);
            }
        }
        self.clear_withdrawals(now_ms, &mut writes);
        writes
    }

    /// Withdraws this host from all networks; returns its last writes.
    pub fn farewell(&mut self) -> Vec<Write> {
        let mut writes = vec![];
        for (id, network) in &self.networks {
            let Some(entry) = network.hosts.get(&self.me) else { continue };
            let Some(Stored { record: Some(record), revision, .. }) = &entry.stored else { continue };
            if record.instance == self.instance && !record.withdrawn {
                let value = HostRecord { withdrawn: true, ..HostRecord::clone(record) }.write();
                let key = Key::Host(*id, self.me.clone()).to_string();
                writes.push(Write { key, value: Some(value), expect: *revision });
            }
        }
        writes
    }

    fn refill(&mut self, now_ms: u64) {
        let (repairs, counted_ms) = self.repairs;
        let more = (now_ms - counted_ms.min(now_ms)) * REPAIRS_PER_S / 1000;
        if more > 0 {
            self.repairs = ((repairs + more).min(REPAIRS_PER_S), now_ms);
        }
    }

    fn send(&mut self, key: Key, write: Write, why: Why, now_ms: u64, writes: &mut Vec<Write>) {
        if self.sent.contains_key(&key) {
            return;
        }
        if let Why::Repair(alarm, text) = why {
            if self.repairs.0 == 0 {
                return;
            }
            self.repairs.0 -= 1;
            self.alarms.raise(alarm, now_ms, text);
        }
        if let Some(value) = &write.value {
            let written = self.written.entry(key.clone()).or_default();
            if written.len() == WRITTEN_MAX {
                written.pop_front();
            }
            written.push_back(value.clone());
        }
        self.sent.insert(key, now_ms + WRITE_MS);
        writes.push(write);
    }

    fn host_write(&mut self, id: NetworkId, now_ms: u64) -> Option<(Write, Why)> {
        let takes_part = self.joins(id);
        let (lease, instance, joined) = (self.lease, self.instance, self.joined.contains(&id));
        let address = self.settings.address;
        let behind_nat = self.settings.behind_nat;
        let entry = self.networks.get_mut(&id)?.hosts.entry(self.me.clone());
        let key = || Key::Host(id, self.me.clone()).to_string();
        let std::collections::btree_map::Entry::Occupied(mut entry) = entry else {
            let record = HostRecord { address: address?, behind_nat, instance, withdrawn: false };
            let write = Write { key: key(), value: Some(record.write()), expect: 0 };
            return takes_part.then_some((write, Why::Own));
        };
        let entry: &mut Entry<HostRecord> = entry.get_mut();
        let stored = entry.stored.as_ref();
        let record = stored.and_then(|stored| stored.record.clone());
        let expect = stored.map_or(0, |stored| stored.revision);
        if !takes_part {
            let record = record.filter(|record| !record.withdrawn && record.instance == instance)?;
            let record = HostRecord { withdrawn: true, ..HostRecord::clone(&record) };
            self.withdrawals.insert(Key::Host(id, self.me.clone()), now_ms);
            return Some((Write { key: key(), value: Some(record.write()), expect }, Why::Own));
        }
        let wanted = HostRecord { address: address?, behind_nat, instance, withdrawn: false };
        if stored.is_some_and(|stored| stored.lease == lease && record.as_deref() == Some(&wanted)) {
            return None;
        }
        let write = Write { key: key(), value: Some(wanted.write()), expect };
        let Some(foreign) =
            stored.filter(|stored| joined && !stored.own && record.as_deref() != Some(&wanted))
        else {
            return Some((write, Why::Own));
        };
        let Some(record) = record else {
            // A malformed record gives no other location, so it does not count as a move.
            return Some((
                write,
                Why::Repair(Alarm::Forged, format!("{} was overwritten with no record; restored", key())),
            ));
        };
        if self.sent.contains_key(&Key::Host(id, self.me.clone())) || entry.moves.is_frozen(now_ms) {
            return None;
        }
        let namesake = format!(
            "another host, at {}, is also named {}; give one of the two another [host] name",
            record.address, self.me
        );
        // A record under a foreign lease with another instance comes from another vnetd, not from a forger without a lease.
        let is_daemon = foreign.lease != 0 && foreign.lease != lease && record.instance != instance;
        if entry.moves.count(now_ms) {
            self.alarms.raise(Alarm::Name, now_ms, namesake);
            return None;
        }
        if is_daemon {
            return Some((write, Why::Repair(Alarm::Name, namesake)));
        }
        let text = format!(
            "{} was overwritten with address {}; restored. Who but the hosts may write to the store?",
            key(),
            record.address
        );
        Some((write, Why::Repair(Alarm::Forged, text)))
    }

    fn station_write(&mut self, id: NetworkId, mac: Mac, now_ms: u64) -> Option<(Write, Why)> {
        let me = self.me.clone();
        let has_namesake = now_ms < self.namesake_until_ms;
        let Network { hosts, stations } = self.networks.get_mut(&id)?;
        let fresh = Entry::default();
        let entry = stations.get(&mac).unwrap_or(&fresh);
        let obstacle = self.obstacles.get(&(id, mac)).copied().unwrap_or(0);
        let is = Seen::new((id, mac), entry, self.lease, obstacle);
        let frozen = entry.moves.is_frozen(now_ms);
        let Some(guest) = self.guests.get_mut(&(id, mac)) else {
            // The store places the station on this host, but its guest is not connected here.
            let record = is.record.as_ref().filter(|record| record.host == me && !record.withdrawn)?;
            let own = self.leaving.contains(&(id, mac)) || is.own;
            if !own && (frozen || has_namesake && !is.leased) {
                return None;
            }
            self.withdrawals.insert(Key::Station(id, mac), now_ms);
            let record = StationRecord { withdrawn: true, ..StationRecord::clone(record) };
            let forged = || is.forged("claimed in the name of this host, which does not have it");
            return Some((is.write(&record), if own { Why::Own } else { forged() }));
        };
        let known = entry.settled.as_ref().map(|record| record.sequence);
        let addresses = guest.addresses.clone();
        let claim = |sequence: u32| {
            is.write(&StationRecord { host: me.clone(), sequence, addresses, withdrawn: false })
        };
        let Some(record) = is.record.clone() else {
            // Missing or malformed: claim the station with the same number, or with the next one if another host had it.
            let another = entry.settled.as_ref().is_some_and(|record| record.host != me);
            let own = is.unknown || is.own;
            let sequence = known.map_or(1, |known| known.wrapping_add(another.into()));
            let why = if own { Why::Own } else { is.forged("overwritten with no record") };
            return Some((claim(sequence), why));
        };
        if record.host == me {
            (guest.claimed, guest.rivalled, guest.rivalled_at) = (true, false, None);
            let why = is.own_record(&record, &guest.addresses, has_namesake)?;
            return Some((claim(record.sequence), why));
        }
        // Do not build on a sequence number that other hosts would refuse.
        let believed =
            |known: &u32| *known == record.sequence || is_next(*known, record.sequence, SEQUENCE_STEP_MAX);
        let next = known.filter(|known| !believed(known)).unwrap_or(record.sequence).wrapping_add(1);
        let is_there = hosts.get(&record.host).is_some_and(|host| host.in_force().is_some());
        if record.withdrawn || !is_there {
            // If a present host withdrew the record, the station has left that host: no forgery.
            let forged = guest.claimed && !is_there;
            let why = if forged { is.forged("claimed for a host that is unknown") } else { Why::Own };
            return Some((claim(next), why));
        }
        // Another host claims the station. Claim it if its guest just connected here; reclaim it if its guest still sends here.
        guest.rivalled = true;
        let speaks = guest.rivalled_at.is_some_and(|frames| guest.in_frames > frames);
        if guest.claimed && !speaks || frozen {
            return None;
        }
        let why = if guest.claimed { is.duplicate(&record.host) } else { Why::Own };
        Some((claim(next), why))
    }

    /// Deletes withdrawals after every host has seen them.
    fn clear_withdrawals(&mut self, now_ms: u64, writes: &mut Vec<Write>) {
        let due: Vec<Key> = self
            .withdrawals
            .iter()
            .filter(|(_, since)| **since + WITHDRAWN_MS <= now_ms)
            .map(|(key, _)| key.clone())
            .collect();
        for key in due {
            self.withdrawals.remove(&key);
            let Some(network) = self.networks.get(&key.network()) else { continue };
            let withdrawn = match &key {
                Key::Host(_, name) => network.hosts.get(name).and_then(own_withdrawal),
                Key::Station(_, mac) => network.stations.get(mac).and_then(own_withdrawal),
            };
            if let Some((revision, lease)) = withdrawn
                && lease == self.lease
            {
                writes.push(Write { key: key.to_string(), value: None, expect: revision });
            }
        }
    }
}

/// Revision and lease of a withdrawal.
fn own_withdrawal<R: Record>(entry: &Entry<R>) -> Option<(i64, i64)> {
    let stored = entry.stored.as_ref()?;
    stored.record.as_ref().filter(|record: &&Arc<R>| record.withdrawn())?;
    Some((stored.revision, stored.lease))
}
