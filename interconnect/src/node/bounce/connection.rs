//! A connection that stands in for UDP: its handshake, records, and what waits for room in the send buffer.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::net::sockopt as socket_options;
use rustix::net::{bind, connect_unspec};

use crate::node::local::Local;
use crate::node::records::Records;
use crate::node::tcp::{Closed, new_socket, set_timeouts, start_connect, would_block};
use crate::proto::Span;

/// First bytes that each side sends, also in probes.
pub(in crate::node) const MAGIC: [u8; 16] = *b"vnet-rdma-bounce";
/// Bytes of the secret that each side sends behind the magic.
pub(in crate::node) const SECRET: usize = 8;
const PREFACE: usize = MAGIC.len() + SECRET;
/// Deadline of the handshake at the connecting side.
const HANDSHAKE_NS: u64 = 2_000_000_000;
/// First pause between two probes; each doubles it, up to the longest.
const PROBE_EVERY_NS: u64 = 1_000_000_000;
const PROBE_EVERY_MAX_NS: u64 = 64_000_000_000;
/// How long UDP has to carry packets without a silence for the pauses to begin anew.
const STEADY_NS: u64 = PROBE_EVERY_MAX_NS;
/// Interval at which the peer is told that packets by UDP are not answered.
const NO_ANSWERS_EVERY_NS: u64 = 1_000_000_000;
/// Maximum number of consecutive packets that the engine does not accept: their sender guesses the channel's session number.
const UNKNOWN_MAX: u32 = 64;
/// Maximum number of bytes that wait for room in the send buffer.
const UNSENT_MAX: usize = 1 << 20;

pub(in crate::node) type Secret = [u8; SECRET];

/// A control record: one byte. Packets are longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Control {
    /// A probe has arrived by UDP.
    ProbeArrived = 1,
    /// Packets by UDP are not answered: take the connection, and probe again.
    NoAnswers = 2,
}

pub(super) struct Connection {
    pub(super) address: SocketAddr,
    socket: TcpStream,
    own: Secret,
    /// `None`: it has not arrived yet.
    peers: Option<Secret>,
    /// What has arrived of the peer's magic and secret.
    preface: [u8; PREFACE],
    filled: usize,
    records: Records,
    unsent: Vec<u8>,
    /// How much of `unsent` has been sent meanwhile.
    sent: usize,
    awaits_room: bool,
    /// Packets to the peer take UDP; the connection stands by.
    is_by_udp: bool,
    /// When a probe showed that last.
    returned_at: Option<u64>,
    /// When the peer was last told that packets by UDP are not answered.
    told_at: Option<u64>,
    /// The engine has accepted a packet of this connection.
    is_proven: bool,
    /// The peer has sent `Control::NoAnswers`.
    gets_no_answers: bool,
    /// Number of consecutive packets that the engine did not accept.
    unknown: u32,
    pub(super) probe_at: u64,
    pause: u64,
    /// Deadline of the handshake.
    pub(super) until: u64,
    /// When a packet arrived last that the engine accepted.
    pub(super) used_at: u64,
}

impl Connection {
    /// Starts a non-blocking connect from the node's own address and port.
    pub(super) fn connect(
        address: SocketAddr,
        own: SocketAddr,
        secret: Secret,
        (now, user_timeout): (u64, Duration),
    ) -> io::Result<Self> {
        let socket = new_socket(address)?;
        // The node listens at this port, and other connections have it, too.
        socket_options::set_socket_reuseport(&socket, true)?;
        socket_options::set_socket_reuseaddr(&socket, true)?;
        bind(&socket, &own)?;
        Self::new(start_connect(socket, address)?, address, (secret, None), (now, user_timeout))
    }

    /// A peer's connection. `secrets`: the node's own, and the peer's.
    pub(super) fn accepted(
        socket: TcpStream,
        address: SocketAddr,
        (own, peers): (Secret, Secret),
        times: (u64, Duration),
    ) -> io::Result<Self> {
        Self::new(socket, address, (own, Some(peers)), times)
    }

