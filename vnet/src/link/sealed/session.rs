//! A sealed link's sessions: keys, epochs, rekeying, and keepalives.
//!
//! A [`Session`] is the result of one TLS handshake: a key for each direction under a 2-bit epoch, and the other host's
//! certificate. [`Seal`] holds a link's sessions. One of them seals, and a few open:
//!
//! ```text
//! responder  accept(e): opens e   ------- ACCEPT e ------->  accept(e), switch(e): opens and seals with e   initiator
//!            switch(e): seals with e too <--- CONFIRM e ---
//!            expire(): the previous session is discarded OVERLAP later, on both sides
//! ```
//!
//! Each side opens with a new key before the other side seals with it, and with the old key until datagrams in flight have
//! arrived, so a rekey under traffic loses nothing. Dispatchers use a [`Keyring`], which is replaced as a whole.
//!
//! When a new vnetd takes over, the sessions go on there (link/succession.rs). From [`Seal::begin_hand_over`] on, no thread of this
//! process seals, adds sessions or switches to one: each does so within a [`Turn`], and there are none any more. Dispatchers seal
//! without a turn; they stand still before.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use aws_lc_rs::{hkdf, hmac};
use rustls::pki_types::CertificateDer;
use zeroize::Zeroizing;

use super::aead::{MATERIAL_LEN, OpeningKey, SealingKey};
use super::identity::{CertificateInfo, Claims};
use super::keepalive::{Clock, Keepalive};
use super::sync::{
    Acquire, ArcSwap, AtomicBool, AtomicU32, Guard, Mutex, Relaxed, Release, RwLock, RwLockReadGuard,
};
use crate::link::state::{LinkState, StateLog};

/// How long keys still open datagrams after newer keys have replaced them.
pub(in crate::link) const OVERLAP: Duration = Duration::from_secs(5);
/// How long the initiator may take to use newly agreed keys.
pub(super) const PENDING_MAX: Duration = Duration::from_secs(15);

/// Keying material of the exporter: the initiator's key and salt, then the responder's.
pub(in crate::link) type Exported = [u8; 2 * MATERIAL_LEN];

/// What applications' keys are derived from: exported with a label of its own.
pub(in crate::link) type ApplicationSecret = [u8; 32];
/// Keys of a session between two applications: of what its opener sends, then of what the other one sends.
pub type ApplicationKeys = [u8; 64];
/// Begins what is hashed into applications' keys.
const APPLICATION_LABEL: &[u8] = b"vnet-rdma seal 1";

/// Length of the keys of an application's session.
struct ApplicationKeysLen;

impl hkdf::KeyType for ApplicationKeysLen {
    fn len(&self) -> usize {
        size_of::<ApplicationKeys>()
    }
}

/// This host's role in a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) enum Role {
    Initiator,
    Responder,
}

/// The keys of one handshake.
pub(in crate::link) struct Session {
    pub(in crate::link) epoch: u8,
    pub(in crate::link) sealing: Arc<SealingKey>,
    pub(in crate::link) opening: Arc<OpeningKey>,
    /// What the keys were made from, for the next vnetd.
    pub(in crate::link) exported: Zeroizing<Exported>,
    /// The other host's certificate, followed by those of its issuers.
    pub(in crate::link) chain: Vec<CertificateDer<'static>>,
    pub(in crate::link) info: CertificateInfo,
    claims: Option<Arc<Claims>>,
    pub(in crate::link) role: Role,
    pub(in crate::link) application_secret: Option<Zeroizing<ApplicationSecret>>,
    /// Keepalive tags: of this host's keepalives, and of the peer's.
    tags: (u32, u32),
    pub(in crate::link) made: Instant,
    pub(in crate::link) stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) enum Stage {
    /// The key opens; the session becomes current when the other side uses it.
    Pending,
    /// The key seals and opens.
    Current,
    /// The key still opens datagrams in flight, because a newer session seals. Holds the time of its retirement.
    Retired(Instant),
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session(epoch {}, {:?})", self.epoch, self.stage)
    }
}

