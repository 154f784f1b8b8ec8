//! The keeper's check of every sealed link, ten times a second.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::{KeeperState, TICK, seals};
use crate::link::sealed::identity::{Identity, unix_now};
use crate::link::sealed::session::{CurrentSession, Seal};
use crate::link::sealed::source_table::follow;
use crate::link::{Link, LinkState, state};

/// Number of ticks between two keepalives.
const KEEPALIVE_TICKS: u32 = 2;
/// Silence in ms after which a peer counts as down: detected within a second of its death.
const SILENCE_MS: u64 = 800;
/// Silence in ms after which a peer that roamed is tried at its configured address.
const FORGET_MS: u64 = 10_000;
/// Interval at which the identity's files are checked for changes.
const REFRESH: Duration = Duration::from_secs(1);
/// Interval at which certificates of current sessions are checked against clock and revocation lists, even when no file has
/// changed.
const VERIFY: Duration = Duration::from_secs(30);
/// New keys that bring no keepalive within this time do not work.
const SETTLE: Duration = Duration::from_secs(1);
/// Keys that cannot be replaced are discarded at twice the age of a rekey, but not before this age.
const AGE_MAX_LEAST: Duration = Duration::from_secs(60);

impl KeeperState {
    /// The keeper thread's loop.
    pub(super) fn keep(self: &Arc<Self>) {
        let _ = self.keeper.set(std::thread::current());
        let (mut refreshed, mut verified, mut ticks) = (Instant::now(), Instant::now(), 0u32);
        while !self.is_stopping() {
            if self.is_resting() {
                std::thread::park_timeout(TICK);
                continue;
            }
            let identity = self.options.identity.current();
            if self.refresh.swap(false, Relaxed) || refreshed.elapsed() >= REFRESH {
                refreshed = Instant::now();
                if self.read_identity() {
                    verified = Instant::now();
                }
            }
            let links = self.links.lock().clone();
            if self.verify_now.swap(false, Relaxed) || verified.elapsed() >= VERIFY {
                verified = Instant::now();
                links.iter().for_each(|link| self.verify(link, &identity));
                self.verify_guests(&identity);
            }
            follow(&links);
            let keepalive = self.has_news.swap(false, Relaxed) || ticks.is_multiple_of(KEEPALIVE_TICKS);
            for link in &links {
                if let Some(seal) = link.seal() {
                    self.look_after(link, seal, &identity, keepalive);
                }
            }
            ticks = ticks.wrapping_add(1);
            std::thread::park_timeout(TICK);
        }
    }

    /// Reads the identity's files if they have changed. Returns true when there is a new identity: all sessions have then been
    /// checked against it, and the remaining links rekey.
    fn read_identity(&self) -> bool {
        match self.options.identity.refresh() {
            Ok(false) => false,
            Ok(true) => {
                let identity = self.options.identity.current();
                let serial = &identity.info().serial;
                tracing::info!("identity read again: certificate {serial}; sealed links get new keys");
                let links = self.links.lock().clone();
                for link in &links {
                    self.verify(link, &identity);
                    if let Some(seal) = link.seal() {
                        seal.request_rekey();
                    }
                }
                self.verify_guests(&identity);
                self.progress.lock().values_mut().for_each(|progress| progress.not_before = None);
                true
            }
            Err(error) => {
                tracing::error!("{error}; the identity stays as it was");
                false
            }
        }
    }

    /// Ends those of a link's sessions whose certificate is no longer valid.
    fn verify(&self, link: &Link, identity: &Identity) {
        let Some(seal) = link.seal() else { return };
        let mut why = None;
        let lost = seal.retain(|session| {
            let verified = identity.verify(&session.chain, &seal.peer);
            why = why.take().or(verified.as_ref().err().cloned());
            verified.is_ok()
        });
        if lost && let Some(why) = why {
            tracing::warn!("link {}: the certificate of {} is refused now: {why}", link.name(), seal.peer);
            let why = format!("the certificate of {} is refused: {why}", seal.peer);
            self.progress.lock().entry(link.id).or_default().failure = Some(why);
        }
    }

    /// Removes guests that no longer have a link here or a valid certificate.
    fn verify_guests(&self, identity: &Identity) {
        let links = self.links.lock().clone();
        let is_known = |name: &str| seals(&links).any(|seal| seal.peer.eq_ignore_ascii_case(name));
        if let Some(relay) = &self.options.relay {
            relay.retain(&|name, chain| is_known(name) && identity.verify(chain, name).is_ok());
        }
    }

