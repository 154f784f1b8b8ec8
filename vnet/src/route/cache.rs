//! The flow cache of one dispatcher: recent decisions, found with one hash probe.
//!
//! A decision is valid as long as its inputs do not change. An entry records them, and is used only while all still hold:
//! - the table, by its *generation*: `Router::adopt` advances it, which empties the cache without touching it;
//! - the learned state of source and destination, by one *version* each: [`Learned`](super::Learned) advances the version of a
//!   bucket of few addresses, so a guest that floods the overlay with new addresses hardly disturbs other flows;
//! - time: the moment when either address ages out, needs a refresh or unfreezes.
//!
//! Two-way set associative, one cache line per entry. A new entry takes the first way and moves that way's old entry to the
//! second.

use super::hash::Seed;
use super::learning::{Lease, Versions};
use super::rule::Flow;
use crate::frame::PortId;
use crate::stats::DropReason;

/// Maximum number of rule destinations that an entry holds. Flows with more are looked up in the table for each frame, which
/// costs little compared with making that many copies.
pub(super) const FEW: usize = 7;

/// Number of entries of a dispatcher's cache: 512 KiB, so that it stays in a core's L2 cache.
pub(super) const ENTRIES: usize = 8192;

/// Destination of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// To one port.
    To(PortId),
    /// To the first `len` of `ports`; a port may occur more than once.
    Few { len: u8, ports: [PortId; FEW] },
    /// To more than [`FEW`] ports by rules; not cached.
    Many,
    /// Flooded to `len` ports of the table's rings, starting at `start`.
    Flood { start: u32, len: u32 },
    /// Dropped for this reason.
    Drop(DropReason),
}

/// A flow, and the generation of the table that decided it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    dst_from: u64,
    src: u64,
    network: u32,
    /// 0 in an unused entry.
    generation: u32,
}

impl Key {
    #[inline(always)]
    fn new(flow: &Flow, generation: u32) -> Key {
        Key {
            dst_from: flow.dst.to_u64() << 16 | u64::from(flow.from.0),
            src: flow.src.to_u64() << 16,
            network: flow.network.get(),
            generation,
        }
    }

    /// Includes the port in the hash, so that a guest evicts other ports' entries only by chance.
    #[inline(always)]
    fn hash(&self, seed: Seed) -> u64 {
        seed.hash(self.dst_from, self.src ^ u64::from(self.network))
    }
}

/// One cached decision.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Entry {
    key: Key,
    lease: Lease,
    verdict: Verdict,
}

/// One dispatcher's cache.
pub(super) struct Cache {
    entries: Box<[Entry]>,
    seed: Seed,
    generation: u32,
}

impl Cache {
    /// An empty cache of `entries`, a power of two.
    pub(super) fn new(entries: usize) -> Cache {
        assert!(entries.is_power_of_two() && entries >= 2);
        let empty = Entry {
            key: Key { dst_from: 0, src: 0, network: 0, generation: 0 },
            lease: Lease::until(0),
            verdict: Verdict::Many,
        };
        Cache { entries: vec![empty; entries].into_boxed_slice(), seed: Seed::random(), generation: 1 }
    }

    /// Empties the cache.
    pub(super) fn empty(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            // The generation wrapped around: entries from its first use must not become valid again.
            self.entries.iter_mut().for_each(|entry| entry.key.generation = 0);
            self.generation = 1;
        }
    }

    /// Index of the first of the two entries that may hold `key`.
    #[inline(always)]
    fn set(&self, key: &Key) -> usize {
        key.hash(self.seed) as usize & (self.entries.len() - 2)
    }

    /// The cached decision for `flow`, if it is still valid.
    #[inline]
    pub(super) fn get(&self, flow: &Flow, now_ms: u64, versions: &Versions) -> Option<Verdict> {
        let key = Key::new(flow, self.generation);
        let set = self.set(&key);
        let entry = self.entries[set..set + 2].iter().find(|entry| entry.key == key)?;
        entry.lease.holds(now_ms, versions).then_some(entry.verdict)
    }

    /// Caches a decision for the duration of `lease`.
    pub(super) fn put(&mut self, flow: &Flow, now_ms: u64, lease: Lease, verdict: Verdict) {
        let key = Key::new(flow, self.generation);
        let set = self.set(&key);
        let new = Entry { key, lease, verdict };
        if self.entries[set + 1].key == key {
            // A key must not have two entries.
            self.entries[set + 1] = new;
            return;
        }
        let first = self.entries[set];
        let alive = first.key.generation == self.generation && now_ms < first.lease.until_ms;
        if alive && first.key != key {
            self.entries[set + 1] = first;
        }
        self.entries[set] = new;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::NetworkId;
    use crate::wire::ethernet::Mac;

    fn flow(n: u8) -> Flow {
        Flow {
            network: NetworkId::DEFAULT,
            src: Mac([2, 0, 0, 0, 0, n]),
            dst: Mac::BROADCAST,
            from: PortId(1),
        }
    }

    #[test]
    fn an_entry_is_a_cache_line() {
        assert_eq!(size_of::<Entry>(), 64);
    }

    #[test]
    fn a_set_keeps_the_two_newest() {
        let versions = Versions::new();
        let mut cache = Cache::new(2);
        let to = |n| Verdict::To(PortId(n));
        cache.put(&flow(1), 0, Lease::FOREVER, to(1));
        cache.put(&flow(2), 0, Lease::FOREVER, to(2));
        cache.put(&flow(1), 0, Lease::FOREVER, to(11));
        assert_eq!(cache.get(&flow(1), 0, &versions), Some(to(11)));
        assert_eq!(cache.get(&flow(2), 0, &versions), Some(to(2)));
        cache.put(&flow(3), 0, Lease::FOREVER, to(3));
        assert_eq!(cache.get(&flow(3), 0, &versions), Some(to(3)));
        assert_eq!(cache.get(&flow(2), 0, &versions), Some(to(2)));
        assert_eq!(cache.get(&flow(1), 0, &versions), None);
    }

    #[test]
    fn an_expired_entry_is_replaced() {
        let versions = Versions::new();
        let mut cache = Cache::new(2);
        cache.put(&flow(1), 0, Lease::FOREVER, Verdict::Drop(DropReason::NoRoute));
        cache.put(&flow(2), 0, Lease::until(5), Verdict::To(PortId(2)));
        assert_eq!(cache.get(&flow(2), 5, &versions), None);
        cache.put(&flow(3), 5, Lease::FOREVER, Verdict::To(PortId(3)));
        assert!(cache.get(&flow(1), 5, &versions).is_some() && cache.get(&flow(3), 5, &versions).is_some());
    }

    #[test]
    fn emptying_leaves_nothing_even_when_generations_wrap() {
        let versions = Versions::new();
        let mut cache = Cache::new(4);
        cache.put(&flow(1), 0, Lease::FOREVER, Verdict::To(PortId(1)));
        cache.generation = u32::MAX;
        cache.put(&flow(2), 0, Lease::FOREVER, Verdict::To(PortId(2)));
        cache.empty();
        assert_eq!(cache.generation, 1);
        assert_eq!((cache.get(&flow(1), 0, &versions), cache.get(&flow(2), 0, &versions)), (None, None));
    }
}
