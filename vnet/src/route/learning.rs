//! MAC learning: the port at which each station was last heard. Shared by all dispatchers.
//!
//! # Policy
//! In a network that learns, a frame's source address is learned at its ingress port. The newest claim wins, so a machine that
//! migrates is found at once. An address that moves five times in 180 s is duplicated (RFC 7432, section 15.1): it is frozen at
//! its port, counted and logged, and may move again after 180 s. Addresses configured on an interface are never learned, because
//! the table holds them. An address that sends nothing for the network's ageing time is removed.
//!
//! # Limits
//! Each port has its own share of each network: [`INTERFACE_ADDRESSES_MAX`] or [`LINK_ADDRESSES_MAX`] addresses. When a share is
//! full, that port's new addresses are refused and counted, so a guest that invents addresses harms only itself. All links
//! together share [`LINKS_ADDRESSES_MAX`]. Frames to a refused address are flooded. An address that moves to a port whose share
//! is full is removed: frames sent to its old port would be lost until the address aged out there.
//!
//! # Locking
//! One lock guards all addresses. A dispatcher takes it on a cache miss: for a new flow, once a second per flow, and when a
//! flow's addresses changed. Caches notice changes without the lock: a keyed hash divides addresses into [`BUCKETS`], and each
//! bucket has a version, which is advanced under the lock whenever an address in the bucket is learned, moved, or removed before
//! it ages out. A cached decision carries the versions, which were read under the same lock as the addresses that it depends on;
//! it is valid while they are current.

use std::collections::{HashMap, VecDeque};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use super::addresses::{Address, Addresses, Heard, ShareKey};
use super::conflicts::{Conflict, Conflicts};
use super::hash::Seed;
use super::rule::PortKind;
use super::storm_limit::Storm;
use super::table::Table;
use crate::frame::{NetworkId, PortId};
use crate::wire::ethernet::Mac;

/// Interval in milliseconds at which the sighting of an address that keeps sending is refreshed.
pub(super) const REFRESH_MS: u64 = 1000;
/// Milliseconds before a refused address is tried again; until then its frames do not take the lock.
const REFUSED_MS: u64 = 100;
/// Number of moves within [`MOVES_WINDOW_MS`] that freezes an address (RFC 7432, section 15.1: N = 5).
pub const MOVES_MAX: u8 = 5;
/// Window in milliseconds in which moves are counted (RFC 7432, section 15.1: M = 180 s).
pub const MOVES_WINDOW_MS: u64 = 180_000;
/// Milliseconds for which an address stays frozen.
pub const FREEZE_MS: u64 = 180_000;
/// Maximum number of addresses of one interface in one network: enough for a guest that bridges a thousand containers.
pub(super) const INTERFACE_ADDRESSES_MAX: u32 = 1024;
/// Maximum number of addresses of one link in one network: enough for a host with 1 024 interfaces of 16 addresses each.
pub(super) const LINK_ADDRESSES_MAX: u32 = 16_384;
/// Maximum number of addresses of all links in all networks: 256 such interfaces on each of 64 hosts. The worst case, with 1 024
/// interfaces at their limits, is 1.3 million addresses of 56 bytes (about 100 MB).
pub(super) const LINKS_ADDRESSES_MAX: u32 = 262_144;

/// Number of buckets for cache invalidation: one new address invalidates 1/4096 of the entries.
const BUCKETS: usize = 4096;
/// Maximum number of expired addresses of a share that one call removes; bounds the time under the lock.
const RECLAIM_MAX: usize = 64;
/// Addresses that are copied under one lock: 64 KiB, some microseconds.
const PAGE: usize = 1024;
/// Number of moves kept for the event stream.
const MOVES_KEPT: usize = 1024;
/// Interval in milliseconds between two sweeps for expired addresses of all shares.
const HOUSEKEEPING_MS: u64 = 1000;

