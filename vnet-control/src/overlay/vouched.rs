//! The state machine's interface for the authenticator: refused records, hosts that are no longer trusted, and republication of
//! this host's records.

use super::alarm::Alarm;
use super::record::{Key, Record, StationRecord};
use super::state::Overlay;
use vnet::frame::NetworkId;

impl Overlay {
    /// True if the value under `key` need not be verified: this revision, or a later one, is known. This host's own records are
    /// always verified.
    pub(super) fn recognises(&mut self, key: &Key, lease: i64, revision: i64, now_ms: u64) -> bool {
        let Some(network) = self.networks.get(&key.network()) else { return true };
        match key {
            Key::Host(id, name) => {
                let Some(stored) = network.hosts.get(name).and_then(|entry| entry.stored.as_ref()) else {
                    return false;
                };
                let known = stored.revision == revision && **name != *self.me && stored.record.is_some();
                if !known && stored.revision <= revision {
                    return false;
                }
                let record = stored.record.as_deref().cloned();
                self.sent.remove(key);
                self.put_host(*id, name, record, lease, revision, now_ms);
            }
            Key::Station(id, mac) => {
                let Some(stored) = network.stations.get(mac).and_then(|entry| entry.stored.as_ref()) else {
                    return false;
                };
                let others = stored.record.as_ref().is_some_and(|record| record.host != self.me);
                if (stored.revision != revision || !others) && stored.revision <= revision {
                    return false;
                }
                let record = stored.record.as_deref().cloned();
                self.sent.remove(key);
                self.put_station(*id, *mac, record, lease, revision, now_ms);
            }
        }
        true
    }

    /// True if the value names this host, whether or not it is verified.
    pub(super) fn names_this_host(&self, key: &Key, value: &[u8]) -> bool {
        match key {
            Key::Host(_, name) => *name == self.me,
            Key::Station(..) => StationRecord::parse(value).is_some_and(|record| record.host == self.me),
        }
    }

    /// True if the state machine holds a record under `key`.
    pub(super) fn knows(&self, key: &Key) -> bool {
        let network = self.networks.get(&key.network());
        network.is_some_and(|network| match key {
            Key::Host(_, name) => network.hosts.contains_key(name),
            Key::Station(_, mac) => network.stations.contains_key(mac),
        })
    }

    /// Handles a record that failed verification: it counts as no record.
    pub(super) fn disbelieve(&mut self, key: &Key, lease: i64, revision: i64, now_ms: u64) {
        self.sent.remove(key);
        match key {
            Key::Host(id, name) => self.put_host(*id, name, None, lease, revision, now_ms),
            Key::Station(id, mac) => self.put_station(*id, *mac, None, lease, revision, now_ms),
        }
    }

    /// Removes a host that is no longer trusted, until it writes an acceptable record.
    pub(super) fn expel(&mut self, network: NetworkId, name: &str, why: &str, now_ms: u64) {
        let Some(hosts) = self.networks.get_mut(&network).map(|network| &mut network.hosts) else { return };
        let Some(entry) = hosts.get_mut(name) else { return };
        (entry.settled, entry.pending) = (None, None);
        if let Some(stored) = &mut entry.stored {
            stored.record = None;
        }
        self.restructure();
        let text = format!("host {name} of network {network} is no longer trusted and was removed: {why}");
        self.alarm(Alarm::Untrusted, now_ms, text);
    }

    /// Forces this host's records to be written again, although they are unchanged.
    pub(super) fn republish(&mut self) {
        self.joined.clear();
        self.sent.clear();
        for network in self.networks.values_mut() {
            // Clear the lease of the stored records, so that they look as if written under a foreign lease.
            let host = network.hosts.get_mut(&self.me).and_then(|entry| entry.stored.as_mut());
            if let Some(stored) = host.filter(|stored| stored.record.as_ref().is_some_and(|r| !r.withdrawn)) {
                stored.lease = 0;
            }
            for stored in network.stations.values_mut().filter_map(|entry| entry.stored.as_mut()) {
                if stored.record.as_ref().is_some_and(|record| record.host == self.me && !record.withdrawn) {
                    stored.lease = 0;
                }
            }
        }
    }
}