impl Session {
    /// A session of `epoch` for datagrams with numbers from `first` on, with the other host's certificates.
    pub(in crate::link) fn new(
        exported: &Exported,
        role: Role,
        epoch: u8,
        first: u64,
        (chain, info): (Vec<CertificateDer<'static>>, CertificateInfo),
    ) -> Session {
        let [ours, theirs] = halves(exported, role);
        Session {
            epoch,
            sealing: Arc::new(SealingKey::new(&ours, epoch, first)),
            opening: Arc::new(OpeningKey::new(&theirs)),
            exported: Zeroizing::new(*exported),
            claims: (info.claims != Claims::default()).then(|| Arc::new(info.claims.clone())),
            chain,
            info,
            role,
            application_secret: None,
            tags: (tag(&ours), tag(&theirs)),
            made: Instant::now(),
            stage: Stage::Pending,
        }
    }

    /// What the opening key is made from.
    pub(in crate::link) fn opening_material(&self) -> Zeroizing<[u8; MATERIAL_LEN]> {
        let [_, theirs] = halves(&self.exported, self.role);
        theirs
    }

    /// From now on keys of applications are derived from this secret.
    pub(in crate::link) fn with_application_secret(self, secret: Zeroizing<ApplicationSecret>) -> Session {
        Session { application_secret: Some(secret), ..self }
    }

    /// Keys of a session between two applications, which `context` names (HKDF-SHA-256, RFC 5869). `opens`: the session's opener is on this
    /// host.
    fn application_keys(&self, opens: bool, context: &[u8]) -> Option<ApplicationKeys> {
        let secret = self.application_secret.as_ref()?;
        let by_initiator = u8::from((self.role == Role::Initiator) == opens);
        let secret = hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(&**secret);
        let mut keys = [0; size_of::<ApplicationKeys>()];
        let info = [APPLICATION_LABEL, &[by_initiator], context];
        secret.expand(&info, ApplicationKeysLen).and_then(|derived| derived.fill(&mut keys)).ok()?;
        Some(keys)
    }
}

/// Key and salt of this host's direction, then of the other one's.
fn halves(exported: &Exported, role: Role) -> [Zeroizing<[u8; MATERIAL_LEN]>; 2] {
    let (initiator, responder) = exported.split_at(MATERIAL_LEN);
    let (ours, theirs) = match role {
        Role::Initiator => (initiator, responder),
        Role::Responder => (responder, initiator),
    };
    [ours, theirs].map(|half| Zeroizing::new(half.try_into().expect("half of what was exported")))
}

/// The tag that identifies a session and direction in a keepalive's header, for a receiver that does not know the source. It
/// reveals nothing about the key: HMAC (RFC 2104) is a pseudorandom function.
fn tag(material: &[u8; MATERIAL_LEN]) -> u32 {
    let key = hmac::Key::new(hmac::HMAC_SHA256, material);
    let tag = hmac::sign(&key, b"vnet-seal tag");
    u32::from_be_bytes(tag.as_ref()[..4].try_into().expect("SHA-256 gives 32 bytes"))
}

/// The keys with which dispatchers seal and open. Immutable; replaced as a whole.
#[derive(Debug, Default)]
pub(in crate::link) struct Keyring {
    sealing: Option<Arc<SealingKey>>,
    /// Keys by epoch.
    opening: [Option<Arc<OpeningKey>>; 4],
    /// Epochs of retired sessions, one bit each.
    retired: u8,
    /// Tag of this host's keepalives.
    tag: u32,
    claims: Option<Arc<Claims>>,
}

impl Keyring {
    /// The keys of these sessions.
    pub(super) fn of(sessions: &[Session]) -> Keyring {
        let mut keyring = Keyring::default();
        for session in sessions {
            keyring.opening[usize::from(session.epoch)] = Some(session.opening.clone());
            if matches!(session.stage, Stage::Retired(_)) {
                keyring.retired |= 1 << session.epoch;
            }
            if session.stage == Stage::Current {
                keyring.tag = session.tags.0;
                keyring.sealing = Some(session.sealing.clone());
                keyring.claims = session.claims.clone();
            }
        }
        if keyring.sealing.is_none() {
            // There are only pending sessions: their certificate already limits the peer.
            keyring.claims = sessions.last().and_then(|session| session.claims.clone());
        }
        keyring
    }

    /// The sealing key, if it may seal datagrams from number `next` on.
    #[inline]
    pub(in crate::link) fn sealing(&self, next: u64) -> Option<&SealingKey> {
        self.sealing.as_deref().filter(|key| !key.is_spent(next))
    }

    /// The key that opens datagrams of `epoch`.
    #[inline]
    pub(in crate::link) fn opening(&self, epoch: u8) -> Option<&OpeningKey> {
        self.opening[usize::from(epoch & 3)].as_deref()
    }

    /// The tag of this host's keepalives.
    pub(in crate::link) fn tag(&self) -> u32 {
        self.tag
    }

