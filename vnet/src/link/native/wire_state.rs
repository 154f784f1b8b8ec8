//! Readiness of the wire for a native link: whether its known flows may take the two hosts' VXLAN devices.
//!
//! Each host sends a trial by the wire once a second. The host that receives it says so over the link in an announcement, a probe
//! with [`MAGIC`]. Frames take the wire only while the other host announces that it receives the trials: if a firewall is between
//! the hosts, or the other host has no wire or an older vnetd, they stay on the link.
//!
//! ```text
//!   host 1 ---- trial by the wire -------------------> host 2
//!          <--- announcement by the link: heard ------
//! ```
//!
//! A host whose vnetd has died announces nothing, but its kernel still forwards established flows, for a time that its announcements
//! contain. So silence ends the wire's use at once only if the peer's vnetd is alive: it sends other datagrams. A vnetd that starts
//! announces nothing until it has received a trial or could have received several: otherwise it would end flows that it adopts.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::wire::vxlan::WIRE_PORT;

/// First bytes of an announcement's payload. Older hosts echo it like any probe.
const MAGIC: [u8; 8] = *b"vnet-wir";
/// Bytes of an announcement: magic, port of the wire, whether trials arrive, `outlive` in seconds, [`TRANSLATES`], zeros.
const LEN: usize = 16;
/// The sending host takes translated packets (`translations`).
const TRANSLATES: u8 = 1;
/// Silence in milliseconds after which the wire is not used: three trials.
const SILENCE_MS: u64 = 3_500;

/// What a host announces of its wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireTerms {
    /// How long its kernel forwards established flows without vnetd.
    pub outlive: Duration,
    /// It takes translated packets (`translations`).
    pub translates: bool,
}

/// Readiness of a link's wire. Times are milliseconds of the dispatchers' clock plus one; 0 means never.
#[derive(Debug, Default)]
pub(in crate::link) struct WireState {
    /// Arrival of the last trial.
    tried: AtomicU64,
    /// The last announcement of the other host that it receives this host's trials; 0 if it has denied that since.
    heard: AtomicU64,
    /// How long the other host's kernel forwards established flows without vnetd, in milliseconds.
    outlive_ms: AtomicU64,
    /// True if the other host takes translated packets.
    translates: AtomicBool,
    /// The first request for an announcement.
    began: AtomicU64,
    /// Readiness at the last call of [`WireState::change`].
    told: AtomicBool,
}

impl WireState {
    /// Notes a trial of the other host.
    pub(in crate::link) fn tried(&self, now_ms: u64) {
        self.tried.store(now_ms + 1, Relaxed);
    }

    /// Takes an announcement; false if `payload` is none.
    pub(in crate::link) fn announced(&self, payload: &[u8], now_ms: u64) -> bool {
        if !payload.starts_with(&MAGIC) {
            return false;
        }
        let Some(&[port_high, port_low, hears, high, low]) = payload.get(8..13) else { return true };
        if u16::from_be_bytes([port_high, port_low]) == WIRE_PORT {
            let flags = payload.get(13).copied().unwrap_or(0);
            self.translates.store(flags & TRANSLATES != 0, Relaxed);
            self.outlive_ms.store(1000 * u64::from(u16::from_be_bytes([high, low])), Relaxed);
            self.heard.store(if hears == 1 { now_ms + 1 } else { 0 }, Relaxed);
        }
        true
    }

    /// Whether the other host has announced that it takes translated packets.
    pub(in crate::link) fn translates(&self) -> bool {
        self.translates.load(Relaxed)
    }

    /// The announcement to send; `None` until this host knows whether trials arrive.
    pub(in crate::link) fn announcement(&self, terms: WireTerms, now_ms: u64) -> Option<[u8; LEN]> {
        let WireTerms { outlive, translates } = terms;
        let tried = self.tried.load(Relaxed);
        let began = self.began.compare_exchange(0, now_ms + 1, Relaxed, Relaxed);
        let began = began.map_or_else(|began| began, |_| now_ms + 1);
        if tried == 0 && is_recent(began, now_ms) {
            return None;
        }
        let mut payload = [0; LEN];
        payload[..8].copy_from_slice(&MAGIC);
        payload[8..10].copy_from_slice(&WIRE_PORT.to_be_bytes());
        payload[10] = u8::from(is_recent(tried, now_ms));
        let outlive_s = u16::try_from(outlive.as_secs()).unwrap_or(u16::MAX);
        payload[11..13].copy_from_slice(&outlive_s.to_be_bytes());
        payload[13] = if translates { TRANSLATES } else { 0 };
        Some(payload)
    }

