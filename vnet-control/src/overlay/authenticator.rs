//! Verifies records against their writer's certificate before they reach the state machine, and signs this host's
//! records.
//!
//! ```text
//!   store -- put --> Authenticator -- verified --> Overlay
//!         <-- signed values --        <-- writes --
//! ```
//!
//! A value (`signed_format.rs`) is accepted under these conditions:
//!
//! - **A host's record** contains its certificate chain. The certificate leads to a trusted authority, is valid and
//!   not revoked, names the host of the key, and authorizes the network; its key signed the value.
//! - **A station's record** is signed by the certificate in its host's record of the same network, which authorizes the network
//!   and the MAC address. A host writes its own record first, and again when its certificate changes; stations whose host is
//!   still unknown are queued ([`WAITING_MAX`]).
//! - No record is older than the last one accepted from the same host under the same key (`Newest`). This prevents replay of a
//!   replaced value, even after the current one was deleted.
//!
//! Any other value counts as no record: it changes nothing in force, the owner repairs it, and an alarm is raised. Each write is
//! verified once; after that the state machine knows its revision.
//!
//! A certificate that becomes invalid later (revoked, authority no longer trusted) removes its host. Expiry alone does not: a
//! host that cannot reach the store cannot renew its record there. But records signed or first read after expiry are refused.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::alarm::Alarm;
use super::record::Key;
use super::signed_format::{self, Signed};
use super::state::{Overlay, Write};
use vnet::frame::NetworkId;
use vnet::link::sealed::identity::{Identity, IdentityStore};
use vnet::link::sealed::signature_algorithms::Signatory;
use vnet::wire::ethernet::Mac;

/// Limit of values queued until their host's certificate arrives: at 4 KiB each they take 32 MiB. Values beyond the limit are
/// read again with the next snapshot.
pub const WAITING_MAX: usize = 8192;
/// Hosts remembered per station with the time of their last record: enough for five moves, after which a station is frozen.
const HOSTS_OF_STATION_MAX: usize = 5;

type StationKey = (NetworkId, Mac);

/// A host whose record was accepted.
struct Known {
    signatory: Arc<Signatory>,
    /// Time at which its latest record was signed.
    signed: u64,
}

/// Hosts that signed records of a station, latest first, with the time of signing.
#[derive(Default)]
struct Newest(Vec<(Box<str>, u64)>);

impl Newest {
    /// False for a record that `host` itself or another host has replaced since.
    fn takes(&self, host: &str, signed: u64) -> bool {
        let at = self.0.iter().position(|(other, _)| **other == *host);
        at.is_none_or(|at| signed > self.0[at].1 || (at == 0 && signed == self.0[at].1))
    }

    fn note(&mut self, host: &str, signed: u64) {
        match self.0.first_mut() {
            Some((last, at)) if **last == *host => *at = signed,
            _ => {
                self.0.retain(|(other, _)| **other != *host);
                self.0.insert(0, (host.into(), signed));
                self.0.truncate(HOSTS_OF_STATION_MAX);
            }
        }
    }
}

/// A value queued until its host's certificate is known.
struct Waiting {
    host: Box<str>,
    value: Vec<u8>,
    lease: i64,
    revision: i64,
}

/// Reason why a value is not accepted.
enum Doubt {
    Wrong(Alarm, String),
    /// The host's certificate is unknown.
    Unknown(Box<str>),
}

impl From<&str> for Doubt {
    fn from(why: &str) -> Doubt {
        Doubt::Wrong(Alarm::Untrusted, why.into())
    }
}

/// A verified value.
struct Believed {
    value: Vec<u8>,
    /// The record is this host's own, signed with a certificate that was replaced since.
    stale: bool,
}

/// Signs this host's records and verifies those of others.
pub struct Authenticator {
    store: Arc<IdentityStore>,
    identity: Arc<Identity>,
    own: Arc<Signatory>,
    /// This host's previous certificate: records signed with it can still be in transit.
    before: Option<Arc<Signatory>>,
    /// Signing time of this host's latest value.
    signed: u64,
    hosts: HashMap<(NetworkId, Box<str>), Known>,
    stations: HashMap<StationKey, Newest>,
    waiting: HashMap<StationKey, Waiting>,
    /// The latest accepted values of other hosts, as signed: with [`super::state::STATIONS_MAX`] stations about 50 MB.
    values: HashMap<Key, Box<[u8]>>,
}

impl Authenticator {
    /// An authenticator for the host of the identity store.
    pub fn new(store: Arc<IdentityStore>) -> Authenticator {
        let identity = store.current();
        Authenticator {
            own: Arc::new(Signatory::own(&identity)),
            store,
            identity,
            before: None,
            signed: 0,
            hosts: HashMap::new(),
            stations: HashMap::new(),
            waiting: HashMap::new(),
            values: HashMap::new(),
        }
    }

    /// The latest accepted value of another host under `key`, in signed form.
    pub(super) fn value(&self, key: &Key) -> Option<&[u8]> {
        self.values.get(key).map(|value| &**value)
    }

