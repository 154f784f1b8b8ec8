//! Direct ports of a link: UDP ports of single interfaces (`dispatch/in_place`), which the two hosts of the link negotiate.
//!
//! The receiving host announces over the link, in a probe, which guest (network and MAC address) has which port. The sending host
//! tries each port with a trial, a probe to that port that carries a secret key; the next announcement echoes the key. Frames take
//! a port only while announcements echo the key, so a port behind a firewall, and one that a forger made up, is never used.
//!
//! ```text
//!   receiving host                                             sending host
//!          --- announcement by the link: guests and ports -------->
//!          <-- trial, to each port: key ---------------------------
//!          --- announcement: guests and ports, with the key ------>     frames for these guests take their ports
//! ```
//!
//! Announcements are repeated every second, and sent within 0.2 s of a change: an interface that goes down, or is closed, is no
//! longer in the next one. Its frames then take the link's port again. Silence, or a key without an echo, ends a port's use after
//! three seconds.
//!
//! Sealed links seal announcements and trials as all their datagrams. When the peer of such a link roams, its ports are at the new
//! address, and are used once trials from there are echoed.
//!
//! The peer is not trusted: a port is at the link's own remote address, and only frames that are routed to the link take it. A
//! peer can therefore only choose at which of its ports it receives what it receives anyway.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;

use crate::frame::NetworkId;
use crate::link::limits::DIRECT_MAX;
use crate::link::socket::name::Target;
use crate::wire::ethernet::Mac;

/// First bytes of an announcement's payload. Older hosts echo it like any probe.
const ANNOUNCEMENT: [u8; 8] = *b"vnet-dir";
/// First bytes of a trial's payload, followed by the key.
const TRIAL: [u8; 8] = *b"vnet-try";
/// Bytes of an announced port: network, MAC address, port, key of the last trial that arrived there or 0.
const ENTRY_LEN: usize = 16;
/// Interval between announcements and between trials, in milliseconds.
const REPEAT_MS: u64 = 1000;
/// Silence in milliseconds after which a port is not used: three announcements or trials.
const SILENCE_MS: u64 = 3_500;

/// A guest's own UDP port on its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectPort {
    /// Network of the guest.
    pub network: NetworkId,
    /// MAC address of the guest.
    pub mac: Mac,
    /// The UDP port; not 0.
    pub port: u16,
}

/// A port of this host that a link announces to the other host.
#[derive(Clone)]
pub struct DirectOffer {
    /// The port.
    pub port: DirectPort,
    /// True while the guest can receive; asked five times a second.
    pub is_up: Arc<dyn Fn() -> bool + Send + Sync>,
}

/// Whether the other host uses an announced port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectState {
    /// Its trials arrive.
    Tried,
    /// No trial has arrived lately.
    Untried,
    /// The guest cannot receive, so the port is not announced.
    Withdrawn,
}

/// A guest of the other host with its own receive port, as senders use it.
#[derive(Debug)]
pub(super) struct Guest {
    /// `None`: any network.
    network: Option<NetworkId>,
    mac: Mac,
    pub(super) port: Target,
}

impl Guest {
    /// True if frames to `mac` in `network` are for this guest.
    #[inline]
    pub(super) fn is(&self, network: NetworkId, mac: Mac) -> bool {
        self.mac == mac && self.network.is_none_or(|own| own == network)
    }
}

/// The announced ports of this host.
struct Offers {
    list: Vec<Offered>,
    /// The last announcement.
    told: Vec<u8>,
    told_ms: u64,
    /// When announcements changed last; `None`: nothing has ever been announced.
    changed_ms: Option<u64>,
}

struct Offered {
    offer: DirectOffer,
    /// Key and arrival of the last trial.
    trial: Option<(u32, u64)>,
}

impl Offered {
    /// The key of a trial that arrived lately; 0 for none.
    fn echo(&self, now_ms: u64) -> u32 {
        let lately = self.trial.filter(|(_, at_ms)| now_ms.saturating_sub(*at_ms) < SILENCE_MS);
        lately.map_or(0, |(key, _)| key)
    }
}

/// The ports that the other host announces, each with whether it echoed this host's key.
struct Followed {
    /// Where the other host is; `None`: not known.
    remote: Option<SocketAddr>,
    ports: Vec<(DirectPort, bool)>,
    /// Arrival of the last announcement.
    told_ms: u64,
    /// The last trials; `None`: due at once.
    tried_ms: Option<u64>,
}

/// Direct ports of a link, in both directions.
pub(in crate::link) struct DirectPorts {
    /// Guests with configured ports.
    fixed: Vec<(Mac, u16)>,
    /// This host's key in trials; never 0.
    key: u32,
    offers: Mutex<Offers>,
    followed: Mutex<Followed>,
    guests: ArcSwap<Vec<Guest>>,
}

