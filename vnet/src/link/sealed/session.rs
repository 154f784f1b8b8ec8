//! A sealed link's keys, and what is known of the other end.
//!
//! A [`Session`] is what one TLS handshake gives: a key for each direction under a 2-bit epoch, and the certificate of the
//! other host. [`Seal`] holds a link's sessions, of which one sends and a few receive:
//!
//! ```text
//! responder  accept(e): opens e   ------- ACCEPT e ------->  accept(e), switch(e): opens and seals with e   initiator
//!            switch(e): seals with e too <--- CONFIRM e ---
//!            expire(): OVERLAP later the one before is forgotten, on both sides
//! ```
//!
//! Each side opens with a new key before the other seals with it, and with the old one until all that was under way has
//! come: keys change under traffic, and nothing is lost. What dispatchers use is a [`Keyring`], replaced as a whole.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, Guard};
use aws_lc_rs::hmac;
use rustls::pki_types::CertificateDer;

use crate::link::sealed::aead::{MATERIAL_LEN, OpeningKey, SealingKey};
use crate::link::sealed::identity::{CertificateInfo, Claims};
use crate::link::sealed::roaming::Roster;
use crate::link::{Link, LinkState};

/// How long keys are accepted after others have taken their place.
pub(in crate::link) const OVERLAP: Duration = Duration::from_secs(5);
/// How long the initiator may take to use the keys it agreed to.
const PENDING_MAX: Duration = Duration::from_secs(15);
/// Bytes of a keepalive behind its header.
pub(in crate::link) const KEEPALIVE_LEN: usize = 24;
/// Flag in a keepalive: send me new keys.
const ASKS: u8 = 0x01;
/// Flag in a keepalive: yours come straight, and not by a host between (via.rs).
const HEARS: u8 = 0x02;

/// What the exporter gives: the initiator's key and salt, then the responder's.
pub(in crate::link) type Exported = [u8; 2 * MATERIAL_LEN];

/// Which end of the handshake this host was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) enum Role {
    Initiator,
    Responder,
}

/// The keys of one handshake.
pub(in crate::link) struct Session {
    pub(in crate::link) epoch: u8,
    sealing: Arc<SealingKey>,
    opening: Arc<OpeningKey>,
    /// The other host's certificate, and those up to its authority.
    pub(in crate::link) chain: Vec<CertificateDer<'static>>,
    pub(in crate::link) info: CertificateInfo,
    claims: Option<Arc<Claims>>,
    role: Role,
    /// Tags of what this host sends, and of what comes.
    tags: (u32, u32),
    made: Instant,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Opens, and waits for the other side to use it.
    Pending,
    /// Seals and opens.
    Current,
    /// Opens what is still under way.
    Retired(Instant),
}

impl Session {
    /// The keys of `epoch` from what was exported, for datagrams with numbers from `first` on.
    pub(in crate::link) fn new(
        exported: &Exported,
        role: Role,
        epoch: u8,
        first: u64,
        chain: Vec<CertificateDer<'static>>,
        info: CertificateInfo,
    ) -> Session {
        let (initiator, responder) = exported.split_at(MATERIAL_LEN);
        let (ours, theirs) = match role {
            Role::Initiator => (initiator, responder),
            Role::Responder => (responder, initiator),
        };
        let half =
            |bytes: &[u8]| -> [u8; MATERIAL_LEN] { bytes.try_into().expect("half of what was exported") };
        Session {
            epoch,
            sealing: Arc::new(SealingKey::new(&half(ours), epoch, first)),
            opening: Arc::new(OpeningKey::new(&half(theirs))),
            claims: (info.claims != Claims::default()).then(|| Arc::new(info.claims.clone())),
            chain,
            info,
            role,
            tags: (tag(&half(ours)), tag(&half(theirs))),
            made: Instant::now(),
            stage: Stage::Pending,
        }
    }
}

