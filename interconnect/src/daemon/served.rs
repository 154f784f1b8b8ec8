//! One process whose engine the daemon runs. The process may be hostile: each entry is copied once and checked, each address is looked
//! up in the memory that the process has registered, and work, memory and requests are bounded.

use std::mem;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::carrier::{Carrier, RelayCounters};
use super::entry::{Answer, Event, Extent, Submission, Task, ended};
use super::lent::Inbox;
use super::queue::Queues;
use super::seals::Seals;
use super::translation::{Budget, Foreign, Translation};
use crate::closer::close_or_leak_now;
use crate::meeting::Token;
use crate::node::socket::segments_mut;
use crate::proto::share::Share;
use crate::proto::wire::{Invite, is_placed};
use crate::proto::{
    Atomic, Config, Departure, EndpointCounters, Engine, Kind, Match, Outgoing, Peer, PostError, Receive,
    Shape, ShareSettings, Span, Status,
};
use crate::ring::{Bell, WINDOW_BYTES, Word};
use crate::seal::SealCounters;

/// Maximum number of endpoints of a process.
const ENDPOINTS_MAX: usize = 16;
/// Operations that a process may have under way. Further submissions wait in its queue.
const OPERATIONS_MAX: usize = 1024;
/// Maximum number of buffers that a process may have posted.
pub(super) const RECEIVES_MAX: usize = 4096;
/// Memory of the daemon for one endpoint's unexpected messages, and for packets of one process that wait for others.
const UNEXPECTED_BYTES_MAX: usize = 1 << 20;
const KEPT_BYTES_MAX: usize = 4 << 20;
/// Work of one turn: submissions, received datagrams, and words by the bell.
const SUBMISSIONS: usize = 64;
const RECEIVES: usize = 16;
const WORDS: usize = 64;
/// Interval at which the bell of a busy process is heard.
const HEAR_EVERY_NS: u64 = 10_000_000;

/// How long an entry of a process in a virtual machine waits for the memory that it names, which comes by another way.
const MEMORY_WITHIN_NS: u64 = 2_000_000_000;

/// How packets to a peer travel, as answers tell the process: to another process of the daemon, or sealed. Otherwise 0.
pub(super) const WAY_LOCAL: u64 = 1;
pub(super) const WAY_SEALED: u64 = 2;

/// Why a process is not served any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It has closed its end.
    Gone,
    /// It wrote what no library writes.
    Broken,
}

impl From<Foreign> for End {
    fn from(_: Foreign) -> Self {
        End::Broken
    }
}

impl From<crate::ring::Broken> for End {
    fn from(_: crate::ring::Broken) -> Self {
        End::Broken
    }
}

/// Takes a packet for another process of the daemon. Returns false if it has to take the network. The packet's payload stays valid during
/// the call only.
pub(super) type Deliver<'a> = &'a mut dyn FnMut(&Departure) -> bool;

/// What an open endpoint of a process has sent, and may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointReport {
    /// Address of the process.
    pub address: SocketAddr,
    /// Number of the endpoint.
    pub endpoint: u16,
    /// Its part of what the process sends.
    pub share: ShareSettings,
    /// What it has sent.
    pub counters: EndpointCounters,
}

/// Counters of a process, added to those of its container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) submissions: u64,
    /// Submissions with an address outside the registered memory, and memory that was not mapped.
    pub(super) refused: u64,
    pub(super) bytes_out: u64,
    pub(super) packets_out: u64,
    pub(super) packets_in: u64,
    /// Those of the packets sent that went straight to another process of the daemon.
    pub(super) same_host_packets: u64,
    pub(super) same_host_bytes: u64,
    /// How often the rate limit of an endpoint began to hold packets back.
    pub(super) held_back: u64,
    pub(super) relay: RelayCounters,
    pub(super) seal: SealCounters,
}

pub(super) struct Served {
    /// Before `memory`, which its operations refer to.
    engine: Engine,
    memory: Translation,
    queues: Queues,
    bell: Bell,
    carrier: Carrier,
    seals: Seals,
    /// Name by which other processes of the daemon are invited.
    name: Token,
    /// Memory that the process's virtual machine has lent.
    inbox: Option<Arc<Inbox>>,
    /// The next submission, if it names memory that is not there yet, and when it is refused.
    stalled: Option<(Submission, u64)>,
    address: Option<SocketAddr>,
    endpoints: Vec<u16>,
    hear_at: u64,
    /// The process has been asked to ring.
    is_armed: bool,
    counts: Counts,
}