/// Memory of the versions, at least [`VERSIONS`] words. Other holders of decisions may share it: the kernel's programs read it.
pub type VersionMemory = Arc<dyn Deref<Target = [AtomicU32]> + Send + Sync>;

/// Number of words of a [`VersionMemory`] in use.
pub const VERSIONS: usize = BUCKETS + 1;

/// One version per bucket, and one that never changes.
pub(super) struct Versions {
    /// Points into the last of `memories`; saves one load per lookup.
    words: AtomicPtr<[AtomicU32; VERSIONS]>,
    /// All memories that `words` has ever pointed into.
    memories: Mutex<Vec<VersionMemory>>,
}

/// The bucket that never changes.
const CONSTANT: u16 = BUCKETS as u16;

impl Versions {
    #[cfg(test)]
    pub(super) fn new() -> Versions {
        Versions::within(own_memory())
    }

    /// # Panics
    /// When `memory` is too short (a bug in the caller).
    fn within(memory: VersionMemory) -> Versions {
        let versions = Versions { words: AtomicPtr::default(), memories: Mutex::default() };
        versions.hold(memory);
        versions
    }

    /// Keeps `memory` alive and points `words` to it from now on.
    fn hold(&self, memory: VersionMemory) {
        let words: *const [AtomicU32; VERSIONS] = memory.first_chunk().expect("memory for all versions");
        self.memories.lock().push(memory);
        self.words.store(words.cast_mut(), Ordering::Release);
    }

    /// Uses `memory` from now on. True if the memory keeps its versions, because none was advanced here; otherwise they are copied there.
    /// No other thread may advance a version during the call.
    fn move_to(&self, memory: VersionMemory) -> bool {
        let is_new = (0..=CONSTANT).all(|bucket| self.get(bucket) == 0);
        if !is_new {
            for (bucket, word) in (0..).zip(memory.iter().take(VERSIONS)) {
                word.store(self.get(bucket), Ordering::Relaxed);
            }
        }
        self.hold(memory);
        is_new
    }

    #[inline(always)]
    fn word(&self, bucket: u16) -> &AtomicU32 {
        // SAFETY: `hold` has stored a pointer to a whole array of atomics, in memory that `memories` keeps as long as `self` lives
        // and whose slice neither moves nor shrinks: it is behind an `Arc` and never borrowed mutably.
        let words = unsafe { &*self.words.load(Ordering::Acquire) };
        &words[usize::from(bucket)]
    }

    #[inline(always)]
    fn get(&self, bucket: u16) -> u32 {
        // Acquire pairs with `advance`: a reader of the version sees everything done before it was advanced.
        self.word(bucket).load(Ordering::Acquire)
    }

    pub(super) fn advance(&self, bucket: u16) {
        self.word(bucket).fetch_add(1, Ordering::Release);
    }
}

fn own_memory() -> VersionMemory {
    Arc::new((0..VERSIONS).map(|_| AtomicU32::new(0)).collect::<Box<[_]>>())
}

/// Validity of a decision: it ends at a time, or when the version of either bucket changes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lease {
    pub(super) until_ms: u64,
    pub(super) versions: [u32; 2],
    pub(super) buckets: [u16; 2],
}

impl Lease {
    /// Lease of a decision that depends on no learned address.
    pub(super) const FOREVER: Lease = Lease::until(u64::MAX);

    /// Lease that ends at a time, whatever is learned.
    pub(super) const fn until(until_ms: u64) -> Lease {
        Lease { until_ms, versions: [0; 2], buckets: [CONSTANT; 2] }
    }

    #[inline(always)]
    pub(super) fn holds(&self, now_ms: u64, versions: &Versions) -> bool {
        now_ms < self.until_ms
            && self.versions[0] == versions.get(self.buckets[0])
            && self.versions[1] == versions.get(self.buckets[1])
    }
}