/// What names a session and a direction in a keepalive's header, for a receiver who does not know its source. It tells
/// nothing of the key: HMAC (RFC 2104) is a pseudorandom function.
fn tag(material: &[u8; MATERIAL_LEN]) -> u32 {
    let key = hmac::Key::new(hmac::HMAC_SHA256, material);
    let tag = hmac::sign(&key, b"vnet-seal tag");
    u32::from_be_bytes(tag.as_ref()[..4].try_into().expect("SHA-256 gives 32 bytes"))
}

/// What dispatchers seal and open with. Immutable; the next one replaces it as a whole.
#[derive(Debug, Default)]
pub(in crate::link) struct Keyring {
    sealing: Option<Arc<SealingKey>>,
    opening: [Option<Arc<OpeningKey>>; 4],
    /// Epochs of those that others have taken the place of, a bit each.
    retired: u8,
    /// Tag of what is sealed.
    tag: u32,
    claims: Option<Arc<Claims>>,
}

impl Keyring {
    /// The key to seal with, if there is one that may seal datagrams from number `next` on.
    #[inline]
    pub(in crate::link) fn sealing(&self, next: u64) -> Option<&SealingKey> {
        self.sealing.as_deref().filter(|key| !key.is_spent(next))
    }

    /// The key that opens datagrams of `epoch`.
    #[inline]
    pub(in crate::link) fn opening(&self, epoch: u8) -> Option<&OpeningKey> {
        self.opening[usize::from(epoch & 3)].as_deref()
    }

    /// The tag of keepalives that are sealed.
    pub(in crate::link) fn tag(&self) -> u32 {
        self.tag
    }

    /// True when datagram `number` of `epoch`, which was opened, is the newest, so that the peer is where it came from.
    pub(in crate::link) fn is_newest(&self, epoch: u8, number: u64) -> bool {
        self.is_live(epoch) && self.opening(epoch).is_some_and(|key| key.is_newest(number))
    }

    /// True for the epoch of a key that none has taken the place of.
    pub(in crate::link) fn is_live(&self, epoch: u8) -> bool {
        self.retired & (1 << (epoch & 3)) == 0
    }

    /// For what the other host may speak; `None` for everything.
    #[inline]
    pub(in crate::link) fn claims(&self) -> Option<&Arc<Claims>> {
        self.claims.as_ref()
    }
}

/// A sealed link's part of a [`Link`].
#[derive(Debug)]
pub(in crate::link) struct Seal {
    /// The name that the other host's certificate has to have.
    pub(in crate::link) peer: String,
    keyring: ArcSwap<Keyring>,
    /// Oldest first; at most one of each epoch.
    sessions: Mutex<Vec<Session>>,
    /// The other host's clock as it came last, and when that was.
    clock: Mutex<Option<(u64, Instant)>>,
    /// Round trip in microseconds; 0: not known.
    rtt_us: AtomicU32,
    /// New keys are wanted before the present ones are old: the other host asked for them, or this host's identity is new.
    renew: AtomicBool,
    /// Keys have changed since [`Seal::has_changed`] was asked.
    changed: AtomicBool,
    /// By which datagrams from elsewhere are found.
    roster: Mutex<Weak<Roster>>,
    /// A handshake is under way: one at a time, or two might give one epoch to different keys.
    busy: AtomicBool,
    state: Mutex<LinkState>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session(epoch {}, {:?})", self.epoch, self.stage)
    }
}

