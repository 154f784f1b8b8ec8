//! The receiving half of the bridge: the datagrams of one UDP socket, as a [`Source`].
//!
//! ```text
//!   recvmmsg -> burst of messages -> for each: which link? decrypt in place -> for each datagram: the kind's own reader
//!                                                                  native/receive.rs, vxlan/receive.rs, or the frame itself
//! ```
//!
//! A burst is the result of one `recvmmsg`: up to [`MESSAGES`] messages, each one datagram or several of one size. Frames point
//! into its buffers. When a burst holds more frames than a batch, the fill stops when the batch is full and the next fill resumes
//! there ([`Progress`]). The socket is read again when the burst is used up.
//!
//! The source address selects the link ([`Peers`]). Datagrams from sealed links are decrypted in place first, so unauthenticated
//! data never reaches reassembly or any later step.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use arc_swap::ArcSwap;

use super::intake::Intake;
use super::native::receive::{Assembly, Datagram, ask_for_sealing};
use super::path::route::RouteProbe;
use super::progress::{Progress, discard_reason};
use super::sealed::aead::TAG_LEN;
use super::socket::name::{Name, normalised};
use super::socket::receive_buffers::{MESSAGES, Message, ReceiveBuffers};
use super::socket::udp::Socket;
use super::strangers::Strangers;
use super::vxlan::groups::Groups;
use super::{Encapsulation, HOPS_UNKNOWN, Link, Peers, ReassemblyBudget};
use crate::frame::{Batch, DropSink};
use crate::poll::Waker;
use crate::source::{Source, Taken};
use crate::stats::{DiscardReason, PortStats};
use crate::wire::native::{Header, Kind};
use crate::wire::offload::Offload;

/// The links of one dispatcher's setup. The dispatcher replaces them between two batches; its receivers load them.
pub type PeersView = Arc<ArcSwap<Peers>>;

/// The parts that a dispatcher's receivers share; creates receivers.
#[derive(Clone)]
pub struct ReceiverParts {
    pub(in crate::link) peers: PeersView,
    pub(in crate::link) stats: Arc<PortStats>,
    pub(in crate::link) budget: Arc<ReassemblyBudget>,
    at_once: usize,
}

impl ReceiverParts {
    /// `stats` counts datagrams from unknown sources; `budget` limits the host's reassembly memory.
    pub(in crate::link) fn new(stats: Arc<PortStats>, budget: Arc<ReassemblyBudget>) -> ReceiverParts {
        ReceiverParts { peers: PeersView::default(), stats, budget, at_once: MESSAGES }
    }

    /// Limits a read to `burst` messages.
    pub fn taking(mut self, burst: usize) -> ReceiverParts {
        self.at_once = burst;
        self
    }

    /// A receiver of native and `vnet` links on `socket`.
    pub(crate) fn receiver(&self, socket: Arc<Socket>) -> Receiver {
        let kind = For::Bridge(Assembly::new(self.budget.clone()));
        Receiver::of(kind, socket, self).taking(self.at_once)
    }

    /// A receiver of VXLAN links. With `groups`, it joins their multicast groups; exactly one receiver per host does.
    pub(in crate::link) fn vxlan(&self, socket: Arc<Socket>, groups: bool) -> Receiver {
        let probe = RouteProbe::new(socket.local());
        let groups = groups.then(|| (Groups::default(), probe, Arc::default()));
        Receiver::of(For::Vxlan(groups), socket, self).taking(self.at_once)
    }
}

/// A datagram's link, and the number of its VTEP (0 for other kinds).
type Whose<'a> = (&'a Arc<Link>, u16);

/// The links that a receiver's socket serves.
enum For {
    /// Native and `vnet` links, matched by address and port.
    Bridge(Assembly),
    /// VXLAN links, matched by address alone; and the multicast groups, if this receiver joins them.
    Vxlan(Option<(Groups, RouteProbe, Arc<Peers>)>),
}

/// Receives frames on one socket, which it shares with a [`super::Sender`].
pub struct Receiver {
    socket: Arc<Socket>,
    peers: PeersView,
    /// Counts datagrams from unknown sources.
    stats: Arc<PortStats>,
    /// Maximum number of messages per read.
    at_once: usize,
    burst: ReceiveBuffers,
    progress: Progress,
    kind: For,
    /// True if the last read emptied the socket, so the next datagram wakes the dispatcher.
    emptied: bool,
    /// True if time-outs became due while a burst was being processed.
    tick_due: bool,
    /// True if the socket cannot be watched: it is then polled every turn.
    unwatched: bool,
    waker: Option<Waker>,
    strangers: Strangers,
}

impl Receiver {
    fn of(kind: For, socket: Arc<Socket>, parts: &ReceiverParts) -> Receiver {
        Receiver {
            socket,
            peers: parts.peers.clone(),
            stats: parts.stats.clone(),
            at_once: MESSAGES,
            burst: ReceiveBuffers::new(),
            progress: Progress::default(),
            kind,
            emptied: false,
            tick_due: false,
            unwatched: false,
            waker: None,
            strangers: Strangers::default(),
        }
    }

