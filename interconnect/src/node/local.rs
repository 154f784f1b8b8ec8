//! Peers on this host: the process's connection to the daemon, and its rings.
//!
//! The engine says by which way each channel's packets travel. A channel begins on the socket. When the daemon gives a ring for it, the
//! ring takes its packets; when the ring breaks or the daemon goes, they take the socket again, and the engine repeats what was lost. A
//! packet that finds a lane full takes the socket, too.
//!
//! A large write into a region whose memory the peer has lent to this process takes one copy, straight there; the packet then tells only
//! that the bytes are in place. The first write to a region asks for its memory, and takes the lane meanwhile.
//!
//! Threads sleep on one descriptor (`inbox`) for the socket, the daemon and the bells. A ring is armed before each sleep, so that
//! the peer rings only if somebody sleeps.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::event::epoll;

use super::pages::Pages;
use crate::closer::close_or_leak;
use crate::meeting::{Guest, Heard, RINGS_OF_PROCESS_MAX, Token};
use crate::proto::{Departure, Engine, Key, Outgoing, Peer, Shape, Span};
use crate::ring::{Bell, Ring, Silent, View, WINDOW_BYTES, Word};
use crate::seal::Sealing;

/// Pause between two attempts to reach the daemon, which may not be there.
const CONNECT_EVERY_NS: u64 = 500_000_000;
/// Interval at which the daemon's messages are read while the process is busy.
const HEAR_EVERY_NS: u64 = 1_000_000;
/// The same while an answer about a peer is awaited.
const HEAR_SOON_NS: u64 = 5_000;
/// Interval at which the bells of busy rings are checked for the end of the peer.
const LISTEN_EVERY_NS: u64 = 10_000_000;
/// Interval at which the socket is read while rings are in use: reading it costs a system call.
const SOCKET_EVERY_NS: u64 = 5_000;
/// Number of packets that are taken from a ring before the engine answers: few, so that the peer gets room in the lane early.
const PACKETS: usize = 4;
/// Maximum number of words of a peer that are heard at a time.
const WORDS: usize = 64;
/// Maximum number of regions of a peer that are asked for. Writes into further ones take the lane.
const VIEWS_MAX: usize = 256;
/// Maximum number of requests for rings that the daemon has not answered.
const PENDING_MAX: usize = 64;

/// How the packets to a peer travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// By the UDP socket.
    Udp,
    /// Through memory shared with a process of this host.
    SameHost,
    /// By the engine and the UDP socket of this host's daemon.
    Daemon,
    /// By the UDP socket, sealed.
    Sealed,
    /// In raw Ethernet frames.
    Ethernet,
    /// From a virtual machine, by the engine of its host's daemon.
    Vm,
    /// By a TCP connection, because UDP does not reach the peer.
    Bounce,
}

impl std::fmt::Display for Attachment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Attachment::Udp => "udp",
            Attachment::Sealed => "sealed",
            Attachment::SameHost => "same-host",
            Attachment::Daemon => "daemon",
            Attachment::Ethernet => "ethernet",
            Attachment::Vm => "vm",
            Attachment::Bounce => "bounce",
        })
    }
}

/// Counters of the rings to processes of this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingCounters {
    /// Rings in use.
    pub rings: u64,
    /// Rings opened since the start of the node.
    pub opened: u64,
    /// Rings that ended: the peer or the daemon has gone, or the daemon does not allow them any more.
    pub ended: u64,
    /// Rings that the peer damaged.
    pub broken: u64,
    /// Packets sent through rings.
    pub packets_out: u64,
    /// Packets received through rings.
    pub packets_in: u64,
    /// Packets that took the socket because the lane was full.
    pub full: u64,
    /// Writes whose bytes were copied straight into the peer's memory.
    pub placed: u64,
}

/// A ring, and the peer at its other end.
struct Attached {
    address: SocketAddr,
    ring: Ring,
    /// Regions of the peer, by endpoint and key, that this process has asked for.
    views: HashMap<(u16, Key), Asked>,
}

