//! Processing of arriving packets.
//!
//! The engine places the bytes of writes and pulls at once. Events that the application sees in order wait for all earlier
//! packets; `run` then processes them as if all packets had arrived in order.

use std::net::SocketAddr;

use super::super::arrivals::Place;
use super::super::channel::{CONTROL_MAX, Event, Form, Op, WAITING_BYTES_MAX, What};
use super::super::endpoint::{Completion, Kind, Peer};
use super::super::memory::Span;
use super::super::status::Status;
use super::super::wire::{Body, Credit, End, Header, Hello, Subject, Write, flags};
use super::super::write_order::WriteNotice;
use super::Engine;
use super::messages::Admitted;

/// Maximum number of queued answers to packets of unknown channels.
const RESETS_MAX: usize = 64;
/// Initial pause before a message is sent again to an endpoint that was not ready; the pause doubles with each attempt.
const NOT_READY_FIRST_NS: u64 = 1_000_000;
const NOT_READY_MAX_NS: u64 = 64_000_000;
/// Minimum interval between two challenges of a peer: as long as it waits before it repeats a handshake.
const CHALLENGE_NS: u64 = 5_000_000;

/// A packet with its position in the channel's sequence.
struct Arrived<'a> {
    channel: u32,
    flags: u8,
    payload: &'a [u8],
    /// Length of the payload, which for a write is not kept until the packet's turn.
    len: usize,
    status: Status,
}

impl Engine {
    /// Processes a packet from `from`. `congestion`: the network marked the packet "congestion experienced".
    pub fn receive(&mut self, now: u64, from: SocketAddr, packet: &[u8], congestion: bool) {
        let Some((header, payload)) = self.decode(now, packet) else { return };
        match header.body {
            Body::Hello(hello) => self.greeted(from, hello, header.flags),
            Body::Welcome(hello) => self.welcomed(from, header.session, hello, header.flags),
            Body::Reset => {
                let channel = self.addresses.get(&from).copied();
                let peer = channel.and_then(|number| self.channels.get(number)?.peer);
                if let Some(number) =
                    channel.filter(|_| peer.is_some_and(|peer| peer.session == header.session))
                {
                    self.fail_channel(number, Status::PeerRestarted);
                }
            }
            Body::Invite(invite) => self.take_invite(from, header.session, invite),
            _ => match self.channel_of(header.session, from) {
                Some(channel) => self.take(channel, &header, payload, None, congestion),
                None => {
                    self.counters.unknown += 1;
                    if self.resets.len() < RESETS_MAX {
                        self.resets.push_back((from, header.session));
                    }
                }
            },
        }
    }