    /// Limits a read to `burst` messages.
    pub fn taking(mut self, burst: usize) -> Receiver {
        self.at_once = burst.clamp(1, MESSAGES);
        self
    }

    /// The local address.
    pub fn local_addr(&self) -> SocketAddr {
        self.socket.local()
    }

    pub(in crate::link) fn socket(&self) -> Arc<Socket> {
        self.socket.clone()
    }

    /// Descriptor of the socket, for setting options.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The burst, so that the caller can insert messages received in another way. The burst must be used up.
    pub(crate) fn burst(&mut self) -> &mut ReceiveBuffers {
        debug_assert!(self.progress.is_done());
        &mut self.burst
    }

    /// Makes the next fills process `messages` messages that the caller inserted into the burst.
    pub(crate) fn resume_with(&mut self, messages: usize) {
        self.progress.begin(messages);
    }

    /// True when the burst is used up.
    pub(crate) fn is_done(&self) -> bool {
        self.progress.is_done()
    }

    /// Processes the burst until it is used up or the batch is full. Returns the number of datagrams.
    fn work(&mut self, batch: &mut Batch, drops: &mut DropSink, now_ms: u64) -> usize {
        let peers = self.peers.load();
        let mut intake = Intake::new(batch, drops, now_ms);
        let (mut datagrams, mut latest) = (0, None::<(Name, Option<Whose<'_>>)>);
        while !self.progress.is_done() {
            let message = self.burst.message(self.progress.message);
            let whose = match &latest {
                Some((name, whose)) if name.same(&message.source) => *whose,
                _ => self.find(&peers, &message),
            };
            latest = Some((message.source, whose));
            let whose =
                whose.or_else(|| self.moved(&peers, &message)).or_else(|| self.host(&peers, &message));
            // A half-processed message stays with its link, because another link's keys did not decrypt it.
            let whose = whose.filter(|(link, _)| self.progress.link.is_none_or(|id| id == link.id));
            let before = self.progress.datagram;
            let Some((link, vtep)) = whose else {
                let rest = message.datagrams() - before;
                self.stats.discard(DiscardReason::UnknownSource, rest as u64);
                if let Some(source) = message.source.address() {
                    self.strangers.note(normalised(source), rest as u64, now_ms, &self.stats);
                }
                datagrams += rest;
                self.progress.next_message();
                continue;
            };
            let done = self.message(link, vtep, &message, &mut intake);
            intake.count(link);
            if !done {
                datagrams += self.progress.datagram - before;
                break;
            }
            datagrams += message.datagrams() - before;
            self.progress.next_message();
        }
        if self.progress.is_done()
            && let For::Bridge(assembly) = &mut self.kind
        {
            assembly.settle(self.burst.memory());
        }
        datagrams
    }

    /// Finds a message's link by its source.
    fn find<'a>(&self, peers: &'a Peers, message: &Message) -> Option<Whose<'a>> {
        let source = message.source.address()?;
        match self.kind {
            For::Bridge(_) => peers.link(source).map(|link| (link, 0)),
            For::Vxlan(_) => peers.vtep(source),
        }
    }

    /// Roaming: the sealed link to which a message from an unknown source belongs if it is the keepalive that it claims to be.
    /// Other datagrams from that source are discarded until the peer has proved its new address.
    fn moved<'a>(&self, peers: &'a Peers, message: &Message) -> Option<Whose<'a>> {
        let candidate = matches!(self.kind, For::Bridge(_)) && message.datagrams() == 1 && !message.truncated;
        let link = candidate.then(|| peers.tagged(self.burst.memory().bytes(message.range())))??;
        Some((link, 0))
    }

    /// The `vnet` link that accepts datagrams from the message's address, whatever the port.
    fn host<'a>(&self, peers: &'a Peers, message: &Message) -> Option<Whose<'a>> {
        let candidate = matches!(self.kind, For::Bridge(_));
        let link = candidate.then(|| peers.host(message.source.address()?))??;
        Some((link, 0))
    }

    /// Processes the datagrams of one message. Returns false when the batch filled up before its end.
    fn message(&mut self, link: &Arc<Link>, vtep: u16, message: &Message, intake: &mut Intake<'_>) -> bool {
        if self.progress.link.is_none() {
            self.progress.link = Some(link.id);
            link.stats.in_datagrams.add(message.datagrams() as u64);
            if message.truncated {
                link.stats.discard(DiscardReason::Truncated, 1);
                return true;
            }
            match link.seal() {
                Some(_) => self.open(link, message),
                None => link.heard(intake.now_ms),
            }
        }
        let sealed = link.seal();
        intake.claims = sealed.and_then(|seal| seal.keyring().claims().cloned());
        let trailer = if sealed.is_some() { TAG_LEN } else { 0 };
        for n in self.progress.datagram..message.datagrams() {
            if intake.batch.is_full() {
                return false;
            }
            if sealed.is_none() || self.progress.opened.get(n) == Some(&true) {
                if sealed.is_some() {
                    link.heard(intake.now_ms);
                }
                let range = message.datagram(n);
                let range = range.start..range.end - trailer;
                let datagram = self.burst.memory().bytes(range.clone());
                match (&mut self.kind, link.options().kind.encapsulation()) {
                    (For::Vxlan(_), _) => super::vxlan::receive::datagram(link, vtep, datagram, intake),
                    (For::Bridge(assembly), Encapsulation::Native) => {
                        let memory = self.burst.memory();
                        let datagram =
                            Datagram { memory, range, source: &message.source, socket: &self.socket };
                        if !assembly.datagram(link, &datagram, &mut self.progress, intake) {
                            return false;
                        }
                    }
                    // Streams have no datagrams and are not listed among the peers.
                    (For::Bridge(_), _) => {
                        let network = link.default_network();
                        intake.frame(link, network, Offload::default(), HOPS_UNKNOWN, datagram);
                    }
                }
            }
            self.progress.datagram = n + 1;
        }
        true
    }

    /// Decrypts a message's datagrams in place, marks authentic datagrams and counts the others as discarded.
    fn open(&mut self, link: &Link, message: &Message) {
        let Some(seal) = link.seal() else { return };
        let keyring = seal.keyring();
        for n in 0..message.datagrams() {
            let datagram = self.burst.bytes_mut(message.datagram(n));
            let result = match Header::parse(datagram) {
                Ok((header, _)) if !header.sealed => {
                    if header.kind == Kind::Probe {
                        ask_for_sealing(link, &self.socket, &message.source, &mut self.progress);
                    }
                    Err(DiscardReason::SealRequired)
                }
                Ok((header, _)) => match keyring.opening(header.epoch) {
                    Some(key) => key.open(datagram),
                    None => Err(DiscardReason::WrongEpoch),
                },
                // The rendezvous relay replies from the address that also sends the link's datagrams.
                Err(_) if link.via().is_some_and(|via| via.answered(datagram)) => {
                    self.progress.opened.push(false);
                    continue;
                }
                Err(error) => Err(discard_reason(error)),
            };
            self.progress.opened.push(result.is_ok());
            if let Err(reason) = result {
                link.stats.discard(reason, 1);
            }
        }
    }
}

