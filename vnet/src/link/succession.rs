//! Sealed links go on in the next vnetd with their keys (`vnetd --take-over`): no handshake, no lost frame.
//!
//! A nonce is a key's salt and a datagram number, so a number that both vnetds used with a key would break the encryption. They never
//! do, because of the order of steps:
//!
//! ```text
//!   running                                                next
//!   1 dispatchers stand still
//!   2 begin_hand_over: waits for all other senders         (it has no link yet)
//!   3 hand_over: next number, replay windows, keys  -----> SealedState::parse
//!     sends nothing from here on                    <----- 4 says that it begins
//!                                                          5 makes its links; resume: numbers from the handed one + MARGIN
//!                                                          6 publishes its first setup: sends and receives
//!   7 ends
//! ```
//!
//! - Until step 6 no thread of the next vnetd has a reference to a link, except the one that makes it. So it has neither sealed nor
//!   opened anything before it said that it begins.
//! - If it fails, the running vnetd first makes sure that its process is dead, and reads to the end what it has said. If it has not said
//!   that it begins, it used no key: the running vnetd goes on with its numbers and replay windows ([`Link::reclaim`]). If it has, or
//!   if that is not certain, the running vnetd discards the keys and agrees on new ones.
//! - [`MARGIN`] is a second line of defence: a datagram of the running vnetd that step 2 had missed would still have another number.
//!
//! A handshake that is under way at step 2 fails, or its session is handed over: `Seal::accept` installs it entirely or not at all. A
//! session that the other host is yet to confirm goes on like any other.
//!
//! The encoded state, all numbers little-endian:
//!
//! ```text
//!   version 1 | length of the name 2, name | next number 8 | ms since the peer was heard, or all ones 8 | round trip us 4 | flags 1
//!   the peer's address (succession_bytes.rs) | 0 or 1, for a link with `via`: its choice of the path (rendezvous/hole_punching.rs) | number of sessions 1
//!   each session, oldest first:
//!     epoch 1 | stage 1: 0 pending, 1 current, 2 retired | role 1: 0 initiator, 1 responder | first number 8 | age ms 8
//!     ms since it retired, or all ones 8 | exported keys 72 | 0 or 1: application secret 1, secret 32 | replay window 513 * 8
//!     certificates 1 | for each, length 4 and DER
//! ```
//!
//! It holds secrets: it is kept in memory that is zeroed when it is dropped, and is never logged.

use std::net::SocketAddr;

use zeroize::Zeroizing;

use super::first_number;
use super::link::Link;
use super::rendezvous::hole_punching::PathState;
use super::sealed::aead::OpeningKey;
use super::sealed::identity::CertificateInfo;
use super::sealed::replay::{ReplayWindow, SLOTS};
use super::sealed::session::{Exported, Resumed, Role, Session, Stage};
use super::state::LinkState;
use super::succession_bytes::{
    NEVER, Reader, certificates_len, write_address, write_age, write_certificates,
};
pub use super::succession_bytes::{SEALED_STATE_MAX, SealedBytes, SuccessionError};

/// Numbers that the next vnetd leaves out: more than a running one could send besides frames until it ends.
const MARGIN: u64 = 1 << 16;
const VERSION: u8 = 1;
/// Maximum number of sessions, one per epoch.
const SESSIONS_MAX: u8 = 4;
const UP: u8 = 0x01;
const ASKS_REKEY: u8 = 0x02;
const SECRET_LEN: usize = 32;
/// Bytes of a state before its sessions, besides its name.
const HEAD_LEN: usize = 256;

/// A sealed link of the running vnetd, with its keys.
pub struct SealedState {
    name: String,
    number: u64,
    /// Time since the peer was heard.
    silent_ms: Option<u64>,
    remote: Option<SocketAddr>,
    /// The choice between the relayed and the direct path, of a link with `via`.
    path: Option<PathState>,
    resumed: Resumed,
    sessions: Vec<Session>,
}

impl std::fmt::Debug for SealedState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Never the keys.
        write!(f, "SealedState({}, {:?})", self.name, self.sessions)
    }
}

