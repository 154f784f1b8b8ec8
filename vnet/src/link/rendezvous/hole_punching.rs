//! Which path a link's datagrams take after a rendezvous: relayed until the direct one is known to work.
//!
//! While a session lasts, keepalives go both ways: through the relay's port, and directly to where the other host is said to be,
//! or was heard. The direct ones punch holes into the NATs on both sides (a *simultaneous open*: RFC 8445 does no more for two
//! hosts with one address each). A keepalive that opens and did not come from the relay proves that this direction works; the next
//! keepalives say so by a flag, and whoever reads it sends directly. Each direction is decided by itself, and frames of a flow may
//! overtake each other once when it changes. When nothing has come directly for [`DIRECT`], the flag is gone, and frames are
//! relayed again.
//!
//! The address that the relay reports for the other host is used for keepalives, five a second, and for frames only while the other
//! host confirms that it hears those. So a relay, which this host has chosen and authenticated, could have frames sent elsewhere for
//! as long as such a confirmation lasts. An attacker that can only delay datagrams cannot: a keepalive counts only if no later one
//! has come.

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::client::{Registration, Ticket, attend};
use crate::link::sealed::identity::Identity;
use crate::link::sealed::identity::tls::HandshakeError;
use crate::link::{first_number, normalised};

/// How long a directly received keepalive counts: of five a second, four may be lost.
const DIRECT: Duration = Duration::from_millis(1000);
/// How long the address at which the other host was heard identifies its datagrams. The NAT may give it to another host.
const KNOWN: Duration = Duration::from_secs(10);

/// The choice between the relayed and the direct path of one link.
#[derive(Debug)]
pub(in crate::link) struct PathChoice {
    /// The link to the relay.
    pub(in crate::link) link: String,
    state: Mutex<PathState>,
}

#[derive(Debug, Default)]
struct PathState {
    /// The relay's address for this pair of hosts, and this host's registration there.
    ticket: Option<(SocketAddr, Ticket)>,
    /// Number of the last registration, and of the last that was answered.
    number: u64,
    answered: u64,
    /// The other host's address, as the relay reports it.
    reported: Option<SocketAddr>,
    /// Where the other host was last heard directly, and when.
    heard: Option<(SocketAddr, Instant)>,
    /// When the other host last confirmed that it hears this one directly.
    confirmed: Option<Instant>,
    /// The latest keepalive: the tag of its session, and the other host's clock.
    latest: Option<(u32, u64)>,
    /// Source addresses of the other host's datagrams, as settled last.
    sources: Vec<SocketAddr>,
}

impl PathState {
    fn heard_directly(&self) -> Option<SocketAddr> {
        self.heard.filter(|(_, at)| at.elapsed() < DIRECT).map(|(from, _)| from)
    }

    /// The address to try directly.
    fn direct(&self) -> Option<SocketAddr> {
        self.heard_directly().or(self.reported)
    }

    fn relay(&self) -> Option<SocketAddr> {
        self.ticket.as_ref().map(|(relay, _)| *relay)
    }
}

impl PathChoice {
    /// For a link whose peer is met by the relay that `link` leads to.
    pub(in crate::link) fn new(link: String) -> PathChoice {
        PathChoice { link, state: Mutex::default() }
    }

    /// Asks the relay at the other end of `stream`, whose certificate is for `relay`, for a rendezvous with `wanted`. Returns a
    /// connection to that host, which nobody has authenticated yet.
    pub(in crate::link) fn meet(
        &self,
        stream: TcpStream,
        identity: &Identity,
        relay: &str,
        wanted: &str,
    ) -> Result<TcpStream, HandshakeError> {
        let address = stream.peer_addr()?;
        let (stream, ticket) = attend(stream, identity, relay, wanted)?;
        self.met(SocketAddr::new(address.ip(), ticket.port), ticket);
        Ok(stream)
    }