/// State of a region of a peer.
enum Asked {
    /// The peer has not answered yet.
    Waiting,
    /// The peer does not give it away.
    Refused,
    Mapped(View),
}

/// What `receive` found.
#[derive(Clone, Copy, Default)]
pub(super) struct Taken {
    /// Packets arrived.
    pub(super) arrived: bool,
    /// A bell rang: the caller has silenced it, and threads that sleep may not have noticed.
    pub(super) heard: bool,
}

/// Why a ring is not used any more.
enum End {
    Ended,
    Broken,
}

pub(super) struct Local {
    /// Name of the daemon's socket; `None`: rings are switched off.
    meeting: Option<String>,
    guest: Option<Guest>,
    connect_at: u64,
    hear_at: u64,
    listen_at: u64,
    socket_at: u64,
    rings: Vec<Attached>,
    /// Memory of the regions that peers may map, with the endpoints they are registered with.
    regions: HashMap<Key, Arc<Pages>>,
    /// Requests for rings: the secret, and the peer that has invited this process.
    pending: Vec<(Token, SocketAddr)>,
    inbox: OwnedFd,
    /// Number of closed channels when rings without a channel were last looked for.
    closed: u64,
    counters: RingCounters,
}

impl Local {
    /// Connects to the daemon, so that the first packet is not sent in clear text by mistake.
    pub(super) fn new(
        meeting: Option<String>,
        socket: BorrowedFd<'_>,
        seal: &mut Sealing,
    ) -> io::Result<Self> {
        let inbox = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        watch(&inbox, socket)?;
        let mut local = Self {
            meeting,
            guest: None,
            connect_at: 0,
            hear_at: 0,
            listen_at: 0,
            socket_at: 0,
            rings: vec![],
            regions: HashMap::new(),
            pending: vec![],
            inbox,
            closed: 0,
            counters: RingCounters::default(),
        };
        local.connect(0, seal);
        Ok(local)
    }

    /// Descriptor that is readable when packets arrive.
    pub(super) fn inbox(&self) -> RawFd {
        self.inbox.as_raw_fd()
    }

    /// Adds a connection to the epoll set on which threads sleep.
    pub(super) fn watch(&self, connection: BorrowedFd<'_>) -> io::Result<()> {
        watch(&self.inbox, connection)
    }