impl Served {
    /// Serves the process at the other end of `bell` and of the queues.
    pub(super) fn new(
        queues: Queues,
        bell: OwnedFd,
        (carrier, seals, inbox): (Carrier, Seals, Option<Arc<Inbox>>),
        limits: Config,
        (epoch, seed, name): (u64, [u8; 32], Token),
    ) -> Self {
        let config = Config {
            datagram_max: carrier.datagram_max(),
            takes_parts: true,
            receive_budget: carrier.receive_room().clamp(64 << 10, 4 << 20),
            unexpected_bytes_max: UNEXPECTED_BYTES_MAX,
            kept_bytes_max: KEPT_BYTES_MAX,
            ..limits
        };
        let mut engine = Engine::new(config, epoch, seed);
        engine.set_name(Some(name));
        Self {
            engine,
            memory: Translation::default(),
            address: carrier.address(),
            queues,
            bell: Bell::new(bell),
            carrier,
            seals,
            name,
            inbox,
            stalled: None,
            endpoints: vec![],
            hear_at: 0,
            is_armed: false,
            counts: Counts::default(),
        }
    }

    /// One turn: takes submissions and packets, sends, and reports completions, within bounds. Returns whether there was any work.
    /// `deliver` takes packets for other processes of the daemon, which bypass the network.
    pub(super) fn turn(
        &mut self,
        now: u64,
        share: &mut Share,
        budget: &mut Budget,
        deliver: Deliver<'_>,
    ) -> Result<bool, End> {
        let is_due = mem::take(&mut self.is_armed) || now >= self.hear_at;
        if is_due {
            self.hear_at = now + HEAR_EVERY_NS;
            self.hear(budget)?;
        }
        let mut worked = self.receive(now);
        let Self { seals, engine, carrier, .. } = self;
        seals.hear(now, is_due, engine, carrier.datagram_max()).map_err(|_| End::Gone)?;
        worked |= self.fetch(now, budget)?;
        self.engine.tick(now);
        worked |= self.depart(now, share, deliver);
        worked |= self.complete()?;
        Ok(worked)
    }

    /// Takes packets that have arrived. Returns whether any was there.
    fn receive(&mut self, now: u64) -> bool {
        let mut worked = false;
        for _ in 0..RECEIVES {
            let Some(mut received) = self.carrier.receive() else { break };
            worked = true;
            let (from, congestion) = (received.from, received.congestion);
            if let Some(most) = received.reply_max {
                self.engine.limit_datagram(from, most);
            }
            for packet in segments_mut(&mut received) {
                self.counts.packets_in += 1;
                if let Some(packet) = self.seals.arrive(now, from, packet) {
                    self.engine.receive(now, from, packet, congestion);
                }
            }
        }
        worked
    }

    /// Hears the process, which passes its memory this way.
    fn hear(&mut self, budget: &mut Budget) -> Result<(), End> {
        for _ in 0..WORDS {
            // Nobody waits for a close that blocks. A process gets no second chance to pass such descriptors.
            match self.bell.hear_with(close_or_leak_now).map_err(|_| End::Gone)? {
                None => break,
                Some(Word::Ring) => {}
                Some(Word::Grant(number, memory)) if self.inbox.is_none() => {
                    // Keys of memory are the process's own numbers here.
                    let number = u32::try_from(number).map_err(|_| End::Broken)?;
                    if !self.memory.map(number, memory, budget)? {
                        self.counts.refused += 1;
                    }
                }
                Some(Word::Grant(_, memory)) => {
                    close_or_leak_now(memory);
                    return Err(End::Broken);
                }
                Some(Word::Ask(..) | Word::Refuse(_)) => return Err(End::Broken),
            }
        }
        while let Some((number, lent)) = self.inbox.as_ref().and_then(|inbox| inbox.take()) {
            if !self.memory.adopt(number, lent, budget)? {
                self.counts.refused += 1;
            }
        }
        Ok(())
    }

    /// Takes the next submission, if it names no memory that is still to come.
    fn next(&mut self, now: u64, budget: &mut Budget) -> Result<Option<Submission>, End> {
        let (submission, refused_at) = match self.stalled.take() {
            Some(stalled) => stalled,
            None => {
                let Some(entry) = self.queues.reader.next()? else { return Ok(None) };
                self.counts.submissions += 1;
                (Submission::decode(&entry).ok_or(End::Broken)?, now + MEMORY_WITHIN_NS)
            }
        };
        if self.inbox.is_some() {
            let lacks = |memory: &Translation| submission.extents().any(|extent| !memory.has(extent.memory));
            if lacks(&self.memory) {
                self.hear(budget)?;
            }
            if now < refused_at && lacks(&self.memory) {
                self.stalled = Some((submission, refused_at));
                return Ok(None);
            }
        }
        Ok(Some(submission))
    }