    fn new(
        socket: TcpStream,
        address: SocketAddr,
        (own, peers): (Secret, Option<Secret>),
        (now, user_timeout): (u64, Duration),
    ) -> io::Result<Self> {
        socket.set_nodelay(true)?;
        set_timeouts(&socket, user_timeout)?;
        // A connection that waited for its last packets (TIME_WAIT) would keep the node from connecting again: the ports are the same.
        socket_options::set_socket_linger(&socket, Some(Duration::ZERO))?;
        Ok(Self {
            address,
            socket,
            own,
            peers,
            preface: [0; PREFACE],
            filled: 0,
            records: Records::default(),
            unsent: [&MAGIC[..], &own].concat(),
            sent: 0,
            awaits_room: true,
            is_by_udp: false,
            returned_at: None,
            told_at: None,
            is_proven: false,
            gets_no_answers: false,
            unknown: 0,
            probe_at: now,
            pause: PROBE_EVERY_NS,
            until: now + HANDSHAKE_NS,
            used_at: now,
        })
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether the peer has sent magic and secret.
    pub(super) fn is_open(&self) -> bool {
        self.peers.is_some()
    }

    /// Whether packets to the peer take this connection.
    pub(super) fn carries(&self) -> bool {
        self.is_open() && !self.is_by_udp
    }

    pub(super) fn is_of(&self, secret: &[u8]) -> bool {
        self.peers.is_some_and(|peers| peers == secret)
    }

    pub(super) fn is_by_udp(&self) -> bool {
        self.is_by_udp
    }

    /// The peer is heard by UDP: the connection waits for a silence.
    pub(super) fn stand_by(&mut self) {
        self.is_by_udp = true;
    }

    /// UDP reaches the peer. Returns whether that is news.
    pub(super) fn return_to_udp(&mut self, now: u64) -> bool {
        self.returned_at = Some(now);
        !std::mem::replace(&mut self.is_by_udp, true)
    }

    /// Packets by UDP are not answered. If probes have just said that they arrive, large ones may not: the next probe waits for its pause.
    pub(super) fn leave_udp(&mut self, now: u64) {
        if !std::mem::replace(&mut self.is_by_udp, false) {
            return;
        }
        if self.returned_at.is_some_and(|at| now.saturating_sub(at) < STEADY_NS) {
            self.probe_at = now + self.pause;
        } else {
            (self.probe_at, self.pause) = (now, PROBE_EVERY_NS);
        }
    }

    /// Sends NoAnswers: this node's UDP packets get no answers, perhaps because the answers do not arrive, so the peer is to use TCP, too.
    /// At most once a second.
    pub(super) fn send_no_answers(&mut self, now: u64) {
        if self.told_at.is_none_or(|at| now.saturating_sub(at) >= NO_ANSWERS_EVERY_NS) {
            self.told_at = Some(now);
            self.send_control(Control::NoAnswers);
        }
    }

    /// Counts packets that have arrived, and those of them that the engine has accepted. Returns false if it has accepted none of too many.
    pub(super) fn count(&mut self, now: u64, packets: u32, accepted: u32) -> bool {
        if accepted > 0 {
            (self.is_proven, self.unknown, self.used_at) = (true, 0, now);
        } else {
            self.unknown = self.unknown.saturating_add(packets);
        }
        self.unknown <= UNKNOWN_MAX
    }

    /// The peer gets no answers by UDP, it says.
    pub(super) fn hear_no_answers(&mut self) {
        self.gets_no_answers = true;
    }

    /// Whether the peer has said so since the last call, and the engine has accepted a packet of the connection.
    pub(super) fn takes_no_answers(&mut self) -> bool {
        self.is_proven && std::mem::take(&mut self.gets_no_answers)
    }

    /// The node probes now. Returns its secret.
    pub(super) fn probed(&mut self, now: u64) -> Secret {
        self.probe_at = now + self.pause;
        self.pause = (2 * self.pause).min(PROBE_EVERY_MAX_NS);
        self.own
    }

    /// Queues a packet. Returns false if too much is queued already.
    pub(super) fn queue(&mut self, head: &[u8], payload: Span) -> bool {
        let bytes = head.len() + payload.len();
        if !self.has_room(bytes) {
            return false;
        }
        self.unsent.extend_from_slice(&(bytes as u32).to_be_bytes());
        self.unsent.extend_from_slice(head);
        payload.read_to(&mut self.unsent);
        true
    }

    /// Whether records of so many bytes can be queued. Sends first if they cannot.
    pub(super) fn has_room(&mut self, bytes: usize) -> bool {
        let fits = |own: &Self| own.unsent.len() - own.sent + bytes <= UNSENT_MAX;
        // The next flush meets the error again.
        fits(self) || self.write().is_ok() && fits(self)
    }

    /// Like `queue`, for a packet of whole bytes.
    pub(super) fn queue_bytes(&mut self, packet: &[u8]) -> bool {
        self.queue(packet, Span::EMPTY)
    }

    pub(super) fn send_control(&mut self, control: Control) {
        // One that finds no room is repeated: after the next probe, or in a second.
        self.queue_bytes(&[control as u8]);
    }

    /// Sends what is queued, as far as the send buffer has room.
    pub(super) fn flush(&mut self, local: &Local) -> Result<(), Closed> {
        if self.unsent.is_empty() {
            return Ok(());
        }
        if !self.is_open() && !matches!(self.socket.take_error(), Ok(None)) {
            return Err(Closed);
        }
        let is_empty = self.write()?;
        self.await_room(local, !is_empty)
    }

    /// Writes what is queued. Returns false if the send buffer is full before.
    fn write(&mut self) -> Result<bool, Closed> {
        while self.sent < self.unsent.len() {
            match (&self.socket).write(&self.unsent[self.sent..]) {
                Ok(0) => return Err(Closed),
                Ok(sent) => self.sent += sent,
                Err(error) if would_block(&error) => {
                    // The rest is moved when that is less than what was sent.
                    if self.sent > self.unsent.len() / 2 {
                        self.unsent.drain(..std::mem::take(&mut self.sent));
                    }
                    return Ok(false);
                }
                Err(_) => return Err(Closed),
            }
        }
        self.unsent.clear();
        self.sent = 0;
        Ok(true)
    }

    fn await_room(&mut self, local: &Local, is_wanted: bool) -> Result<(), Closed> {
        if self.awaits_room != is_wanted {
            self.awaits_room = is_wanted;
            local.watch_room(self.socket.as_fd(), is_wanted).map_err(|_| Closed)?;
        }
        Ok(())
    }

    /// Reads once, and gives each complete packet to `take`: 256 KiB at most, more would delay acknowledgements. Returns the
    /// last control record that was read.
    pub(super) fn receive(&mut self, mut take: impl FnMut(&mut [u8])) -> Result<Option<Control>, Closed> {
        if !self.is_open() && !self.read_preface()? {
            return Ok(None);
        }
        let Some(count) = read(&mut self.socket, self.records.room())? else { return Ok(None) };
        self.records.add(count);
        let mut control = None;
        while let Some(packet) = self.records.next_packet().map_err(|_| Closed)? {
            match packet {
                [1] => control = Some(Control::ProbeArrived),
                [2] => control = Some(Control::NoAnswers),
                _ => take(packet),
            }
        }
        Ok(control)
    }

    /// Reads the peer's magic and secret. Returns true once they are there.
    fn read_preface(&mut self) -> Result<bool, Closed> {
        let Some(count) = read(&mut self.socket, &mut self.preface[self.filled..])? else { return Ok(false) };
        self.filled += count;
        if self.filled < PREFACE {
            return Ok(false);
        }
        let (magic, secret) = self.preface.split_at(MAGIC.len());
        self.peers = Some(*secret.first_chunk().filter(|_| magic == MAGIC).ok_or(Closed)?);
        Ok(true)
    }

    /// Sends. Returns whether bytes wait here, or for the acknowledgement of the peer's kernel.
    pub(super) fn has_unacknowledged(&mut self) -> bool {
        if !self.is_open() || self.write().is_err() {
            return false;
        }
        let mut bytes: libc::c_int = 0;
        // SAFETY: the kernel writes an int, which `bytes` is.
        let result =
            unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::TIOCOUTQ, std::ptr::from_mut(&mut bytes)) };
        !self.unsent.is_empty() || result == 0 && bytes > 0
    }

    /// Closes the connection at once, also if a forked child has a copy of its descriptor.
    pub(super) fn reset(self) {
        // Fails only if it is closed already.
        let _ = connect_unspec(&self.socket);
    }
}

/// Reads without blocking. `None`: nothing is there.
fn read(socket: &mut TcpStream, room: &mut [u8]) -> Result<Option<usize>, Closed> {
    match socket.read(room) {
        Ok(0) => Err(Closed),
        Ok(count) => Ok(Some(count)),
        Err(error) if would_block(&error) => Ok(None),
        Err(_) => Err(Closed),
    }
}
