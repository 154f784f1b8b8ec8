//! Storage of the MAC table: a slab of addresses, an index from (network, MAC) into it, and for each port of each network a
//! doubly linked list of its addresses in least-recently-heard order.
//!
//! The lists make ageing and limits exact and cheap: expired addresses are at the oldest end of a list, so freeing space,
//! flushing a port and counting its addresses never touch other ports' addresses. `learning.rs` holds the policy.

use std::collections::HashMap;

use hashbrown::HashTable;

use super::hash::Seed;
use super::rule::PortKind;
use crate::frame::{NetworkId, PortId};
use crate::wire::ethernet::Mac;

/// Marks the end of a list.
const END: u32 = u32::MAX;

/// One sighting of a source address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heard {
    /// Ingress port.
    pub(super) port: PortId,
    pub(super) kind: PortKind,
    /// Time of the sighting.
    pub(super) at_ms: u64,
    /// Time at which the sighting ages out.
    pub(super) expires_ms: u64,
}

/// A learned address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Address {
    pub(super) network: NetworkId,
    pub(super) mac: Mac,
    /// Latest recorded sighting.
    pub(super) last: Heard,
    /// Number of moves since `first_move_ms`.
    pub(super) moves: u8,
    /// Start of the window in which moves are counted.
    pub(super) first_move_ms: u64,
    /// Time until which the address is frozen; 0: not frozen.
    pub(super) frozen_until_ms: u64,
    older: u32,
    newer: u32,
}

impl Address {
    /// True when the address has not aged out.
    pub(super) fn is_alive(&self, now_ms: u64) -> bool {
        now_ms < self.last.expires_ms
    }

    /// True when the address must not move.
    pub(super) fn is_frozen(&self, now_ms: u64) -> bool {
        now_ms < self.frozen_until_ms
    }
}

/// The addresses of one port in one network.
#[derive(Clone, Copy, Debug)]
struct Share {
    count: u32,
    oldest: u32,
    newest: u32,
}

const EMPTY: Share = Share { count: 0, oldest: END, newest: END };

/// Identifies the addresses of one port in one network.
pub(super) type ShareKey = (NetworkId, PortId);

/// All learned addresses.
pub(super) struct Addresses {
    slab: Vec<Address>,
    /// Unused slots of the slab.
    free: Vec<u32>,
    index: HashTable<u32>,
    shares: HashMap<ShareKey, Share>,
    seed: Seed,
}

impl Addresses {
    /// An empty store.
    pub(super) fn new(seed: Seed) -> Addresses {
        Addresses { slab: vec![], free: vec![], index: HashTable::new(), shares: HashMap::new(), seed }
    }

    fn hash(seed: Seed, network: NetworkId, mac: Mac) -> u64 {
        seed.hash(mac.to_u64(), u64::from(network.get()))
    }

    /// Finds the slot of an address.
    pub(super) fn find(&self, network: NetworkId, mac: Mac) -> Option<u32> {
        let is_it = |&at: &u32| {
            let address = &self.slab[at as usize];
            address.mac == mac && address.network == network
        };
        self.index.find(Addresses::hash(self.seed, network, mac), is_it).copied()
    }

    /// The address in a slot that `find` or `oldest` returned.
    pub(super) fn get(&self, at: u32) -> &Address {
        &self.slab[at as usize]
    }

    /// Mutable access to the address in a slot. Change `last` only with [`Addresses::hear`].
    pub(super) fn get_mut(&mut self, at: u32) -> &mut Address {
        &mut self.slab[at as usize]
    }

    /// Inserts an address that is not in the store.
    pub(super) fn insert(&mut self, network: NetworkId, mac: Mac, last: Heard) {
        let address = Address {
            network,
            mac,
            last,
            moves: 0,
            first_move_ms: 0,
            frozen_until_ms: 0,
            older: END,
            newer: END,
        };
        let at = match self.free.pop() {
            Some(at) => {
                self.slab[at as usize] = address;
                at
            }
            None => {
                self.slab.push(address);
                self.slab.len() as u32 - 1
            }
        };
        let (slab, seed) = (&self.slab, self.seed);
        self.index.insert_unique(Addresses::hash(seed, network, mac), at, |&at| {
            let address = &slab[at as usize];
            Addresses::hash(seed, address.network, address.mac)
        });
        self.append(at);
    }

