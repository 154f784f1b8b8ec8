//! Streams of the process engine: TCP connections that carry the bytes of large transfers (`proto/engine/streams.rs` says when).
//!
//! ```text
//!   puller                                            sender
//!     |--- INVITE (secret), over UDP -------------------->|
//!     |<-- connect to the TCP port of the UDP port -------|
//!     |<-- magic, first half of the secret ---------------|
//!     |--- second half of the secret -------------------->|
//!     |<-- records: length (4 bytes), DATA packet --------|
//! ```
//!
//! A node listens at the TCP port with the number of its UDP port, also for connections that stand in for UDP (`bounce/`), which begin with
//! another magic. The halves of the secret authenticate both ends: the accepting side finds
//! the channel by the first half, and checks the peer's address; the second half shows the sender that it has not reached another program.
//! A connection carries bytes in one direction; each side opens its own. Without a connection all packets take UDP.
//!
//! TCP slows down for each lost packet, the engine's own protocol does not. So a stream on a lossy path is closed (`node/tcp.rs`), and one
//! whose path is dead times out. After a stream has closed, none is opened to this peer for a minute.
//!
//! Streams are not sealed, so there is none to a peer behind a sealed link.
//!
//! Sockets never block. Up to 16 packets leave with one system call. When a send buffer is full, their tail is copied, and the channel's other
//! pulled bytes wait until it is sent.
//!
//! - `outgoing.rs`: the sending end;
//! - `node/records.rs`: framing of packets in the byte stream;
//! - `node/tcp.rs`: handshake constants, timeouts, loss statistics.

mod outgoing;
#[cfg(test)]
mod tests;

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{set_socket_reuseaddr, set_socket_reuseport};
use rustix::net::{Shutdown, bind, connect_unspec, shutdown};

use crate::node::bounce::{self, Secret};
use crate::node::local::Local;
use crate::node::records::{Records, TooLong};
use crate::node::tcp::{Closed, HALF, MAGIC, PREFACE, new_socket, set_timeouts, user_timeout, would_block};
use crate::proto::{Departure, Engine};
use crate::seal::Sealing;
use outgoing::Outgoing;

/// Deadline of the handshake at the connecting side.
const HANDSHAKE_TIMEOUT_NS: u64 = 2_000_000_000;
/// Pause after accept(2) has failed, for example for want of descriptors.
const ACCEPT_PAUSE_NS: u64 = 100_000_000;
/// Maximum number of connections in each direction.
const STREAMS_MAX: usize = 256;
/// Maximum number of accepted connections that are not authenticated yet, and their deadline.
const UNVERIFIED_MAX: usize = 64;
const VERIFY_TIMEOUT_NS: u64 = 2_000_000_000;
/// Maximum number of them whose addresses are not invited.
const STRANGERS_MAX: usize = 32;
/// Maximum number of connections accepted in one call.
const ACCEPTS_MAX: usize = 16;
/// Interval at which idle connections are checked, and new ones are accepted.
const TEND_EVERY_NS: u64 = 1_000_000;
/// Interval at which the loss rate is checked.
const CHECK_EVERY_NS: u64 = 100_000_000;

/// Counters of the streams that carry large transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamCounters {
    /// Streams in use, in both directions.
    pub streams: u64,
    /// Streams opened since the start of the node.
    pub opened: u64,
    /// Streams that were closed, by either side.
    pub ended: u64,
    /// Streams that this node closed because their path was lossy.
    pub lossy: u64,
    /// Accepted connections that were closed: not authenticated in time, or too many.
    pub refused: u64,
    /// Packets sent through streams.
    pub packets_out: u64,
    /// Packets received through streams.
    pub packets_in: u64,
}

/// The receiving end of a stream.
struct Incoming {
    address: SocketAddr,
    socket: TcpStream,
    records: Records,
}

/// An accepted connection whose peer is not authenticated yet.
struct Unverified {
    socket: TcpStream,
    from: SocketAddr,
    is_invited: bool,
    preface: [u8; PREFACE],
    filled: usize,
    until: u64,
}

/// A peer's connection that stands in for UDP: the peer's address, and its secret.
pub(super) type Caller = (TcpStream, SocketAddr, Secret);

/// Listens at the TCP port with the number of a node's UDP port, from which the node's own connections leave, too.
pub(super) fn listen(own: SocketAddr) -> io::Result<TcpListener> {
    const BACKLOG: i32 = 128;
    let listener = new_socket(own)?;
    set_socket_reuseaddr(&listener, true)?;
    bind(&listener, &own)?;
    rustix::net::listen(&listener, BACKLOG)?;
    // Now that no other listener has the port: the node's own connections leave from it.
    set_socket_reuseport(&listener, true)?;
    Ok(listener.into())
}

pub(super) struct Streams {
    /// `None`: another program has the port.
    listener: Option<TcpListener>,
    own: SocketAddr,
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    unverified: Vec<Unverified>,
    callers: Vec<Caller>,
    tend_at: u64,
    check_at: u64,
    /// Earliest time of the next accept(2), after it has failed.
    accept_at: u64,
    /// TCP user timeout of all streams.
    user_timeout: Duration,
    counters: StreamCounters,
}

