//! The bounce of the process engine: packets to and from a peer that UDP does not reach take a TCP connection.
//!
//! ```text
//!   one                                                  other
//!     |--- connect, from the port of its own socket ------->|   or both at once
//!     |--- magic, secret ---------------------------------->|
//!     |<-- magic, secret -----------------------------------|
//!     |<-- records: length (4 bytes), packet -------------->|
//!     |--- over UDP, now and then: magic, own secret, 0... ->|
//!     |<-- control record 1: the probe has arrived --------|
//! ```
//!
//! A node listens at the TCP port with the number of its UDP port (`streams/`). It connects to a peer that does not answer, from the TCP port with
//! the number of its own UDP port, and tries again each second. A record is the packet that would have been sent by UDP, also if that is
//! sealed.
//!
//! A TCP port need not belong to the program that has the UDP port of the same number. So a connection carries no packets to a peer
//! that answers by UDP, unless the engine has accepted a packet from the connection: its sender knows the channel's session number.
//!
//! UDP is faster. So each side sends probes by UDP, as large as the path's packets; the peer acknowledges them by the connection. Then the
//! node sends by UDP again, in this direction, and the connection stays open for a while. A node that gets no answers tells its peer
//! (control record 2), because it may be the answers that UDP does not deliver.
//!
//! Packets that exceed the bound of a connection's queue count as lost; the engine sends them again.

mod connection;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::node::local::Local;
use crate::node::tcp::{Closed, user_timeout};
use crate::proto::{Departure, Engine};
use crate::random::random;
use crate::seal::{OVERHEAD, Sealing, Session};
use connection::{Connection, Control, SECRET};
pub(super) use connection::{MAGIC, Secret};

/// How long a peer may leave HELLO, and the packets of an open channel, unanswered.
const HELLO_NS: u64 = 300_000_000;
const SILENCE_NS: u64 = 1_000_000_000;
/// Interval at which silent peers are looked for.
const TEND_EVERY_NS: u64 = 50_000_000;
/// Pause between two attempts to connect to the same peer.
const CONNECT_EVERY_NS: u64 = 1_000_000_000;
/// Maximum number of connections. Each has a buffer of 256 KiB, and keeps at most 1 MiB to send.
const CONNECTIONS_MAX: usize = 256;
/// How long a connection is kept that stands by, or whose peer has no channel.
const UNUSED_NS: u64 = 10_000_000_000;
/// Interval at which connections that stand by are read.
const READ_EVERY_NS: u64 = 1_000_000;
/// Callers that are remembered for `CONNECT_EVERY_NS`: one from each address may come in that time.
const CALLERS_MAX: usize = 4_096;
/// Length of a UDP probe without its padding: magic and secret.
const PROBE: usize = MAGIC.len() + SECRET;

/// Counters of the connections that stand in for UDP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BounceCounters {
    /// Connections that carry packets to peers now.
    pub bounces: u64,
    /// Connections opened since the start of the node, by either side.
    pub opened: u64,
    /// Connections that were closed, by either side.
    pub ended: u64,
    /// Peers' connections that were closed at once, because there are too many.
    pub refused: u64,
    /// Packets sent through connections.
    pub packets_out: u64,
    /// Packets received through connections.
    pub packets_in: u64,
    /// Packets that count as lost: a connection had too much to send, or the node takes only connections and there was none yet.
    pub lost: u64,
    /// Peers that were found to be reached by UDP after all.
    pub returned: u64,
}

pub(super) struct Bounces {
    own: SocketAddr,
    /// No packets take UDP.
    is_only: bool,
    /// Whether the node listens. It connects from the same port.
    can_connect: bool,
    connections: Vec<Connection>,
    /// When a connection to a silent peer may be tried again. Entries are removed when that time has come, so there are at most as many as
    /// the engine has had channels in one second.
    attempts: HashMap<SocketAddr, u64>,
    /// When a peer may call again.
    callers: HashMap<SocketAddr, u64>,
    /// Datagrams for the socket: probes.
    probes: Vec<(SocketAddr, [u8; PROBE])>,
    tend_at: u64,
    read_at: u64,
    user_timeout: Duration,
    /// Sealed packets on their way into records.
    sealed: Vec<u8>,
    counters: BounceCounters,
}

