//! How packets of a served process travel: by a UDP socket in its container, or by the interface of its virtual machine.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use super::udp_frame::MacAddress;
use super::udp_frame::{ETHERNET, Ends, Headers, UDP, headers_to, parse};
use crate::node::socket::{Received, Socket};
use crate::proto::Departure;
use crate::seal::{OVERHEAD, Session};

/// Largest super-frame's payload: with its headers, and those of a tunnel, it fits one IP packet.
const TRAIN_BYTES_MAX: usize = 64_900;
/// Packets of a super-frame.
const TRAIN_PACKETS_MAX: usize = 64;
/// Peers whose MAC addresses are known. Beyond, all are asked for again.
const NEIGHBOURS_MAX: usize = 4096;
/// How often the virtual machine is asked for the MAC address of one peer: until it is known, and afterwards.
const ASK_EVERY: Duration = Duration::from_millis(20);
const FRESH: Duration = Duration::from_secs(1);

/// A frame of a virtual machine's interface, with work that is left to the network card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestFrame {
    /// The frame.
    pub bytes: Vec<u8>,
    /// Offset at which the UDP header begins, if its checksum is partial; otherwise 0.
    pub partial_from: u16,
    /// The checksum need not be verified.
    pub is_verified: bool,
    /// Size of each datagram but the last, if the frame stands for several; otherwise 0.
    pub segment: u16,
    /// It was sent by the virtual machine itself, not received from the network.
    pub is_local: bool,
}

/// Counters of packets that the helper relays between two applications of one virtual machine: one with the process engine, one with the daemon's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RelayCounters {
    /// Packets that were relayed, in both directions.
    pub relayed: u64,
    /// Packets that were not relayed: too long, or beyond the rate limit.
    pub dropped: u64,
    /// Packets from the network that were dropped because their source address is one of the machine's own.
    pub spoofed: u64,
}

impl RelayCounters {
    pub(crate) fn count(&mut self, is_relayed: bool) {
        *(if is_relayed { &mut self.relayed } else { &mut self.dropped }) += 1;
    }
}

impl std::ops::AddAssign for RelayCounters {
    fn add_assign(&mut self, other: Self) {
        self.relayed += other.relayed;
        self.dropped += other.dropped;
        self.spoofed += other.spoofed;
    }
}

/// Sends and receives the datagrams of one UDP address in the name of a virtual machine.
pub trait Datagrams: Send {
    /// Sends a frame as if the machine had. Returns false if it is lost.
    fn send(&mut self, frame: GuestFrame) -> bool;

    /// Takes the next frame for the address.
    fn receive(&mut self) -> Option<GuestFrame>;

    /// Readable while frames wait.
    fn as_fd(&self) -> BorrowedFd<'_>;

    /// Bytes of frames that may wait.
    fn room(&self) -> usize;

    /// MTU of the interface.
    fn mtu(&self) -> usize;

    /// Whether another port of this guest is open at this address: its application has the daemon's engine, too.
    fn reaches(&self, address: SocketAddr) -> bool;
}

/// Sends control frames to the helper in the virtual machine.
pub(crate) trait ToHelper: Send {
    /// Asks for the MAC address of a peer.
    fn ask(&self, ip: IpAddr);

    /// Relays a datagram to an application of the machine with the process engine. Returns false if it is too long, or beyond the rate limit.
    fn relay(&self, to: SocketAddr, bytes: &[u8]) -> bool;

    /// Largest datagram that it relays, in bytes.
    fn relayed_max(&self) -> usize;

    /// Source MAC address of frames that it has relayed.
    fn relay_mac(&self) -> MacAddress;
}

/// MAC addresses of peers, as the virtual machine's kernel knows them. What arrives in frames is no source: whoever sends a datagram in a peer's
/// name would get what goes to it.
#[derive(Default)]
pub(crate) struct Neighbours {
    known: HashMap<IpAddr, (MacAddress, Instant)>,
    asked: HashMap<IpAddr, Instant>,
    /// Counters of relayed packets. Here, because the thread of guests and that of the engine count.
    pub(crate) relay: RelayCounters,
}

impl Neighbours {
    pub(crate) fn learn(&mut self, ip: IpAddr, mac: MacAddress, now: Instant) {
        if self.known.len() >= NEIGHBOURS_MAX && !self.known.contains_key(&ip) {
            self.known.clear();
        }
        self.known.insert(ip, (mac, now));
        self.asked.remove(&ip);
    }

    /// The MAC address of a peer, if it is known.
    pub(crate) fn known(&self, ip: IpAddr) -> Option<MacAddress> {
        self.known.get(&ip).map(|(mac, _)| *mac)
    }