impl Streams {
    /// Streams of the node at `own`. `None`: another program has the TCP port.
    pub(super) fn new(own: SocketAddr, listener: Option<TcpListener>, dead_after_ns: u64) -> Self {
        Self {
            listener,
            own,
            outgoing: vec![],
            incoming: vec![],
            unverified: vec![],
            callers: vec![],
            tend_at: 0,
            check_at: 0,
            accept_at: 0,
            user_timeout: user_timeout(dead_after_ns),
            counters: StreamCounters::default(),
        }
    }

    /// Whether peers can connect.
    pub(super) fn can_listen(&self) -> bool {
        self.listener.is_some()
    }

    /// TCP connections for the bounce that peers have opened since the last call.
    pub(super) fn callers(&mut self) -> impl Iterator<Item = Caller> {
        self.callers.drain(..)
    }

    pub(super) fn counters(&self) -> StreamCounters {
        let streams = self.outgoing.iter().filter(|stream| stream.is_open).count() + self.incoming.len();
        StreamCounters { streams: streams as u64, ..self.counters }
    }

    /// Sends a packet through the stream to its peer. If the stream has closed, the engine cuts the packet again for UDP.
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
        let sent = self.outgoing[place].send(packet);
        self.settle(engine, local, place, sent);
    }

    /// A stream has sent what it had, or its send buffer is full (false), or it is closed.
    fn settle(&mut self, engine: &mut Engine, local: &Local, place: usize, sent: Result<bool, Closed>) {
        match sent {
            Ok(true) => {}
            Ok(false) => {
                engine.set_outgoing_stream(self.outgoing[place].address, Some(false));
                if local.watch_room(self.outgoing[place].socket.as_fd(), true).is_err() {
                    self.end_outgoing(engine, local, place, false);
                }
            }
            Err(Closed) => self.end_outgoing(engine, local, place, false),
        }
    }

    /// Sends what is queued: no packet follows for now.
    pub(super) fn flush(&mut self, engine: &mut Engine, local: &Local) {
        for place in (0..self.outgoing.len()).rev() {
            let own = &mut self.outgoing[place];
            if own.has_batch() {
                let sent = own.send_batch(false);
                self.settle(engine, local, place, sent);
            } else if std::mem::take(&mut own.is_corked) {
                // Setting TCP_NODELAY again pushes pending data (tcp(7)). An error shows with the next packet.
                let _ = own.socket.set_nodelay(true);
            }
        }
    }

    /// Shuts all connections down, as a network failure would.
    #[cfg(test)]
    pub(super) fn cut(&self) {
        let sockets =
            self.outgoing.iter().map(|own| &own.socket).chain(self.incoming.iter().map(|own| &own.socket));
        sockets.for_each(|socket| drop(socket.shutdown(std::net::Shutdown::Both)));
    }

    /// Makes progress on all streams. Returns whether packets arrived.
    pub(super) fn progress(&mut self, engine: &mut Engine, local: &Local, seal: &Sealing, now: u64) -> bool {
        let is_tending = now >= self.tend_at;
        if is_tending {
            self.tend_at = now + TEND_EVERY_NS;
            self.tend(engine, local, seal, now);
        }
        while let Some((address, secret)) = engine.next_stream_invite() {
            self.connect(local, seal, now, address, secret);
        }
        for place in (0..self.outgoing.len()).rev() {
            let own = &mut self.outgoing[place];
            if own.is_open && own.unsent.is_empty() {
                continue;
            }
            if let Err(Closed) = own.advance(engine, local, now) {
                self.end_outgoing(engine, local, place, false);
            } else if !own.was_counted && own.is_open {
                (own.was_counted, self.counters.opened) = (true, self.counters.opened + 1);
            }
        }
        let mut arrived = false;
        for place in (0..self.incoming.len()).rev() {
            if !is_tending && !engine.is_pulling(self.incoming[place].address) {
                continue;
            }
            match self.incoming[place].receive(engine, now) {
                Ok(count) => {
                    arrived |= count > 0;
                    self.counters.packets_in += count;
                }
                Err(Closed) => self.end_incoming(engine, local, place),
            }
        }
        arrived
    }

    /// Accepts connections. Closes streams that are closed by the peer, lossy, without a channel, or to a peer that needs sealing.
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
                && (!engine.streams(own.address).1 || engine.is_local(own.address) || own.is_closed_by_peer())
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
        for place in (0..self.unverified.len()).rev() {
            self.verify(engine, local, seal, now, place);
        }
        self.accept(engine, local, now);
    }

    /// Takes up a peer's invitation.
    fn connect(&mut self, local: &Local, seal: &Sealing, now: u64, address: SocketAddr, secret: [u8; 16]) {
        let is_known = self.outgoing.iter().any(|stream| stream.address == address);
        if is_known || self.outgoing.len() >= STREAMS_MAX || !seal.is_clear(address) {
            return;
        }
        let Ok(stream) =
            Outgoing::connect(address, self.own, secret, (now + HANDSHAKE_TIMEOUT_NS, self.user_timeout))
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
        // Accepting takes 10 us even if there is none.
        if now < self.accept_at || !is_readable(listener.as_fd()) {
            return;
        }
        if std::mem::take(&mut self.accept_at) > 0 {
            let _ = local.watch(listener.as_fd());
        }
        for _ in 0..ACCEPTS_MAX {
            let (socket, from) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if would_block(&error) => return,
                Err(_) => {
                    // Until then it must not keep the thread awake.
                    self.accept_at = now + ACCEPT_PAUSE_NS;
                    local.unwatch(listener.as_fd());
                    return;
                }
            };
            let is_invited = engine.has_invited(from.ip().to_canonical());
            let strangers = || self.unverified.iter().filter(|own| !own.is_invited);
            if !is_invited && strangers().count() >= STRANGERS_MAX {
                // One that says nothing makes room: they are in the order of their arrival.
                if let Some(oldest) = self.unverified.iter().position(|own| !own.is_invited) {
                    local.unwatch(self.unverified.remove(oldest).socket.as_fd());
                    self.counters.refused += 1;
                }
            }
            let is_usable = self.unverified.len() < UNVERIFIED_MAX
                && socket.set_nonblocking(true).is_ok()
                && local.watch(socket.as_fd()).is_ok();
            if !is_usable {
                self.counters.refused += 1;
                continue;
            }
            let until = now + VERIFY_TIMEOUT_NS;
            let preface = [0; PREFACE];
            self.unverified.push(Unverified { socket, from, is_invited, preface, filled: 0, until });
        }
    }

    /// Reads a new connection's preface. Answers and opens the stream if it has an invited peer's secret and address. A connection that stands
    /// in for UDP becomes a caller.
    fn verify(&mut self, engine: &mut Engine, local: &Local, seal: &Sealing, now: u64, place: usize) {
        let own = &mut self.unverified[place];
        let heard = match own.socket.read(&mut own.preface[own.filled..]) {
            Ok(0) => Err(Closed),
            Ok(count) => {
                own.filled += count;
                Ok(own.filled == PREFACE)
            }
            Err(error) if would_block(&error) && now < own.until => Ok(false),
            Err(_) => Err(Closed),
        };
        if matches!(heard, Ok(false)) {
            return;
        }
        let Unverified { mut socket, from, preface, .. } = self.unverified.remove(place);
        let (magic, shown) = preface.split_at(MAGIC.len());
        let shown: Option<&[u8; HALF]> = shown.first_chunk().filter(|_| heard.is_ok());
        if let Some(secret) = shown.filter(|_| magic == bounce::MAGIC) {
            local.unwatch(socket.as_fd());
            return self.callers.push((socket, from, *secret));
        }
        let shown = shown.filter(|_| magic == MAGIC && self.incoming.len() < STREAMS_MAX);
        let invited = shown.and_then(|shown| engine.invited_to_stream(shown));
        let is_peer = |invited: &(SocketAddr, [u8; HALF])| {
            invited.0.ip().to_canonical() == from.ip().to_canonical() && seal.is_clear(invited.0)
        };
        let proven = invited.filter(is_peer).filter(|(_, proof)| {
            // The send buffer of a new connection has room for it.
            set_timeouts(&socket, self.user_timeout).is_ok()
                && socket.write(proof).is_ok_and(|sent| sent == HALF)
        });
        let Some((address, _)) = proven else {
            self.counters.refused += 1;
            return local.unwatch(socket.as_fd());
        };
        // The peer has closed its previous stream.
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

    /// Closes a stream. `at_once`: resets it, so that the kernel discards unsent bytes.
    fn end_outgoing(&mut self, engine: &mut Engine, local: &Local, place: usize, at_once: bool) {
        let Outgoing { address, socket, is_open, was_counted, .. } = self.outgoing.swap_remove(place);
        local.unwatch(socket.as_fd());
        // A forked child may hold a copy of the descriptor, so closing it is not enough. Fails only if the connection is closed already.
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
    /// Reads once and gives the engine the complete packets. Returns their number. One read of 256 KiB at most: more would delay
    /// acknowledgements.
    fn receive(&mut self, engine: &mut Engine, now: u64) -> Result<u64, Closed> {
        let count = match self.socket.read(self.records.room()) {
            Ok(0) => return Err(Closed),
            Ok(count) => count,
            Err(error) if would_block(&error) => return Ok(0),
            Err(_) => return Err(Closed),
        };
        self.records.add(count);
        let mut packets = 0;
        while let Some(packet) = self.records.next_packet().map_err(|TooLong| Closed)? {
            if !engine.receive_stream(now, self.address, packet) {
                return Err(Closed);
            }
            packets += 1;
        }
        Ok(packets)
    }
}

fn is_readable(descriptor: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}
