//! Sealing: packets to peers behind sealed links are encrypted by the process engine, with keys that the daemons of both hosts derive.
//!
//! ```text
//!   daemon        opener                                     answerer         daemon
//!     |<-- REACH ----|                                           |               |
//!     |--- sealed -->|------------ OPEN (id, nonce) ------------>|---- KEY ----->|
//!     |              |<--- AGREE (both ids, epoch, nonce) -------|<--- KEYS -----|
//!     |<--- KEY -----|                                           |               |
//!     |---- KEYS --->|------------ sealed packets -------------->|               |
//! ```
//!
//! Both daemons have the secret of the link between them (docs/security.md), and derive the keys of a [`session`] from it: for two addresses and
//! ports, and the nonces of both engines. A daemon gives them only to a process of the container that has the address. The link's own keys never
//! enter a container, and a session's keys serve nobody else.
//!
//! [`Sealing`] is a state machine without sockets and clocks. It is told which packets are to depart and which arrive, and what the daemon says. It
//! says which packets are sealed with which session, and has questions to the daemon and control packets to send. It has no timers: while
//! there are no keys, packets are lost, and the protocol repeats them; each of them may repeat OPEN.
//!
//! On a host without a daemon, or whose links are all clear, packets are left as they are.
//!
//! Packets in raw Ethernet frames are never sealed: `permit.rs` decides whether they may leave.

mod counters;
#[cfg(any(test, feature = "test-util"))]
pub mod fuzz;
mod handshake;
mod parts;
mod peer;
mod permit;
mod session;
pub mod wire;

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;

use chacha20::ChaCha20Rng;
use chacha20::rand_core::SeedableRng;

use crate::meeting::{Message, Question, Reach, Role};
use crate::proto::Span;
pub use counters::SealCounters;
use parts::{Parts, Put};
use peer::{Known, Peer};
use permit::Permit;
pub(crate) use permit::{FRAMES_REFUSED, Permission};
use session::Shut;
pub(crate) use session::{Session, sealed_in_parts};
pub use wire::OVERHEAD;
use wire::{Control, HEADER, Head};

/// Maximum number of questions that wait for the daemon.
const ASKS_MAX: usize = 128;
/// Interval at which the daemon is asked again how a peer is reached, while packets go there in clear text.
const LOOK_AGAIN_NS: u64 = 60_000_000_000;
/// The same if there is a reason to ask, such as a peer that takes only sealed packets.
const DOUBT_NS: u64 = 1_000_000_000;
/// Interval at which a peer is told that it has to seal.
const TELL_NS: u64 = 100_000_000;
/// Interval at which unknown addresses are attended to.
const STRANGER_NS: u64 = 1_000_000;
/// Daemons that end the connection when asked, before this process believes that they cannot answer.
const STRIKES: u32 = 2;

/// Bounds of a node's memory.
#[derive(Clone, Copy)]
struct Bounds {
    /// Maximum number of peers; beyond, the one that was used least recently is forgotten.
    peers: usize,
    /// Maximum number of packets to one peer that wait for the daemon's answer.
    held: usize,
    /// Maximum number of packets of which some parts have arrived, each of 16 KiB.
    parted: usize,
}

const BOUNDS: Bounds = Bounds { peers: 4096, held: 64, parted: 64 };
/// Bounds of a process that the daemon serves: it may be hostile, and the memory is the daemon's.
const BOUNDS_SERVED: Bounds = Bounds { peers: 1024, held: 8, parted: 16 };

/// What becomes of a packet to send.
pub(crate) enum Way<'a> {
    /// It is sent as it is.
    Clear,
    /// It is sealed.
    Sealed(&'a mut Session),
    /// It waits, or is lost.
    Held,
}

/// Time from which on the next unknown address is attended to.
#[derive(Default)]
struct Limit(u64);

impl Limit {
    fn takes(&mut self, now: u64) -> bool {
        let is_due = now >= self.0;
        if is_due {
            self.0 = now + STRANGER_NS;
        }
        is_due
    }
}

/// Lines for the user: what keeps packets from being sent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Note {
    Refused(Reach),
    Silent,
    Wanted,
    /// Raw Ethernet is refused.
    Frames,
}