    /// Verifies a value that was saved by the previous run; returns it without its signature.
    pub(super) fn vouches(&mut self, key: &Key, value: &[u8]) -> Option<Vec<u8>> {
        let believed = self.check(key, value).ok()?;
        self.values.insert(key.clone(), value.into());
        Some(believed.value)
    }

    /// Signs the value of a write; the error is the reason why it cannot be signed.
    pub fn sign(&mut self, write: &mut Write) -> Result<(), String> {
        let Some(value) = &write.value else { return Ok(()) };
        let because =
            |why: String| format!("{} cannot be written with this host's certificate: {why}", write.key);
        let key = Key::parse(write.key.as_bytes()).ok_or_else(|| because("it is no key".into()))?;
        let claims = &self.own.info().claims;
        let chain = match &key {
            Key::Host(..) => self.own.chain(),
            Key::Station(_, mac) if !claims.allows_source(*mac) => {
                return Err(because("it does not speak for that address (vnet:mac)".into()));
            }
            Key::Station(..) => &[],
        };
        if !claims.allows_network(key.network()) {
            return Err(because("it does not speak for that network (vnet:network)".into()));
        }
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64);
        // Signing times are strictly increasing, even if the clock is set back.
        self.signed = clock.max(self.signed.saturating_add(1));
        let sign = |message: &[u8]| self.identity.sign(message);
        write.value = Some(signed_format::sign(&key, value, chain, self.signed, sign).map_err(because)?);
        Ok(())
    }

    /// [`Overlay::put`] with verification.
    pub fn put(
        &mut self,
        overlay: &mut Overlay,
        key: &[u8],
        value: &[u8],
        lease: i64,
        revision: i64,
        now_ms: u64,
    ) {
        let Some(parsed) = Key::parse(key) else { return overlay.put(key, value, lease, revision, now_ms) };
        if let Key::Station(network, mac) = &parsed {
            self.waiting.remove(&(*network, *mac));
        }
        if overlay.recognises(&parsed, lease, revision, now_ms) {
            return;
        }
        match self.check(&parsed, value) {
            Ok(Believed { value: plain, stale }) => {
                overlay.put(key, &plain, if stale { 0 } else { lease }, revision, now_ms);
                // The overlay did not keep the record, so do not keep its signed value either: both are bounded by the same
                // limits.
                let kept = overlay.knows(&parsed);
                if kept && !overlay.names_this_host(&parsed, &plain) {
                    self.values.insert(parsed.clone(), value.into());
                } else {
                    self.values.remove(&parsed);
                }
                match &parsed {
                    Key::Host(network, name) if kept => self.await_no_more(overlay, *network, name, now_ms),
                    Key::Host(network, name) => drop(self.hosts.remove(&(*network, name.clone()))),
                    Key::Station(..) if kept => {}
                    Key::Station(network, mac) => drop(self.stations.remove(&(*network, *mac))),
                }
            }
            Err(Doubt::Wrong(alarm, why)) => {
                let history = overlay.is_new && overlay.names_this_host(&parsed, value);
                overlay.disbelieve(&parsed, lease, revision, now_ms);
                // A record left by this host's previous run, unsigned or signed with another certificate.
                if !history {
                    overlay.alarm(alarm, now_ms, format!("{parsed} is ignored: {why}"));
                }
            }
            Err(Doubt::Unknown(host)) => {
                overlay.disbelieve(&parsed, lease, revision, now_ms);
                let room = self.waiting.len() < WAITING_MAX;
                let text = format!("{parsed} is signed by {host}, whose certificate is not in the store");
                overlay.alarm(if room { Alarm::UnknownHost } else { Alarm::Limit }, now_ms, text);
                if let (Key::Station(network, mac), true) = (parsed, room) {
                    let waiting = Waiting { host, value: value.into(), lease, revision };
                    self.waiting.insert((network, mac), waiting);
                }
            }
        }
    }

    /// [`Overlay::delete`] with verification.
    pub fn delete(&mut self, overlay: &mut Overlay, key: &[u8], revision: i64, now_ms: u64) {
        if let Some(Key::Station(network, mac)) = Key::parse(key) {
            self.waiting.remove(&(network, mac));
        }
        overlay.delete(key, revision, now_ms);
    }

    /// [`Overlay::end_reading`] with verification; drops the signed values of records that the state machine has forgotten.
    pub fn end_reading(&mut self, overlay: &mut Overlay, now_ms: u64) {
        overlay.end_reading(now_ms);
        self.values.retain(|key, _| overlay.knows(key));
        self.hosts.retain(|(network, name), _| overlay.knows(&Key::Host(*network, name.clone())));
        self.stations.retain(|(network, mac), _| overlay.knows(&Key::Station(*network, *mac)));
    }

    /// Reloads this host's identity. If its certificate is new, its records are written again; hosts that are no longer trusted
    /// are removed.
    pub fn refresh(&mut self, overlay: &mut Overlay, now_ms: u64) {
        let current = self.store.current();
        if Arc::ptr_eq(&current, &self.identity) {
            return;
        }
        let renewed = current.chain() != self.own.chain();
        self.identity = current;
        if renewed {
            let own = Arc::new(Signatory::own(&self.identity));
            self.before = Some(std::mem::replace(&mut self.own, own));
            overlay.republish();
        }
        let (identity, me) = (&self.identity, self.identity.name());
        self.hosts.retain(|(network, name), known| {
            let refused = if **name == *me { None } else { known.signatory.refused(identity) };
            if let Some(why) = &refused {
                overlay.expel(*network, name, why, now_ms);
            }
            refused.is_none()
        });
    }

    /// Verifies the values that were queued for a host's certificate.
    fn await_no_more(&mut self, overlay: &mut Overlay, network: NetworkId, host: &str, now_ms: u64) {
        let due = |place: &StationKey, waiting: &Waiting| place.0 == network && *waiting.host == *host;
        let due: Vec<_> = self.waiting.iter().filter(|(p, w)| due(p, w)).map(|(place, _)| *place).collect();
        for place in due {
            if let Some(Waiting { value, lease, revision, .. }) = self.waiting.remove(&place) {
                let key = Key::Station(place.0, place.1).to_string();
                self.put(overlay, key.as_bytes(), &value, lease, revision, now_ms);
            }
        }
    }

    fn check(&mut self, key: &Key, value: &[u8]) -> Result<Believed, Doubt> {
        let value = Signed::parse(key, value)
            .ok_or("it is not signed; does its host run without [overlay] sealed?")?;
        let signed = value.signed;
        let (believed, mine) = match key {
            Key::Host(network, name) => {
                (self.check_host(*network, name, value)?, **name == *self.identity.name())
            }
            Key::Station(network, mac) => {
                let mine = value.host.as_deref() == Some(self.identity.name());
                (self.check_station(*network, *mac, value)?, mine)
            }
        };
        if mine {
            self.signed = self.signed.max(signed);
        }
        Ok(believed)
    }

    fn check_host(&mut self, network: NetworkId, name: &str, value: Signed) -> Result<Believed, Doubt> {
        let Signed { message, signature, value, chain, signed, .. } = value;
        let id = (network, Box::from(name));
        let known = self.hosts.get(&id);
        let same = known.map(|known| &known.signatory).filter(|known| known.chain() == chain);
        let signatory = match same.cloned() {
            Some(signatory) if signatory.has_signed(&message, &signature) => signatory,
            Some(_) => return Err("the signature is wrong".into()),
            None => {
                let believed = Signatory::believed(&self.identity, chain, name, &message, &signature);
                Arc::new(believed.map_err(|why| Doubt::Wrong(Alarm::Untrusted, why))?)
            }
        };
        let mine = *name == *self.identity.name();
        let stale = mine && signatory.chain() != self.own.chain();
        check_claims(&signatory, mine, network, None)?;
        if known.is_some_and(|known| signed < known.signed) {
            return Err(replayed(name));
        }
        self.hosts.insert(id, Known { signatory, signed });
        Ok(Believed { value, stale })
    }

    fn check_station(&mut self, network: NetworkId, mac: Mac, value: Signed) -> Result<Believed, Doubt> {
        let Signed { message, signature, value, host, signed, .. } = value;
        let host = host.ok_or("it names no host")?;
        let mine = *host == *self.identity.name();
        let known = self.hosts.get(&(network, host.clone())).map(|known| &known.signatory);
        let own = [Some(&self.own), self.before.as_ref()].into_iter().flatten().filter(|_| mine);
        let mut candidates = own.chain(known).peekable();
        if candidates.peek().is_none() {
            return Err(Doubt::Unknown(host));
        }
        let signatory = candidates.find(|candidate| candidate.has_signed(&message, &signature));
        let signatory = signatory.ok_or("the signature is not of its host's certificate")?;
        check_claims(signatory, mine, network, Some(mac))?;
        let stale = mine && signatory.chain() != self.own.chain();
        if self.stations.get(&(network, mac)).is_some_and(|newest| !newest.takes(&host, signed)) {
            return Err(replayed(&host));
        }
        self.stations.entry((network, mac)).or_default().note(&host, signed);
        Ok(Believed { value, stale })
    }
}

/// True if a certificate authorizes a network, and a station there.
fn check_claims(
    signatory: &Signatory,
    mine: bool,
    network: NetworkId,
    mac: Option<Mac>,
) -> Result<(), Doubt> {
    let claims = &signatory.info().claims;
    if mine {
        // For this host's own records, only writes by others are checked.
        Ok(())
    } else if !signatory.is_in_time() {
        Err("the certificate's time is over, or has not come".into())
    } else if !claims.allows_network(network) {
        Err("the certificate does not speak for that network (vnet:network)".into())
    } else if mac.is_some_and(|mac| !claims.allows_source(mac)) {
        Err("the certificate does not speak for that address (vnet:mac)".into())
    } else {
        Ok(())
    }
}

fn replayed(host: &str) -> Doubt {
    Doubt::Wrong(Alarm::Replayed, format!("{host} has replaced it since; it was replayed"))
}

#[cfg(test)]
#[path = "authenticator_tests.rs"]
mod tests;