    /// Also watches a connection for room in its send buffer, or no longer.
    pub(super) fn watch_room(&self, connection: BorrowedFd<'_>, is_wanted: bool) -> io::Result<()> {
        let out = if is_wanted { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
        let data = epoll::EventData::new_u64(0);
        Ok(epoll::modify(&self.inbox, connection, data, epoll::EventFlags::IN | out)?)
    }

    /// Removes a connection from the epoll set.
    pub(super) fn unwatch(&self, connection: BorrowedFd<'_>) {
        unwatch(&self.inbox, connection);
    }

    pub(super) fn counters(&self) -> RingCounters {
        RingCounters { rings: self.rings.len() as u64, ..self.counters }
    }

    pub(super) fn has_rings(&self) -> bool {
        !self.rings.is_empty()
    }

    /// Whether the socket is to be read now. While rings are in use it is read less often.
    pub(super) fn is_socket_turn(&mut self, now: u64) -> bool {
        if !self.rings.is_empty() && now < self.socket_at {
            return false;
        }
        self.socket_at = now + SOCKET_EVERY_NS;
        true
    }

    /// Sends a packet through the ring to its peer. Returns false if it has to take the socket.
    pub(super) fn send(&mut self, engine: &mut Engine, packet: &Departure) -> bool {
        let Some(place) = self.place_of(packet.to) else { return false };
        if packet.is_handshake() {
            return false;
        }
        match self.rings[place].ring.send(packet.header.as_bytes(), packet.payload) {
            Ok(true) => {
                self.counters.packets_out += 1;
                return true;
            }
            Ok(false) => self.counters.full += 1,
            Err(_) => self.end(engine, place, End::Broken),
        }
        false
    }

    fn place_of(&self, address: SocketAddr) -> Option<usize> {
        self.rings.iter().position(|attached| attached.address == address)
    }

    /// Copies the bytes of a large write straight into the peer's memory, if it is mapped here. Returns the operation that remains.
    pub(super) fn write(&mut self, engine: &Engine, peer: Peer, out: &Outgoing) -> Option<Outgoing> {
        let Shape::Write { key, at } = out.shape else { return None };
        let len =
            u32::try_from(out.span.len()).ok().filter(|len| *len as usize > engine.config().eager_max)?;
        let place = self.place_of(peer.address)?;
        let Attached { ring, views, .. } = &mut self.rings[place];
        match views.get(&(peer.endpoint, key)) {
            Some(Asked::Mapped(view)) if view.write(at, out.span) => {
                self.counters.placed += 1;
                let shape = Shape::Placed { key, at, len };
                Some(Outgoing { shape, span: Span::EMPTY, is_buffered: false, ..*out })
            }
            None if views.len() < VIEWS_MAX => {
                ring.say(&Word::Ask(peer.endpoint, key));
                views.insert((peer.endpoint, key), Asked::Waiting);
                None
            }
            _ => None,
        }
    }

    /// Peers that know the key of a region may map its memory.
    pub(super) fn offer(&mut self, key: Key, pages: Arc<Pages>) {
        self.regions.insert(key, pages);
    }

    /// Takes a region's memory back from the peers that have mapped it.
    pub(super) fn take_back(&mut self, key: Key) -> io::Result<()> {
        self.regions.remove(&key).map_or(Ok(()), |pages| pages.take_back())
    }

    /// Takes back the memory of all regions that are not registered any more.
    pub(super) fn take_back_closed(&mut self, engine: &Engine) {
        let closed: Vec<Key> =
            self.regions.keys().filter(|key| !engine.is_registered(**key)).copied().collect();
        for key in closed {
            // Without memory for a copy the bytes are lost, and nobody is there to be told.
            let _ = self.take_back(key);
        }
    }

    /// Hears the words of a peer. Returns false if it has closed its end.
    fn listen(&mut self, engine: &Engine, place: usize) -> bool {
        let Attached { ring, views, .. } = &mut self.rings[place];
        for _ in 0..WORDS {
            match ring.hear() {
                Err(Silent) => return false,
                Ok(None) => return true,
                Ok(Some(Word::Ring)) => {}
                Ok(Some(Word::Ask(endpoint, key))) => {
                    let pages = self.regions.get(&key).filter(|_| engine.may_share(endpoint, key));
                    let file = pages.and_then(|pages| pages.lend());
                    ring.say(&file.map_or(Word::Refuse(key), |file| Word::Grant(key, file)));
                }
                Ok(Some(Word::Refuse(key))) => answer(views, key, Asked::Refused),
                Ok(Some(Word::Grant(key, memory))) => {
                    let is_awaited = views.iter().any(|((_, own), asked)| *own == key && asked.is_waiting());
                    let view = if is_awaited { View::new(memory) } else { Err(memory) };
                    let view = view.map_err(close_or_leak);
                    if view.is_err() && !is_awaited {
                        return false;
                    }
                    answer(views, key, view.map_or(Asked::Refused, Asked::Mapped));
                }
            }
        }
        true
    }

    /// Receives packets from all rings.
    pub(super) fn receive(&mut self, engine: &mut Engine, now: u64) -> Taken {
        let mut taken = Taken::default();
        for place in (0..self.rings.len()).rev() {
            if self.rings[place].ring.is_rung() {
                taken.heard = true;
                if !self.listen(engine, place) {
                    self.finish(engine, now, place);
                    continue;
                }
            }
            match take(engine, now, &mut self.rings[place], PACKETS) {
                Ok(0) => {}
                Ok(count) => {
                    taken.arrived = true;
                    self.counters.packets_in += count;
                }
                Err(()) => self.end(engine, place, End::Broken),
            }
        }
        taken
    }

    /// Reaches for the daemon, hears its messages, and ends rings whose peer or channel has gone.
    pub(super) fn tend(&mut self, engine: &mut Engine, seal: &mut Sealing, now: u64) {
        if self.closed != engine.closed() {
            self.closed = engine.closed();
            for place in (0..self.rings.len()).rev() {
                if !engine.is_local(self.rings[place].address) {
                    self.end(engine, place, End::Ended);
                }
            }
        }
        if now >= self.hear_at || seal.is_waiting() && now + HEAR_EVERY_NS >= self.hear_at + HEAR_SOON_NS {
            self.hear_at = now + HEAR_EVERY_NS;
            self.connect(now, seal);
            self.hear(engine, seal, now);
        }
        if now >= self.listen_at {
            self.listen_at = now + LISTEN_EVERY_NS;
            for place in (0..self.rings.len()).rev() {
                if !self.listen(engine, place) {
                    self.finish(engine, now, place);
                }
            }
        }
        while let Some((address, invite)) = engine.next_invite() {
            let Some(guest) = &self.guest else { continue };
            let has_room = self.rings.len() < RINGS_OF_PROCESS_MAX && self.pending.len() < PENDING_MAX;
            let is_asked = self.pending.iter().any(|(secret, _)| *secret == invite.secret);
            if has_room && !is_asked && guest.join(invite.name, invite.secret) {
                self.pending.push((invite.secret, address));
            }
        }
    }

    /// Asks all peers to ring. Returns true if packets are there already, so that the caller must not sleep.
    pub(super) fn arm(&mut self) -> bool {
        let mut is_busy = false;
        for attached in &mut self.rings {
            is_busy |= attached.ring.arm();
        }
        is_busy
    }

    /// Writes into the memory of the first ring, as a hostile peer could.
    #[cfg(test)]
    pub(super) fn scribble(&mut self, offset: usize, bytes: &[u8]) {
        self.rings[0].ring.scribble(offset, bytes);
    }

    /// Writes into a region of the first peer as that peer could not prevent: by the memory that it has lent.
    #[cfg(test)]
    pub(super) fn write_lent(&mut self, key: Key, bytes: Span) -> bool {
        let asked = self.rings[0].views.iter().find(|((_, own), _)| *own == key);
        matches!(asked, Some((_, Asked::Mapped(view))) if view.write(0, bytes))
    }

    fn connect(&mut self, now: u64, seal: &mut Sealing) {
        if self.guest.is_some() || now < self.connect_at {
            return;
        }
        self.connect_at = now + CONNECT_EVERY_NS;
        let guest = match self.meeting.as_deref().map(Guest::connect) {
            // It is there, and too busy for another process.
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                seal.connected();
                None
            }
            guest => guest.and_then(Result::ok),
        };
        self.guest = guest.filter(|guest| watch(&self.inbox, guest.descriptor()).is_ok());
        if self.guest.is_some() {
            seal.connected();
            seal.renew_sessions(now);
        }
    }