    /// Whether to ask for this address now: it is not known, or it was told so long ago that it may have changed.
    fn asks(&mut self, ip: IpAddr, now: Instant) -> bool {
        let is_fresh = |(_, at): &(MacAddress, Instant)| now.saturating_duration_since(*at) < FRESH;
        if self.known.get(&ip).is_some_and(is_fresh) {
            return false;
        }
        if self.asked.len() >= NEIGHBOURS_MAX {
            self.asked.clear();
        }
        let pause = if self.known.contains_key(&ip) { FRESH } else { ASK_EVERY };
        let is_due = self.asked.get(&ip).is_none_or(|at| now.saturating_duration_since(*at) >= pause);
        if is_due {
            self.asked.insert(ip, now);
        }
        is_due
    }
}

/// The port of a process in a virtual machine.
pub(crate) struct GuestPort {
    datagrams: Box<dyn Datagrams>,
    address: SocketAddr,
    mac: MacAddress,
    neighbours: Arc<Mutex<Neighbours>>,
    helper: Box<dyn ToHelper>,
    train: Train,
    /// The frame that was received last.
    received: Vec<u8>,
}

/// Packets to one peer that leave as one super-frame.
#[derive(Default)]
struct Train {
    to: Option<SocketAddr>,
    /// Room for the headers, then the packets.
    bytes: Vec<u8>,
    segment: usize,
    packets: usize,
    is_closed: bool,
}

impl GuestPort {
    pub(crate) fn new(
        datagrams: Box<dyn Datagrams>,
        (address, mac): (SocketAddr, MacAddress),
        neighbours: Arc<Mutex<Neighbours>>,
        helper: Box<dyn ToHelper>,
    ) -> Self {
        Self { datagrams, address, mac, neighbours, helper, train: Train::default(), received: vec![] }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    fn receive(&mut self) -> Option<Received<'_>> {
        loop {
            let frame = self.datagrams.receive()?;
            let is_verified = frame.is_verified || frame.partial_from > 0;
            let Some(datagram) = parse(&frame.bytes, is_verified) else { continue };
            if datagram.to != self.address || !frame.is_local && self.is_spoofed(datagram.from.ip()) {
                continue;
            }
            self.received = frame.bytes;
            let bytes = &mut self.received[datagram.payload];
            let segment = if frame.segment > 0 { frame.segment.into() } else { bytes.len().max(1) };
            let (from, congestion) = (datagram.from, datagram.congestion);
            let is_relayed = frame.is_local && datagram.from_mac == self.helper.relay_mac();
            let reply_max = is_relayed.then(|| self.helper.relayed_max());
            return Some(Received { from, bytes, segment, congestion, reply_max });
        }
    }

    /// Whether a packet from the network has a spoofed source address: one of the machine's own. Counts it.
    fn is_spoofed(&self, from: IpAddr) -> bool {
        let mut neighbours = self.neighbours.lock();
        let is_spoofed = self.is_local(from, &neighbours);
        neighbours.relay.spoofed += u64::from(is_spoofed);
        is_spoofed
    }

    /// Whether this is a local address of the machine: the engine's own, or one whose neighbour is the machine itself.
    fn is_local(&self, ip: IpAddr, neighbours: &Neighbours) -> bool {
        ip == self.address.ip() || neighbours.known(ip) == Some(self.mac)
    }

    fn send(&mut self, packet: &Departure) {
        let (header, payload) = (packet.header.as_bytes(), packet.payload);
        let bytes = self.board(packet.to, header.len() + payload.len());
        bytes.extend_from_slice(header);
        payload.read_to(bytes);
    }

    fn send_sealed(&mut self, packet: &Departure, session: &mut Session) {
        let (header, payload) = (packet.header.as_bytes(), packet.payload);
        let bytes = self.board(packet.to, header.len() + payload.len() + OVERHEAD);
        session.seal(bytes, header, payload);
    }

    /// Sends a packet that joins no train.
    fn send_alone(&mut self, to: SocketAddr, packet: &[u8]) {
        self.flush();
        self.board(to, packet.len()).extend_from_slice(packet);
        self.flush();
    }

    /// Makes room for a packet of this length in the train, or in a new one. Returns where it is to be appended.
    fn board(&mut self, to: SocketAddr, len: usize) -> &mut Vec<u8> {
        let train = &self.train;
        let fits = train.to == Some(to)
            && !train.is_closed
            && len <= train.segment
            && train.packets < TRAIN_PACKETS_MAX
            && train.segment * train.packets + len <= TRAIN_BYTES_MAX;
        if !fits {
            self.flush();
            let train = &mut self.train;
            (train.to, train.segment) = (Some(to), len);
            train.bytes.resize(headers_to(to), 0);
        }
        let train = &mut self.train;
        train.packets += 1;
        train.is_closed = len < train.segment;
        &mut train.bytes
    }