/// All sessions of a node.
pub(crate) struct Sealing {
    /// The user wants clear text.
    is_off: bool,
    /// A daemon listens, or has listened, so that links may be sealed.
    has_daemon: bool,
    /// It has answered a question.
    has_answered: bool,
    /// Questions of this connection without an answer, and connections that ended with such ones.
    unanswered: u32,
    strikes: u32,
    random: ChaCha20Rng,
    own: SocketAddr,
    bounds: Bounds,
    /// Packets leave in raw Ethernet frames, which nobody seals.
    permit: Option<Permit>,
    peers: HashMap<SocketAddr, Peer>,
    parts: Parts,
    /// Requests for keys that the daemon has not answered.
    tickets: VecDeque<(u32, SocketAddr, Role)>,
    ticket: u32,
    asks: VecDeque<Message>,
    packets: VecDeque<(SocketAddr, Vec<u8>)>,
    /// Peers with a new session.
    ready: Vec<SocketAddr>,
    /// Destination of the last packet in clear text, and until when it needs no check.
    clear: Option<(SocketAddr, u64)>,
    /// No link of this host was sealed when the daemon was asked last, and until when it need not be asked again.
    is_all_clear: bool,
    look_at: u64,
    /// A peer is behind a sealed link.
    has_sealed: bool,
    /// Unknown addresses that were told to seal, and those that were answered. They may be forged.
    strangers_told: Limit,
    strangers_answered: Limit,
    said: HashSet<Note>,
    notes: Vec<String>,
    counters: SealCounters,
}

impl Sealing {
    /// Sealing of a node at this address. A random `seed` makes nonces that no other node has.
    pub(crate) fn new(own: SocketAddr, is_off: bool, seed: [u8; 32]) -> Self {
        Self {
            is_off,
            has_daemon: false,
            has_answered: false,
            unanswered: 0,
            strikes: 0,
            random: ChaCha20Rng::from_seed(seed),
            own,
            bounds: BOUNDS,
            permit: None,
            peers: HashMap::new(),
            parts: Parts::new(BOUNDS.parted),
            tickets: VecDeque::new(),
            ticket: 0,
            asks: VecDeque::new(),
            packets: VecDeque::new(),
            ready: vec![],
            clear: None,
            is_all_clear: false,
            look_at: 0,
            has_sealed: false,
            strangers_told: Limit::default(),
            strangers_answered: Limit::default(),
            said: HashSet::new(),
            notes: vec![],
            counters: SealCounters::default(),
        }
    }

    /// The same for a process that the daemon serves.
    pub(crate) fn of_served(own: SocketAddr, is_off: bool, seed: [u8; 32]) -> Self {
        let parts = Parts::new(BOUNDS_SERVED.parted);
        Self { bounds: BOUNDS_SERVED, parts, ..Self::new(own, is_off, seed) }
    }

    /// The same for a node whose packets leave in raw Ethernet frames.
    pub(crate) fn of_frames(own: SocketAddr, is_off: bool, seed: [u8; 32]) -> Self {
        Self { permit: Some(Permit::default()), ..Self::new(own, is_off, seed) }
    }

    pub(crate) fn counters(&self) -> SealCounters {
        SealCounters { incomplete: self.parts.dropped, ..self.counters }
    }

    /// A daemon listens: from now on it is asked about every peer.
    pub(crate) fn connected(&mut self) {
        if self.is_off || self.strikes >= STRIKES {
            return;
        }
        self.has_daemon = true;
        (self.clear, self.look_at) = (None, 0);
        for peer in self.peers.values_mut() {
            peer.ask_again();
            peer.forget_sessions();
        }
        self.permit.iter_mut().for_each(Permit::ask_again);
    }

    /// Opens new sessions in place of those that a new daemon does not know: until then it drops the packets that the kernel of the peer's
    /// host sends.
    pub(crate) fn renew_sessions(&mut self, now: u64) {
        let is_forgotten = |peer: &Peer| peer.known == Known::Sealed && peer.has_forgotten();
        let peers = self.peers.iter().filter(|(_, peer)| is_forgotten(peer));
        let addresses: Vec<SocketAddr> = peers.map(|(address, _)| *address).collect();
        addresses.into_iter().for_each(|address| self.open(now, address));
    }

    /// The daemon has ended the connection. Sessions stay.
    pub(crate) fn disconnected(&mut self) {
        self.asks.clear();
        self.tickets.clear();
        self.forget_questions();
        if std::mem::take(&mut self.unanswered) == 0 || self.has_answered {
            return;
        }
        self.strikes += 1;
        if self.strikes >= STRIKES {
            // An older daemon, which does not know the question.
            self.has_daemon = false;
            self.release_all();
        }
    }