/// A frame's claim about its source address.
#[derive(Clone, Copy)]
pub(super) struct Claim {
    pub(super) mac: Mac,
    pub(super) heard: Heard,
}

/// How an address was assigned to its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Held {
    /// Learned from a frame.
    Learned,
    /// Learned, and frozen because it moved too often.
    Frozen,
    /// Configured on the interface.
    Pinned,
}

/// A known address, for status output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LearnedEntry {
    /// The network.
    pub network: NetworkId,
    /// The address.
    pub mac: Mac,
    /// Port of the address.
    pub port: PortId,
    /// Seconds since the last recorded sighting; 0 for configured addresses.
    pub age_s: u32,
    /// How the address was assigned to its port.
    pub held: Held,
}

/// Counters of [`Learned`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LearnedStats {
    /// Addresses in the store; some may have expired since the last insertion.
    pub entries: u64,
    /// Times an address moved to another port.
    pub moves: u64,
    /// Times an address was frozen because it moved too often: a duplicate MAC.
    pub frozen: u64,
    /// Times an address was refused because its port's share was full.
    pub refused: u64,
    /// Times an address configured on an interface was heard from another port.
    pub duplicates: u64,
}

/// A move of an address to another port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Network of the address.
    pub network: NetworkId,
    /// The address.
    pub mac: Mac,
    /// Port before the move.
    pub from: PortId,
    /// Port after the move.
    pub to: PortId,
    /// True when this move froze the address, because it had moved too often.
    pub frozen: bool,
}

/// What [`Learned::meet`] found.
pub(super) struct Met {
    /// Port of the destination.
    pub(super) port: Option<PortId>,
    /// Lease of what was learned and found.
    pub(super) lease: Lease,
    /// True when the source was not known at its port.
    pub(super) is_new: bool,
}

/// What a claim did.
pub(super) struct Noted {
    /// Time until which repeating the claim would change nothing, as long as the bucket's version stays the same.
    until_ms: u64,
    /// True when the bucket's version must advance.
    pub(super) changed: bool,
    /// True when the address was not known at this port.
    is_new: bool,
}

/// Maximum number of addresses of one port in one network, by kind of port, and of all links together.
#[derive(Clone, Copy)]
struct Limits {
    interface: u32,
    link: u32,
    links: u32,
}

/// State behind the lock.
pub(super) struct Book {
    pub(super) addresses: Addresses,
    limits: Limits,
    /// Number of addresses learned at links.
    at_links: u32,
    pub(super) stats: LearnedStats,
    housekeeping_at_ms: u64,
    /// Addresses that two stations use.
    pub(super) conflicts: Conflicts,
    /// The last [`MOVES_KEPT`] moves, newest last.
    moves: VecDeque<Moved>,
    /// Scratch list of the shares of one housekeeping sweep.
    round: Vec<ShareKey>,
}

/// The MAC table of all dispatchers, and each port's storm limiter.
///
/// Times are milliseconds of one monotonic clock; dispatchers may differ a little.
pub struct Learned {
    pub(super) book: Mutex<Book>,
    pub(super) versions: Versions,
    pub(super) storm: Storm,
    seed: Seed,
}

impl Default for Learned {
    fn default() -> Learned {
        Learned::new()
    }
}

impl Learned {
    /// Keeps the versions in `memory` from now on. True if the memory keeps its versions, because none was advanced here yet: decisions
    /// that depend on them stay valid.
    ///
    /// # Panics
    /// When `memory` has less than [`VERSIONS`] words.
    pub fn keep_versions_in(&self, memory: VersionMemory) -> bool {
        // Only code that holds this lock advances versions. Caches that still read the old memory see the versions as they were
        // when they were copied.
        let _book = self.book.lock();
        self.versions.move_to(memory)
    }

    /// An empty MAC table.
    pub fn new() -> Learned {
        let (interface, link) = (INTERFACE_ADDRESSES_MAX, LINK_ADDRESSES_MAX);
        Learned::limited(Limits { interface, link, links: LINKS_ADDRESSES_MAX })
    }