impl Source for Receiver {
    // SAFETY: frames lie in the burst and in reassembled memory; both stay unchanged until `give_back`.
    unsafe fn fill(&mut self, batch: &mut Batch, drops: &mut DropSink, now_ms: u64) -> Taken {
        if self.progress.is_done() {
            let messages = self.burst.receive(&self.socket, self.at_once);
            // The kernel returns fewer messages only when the socket is empty.
            self.emptied = messages < self.at_once;
            self.progress.begin(messages);
        }
        let datagrams = self.work(batch, drops, now_ms);
        // The edge for datagrams that arrive before the burst is finished may reach a dispatcher that does not read the socket at
        // that time. So while a burst is unfinished, the socket does not count as empty.
        self.emptied &= self.progress.is_done();
        if self.tick_due && self.progress.is_done() {
            self.tick(now_ms);
        }
        let drained = self.emptied && self.progress.is_done();
        // Within a bundle, a fill may finish no datagram.
        let units = datagrams.max(usize::from(!batch.is_empty()));
        Taken { units, drained, ..Taken::default() }
    }

    fn give_back(&mut self) {
        if let For::Bridge(assembly) = &mut self.kind {
            assembly.release();
        }
    }

    fn watch(&mut self, waker: Waker) {
        self.emptied = false;
        let watched = waker.watch(&*self.socket);
        self.unwatched = watched.is_err();
        if let Err(error) = watched {
            tracing::error!(socket = %self.socket.local(), %error, "cannot watch the bridge's socket; it is polled");
        }
        self.waker = Some(waker);
    }

    fn unwatch(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.forget(self.socket.as_fd());
        }
    }

    fn rest(&mut self) -> bool {
        self.emptied && self.progress.is_done() && !self.unwatched
    }

    fn is_unfinished(&self) -> bool {
        let assembles = matches!(&self.kind, For::Bridge(assembly) if assembly.is_incomplete());
        assembles || !self.progress.is_done()
    }

    /// Drops timed-out incomplete frames and those of removed links; joins multicast groups of new links; counts what the kernel has dropped.
    fn tick(&mut self, now_ms: u64) {
        let lost = self.socket.newly_lost();
        if lost != 0 {
            self.stats.discard(DiscardReason::Overflow, lost);
        }
        let peers = self.peers.load();
        match &mut self.kind {
            // Fragments of an unfinished burst still lie in its buffers, so the fill that finishes the burst runs the tick.
            For::Bridge(_) if !self.progress.is_done() => self.tick_due = true,
            For::Bridge(assembly) => {
                self.tick_due = false;
                assembly.tick(&peers, now_ms);
            }
            For::Vxlan(Some((groups, routes, followed))) => {
                if !Arc::ptr_eq(followed, &peers) {
                    let links = peers.links().iter();
                    let wanted =
                        links.filter_map(|link| Some((link.vteps()?.group()?, link.options().remote)));
                    groups.follow(&self.socket, wanted, routes);
                    *followed = Arc::clone(&peers);
                }
            }
            For::Vxlan(None) => {}
        }
    }
}

#[cfg(test)]
#[path = "receiver_tests.rs"]
mod tests;