    /// Takes submissions. Those that find no room for their answers stay in the queue.
    fn fetch(&mut self, now: u64, budget: &mut Budget) -> Result<bool, End> {
        let mut taken = 0;
        while taken < SUBMISSIONS && self.may_fetch()? {
            let Some(submission) = self.next(now, budget)? else { break };
            taken += 1;
            if let Some(event) = self.apply(now, submission, budget)? {
                self.queues.writer.push(&event.encode())?;
            }
        }
        if taken > 0 && self.queues.reader.wakes_writer() {
            self.bell.say(&Word::Ring);
        }
        Ok(taken > 0)
    }

    fn may_fetch(&mut self) -> Result<bool, End> {
        Ok(self.engine.operations() < OPERATIONS_MAX && self.queues.writer.room()? > 0)
    }

    fn apply(&mut self, now: u64, submission: Submission, budget: &mut Budget) -> Result<Option<Event>, End> {
        let done = |ticket, result: Result<u64, PostError>| {
            Some(Event::Answered(ticket, result.map_or_else(Answer::Refused, Answer::Done)))
        };
        Ok(match submission {
            Submission::Open { ticket, number } => done(ticket, self.open(number)),
            Submission::Close { ticket, endpoint } => {
                self.engine.close(endpoint);
                self.endpoints.retain(|open| *open != endpoint);
                done(ticket, Ok(1))
            }
            Submission::Register { ticket, endpoint, extent, base, access, key } => {
                let span = self.span(extent, budget)?;
                let register = |span| self.engine.register(endpoint, span, base, access, key);
                done(ticket, span.ok_or(PostError::NoRegion).and_then(register))
            }
            Submission::Deregister { ticket, key } => {
                done(ticket, if self.engine.deregister(key) { Ok(1) } else { Err(PostError::UnknownKey) })
            }
            Submission::Route { address, bytes } => {
                let bytes =
                    self.carrier.datagram_max_to(address, usize::try_from(bytes).unwrap_or(usize::MAX));
                self.engine.set_datagram(address, self.seals.set_size(address, bytes));
                None
            }
            Submission::Post { endpoint, peer, task, extent, data, context } => {
                let (kind, status) =
                    self.post(now, (endpoint, peer), &task, (extent, data, context), budget)?;
                status.map(|status| Event::Completed(endpoint, ended(kind, status, context, peer)))
            }
            Submission::Receive { endpoint, matching, extent, context, several } => {
                let span = self.span(extent, budget)?;
                let posted = self.endpoints.iter().map(|open| self.engine.posted(*open)).sum::<usize>();
                let receive = span.map(|span| Receive { matching, span, context, several });
                let receive = receive.filter(|_| posted < RECEIVES_MAX);
                match receive.map(|receive| self.engine.post_receive(endpoint, &receive)) {
                    Some(Ok(())) => None,
                    _ => Some(self.refused_receive(endpoint, &matching, context)),
                }
            }
            Submission::Cancel { ticket, endpoint, context } => {
                done(ticket, Ok(self.engine.cancel(endpoint, context).into()))
            }
            Submission::Peek { ticket, endpoint, matching, claim } => {
                let seen = self.engine.peek(endpoint, &matching, claim);
                Some(Event::Answered(ticket, seen.map_or(Answer::Done(0), Answer::Seen)))
            }
            Submission::Claimed { ticket, endpoint, claim, extent, context } => {
                let span = match extent {
                    None => Some(None),
                    Some(extent) => self.span(extent, budget)?.map(Some),
                };
                let receive = |span| self.engine.receive_claimed(endpoint, claim, span, context);
                done(ticket, Ok(span.is_some_and(receive).into()))
            }
            Submission::Way { ticket, peer } => done(ticket, Ok(self.way(peer))),
            Submission::Share { ticket, endpoint, share } => {
                done(ticket, self.engine.set_share(endpoint, share).map(|()| 1))
            }
            Submission::Count { ticket, endpoint } => {
                let counters = self.engine.endpoint_counters(endpoint);
                Some(Event::Answered(ticket, Answer::Counted(counters)))
            }
        })
    }