    /// Checks one link.
    pub(super) fn look_after(
        self: &Arc<Self>,
        link: &Arc<Link>,
        seal: &Seal,
        identity: &Identity,
        keepalive: bool,
    ) {
        let rekey = self.options.rekey;
        seal.expire(Instant::now(), (2 * rekey).max(AGE_MAX_LEAST));
        let current = seal.current(link.next_number());
        let silent_ms = link.heard_ms().map(|heard| self.now_ms().saturating_sub(heard));
        let silent = silent_ms.is_none_or(|silent| silent >= SILENCE_MS);
        let rekey_due = current.as_ref().is_none_or(|current| {
            let useless = silent && current.age >= SETTLE;
            current.age >= rekey || current.is_worn || seal.is_rekey_requested() || useless
        });
        if silent_ms.is_some_and(|silent| silent >= FORGET_MS)
            && link.via().is_none()
            && link.native().is_some_and(|native| native.place.forget())
        {
            link.path.restart();
            seal.sources().iter().for_each(|sources| sources.refresh());
        }
        if current.is_some() && !silent && !rekey_due {
            // The keys work and need no replacement: a failure recorded during an outage is no longer relevant.
            self.progress.lock().entry(link.id).or_default().failure = None;
        }
        let initiates = self.must_initiate(link, seal, identity, (current.as_ref(), silent));
        let state = self.judge(link, seal, current.as_ref(), silent_ms, initiates);
        self.set_state(link, seal, with_own_certificate(state, identity));
        if keepalive {
            self.options.courier.register(link);
        }
        if keepalive && current.is_some() {
            // The peer initiates, so this host requests the handshake; at a relay both hosts must connect.
            let asks_rekey = rekey_due && (!initiates || link.via().is_some());
            self.options.courier.keepalive(link, asks_rekey);
        }
        if rekey_due && initiates {
            self.initiate(link);
        }
    }

    /// The state of a link whose peer has been silent for `silent_ms`; `None`: it was never heard.
    fn judge(
        &self,
        link: &Link,
        seal: &Seal,
        current: Option<&CurrentSession>,
        silent_ms: Option<u64>,
        initiates: bool,
    ) -> LinkState {
        let failure = self.progress.lock().get(&link.id).and_then(|progress| progress.failure.clone());
        let peer = &seal.peer;
        if let Some(error) = link.path.route_failure() {
            return LinkState::Down(error);
        }
        match (current, silent_ms) {
            (None, _) => LinkState::Down(match failure {
                Some(why) => why,
                None if initiates => format!("agreeing on keys with {peer}"),
                None => format!("waiting for {peer} to connect to port {} (TCP)", self.options.listen.port()),
            }),
            (Some(_), None) => LinkState::Down(format!("nothing came from {peer} yet")),
            (Some(_), Some(ms)) if ms >= SILENCE_MS => {
                LinkState::Down(format!("nothing came from {peer} for {}.{} s", ms / 1000, ms / 100 % 10))
            }
            (Some(_), Some(_)) => match failure {
                Some(why) => LinkState::Degraded(format!("no new keys: {why}")),
                None => LinkState::Up,
            },
        }
    }

    /// Sets a link's state, and logs a change.
    fn set_state(&self, link: &Link, seal: &Seal, state: LinkState) {
        let Some(changes) = seal.set_state(state.clone(), self.now_ms()) else { return };
        let current = seal.current(link.next_number());
        let keys = current.map_or(String::new(), |current| {
            let CurrentSession { serial, epoch, .. } = current;
            format!(", sealed with {} (certificate {serial}, epoch {epoch})", seal.peer)
        });
        state::log(link.name(), &state, &keys, changes);
    }
}

/// The state, with the reason added if this host's certificate has expired: other hosts then refuse new keys, whatever reason
/// they give.
fn with_own_certificate(state: LinkState, identity: &Identity) -> LinkState {
    let ended_s = unix_now().saturating_sub(identity.info().valid.1);
    if ended_s <= 0 {
        return state;
    }
    let days = ended_s / 86_400;
    let why =
        format!("this host's certificate ended {days} days ago: replace '{}'", identity.path().display());
    match state {
        LinkState::Up | LinkState::Degraded(_) => LinkState::Degraded(why),
        LinkState::Down(_) => LinkState::Down(why),
        unreachable => unreachable,
    }
}