    /// Passes on the questions about peers.
    pub(super) fn ask(&mut self, seal: &mut Sealing) {
        while let Some(ask) = seal.next_ask() {
            if !self.guest.as_ref().is_some_and(|guest| guest.say(ask)) {
                return seal.unheard();
            }
        }
    }

    fn hear(&mut self, engine: &mut Engine, seal: &mut Sealing, now: u64) {
        while let Some(guest) = &self.guest {
            match guest.receive() {
                Ok(Some(Heard::Named(name))) => engine.set_name(Some(name)),
                Ok(Some(Heard::Absent(secret))) => self.pending.retain(|(own, _)| *own != secret),
                Ok(Some(Heard::Reached(peer, reach))) => seal.reached(now, peer, reach),
                Ok(Some(Heard::Keys(ticket, answer))) => seal.keys(now, ticket, answer),
                // Answers to what only a node without an engine asks.
                Ok(Some(Heard::Attached { .. } | Heard::Declined(_))) => {}
                Ok(Some(Heard::Ring { side, secret, memory, bell })) => {
                    let invited = self.pending.iter().position(|(own, _)| *own == secret);
                    let address = match invited {
                        Some(place) => Some(self.pending.swap_remove(place).1),
                        None => engine.invited(&secret),
                    };
                    match address {
                        Some(address) => self.open(engine, address, Ring::open(memory, bell, side.into())),
                        None => drop(Bell::new(bell)),
                    }
                }
                Ok(None) => return,
                Err(_) => {
                    // Without the daemon nobody can say any more who may meet whom.
                    unwatch(&self.inbox, guest.descriptor());
                    self.guest = None;
                    self.connect_at = now + CONNECT_EVERY_NS;
                    self.pending.clear();
                    seal.disconnected();
                    engine.set_name(None);
                    (0..self.rings.len()).rev().for_each(|place| self.finish(engine, now, place));
                }
            }
        }
    }