    fn way(&self, peer: SocketAddr) -> u64 {
        match self.engine.is_local(peer) {
            true => WAY_LOCAL,
            false if self.seals.is_sealed(peer) => WAY_SEALED,
            false => 0,
        }
    }

    fn open(&mut self, number: Option<u16>) -> Result<u64, PostError> {
        if self.endpoints.len() >= ENDPOINTS_MAX {
            return Err(PostError::Taken);
        }
        let number = self.engine.open(number)?;
        self.endpoints.push(number);
        Ok(number.into())
    }

    /// Looks up registered memory. The process passes memory before it submits entries with it, so unknown memory is in the bell's socket.
    fn span(&mut self, extent: Extent, budget: &mut Budget) -> Result<Option<Span>, End> {
        if extent.len > 0 && !self.memory.has(extent.memory) {
            self.hear(budget)?;
        }
        let span = self.memory.find(extent);
        self.counts.refused += u64::from(span.is_none());
        Ok(span)
    }

    /// Posts an operation. Returns its kind, and its status if the engine does not carry it out.
    fn post(
        &mut self,
        now: u64,
        (endpoint, peer): (u16, Peer),
        task: &Task,
        (extent, data, context): (Extent, Option<u64>, u64),
        budget: &mut Budget,
    ) -> Result<(Kind, Option<Status>), End> {
        let span = self.span(extent, budget)?;
        let (kind, shape) = match *task {
            Task::Message(tag) => (Kind::Send, Some(Shape::Message { tag })),
            Task::Write(key, at) => (Kind::Write, Some(Shape::Write { key, at })),
            Task::Read(key, at) => (Kind::Read, Some(Shape::Read { key, at })),
            Task::Atomic { key, at, change, datatype, count, compare, found } => {
                let compare = self.span(compare, budget)?;
                let place = found.map(|found| self.span(found, budget)).transpose()?;
                let atomic = |compare| {
                    let found = place.flatten();
                    Shape::Atomic(Atomic { key, at, change, datatype, count, compare, found })
                };
                // A place outside the registered memory is not "no place".
                (Kind::Atomic, compare.filter(|_| place != Some(None)).map(atomic))
            }
        };
        let Some((span, shape)) = span.zip(shape) else { return Ok((kind, Some(Status::BadKey))) };
        let out = Outgoing { shape, span, data, context, is_buffered: false, is_quiet: false };
        let status = match self.engine.post(now, endpoint, peer, &out) {
            Ok(()) => None,
            Err(PostError::Busy) => Some(Status::NotReady),
            Err(_) => Some(Status::Cancelled),
        };
        Ok((kind, status))
    }

    fn refused_receive(&self, endpoint: u16, matching: &Match, context: u64) -> Event {
        let nobody = Peer { address: ([0, 0, 0, 0], 0).into(), endpoint: 0 };
        let peer = matching.from.unwrap_or(nobody);
        Event::Completed(endpoint, ended(Kind::Receive, Status::Cancelled, context, peer))
    }

    /// Sends as many packets as the container's share allows.
    fn depart(&mut self, now: u64, share: &mut Share, deliver: Deliver<'_>) -> bool {
        let mut worked = false;
        while share.may_send(now) {
            let Some(packet) = self.engine.depart(now) else { break };
            worked = true;
            let bytes = packet.header.as_bytes().len() + packet.payload.len();
            let sent = if deliver(&packet) {
                self.counts.same_host_packets += 1;
                self.counts.same_host_bytes += bytes as u64;
                Some(bytes)
            } else {
                self.seals.send(now, &packet, &mut self.carrier)
            };
            // One that is held back counts, too: a turn is bounded.
            share.spend(now, sent.unwrap_or(bytes) as u64);
            self.count_sent(sent);
        }
        self.carrier.flush();
        while let Some(bytes) = self.seals.send_next(&mut self.carrier) {
            share.spend(now, bytes as u64);
            self.count_sent(Some(bytes));
        }
        self.seals.ask();
        worked
    }

    fn count_sent(&mut self, sent: Option<usize>) {
        self.counts.packets_out += u64::from(sent.is_some());
        self.counts.bytes_out += sent.unwrap_or(0) as u64;
    }

    /// Passes completions to the process, as long as its queue has room.
    fn complete(&mut self) -> Result<bool, End> {
        let mut worked = false;
        for endpoint in &self.endpoints {
            while self.engine.waiting(*endpoint) > 0 && self.queues.writer.room()? > 0 {
                let Some(completion) = self.engine.poll(*endpoint) else { break };
                self.queues.writer.push(&Event::Completed(*endpoint, completion).encode())?;
                worked = true;
            }
        }
        if self.queues.writer.wakes_reader() {
            self.bell.say(&Word::Ring);
        }
        Ok(worked)
    }

