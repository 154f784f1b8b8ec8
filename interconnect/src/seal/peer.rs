//! What a node knows about a peer: how it is reached, its sessions, and one that is being made.

use super::session::Session;
use crate::meeting::Nonce;
use crate::proto::Span;

/// Time until OPEN is repeated: the first time, and at most.
const OPEN_FIRST_NS: u64 = 5_000_000;
const OPEN_MAX_NS: u64 = 500_000_000;
/// Number of OPENs after which the user is told that the peer is silent: about two seconds.
const OPENS_SILENT: u32 = 10;
/// The same until the daemon is asked again: loss alone rarely takes so many.
const OPENS_DOUBTFUL: u32 = 4;
/// How long an answer to OPEN is awaited to be used, or to get its keys.
const ANSWER_NS: u64 = 100_000_000;
/// Maximum number of sessions of a peer: the current one, earlier ones whose packets may be on their way, one that is not confirmed.
const SESSIONS_MAX: usize = 4;
/// Maximum size in bytes of a packet that waits for the daemon's answer. Before there is a channel it is one packet.
const HELD_BYTES_MAX: usize = 2048;

/// How a peer is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Known {
    /// The daemon has not answered yet.
    #[default]
    Unknown,
    Clear,
    Sealed,
    /// By a sealed link, but there are no keys.
    Refused,
}

/// A peer.
#[derive(Default)]
pub(super) struct Peer {
    pub(super) known: Known,
    /// Packets that wait for the daemon's answer.
    pub(super) held: Vec<Vec<u8>>,
    /// The daemon has to answer; it was asked at all, and when.
    pub(super) is_asked: bool,
    pub(super) was_asked: bool,
    pub(super) asked_at: u64,
    pub(super) opening: Option<Opening>,
    pub(super) answering: Option<Answering>,
    /// Newest last.
    sessions: Vec<Session>,
    pub(super) used_at: u64,
    /// When it may be told again that it has to seal.
    pub(super) tell_at: u64,
}

/// A session that this side opens.
pub(super) struct Opening {
    pub(super) id: u32,
    pub(super) nonce: Nonce,
    /// Key id of the peer, from its AGREE.
    pub(super) agreed: Option<u32>,
    sent_at: Option<u64>,
    sent: u32,
}

/// A session that the peer has opened.
pub(super) struct Answering {
    pub(super) id: u32,
    pub(super) nonce: Nonce,
    pub(super) peer_id: u32,
    pub(super) peer_nonce: Nonce,
    /// Epoch of the keys, once they are there.
    pub(super) epoch: Option<u8>,
    asked_at: u64,
}

impl Opening {
    pub(super) fn new(id: u32, nonce: Nonce) -> Self {
        Self { id, nonce, agreed: None, sent_at: None, sent: 0 }
    }

    pub(super) fn is_due(&self, now: u64) -> bool {
        let pause = match self.agreed {
            // The daemon is to give keys.
            Some(_) => ANSWER_NS,
            None => (OPEN_FIRST_NS << self.sent.saturating_sub(1).min(7)).min(OPEN_MAX_NS),
        };
        self.sent_at.is_none_or(|at| now.saturating_sub(at) >= pause)
    }

    /// OPEN is sent now. An answer that gave no keys is forgotten.
    pub(super) fn again(&mut self, now: u64) {
        (self.sent_at, self.agreed) = (Some(now), None);
        self.sent += 1;
    }

    /// Whether it was repeated so often that the daemon is asked again how the peer is reached.
    pub(super) fn is_doubtful(&self) -> bool {
        self.sent >= OPENS_DOUBTFUL
    }

    pub(super) fn is_silent(&self) -> bool {
        self.sent >= OPENS_SILENT
    }
}

impl Answering {
    /// Whether the daemon is asked once more.
    pub(super) fn is_due(&self, now: u64) -> bool {
        now.saturating_sub(self.asked_at) >= ANSWER_NS
    }
}

impl Peer {
    pub(super) fn new(known: Known) -> Self {
        Self { known, ..Self::default() }
    }

    /// Keeps a packet until the daemon has answered, if fewer than `most` wait.
    pub(super) fn hold(&mut self, packet: &[u8], payload: Span, most: usize) {
        if self.held.len() < most && packet.len() + payload.len() <= HELD_BYTES_MAX {
            let mut bytes = packet.to_vec();
            payload.read_to(&mut bytes);
            self.held.push(bytes);
        }
    }

    /// The connection to the daemon is new.
    pub(super) fn ask_again(&mut self) {
        (self.is_asked, self.was_asked) = (false, false);
        (self.opening, self.answering) = (None, None);
    }

    /// Whether this side has sent OPEN a moment ago.
    pub(super) fn is_opening(&self, now: u64) -> bool {
        let sent = self.opening.as_ref().and_then(|opening| opening.sent_at);
        sent.is_some_and(|at| now.saturating_sub(at) < ANSWER_NS)
    }

    /// Whether the peer has sent OPEN a moment ago, so that this side waits for its packets.
    pub(super) fn is_answering(&self, now: u64) -> bool {
        self.answering.as_ref().is_some_and(|answer| {
            now.saturating_sub(answer.asked_at) < ANSWER_NS && !self.is_confirmed(answer.id)
        })
    }

    /// The daemon is a new one, and has the kernel forward packets only of sessions that it knows: they all have to be renewed.
    pub(super) fn forget_sessions(&mut self) {
        self.sessions.iter_mut().for_each(|session| session.is_forgotten = true);
    }

    /// Whether the session that seals was made before this connection to the daemon.
    pub(super) fn has_forgotten(&self) -> bool {
        self.newest().is_some_and(|place| self.sessions[place].is_forgotten)
    }

    fn is_confirmed(&self, id: u32) -> bool {
        self.sessions.iter().any(|session| session.id == id && session.is_confirmed)
    }

    /// Answers the peer's OPEN.
    pub(super) fn answer(
        &mut self,
        now: u64,
        (id, nonce): (u32, Nonce),
        (peer_id, peer_nonce): (u32, Nonce),
    ) {
        self.answering = Some(Answering { id, nonce, peer_id, peer_nonce, epoch: None, asked_at: now });
    }

    fn newest(&self) -> Option<usize> {
        self.sessions.iter().rposition(|session| session.is_confirmed)
    }

    /// Whether a session is to be opened.
    pub(super) fn needs_session(&self, now: u64) -> bool {
        self.newest().is_none_or(|place| self.sessions[place].is_worn(now))
    }

    /// The session that seals.
    #[inline]
    pub(super) fn sealing(&mut self, now: u64) -> Option<&mut Session> {
        self.sessions.iter_mut().rfind(|session| session.is_confirmed).filter(|session| !session.is_over(now))
    }

    /// The session with this key id.
    #[inline]
    pub(super) fn session(&mut self, id: u32) -> Option<&mut Session> {
        self.sessions.iter_mut().rfind(|session| session.id == id)
    }

    /// Whether the peer may have lost the keys of the session with this key id of its own: the newest one, or all.
    pub(super) fn has_lost(&self, id: u32) -> bool {
        self.newest().is_none_or(|place| self.sessions[place].peer_id() == id)
    }

    /// Adds a session. One that was never confirmed makes room, then the oldest.
    pub(super) fn add(&mut self, session: Session) {
        self.sessions.retain(|old| old.is_confirmed);
        if self.sessions.len() >= SESSIONS_MAX {
            self.sessions.remove(0);
        }
        self.sessions.push(session);
    }

    #[cfg(test)]
    pub(super) fn sessions(&mut self) -> &mut Vec<Session> {
        &mut self.sessions
    }
}