/// What a lock protects here is whole at any time: a panic elsewhere changes nothing about it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Seal {
    pub(in crate::link) fn new(peer: String) -> Seal {
        let state = LinkState::Down(format!("no keys agreed with {peer} yet"));
        Seal {
            peer,
            keyring: ArcSwap::default(),
            sessions: Mutex::default(),
            clock: Mutex::default(),
            rtt_us: AtomicU32::new(0),
            renew: AtomicBool::new(false),
            changed: AtomicBool::new(false),
            roster: Mutex::default(),
            busy: AtomicBool::new(false),
            state: Mutex::new(state),
        }
    }

    /// The keys of the moment: load them once a batch.
    #[inline]
    pub(in crate::link) fn keyring(&self) -> Guard<Arc<Keyring>> {
        self.keyring.load()
    }

    /// The epoch for the next session, by the responder's choice.
    pub(in crate::link) fn next_epoch(&self) -> u8 {
        lock(&self.sessions).last().map_or(0, |session| (session.epoch + 1) & 3)
    }

    /// Opens with a new session's key from now on.
    pub(in crate::link) fn accept(&self, session: Session) {
        let mut sessions = lock(&self.sessions);
        sessions.retain(|old| old.epoch != session.epoch);
        sessions.push(session);
        self.publish(&sessions);
    }

    /// Seals with the key of `epoch` from now on. False when there is none any more.
    pub(in crate::link) fn switch(&self, epoch: u8) -> bool {
        let mut sessions = lock(&self.sessions);
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
        self.renew.store(false, Relaxed);
        self.publish(sessions);
        true
    }

    /// Takes up a key that the other side seals with already, and forgets what is over: retired keys after [`OVERLAP`], those
    /// that nobody used, and those older than `age_max`.
    pub(in crate::link) fn expire(&self, now: Instant, age_max: Duration) {
        let mut sessions = lock(&self.sessions);
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

    /// Forgets the sessions that `keep` says no to. True when that took the one that seals.
    pub(in crate::link) fn retain(&self, mut keep: impl FnMut(&Session) -> bool) -> bool {
        let mut sessions = lock(&self.sessions);
        let had = sessions.iter().any(|session| session.stage == Stage::Current);
        sessions.retain(|session| keep(session));
        self.publish(&sessions);
        had && !sessions.iter().any(|session| session.stage == Stage::Current)
    }

    fn publish(&self, sessions: &[Session]) {
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
            // Pending ones only: whoever they let in is held to what its certificate says.
            keyring.claims = sessions.last().and_then(|session| session.claims.clone());
        }
        self.keyring.store(Arc::new(keyring));
        self.changed.store(true, Relaxed);
    }

    /// True when keys have come or gone since it was asked last.
    pub(in crate::link) fn has_changed(&self) -> bool {
        self.changed.swap(false, Relaxed)
    }

    /// The tags by which the peer's keepalives may be known.
    pub(in crate::link) fn tags(&self) -> Vec<u32> {
        let sessions = lock(&self.sessions);
        let live = sessions.iter().filter(|session| !matches!(session.stage, Stage::Retired(_)));
        live.map(|session| session.tags.1).collect()
    }

    pub(in crate::link) fn set_roster(&self, roster: &Arc<Roster>) {
        *lock(&self.roster) = Arc::downgrade(roster);
    }

    /// The roster that the link is in, while there is one.
    pub(in crate::link) fn roster(&self) -> Option<Arc<Roster>> {
        lock(&self.roster).upgrade()
    }

    /// Begins a handshake, unless one is under way; it ends when what is returned is dropped.
    pub(in crate::link) fn begin(&self) -> Option<Busy<'_>> {
        let free = self.busy.compare_exchange(false, true, Acquire, Relaxed).is_ok();
        free.then_some(Busy(&self.busy))
    }

    /// The session that seals: its age, its epoch, the serial number of the other host's certificate; and whether the key
    /// has sealed so much that another one is due.
    pub(in crate::link) fn current(&self, next: u64) -> Option<Current> {
        let sessions = lock(&self.sessions);
        let session = sessions.iter().find(|session| session.stage == Stage::Current)?;
        Some(Current {
            age: session.made.elapsed(),
            epoch: session.epoch,
            role: session.role,
            serial: session.info.serial.clone(),
            is_worn: session.sealing.is_worn(next),
        })
    }

    /// Has new keys agreed on soon.
    pub(in crate::link) fn renew(&self) {
        self.renew.store(true, Relaxed);
    }

    /// True when that is still to be done.
    pub(in crate::link) fn must_renew(&self) -> bool {
        self.renew.load(Relaxed)
    }

    pub(in crate::link) fn state(&self) -> LinkState {
        lock(&self.state).clone()
    }

    /// Sets the state; true when it differs from the one before.
    pub(in crate::link) fn set_state(&self, state: LinkState) -> bool {
        let mut held = lock(&self.state);
        let differs = *held != state;
        *held = state;
        differs
    }

    /// Round trip between the two hosts in microseconds.
    pub(in crate::link) fn rtt_us(&self) -> Option<u32> {
        Some(self.rtt_us.load(Relaxed)).filter(|rtt| *rtt != 0)
    }

    /// What a keepalive says: this host's clock, the other's clock as it came last, how long ago, whether it asks for new
    /// keys, and whether it hears the other host straight.
    pub(in crate::link) fn keepalive(&self, asks: bool, hears: bool) -> [u8; KEEPALIVE_LEN] {
        let mut body = [0; KEEPALIVE_LEN];
        body[..8].copy_from_slice(&clock_us().to_be_bytes());
        if let Some((clock, at)) = *lock(&self.clock) {
            let held = u32::try_from(at.elapsed().as_micros()).unwrap_or(u32::MAX);
            body[8..16].copy_from_slice(&clock.to_be_bytes());
            body[16..20].copy_from_slice(&held.to_be_bytes());
        }
        body[20] = if asks { ASKS } else { 0 } | if hears { HEARS } else { 0 };
        body
    }

    /// Takes what a keepalive of the other side says; it has been opened, with a key in use or (`is_live` false) with one that
    /// another has taken the place of. The latter was sealed before the new keys were known, and asks for these.
    #[cold]
    pub(in crate::link) fn hear(&self, body: &[u8], is_live: bool) {
        let Some(body) = body.first_chunk::<KEEPALIVE_LEN>() else { return };
        let clock = |at: usize| u64::from_be_bytes(body[at..at + 8].try_into().expect("8 bytes"));
        let held = u64::from(u32::from_be_bytes(body[16..20].try_into().expect("4 bytes")));
        *lock(&self.clock) = Some((clock(0), Instant::now()));
        if is_live && body[20] & ASKS != 0 {
            self.renew();
        }
        let echo = clock(8);
        // Of a clock that is not ours, or after a restart, nothing can be said.
        if echo != 0 && held < u64::from(u32::MAX) {
            let rtt = clock_us().checked_sub(echo).and_then(|passed| passed.checked_sub(held));
            if let Some(rtt) = rtt.and_then(|rtt| u32::try_from(rtt).ok()) {
                self.rtt_us.store(rtt.max(1), Relaxed);
            }
        }
    }
}

