//! Streams of the process engine: TCP connections for the bytes of large transfers ([`crate::proto`] says when).
//!
//! ```text
//!   puller                                            sender
//!     |--- INVITE (secret), over UDP -------------------->|
//!     |<-- connects to the port of the UDP socket --------|
//!     |<-- PREFACE: magic, first half of the secret ------|
//!     |--- second half of the secret -------------------->|
//!     |<-- records: length (4 bytes), DATA packet --------|
//! ```
//!
//! A node listens at the TCP port with the number of its UDP port. A connection belongs to the channel half of whose secret it shows, and
//! must come from that peer's address. The other half shows the sender that it has reached the peer: no bytes go to whoever else has the
//! port. A connection carries bytes in one direction; each side has its own. Where it cannot be made, the network carries all.
//!
//! TCP slows down when packets get lost, the engine's own protocol does not. So a connection whose path loses segments is ended. The
//! kernel ends one whose path is silent for 3 s. After a stream has ended, none is made to this peer for a minute.
//!
//! Bytes of a stream are not sealed. So there is none to a peer behind a sealed link.
//!
//! Sockets never block. What a full socket does not take of a packet is copied, and the channel's other pulled bytes wait until it is sent.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::{Shutdown, connect_unspec, shutdown};

use super::connection::{Ended, HALF, MAGIC, PREFACE, end_when_silent, is_passing, silence};
use super::local::Local;
use super::outgoing::Outgoing;
use crate::proto::{Departure, Engine};
use crate::records::{Records, TooLong};
use crate::seal::Sealing;

/// How long a connection may take until the proof.
const CONNECT_NS: u64 = 2_000_000_000;
/// Pause after the process could not accept a connection, for want of descriptors.
const ACCEPT_PAUSE_NS: u64 = 100_000_000;
/// Maximum number of connections in each direction.
const STREAMS_MAX: usize = 256;
/// Maximum number of connections that have not shown a secret, and how long they may take.
const STRANGERS_MAX: usize = 64;
const STRANGER_NS: u64 = 2_000_000_000;
/// Number of connections that are accepted at a time.
const ACCEPTS_MAX: usize = 16;
/// Interval at which connections are looked at while nothing is expected from them.
const LOOK_EVERY_NS: u64 = 1_000_000;
/// Interval at which connections are checked for losses.
const CHECK_EVERY_NS: u64 = 100_000_000;
/// Number of buffers that are read from a connection before the engine answers.
const READS_MAX: usize = 1;

/// Counters of the streams that carry large transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamCounters {
    /// Streams in use, in both directions.
    pub streams: u64,
    /// Streams opened since the start of the node.
    pub opened: u64,
    /// Streams that ended.
    pub ended: u64,
    /// Streams of them that this node ended because their path lost segments.
    pub lossy: u64,
    /// Connections that were refused: they showed no valid secret, or there were too many.
    pub refused: u64,
    /// Packets sent through streams.
    pub packets_out: u64,
    /// Packets received through streams.
    pub packets_in: u64,
}

/// A connection from a peer that sends what was pulled.
struct Incoming {
    address: SocketAddr,
    socket: TcpStream,
    records: Records,
}

/// A connection that has not shown its secret.
struct Stranger {
    socket: TcpStream,
    from: IpAddr,
    preface: [u8; PREFACE],
    filled: usize,
    until: u64,
}