    /// Takes a packet of another process of the daemon, which knows this one's peer by `from`. The bytes of a write and of pulled data are copied
    /// once, to the place that the engine has checked. Returns false if the packet does not belong on this way.
    pub(super) fn take_packet(
        &mut self,
        now: u64,
        from: SocketAddr,
        packet: &Departure,
        whole: &mut Vec<u8>,
    ) -> bool {
        self.counts.packets_in += 1;
        let (header, payload) = (packet.header.as_bytes(), packet.payload);
        if payload.is_empty() || is_placed(header[0]) {
            let placed = (!payload.is_empty()).then_some(payload);
            return self.engine.receive_local(now, from, header, placed);
        }
        whole.clear();
        whole.extend_from_slice(header);
        payload.read_to(whole);
        self.engine.receive_local(now, from, whole, None)
    }

    pub(super) fn name(&self) -> Token {
        self.name
    }

    /// Next invitation of a peer, which may be a process of the daemon, and the peer's address.
    pub(super) fn next_invite(&mut self) -> Option<(SocketAddr, Invite)> {
        self.engine.next_invite()
    }

    /// Address of the peer that the process has invited with this secret.
    pub(super) fn invited(&self, secret: &Token) -> Option<SocketAddr> {
        self.engine.invited(secret)
    }

    /// Lets packets to a peer bypass the network, or take the socket again. Returns false if there is no channel to it.
    pub(super) fn set_local(&mut self, peer: SocketAddr, is_local: bool) -> bool {
        self.engine.set_local(peer, is_local.then_some(WINDOW_BYTES))
    }

    pub(super) fn is_local(&self, peer: SocketAddr) -> bool {
        self.engine.is_local(peer)
    }

    /// Number of channels that the engine has closed.
    pub(super) fn closed(&self) -> u64 {
        self.engine.closed()
    }

    /// Prepares for the daemon's sleep. Returns true if there is something to do already.
    pub(super) fn arm(&mut self, now: u64, share: &mut Share, deliver: Deliver<'_>) -> Result<bool, End> {
        self.engine.hurry();
        self.depart(now, share, deliver);
        self.is_armed = true;
        let is_stuck = self.endpoints.iter().any(|endpoint| self.engine.waiting(*endpoint) > 0);
        let has_room = self.queues.writer.room()? > 0;
        if is_stuck && has_room || !has_room && self.queues.writer.starve()? {
            return Ok(true);
        }
        // What a stalled entry waits for rings the bell.
        Ok(self.stalled.is_none() && self.queues.reader.arm() && self.may_fetch()?)
    }

    /// When the process has to be served again, at the latest.
    pub(super) fn wakes_at(&self, now: u64, share: &Share) -> Option<u64> {
        let at = self.engine.wake_at(now).map(|at| at.max(share.wakes_at(now).unwrap_or(0)));
        at.into_iter().chain(self.stalled.map(|(_, refused_at)| refused_at)).min()
    }

    /// What wakes the daemon for the process.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [self.bell.descriptor(), self.carrier.as_fd()].into_iter().chain(self.seals.descriptor())
    }

    /// The next line about what keeps packets from being sent.
    pub(super) fn next_note(&mut self) -> Option<String> {
        self.seals.next_note()
    }

    /// Tells all peers that the process is gone.
    pub(super) fn say_goodbye(&mut self, now: u64) {
        self.engine.say_goodbye();
        while let Some(packet) = self.engine.depart(now) {
            self.seals.send(now, &packet, &mut self.carrier);
        }
        self.carrier.flush();
    }

    pub(super) fn counts(&self) -> Counts {
        let (held_back, seal) = (self.engine.counters().held_back, self.seals.counters());
        Counts { held_back, seal, relay: self.carrier.relay_counters(), ..self.counts }
    }

    pub(super) fn memory(&self) -> &Translation {
        &self.memory
    }

    /// What each open endpoint has sent, and may send.
    pub(super) fn endpoints(&self) -> impl Iterator<Item = EndpointReport> {
        let unknown = SocketAddr::from(([0, 0, 0, 0], 0));
        let address = self.address.unwrap_or(unknown);
        self.endpoints.iter().map(move |endpoint| EndpointReport {
            address,
            endpoint: *endpoint,
            share: self.engine.share(*endpoint),
            counters: self.engine.endpoint_counters(*endpoint),
        })
    }
}