    pub(super) fn decode<'a>(&mut self, now: u64, packet: &'a [u8]) -> Option<(Header, &'a [u8])> {
        self.now = now;
        self.counters.packets_in += 1;
        let decoded = Header::decode(packet);
        self.counters.malformed += u64::from(decoded.is_none());
        decoded
    }

    fn greeted(&mut self, from: SocketAddr, hello: Hello, flags: u8) {
        let name = |hello: &Hello| (hello.epoch, hello.channel, hello.session);
        if let Some(number) = self.addresses.get(&from).copied() {
            let Some(channel) = self.channels.get_mut(number) else { return };
            match channel.peer {
                None => self.opened(number, hello, flags),
                Some(peer) if name(&peer) == name(&hello) => {}
                Some(_) => return self.challenge(number),
            }
            if let Some(channel) = self.channels.get_mut(number) {
                channel.is_welcome_due = true;
                self.make_ready(number);
            }
        } else {
            let channel = self.new_channel(from, Some(hello));
            let channel = channel.and_then(|number| self.channels.get_mut(number));
            self.counters.unknown += u64::from(channel.is_none());
            channel.into_iter().for_each(|channel| channel.note_abilities(flags));
        }
    }

    /// A handshake of another life of the peer has arrived: the peer was restarted, or the packet is old or forged. A packet on the
    /// channel finds out: a peer that was restarted answers RESET, which ends the channel, and repeats its handshake.
    fn challenge(&mut self, number: u32) {
        let now = self.now;
        let Some(own) = self.channels.get_mut(number).filter(|own| now >= own.challenged_until) else {
            return;
        };
        own.challenged_until = now + CHALLENGE_NS;
        self.control(number, What::Control(Body::Noop, 0));
    }

    fn welcomed(&mut self, from: SocketAddr, session: u32, hello: Hello, flags: u8) {
        let number = self.addresses.get(&from).copied();
        let Some(channel) = number.and_then(|number| self.channels.get_mut(number)) else { return };
        let is_own = channel.session == session;
        channel.heard_at = if is_own { Some(self.now) } else { channel.heard_at };
        if let Some(number) = number.filter(|_| is_own && channel.peer.is_none()) {
            self.opened(number, hello, flags);
        }
    }

    /// Processes the peer's answer to the handshake.
    fn opened(&mut self, number: u32, hello: Hello, flags: u8) {
        let Some(channel) = self.channels.get_mut(number) else { return };
        channel.peer = Some(hello);
        channel.note_abilities(flags);
        channel.datagram = channel.datagram.min(usize::from(hello.datagram).max(576));
        channel.window.limit(u64::from(hello.window));
        self.make_ready(number);
    }

    pub(super) fn channel_of(&self, session: u32, from: SocketAddr) -> Option<u32> {
        let number = self.channels.number_at(session as usize & 0xfff)?;
        let channel = self.channels.get(number)?;
        (channel.session == session && channel.address == from).then_some(number)
    }

    /// Processes a packet of a channel. `placed`: the payload of a write or of pulled data, if it is not in `payload`.
    pub(super) fn take(
        &mut self,
        channel: u32,
        header: &Header,
        payload: &[u8],
        placed: Option<Span>,
        congestion: bool,
    ) {
        self.accepted += 1;
        self.acknowledged(channel, header);
        self.make_ready(channel);
        let now = self.now;
        let Some(own) = self.channels.get_mut(channel).filter(|own| own.peer.is_some()) else { return };
        own.heard_at = Some(now);
        own.arrivals.congestion |= congestion;
        if !header.body.is_numbered() {
            return;
        }
        let soon = header.flags & flags::ACK_SOON != 0;
        let place = own.arrivals.place(header.number);
        let (Place::Next(number) | Place::Ahead(number)) = place else {
            own.arrivals.note(now, soon, false);
            self.counters.useless += 1;
            return;
        };
        let kept = if header.body.carries_in_order() { payload } else { &[] };
        let cost = size_of::<Event>() + kept.len();
        let has_room = own.waiting_bytes + cost <= WAITING_BYTES_MAX
            && self.kept_bytes + cost <= self.config.kept_bytes_max;
        if matches!(place, Place::Ahead(_)) && may_wait(&header.body, header.flags) && !has_room {
            self.counters.no_memory += 1;
            return;
        }
        // SAFETY: a slice is valid for the duration of this call, and `place_bytes` only reads from the span.
        let placed = placed.unwrap_or(unsafe { Span::new(payload.as_ptr().cast_mut(), payload.len()) });
        let status = self.place_bytes(channel, &header.body, placed);
        let len = placed.len();
        let arrived = Arrived { channel, flags: header.flags, payload, len, status };
        let Some(own) = self.channels.get_mut(channel) else { return };
        if matches!(place, Place::Ahead(_)) {
            let event = needs_order(&header.body, &arrived).then(|| {
                let payload = kept.to_vec();
                Event { body: header.body, flags: header.flags, payload, len, status }
            });
            let cost = event.as_ref().map_or(0, Event::cost);
            own.waiting_bytes += cost;
            self.kept_bytes += cost;
            own.arrivals.keep(number, event);
        } else {
            own.arrivals.advance();
            self.run(&arrived, &header.body);
            while let Some(event) = self.channels.get_mut(channel).and_then(|own| own.arrivals.pop()) {
                let Some(event) = event else { continue };
                if let Some(own) = self.channels.get_mut(channel) {
                    own.waiting_bytes -= event.cost();
                    self.kept_bytes -= event.cost();
                }
                let Event { body, flags, payload, len, status } = event;
                self.run(&Arrived { channel, flags, payload: &payload, len, status }, &body);
            }
        }
        let Some(own) = self.channels.get_mut(channel) else { return };
        own.arrivals.note(now, soon, true);
        if own.control.len() > CONTROL_MAX {
            self.fail_channel(channel, Status::Protocol);
        }
    }

    /// Processes the acknowledgement in a packet's header.
    fn acknowledged(&mut self, channel: u32, header: &Header) {
        let mut done = std::mem::take(&mut self.done);
        if let Some(own) = self.channels.get_mut(channel) {
            let congestion = header.flags & flags::CONGESTION != 0;
            own.window.acknowledge(self.now, header.ack, header.map.as_ref(), congestion, &mut done);
            if (header.failures.wrapping_sub(own.failures.0) as i16) > 0 {
                own.failures.0 = header.failures;
            }
        }
        for what in done.drain(..) {
            match what {
                What::Control(..) | What::Failure(_) | What::Offer { .. } => {}
                What::Eager { op, attempt, offset, len } => {
                    let operation = self.ops.get(op).filter(|op| op.attempt == attempt);
                    let Some(own) = self.channels.get_mut(channel) else { continue };
                    let is_over = |op: &Op| (offset + len) as usize == op.span.len() && !op.fetches();
                    if operation.is_some_and(is_over) {
                        own.held.push_back(what);
                    }
                }
                What::Data { serve, len, .. } => self.served(channel, serve, len),
                What::Found { found } => self.numbers_arrived(channel, found),
            }
        }
        self.done = done;
        self.complete_held(channel);
    }

    /// Completes acknowledged operations once all failure reports that the peer counted have arrived, because such a report may
    /// concern one of these operations.
    fn complete_held(&mut self, channel: u32) {
        while let Some(own) = self.channels.get_mut(channel) {
            if (own.failures.0.wrapping_sub(own.failures.1) as i16) > 0 {
                return;
            }
            let Some(what) = own.held.pop_front() else { return };
            let What::Eager { op, attempt, .. } = what else { continue };
            if let Some(operation) = self.ops.get(op).filter(|op| op.attempt == attempt) {
                let len = operation.len();
                self.complete_op(op, Status::Success, len);
            }
        }
    }

    /// Places the bytes of a write or a pull.
    fn place_bytes(&mut self, channel: u32, body: &Body, payload: Span) -> Status {
        match *body {
            Body::Data(data) => self.place_data(channel, data, payload),
            Body::Write(Write { to, key, at, behind, .. }) => {
                // The check includes the bytes that follow in later packets, so that a write that does not fit writes nothing.
                match self.memory.find(to, key, at, payload.len() as u64 + u64::from(behind), true) {
                    Ok(span) => {
                        span.copy_from(0, payload);
                        Status::Success
                    }
                    Err(status) => {
                        self.counters.bad_keys += 1;
                        status
                    }
                }
            }
            _ => Status::Success,
        }
    }

    /// Processes a packet after all earlier packets.
    fn run(&mut self, arrived: &Arrived, body: &Body) {
        let Arrived { channel, flags, .. } = *arrived;
        match *body {
            Body::Message(message) => self.take_message(channel, flags, message, arrived.payload),
            Body::Write(write) => self.written(arrived, write),
            Body::Placed(write) => self.placed(channel, flags, write),
            Body::Offer(offer) => self.take_offer(channel, flags, offer),
            Body::Pull(pull) => self.serve(channel, flags, pull),
            Body::Atomic(atomic) => self.take_atomic(channel, flags, &atomic, arrived.payload),
            Body::Found(found) => self.take_found(channel, found, arrived.payload),
            Body::End(end) => {
                self.ended(channel, end);
                if let Some(own) = self.channels.get_mut(channel).filter(|_| flags & flags::FAILURE != 0) {
                    own.failures.1 = own.failures.1.wrapping_add(1);
                }
                self.complete_held(channel);
            }
            Body::Credit(Credit { to, limit }) => {
                // A peer returns credits only for messages that this engine has sent.
                let own = self.channels.get_mut(channel);
                let flow = own.and_then(|own| own.flows.iter_mut().find(|flow| flow.to == to));
                if let Some(flow) = flow.filter(|flow| (limit.wrapping_sub(flow.limit) as i32) > 0) {
                    flow.limit = limit;
                }
            }
            _ => {}
        }
    }

    /// Handles a fragment of a peer's write that was placed or refused.
    fn written(&mut self, arrived: &Arrived, write: Write) {
        let Arrived { channel, flags, status, len, .. } = *arrived;
        if status != Status::Success {
            return self.fail_operation(channel, write.op, status);
        }
        if flags & flags::DATA == 0 {
            return;
        }
        let Some(own) = self.channels.get_mut(channel) else { return };
        let placed = own.writing.add(&write, len);
        if write.behind == 0 && self.admit(channel, flags, (write.to, write.seq, write.op), &Admitted::Write)
        {
            self.arrival(channel, write.to, &WriteNotice { from: write.from, data: write.data, len: placed });
        }
    }

    /// Queues the completion of a peer's write with immediate data.
    pub(super) fn arrival(&mut self, channel: u32, endpoint: u16, notice: &WriteNotice) {
        let WriteNotice { from, data, len } = *notice;
        let Some(own) = self.channels.get(channel) else { return };
        let completion = Completion {
            kind: Kind::Arrival,
            status: Status::Success,
            context: 0,
            len,
            tag: None,
            data: Some(data),
            peer: Peer { address: own.address, endpoint: from },
            offset: 0,
            is_released: false,
            is_late: false,
            buffer: None,
        };
        self.report(endpoint, completion);
    }

    /// Reports to the peer that its operation failed. Acknowledgements count the failure, so the peer does not take them for
    /// success before the report arrives.
    pub(super) fn fail_operation(&mut self, channel: u32, op: u32, status: Status) {
        let end = End { subject: Subject::Operation, status, to: 0, number: op, seq: 0 };
        self.fail_packet(channel, end);
    }

    pub(super) fn fail_packet(&mut self, channel: u32, end: End) {
        if let Some(own) = self.channels.get_mut(channel) {
            own.arrivals.failures = own.arrivals.failures.wrapping_add(1);
            self.control(channel, What::Failure(end));
        }
    }

    fn ended(&mut self, channel: u32, end: End) {
        match end.subject {
            Subject::Operation => {
                if let Some(op) = self.ops.get(end.number).filter(|op| op.channel == channel) {
                    // The target reports success only for bytes that it pulled. Acknowledgements report all other successes.
                    let (status, len) = match end.status {
                        Status::Success if op.is_offered() => (Status::Success, op.span.len() as u64),
                        Status::Success => (Status::Protocol, 0),
                        failure => (failure, 0),
                    };
                    self.complete_op(end.number, status, len);
                }
            }
            Subject::Pull => {
                if self.pulls.get(end.number).is_some_and(|pull| pull.channel == channel) {
                    let status = if end.status == Status::Success { Status::Protocol } else { end.status };
                    self.finish_pull(end.number, status);
                }
            }
            Subject::NotReady => self.send_again(channel, end.to, end.seq),
        }
    }

    /// The endpoint was not ready for message `seq`: schedules this message and all messages behind it for another attempt
    /// after a pause.
    fn send_again(&mut self, channel: u32, to: u16, seq: u32) {
        let now = self.now;
        let Some(own) = self.channels.get_mut(channel) else { return };
        let Some(flow) = own.flows.iter_mut().find(|flow| flow.to == to) else { return };
        let mut again = vec![];
        let ops = &mut self.ops;
        let is_again = |op: &Op| op.seq.is_some_and(|own| (own.wrapping_sub(seq) as i32) >= 0);
        flow.sent.retain(|id| {
            let Some(op) = ops.get(*id) else { return false };
            if is_again(op) {
                again.push(*id);
            }
            !is_again(op)
        });
        // Another operation that has begun, of which the endpoint throws away the rest, begins again behind these.
        let begun = flow.front().filter(|(id, _)| ops.get(*id).is_some_and(|op| op.sent > 0));
        if let Some((id, false)) = begun {
            flow.pop();
            flow.again.push_back(id);
        }
        for id in again.iter().copied().chain(begun.map(|(id, _)| id)) {
            if let Some(op) = ops.get_mut(id) {
                if op.is_offered_write() && op.sent > 0 {
                    flow.writes_offered -= 1;
                }
                (op.sent, op.attempt, op.resumes) = (0, op.attempt.wrapping_add(1), false);
            }
        }
        for id in again.into_iter().rev() {
            flow.again.push_front(id);
        }
        let since = *flow.not_ready_since.get_or_insert(now);
        let pause = (now - since).clamp(NOT_READY_FIRST_NS, NOT_READY_MAX_NS);
        (flow.resume, flow.paused_until) = (true, now + pause);
    }
}

/// Whether a packet that is ahead of earlier packets may have to wait for them; a write that is refused waits, too.
fn may_wait(body: &Body, flags: u8) -> bool {
    match body {
        Body::Data(_) | Body::Noop => false,
        Body::Write(_) => flags & flags::DATA != 0,
        _ => true,
    }
}

/// Whether a packet may be processed only after all earlier packets.
fn needs_order(body: &Body, arrived: &Arrived) -> bool {
    match body {
        Body::Data(_) | Body::Noop => false,
        Body::Write(_) => arrived.status != Status::Success || arrived.flags & flags::DATA != 0,
        _ => true,
    }
}

impl Op {
    /// Whether the peer may pull the bytes of the operation.
    pub(super) fn is_offered(&self) -> bool {
        !self.is_eager && !matches!(self.form, Form::Read { .. })
    }
}