impl fmt::Debug for DirectPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectPorts").field("guests", &self.guests.load()).finish_non_exhaustive()
    }
}

impl DirectPorts {
    /// Direct ports of a link to `remote`, if that is known, with the configured ports of the other host's guests.
    pub(in crate::link) fn new(remote: Option<SocketAddr>, fixed: &[(Mac, u16)]) -> DirectPorts {
        let mut key = [0; 4];
        // Without random bytes the key is easily guessed, but still nobody else's by accident.
        let _ = aws_lc_rs::rand::fill(&mut key);
        let told = ANNOUNCEMENT.to_vec();
        let ports = DirectPorts {
            fixed: fixed.to_vec(),
            key: u32::from_be_bytes(key).max(1),
            offers: Mutex::new(Offers { list: vec![], told, told_ms: 0, changed_ms: None }),
            followed: Mutex::new(Followed { remote, ports: vec![], told_ms: 0, tried_ms: None }),
            guests: ArcSwap::default(),
        };
        ports.publish(remote, &[]);
        ports
    }

    /// The guests whose frames take ports of their own, at most [`DIRECT_MAX`].
    #[inline]
    pub(super) fn guests(&self) -> Guard<Arc<Vec<Guest>>> {
        self.guests.load()
    }

    /// Sets what the link announces, at most [`DIRECT_MAX`] ports. Returns true if the ports differ from those before.
    pub(in crate::link) fn offer(&self, offers: Vec<DirectOffer>) -> bool {
        let mut now = self.offers.lock();
        let before = std::mem::take(&mut now.list);
        let is_same = before.iter().map(|offered| offered.offer.port).eq(offers.iter().map(|o| o.port));
        let with_trial = |offer: DirectOffer| {
            let known = before.iter().find(|offered| offered.offer.port == offer.port);
            Offered { trial: known.and_then(|known| known.trial), offer }
        };
        now.list = offers.into_iter().map(with_trial).collect();
        !is_same
    }

    /// The announced ports, and whether the other host uses them.
    pub(in crate::link) fn offered(&self, now_ms: u64) -> Vec<(DirectPort, DirectState)> {
        let state = |offered: &Offered| match (offered.offer.is_up)() {
            false => DirectState::Withdrawn,
            true if offered.echo(now_ms) == 0 => DirectState::Untried,
            true => DirectState::Tried,
        };
        self.offers.lock().list.iter().map(|offered| (offered.offer.port, state(offered))).collect()
    }

    /// The announcement of at most `len_max` bytes to send now, if any. After the last port is gone, announcements without ports
    /// are sent until the other host must have noticed.
    pub(in crate::link) fn announcement(&self, len_max: usize, now_ms: u64) -> Option<Vec<u8>> {
        let mut offers = self.offers.lock();
        if offers.list.is_empty() && offers.changed_ms.is_none() {
            return None;
        }
        let mut payload = ANNOUNCEMENT.to_vec();
        let entries = DIRECT_MAX.min(len_max.saturating_sub(payload.len()) / ENTRY_LEN);
        for offered in offers.list.iter().filter(|offered| (offered.offer.is_up)()).take(entries) {
            let DirectPort { network, mac, port } = offered.offer.port;
            payload.extend(network.get().to_be_bytes());
            payload.extend(mac.0);
            payload.extend(port.to_be_bytes());
            payload.extend(offered.echo(now_ms).to_be_bytes());
        }
        if payload == offers.told {
            let passed = |since_ms| now_ms.saturating_sub(since_ms);
            let has_ports = payload.len() > ANNOUNCEMENT.len();
            let is_new = offers.changed_ms.is_some_and(|changed_ms| passed(changed_ms) < SILENCE_MS);
            if passed(offers.told_ms) < REPEAT_MS || !has_ports && !is_new {
                return None;
            }
        } else {
            offers.changed_ms = Some(now_ms);
            offers.told.clone_from(&payload);
        }
        offers.told_ms = now_ms;
        Some(payload)
    }

    /// Takes a trial that arrived at `port`; false if `payload` is none. The dispatcher does not wait for other threads: trials are
    /// repeated.
    pub(in crate::link) fn tried(&self, payload: &[u8], port: u16, now_ms: u64) -> bool {
        let Some(key) = payload.strip_prefix(&TRIAL) else { return false };
        if let (Some(key), Some(mut offers)) = (key.first_chunk(), self.offers.try_lock())
            && let Some(offered) = offers.list.iter_mut().find(|offered| offered.offer.port.port == port)
        {
            offered.trial = Some((u32::from_be_bytes(*key), now_ms));
        }
        true
    }