impl Bounces {
    pub(super) fn new(own: SocketAddr, is_only: bool, can_connect: bool, dead_after_ns: u64) -> Self {
        Self {
            own,
            is_only,
            can_connect,
            connections: vec![],
            attempts: HashMap::new(),
            callers: HashMap::new(),
            probes: vec![],
            tend_at: 0,
            read_at: 0,
            user_timeout: user_timeout(dead_after_ns),
            sealed: vec![],
            counters: BounceCounters::default(),
        }
    }

    pub(super) fn counters(&self) -> BounceCounters {
        let bounces = self.connections.iter().filter(|own| own.carries()).count() as u64;
        BounceCounters { bounces, ..self.counters }
    }

    /// Whether packets to this peer take a connection.
    pub(super) fn carries(&self, address: SocketAddr) -> bool {
        self.connections.iter().any(|own| own.address == address && own.carries())
    }

    /// Queues a packet if its peer is not reached by UDP. Returns false if it is to take UDP.
    #[inline]
    pub(super) fn send(&mut self, packet: &Departure) -> bool {
        if self.connections.is_empty() && !self.is_only {
            return false;
        }
        let queued = self.to(packet.to).map(|to| to.queue(packet.header.as_bytes(), packet.payload));
        self.count(queued)
    }

    /// Like `send`, but seals the packet.
    #[inline]
    pub(super) fn send_sealed(&mut self, packet: &Departure, session: &mut Session) -> bool {
        if self.connections.is_empty() && !self.is_only {
            return false;
        }
        let place = self.connections.iter().position(|own| own.address == packet.to && own.carries());
        let Some(place) = place else { return self.count(None) };
        let header = packet.header.as_bytes();
        self.sealed.clear();
        let datagram = if packet.parts_of > 0 {
            let datagram = packet.parts_of + OVERHEAD;
            session.seal_in_parts(&mut self.sealed, header, packet.payload, datagram);
            datagram
        } else {
            session.seal(&mut self.sealed, header, packet.payload);
            self.sealed.len()
        };
        let to = &mut self.connections[place];
        let whole = self.sealed.len() + self.sealed.len().div_ceil(datagram) * size_of::<u32>();
        let queued =
            to.has_room(whole) && self.sealed.chunks(datagram).all(|datagram| to.queue_bytes(datagram));
        self.count(Some(queued))
    }

    /// Like `send`, for a packet of whole bytes.
    pub(super) fn send_alone(&mut self, to: SocketAddr, packet: &[u8]) -> bool {
        let queued = self.to(to).map(|to| to.queue_bytes(packet));
        self.count(queued)
    }

    fn to(&mut self, address: SocketAddr) -> Option<&mut Connection> {
        self.connections.iter_mut().find(|own| own.address == address && own.carries())
    }

    /// Counts a packet. `queued`: whether a connection took it; `None`: there is no connection. Returns false if it is to take UDP.
    fn count(&mut self, queued: Option<bool>) -> bool {
        match queued {
            None if !self.is_only => return false,
            Some(true) => self.counters.packets_out += 1,
            None | Some(false) => self.counters.lost += 1,
        }
        true
    }

    /// Sends what is queued.
    pub(super) fn flush(&mut self, local: &Local) {
        for place in (0..self.connections.len()).rev() {
            if self.connections[place].flush(local).is_err() {
                self.end(local, place);
            }
        }
    }

    /// Next datagram for the UDP socket, which the caller makes as long as the path takes.
    pub(super) fn next_probe(&mut self) -> Option<(SocketAddr, [u8; PROBE])> {
        self.probes.pop()
    }

