//! The path state of one link. Senders only load it.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::thread::Thread;

use parking_lot::Mutex;

use super::probe_health::{MAGIC, Probed, Probing, clock_us};
use crate::link::limits::{PATH_MTU_MIN, UDP_PAYLOAD_MAX};
use crate::link::socket::send_batch::Flushed;
use crate::link::state::LinkState;

const IPV4_HEADER_LEN: u16 = 20;
const IPV6_HEADER_LEN: u16 = 40;
const UDP_HEADER_LEN: u16 = 8;
/// Path MTU in bytes while no route is known, and after a packet was too large: a size that nearly every path carries.
const FALLBACK: u16 = 1280;
/// The state's reason for a link on which nothing has arrived yet.
const NEVER_HEARD: &str =
    "nothing came from the other host yet: does it run, with a link back, and is its UDP port open?";
/// How long a hint stays valid, in ms: peers repeat hints five times a second.
const HINT_MS: u64 = 2000;
/// Refresh interval of each link's route, in ms.
const REFRESH_MS: u64 = 1000;

/// The path state of one link. Written by the path room only.
#[derive(Debug)]
pub(in crate::link) struct Path {
    /// Configured limit of an IP packet in bytes.
    limit: Option<u16>,
    /// The kernel's path MTU; 0: not queried yet.
    route_mtu: AtomicU32,
    /// The path MTU found by probes; 0: none.
    probed_mtu: AtomicU32,
    pub(super) probing: Mutex<Probing>,
    /// Speed of the path's device in Mbit/s; 0: unknown.
    mbps: AtomicU32,
    /// Time of the last kernel query, in ms on the core's clock plus 1; 0: never.
    refreshed_ms: AtomicU64,
    /// True if a sender has requested a refresh.
    wanted: AtomicBool,
    /// The prober's thread, once it monitors the link.
    prober: OnceLock<Thread>,
    /// errno of the last route lookup; 0: success.
    route_error: AtomicI32,
    /// True if the path's device is believed to support segmentation (`UDP_SEGMENT`).
    segmentation: AtomicBool,
    /// A [`Hint`] plus one, and its arrival time in ms times four; 0: no hint.
    hint: AtomicU64,
}

/// What a datagram revealed about the peer of a link in clear text. Any host may have sent it, so it explains a state and decides
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) enum Hint {
    /// A sealed datagram arrived.
    AsksForSealing,
    /// A probe sent by this host arrived.
    LeadsHere,
    /// The peer has this host's name.
    SameName,
}

impl Hint {
    fn text(self) -> &'static str {
        match self {
            Hint::AsksForSealing => {
                "the peer asks for sealing: write sealed = true here as well, or remove it there"
            }
            Hint::LeadsHere => {
                "its own probes come back: the remote leads to this host; name the other host's address"
            }
            Hint::SameName => {
                "the other host has this host's name: give each its own name in [host], and call the link by the other's"
            }
        }
    }
}

impl Path {
    /// Creates an unknown path with packets of at most `limit` bytes.
    pub(in crate::link) fn new(limit: Option<u16>) -> Path {
        Path {
            limit,
            route_mtu: AtomicU32::new(0),
            probed_mtu: AtomicU32::new(0),
            probing: Mutex::default(),
            mbps: AtomicU32::new(0),
            refreshed_ms: AtomicU64::new(0),
            wanted: AtomicBool::new(false),
            prober: OnceLock::new(),
            route_error: AtomicI32::new(0),
            segmentation: AtomicBool::new(true),
            hint: AtomicU64::new(0),
        }
    }

    /// Path MTU in bytes for sending: the minimum of the route's MTU, the configured limit and the probed MTU.
    #[inline]
    pub(in crate::link) fn mtu(&self) -> u16 {
        let known = self.unprobed_mtu().unwrap_or_else(|| self.limited(FALLBACK.into()));
        match self.probed_mtu.load(Relaxed) {
            0 => known,
            probed => known.min(probed as u16),
        }
    }

    /// Size in bytes of IP packets to try after a packet of MTU size was refused.
    pub(in crate::link) fn mtu_below(&self) -> u16 {
        if self.mtu() > FALLBACK { FALLBACK } else { PATH_MTU_MIN }
    }

