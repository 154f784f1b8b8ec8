//! Hole punching: after a rendezvous, a link's datagrams are relayed until the direct path is known to work.
//!
//! While a session lasts, keepalives take both paths: through the relay's port, and directly to the address that the relay
//! reported for the other host, or at which the other host was heard. The direct ones punch holes into the NATs on both sides (a
//! *simultaneous open*: RFC 8445 does no more for two hosts with one address each). A keepalive that decrypts and did not come
//! from the relay proves that this direction works; a flag in the following keepalives confirms it, and the host that receives
//! the flag sends directly. Each direction is decided separately, and frames of a flow may be reordered once when the path
//! changes. When nothing has arrived directly for [`DIRECT`], the flag is cleared, and frames are relayed again.
//!
//! The address that the relay reports for the other host is used for keepalives, five a second, and for frames only while the
//! other host confirms that it receives those keepalives. So a relay, which this host has chosen and authenticated, could divert
//! frames to another address for as long as such a confirmation lasts. An attacker that can only delay datagrams cannot: a
//! keepalive counts only if no later one has arrived.

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::client::{Registration, Ticket, attend};
use crate::link::sealed::identity::Identity;
use crate::link::sealed::identity::tls::HandshakeError;
use crate::link::succession_bytes::{Reader, SuccessionError, write_address, write_age};
use crate::link::{first_number, normalised};

/// How long a directly received keepalive is valid: of five a second, four may be lost.
const DIRECT: Duration = Duration::from_millis(1000);
/// How long the address at which the other host was heard identifies its datagrams. The NAT may assign the address to another
/// host afterwards.
const KNOWN: Duration = Duration::from_secs(10);

/// The choice between the relayed and the direct path of one link.
#[derive(Debug)]
pub(in crate::link) struct PathChoice {
    /// Name of the link to the relay.
    pub(in crate::link) link: String,
    state: Mutex<PathState>,
}

/// What is known of both paths. A running vnetd hands it to the next one.
#[derive(Debug, Default)]
pub(in crate::link) struct PathState {
    /// The relay's address for this pair of hosts, and this host's registration there.
    ticket: Option<(SocketAddr, Ticket)>,
    /// Number of the last registration, and of the last answered one.
    number: u64,
    answered: u64,
    /// The other host's address, as the relay reports it.
    reported: Option<SocketAddr>,
    /// Address at which the other host was last heard directly, and when.
    heard: Option<(SocketAddr, Instant)>,
    /// Time at which the other host last confirmed that it hears this host directly.
    confirmed: Option<Instant>,
    /// The latest keepalive: the tag of its session, and the other host's clock.
    latest: Option<(u32, u64)>,
    /// Source addresses of the other host's datagrams, as of the last [`PathChoice::settle`].
    sources: Vec<SocketAddr>,
}

impl PathState {
    fn heard_directly(&self) -> Option<SocketAddr> {
        self.heard.filter(|(_, at)| at.elapsed() < DIRECT).map(|(from, _)| from)
    }

    /// The address to try on the direct path.
    fn direct(&self) -> Option<SocketAddr> {
        self.heard_directly().or(self.reported)
    }

    fn relay(&self) -> Option<SocketAddr> {
        self.ticket.as_ref().map(|(relay, _)| *relay)
    }

    /// Source addresses of the other host's datagrams.
    fn current_sources(&self) -> Vec<SocketAddr> {
        let heard = self.heard.filter(|(_, at)| at.elapsed() < KNOWN).map(|(from, _)| from);
        [self.relay(), heard].into_iter().flatten().collect()
    }

    /// Reads what [`PathChoice::hand_over`] has written.
    pub(in crate::link) fn read(from: &mut Reader<'_>) -> Result<PathState, SuccessionError> {
        let mut state = PathState::default();
        if from.has()? {
            let relay = from.address()?.ok_or(SuccessionError("a relay without an address"))?;
            let ticket = Ticket { port: relay.port(), id: from.array()?, key: from.array()? };
            state.ticket = Some((relay, ticket));
        }
        (state.number, state.answered, state.reported) = (from.counted()?, from.u64()?, from.address()?);
        state.heard = from.address()?.zip(from.age()?);
        state.confirmed = from.age()?;
        if from.has()? {
            state.latest = Some((from.u32()?, from.u64()?));
        }
        Ok(state)
    }
}

impl PathChoice {
    /// The path choice of a link whose peer meets this host at the relay that `link` leads to.
    pub(in crate::link) fn new(link: String) -> PathChoice {
        PathChoice { link, state: Mutex::default() }
    }

