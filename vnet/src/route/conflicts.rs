//! Stations that share one MAC address: logged, and the latest kept for control.
//!
//! A live migration is such a conflict for a moment: the MAC address is configured on an interface here, and its frames arrive from another
//! host. When the interface is removed, the address is learned at that host's link at once (`sightings.rs`). Otherwise frames to it would
//! be flooded until it sends again, and be duplicated where other hosts have static routes to it.

use std::collections::{HashMap, VecDeque};

use crate::frame::{NetworkId, PortId};
use crate::log_limit::LogLimit;
use crate::wire::ethernet::Mac;

/// Conflicts kept: guests can cause any number of them, and an administrator mends one at a time.
pub const CONFLICTS_MAX: usize = 16;
/// How long a conflict that is not seen again is kept, in ms: one that was mended is no longer reported.
const REMEMBERED_MS: u64 = 600_000;

/// Two stations use one MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The network.
    pub network: NetworkId,
    /// The address.
    pub mac: Mac,
    /// The port that frames to the address go to.
    pub at: PortId,
    /// The other port that frames from it arrived from.
    pub also: PortId,
    /// When that was seen last, in ms on the dispatchers' clock.
    pub seen_ms: u64,
}

/// The latest conflicts.
#[derive(Default)]
pub(super) struct Conflicts {
    /// The newest last, each address once.
    latest: VecDeque<Conflict>,
    log_limit: LogLimit,
    /// Names of ports, for the log.
    pub(super) names: HashMap<PortId, String>,
}

impl Conflicts {
    /// Keeps a conflict and logs it, at most once a second. `why` follows the names of its two ports.
    pub(super) fn note(&mut self, conflict: Conflict, why: &str) {
        let Conflict { network, mac, at, also, .. } = conflict;
        self.latest.retain(|known| (known.network, known.mac) != (network, mac));
        if self.latest.len() == CONFLICTS_MAX {
            self.latest.pop_front();
        }
        self.latest.push_back(conflict);
        let Some(suppressed) = self.log_limit.allow() else { return };
        let name = |port: PortId| self.names.get(&port).map_or("?", String::as_str);
        tracing::warn!(
            network = network.get(),
            %mac,
            suppressed,
            "two stations use one MAC address, at {} and at {}: {why}; give one of them another address",
            name(at),
            name(also),
        );
    }

    /// Conflicts of addresses at `port`.
    pub(super) fn about(&self, port: PortId) -> Vec<Conflict> {
        self.latest.iter().filter(|known| known.at == port).copied().collect()
    }

    /// A port was removed.
    pub(super) fn forget_port(&mut self, port: PortId) {
        self.latest.retain(|known| known.at != port && known.also != port);
    }

    /// Those seen lately, the newest last.
    pub(super) fn lately(&self, now_ms: u64) -> Vec<Conflict> {
        let is_recent = |known: &&Conflict| now_ms.saturating_sub(known.seen_ms) < REMEMBERED_MS;
        self.latest.iter().filter(is_recent).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_conflicts_are_kept_for_a_while() {
        let conflict = |n: u8, seen_ms| Conflict {
            network: NetworkId::default(),
            mac: Mac([2, 0, 0, 0, 0, n]),
            at: PortId(1),
            also: PortId(u16::from(n)),
            seen_ms,
        };
        let mut conflicts = Conflicts::default();
        for n in 2..40 {
            conflicts.note(conflict(n, 0), "");
        }
        conflicts.note(conflict(30, 500), "");
        let macs = |conflicts: &Conflicts, now_ms| -> Vec<u8> {
            conflicts.lately(now_ms).iter().map(|known| known.mac.0[5]).collect()
        };
        assert_eq!(macs(&conflicts, 600).len(), CONFLICTS_MAX);
        assert_eq!(macs(&conflicts, 600).last(), Some(&30), "seen again, and kept once");
        assert_eq!(macs(&conflicts, REMEMBERED_MS), [30]);
        conflicts.forget_port(PortId(39));
        assert_eq!(macs(&conflicts, 600).len(), CONFLICTS_MAX - 1);
        conflicts.forget_port(PortId(1));
        assert!(macs(&conflicts, 600).is_empty());
    }
}