    /// Sends the train. What cannot be sent counts as lost in the network.
    fn flush(&mut self) {
        let train = std::mem::take(&mut self.train);
        let Some(to) = train.to else { return };
        let (known, asks) = {
            let mut neighbours = self.neighbours.lock();
            (neighbours.known(to.ip()), neighbours.asks(to.ip(), Instant::now()))
        };
        if asks {
            self.helper.ask(to.ip());
        }
        let Some(to_mac) = known else { return };
        let (at, mut bytes) = (headers_to(to), train.bytes);
        if to_mac == self.mac && !self.datagrams.reaches(to) {
            for datagram in bytes[at..].chunks(train.segment.max(1)) {
                let is_relayed = self.helper.relay(to, datagram);
                self.neighbours.lock().relay.count(is_relayed);
            }
            return;
        }
        let ends = Ends { from: self.address, from_mac: self.mac, to, to_mac };
        let headers = Headers::new(&ends, bytes.len() - at);
        let is_too_long = at + train.segment > self.datagrams.mtu() + ETHERNET;
        let Some(headers) = headers.filter(|_| !is_too_long) else { return };
        bytes[..at].copy_from_slice(headers.as_bytes());
        let segment = if train.packets > 1 { train.segment as u16 } else { 0 };
        let partial_from = (at - UDP) as u16;
        self.datagrams.send(GuestFrame { bytes, partial_from, segment, ..GuestFrame::default() });
    }
}

/// The way of a process's packets.
pub(crate) enum Carrier {
    Socket(Box<Socket>),
    Guest(Box<GuestPort>),
}

impl Carrier {
    /// Address of the process. `None`: the kernel does not tell it.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        match self {
            Carrier::Socket(socket) => socket.address().ok(),
            Carrier::Guest(port) => Some(port.address),
        }
    }

    pub(super) fn receive(&mut self) -> Option<Received<'_>> {
        match self {
            Carrier::Socket(socket) => socket.receive(true),
            Carrier::Guest(port) => port.receive(),
        }
    }

    /// Queues a packet; `flush` sends the rest.
    pub(super) fn send(&mut self, packet: &Departure) {
        match self {
            Carrier::Socket(socket) => socket.send(packet),
            Carrier::Guest(port) => port.send(packet),
        }
    }

    /// Like `send`, but seals the packet.
    pub(super) fn send_sealed(&mut self, packet: &Departure, session: &mut Session) {
        match self {
            Carrier::Socket(socket) => socket.send_sealed(packet, session),
            Carrier::Guest(port) => port.send_sealed(packet, session),
        }
    }

    /// Sends a packet of whole bytes at once.
    pub(super) fn send_alone(&mut self, to: SocketAddr, packet: &[u8]) {
        match self {
            Carrier::Socket(socket) => socket.send_alone(to, packet),
            Carrier::Guest(port) => port.send_alone(to, packet),
        }
    }

    pub(super) fn flush(&mut self) {
        match self {
            Carrier::Socket(socket) => socket.flush(),
            Carrier::Guest(port) => port.flush(),
        }
    }

    /// Largest datagram that the way takes.
    pub(super) fn datagram_max(&self) -> usize {
        match self {
            Carrier::Socket(_) => 65_507,
            Carrier::Guest(port) => {
                let headers = headers_to(port.address) - ETHERNET;
                port.datagrams.mtu().saturating_sub(headers)
            }
        }
    }

    /// Largest datagram to a peer to which the process's kernel has a route for datagrams of `bytes`.
    pub(super) fn datagram_max_to(&self, peer: SocketAddr, bytes: usize) -> usize {
        let most = self.datagram_max();
        match self {
            // Only the guest's loopback device has a larger MTU than the interface. The helper may have to relay what goes to a local address.
            Carrier::Guest(port) if bytes > most || port.is_local(peer.ip(), &port.neighbours.lock()) => {
                bytes.min(port.helper.relayed_max())
            }
            _ => bytes.min(most),
        }
    }

    /// Counters of relayed packets.
    pub(super) fn relay_counters(&self) -> RelayCounters {
        match self {
            Carrier::Socket(_) => RelayCounters::default(),
            Carrier::Guest(port) => port.neighbours.lock().relay,
        }
    }

    /// Bytes of packets that may wait to be received.
    pub(super) fn receive_room(&self) -> usize {
        match self {
            Carrier::Socket(socket) => socket.receive_room(),
            Carrier::Guest(port) => port.datagrams.room() / 4,
        }
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Carrier::Socket(socket) => socket.as_fd(),
            Carrier::Guest(port) => port.datagrams.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_asked_for_until_it_is_known_and_then_once_a_second() {
        let (mut neighbours, start) = (Neighbours::default(), Instant::now());
        let ip: IpAddr = "10.0.0.2".parse().unwrap();
        let asked = |neighbours: &mut Neighbours, from: u64, to: u64| {
            (from..to).filter(|ms| neighbours.asks(ip, start + Duration::from_millis(*ms))).count()
        };
        assert_eq!(asked(&mut neighbours, 0, 100), 5);
        neighbours.learn(ip, [2; 6], start + Duration::from_millis(100));
        assert_eq!(asked(&mut neighbours, 100, 1_100), 0);
        assert_eq!(asked(&mut neighbours, 1_100, 3_100), 2);
        assert_eq!(neighbours.known(ip), Some([2; 6]), "until another is told");
        neighbours.learn(ip, [4; 6], start + Duration::from_millis(3_100));
        assert_eq!(neighbours.known(ip), Some([4; 6]));
    }
}
