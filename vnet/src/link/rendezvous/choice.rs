//! The link's side of a meeting by a third host: datagrams go by that host until the direct way is known to work.
//!
//! While a session lasts, keepalives go both ways: by the port of the host between, and straight to where the other host is said
//! to be, or was heard. The first ones open the translators on both sides (a *simultaneous open*: RFC 8445 does no more than this
//! for two hosts with one address each). A keepalive that opens and did not come by the host between proves that this direction works,
//! which the next keepalives say by a flag; whoever reads it sends straight. Each direction is decided by itself, and frames of a flow
//! may overtake each other once when it changes. When nothing has come straight for [`DIRECT_MS`], the flag is gone, and frames go by
//! the host between again.
//!
//! Where the host between says that the other one is counts for where keepalives are sent, five a second, and frames only while the other
//! host says that it hears those. So the host between, which this one has chosen and authenticated, might have frames sent elsewhere for
//! as long as such a confirmation lasts. Who can only hold datagrams back cannot: a keepalive counts when none that was sent later has come.

use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::link::rendezvous::client::{Registration, Ticket};
use crate::link::sealed::roaming::Place;
use crate::link::{first_number, normalised};

/// How long something that came straight counts: of five keepalives a second, four may be lost.
const DIRECT: Duration = Duration::from_millis(1000);
/// How long datagrams are taken for the other host's by the address at which it was heard. Another may get that address.
const KNOWN: Duration = Duration::from_secs(10);

/// See the module's comment.
#[derive(Debug, Default)]
pub(in crate::link) struct Via {
    /// The link to the host between.
    pub(in crate::link) link: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Where the host between forwards, and what it knows this host by.
    ticket: Option<(SocketAddr, Ticket)>,
    /// Of the last registration, and of the last that was answered.
    number: u64,
    answered: u64,
    /// Where the other host is said to be.
    told: Option<SocketAddr>,
    /// From where it was heard straight, and when.
    heard: Option<(SocketAddr, Instant)>,
    /// When it said last that it hears this host straight.
    arrives: Option<Instant>,
    /// The keepalive that was sent last of those that came: the tag of its session, and the other host's clock.
    latest: Option<(u32, u64)>,
    /// Addresses by which its datagrams are known, as they were settled last.
    known: Vec<SocketAddr>,
}

impl State {
    fn hears(&self) -> Option<SocketAddr> {
        self.heard.filter(|(_, at)| at.elapsed() < DIRECT).map(|(from, _)| from)
    }

    /// Where to try straight.
    fn straight(&self) -> Option<SocketAddr> {
        self.hears().or(self.told)
    }

    fn relay(&self) -> Option<SocketAddr> {
        self.ticket.as_ref().map(|(relay, _)| *relay)
    }
}

impl Via {
    pub(in crate::link) fn new(link: String) -> Via {
        Via { link, state: Mutex::default() }
    }

    /// What this lock protects is whole at any time.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The two have met: `relay` forwards for them.
    pub(in crate::link) fn met(&self, relay: SocketAddr, ticket: Ticket) {
        let mut state = self.state();
        state.ticket = Some((normalised(relay), ticket));
    }

    /// The next registration, and where it goes.
    pub(in crate::link) fn registration(&self) -> Option<(SocketAddr, Vec<u8>)> {
        let mut state = self.state();
        // A clock's time, so that it rises over restarts, too; a ticket is one meeting's.
        state.number = first_number().max(state.number + 1);
        let (relay, ticket) = state.ticket.as_ref()?;
        let registration =
            Registration { id: ticket.id, number: state.number, other: None, is_answer: false };
        Some((*relay, registration.to_bytes(&ticket.key).to_vec()))
    }

    /// Takes the answer to a registration; false for anything else.
    #[cold]
    pub(in crate::link) fn answered(&self, datagram: &[u8]) -> bool {
        let mut state = self.state();
        let Some((_, ticket)) = &state.ticket else { return false };
        let read = Registration::read(datagram, &ticket.key);
        let Some(answer) = read.filter(|answer| answer.is_answer && answer.id == ticket.id) else {
            return false;
        };
        // The way to there and back may take longer than the next question; who overtook it tells more.
        if answer.number > state.answered && answer.number <= state.number {
            state.answered = answer.number;
            state.told = answer.other.or(state.told);
        }
        true
    }

    /// Takes note of a keepalive that was opened with a key in use: from where it came, whether the other host hears this one
    /// straight, and by which session and when it was sent. What another has overtaken tells nothing: somebody may have held it back.
    #[cold]
    pub(in crate::link) fn heard(&self, source: SocketAddr, arrives: bool, (tag, sent_us): (u32, u64)) {
        let mut state = self.state();
        if state.latest.is_some_and(|(session, latest_us)| session == tag && sent_us < latest_us) {
            return;
        }
        state.latest = Some((tag, sent_us));
        let now = Instant::now();
        if state.relay() != Some(source) {
            state.heard = Some((source, now));
        }
        state.arrives = arrives.then_some(now);
    }

    /// Whether the other host is heard straight, and where keepalives go besides where the link's datagrams do.
    pub(in crate::link) fn besides(&self, remote: Option<SocketAddr>) -> (bool, Vec<SocketAddr>) {
        let state = self.state();
        let ways = [state.relay(), state.straight()].into_iter().flatten();
        (state.hears().is_some(), ways.filter(|way| Some(*way) != remote).collect())
    }

    /// Where the other host's datagrams come from.
    pub(in crate::link) fn sources(&self) -> Vec<SocketAddr> {
        self.state().known.clone()
    }

    /// Puts in place where datagrams go now. The way, when it is another one, and whether anything has changed.
    pub(in crate::link) fn settle(&self, place: &Place) -> (Option<SocketAddr>, bool) {
        let mut state = self.state();
        let arrives = state.arrives.is_some_and(|at| at.elapsed() < DIRECT);
        let way = state.straight().filter(|_| arrives).or(state.relay());
        let heard = state.heard.filter(|(_, at)| at.elapsed() < KNOWN).map(|(from, _)| from);
        let known: Vec<_> = [state.relay(), heard].into_iter().flatten().collect();
        let changed = known != state.known;
        state.known = known;
        let moved = way.filter(|way| place.remote() != Some(*way));
        if let Some(way) = moved {
            place.put(way);
        }
        (moved, changed || moved.is_some())
    }

    /// True when datagrams to `remote` go by the host between.
    pub(in crate::link) fn is_between(&self, remote: SocketAddr) -> bool {
        self.state().relay() == Some(remote)
    }
}

#[cfg(test)]
#[path = "choice_tests.rs"]
mod tests;