    /// Takes an announcement; `None` if `payload` is none. Returns the number of ports that were refused: malformed ones, those of
    /// guests that `may` refuses, and those beyond [`DIRECT_MAX`]. The dispatcher does not wait for other threads: announcements
    /// are repeated.
    pub(in crate::link) fn announced(
        &self,
        payload: &[u8],
        may: impl Fn(&DirectPort) -> bool,
        now_ms: u64,
    ) -> Option<u64> {
        let (entries, _) = payload.strip_prefix(&ANNOUNCEMENT)?.as_chunks::<ENTRY_LEN>();
        let mut ports: Vec<(DirectPort, bool)> = vec![];
        let mut refused = 0;
        for entry in entries {
            match parsed(entry) {
                Some((port, echo)) if ports.len() < DIRECT_MAX && may(&port) => {
                    ports.push((port, echo == self.key));
                }
                _ => refused += 1,
            }
        }
        let Some(mut followed) = self.followed.try_lock() else { return Some(refused) };
        followed.told_ms = now_ms;
        if followed.ports != ports {
            if !followed.ports.iter().map(|known| known.0).eq(ports.iter().map(|known| known.0)) {
                followed.tried_ms = None;
            }
            self.publish(followed.remote, &ports);
            followed.ports = ports;
        }
        Some(refused)
    }

    /// Ends the use of ports that are not announced any more, and of those at another address than `remote`, where the other host is
    /// now. Returns the ports to try now.
    pub(in crate::link) fn trials(&self, remote: Option<SocketAddr>, now_ms: u64) -> Vec<SocketAddr> {
        let mut followed = self.followed.lock();
        if followed.remote != remote {
            followed.remote = remote;
            followed.tried_ms = None;
            followed.ports.iter_mut().for_each(|(_, echoed)| *echoed = false);
            self.publish(remote, &[]);
        }
        if followed.ports.is_empty() {
            return vec![];
        }
        if now_ms.saturating_sub(followed.told_ms) >= SILENCE_MS {
            followed.ports.clear();
            self.publish(remote, &[]);
            return vec![];
        }
        if followed.tried_ms.is_some_and(|tried_ms| now_ms.saturating_sub(tried_ms) < REPEAT_MS) {
            return vec![];
        }
        let Some(remote) = remote else { return vec![] };
        followed.tried_ms = Some(now_ms);
        followed.ports.iter().map(|(port, _)| at(remote, port.port)).collect()
    }

    /// The payload of a trial.
    pub(in crate::link) fn trial(&self) -> Vec<u8> {
        [&TRIAL[..], &self.key.to_be_bytes()].concat()
    }

    /// The ports that the other host announces, and whether frames take them.
    pub(in crate::link) fn followed(&self) -> Vec<(DirectPort, bool)> {
        self.followed.lock().ports.clone()
    }

    /// Has senders use the configured ports, and the echoed ones of `ports`, at `remote`.
    fn publish(&self, remote: Option<SocketAddr>, ports: &[(DirectPort, bool)]) {
        let Some(remote) = remote else { return self.guests.store(Arc::default()) };
        let guest = |network, mac, port| Guest { network, mac, port: Target::new(at(remote, port)) };
        let fixed = self.fixed.iter().map(|(mac, port)| guest(None, *mac, *port));
        let echoed = ports.iter().filter(|(_, echoed)| *echoed);
        let echoed = echoed.map(|(port, _)| guest(Some(port.network), port.mac, port.port));
        self.guests.store(Arc::new(fixed.chain(echoed).take(DIRECT_MAX).collect()));
    }
}

/// An announced port and the echoed key; `None` if it cannot be a guest's port.
fn parsed(entry: &[u8; ENTRY_LEN]) -> Option<(DirectPort, u32)> {
    let [n0, n1, n2, n3, m0, m1, m2, m3, m4, m5, p0, p1, k0, k1, k2, k3] = *entry;
    let network = NetworkId::new(u32::from_be_bytes([n0, n1, n2, n3]))?;
    let mac = Mac([m0, m1, m2, m3, m4, m5]);
    let port = u16::from_be_bytes([p0, p1]);
    let echo = u32::from_be_bytes([k0, k1, k2, k3]);
    (mac.is_unicast() && port != 0).then_some((DirectPort { network, mac, port }, echo))
}

fn at(mut remote: SocketAddr, port: u16) -> SocketAddr {
    remote.set_port(port);
    remote
}

#[cfg(test)]
#[path = "direct_ports_tests.rs"]
mod tests;