    /// Takes a datagram that is a probe. Returns false if it is none.
    #[inline]
    pub(super) fn takes(&mut self, from: SocketAddr, packet: &[u8]) -> bool {
        packet.starts_with(&MAGIC) && self.take_probe(from, &packet[MAGIC.len()..])
    }

    /// Tells the peer that its datagrams arrive. Only the peer knows the secret.
    fn take_probe(&mut self, from: SocketAddr, secret: &[u8]) -> bool {
        let secret = secret.get(..SECRET).unwrap_or(&[]);
        let is_its = |own: &&mut Connection| own.address == from && own.is_of(secret);
        if !self.is_only
            && let Some(own) = self.connections.iter_mut().find(is_its)
        {
            own.send_control(Control::ProbeArrived);
        }
        true
    }

    /// Receives packets, and connects to silent peers. Returns whether packets arrived.
    pub(super) fn progress(
        &mut self,
        engine: &mut Engine,
        local: &Local,
        seal: &mut Sealing,
        now: u64,
    ) -> bool {
        if now >= self.tend_at {
            self.tend_at = now + TEND_EVERY_NS;
            self.tend(engine, local, now);
        }
        let reads_all = now >= self.read_at;
        if reads_all {
            self.read_at = now + READ_EVERY_NS;
        }
        let mut arrived = false;
        for place in (0..self.connections.len()).rev() {
            if !reads_all && self.connections[place].is_by_udp() {
                continue;
            }
            match self.receive(engine, seal, now, place) {
                Ok(found) => arrived |= found,
                Err(Closed) => self.end(local, place),
            }
        }
        arrived
    }

    /// Receives packets of a connection. Returns whether there were any.
    fn receive(
        &mut self,
        engine: &mut Engine,
        seal: &mut Sealing,
        now: u64,
        place: usize,
    ) -> Result<bool, Closed> {
        let own = &mut self.connections[place];
        let (address, was_open) = (own.address, own.is_open());
        let (mut packets, mut accepted) = (0, 0);
        let control = own.receive(|packet| {
            packets += 1;
            let before = engine.accepted();
            if let Some(packet) = seal.arrive(now, address, packet) {
                engine.receive(now, address, packet, false);
            }
            accepted += u32::from(engine.accepted() != before);
        })?;
        self.counters.packets_in += u64::from(packets);
        let is_well = own.count(now, packets, accepted);
        match control {
            Some(Control::ProbeArrived) => self.counters.returned += u64::from(own.return_to_udp(now)),
            Some(Control::NoAnswers) => own.hear_no_answers(),
            None => {}
        }
        if own.takes_no_answers() {
            own.leave_udp(now);
        }
        if own.is_open() && !was_open {
            self.begin(engine, now, place);
        }
        if is_well { Ok(packets > 0) } else { Err(Closed) }
    }

    /// The connection is open. It carries packets, unless the peer is heard by UDP.
    fn begin(&mut self, engine: &mut Engine, now: u64, place: usize) {
        self.counters.opened += 1;
        let own = &mut self.connections[place];
        if !self.is_only && engine.hears(now, own.address, SILENCE_NS) {
            return own.stand_by();
        }
        engine.greet_again(own.address);
        self.probe(place, now);
    }

    /// Connects to silent peers, probes, and closes what is not used.
    fn tend(&mut self, engine: &Engine, local: &Local, now: u64) {
        self.attempts.retain(|_, at| *at > now);
        self.callers.retain(|_, at| *at > now);
        let (hello, silence) = if self.is_only { (0, 0) } else { (HELLO_NS, SILENCE_NS) };
        for address in engine.silent(now, hello, silence) {
            self.reach(engine, local, now, address);
        }
        for place in (0..self.connections.len()).rev() {
            let own = &self.connections[place];
            let is_needed = !own.is_by_udp() && engine.has_channel(own.address);
            let is_unused = now.saturating_sub(own.used_at) >= UNUSED_NS && !is_needed;
            if is_unused || !own.is_open() && now >= own.until {
                self.end(local, place);
            } else if own.carries() && now >= own.probe_at {
                self.probe(place, now);
            }
        }
    }