    fn release_all(&mut self) {
        for (address, peer) in self.peers.drain() {
            self.packets.extend(peer.held.into_iter().map(|packet| (address, packet)));
        }
    }

    /// Questions did not reach the daemon. They are asked again when there is a reason.
    pub(crate) fn unheard(&mut self) {
        self.asks.clear();
        self.tickets.clear();
        self.unanswered = 0;
        self.forget_questions();
    }

    /// Nobody will answer what was asked.
    fn forget_questions(&mut self) {
        self.peers.values_mut().for_each(Peer::ask_again);
        self.permit.iter_mut().for_each(Permit::unheard);
    }

    /// Whether packets to a peer are sealed.
    pub(crate) fn is_sealed(&self, address: SocketAddr) -> bool {
        self.peers.get(&address).is_some_and(|peer| peer.known == Known::Sealed)
    }

    /// Whether the peer is known to be reached in clear text.
    pub(crate) fn is_clear(&self, address: SocketAddr) -> bool {
        let is_known = |peer: &Peer| peer.known == Known::Clear;
        !self.has_daemon || self.is_all_clear || self.peers.get(&address).is_some_and(is_known)
    }

    /// The next question to the daemon.
    pub(crate) fn next_ask(&mut self) -> Option<Message> {
        let ask = self.asks.pop_front()?;
        self.unanswered += 1;
        Some(ask)
    }

    /// Whether an answer of the daemon is awaited.
    pub(crate) fn is_waiting(&self) -> bool {
        self.unanswered > 0
    }

    /// The next packet to send as it is: a control packet, or one that had to wait.
    pub(crate) fn next_packet(&mut self) -> Option<(SocketAddr, Vec<u8>)> {
        self.packets.pop_front()
    }

    /// The next peer with a new session. Packets to it are longer from now on.
    pub(crate) fn next_ready(&mut self) -> Option<SocketAddr> {
        self.ready.pop()
    }

    /// The next line for the user.
    pub(crate) fn next_note(&mut self) -> Option<String> {
        self.notes.pop()
    }