    /// Datagrams go to `relay` from now on, which forwards them.
    fn met(&self, relay: SocketAddr, ticket: Ticket) {
        self.state.lock().ticket = Some((normalised(relay), ticket));
    }

    /// The next registration, and the relay's address.
    pub(in crate::link) fn registration(&self) -> Option<(SocketAddr, Vec<u8>)> {
        let mut state = self.state.lock();
        // From the clock, so that numbers rise over restarts, too.
        state.number = first_number().max(state.number + 1);
        let (relay, ticket) = state.ticket.as_ref()?;
        let registration =
            Registration { id: ticket.id, number: state.number, other: None, is_answer: false };
        Some((*relay, registration.to_bytes(&ticket.key).to_vec()))
    }

    /// Takes the answer to a registration. False for any other datagram.
    #[cold]
    pub(in crate::link) fn answered(&self, datagram: &[u8]) -> bool {
        let mut state = self.state.lock();
        let Some((_, ticket)) = &state.ticket else { return false };
        let read = Registration::read(datagram, &ticket.key);
        let Some(answer) = read.filter(|answer| answer.is_answer && answer.id == ticket.id) else {
            return false;
        };
        // The round trip to the relay may take longer than the interval of registrations: an older answer tells nothing new.
        if answer.number > state.answered && answer.number <= state.number {
            state.answered = answer.number;
            state.reported = answer.other.or(state.reported);
        }
        true
    }

    /// Takes a keepalive that a live session's key opened: its source, whether it `confirms` that the other host hears this one
    /// directly, the tag of its session and the other host's clock. One that a later one has overtaken is ignored: an attacker may
    /// have delayed it.
    #[cold]
    pub(in crate::link) fn heard(&self, source: SocketAddr, confirms: bool, (tag, sent_us): (u32, u64)) {
        let mut state = self.state.lock();
        if state.latest.is_some_and(|(session, latest_us)| session == tag && sent_us < latest_us) {
            return;
        }
        state.latest = Some((tag, sent_us));
        let now = Instant::now();
        if state.relay() != Some(source) {
            state.heard = Some((source, now));
        }
        state.confirmed = confirms.then_some(now);
    }

    /// Whether the other host is heard directly, and where keepalives go besides `remote`, where the link's datagrams go.
    pub(in crate::link) fn other_paths(&self, remote: Option<SocketAddr>) -> (bool, Vec<SocketAddr>) {
        let state = self.state.lock();
        let paths = [state.relay(), state.direct()].into_iter().flatten();
        (state.heard_directly().is_some(), paths.filter(|path| Some(*path) != remote).collect())
    }

    /// Source addresses of the other host's datagrams.
    pub(in crate::link) fn sources(&self) -> Vec<SocketAddr> {
        self.state.lock().sources.clone()
    }

    /// Chooses the path of datagrams, which go to `remote` now. Returns the new address, if it is another one, and whether that or
    /// the source addresses have changed.
    pub(in crate::link) fn settle(&self, remote: Option<SocketAddr>) -> (Option<SocketAddr>, bool) {
        let mut state = self.state.lock();
        let confirmed = state.confirmed.is_some_and(|at| at.elapsed() < DIRECT);
        let path = state.direct().filter(|_| confirmed).or(state.relay());
        let heard = state.heard.filter(|(_, at)| at.elapsed() < KNOWN).map(|(from, _)| from);
        let sources: Vec<_> = [state.relay(), heard].into_iter().flatten().collect();
        let changed = sources != state.sources;
        state.sources = sources;
        let moved = path.filter(|path| remote != Some(*path));
        (moved, changed || moved.is_some())
    }

    /// True when datagrams to `remote` are relayed.
    pub(in crate::link) fn is_relay(&self, remote: SocketAddr) -> bool {
        self.state.lock().relay() == Some(remote)
    }
}

#[cfg(test)]
#[path = "hole_punching_tests.rs"]
mod tests;