    /// A peer is silent: packets take its connection, or one is opened.
    fn reach(&mut self, engine: &Engine, local: &Local, now: u64, address: SocketAddr) {
        let mut has_any = false;
        for own in self.connections.iter_mut().filter(|own| own.address == address) {
            has_any = true;
            if own.is_open() {
                own.leave_udp(now);
                own.send_no_answers(now);
            }
        }
        let is_possible = self.can_connect && address.is_ipv4() == self.own.is_ipv4();
        if has_any || !is_possible || self.attempts.contains_key(&address) {
            return;
        }
        self.attempts.insert(address, now + CONNECT_EVERY_NS);
        let Ok(secret) = secret() else { return };
        if self.has_place(engine, local)
            && let Ok(own) = Connection::connect(address, self.own, secret, (now, self.user_timeout))
        {
            self.watch(local, own);
        }
    }

    /// Whether there is room for another connection. The one that was not used for the longest time, of those that are not needed, makes room.
    fn has_place(&mut self, engine: &Engine, local: &Local) -> bool {
        if self.connections.len() >= CONNECTIONS_MAX {
            let is_needed = |own: &Connection| !own.is_by_udp() && engine.has_channel(own.address);
            let spare = self.connections.iter().enumerate().filter(|(_, own)| !is_needed(own));
            let oldest = spare.min_by_key(|(_, own)| own.used_at).map(|(place, _)| place);
            oldest.into_iter().for_each(|place| self.end(local, place));
        }
        self.connections.len() < CONNECTIONS_MAX
    }

    /// Takes a peer's connection, whose magic and secret have arrived.
    pub(super) fn accept(
        &mut self,
        engine: &mut Engine,
        local: &Local,
        now: u64,
        (socket, address, peers): (TcpStream, SocketAddr, Secret),
    ) {
        let is_early = self.callers.len() >= CALLERS_MAX || self.callers.contains_key(&address);
        let accepted = match secret() {
            Ok(own) if !is_early && self.has_place(engine, local) => {
                Connection::accepted(socket, address, (own, peers), (now, self.user_timeout)).ok()
            }
            _ => None,
        };
        if let Some(place) = accepted.and_then(|own| self.watch(local, own)) {
            self.callers.insert(address, now + CONNECT_EVERY_NS);
            self.begin(engine, now, place);
        } else {
            self.counters.refused += 1;
        }
    }

    fn watch(&mut self, local: &Local, own: Connection) -> Option<usize> {
        local.watch(own.socket()).ok()?;
        local.watch_room(own.socket(), true).ok()?;
        self.connections.push(own);
        Some(self.connections.len() - 1)
    }

    fn probe(&mut self, place: usize, now: u64) {
        if !self.is_only {
            let own = &mut self.connections[place];
            let mut probe = [0; PROBE];
            probe[..MAGIC.len()].copy_from_slice(&MAGIC);
            probe[MAGIC.len()..].copy_from_slice(&own.probed(now));
            self.probes.push((own.address, probe));
        }
    }

    /// Closes a connection. Packets take UDP again.
    fn end(&mut self, local: &Local, place: usize) {
        let own = self.connections.swap_remove(place);
        local.unwatch(own.socket());
        self.counters.ended += u64::from(own.is_open());
        own.reset();
    }

    /// Shuts all connections down, as a network failure would.
    #[cfg(test)]
    pub(super) fn cut(&self) {
        for own in &self.connections {
            let _ = rustix::net::shutdown(own.socket(), rustix::net::Shutdown::Both);
        }
    }

    /// Waits until the peers' kernels have what was sent, for a short time.
    pub(super) fn drain(&mut self) {
        const PATIENCE: Duration = Duration::from_millis(200);
        let begin = std::time::Instant::now();
        while self.connections.iter_mut().any(Connection::has_unacknowledged) && begin.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn secret() -> std::io::Result<Secret> {
    random().map(|bytes| std::array::from_fn(|place| bytes[place]))
}