    /// An empty MAC table with shares of `most` addresses per port.
    #[cfg(test)]
    pub(super) fn with_shares(most: u32) -> Learned {
        Learned::limited(Limits { interface: most, link: most, links: LINKS_ADDRESSES_MAX })
    }

    fn limited(limits: Limits) -> Learned {
        let seed = Seed::random();
        Learned {
            book: Mutex::new(Book {
                addresses: Addresses::new(seed),
                limits,
                at_links: 0,
                stats: LearnedStats::default(),
                housekeeping_at_ms: 0,
                conflicts: Conflicts::default(),
                moves: VecDeque::with_capacity(MOVES_KEPT),
                round: vec![],
            }),
            versions: Versions::within(own_memory()),
            storm: Storm::new(),
            seed,
        }
    }

    pub(super) fn bucket(&self, network: NetworkId, mac: Mac) -> u16 {
        let hash = self.seed.hash(u64::from(network.get()), mac.to_u64());
        (hash as usize & (BUCKETS - 1)) as u16
    }

    /// Learns `claim`, then looks up `dst`.
    pub(super) fn meet(
        &self,
        network: NetworkId,
        claim: Option<Claim>,
        dst: Option<Mac>,
        now_ms: u64,
    ) -> Met {
        let mut met = Met { port: None, lease: Lease::FOREVER, is_new: false };
        if claim.is_none() && dst.is_none() {
            return met;
        }
        let lease = &mut met.lease;
        let mut book = self.book.lock();
        if let Some(claim) = claim {
            let bucket = self.bucket(network, claim.mac);
            let heard = book.learn(network, claim);
            if heard.changed {
                self.versions.advance(bucket);
            }
            met.is_new = heard.is_new;
            lease.until_ms = heard.until_ms;
            lease.buckets[0] = bucket;
            lease.versions[0] = self.versions.get(bucket);
        }
        if let Some(dst) = dst {
            let bucket = self.bucket(network, dst);
            lease.buckets[1] = bucket;
            lease.versions[1] = self.versions.get(bucket);
            if let Some(address) = book.known(network, dst, now_ms) {
                met.port = Some(address.last.port);
                lease.until_ms = lease.until_ms.min(address.last.expires_ms);
            }
        }
        met
    }

    /// Reports that an address configured on an interface was heard from another port: counts it, keeps it for control, and logs it
    /// at most once a second.
    pub(super) fn duplicate(&self, conflict: Conflict) {
        let mut book = self.book.lock();
        book.stats.duplicates += 1;
        book.conflicts
            .note(conflict, "it is configured on the first, and frames from it arrive from the other");
    }

    /// Addresses that two stations used lately, the newest last.
    pub fn conflicts(&self, now_ms: u64) -> Vec<Conflict> {
        self.book.lock().conflicts.lately(now_ms)
    }

    /// Looks up `mac` without learning.
    pub(super) fn known(&self, network: NetworkId, mac: Mac, now_ms: u64) -> Option<Address> {
        self.book.lock().known(network, mac, now_ms).copied()
    }

    /// Flushes all addresses learned at `port`, and resets its storm limiter. Call it for a removed port after every dispatcher
    /// has adopted a table without the port, and before another port gets its slot.
    pub(crate) fn forget_port(&self, port: PortId) {
        let mut book = self.book.lock();
        let shares: Vec<ShareKey> = book.addresses.shares().filter(|share| share.1 == port).collect();
        for share in shares {
            while let Some(oldest) = book.addresses.oldest(share) {
                let bucket = self.bucket(share.0, book.addresses.get(oldest).mac);
                book.remove(oldest);
                self.versions.advance(bucket);
            }
        }
        book.conflicts.forget_port(port);
        self.storm.reset(port);
    }