    /// True when the opened datagram `number` of `epoch` is the newest, so that the peer is at its source address.
    pub(in crate::link) fn is_newest(&self, epoch: u8, number: u64) -> bool {
        self.is_live(epoch) && self.opening(epoch).is_some_and(|key| key.is_newest(number))
    }

    /// True unless the session of `epoch` has retired.
    pub(in crate::link) fn is_live(&self, epoch: u8) -> bool {
        self.retired & (1 << (epoch & 3)) == 0
    }

    /// Networks and addresses that the peer may send from; `None`: no limit.
    #[inline]
    pub(in crate::link) fn claims(&self) -> Option<&Arc<Claims>> {
        self.claims.as_ref()
    }
}

/// The keys of a sealed link.
#[derive(Debug)]
pub(in crate::link) struct Seal {
    /// The name that the other host's certificate must have.
    pub(in crate::link) peer: String,
    keyring: ArcSwap<Keyring>,
    /// Sessions, oldest first; at most one per epoch.
    pub(in crate::link) sessions: Mutex<Vec<Session>>,
    /// True while the keys are the next vnetd's.
    handed: RwLock<bool>,
    clock: Clock,
    /// Round trip in microseconds; 0: unknown.
    rtt_us: AtomicU32,
    /// True to rekey before the current keys are old, because the peer requested it or this host has a new certificate.
    rekey: AtomicBool,
    /// True if keys have changed since the last [`Seal::has_changed`].
    changed: AtomicBool,
    /// Finds the link of a datagram from an unknown source.
    sources: Mutex<Option<Weak<dyn Sources>>>,
    /// True while a handshake is in progress. Only one at a time, because two might assign one epoch to different keys.
    handshaking: AtomicBool,
    state: Mutex<(LinkState, StateLog)>,
}

/// The table of source addresses by which a link's datagrams are found. It must read links again after a rekey.
pub(in crate::link) trait Sources: std::fmt::Debug + Send + Sync {
    /// Reads all links again.
    fn refresh(&self);
}

impl Seal {
    /// The state for status output; `number` is the link's next datagram number.
    pub(in crate::link) fn view(&self, number: u64) -> SealView {
        let current = self.current(number);
        let keys_s = current.as_ref().map(|current| current.age.as_secs());
        let certificate_end = current.map(|current| current.certificate_end);
        SealView { peer: self.peer.clone(), keys_s, certificate_end, rtt_us: self.rtt_us() }
    }

    pub(in crate::link) fn new(peer: String) -> Seal {
        let state = LinkState::Down(format!("no keys agreed with {peer} yet"));
        Seal {
            peer,
            keyring: ArcSwap::default(),
            sessions: Mutex::default(),
            handed: RwLock::default(),
            clock: Clock::default(),
            rtt_us: AtomicU32::new(0),
            rekey: AtomicBool::new(false),
            changed: AtomicBool::new(false),
            sources: Mutex::default(),
            handshaking: AtomicBool::new(false),
            state: Mutex::new((state, StateLog::default())),
        }
    }

    /// The current keys; callers load them once per batch.
    #[inline]
    pub(in crate::link) fn keyring(&self) -> Guard<Arc<Keyring>> {
        self.keyring.load()
    }

    /// Leave to seal, or to change sessions: what is sealed meanwhile is not handed over with an old number. `None` once the keys are the
    /// next vnetd's.
    pub(in crate::link) fn turn(&self) -> Option<Turn<'_>> {
        let handed = self.handed.read();
        (!*handed).then_some(Turn { _handed: handed })
    }

    /// Waits until no thread has a turn, and gives none any more.
    pub(in crate::link) fn begin_hand_over(&self) {
        *self.handed.write() = true;
    }

    /// The next vnetd has failed: turns are given again. `used`: it may have used the keys, which are therefore discarded.
    pub(in crate::link) fn end_hand_over(&self, used: bool) {
        let mut handed = self.handed.write();
        if std::mem::take(&mut *handed) && used {
            let mut sessions = self.sessions.lock();
            sessions.clear();
            self.publish(&sessions);
        }
    }

    /// Goes on with the sessions of the vnetd before, oldest first. Nothing uses the link yet.
    pub(in crate::link) fn resume(
        &self,
        sessions: Vec<Session>,
        Resumed { is_up, asks_rekey, rtt_us }: Resumed,
    ) {
        self.rekey.store(asks_rekey, Relaxed);
        self.rtt_us.store(rtt_us, Relaxed);
        if is_up {
            self.state.lock().0 = LinkState::Up;
        }
        let mut held = self.sessions.lock();
        *held = sessions;
        self.publish(&held);
    }