/// The other host's clock when it sent a keepalive.
pub(in crate::link) fn sent_us(body: &[u8]) -> u64 {
    body.first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

/// Whether a keepalive says that this host is heard straight.
pub(in crate::link) fn hears(body: &[u8]) -> bool {
    body.get(20).is_some_and(|flags| flags & HEARS != 0)
}

/// This host's clock for keepalives and probes, in microseconds; never 0, and never set back.
pub(in crate::link) fn clock_us() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_micros() as u64 + 1
}

/// A handshake that is under way.
pub(in crate::link) struct Busy<'a>(&'a AtomicBool);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Release);
    }
}

/// See [`Seal::current`].
pub(in crate::link) struct Current {
    pub(in crate::link) age: Duration,
    pub(in crate::link) epoch: u8,
    pub(in crate::link) role: Role,
    pub(in crate::link) serial: String,
    pub(in crate::link) is_worn: bool,
}

/// What a link's seal is at the moment, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealView {
    /// The name that the other host's certificate has to have.
    pub peer: String,
    /// Seconds since the present keys were agreed on; `None` without keys.
    pub keys_s: Option<u64>,
    /// Round trip in microseconds, measured by keepalives.
    pub rtt_us: Option<u32>,
}

impl Link {
    /// What its seal is at the moment; `None` for a link in clear text.
    pub fn seal_view(&self) -> Option<SealView> {
        let seal = self.seal()?;
        let keys_s = seal.current(self.next_number()).map(|current| current.age.as_secs());
        Some(SealView { peer: seal.peer.clone(), keys_s, rtt_us: seal.rtt_us() })
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