impl Link {
    /// Step 2: no thread except dispatchers, which stand still, seals or opens any more, nor changes keys. Has no effect on a link that
    /// is not sealed.
    pub fn begin_hand_over(&self) {
        if let Some(seal) = self.seal() {
            seal.begin_hand_over();
        }
    }

    /// Step 3, after [`Link::begin_hand_over`]: the encoded state. `now_ms` is on the dispatchers' clock. `None` for a link that is not sealed.
    pub fn hand_over(&self, now_ms: u64) -> Option<SealedBytes> {
        let seal = self.seal()?;
        let sessions = seal.sessions.lock();
        let certificates: usize = sessions.iter().map(|session| certificates_len(&session.chain)).sum();
        let fixed = 128 + SLOTS as usize * 8 + size_of::<Exported>() + SECRET_LEN;
        // Written without growing: a vector that grows leaves its former bytes in freed memory.
        let len = HEAD_LEN + self.name().len() + sessions.len() * fixed + certificates;
        let mut out = SealedBytes::new(Vec::with_capacity(len));
        out.push(VERSION);
        out.extend_from_slice(&(self.name().len() as u16).to_le_bytes());
        out.extend_from_slice(self.name().as_bytes());
        out.extend_from_slice(&self.next_number().to_le_bytes());
        let silent_ms = self.heard_ms().map_or(NEVER, |heard| now_ms.saturating_sub(heard));
        out.extend_from_slice(&silent_ms.to_le_bytes());
        out.extend_from_slice(&seal.rtt_us().unwrap_or(0).to_le_bytes());
        let is_up = if seal.state() == LinkState::Up { UP } else { 0 };
        out.push(is_up | if seal.is_rekey_requested() { ASKS_REKEY } else { 0 });
        write_address(self.remote(), &mut out);
        out.push(u8::from(self.via().is_some()));
        self.via().iter().for_each(|via| via.hand_over(&mut out));
        out.push(sessions.len() as u8);
        sessions.iter().for_each(|session| write_session(session, &mut out));
        debug_assert!(out.len() <= len);
        Some(out)
    }

    /// Step 5: goes on with a link of the vnetd before. Nothing may use this link yet.
    pub fn resume(&self, state: SealedState, now_ms: u64) {
        let (Some(seal), Some(native)) = (self.seal(), self.native()) else { return };
        self.number_from(state.number + MARGIN);
        if let Some(silent_ms) = state.silent_ms {
            self.heard(now_ms.saturating_sub(silent_ms));
        }
        if let Some(remote) = state.remote.filter(|remote| self.remote() != Some(*remote)) {
            native.place.move_to(remote);
        }
        if let (Some(via), Some(path)) = (&native.via, state.path) {
            via.resume(path);
        }
        seal.resume(state.sessions, state.resumed);
    }

    /// The next vnetd has failed, and its process is dead: uses the keys again, while dispatchers still stand still. `used`: it may have
    /// used them, so they are discarded.
    pub fn reclaim(&self, used: bool) {
        let Some(seal) = self.seal() else { return };
        if used {
            // Above the numbers of the other vnetd, so that the peer takes none for an old one.
            self.skip_numbers_to(first_number());
            self.skip_numbers_to(self.next_number().saturating_add(2 * MARGIN));
        }
        seal.end_hand_over(used);
    }
}

fn write_session(session: &Session, out: &mut Vec<u8>) {
    let (stage, retired) = match session.stage {
        Stage::Pending => (0, None),
        Stage::Current => (1, None),
        Stage::Retired(since) => (2, Some(since)),
    };
    out.extend_from_slice(&[session.epoch, stage, u8::from(session.role == Role::Responder)]);
    out.extend_from_slice(&session.sealing.first().to_le_bytes());
    write_age(Some(session.made), out);
    write_age(retired, out);
    out.extend_from_slice(&*session.exported);
    out.push(u8::from(session.application_secret.is_some()));
    session.application_secret.iter().for_each(|secret| out.extend_from_slice(&**secret));
    session.opening.window().slots().for_each(|slot| out.extend_from_slice(&slot.to_le_bytes()));
    write_certificates(&session.chain, out);
}