/// Listens at the TCP port with the number of a node's UDP port.
pub(super) fn listen(own: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(own)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

pub(super) struct Streams {
    /// `None`: streams are switched off, or another program has the port.
    listener: Option<TcpListener>,
    own: SocketAddr,
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    strangers: Vec<Stranger>,
    look_at: u64,
    check_at: u64,
    /// No connection is accepted before.
    accept_at: u64,
    /// How long a connection's path may be silent.
    silence: Duration,
    counters: StreamCounters,
}

impl Streams {
    /// Streams of the node at `own`, whose peers connect to `listener`. `None`: there are none.
    pub(super) fn new(
        own: SocketAddr,
        listener: Option<TcpListener>,
        local: &Local,
        dead_after_ns: u64,
    ) -> Self {
        let listener = listener.filter(|listener| local.watch(listener.as_fd()).is_ok());
        Self {
            listener,
            own,
            outgoing: vec![],
            incoming: vec![],
            strangers: vec![],
            look_at: 0,
            check_at: 0,
            accept_at: 0,
            silence: silence(dead_after_ns),
            counters: StreamCounters::default(),
        }
    }

    /// Whether peers can connect.
    pub(super) fn can_listen(&self) -> bool {
        self.listener.is_some()
    }

    pub(super) fn counters(&self) -> StreamCounters {
        let streams = self.outgoing.iter().filter(|stream| stream.is_open).count() + self.incoming.len();
        StreamCounters { streams: streams as u64, ..self.counters }
    }

    /// Sends a packet to the peer that has a stream. If there is none any more, the packet is lost, and the engine sends it again.
    pub(super) fn send(&mut self, engine: &mut Engine, local: &Local, seal: &Sealing, packet: &Departure) {
        let place = self.outgoing.iter().position(|own| own.is_open && own.address == packet.to);
        let Some(place) = place else {
            engine.set_outgoing_stream(packet.to, None);
            return;
        };
        if !seal.is_clear(packet.to) {
            return self.end_outgoing(engine, local, place, true);
        }
        self.counters.packets_out += 1;
        match self.outgoing[place].send(packet) {
            Ok(true) => {}
            Ok(false) => {
                engine.set_outgoing_stream(packet.to, Some(false));
                if local.watch_room(self.outgoing[place].socket.as_fd(), true).is_err() {
                    self.end_outgoing(engine, local, place, false);
                }
            }
            Err(Ended) => self.end_outgoing(engine, local, place, false),
        }
    }

    /// No packet follows for now.
    pub(super) fn flush(&mut self) {
        for own in self.outgoing.iter_mut().filter(|own| own.is_open_ended) {
            own.is_open_ended = false;
            // It is set already; setting it sends what the socket holds back. An error shows with the next packet.
            let _ = own.socket.set_nodelay(true);
        }
    }

    /// Breaks all connections, as a network can.
    #[cfg(test)]
    pub(super) fn cut(&self) {
        let sockets =
            self.outgoing.iter().map(|own| &own.socket).chain(self.incoming.iter().map(|own| &own.socket));
        sockets.for_each(|socket| drop(socket.shutdown(std::net::Shutdown::Both)));
    }

    /// Connects to peers that invite, sends what waits, and receives what is expected. Returns whether packets arrived.
    pub(super) fn progress(&mut self, engine: &mut Engine, local: &Local, seal: &Sealing, now: u64) -> bool {
        let is_look = now >= self.look_at;
        if is_look {
            self.look_at = now + LOOK_EVERY_NS;
            self.tend(engine, local, seal, now);
        }
        while let Some((address, secret)) = engine.next_stream_invite() {
            self.connect(local, seal, now, address, secret);
        }
        for place in (0..self.outgoing.len()).rev() {
            let own = &mut self.outgoing[place];
            if own.is_open && own.rest.is_empty() {
                continue;
            }
            if let Err(Ended) = own.proceed(engine, local, now) {
                self.end_outgoing(engine, local, place, false);
            } else if !own.was_counted && own.is_open {
                (own.was_counted, self.counters.opened) = (true, self.counters.opened + 1);
            }
        }
        let mut arrived = false;
        for place in (0..self.incoming.len()).rev() {
            if !is_look && !engine.is_pulling(self.incoming[place].address) {
                continue;
            }
            match self.incoming[place].receive(engine, now) {
                Ok(count) => {
                    arrived |= count > 0;
                    self.counters.packets_in += count;
                }
                Err(Ended) => self.end_incoming(engine, local, place),
            }
        }
        arrived
    }

    /// Accepts connections, and ends those whose channel is closed or that are to be sealed.
    fn tend(&mut self, engine: &mut Engine, local: &Local, seal: &Sealing, now: u64) {
        let is_check = now >= self.check_at;
        if is_check {
            self.check_at = now + CHECK_EVERY_NS;
        }
        for place in (0..self.outgoing.len()).rev() {
            let own = &mut self.outgoing[place];
            if !seal.is_clear(own.address) {
                self.end_outgoing(engine, local, place, true);
            } else if own.is_open
                && (!engine.streams(own.address).1 || engine.is_local(own.address) || own.has_ended())
            {
                self.end_outgoing(engine, local, place, false);
            } else if is_check && own.is_lossy() {
                self.counters.lossy += 1;
                self.end_outgoing(engine, local, place, false);
            }
        }
        for place in (0..self.incoming.len()).rev() {
            let address = self.incoming[place].address;
            if !engine.streams(address).0 || !seal.is_clear(address) {
                self.end_incoming(engine, local, place);
            }
        }
        self.accept(engine, local, now);
        for place in (0..self.strangers.len()).rev() {
            self.hear_stranger(engine, local, seal, now, place);
        }
    }

    /// Connects to a peer that invites.
    fn connect(&mut self, local: &Local, seal: &Sealing, now: u64, address: SocketAddr, secret: [u8; 16]) {
        let is_known = self.outgoing.iter().any(|stream| stream.address == address);
        if is_known || self.outgoing.len() >= STREAMS_MAX || !seal.is_clear(address) {
            return;
        }
        let Ok(stream) = Outgoing::connect(address, self.own, secret, (now + CONNECT_NS, self.silence))
        else {
            return;
        };
        let descriptor = stream.socket.as_fd();
        if local.watch(descriptor).is_ok() && local.watch_room(descriptor, true).is_ok() {
            self.outgoing.push(stream);
        }
    }

    fn accept(&mut self, engine: &Engine, local: &Local, now: u64) {
        let Some(listener) = &self.listener else { return };
        if now < self.accept_at {
            return;
        }
        if std::mem::take(&mut self.accept_at) > 0 {
            // An error shows with the next connection.
            let _ = local.watch(listener.as_fd());
        }
        for _ in 0..ACCEPTS_MAX {
            let (socket, from) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if is_passing(&error) => return,
                Err(_) => {
                    // The listener stays readable: nobody is to wake for it again and again.
                    local.unwatch(listener.as_fd());
                    self.accept_at = now + ACCEPT_PAUSE_NS;
                    return;
                }
            };
            let ip = from.ip().to_canonical();
            let is_usable = self.strangers.len() < STRANGERS_MAX
                && self.incoming.len() < STREAMS_MAX
                && engine.has_invited(ip)
                && socket.set_nonblocking(true).is_ok()
                && local.watch(socket.as_fd()).is_ok();
            if !is_usable {
                self.counters.refused += 1;
                continue;
            }
            let until = now + STRANGER_NS;
            self.strangers.push(Stranger { socket, from: ip, preface: [0; PREFACE], filled: 0, until });
        }
    }

    /// Reads the preface of a connection. If it shows the secret of the peer that it comes from, the peer has a stream.
    fn hear_stranger(&mut self, engine: &mut Engine, local: &Local, seal: &Sealing, now: u64, place: usize) {
        let own = &mut self.strangers[place];
        let heard = match own.socket.read(&mut own.preface[own.filled..]) {
            Ok(0) => Err(Ended),
            Ok(count) => {
                own.filled += count;
                Ok(own.filled == PREFACE)
            }
            Err(error) if is_passing(&error) && now < own.until => Ok(false),
            Err(_) => Err(Ended),
        };
        if matches!(heard, Ok(false)) {
            return;
        }
        let Stranger { mut socket, from, preface, .. } = self.strangers.swap_remove(place);
        let (magic, shown) = preface.split_at(MAGIC.len());
        let shown: Option<&[u8; HALF]> = shown.first_chunk().filter(|_| heard.is_ok() && magic == MAGIC);
        let invited = shown.and_then(|shown| engine.invited_to_stream(shown));
        let is_peer = |invited: &(SocketAddr, [u8; HALF])| {
            invited.0.ip().to_canonical() == from && seal.is_clear(invited.0)
        };
        let proven = invited.filter(is_peer).filter(|(_, proof)| {
            // A new connection has room for it.
            end_when_silent(&socket, self.silence).is_ok()
                && socket.write(proof).is_ok_and(|sent| sent == HALF)
        });
        let Some((address, _)) = proven else {
            self.counters.refused += 1;
            return local.unwatch(socket.as_fd());
        };
        // The peer has ended the one before.
        if let Some(before) = self.incoming.iter().position(|own| own.address == address) {
            self.end_incoming(engine, local, before);
        }
        if engine.set_incoming_stream(address, true) {
            self.counters.opened += 1;
            self.incoming.push(Incoming { address, socket, records: Records::default() });
        } else {
            local.unwatch(socket.as_fd());
        }
    }

    /// Ends a stream. `at_once`: the kernel throws away what it has not sent.
    fn end_outgoing(&mut self, engine: &mut Engine, local: &Local, place: usize, at_once: bool) {
        let Outgoing { address, socket, is_open, was_counted, .. } = self.outgoing.swap_remove(place);
        local.unwatch(socket.as_fd());
        // Closing would not do while a child process holds a copy. An error means that the connection has ended already.
        let _ = if at_once { connect_unspec(&socket) } else { shutdown(&socket, Shutdown::Both) };
        if is_open {
            engine.avoid_streams(address);
            engine.set_outgoing_stream(address, None);
        }
        self.counters.ended += u64::from(was_counted);
    }

    fn end_incoming(&mut self, engine: &mut Engine, local: &Local, place: usize) {
        let Incoming { address, socket, .. } = self.incoming.swap_remove(place);
        local.unwatch(socket.as_fd());
        let _ = shutdown(&socket, Shutdown::Both);
        engine.set_incoming_stream(address, false);
        self.counters.ended += 1;
    }
}

impl Incoming {
    /// Gives the engine the packets that have arrived. Returns their number.
    fn receive(&mut self, engine: &mut Engine, now: u64) -> Result<u64, Ended> {
        let mut packets = 0;
        for _ in 0..READS_MAX {
            let room = self.records.room();
            let most = room.len();
            let count = match self.socket.read(room) {
                Ok(0) => return Err(Ended),
                Ok(count) => count,
                Err(error) if is_passing(&error) => return Ok(packets),
                Err(_) => return Err(Ended),
            };
            self.records.add(count);
            while let Some(packet) = self.records.next_packet().map_err(|TooLong| Ended)? {
                if !engine.receive_stream(now, self.address, packet) {
                    return Err(Ended);
                }
                packets += 1;
            }
            if count < most {
                break;
            }
        }
        Ok(packets)
    }
}