    /// True if frames may take the wire. `alive_ms`: arrival of the other host's last datagram on the link.
    pub(in crate::link) fn is_ready(&self, alive_ms: Option<u64>, now_ms: u64) -> bool {
        let heard = self.heard.load(Relaxed);
        let Some(heard_ms) = heard.checked_sub(1) else { return false };
        let is_dead = alive_ms.is_none_or(|alive_ms| alive_ms < heard_ms + SILENCE_MS);
        is_recent(heard, now_ms) || is_dead && now_ms.saturating_sub(heard_ms) < self.outlive_ms.load(Relaxed)
    }

    /// Readiness, if it has changed since the last call.
    pub(in crate::link) fn change(&self, alive_ms: Option<u64>, now_ms: u64) -> Option<bool> {
        let ready = self.is_ready(alive_ms, now_ms);
        (self.told.swap(ready, Relaxed) != ready).then_some(ready)
    }
}

fn is_recent(at: u64, now_ms: u64) -> bool {
    at != 0 && now_ms.saturating_sub(at - 1) < SILENCE_MS
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTLIVE: Duration = Duration::from_secs(30);
    const TERMS: WireTerms = WireTerms { outlive: OUTLIVE, translates: false };

    /// Host 1's state after the announcement that host 2 sends at `now_ms`.
    fn announce(one: &WireState, two: &WireState, now_ms: u64) {
        let announcement = two.announcement(TERMS, now_ms).unwrap();
        assert!(one.announced(&announcement, now_ms));
    }

    #[test]
    fn frames_take_the_wire_while_the_other_host_hears_it() {
        let (one, two) = (WireState::default(), WireState::default());
        let change = |now_ms| one.change(Some(now_ms), now_ms);
        assert_eq!(change(0), None);
        assert_eq!(two.announcement(TERMS, 0), None, "not known yet");
        two.tried(10);
        announce(&one, &two, 20);
        assert_eq!((change(20), change(20 + SILENCE_MS - 1)), (Some(true), None));
        assert_eq!(change(20 + SILENCE_MS), Some(false), "it announces nothing any more");
        two.tried(5_000);
        announce(&one, &two, 5_000);
        assert_eq!(change(5_000), Some(true));
        // Trials are lost, announcements are not.
        announce(&one, &two, 5_000 + SILENCE_MS);
        assert_eq!(change(5_000 + SILENCE_MS), Some(false));
    }

    #[test]
    fn a_host_without_trials_says_so_after_a_while() {
        let (one, two) = (WireState::default(), WireState::default());
        assert_eq!(two.announcement(TERMS, 100), None);
        assert_eq!(two.announcement(TERMS, 100 + SILENCE_MS - 1), None);
        announce(&one, &two, 100 + SILENCE_MS);
        assert!(!one.is_ready(Some(100), 100 + SILENCE_MS));
    }

    #[test]
    fn the_wire_to_a_dead_vnetd_is_used_as_long_as_its_flows_live() {
        let (one, two) = (WireState::default(), WireState::default());
        two.tried(1_000);
        announce(&one, &two, 1_000);
        // Its last datagram came half a second later.
        let (alive_ms, end_ms) = (Some(1_500), 1_000 + OUTLIVE.as_millis() as u64);
        assert!(one.is_ready(alive_ms, end_ms - 1) && !one.is_ready(alive_ms, end_ms));
        assert!(!one.is_ready(Some(1_000 + SILENCE_MS), 20_000), "alive, but without the wire");
    }

    #[test]
    fn a_host_says_whether_it_takes_translated_packets() {
        let (one, two) = (WireState::default(), WireState::default());
        two.tried(0);
        for translates in [true, false] {
            assert!(one.announced(&two.announcement(WireTerms { translates, ..TERMS }, 0).unwrap(), 0));
            assert_eq!(one.translates(), translates);
        }
    }

    #[test]
    fn others_announcements_change_nothing() {
        let state = WireState::default();
        assert!(!state.announced(b"vnet-mtu12345678", 0), "a prober's");
        assert!(state.announced(&MAGIC, 0), "too short");
        let mut another = MAGIC.to_vec();
        another.extend([0x12, 0xb5, 1, 0, 30, 0, 0, 0]);
        assert!(state.announced(&another, 0), "another port");
        assert!(!state.is_ready(None, 0));
    }
}