    /// Removes the address in a slot.
    pub(super) fn remove(&mut self, at: u32) {
        self.unlink(at);
        let Address { network, mac, .. } = self.slab[at as usize];
        let hash = Addresses::hash(self.seed, network, mac);
        if let Ok(entry) = self.index.find_entry(hash, |&other| other == at) {
            entry.remove();
        }
        self.slab[at as usize].last.expires_ms = 0;
        self.free.push(at);
    }

    /// Records a sighting of the address in a slot.
    pub(super) fn hear(&mut self, at: u32, heard: Heard) {
        self.unlink(at);
        self.slab[at as usize].last = heard;
        self.append(at);
    }

    /// Number of addresses of a port in a network.
    pub(super) fn count(&self, share: ShareKey) -> u32 {
        self.shares.get(&share).map_or(0, |share| share.count)
    }

    /// Slot of the least recently heard address of a share.
    pub(super) fn oldest(&self, share: ShareKey) -> Option<u32> {
        self.shares.get(&share).map(|share| share.oldest)
    }

    /// All non-empty shares.
    pub(super) fn shares(&self) -> impl Iterator<Item = ShareKey> {
        self.shares.keys().copied()
    }

    /// At most `count` places of the slab from `start` on. Those in use have addresses, which keep their places; the others have
    /// addresses that are no longer alive.
    pub(super) fn page(&self, start: usize, count: usize) -> &[Address] {
        let end = self.slab.len().min(start.saturating_add(count));
        self.slab.get(start..end).unwrap_or_default()
    }

    /// Number of addresses.
    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    fn append(&mut self, at: u32) {
        let Address { network, last: Heard { port, .. }, .. } = self.slab[at as usize];
        let share = self.shares.entry((network, port)).or_insert(EMPTY);
        let last = std::mem::replace(&mut share.newest, at);
        share.count += 1;
        if last == END {
            share.oldest = at;
        } else {
            self.slab[last as usize].newer = at;
        }
        let address = &mut self.slab[at as usize];
        (address.older, address.newer) = (last, END);
    }

    fn unlink(&mut self, at: u32) {
        let Address { network, last: Heard { port, .. }, older, newer, .. } = self.slab[at as usize];
        let share = self.shares.get_mut(&(network, port)).expect("every address is in the share of its port");
        share.count -= 1;
        match older {
            END => share.oldest = newer,
            older => self.slab[older as usize].newer = newer,
        }
        match newer {
            END => share.newest = older,
            newer => self.slab[newer as usize].older = older,
        }
        if share.count == 0 {
            self.shares.remove(&(network, port));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// A naive model of the lists: one queue of all addresses in the order in which they were last heard.
    #[derive(Default)]
    struct Naive(VecDeque<(NetworkId, Mac, PortId)>);

    proptest! {
        #[test]
        fn lists_are_in_the_order_of_hearing(ops in prop::collection::vec((0..4u8, 0..6u8, 0..3u16), 1..200)) {
            let network = NetworkId::DEFAULT;
            let mut addresses = Addresses::new(Seed::random());
            let mut naive = Naive::default();
            for (time, (op, n, port)) in ops.into_iter().enumerate() {
                let (mac, port) = (Mac([2, 0, 0, 0, 0, n]), PortId(port));
                let at = addresses.find(network, mac);
                let known = naive.0.iter().position(|(_, m, _)| *m == mac);
                prop_assert_eq!(at.is_some(), known.is_some());
                if let Some(known) = known {
                    naive.0.remove(known);
                }
                match (op, at) {
                    (0, Some(at)) => addresses.remove(at),
                    (0, None) => {}
                    (_, at) => {
                        let at_ms = time as u64;
                        let heard = Heard { port, kind: PortKind::Link, at_ms, expires_ms: at_ms + 9 };
                        match at {
                            Some(at) => addresses.hear(at, heard),
                            None => addresses.insert(network, mac, heard),
                        }
                        naive.0.push_back((network, mac, port));
                    }
                }
                prop_assert_eq!(addresses.len(), naive.0.len());
                prop_assert!(addresses.slab.len() <= 6);
                for port in (0..3).map(PortId) {
                    let expected: Vec<Mac> = naive.0.iter().filter(|a| a.2 == port).map(|a| a.1).collect();
                    prop_assert_eq!(addresses.count((network, port)) as usize, expected.len());
                    let mut at = addresses.oldest((network, port)).unwrap_or(END);
                    for mac in expected {
                        prop_assert_eq!(addresses.get(at).mac, mac);
                        at = addresses.get(at).newer;
                    }
                    prop_assert_eq!(at, END);
                }
            }
        }
    }
}