    /// The MTU without probes; `None` before the first kernel query.
    #[inline]
    pub(super) fn unprobed_mtu(&self) -> Option<u16> {
        Some(self.route_mtu.load(Relaxed)).filter(|mtu| *mtu != 0).map(|mtu| self.limited(mtu))
    }

    /// The kernel's path MTU; 0: not queried yet.
    pub(super) fn route_mtu(&self) -> u32 {
        self.route_mtu.load(Relaxed)
    }

    /// Applies the configured limit to a path MTU.
    #[inline]
    fn limited(&self, mtu: u32) -> u16 {
        let configured = u32::from(self.limit.unwrap_or(u16::MAX));
        mtu.min(configured).clamp(u32::from(PATH_MTU_MIN), u32::from(u16::MAX)) as u16
    }

    /// True if segmentation offload should be used.
    #[inline]
    pub(in crate::link) fn segmentation(&self) -> bool {
        self.segmentation.load(Relaxed)
    }

    /// True if the kernel had a route to the remote at the last query.
    #[inline]
    pub(in crate::link) fn has_route(&self) -> bool {
        self.route_error.load(Relaxed) == 0
    }

    /// The error of the last route lookup, if it failed.
    pub(in crate::link) fn route_failure(&self) -> Option<String> {
        match self.route_error.load(Relaxed) {
            0 => None,
            error => Some(io::Error::from_raw_os_error(error).to_string()),
        }
    }

    /// Records a sender's findings. Wakes the prober if the kernel must be queried again.
    #[cold]
    pub(in crate::link) fn learn(&self, flushed: &Flushed) {
        if flushed.no_segmentation {
            self.segmentation.store(false, Relaxed);
        }
        if flushed.too_big {
            self.ask();
        }
    }

    /// Requests a route query now instead of within a second.
    pub(in crate::link) fn ask(&self) {
        if !self.wanted.swap(true, Relaxed)
            && let Some(prober) = self.prober.get()
        {
            prober.unpark();
        }
    }

    /// Forgets probe results, because the path has changed.
    pub(in crate::link) fn restart(&self) {
        self.probing.lock().discovery.restart();
        self.ask();
    }

    /// Records a probe reply. Returns false when it is unsolicited or late.
    #[cold]
    pub(in crate::link) fn answered(&self, payload: &[u8]) -> bool {
        let Some(rest) = payload.strip_prefix(&MAGIC) else { return false };
        let Some(id) = rest.first_chunk() else { return false };
        // The dispatcher does not wait for the prober.
        self.probing.try_lock().is_some_and(|mut probing| {
            let taken = probing.answer(*id, clock_us());
            self.set_probed_mtu(probing.discovery.mtu());
            taken
        })
    }

    /// Round trip, loss and rates.
    pub(in crate::link) fn probed(&self) -> Probed {
        self.probing.lock().probed()
    }

    /// State of a link in clear text: first the route decides, then received datagrams, then probes. `heard`: any datagram has
    /// ever arrived.
    pub(in crate::link) fn state(&self, heard: bool) -> LinkState {
        match (self.route_failure(), self.hint()) {
            (Some(why), _) => LinkState::Unreachable(why),
            (None, Some(hint @ (Hint::AsksForSealing | Hint::LeadsHere))) => {
                LinkState::Down(hint.text().into())
            }
            (None, _) if !heard => LinkState::Down(NEVER_HEARD.into()),
            (None, hint) => match (self.probing.lock().state.clone(), hint) {
                // Frames pass, for now.
                (LinkState::Up, Some(hint)) => LinkState::Degraded(hint.text().into()),
                (state, _) => state,
            },
        }
    }

    /// Records a hint about the peer.
    #[cold]
    pub(in crate::link) fn note(&self, hint: Hint, now_ms: u64) {
        self.hint.store(now_ms << 2 | (hint as u64 + 1), Relaxed);
    }

    fn hint(&self) -> Option<Hint> {
        match self.hint.load(Relaxed) & 3 {
            1 => Some(Hint::AsksForSealing),
            2 => Some(Hint::LeadsHere),
            3 => Some(Hint::SameName),
            _ => None,
        }
    }

    /// Clears a hint that has not been repeated in time.
    pub(super) fn expire_hint(&self, now_ms: u64) {
        let hint = self.hint.load(Relaxed);
        if hint != 0 && now_ms.saturating_sub(hint >> 2) >= HINT_MS {
            // A newer hint stays.
            let _ = self.hint.compare_exchange(hint, 0, Relaxed, Relaxed);
        }
    }