    /// The epoch of the next session, which the responder chooses.
    pub(in crate::link) fn next_epoch(&self) -> u8 {
        self.sessions.lock().last().map_or(0, |session| (session.epoch + 1) & 3)
    }

    /// Opens with a new session's key from now on. Returns false if the next vnetd has the keys.
    pub(in crate::link) fn accept(&self, session: Session) -> bool {
        let Some(_turn) = self.turn() else { return false };
        let mut sessions = self.sessions.lock();
        sessions.retain(|old| old.epoch != session.epoch);
        sessions.push(session);
        self.publish(&sessions);
        true
    }

    /// Seals with the key of `epoch` from now on. Returns false when that key no longer exists, or the next vnetd has it.
    pub(in crate::link) fn switch(&self, epoch: u8) -> bool {
        let Some(_turn) = self.turn() else { return false };
        let mut sessions = self.sessions.lock();
        self.switch_to(&mut sessions, epoch)
    }

    fn switch_to(&self, sessions: &mut [Session], epoch: u8) -> bool {
        if !sessions.iter().any(|session| session.epoch == epoch) {
            return false;
        }
        for session in sessions.iter_mut() {
            if session.epoch == epoch {
                session.stage = Stage::Current;
            } else if session.stage == Stage::Current {
                session.stage = Stage::Retired(Instant::now());
            }
        }
        self.rekey.store(false, Relaxed);
        self.publish(sessions);
        true
    }

    /// Switches to a key with which the peer already seals. Discards retired keys after [`OVERLAP`], unused keys after
    /// [`PENDING_MAX`], and all keys that are older than `age_max`.
    pub(in crate::link) fn expire(&self, now: Instant, age_max: Duration) {
        let Some(_turn) = self.turn() else { return };
        let mut sessions = self.sessions.lock();
        let used = sessions
            .iter()
            .find(|session| session.stage == Stage::Pending && session.opening.has_opened())
            .map(|session| session.epoch);
        if let Some(epoch) = used {
            self.switch_to(&mut sessions, epoch);
        }
        let before = sessions.len();
        sessions.retain(|session| match session.stage {
            Stage::Pending => now.duration_since(session.made) < PENDING_MAX,
            Stage::Current => now.duration_since(session.made) < age_max,
            Stage::Retired(since) => now.duration_since(since) < OVERLAP,
        });
        if sessions.len() != before {
            self.publish(&sessions);
        }
    }

    /// Discards the sessions that `keep` refuses. Returns true when the sealing session was among them. Needs no turn: should the next
    /// vnetd fail, this one must not go on with what it has refused meanwhile.
    pub(in crate::link) fn retain(&self, mut keep: impl FnMut(&Session) -> bool) -> bool {
        let mut sessions = self.sessions.lock();
        let had = sessions.iter().any(|session| session.stage == Stage::Current);
        sessions.retain(|session| keep(session));
        self.publish(&sessions);
        had && !sessions.iter().any(|session| session.stage == Stage::Current)
    }

    fn publish(&self, sessions: &[Session]) {
        self.replace(Keyring::of(sessions));
    }

    /// Call with the sessions locked: else the keyring of an earlier change may replace that of a later one.
    pub(super) fn replace(&self, keyring: Keyring) {
        self.keyring.store(Arc::new(keyring));
        self.changed.store(true, Relaxed);
    }

    /// True when keys were added or discarded since the last call.
    pub(in crate::link) fn has_changed(&self) -> bool {
        self.changed.swap(false, Relaxed)
    }

    /// Tags of the peer's keepalives.
    pub(in crate::link) fn tags(&self) -> Vec<u32> {
        let sessions = self.sessions.lock();
        let live = sessions.iter().filter(|session| !matches!(session.stage, Stage::Retired(_)));
        live.map(|session| session.tags.1).collect()
    }

    pub(in crate::link) fn set_sources(&self, sources: &Arc<dyn Sources>) {
        *self.sources.lock() = Some(Arc::downgrade(sources));
    }

    /// The table that lists the link's source addresses, if there is one.
    pub(in crate::link) fn sources(&self) -> Option<Arc<dyn Sources>> {
        self.sources.lock().as_ref()?.upgrade()
    }

