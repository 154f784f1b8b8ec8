//! The common part of all links, whatever their kind.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::path::state::Path;
use crate::frame::{NetworkId, PortId};
use crate::stats::PortStats;
use crate::wire::ethernet::Mac;

/// The common part of all links. Separate cache lines hold the fields written by every burst, the fields read by every burst, the
/// senders' part and the receivers' part.
#[derive(Debug)]
pub struct Common {
    /// Never reused, unlike ports and addresses, so that state of a removed link is never mistaken for this link's.
    pub(in crate::link) id: u64,
    pub(in crate::link) port: PortId,
    name: String,
    networks: Option<Vec<NetworkId>>,
    /// Source MAC addresses that the other host may use, sorted; `None` for all.
    pub(in crate::link) macs: Option<Vec<Mac>>,
    pub(in crate::link) stats: Arc<PortStats>,
    /// State of the path to the other host.
    pub(in crate::link) path: Path,
    number: CacheLine<AtomicU64>,
    heard_ms: CacheLine<AtomicU64>,
}

/// A value that has a cache line to itself.
#[derive(Debug)]
#[repr(align(64))]
struct CacheLine<T>(T);

impl Common {
    /// Creates the part for a link named `name` at `port`, with an unprobed path.
    pub(super) fn new(name: String, port: PortId, stats: Arc<PortStats>, path: Path) -> Common {
        static LINKS: AtomicU64 = AtomicU64::new(0);
        Common {
            id: LINKS.fetch_add(1, Relaxed),
            port,
            name,
            networks: None,
            macs: None,
            stats,
            path,
            number: CacheLine(AtomicU64::new(first_number())),
            heard_ms: CacheLine(AtomicU64::new(0)),
        }
    }

    /// Restricts the link to `networks` and to source addresses `macs`; `None` for all.
    pub(super) fn limited_to(self, networks: Option<Vec<NetworkId>>, mut macs: Option<Vec<Mac>>) -> Common {
        macs.iter_mut().for_each(|macs| macs.sort());
        Common { networks, macs, ..self }
    }

    /// Slot of the link in the port table.
    #[inline]
    pub fn port(&self) -> PortId {
        self.port
    }

    /// Name of the link on this host.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Counters of the link.
    #[inline]
    pub fn stats(&self) -> &Arc<PortStats> {
        &self.stats
    }

    /// True when the configuration lets the other host use the source address `mac`.
    #[inline]
    pub(crate) fn allows_source(&self, mac: Mac) -> bool {
        self.macs.as_ref().is_none_or(|macs| macs.binary_search(&mac).is_ok())
    }

    /// Arrival of the last datagram, in ms on the dispatchers' clock; `None` before the first datagram.
    pub fn heard_ms(&self) -> Option<u64> {
        self.heard_ms.0.load(Relaxed).checked_sub(1)
    }

    /// True when the link carries `network`.
    #[inline]
    pub fn carries(&self, network: NetworkId) -> bool {
        self.networks.as_ref().is_none_or(|networks| networks.contains(&network))
    }

    /// The network of frames whose encapsulation carries no network id.
    pub(in crate::link) fn default_network(&self) -> NetworkId {
        self.networks.as_ref().and_then(|networks| networks.first().copied()).unwrap_or_default()
    }

    /// Takes the number of the next datagram.
    #[inline]
    pub(in crate::link) fn next_number(&self) -> u64 {
        self.number.0.load(Relaxed)
    }

    /// Takes `count` consecutive datagram numbers and returns the first.
    #[inline]
    pub(in crate::link) fn take_numbers(&self, count: u64) -> u64 {
        self.number.0.fetch_add(count, Relaxed)
    }

    /// Goes on with datagram number `next`; nothing sends on the link yet.
    pub(in crate::link) fn number_from(&self, next: u64) {
        self.number.0.store(next, Relaxed);
    }

    /// Takes no number below `next` any more.
    pub(in crate::link) fn skip_numbers_to(&self, next: u64) {
        self.number.0.fetch_max(next, Relaxed);
    }

    /// Records the arrival of a datagram.
    pub(crate) fn heard(&self, now_ms: u64) {
        // Written once per millisecond, not once per burst, because the cache line is shared. Stored plus one; 0 means never.
        if self.heard_ms.0.load(Relaxed) != now_ms + 1 {
            self.heard_ms.0.store(now_ms + 1, Relaxed);
        }
    }

    /// Clears the arrival time.
    #[cfg(test)]
    pub(in crate::link) fn forget_heard(&self) {
        self.heard_ms.0.store(0, Relaxed);
    }

    /// Maximum size of an IP packet in bytes: the minimum of the route's MTU, the configured limit and the probed MTU.
    #[inline]
    pub fn path_mtu(&self) -> u16 {
        self.path.mtu()
    }
}

/// Seeds the random numbers that links need, which takes twenty milliseconds: aws-lc gathers entropy when it is first asked. Otherwise the
/// first link does that.
pub fn seed() {
    // A link reports a failure itself.
    let _ = aws_lc_rs::rand::fill(&mut [0]);
}

/// First datagram number of a link: the time in nanoseconds. So numbers keep rising across restarts of the host and
/// reconfiguration of the link, at any rate below 10^9 datagrams/s, and the peer never takes a new datagram for an old one. (A
/// peer may also start at 1; native/reassembly.rs distinguishes that from a late datagram.)
///
/// Reads the wall clock once, then counts on a monotonic clock.
pub(in crate::link) fn first_number() -> u64 {
    static START: LazyLock<(u64, Instant)> = LazyLock::new(|| {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH);
        (wall.map_or(1, |time| time.as_nanos() as u64).max(1), Instant::now())
    });
    let (wall, instant) = *START;
    wall + instant.elapsed().as_nanos() as u64
}
