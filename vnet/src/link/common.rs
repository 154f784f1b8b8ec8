//! What all links have in common, whatever carries their frames.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::path::state::Path;
use crate::frame::{NetworkId, PortId};
use crate::stats::PortStats;
use crate::wire::ethernet::Mac;

/// What all links have in common. What changes with every burst lies apart from what every burst reads, and senders' part from
/// receivers'.
#[derive(Debug)]
pub struct Common {
    /// Never reused, unlike ports and addresses: state of an earlier link cannot be taken for this one's.
    pub(in crate::link) id: u64,
    pub(in crate::link) port: PortId,
    name: String,
    networks: Option<Vec<NetworkId>>,
    /// Source addresses that frames from the other host may have, sorted; `None` for all.
    pub(in crate::link) macs: Option<Vec<Mac>>,
    pub(in crate::link) stats: Arc<PortStats>,
    /// What the path to the other host is like.
    pub(in crate::link) path: Path,
    number: CacheLine<AtomicU64>,
    heard_ms: CacheLine<AtomicU64>,
}

/// A value that shares no cache line with another.
#[derive(Debug)]
#[repr(align(64))]
struct CacheLine<T>(T);

impl Common {
    /// A link named `name` at `port`, on a path of which nothing is known.
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

    /// The same, for `networks` and frames from `macs` only; `None` for all.
    pub(super) fn limited_to(self, networks: Option<Vec<NetworkId>>, mut macs: Option<Vec<Mac>>) -> Common {
        macs.iter_mut().for_each(|macs| macs.sort());
        Common { networks, macs, ..self }
    }

    /// Its slot in the port table.
    #[inline]
    pub fn port(&self) -> PortId {
        self.port
    }

    /// Its name on this host.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its counters.
    #[inline]
    pub fn stats(&self) -> &Arc<PortStats> {
        &self.stats
    }

    /// True when a frame from the other host may have the source `mac`, as far as the configuration says.
    #[inline]
    pub(crate) fn allows_source(&self, mac: Mac) -> bool {
        self.macs.as_ref().is_none_or(|macs| macs.binary_search(&mac).is_ok())
    }

    /// When the last datagram arrived, in ms on the dispatchers' clock; `None` when none ever did.
    pub fn heard_ms(&self) -> Option<u64> {
        self.heard_ms.0.load(Relaxed).checked_sub(1)
    }

    /// True when the link carries `network`.
    #[inline]
    pub fn carries(&self, network: NetworkId) -> bool {
        self.networks.as_ref().is_none_or(|networks| networks.contains(&network))
    }

    /// The network of frames whose encapsulation names none.
    pub(in crate::link) fn default_network(&self) -> NetworkId {
        self.networks.as_ref().and_then(|networks| networks.first().copied()).unwrap_or_default()
    }

    /// The number of the next datagram.
    #[inline]
    pub(in crate::link) fn next_number(&self) -> u64 {
        self.number.0.load(Relaxed)
    }

    /// Takes `count` consecutive datagram numbers and returns the first.
    #[inline]
    pub(in crate::link) fn take_numbers(&self, count: u64) -> u64 {
        self.number.0.fetch_add(count, Relaxed)
    }

    /// Notes that a datagram arrived.
    pub(crate) fn heard(&self, now_ms: u64) {
        // A shared cache line is written once a millisecond, not once a burst. The value is shifted by one: 0 is never.
        if self.heard_ms.0.load(Relaxed) != now_ms + 1 {
            self.heard_ms.0.store(now_ms + 1, Relaxed);
        }
    }

    /// As if no datagram ever arrived.
    #[cfg(test)]
    pub(in crate::link) fn forget_heard(&self) {
        self.heard_ms.0.store(0, Relaxed);
    }

    /// Largest IP packet in bytes that is sent on it: what the kernel's route, the configured limit and probes allow.
    #[inline]
    pub fn path_mtu(&self) -> u16 {
        self.path.mtu()
    }
}

/// Where a link's datagram numbers start: the time in nanoseconds. So numbers go on rising when a host restarts or a link is
/// configured anew, at any rate below 10^9 datagrams/s, and the other side never mistakes a new datagram for an old one. (A peer
/// may as well start at 1; see native/reassembly.rs for how that is told from a late datagram.)
///
/// The wall clock is read once: after that a clock counts that is never set back.
pub(in crate::link) fn first_number() -> u64 {
    static START: LazyLock<(u64, Instant)> = LazyLock::new(|| {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH);
        (wall.map_or(1, |time| time.as_nanos() as u64).max(1), Instant::now())
    });
    let (wall, instant) = *START;
    wall + instant.elapsed().as_nanos() as u64
}