    /// True if a probe that arrived on this link was sent by this host.
    #[cold]
    pub(in crate::link) fn is_own(&self, payload: &[u8]) -> bool {
        let id = payload.strip_prefix(&MAGIC).and_then(|rest| rest.first_chunk());
        id.is_some_and(|id| self.probing.try_lock().is_some_and(|probing| probing.has_sent(*id)))
    }

    pub(super) fn mbps(&self) -> u32 {
        self.mbps.load(Relaxed)
    }

    pub(super) fn set_mbps(&self, mbps: u32) {
        self.mbps.store(mbps, Relaxed);
    }

    pub(super) fn set_probed_mtu(&self, mtu: u16) {
        self.probed_mtu.store(mtu.into(), Relaxed);
    }

    /// True if a kernel query is due at `now_ms`; marks the query as done.
    pub(super) fn is_due(&self, now_ms: u64) -> bool {
        let last = self.refreshed_ms.load(Relaxed);
        let due = last == 0 || (now_ms + 1).saturating_sub(last) >= REFRESH_MS;
        if self.wanted.swap(false, Relaxed) || due {
            self.refreshed_ms.store(now_ms + 1, Relaxed);
            return true;
        }
        false
    }

    /// True if a query was requested.
    #[inline]
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.load(Relaxed)
    }

    /// True if the kernel was never queried.
    pub(super) fn is_unknown(&self) -> bool {
        self.route_mtu.load(Relaxed) == 0
    }

    /// Records the kernel's path MTU.
    pub(super) fn set_route(&self, path_mtu: io::Result<u32>) {
        match path_mtu {
            Ok(mtu) => {
                if self.route_mtu.swap(mtu, Relaxed) != mtu {
                    // The route probably uses another device.
                    self.mbps.store(0, Relaxed);
                }
                self.route_error.store(0, Relaxed);
            }
            Err(error) => {
                let _ = self.route_mtu.compare_exchange(0, FALLBACK.into(), Relaxed, Relaxed);
                self.route_error.store(error.raw_os_error().unwrap_or(libc::EIO), Relaxed);
            }
        }
        // The route may use another device now. If it does not, this costs one refused message.
        self.segmentation.store(true, Relaxed);
    }

    /// Registers the calling prober's thread for wake-ups by senders.
    pub(super) fn watched_by(&self, prober: &Thread) {
        let _ = self.prober.set(prober.clone());
    }

    #[cfg(test)]
    pub(in crate::link) fn set_route_mtu(&self, mtu: u32) {
        self.route_mtu.store(mtu, Relaxed);
    }
}

/// Maximum UDP payload in bytes of an IP packet of `size` bytes.
#[inline]
pub(in crate::link) fn udp_payload(size: u16, is_v4: bool) -> usize {
    let ip = if is_v4 { IPV4_HEADER_LEN } else { IPV6_HEADER_LEN };
    usize::from(size - ip - UDP_HEADER_LEN).min(UDP_PAYLOAD_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_fits_the_path_mtu() {
        let path = Path::new(Some(1500));
        assert_eq!(path.mtu(), 1280, "nothing is known");
        path.set_route_mtu(9000);
        assert_eq!((path.mtu(), udp_payload(path.mtu(), true)), (1500, 1500 - 20 - 8));
        let path = Path::new(None);
        path.set_route_mtu(1500);
        assert_eq!(udp_payload(path.mtu(), false), 1500 - 40 - 8);
        path.set_route_mtu(65536);
        assert_eq!(udp_payload(path.mtu(), true), UDP_PAYLOAD_MAX);
        path.set_route_mtu(68);
        assert_eq!(path.mtu(), PATH_MTU_MIN);
    }

    #[test]
    fn the_kernel_is_queried_once_a_second_and_on_request() {
        let path = Path::new(None);
        assert!(path.is_due(0) && !path.is_due(0) && !path.is_due(999) && path.is_due(1000));
        path.ask();
        assert!(path.is_due(1001) && !path.is_due(1002));
    }

    #[test]
    fn a_refused_size_falls_back_twice() {
        let path = Path::new(None);
        path.set_route_mtu(9000);
        assert_eq!(path.mtu_below(), 1280);
        path.set_route_mtu(1280);
        assert_eq!(path.mtu_below(), PATH_MTU_MIN);
    }
}
