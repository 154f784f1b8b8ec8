//! The last known state of the overlay, saved across restarts: a host uses it while it cannot reach the store.
//!
//! Only records of other hosts that are in force are saved, since a host claims its own stations anew. Restored records count as
//! older than any revision of the store: records in the store replace them, and those that the first snapshot lacks are forgotten
//! sooner than others.

use super::authenticator::Authenticator;
use super::entry::Entry;
use super::record::{Key, Record};
use super::state::{Overlay, Store};

impl Overlay {
    /// True once after a change since the last call.
    pub fn take_unsaved(&mut self) -> bool {
        std::mem::take(&mut self.unsaved)
    }

    /// Keys and values of other hosts' records that are in force, hosts before stations. With an authenticator, the values are in
    /// signed form, and records without a signed value are left out.
    pub fn last_known(&self, judge: Option<&Authenticator>) -> Vec<(String, String)> {
        let mut kept = vec![];
        let mut keep = |key: Key, value: Option<Vec<u8>>| {
            kept.extend(
                value.and_then(|value| String::from_utf8(value).ok()).map(|value| (key.to_string(), value)),
            );
        };
        for (id, network) in &self.networks {
            for (name, entry) in network.hosts.iter().filter(|(name, _)| **name != self.me) {
                let key = Key::Host(*id, name.clone());
                let value = in_force(&key, entry, judge);
                keep(key, value);
            }
        }
        for (id, network) in &self.networks {
            for (mac, entry) in &network.stations {
                let key = Key::Station(*id, *mac);
                let other = entry.in_force().is_some_and(|record| record.host != self.me);
                let value = if other { in_force(&key, entry, judge) } else { None };
                keep(key, value);
            }
        }
        kept
    }

    /// Restores records saved by [`Overlay::last_known`], before the first snapshot; returns how many are in force again. An
    /// authenticator verifies each one like a record of the store.
    pub fn restore(&mut self, mut judge: Option<&mut Authenticator>, records: &[(String, String)]) -> usize {
        for (key, value) in records {
            let Some(parsed) = Key::parse(key.as_bytes()) else { continue };
            let value = match &mut judge {
                Some(judge) => match judge.vouches(&parsed, value.as_bytes()) {
                    Some(value) => value,
                    None => continue,
                },
                None => value.clone().into_bytes(),
            };
            self.put(key.as_bytes(), &value, 0, 0, 0);
        }
        let mut restored = 0;
        for network in self.networks.values_mut() {
            network.hosts.values_mut().for_each(|entry| restored += mark(entry));
            network.stations.values_mut().for_each(|entry| restored += mark(entry));
        }
        if restored > 0 {
            self.store = Store::Away(0);
        }
        restored
    }
}

/// The value to save of the record in force.
fn in_force<R: Record>(key: &Key, entry: &Entry<R>, judge: Option<&Authenticator>) -> Option<Vec<u8>> {
    let record = entry.in_force()?;
    let Some(judge) = judge else { return Some(record.write()) };
    let value = judge.value(key)?;
    R::parse(value).is_some_and(|signed| signed.same_effect(record)).then(|| value.to_vec())
}

fn mark<R: Record>(entry: &mut Entry<R>) -> usize {
    entry.restored = entry.in_force().is_some();
    entry.restored.into()
}