    /// All addresses, configured ones included, ordered by network and MAC.
    pub fn entries(&self, table: &Table, now_ms: u64) -> Vec<LearnedEntry> {
        let mut entries: Vec<LearnedEntry> = table
            .all_pinned()
            .map(|(network, mac, port)| LearnedEntry { network, mac, port, age_s: 0, held: Held::Pinned })
            .collect();
        for address in self.copy().iter().filter(|address| address.is_alive(now_ms)) {
            let Address { network, mac, last: Heard { port, at_ms, .. }, .. } = *address;
            let used = table.network(network).is_some_and(|network| network.learning)
                && table.carries(port, network)
                && table.pinned(network, mac).is_none();
            if used {
                let held = if address.is_frozen(now_ms) { Held::Frozen } else { Held::Learned };
                let age_s = (now_ms.saturating_sub(at_ms) / 1000) as u32;
                entries.push(LearnedEntry { network, mac, port, age_s, held });
            }
        }
        entries.sort_unstable_by_key(|entry| (entry.network, entry.mac));
        // An address that was removed and learned again meanwhile may have been in two pages.
        entries.dedup_by_key(|entry| (entry.network, entry.mac));
        entries
    }

    /// Copies the addresses page by page: dispatchers wait for the lock, and a full table would hold it for milliseconds. An address
    /// keeps its place, so each that stays meanwhile is in exactly one page.
    pub(super) fn copy(&self) -> Vec<Address> {
        let mut all = vec![];
        for page in 0.. {
            all.reserve(PAGE);
            let book = self.book.lock();
            let addresses = book.addresses.page(page * PAGE, PAGE);
            let ended = addresses.is_empty();
            all.extend_from_slice(addresses);
            // Hands the lock to a dispatcher that waits.
            MutexGuard::unlock_fair(book);
            if ended {
                break;
            }
        }
        all
    }

    /// Sets the names of ports in warnings.
    pub(crate) fn name_ports(&self, names: HashMap<PortId, String>) {
        self.book.lock().conflicts.names = names;
    }

    /// Moves from number `since` on (counted from 0), as far as they are still kept, and the number of the next move.
    pub fn moves_since(&self, since: u64) -> (Vec<Moved>, u64) {
        let book = self.book.lock();
        let next = book.stats.moves;
        let wanted = usize::try_from(next.saturating_sub(since)).unwrap_or(usize::MAX).min(book.moves.len());
        (book.moves.range(book.moves.len() - wanted..).copied().collect(), next)
    }

    /// Counters.
    pub fn stats(&self) -> LearnedStats {
        let book = self.book.lock();
        LearnedStats { entries: book.addresses.len() as u64, ..book.stats }
    }
}

impl Book {
    /// Looks up an address that has not aged out.
    fn known(&self, network: NetworkId, mac: Mac, now_ms: u64) -> Option<&Address> {
        let address = self.addresses.get(self.addresses.find(network, mac)?);
        address.is_alive(now_ms).then_some(address)
    }

    /// Learns a claim.
    pub(super) fn learn(&mut self, network: NetworkId, claim: Claim) -> Noted {
        let heard = claim.heard;
        let noted = |until_ms, changed, is_new| Noted { until_ms, changed, is_new };
        let refresh_ms = |heard: &Heard| heard.expires_ms.min(heard.at_ms + REFRESH_MS);
        let mut known = self.addresses.find(network, claim.mac);
        if let Some(at) = known.filter(|&at| !self.addresses.get(at).is_alive(heard.at_ms)) {
            self.remove(at);
            known = None;
        }
        let Some(at) = known else {
            if !self.has_room(network, &heard) {
                return noted(heard.at_ms + REFUSED_MS, false, true);
            }
            self.addresses.insert(network, claim.mac, heard);
            self.at_links += u32::from(heard.kind == PortKind::Link);
            return noted(refresh_ms(&heard), true, true);
        };
        let address = *self.addresses.get(at);
        if address.last.port == heard.port {
            if heard.at_ms < refresh_ms(&address.last) {
                return noted(refresh_ms(&address.last), false, false);
            }
            self.addresses.hear(at, heard);
            return noted(refresh_ms(&heard), false, false);
        }
        if address.is_frozen(heard.at_ms) {
            return noted(address.frozen_until_ms.min(address.last.expires_ms), false, false);
        }
        if !self.has_room(network, &heard) {
            // The address has left its old port, and its new port's share is full: its frames are flooded.
            self.remove(at);
            return noted(heard.at_ms + REFUSED_MS, true, true);
        }
        self.move_to(at, heard);
        noted(refresh_ms(&heard), true, true)
    }