    /// Decides about a packet that is about to leave.
    #[inline]
    pub(crate) fn depart(&mut self, now: u64, to: SocketAddr, packet: &[u8], payload: Span) -> Way<'_> {
        if !self.has_daemon
            || self.is_all_clear && now < self.look_at
            || self.clear.is_some_and(|(address, until)| address == to && now < until)
        {
            return Way::Clear;
        }
        if self.permit.is_some() {
            return self.depart_in_frame(now);
        }
        self.decide(now, to, packet, payload)
    }

    fn decide(&mut self, now: u64, to: SocketAddr, packet: &[u8], payload: Span) -> Way<'_> {
        const RESET: u8 = 2;
        let is_reset = packet[0] & 15 == RESET;
        if is_reset && !self.peers.contains_key(&to) {
            // It answers a stranger, who must not cost a question. It contains nothing but the stranger's number.
            return Way::Clear;
        }
        let held = self.bounds.held;
        let peer = self.peer(now, to);
        match peer.known {
            Known::Unknown => {
                peer.hold(packet, payload, held);
                self.ask(now, to, 0);
                Way::Held
            }
            Known::Clear => {
                self.clear = Some((to, now + LOOK_AGAIN_NS / 2));
                self.ask(now, to, LOOK_AGAIN_NS);
                Way::Clear
            }
            Known::Refused => {
                self.counters.unsent += 1;
                self.ask(now, to, DOUBT_NS);
                Way::Held
            }
            Known::Sealed => {
                if peer.needs_session(now) {
                    self.open(now, to);
                }
                let session = self.peers.get_mut(&to).and_then(|peer| peer.sealing(now));
                match session {
                    Some(session) => {
                        self.counters.packets_out += 1;
                        Way::Sealed(session)
                    }
                    None => {
                        self.counters.unsent += 1;
                        Way::Held
                    }
                }
            }
        }
    }

    /// Processes a packet that has arrived. Returns the packet of the protocol, if it is or contains one.
    #[inline]
    pub(crate) fn arrive<'a>(
        &'a mut self,
        now: u64,
        from: SocketAddr,
        packet: &'a mut [u8],
    ) -> Option<&'a mut [u8]> {
        if self.permit.is_some() {
            return if self.takes_from_frame(now) { Some(packet) } else { None };
        }
        if !wire::is_sealing(packet) {
            return if self.has_sealed && self.refuses_clear(now, from) { None } else { Some(packet) };
        }
        let Some(head) = Head::read(packet) else {
            if let Some(control) = Control::decode(packet) {
                self.control(now, from, control);
            }
            return None;
        };
        let whole = if head.last > 0 { Some(self.put(now, from, &head, packet)?) } else { None };
        let session = self.peers.get_mut(&from).and_then(|peer| peer.session(head.id));
        let Some(session) = session else {
            match whole {
                // It has ended since the first part.
                Some(place) => self.parts.discard(place),
                None => self.counters.unknown += 1,
            }
            self.tell(now, from, head.id);
            return None;
        };
        let packet = match whole {
            Some(place) => self.parts.take(place),
            None => packet,
        };
        match session.open(packet) {
            Ok(opened) => {
                session.is_confirmed = true;
                // An empty one only shows that the peer has the keys.
                let has_packet = !opened.is_empty();
                self.counters.packets_in += u64::from(has_packet);
                has_packet.then_some(opened)
            }
            Err(why) => {
                match why {
                    Shut::Replayed => self.counters.replayed += 1,
                    Shut::Forged | Shut::Malformed => self.counters.forged += 1,
                }
                None
            }
        }
    }

    /// Keeps a part of a packet, whose first one needs a session. Returns the place of the packet if it is complete now.
    fn put(&mut self, now: u64, from: SocketAddr, head: &Head, datagram: &[u8]) -> Option<usize> {
        let part = &datagram[HEADER..];
        let place = match self.parts.find(from, head) {
            Some(place) => place,
            None => {
                let session = self.peers.get_mut(&from).and_then(|peer| peer.session(head.id));
                let Some(session) = session else {
                    self.counters.unknown += 1;
                    self.tell(now, from, head.id);
                    return None;
                };
                if !session.is_new(head.number) {
                    self.counters.replayed += 1;
                    return None;
                }
                self.parts.begin(from, head, part.len())?
            }
        };
        match self.parts.put(place, head, part) {
            Put::Whole => Some(place),
            Put::Waits | Put::Refused => None,
        }
    }

    /// Whether packets in clear text from this address are dropped.
    fn refuses_clear(&mut self, now: u64, from: SocketAddr) -> bool {
        let known = self.peers.get(&from).map(|peer| peer.known);
        if !matches!(known, Some(Known::Sealed | Known::Refused)) {
            return false;
        }
        self.counters.clear += 1;
        // The link may be clear by now.
        self.ask(now, from, DOUBT_NS);
        self.tell(now, from, 0);
        true
    }

    /// Tells a peer that a packet was not taken.
    fn tell(&mut self, now: u64, to: SocketAddr, id: u32) {
        if !self.has_daemon {
            return;
        }
        let is_due = match self.peers.get_mut(&to) {
            Some(peer) if now >= peer.tell_at => {
                peer.tell_at = now + TELL_NS;
                true
            }
            Some(_) => false,
            None => self.strangers_told.takes(now),
        };
        if is_due {
            self.send(to, &Control::Ask { id });
        }
    }

    /// The daemon says how a peer is reached.
    pub(crate) fn reached(&mut self, now: u64, address: SocketAddr, reach: Reach) {
        self.answered();
        if self.permit.is_some() {
            return self.permitted(now, reach);
        }
        let Some(peer) = self.peers.get_mut(&address) else { return };
        peer.is_asked = false;
        self.learn(now, address, reach);
    }

    fn learn(&mut self, now: u64, address: SocketAddr, reach: Reach) {
        self.is_all_clear = reach == Reach::AllClear;
        match reach {
            Reach::Clear => self.clear_text(address),
            Reach::AllClear => {
                let all: Vec<SocketAddr> = self.peers.keys().copied().collect();
                all.into_iter().for_each(|address| self.clear_text(address));
                (self.has_sealed, self.look_at) = (false, now + LOOK_AGAIN_NS);
            }
            Reach::Sealed => {
                let was_sealed = self.is_sealed(address);
                self.end_clear_text(address, Known::Sealed);
                if !was_sealed {
                    self.ready.push(address);
                }
                if self.peers.get_mut(&address).is_some_and(|peer| peer.needs_session(now)) {
                    self.open(now, address);
                }
            }
            Reach::NotYet => {
                // OPEN has the kernel look for the peer, and says nothing. The next packet asks again.
                if let Some(peer) = self.peers.get_mut(&address).filter(|peer| peer.known == Known::Unknown) {
                    peer.held.clear();
                    self.open(now, address);
                }
            }
            Reach::Stream | Reach::Router | Reach::Foreign | Reach::Several | Reach::SomeSealed => {
                self.end_clear_text(address, Known::Refused);
                self.note(Note::Refused(reach), address);
            }
        }
    }

    /// From now on packets to a peer are left as they are.
    fn clear_text(&mut self, address: SocketAddr) {
        let Some(peer) = self.peers.get_mut(&address) else { return };
        peer.known = Known::Clear;
        let held = std::mem::take(&mut peer.held);
        self.packets.extend(held.into_iter().map(|packet| (address, packet)));
    }

    /// From now on nothing goes to a peer in clear text.
    fn end_clear_text(&mut self, address: SocketAddr, known: Known) {
        let Some(peer) = self.peers.get_mut(&address) else { return };
        peer.known = known;
        peer.held.clear();
        self.packets.retain(|(to, packet)| *to != address || wire::is_sealing(packet));
        // Keys may have come after an answer that all links were clear.
        (self.has_sealed, self.clear, self.is_all_clear) = (true, None, false);
    }

    fn answered(&mut self) {
        self.unanswered = self.unanswered.saturating_sub(1);
        // One that was given up is there after all: what it says about a peer holds.
        (self.has_daemon, self.has_answered, self.strikes) = (true, true, 0);
    }

    /// Asks the daemon how a peer is reached, unless that was done less than `after` ago.
    fn ask(&mut self, now: u64, address: SocketAddr, after: u64) {
        let between = Question { own: self.own, peer: address };
        let has_room = self.asks.len() < ASKS_MAX;
        let Some(peer) = self.peers.get_mut(&address) else { return };
        let is_early = peer.was_asked && now.saturating_sub(peer.asked_at) < after;
        if has_room && self.has_daemon && !peer.is_asked && !is_early {
            (peer.is_asked, peer.was_asked, peer.asked_at) = (true, true, now);
            self.asks.push_back(Message::Reach(between));
        }
    }

    /// The entry of a peer, which may be new.
    fn peer(&mut self, now: u64, address: SocketAddr) -> &mut Peer {
        if self.peers.len() >= self.bounds.peers && !self.peers.contains_key(&address) {
            let oldest = self.peers.iter().min_by_key(|(_, peer)| peer.used_at).map(|(address, _)| *address);
            oldest.and_then(|oldest| self.peers.remove(&oldest));
        }
        let known = if self.is_all_clear { Known::Clear } else { Known::Unknown };
        let peer = self.peers.entry(address).or_insert_with(|| Peer::new(known));
        peer.used_at = now;
        peer
    }

    fn send(&mut self, to: SocketAddr, control: &Control) {
        if self.packets.len() < ASKS_MAX {
            self.packets.push_back((to, control.encode()));
        }
    }

    /// Says once what keeps packets from being sent.
    fn note(&mut self, note: Note, peer: SocketAddr) {
        let line = match &note {
            Note::Refused(why) => format!(
                "no keys for {peer}: {why}; nothing is sent in clear text, unless VNET_RDMA_SEAL=off is set on both sides"
            ),
            Note::Silent => format!(
                "{peer} does not answer in sealed packets: it has ended, its library or its host's vnetd is too old, or VNET_RDMA_SEAL=off is set there"
            ),
            Note::Wanted if self.is_off => {
                format!("{peer} takes only sealed packets: unset VNET_RDMA_SEAL, or set it to off there, too")
            }
            Note::Frames => format!("nothing is sent: {FRAMES_REFUSED}"),
            Note::Wanted => format!(
                "{peer} takes only sealed packets, but this host's vnetd gives no keys: start it, or a newer one, and unset VNET_RDMA_MEETING; in a virtual machine set VNET_RDMA_ATTACHMENT=vm"
            ),
        };
        if self.said.insert(note) {
            self.notes.push(line);
        }
    }
}

#[cfg(test)]
mod permit_tests;
#[cfg(test)]
mod tests;