impl SealedState {
    /// Name of the link.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Decodes the state.
    ///
    /// # Errors
    /// It is not one, or it contradicts itself.
    pub fn parse(bytes: &[u8]) -> Result<SealedState, SuccessionError> {
        let mut from = Reader::new(bytes)?;
        if from.u8()? != VERSION {
            return Err(SuccessionError("another version"));
        }
        let name = from.name(usize::from(u16::MAX))?;
        let number = from.counted()?;
        let silent_ms = Some(from.u64()?).filter(|ms| *ms != NEVER);
        let (rtt_us, flags) = (from.u32()?, from.u8()?);
        if flags & !(UP | ASKS_REKEY) != 0 {
            return Err(SuccessionError("an unknown flag"));
        }
        let resumed = Resumed { is_up: flags & UP != 0, asks_rekey: flags & ASKS_REKEY != 0, rtt_us };
        let remote = from.address()?;
        let path = if from.has()? { Some(PathState::read(&mut from)?) } else { None };
        let sessions = read_sessions(&mut from)?;
        let firsts = sessions.iter().map(|session| session.sealing.first());
        if firsts.max().is_some_and(|first| first > number) {
            return Err(SuccessionError("a datagram number"));
        }
        from.end()?;
        Ok(SealedState { name: name.into(), number, silent_ms, remote, path, resumed, sessions })
    }
}

fn read_sessions(from: &mut Reader<'_>) -> Result<Vec<Session>, SuccessionError> {
    let count = from.u8()?;
    if count > SESSIONS_MAX {
        return Err(SuccessionError("too many sessions"));
    }
    let sessions = (0..count).map(|_| read_session(from)).collect::<Result<Vec<_>, _>>()?;
    let mut epochs = [false; 4];
    let is_new = |session: &Session| !std::mem::replace(&mut epochs[usize::from(session.epoch)], true);
    let current = sessions.iter().filter(|session| session.stage == Stage::Current).count();
    if !sessions.iter().all(is_new) || current > 1 {
        return Err(SuccessionError("sessions that contradict each other"));
    }
    Ok(sessions)
}

fn read_session(from: &mut Reader<'_>) -> Result<Session, SuccessionError> {
    let epoch = Some(from.u8()?).filter(|epoch| *epoch < 4).ok_or(SuccessionError("an epoch"))?;
    let stage = from.u8()?;
    let role = match from.u8()? {
        0 => Role::Initiator,
        1 => Role::Responder,
        _ => return Err(SuccessionError("a role")),
    };
    let first = from.u64()?;
    let (made, retired) = (from.instant()?, from.age()?);
    let stage = match (stage, retired) {
        (0, None) => Stage::Pending,
        (1, None) => Stage::Current,
        (2, Some(retired)) => Stage::Retired(retired),
        _ => return Err(SuccessionError("a stage")),
    };
    let exported: Zeroizing<Exported> = Zeroizing::new(from.array()?);
    let secret = if from.has()? { Some(Zeroizing::new(from.array::<SECRET_LEN>()?)) } else { None };
    let slots = (0..SLOTS).map(|_| from.u64()).collect::<Result<Vec<_>, _>>()?;
    let window = ReplayWindow::resumed(&slots).ok_or(SuccessionError("a replay window"))?;
    let chain = from.certificates()?;
    // Read as in a handshake. The keeper verifies the certificates at once.
    let leaf = chain.first().ok_or(SuccessionError("no certificate"))?;
    let info = CertificateInfo::read(leaf).map_err(|_| SuccessionError("a certificate"))?;
    let mut session = Session::new(&exported, role, epoch, first, (chain, info));
    session.opening = OpeningKey::resumed(&session.opening_material(), window).into();
    (session.application_secret, session.made, session.stage) = (secret, made, stage);
    Ok(session)
}

#[cfg(test)]
#[path = "succession_tests.rs"]
mod tests;
