//! The MAC addresses that the local network's device is subscribed to (`PACKET_MR_UNICAST`).
//!
//! The table holds the addresses configured on this host, and the source of every frame sent to the LAN until it has sent nothing
//! for [`SILENT_MS`]. The table is bounded: when it is full, silent addresses are removed, and if there are none, new addresses
//! are refused.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::time::Instant;

use super::packet;
use crate::wire::ethernet::Mac;

/// Maximum number of subscribed addresses.
const SUBSCRIPTIONS_MAX: usize = 4096;
/// Time in ms without frames from the overlay after which an address can be unsubscribed. Longer than stations cache addresses
/// without asking again (RFC 4861, Linux's ARP).
const SILENT_MS: u64 = 600_000;
/// Time in ms after sending a frame to the LAN during which frames from the LAN with the same source address count as loops.
const HAIRPIN_MS: u64 = 2_000;

/// Maximum time in ms for which the kernel forwards an address's frames by itself after a verdict.
const FORWARDED_MS: u64 = 2_000;

/// The table of subscribed addresses.
pub(super) struct Subscriptions {
    /// Interface index of the device.
    index: libc::c_int,
    addresses: HashMap<Mac, Subscription>,
    /// Start of the millisecond clock.
    started: Instant,
    /// The last source address and its time in ms: runs of frames from one source skip the table lookup.
    latest: (Mac, u64),
    expired_ms: u64,
}

/// Reasons why an address is subscribed.
#[derive(Clone, Copy, Default)]
struct Subscription {
    /// Last time, in ms, at which it was the source of a frame to the LAN, or at which the kernel may forward its frames.
    sent_ms: Option<u64>,
    /// True if the address is configured on this host.
    configured: bool,
}

impl Subscriptions {
    pub(super) fn new(index: libc::c_int) -> Subscriptions {
        Subscriptions {
            index,
            addresses: HashMap::new(),
            started: Instant::now(),
            latest: (Mac::default(), 0),
            expired_ms: 0,
        }
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    pub(super) fn contains(&self, mac: Mac) -> bool {
        self.addresses.contains_key(&mac)
    }

    /// True if a frame from source `mac` was sent to the LAN within [`HAIRPIN_MS`], so a frame from the LAN with that source has
    /// looped back.
    pub(super) fn sent_recently(&self, mac: Mac) -> bool {
        let sent_ms = self.addresses.get(&mac).and_then(|known| known.sent_ms);
        sent_ms.is_some_and(|at| self.now_ms().saturating_sub(at) < HAIRPIN_MS)
    }

    /// Subscribes to the sources of frames that are about to be sent.
    pub(super) fn subscribe_sources(&mut self, socket: &OwnedFd, sources: impl Iterator<Item = Mac>) {
        self.subscribe_until(socket, sources, 0);
    }

    /// Subscribes to the source of frames that the kernel may forward until a verdict ends.
    pub(super) fn subscribe_forwarded(&mut self, socket: &OwnedFd, src: Mac) {
        self.subscribe_until(socket, std::iter::once(src), FORWARDED_MS);
    }

    /// Subscribes to the sources of frames that are sent from now on, for `ahead_ms`.
    fn subscribe_until(&mut self, socket: &OwnedFd, sources: impl Iterator<Item = Mac>, ahead_ms: u64) {
        let now_ms = self.now_ms();
        let until_ms = now_ms + ahead_ms;
        for mac in sources {
            if (mac, until_ms) == self.latest || !mac.is_unicast() {
                continue;
            }
            self.latest = (mac, until_ms);
            if let Some(known) = self.addresses.get_mut(&mac) {
                known.sent_ms = known.sent_ms.max(Some(until_ms));
                continue;
            }
            if self.addresses.len() >= SUBSCRIPTIONS_MAX && !self.expire(socket, now_ms) {
                // The table is full: frames to this address are discarded and counted as not subscribed.
                continue;
            }
            self.addresses.insert(mac, Subscription { sent_ms: Some(until_ms), configured: false });
            self.set_membership(socket, mac, true);
        }
    }

    /// Replaces the configured addresses by `macs`.
    pub(super) fn configure(&mut self, socket: &OwnedFd, macs: &[Mac]) {
        for known in self.addresses.values_mut() {
            known.configured = false;
        }
        for &mac in macs.iter().take(SUBSCRIPTIONS_MAX) {
            if !self.contains(mac) {
                self.set_membership(socket, mac, true);
            }
            self.addresses.entry(mac).or_default().configured = true;
        }
        self.unsubscribe(socket, |known| known.sent_ms.is_none() && !known.configured);
    }

    /// Unsubscribes silent addresses, at most once per second. Returns true if the table has a free entry.
    fn expire(&mut self, socket: &OwnedFd, now_ms: u64) -> bool {
        if now_ms.saturating_sub(self.expired_ms) >= 1000 {
            self.expired_ms = now_ms;
            let silent = |at: u64| now_ms.saturating_sub(at) >= SILENT_MS;
            self.unsubscribe(socket, |known| !known.configured && known.sent_ms.is_none_or(silent));
        }
        self.addresses.len() < SUBSCRIPTIONS_MAX
    }

    fn unsubscribe(&mut self, socket: &OwnedFd, which: impl Fn(&Subscription) -> bool) {
        let gone: Vec<Mac> =
            self.addresses.iter().filter(|(_, known)| which(known)).map(|(mac, _)| *mac).collect();
        for mac in gone {
            self.addresses.remove(&mac);
            self.set_membership(socket, mac, false);
        }
    }

    fn set_membership(&self, socket: &OwnedFd, mac: Mac, on: bool) {
        // Failure is harmless: a device that cannot filter receives all frames anyway, and a removed one receives none.
        let _ = packet::set_membership(socket, self.index, libc::PACKET_MR_UNICAST, mac, on);
    }
}

#[cfg(test)]
#[path = "subscriptions_tests.rs"]
mod tests;