    /// Moves an address to the port where it was heard, and freezes it when it has moved too often.
    fn move_to(&mut self, at: u32, heard: Heard) {
        let before = *self.addresses.get(at);
        self.at_links -= u32::from(before.last.kind == PortKind::Link);
        self.at_links += u32::from(heard.kind == PortKind::Link);
        self.addresses.hear(at, heard);
        self.stats.moves += 1;
        let address = self.addresses.get_mut(at);
        if address.moves == 0 || heard.at_ms >= address.first_move_ms + MOVES_WINDOW_MS {
            address.first_move_ms = heard.at_ms;
            address.moves = 0;
        }
        address.moves += 1;
        if address.moves == MOVES_MAX {
            address.moves = 0;
            address.frozen_until_ms = heard.at_ms + FREEZE_MS;
            self.stats.frozen += 1;
            let (network, mac, at, also) = (before.network, before.mac, heard.port, before.last.port);
            let conflict = Conflict { network, mac, at, also, seen_ms: heard.at_ms };
            let (moves, window_s, freeze_s) = (MOVES_MAX, MOVES_WINDOW_MS / 1000, FREEZE_MS / 1000);
            let why = format!(
                "it moved {moves} times within {window_s} s, and now stays at the first for {freeze_s} s"
            );
            self.conflicts.note(conflict, &why);
        }
        if self.moves.len() == MOVES_KEPT {
            self.moves.pop_front();
        }
        let frozen = self.addresses.get(at).frozen_until_ms > heard.at_ms;
        let (network, mac, from, to) = (before.network, before.mac, before.last.port, heard.port);
        self.moves.push_back(Moved { network, mac, from, to, frozen });
    }

    /// Frees space if possible. Returns true when the share of the port has a free slot.
    fn has_room(&mut self, network: NetworkId, heard: &Heard) -> bool {
        let share = (network, heard.port);
        self.reclaim(share, heard.at_ms);
        if heard.at_ms >= self.housekeeping_at_ms {
            self.housekeeping_at_ms = heard.at_ms + HOUSEKEEPING_MS;
            let mut round = std::mem::take(&mut self.round);
            round.extend(self.addresses.shares());
            round.drain(..).for_each(|share| self.reclaim(share, heard.at_ms));
            self.round = round;
        }
        let count = self.addresses.count(share);
        let room = match heard.kind {
            PortKind::Interface => count < self.limits.interface,
            PortKind::Link => count < self.limits.link && self.at_links < self.limits.links,
        };
        self.stats.refused += u64::from(!room);
        room
    }

    /// Removes expired addresses of a share. Advances no version, because decisions made from them have expired, too.
    fn reclaim(&mut self, share: ShareKey, now_ms: u64) {
        for _ in 0..RECLAIM_MAX {
            match self.addresses.oldest(share) {
                Some(oldest) if !self.addresses.get(oldest).is_alive(now_ms) => self.remove(oldest),
                _ => break,
            }
        }
    }

    fn remove(&mut self, at: u32) {
        self.at_links -= u32::from(self.addresses.get(at).last.kind == PortKind::Link);
        self.addresses.remove(at);
    }
}
