//! Learned addresses as another vnetd gets them that takes over: where each was heard, and for how long it stays known. Times are durations,
//! because each process has a clock of its own.
//!
//! Bounded by [`SIGHTINGS_MAX`]: the addresses heard last. Frames to the others are flooded until they are heard again.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use super::addresses::{Address, Heard};
use super::conflicts::Conflict;
use super::learning::{Claim, FREEZE_MS, Learned, LearnedStats};
use super::rule::PortKind;
use super::table::Table;
use crate::frame::{NetworkId, PortId};
use crate::wire::ethernet::Mac;

/// Maximum number of addresses handed over: all guests of 64 hosts with 1 024 interfaces each, in 4 MiB of text.
pub const SIGHTINGS_MAX: usize = 65_536;

/// An address at the port where it was heard last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sighting {
    /// Its network.
    pub network: u32,
    /// The address.
    pub mac: [u8; 6],
    /// The port.
    pub port: PortId,
    /// Time until it ages out, in ms.
    pub left_ms: u64,
    /// Time for which it must not move, because two stations use it, in ms.
    pub frozen_ms: u64,
}

impl Learned {
    /// The addresses heard last, oldest first.
    pub fn sightings(&self, now_ms: u64) -> Vec<Sighting> {
        let mut alive: Vec<Address> = self.copy();
        alive.retain(|address| address.is_alive(now_ms));
        alive.sort_unstable_by_key(|address| Reverse((address.last.at_ms, address.mac)));
        alive.truncate(SIGHTINGS_MAX);
        let sighting = |address: &Address| Sighting {
            network: address.network.get(),
            mac: address.mac.0,
            port: address.last.port,
            left_ms: address.last.expires_ms.saturating_sub(now_ms),
            frozen_ms: address.frozen_until_ms.saturating_sub(now_ms),
        };
        alive.iter().rev().map(sighting).collect()
    }

    /// Learns the sightings of another vnetd at ports of which `kind` knows the kind, and goes on with its counters. Call it before any frame
    /// is forwarded.
    pub fn resume(
        &self,
        sightings: &[Sighting],
        counters: LearnedStats,
        kind: impl Fn(PortId) -> Option<PortKind>,
        now_ms: u64,
    ) {
        for sighting in sightings {
            let Sighting { network, mac, port, left_ms, frozen_ms } = *sighting;
            let mac = Mac(mac);
            let (Some(network), Some(kind)) = (NetworkId::new(network), kind(port)) else { continue };
            if mac.is_unicast() {
                let heard = Heard { port, kind, at_ms: now_ms, expires_ms: now_ms.saturating_add(left_ms) };
                self.hear_again(network, mac, heard, frozen_ms);
            }
        }
        let stats = &mut self.book.lock().stats;
        *stats = LearnedStats { entries: stats.entries, ..counters };
    }

    /// Learns an address that another vnetd has heard, and has frozen for `frozen_ms` more.
    fn hear_again(&self, network: NetworkId, mac: Mac, heard: Heard, frozen_ms: u64) {
        let mut book = self.book.lock();
        if book.learn(network, Claim { mac, heard }).changed {
            self.versions.advance(self.bucket(network, mac));
        }
        if let Some(at) = book.addresses.find(network, mac).filter(|_| frozen_ms > 0) {
            book.addresses.get_mut(at).frozen_until_ms = heard.at_ms.saturating_add(frozen_ms.min(FREEZE_MS));
        }
    }
}

impl Learned {
    /// Removes a port ([`Learned::forget_port`]). MAC addresses that were configured on it and have been seen at another port are learned
    /// there, unless they aged out or are known already: their machines have migrated. `before` is the table with the port, `table`
    /// without it.
    pub(crate) fn remove_port(&self, port: PortId, before: &Table, table: &Table, now_ms: u64) {
        let mut moved = self.book.lock().conflicts.about(port);
        // Not addresses that were frozen for flapping between ports.
        moved.retain(|known| before.configured(known.network, known.mac) == Some(port));
        self.forget_port(port);
        for Conflict { network, mac, also, seen_ms, .. } in moved {
            let (Some(member), Some(there)) = (table.port(also), table.network(network)) else { continue };
            let expires_ms = seen_ms.saturating_add(there.ageing_ms);
            let is_free =
                table.configured(network, mac).is_none() && self.known(network, mac, now_ms).is_none();
            if is_free && there.learning && now_ms < expires_ms && table.carries(also, network) {
                let heard = Heard { port: also, kind: member.kind, at_ms: now_ms, expires_ms };
                self.meet(network, Some(Claim { mac, heard }), None, now_ms);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_table_knows_the_same_addresses_for_as_long() {
        let (before, after) = (Learned::new(), Learned::new());
        let network = NetworkId::DEFAULT;
        let mac = |last| Mac([2, 0, 0, 0, 0, last]);
        let heard =
            |port, at_ms| Heard { port, kind: PortKind::Interface, at_ms, expires_ms: at_ms + 300_000 };
        before.hear_again(network, mac(1), heard(PortId(3), 1_000), 0);
        before.hear_again(network, mac(2), heard(PortId(4), 5_000), 7_000);
        before.hear_again(network, mac(3), heard(PortId(9), 6_000), 0);
        let sightings = before.sightings(10_000);
        assert_eq!(sightings.iter().map(|s| s.mac[5]).collect::<Vec<_>>(), [1, 2, 3], "oldest first");
        assert_eq!((sightings[1].left_ms, sightings[1].frozen_ms), (295_000, 2_000));
        let counters = LearnedStats { entries: 3, moves: 5, frozen: 1, refused: 2, duplicates: 3 };
        // Port 9 is gone.
        after.resume(&sightings, counters, |port| (port.0 < 9).then_some(PortKind::Link), 40);
        assert_eq!(after.stats(), LearnedStats { entries: 2, ..counters });
        let known = |mac, now_ms| after.known(network, mac, now_ms).map(|address| address.last.port);
        assert_eq!(known(mac(1), 100), Some(PortId(3)));
        assert_eq!(known(mac(1), 291_039), Some(PortId(3)));
        assert_eq!(known(mac(1), 291_040), None, "aged out");
        assert!(after.known(network, mac(2), 100).unwrap().is_frozen(2_039));
        assert_eq!(known(mac(3), 100), None);
        assert!(before.sightings(400_000).is_empty());
    }

    #[test]
    fn the_newest_are_handed_over() {
        let learned = Learned::new();
        for number in 0..u32::try_from(SIGHTINGS_MAX).unwrap() + 10 {
            let [_, a, b, c] = number.to_be_bytes();
            let port = PortId((number / 16_000) as u16);
            let heard = Heard { port, kind: PortKind::Link, at_ms: number.into(), expires_ms: 1 << 40 };
            learned.hear_again(NetworkId::DEFAULT, Mac([2, 0, 0, a, b, c]), heard, 0);
        }
        let sightings = learned.sightings(1 << 30);
        assert_eq!(sightings.len(), SIGHTINGS_MAX);
        assert_eq!(sightings[0].mac[3..], [0, 0, 10]);
    }
}