    /// Begins a handshake, unless one is in progress. It ends when the guard is dropped.
    pub(in crate::link) fn begin_handshake(&self) -> Option<UnderWay<'_>> {
        let free = self.handshaking.compare_exchange(false, true, Acquire, Relaxed).is_ok();
        free.then_some(UnderWay(&self.handshaking))
    }

    /// The session that seals; `next` is the link's next datagram number.
    pub(in crate::link) fn current(&self, next: u64) -> Option<CurrentSession> {
        let sessions = self.sessions.lock();
        let session = sessions.iter().find(|session| session.stage == Stage::Current)?;
        Some(CurrentSession {
            age: session.made.elapsed(),
            epoch: session.epoch,
            role: session.role,
            serial: session.info.serial.clone(),
            certificate_end: session.info.valid.1,
            is_worn: session.sealing.is_worn(next),
        })
    }

    /// Keys of a session between two applications, from the keys of `epoch` or the current ones, and the epoch.
    pub(in crate::link) fn application_keys(
        &self,
        epoch: Option<u8>,
        opens: bool,
        context: &[u8],
    ) -> Option<(u8, ApplicationKeys)> {
        let sessions = self.sessions.lock();
        let session = sessions.iter().find(|session| match epoch {
            Some(epoch) => session.epoch == epoch,
            None => session.stage == Stage::Current,
        })?;
        Some((session.epoch, session.application_keys(opens, context)?))
    }

    /// Requests a rekey soon.
    pub(in crate::link) fn request_rekey(&self) {
        self.rekey.store(true, Relaxed);
    }

    /// True from [`Seal::request_rekey`] until there are new keys.
    pub(in crate::link) fn is_rekey_requested(&self) -> bool {
        self.rekey.load(Relaxed)
    }

    pub(in crate::link) fn state(&self) -> LinkState {
        self.state.lock().0.clone()
    }

    /// Sets the state. Returns `Some` when the state must be logged, with the number of changes since the last line.
    pub(in crate::link) fn set_state(&self, state: LinkState, now_ms: u64) -> Option<u64> {
        let mut held = self.state.lock();
        let news = held.1.news(&state, now_ms);
        held.0 = state;
        news
    }

    /// Round trip between the two hosts in microseconds.
    pub(in crate::link) fn rtt_us(&self) -> Option<u32> {
        Some(self.rtt_us.load(Relaxed)).filter(|rtt| *rtt != 0)
    }

    /// Builds the next keepalive. `asks_rekey`: requests that the peer start a handshake; `hears_directly`: the peer's keepalives
    /// arrive without a relay.
    pub(in crate::link) fn keepalive(&self, asks_rekey: bool, hears_directly: bool) -> Keepalive {
        self.clock.keepalive(asks_rekey, hears_directly)
    }

    /// Processes an opened keepalive of the peer. `is_live` is false when a retired session's key opened it: a rekey that it
    /// requests has already happened.
    #[cold]
    pub(in crate::link) fn hear(&self, body: &[u8], is_live: bool) {
        let Some(keepalive) = Keepalive::parse(body) else { return };
        if is_live && keepalive.asks_rekey {
            self.request_rekey();
        }
        if let Some(rtt_us) = self.clock.round_trip_us(&keepalive) {
            self.rtt_us.store(rtt_us, Relaxed);
        }
    }
}

/// What a sealed link goes on with besides its sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) struct Resumed {
    /// The peer is heard.
    pub(in crate::link) is_up: bool,
    /// A rekey was requested.
    pub(in crate::link) asks_rekey: bool,
    /// Round trip in microseconds; 0: unknown.
    pub(in crate::link) rtt_us: u32,
}

/// See [`Seal::turn`].
pub(in crate::link) struct Turn<'a> {
    _handed: RwLockReadGuard<'a, bool>,
}

/// A handshake in progress; ends when dropped.
pub(in crate::link) struct UnderWay<'a>(&'a AtomicBool);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.store(false, Release);
    }
}

/// The session that seals.
pub(in crate::link) struct CurrentSession {
    pub(in crate::link) age: Duration,
    pub(in crate::link) epoch: u8,
    pub(in crate::link) role: Role,
    /// Serial number of the other host's certificate.
    pub(in crate::link) serial: String,
    /// Last second of the certificate's validity, Unix time.
    pub(in crate::link) certificate_end: i64,
    /// True if the key has sealed so many datagrams that a rekey is due.
    pub(in crate::link) is_worn: bool,
}

/// State of a sealed link's keys, for status output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealView {
    /// The name that the other host's certificate must have.
    pub peer: String,
    /// Seconds since the current keys were agreed on; `None` without keys.
    pub keys_s: Option<u64>,
    /// Last second of the validity of the peer's certificate, Unix time; `None` without keys.
    pub certificate_end: Option<i64>,
    /// Round trip in microseconds, measured by keepalives.
    pub rtt_us: Option<u32>,
}