    fn open(&mut self, engine: &mut Engine, address: SocketAddr, ring: io::Result<Ring>) {
        // Without address space the peer stays on the network.
        let Ok(ring) = ring else { return };
        let is_usable = self.rings.len() < RINGS_OF_PROCESS_MAX
            && !engine.is_local(address)
            && watch(&self.inbox, ring.bell()).is_ok();
        if is_usable && engine.set_local(address, Some(WINDOW_BYTES)) {
            self.rings.push(Attached { address, ring, views: HashMap::new() });
            self.counters.opened += 1;
        } else {
            unwatch(&self.inbox, ring.bell());
        }
    }

    /// Takes what the peer has sent before its end, then ends the ring.
    fn finish(&mut self, engine: &mut Engine, now: u64, place: usize) {
        // A peer that goes on writing is not waited for: a lane holds fewer than this many packets.
        let end = match take(engine, now, &mut self.rings[place], 1 << 15) {
            Ok(count) => {
                self.counters.packets_in += count;
                End::Ended
            }
            Err(()) => End::Broken,
        };
        self.end(engine, place, end);
    }

    fn end(&mut self, engine: &mut Engine, place: usize, end: End) {
        let Attached { address, ring, .. } = self.rings.swap_remove(place);
        unwatch(&self.inbox, ring.bell());
        engine.set_local(address, None);
        match end {
            End::Ended => self.counters.ended += 1,
            End::Broken => self.counters.broken += 1,
        }
    }
}

impl Asked {
    fn is_waiting(&self) -> bool {
        matches!(self, Asked::Waiting)
    }
}

/// A peer has answered for a region that this process waits for.
fn answer(views: &mut HashMap<(u16, Key), Asked>, key: Key, answer: Asked) {
    let waiting = views.iter_mut().find(|((_, own), asked)| *own == key && asked.is_waiting());
    if let Some((_, asked)) = waiting {
        *asked = answer;
    }
}

/// Gives packets of a ring to the engine, at most `most`. Returns their number, or an error if the ring is not to be used any more.
fn take(engine: &mut Engine, now: u64, from: &mut Attached, most: usize) -> Result<u64, ()> {
    let Attached { address, ring, .. } = from;
    for count in 0..most {
        let is_taken = match ring.receive() {
            Ok(None) => return Ok(count as u64),
            Ok(Some(arrived)) => engine.receive_local(now, *address, arrived.packet, arrived.placed),
            Err(_) => return Err(()),
        };
        ring.release();
        if !is_taken {
            return Err(());
        }
    }
    Ok(most as u64)
}

fn watch(inbox: &OwnedFd, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    Ok(epoll::add(inbox, descriptor, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?)
}

/// Closing a descriptor would not do while a child process holds a copy.
fn unwatch(inbox: &OwnedFd, descriptor: BorrowedFd<'_>) {
    // A descriptor that was never added is none the worse.
    let _ = epoll::delete(inbox, descriptor);
}
