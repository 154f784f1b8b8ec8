//! This host's writes to the store: its host records, its stations, and repairs of foreign writes.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::alarm::Alarm;
use super::entry::{Entry, SEQUENCE_STEP_MAX, Stored, is_next};
use super::record::{HostRecord, Key, Record, StationRecord};
use super::state::{Network, Overlay, REPAIRS_PER_S, WITHDRAWN_MS, WRITE_MS, Write};
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

/// Why a record is written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Why {
    /// Something changed on this host.
    Own,
    /// Another host wrote it.
    Repair,
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
        // Local stations, leaving ones, and as many wrongly claimed ones as the repair limit allows.
        let forged = self.mine.iter().take(self.repairs.0 as usize + self.sent.len());
        let places: BTreeSet<_> = self.guests.keys().chain(&self.leaving).chain(forged).copied().collect();
        for (id, mac) in places {
            // Hosts before their stations: other hosts need the certificate in the host's record to verify stations.
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

    /// Withdraws this host from all networks: its last writes.
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
        if why == Why::Repair {
            let text = format!("{key} was written by another host; repaired");
            self.alarms.raise(Alarm::Forged, now_ms, text);
            if self.repairs.0 == 0 {
                return;
            }
            self.repairs.0 -= 1;
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
        let foreign = stored.is_some() && joined && record.as_deref() != Some(&wanted);
        if !foreign {
            return Some((write, Why::Own));
        }
        if record.is_none() {
            // A malformed record misleads nobody, so this is no move.
            return Some((write, Why::Repair));
        }
        if self.sent.contains_key(&Key::Host(id, self.me.clone())) || entry.moves.is_frozen(now_ms) {
            return None;
        }
        if entry.moves.count(now_ms) {
            let text = format!("another host is also named {}; rename one of the two", self.me);
            self.alarms.raise(Alarm::Name, now_ms, text);
            return None;
        }
        Some((write, Why::Repair))
    }

    fn station_write(&mut self, id: NetworkId, mac: Mac, now_ms: u64) -> Option<(Write, Why)> {
        let (me, lease) = (self.me.clone(), self.lease);
        let Network { hosts, stations } = self.networks.get_mut(&id)?;
        let fresh = Entry::default();
        let entry = stations.get(&mac).unwrap_or(&fresh);
        let guest = self.guests.get_mut(&(id, mac));
        let expect = entry.stored.as_ref().map_or(0, |stored| stored.revision);
        let stored = entry.stored.as_ref().and_then(|stored| stored.record.clone());
        let write = |record: StationRecord| {
            let key = Key::Station(id, mac).to_string();
            Write { key, value: Some(record.write()), expect }
        };
        let Some(guest) = guest else {
            // The store has it here, but it is not.
            let record = stored.filter(|record| record.host == me && !record.withdrawn)?;
            let own = self.leaving.contains(&(id, mac));
            if entry.moves.is_frozen(now_ms) && !own {
                return None;
            }
            self.withdrawals.insert(Key::Station(id, mac), now_ms);
            let record = StationRecord { withdrawn: true, ..StationRecord::clone(&record) };
            return Some((write(record), if own { Why::Own } else { Why::Repair }));
        };
        let known = entry.settled.as_ref().map(|record| record.sequence);
        let claim = |sequence: u32| {
            write(StationRecord {
                host: me.clone(),
                sequence,
                addresses: guest.addresses.clone(),
                withdrawn: false,
            })
        };
        let Some(record) = stored else {
            // Missing or malformed: claim it as before, or with the next number if another host had it.
            let another = entry.settled.as_ref().is_some_and(|record| record.host != me);
            let why = if expect == 0 { Why::Own } else { Why::Repair };
            let sequence = known.map_or(1, |known| known.wrapping_add(another.into()));
            return Some((claim(sequence), why));
        };
        if record.host == me {
            (guest.claimed, guest.rivalled, guest.rivalled_at) = (true, false, None);
            let same = !record.withdrawn && record.addresses == guest.addresses;
            let leased = entry.stored.as_ref().is_some_and(|stored| stored.lease == lease);
            let why = if same || !leased { Why::Own } else { Why::Repair };
            return (!same || !leased).then(|| (claim(record.sequence), why));
        }
        // A number that other hosts would refuse cannot be the base of the next one.
        let believed =
            |known: &u32| *known == record.sequence || is_next(*known, record.sequence, SEQUENCE_STEP_MAX);
        let next = known.filter(|known| !believed(known)).unwrap_or(record.sequence).wrapping_add(1);
        let is_there = hosts.get(&record.host).is_some_and(|host| host.in_force().is_some());
        if record.withdrawn || !is_there {
            return Some((claim(next), if guest.claimed { Why::Repair } else { Why::Own }));
        }
        // Another host has it. Claim it if it just came up here, or reclaim it if it still sends here.
        guest.rivalled = true;
        let speaks = guest.rivalled_at.is_some_and(|frames| guest.in_frames > frames);
        if guest.claimed && !speaks || entry.moves.is_frozen(now_ms) {
            return None;
        }
        Some((claim(next), if guest.claimed { Why::Repair } else { Why::Own }))
    }

    /// Deletes withdrawals that every host has seen.
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