    /// Writes the state for the next vnetd:
    ///
    /// ```text
    ///   0 or 1, the ticket: address of the relay with this pair's port, id 8, key 32 | number of the last registration 8
    ///   number of the last answered one 8 | address of the other host that the relay reports | address heard | ms since it was heard 8
    ///   ms since the other host confirmed 8 | 0 or 1, the latest keepalive: tag 4, the other host's clock 8
    /// ```
    pub(in crate::link) fn hand_over(&self, out: &mut Vec<u8>) {
        let state = self.state.lock();
        out.push(u8::from(state.ticket.is_some()));
        if let Some((relay, ticket)) = &state.ticket {
            write_address(Some(*relay), out);
            out.extend_from_slice(&ticket.id);
            out.extend_from_slice(&ticket.key);
        }
        out.extend_from_slice(&state.number.to_le_bytes());
        out.extend_from_slice(&state.answered.to_le_bytes());
        write_address(state.reported, out);
        write_address(state.heard.map(|(from, _)| from), out);
        write_age(state.heard.map(|(_, at)| at), out);
        write_age(state.confirmed, out);
        out.push(u8::from(state.latest.is_some()));
        if let Some((tag, clock_us)) = state.latest {
            out.extend_from_slice(&tag.to_le_bytes());
            out.extend_from_slice(&clock_us.to_le_bytes());
        }
    }

    /// Goes on with the state of the vnetd before.
    pub(in crate::link) fn resume(&self, mut state: PathState) {
        state.sources = state.current_sources();
        *self.state.lock() = state;
    }

    /// Pretends that the hosts have met at `relay`, and that the other one was heard from `direct` and has confirmed it.
    #[cfg(test)]
    pub(in crate::link) fn pretend(&self, relay: SocketAddr, direct: Option<SocketAddr>) {
        let ticket = Ticket { port: relay.port(), id: [7; 8], key: [9; 32] };
        let (now, mut state) = (Instant::now(), self.state.lock());
        state.ticket = Some((relay, ticket));
        state.heard = direct.map(|direct| (direct, now));
        (state.reported, state.latest, state.confirmed) = (direct, Some((3, 5)), Some(now));
        (state.number, state.answered) = (first_number(), 1);
    }

    /// Asks the relay at the other end of `stream`, whose certificate must be for `relay`, for a rendezvous with `wanted`.
    /// Returns a connection to that host, which is not authenticated yet.
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

    /// Sends datagrams to `relay` from now on, which forwards them.
    fn met(&self, relay: SocketAddr, ticket: Ticket) {
        self.state.lock().ticket = Some((normalised(relay), ticket));
    }

    /// The next registration, and the relay's address.
    pub(in crate::link) fn registration(&self) -> Option<(SocketAddr, Vec<u8>)> {
        let mut state = self.state.lock();
        // Starts from the clock, so that numbers also increase across restarts.
        state.number = first_number().max(state.number + 1);
        let (relay, ticket) = state.ticket.as_ref()?;
        let registration =
            Registration { id: ticket.id, number: state.number, other: None, is_answer: false };
        Some((*relay, registration.to_bytes(&ticket.key).to_vec()))
    }

    /// Processes the answer to a registration. Returns false for any other datagram.
    #[cold]
    pub(in crate::link) fn answered(&self, datagram: &[u8]) -> bool {
        let mut state = self.state.lock();
        let Some((_, ticket)) = &state.ticket else { return false };
        let read = Registration::read(datagram, &ticket.key);
        let Some(answer) = read.filter(|answer| answer.is_answer && answer.id == ticket.id) else {
            return false;
        };
        // The round trip to the relay may take longer than the interval of registrations: an older answer holds nothing new.
        if answer.number > state.answered && answer.number <= state.number {
            state.answered = answer.number;
            state.reported = answer.other.or(state.reported);
        }
        true
    }

    /// Records a keepalive that a live session's key decrypted: its source, whether it `confirms` that the other host hears this
    /// host directly, the tag of its session, and the other host's clock. A keepalive that a later one has overtaken is ignored,
    /// because an attacker may have delayed it.
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

    /// Returns whether the other host is heard directly, and the further addresses for keepalives besides `remote`, to which the
    /// link's datagrams are sent.
    pub(in crate::link) fn other_paths(&self, remote: Option<SocketAddr>) -> (bool, Vec<SocketAddr>) {
        let state = self.state.lock();
        let paths = [state.relay(), state.direct()].into_iter().flatten();
        (state.heard_directly().is_some(), paths.filter(|path| Some(*path) != remote).collect())
    }

    /// Source addresses of the other host's datagrams.
    pub(in crate::link) fn sources(&self) -> Vec<SocketAddr> {
        self.state.lock().sources.clone()
    }

    /// Chooses the path of datagrams, which are currently sent to `remote`. Returns the new address if it differs, and whether
    /// that address or the source addresses have changed.
    pub(in crate::link) fn settle(&self, remote: Option<SocketAddr>) -> (Option<SocketAddr>, bool) {
        let mut state = self.state.lock();
        let confirmed = state.confirmed.is_some_and(|at| at.elapsed() < DIRECT);
        let path = state.direct().filter(|_| confirmed).or(state.relay());
        let sources = state.current_sources();
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
