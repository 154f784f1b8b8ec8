//! Creation of packets.
//!
//! A channel sends in this order, as far as the window allows: its handshake, lost packets, control packets, then operation
//! fragments and pulled data alternately, of endpoints whose shares allow it (`shares.rs`). An acknowledgement piggybacks on any of
//! these packets, or is sent alone when its delay has expired.
//!
//! A channel that is held back by shares waits in `short` for the next round, which begins when no other channel has anything to send, or in
//! `limited` until a rate allows another packet. It is still ready for all that shares do not hold back.

use std::net::SocketAddr;

use super::super::channel::{
    Channel, FETCHING_MAX, Flow, Form, NOTICED_WRITES_MAX, Numbers, Op, Reports, Serve, WRITES_OFFERED_MAX,
    What,
};
use super::super::memory::Span;
use super::super::status::Status;
use super::super::wire::{
    Atomic, Body, DATA_HEADER, Data, Encoded, Found, Header, Hello, MAP, Message, Offer, Write, flags,
};
use super::Engine;
use super::parts::PARTS_MAX;

/// Number of packets that a channel may send before the other channels get a turn: as many as one system call sends.
const TURN: u32 = 64;
const TURN_IN_PARTS: u32 = TURN / PARTS_MAX as u32;
const HELLO_FIRST_NS: u64 = 5_000_000;
const HELLO_MAX_NS: u64 = 500_000_000;

/// A packet to send.
pub struct Departure {
    /// Destination address.
    pub to: SocketAddr,
    /// First part of the packet: the encoded header.
    pub header: Encoded,
    /// Second part of the packet: the payload. It must be read before the next call of the engine by which an operation may end.
    pub payload: Span,
    /// To be sent through the stream to this peer.
    pub by_stream: bool,
    /// Larger than a datagram, so it is sent in parts (`engine/parts.rs`): size in bytes of the largest packet that fits into one datagram.
    /// 0: it is sent as one datagram, or through a stream.
    pub parts_of: usize,
}

impl Departure {
    /// No packet yet; see [`Engine::depart_into`].
    pub fn empty() -> Self {
        let nowhere = SocketAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into(), 0);
        Self { to: nowhere, header: Encoded::EMPTY, payload: Span::EMPTY, by_stream: false, parts_of: 0 }
    }

    /// Whether the packet opens a channel or invites the peer to shared memory, so that it takes the network.
    pub(crate) fn is_handshake(&self) -> bool {
        matches!(self.header.as_bytes()[0] & 15, 0 | 1 | 14)
    }
}

/// A fragment cut from an operation, or a packet without payload.
struct Cut {
    what: What,
    body: Body,
    flags: u8,
    payload: Span,
    /// The endpoint whose share it takes, and bytes that it takes besides those of the packet.
    charged: Option<(u16, u64)>,
    by_stream: bool,
}

impl Cut {
    fn free(what: What, body: Body) -> Self {
        Self { what, body, flags: 0, payload: Span::EMPTY, charged: None, by_stream: false }
    }
}

impl Engine {
    /// Returns the next packet to send, or `None` if nothing can be sent now.
    pub fn depart(&mut self, now: u64) -> Option<Departure> {
        let mut out = Departure::empty();
        self.depart_into(now, &mut out).then_some(out)
    }

    /// Like `depart`, but in the place of another packet, because moving a packet takes as long as making it. Returns whether there
    /// is one.
    pub fn depart_into(&mut self, now: u64, out: &mut Departure) -> bool {
        self.now = now;
        if let Some((to, session)) = self.resets.pop_front() {
            let header =
                Header { flags: 0, failures: 0, session, number: 0, ack: 0, map: None, body: Body::Reset };
            return self.departs(to, &header, Span::EMPTY, out);
        }
        if now >= self.limited_until {
            self.end_limits();
        }
        self.ask();
        loop {
            // Reads start their pulls when the flows cut them, so there may be bytes to request that there were not before.
            if self.ready.is_empty() {
                self.ask();
            }
            let Some(number) = self.ready.front().copied() else {
                if self.short.is_empty() {
                    break;
                }
                self.next_round();
                continue;
            };
            self.shares.take_held();
            if self.depart_from(now, number, out).is_some() {
                let turn = if out.parts_of > 0 { TURN_IN_PARTS } else { TURN };
                if self.counters.packets_out.is_multiple_of(u64::from(turn)) {
                    self.ready.rotate_left(1);
                }
                return true;
            }
            self.ready.pop_front();
            let held = self.shares.take_held();
            if let Some(channel) = self.channels.get_mut(number) {
                channel.is_queued = false;
                if let Some(rounds) = held.rounds {
                    self.short_rounds = self.short_rounds.min(rounds);
                    if !std::mem::replace(&mut channel.is_short, true) {
                        self.short.push_back(number);
                    }
                }
                if let Some(until) = held.until {
                    self.limited_until = self.limited_until.min(until);
                    if !std::mem::replace(&mut channel.is_limited, true) {
                        self.limited.push(number);
                    }
                }
                if channel.arrivals.due().is_some() && channel.peer.is_some() && !self.late.contains(&number)
                {
                    self.late.push_back(number);
                }
            }
        }
        for _ in 0..self.late.len() {
            let Some(number) = self.late.pop_front() else { break };
            let Some(channel) = self.channels.get_mut(number) else { continue };
            match channel.arrivals.due() {
                None => {}
                Some(due) if due > now => self.late.push_back(number),
                Some(_) => {
                    let header = channel.header(0, 0, Body::Ack, true);
                    let to = channel.address;
                    return self.departs(to, &header, Span::EMPTY, out);
                }
            }
        }
        false
    }

    /// Begins the next round of shares in which a channel that waits may send.
    fn next_round(&mut self) {
        self.shares.advance(std::mem::replace(&mut self.short_rounds, u64::MAX), self.short.len());
        for number in std::mem::take(&mut self.short) {
            if let Some(channel) = self.channels.get_mut(number) {
                channel.is_short = false;
                self.make_ready(number);
            }
        }
    }

    /// Has the channels look again that a rate held back.
    fn end_limits(&mut self) {
        self.limited_until = u64::MAX;
        for number in std::mem::take(&mut self.limited) {
            if let Some(channel) = self.channels.get_mut(number) {
                channel.is_limited = false;
                self.make_ready(number);
            }
        }
    }

    /// Makes delayed acknowledgements due now. The caller is about to sleep.
    pub fn hurry(&mut self) {
        for number in &self.late {
            if let Some(channel) = self.channels.get_mut(*number) {
                channel.arrivals.hurry();
            }
        }
    }

    #[inline]
    fn departs(&mut self, to: SocketAddr, header: &Header, payload: Span, out: &mut Departure) -> bool {
        self.counters.packets_out += 1;
        (out.to, out.payload, out.by_stream, out.parts_of) = (to, payload, false, 0);
        header.encode_to(&mut out.header);
        true
    }

    /// Makes the channel's next packet. `None`: nothing can be sent now.
    fn depart_from(&mut self, now: u64, number: u32, out: &mut Departure) -> Option<()> {
        let channel = self.channels.get_mut(number)?;
        let to = channel.address;
        if let Some(body) = Self::greeting(channel, now, self.epoch, &self.config) {
            let session = channel.peer.map_or(0, |peer| peer.session);
            let flags = flags::IN_ORDER | if self.config.takes_parts { flags::PARTS } else { 0 };
            let header = Header { flags, failures: 0, session, number: 0, ack: 0, map: None, body };
            return self.departs(to, &header, Span::EMPTY, out).then_some(());
        }
        channel.peer?;
        if let Some(header) = self.invitation(now, number).or_else(|| self.stream_invitation(now, number)) {
            return self.departs(to, &header, Span::EMPTY, out).then_some(());
        }
        let channel = self.channels.get_mut(number)?;
        if let Some((psn, what)) = channel.window.resend(now) {
            self.counters.resent += 1;
            let what = channel.cut_smaller(now, psn, what);
            let cut = self.cut_again(number, what);
            self.charge(now, &cut);
            let header =
                self.channels.get_mut(number)?.header(cut.flags | flags::ACK_SOON, psn, cut.body, false);
            return self.departs(to, &header, cut.payload, out).then_some(());
        }
        if let Some(piece) = channel.next_piece_alone(now, &mut self.shares) {
            let header = channel.piece_header(now, &piece, &mut self.shares);
            let parts_of = channel.parts_of(DATA_HEADER + piece.payload.len(), piece.by_stream);
            self.departs(to, &header, piece.payload, out);
            (out.by_stream, out.parts_of) = (piece.by_stream, parts_of);
            return Some(());
        }
        let cut = self.next_cut(now, number)?;
        let is_last_for_now = self.charge(now, &cut);
        let channel = self.channels.get_mut(number)?;
        let is_awaited = match cut.what {
            What::Data { .. } | What::Offer { .. } => true,
            // Nobody waits for the end of a buffered or quiet operation: its acknowledgement can travel with the peer's answer.
            What::Eager { op, .. } => {
                let is_reported = self.ops.get(op).is_some_and(|op| op.reports == Reports::Any);
                is_reported || channel.window.wants_round_trip(now)
            }
            _ => false,
        };
        let bytes = Header::len(&cut.body, false) + cut.payload.len();
        let soon =
            channel.window.is_half_full() || is_awaited && (is_last_for_now || channel.is_last_of_all());
        let psn = channel.window.send(now, cut.what, bytes, soon);
        if cut.by_stream {
            channel.window.put_into_stream();
        }
        channel.last_sent_at = now;
        let has_map_room = channel.has_map_room(bytes, MAP);
        let flags = cut.flags | if soon { flags::ACK_SOON } else { 0 };
        let header = match cut.by_stream {
            true => channel.header_in_stream(flags, psn, cut.body),
            false => channel.header(flags, psn, cut.body, has_map_room),
        };
        let parts_of = channel.parts_of(bytes, cut.by_stream);
        self.departs(to, &header, cut.payload, out);
        (out.by_stream, out.parts_of) = (cut.by_stream, parts_of);
        Some(())
    }

    /// Charges a packet to its endpoint. Returns whether a rate limit holds the endpoint's next one back.
    fn charge(&mut self, now: u64, cut: &Cut) -> bool {
        let Some((endpoint, besides)) = cut.charged else { return false };
        let bytes = Header::len(&cut.body, false) + cut.payload.len();
        self.shares.spend(now, endpoint, bytes as u64 + besides)
    }

    /// Returns the channel's handshake packet if it is due.
    fn greeting(channel: &mut Channel, now: u64, epoch: u64, config: &super::Config) -> Option<Body> {
        let hello = Hello {
            epoch,
            channel: channel.number,
            session: channel.session,
            window: config.receive_budget as u32,
            datagram: channel.datagram as u16,
        };
        if channel.is_welcome_due {
            channel.is_welcome_due = false;
            return Some(Body::Welcome(hello));
        }
        if channel.peer.is_none() && now >= channel.hello_at {
            channel.hello_at = now + (HELLO_FIRST_NS << channel.hellos.min(7)).min(HELLO_MAX_NS);
            channel.hellos += 1;
            return Some(Body::Hello(hello));
        }
        None
    }

    fn next_cut(&mut self, now: u64, number: u32) -> Option<Cut> {
        if let Some(cut) = self.next_control(number) {
            return Some(cut);
        }
        let channel = self.channels.get_mut(number)?;
        let has_room = channel.window.has_room(channel.datagram);
        if !has_room && !channel.can_stream() {
            return None;
        }
        channel.is_data_turn = !channel.is_data_turn;
        // While no flow can send, pulled data need not leave them room.
        let alone = channel.is_data_turn && (channel.flows_wait || channel.flows.iter().all(Flow::is_empty));
        let of_flows = |engine: &mut Self| {
            let cut = has_room.then(|| engine.next_of_flows(now, number)).flatten();
            engine.channels.get_mut(number)?.flows_wait = has_room && cut.is_none();
            cut
        };
        let cut = if channel.is_data_turn {
            self.next_data(now, number, alone).or_else(|| of_flows(self))
        } else {
            of_flows(self).or_else(|| self.next_data(now, number, has_room))
        };
        // A flow that starts a read may have queued its request.
        cut.or_else(|| self.next_control(number))
    }

    fn next_control(&mut self, number: u32) -> Option<Cut> {
        let channel =
            self.channels.get_mut(number).filter(|channel| channel.window.has_room_for_control())?;
        let what = channel.control.pop_front()?;
        Some(self.cut_again(number, what))
    }

    /// Cuts the next fragment of the bytes that the peer requested.
    fn next_data(&mut self, now: u64, number: u32, alone: bool) -> Option<Cut> {
        let piece = self.channels.get_mut(number)?.next_piece(now, &mut self.shares, alone)?;
        let (charged, by_stream) = (Some((piece.endpoint, 0)), piece.by_stream);
        Some(Cut {
            payload: piece.payload,
            charged,
            by_stream,
            ..Cut::free(piece.what(), Body::Data(piece.data))
        })
    }

    /// Cuts the next fragment, offer or request of the flows. The flows take turns; a turn is one whole operation, because the
    /// target assembles one message of a channel at a time.
    fn next_of_flows(&mut self, now: u64, number: u32) -> Option<Cut> {
        let flows = self.channels.get(number)?.flows.len();
        for _ in 0..flows {
            let turn = self.channels.get(number)?.turn;
            match self.next_of_flow(now, number, turn) {
                Some(cut) => return Some(cut),
                None => self.channels.get_mut(number)?.turn = (turn + 1) % flows,
            }
        }
        None
    }

    /// Cuts the next packet of a flow. What is sent again goes first; then the lanes of this engine's endpoints take turns of one
    /// operation, as their shares allow.
    fn next_of_flow(&mut self, now: u64, number: u32, turn: usize) -> Option<Cut> {
        let mut lanes = self.channels.get(number)?.flows[turn].lanes.len();
        loop {
            let channel = self.channels.get_mut(number)?;
            let datagram = channel.datagram - if channel.arrivals.has_gaps() { MAP } else { 0 };
            let (id, is_again) = channel.flows[turn].front()?;
            let Some(op) = self.ops.get_mut(id) else {
                channel.flows[turn].pop();
                continue;
            };
            // The peer would end further writes with "not ready".
            let is_full = op.is_offered_write() && channel.writes_offered() >= WRITES_OFFERED_MAX;
            let flow = &mut channel.flows[turn];
            // Other endpoints' messages start only while no write is under way: overlapping writes of one endpoint must not starve them.
            let overlaps = channel.peer_orders && flow.lanes.len() <= 1;
            let writes_max = if overlaps { NOTICED_WRITES_MAX } else { 1 };
            let is_read = matches!(op.form, Form::Read { .. });
            let has_room = !(op.fetches() && channel.fetching >= FETCHING_MAX
                || is_read && self.pulls.is_full()
                || is_full);
            // What has begun goes on, what is sent again is not held back, and a read sends nothing.
            let is_free = is_again || op.sent > 0 || is_read;
            let may_start = has_room && may_start(flow, op, now, writes_max);
            if !may_start || !is_free && !self.shares.admit(now, op.endpoint) {
                if is_again || lanes <= 1 {
                    return None;
                }
                lanes -= 1;
                flow.lanes.pass();
                continue;
            }
            if is_read {
                flow.pop();
                flow.sent.push_back(id);
                self.start_read(id);
                continue;
            }
            if op.is_seen() && op.seq.is_none() {
                op.seq = Some(flow.next_seq);
                flow.next_seq = flow.next_seq.wrapping_add(1);
            }
            if op.is_seen() && op.sent == 0 {
                op.resumes = std::mem::take(&mut flow.resume);
            }
            if op.is_offered_write() {
                flow.writes_offered += 1;
            }
            if op.fetches() {
                channel.fetching += 1;
                op.is_fetching = true;
            }
            let what = cut_op(op, id, datagram);
            // A flow that joins now must not cut the operation in half, so the turn is always the index of a flow.
            channel.turn = turn;
            if op.sent as usize == op.span.len() || !op.is_eager {
                flow.pop();
                flow.lanes.pass();
                while flow.sent.front().is_some_and(|id| self.ops.get(*id).is_none()) {
                    flow.sent.pop_front();
                }
                flow.sent.push_back(id);
                channel.turn = (turn + 1) % channel.flows.len();
            }
            return Some(self.cut_again(number, what));
        }
    }

    /// Builds a packet from its content, for the first transmission or a retransmission.
    fn cut_again(&mut self, number: u32, what: What) -> Cut {
        let nothing = |what| Cut::free(what, Body::Noop);
        match what {
            What::Control(body, flags) => Cut { flags, ..Cut::free(what, body) },
            What::Failure(end) => Cut { flags: flags::FAILURE, ..Cut::free(what, Body::End(end)) },
            What::Eager { op, attempt, offset, len } => {
                let operation = self.ops.get(op).filter(|operation| operation.attempt == attempt);
                operation
                    .and_then(|operation| eager(operation, op, offset, len, what))
                    .unwrap_or(nothing(what))
            }
            What::Offer { op, attempt } => {
                let operation = self.ops.get(op).filter(|operation| operation.attempt == attempt);
                operation.map_or(nothing(what), |operation| offer(operation, op, what))
            }
            What::Data { serve, offset, len } => {
                let serve = self.channels.get(number).and_then(|channel| channel.serves.get(serve));
                let found = serve.and_then(|serve| {
                    let payload = serve.span.part(u64::from(offset), u64::from(len))?;
                    let data = Data { pull: serve.pull, offset: serve.offset + u64::from(offset) };
                    let charged = Some((serve.endpoint, 0));
                    Some(Cut { payload, charged, ..Cut::free(what, Body::Data(data)) })
                });
                found.unwrap_or(nothing(what))
            }
            What::Found { found } => {
                let numbers = self.channels.get_mut(number).and_then(|channel| channel.found.get_mut(found));
                numbers.map_or(nothing(what), |numbers| numbers.cut(what))
            }
        }
    }

    /// Queues a control packet.
    pub(super) fn control(&mut self, number: u32, what: What) {
        if let Some(channel) = self.channels.get_mut(number) {
            channel.control.push_back(what);
            self.make_ready(number);
        }
    }

    /// Queues a packet to every peer which says that this engine shuts down. `depart` returns these packets.
    pub fn say_goodbye(&mut self) {
        for number in self.channels.numbers(|channel| channel.peer.is_some()) {
            if let Some(channel) = self.channels.get(number) {
                self.resets.push_back((channel.address, channel.session));
            }
            self.fail_channel(number, Status::Cancelled);
        }
    }
}

/// Whether the operation may be sent now. A large write with immediate data needs fewer than
/// `writes_max` writes under way.
fn may_start(flow: &Flow, op: &Op, now: u64, writes_max: u32) -> bool {
    if op.sent > 0 {
        return true;
    }
    if op.is_plain_write() {
        return true;
    }
    let has_credit = !op.is_seen() || op.seq.is_some() || (flow.next_seq.wrapping_sub(flow.limit) as i32) < 0;
    let writes_max = if op.is_offered_write() { writes_max } else { 1 };
    flow.writes_offered < writes_max && now >= flow.paused_until && has_credit
}

/// Cuts the next packet off an operation.
fn cut_op(op: &mut Op, id: u32, datagram: usize) -> What {
    if !op.is_eager {
        op.sent = 1;
        return What::Offer { op: id, attempt: op.attempt };
    }
    let own = match op.form {
        Form::Write { .. } | Form::Placed { .. } => 40,
        // The values always fit into one packet: `ATOMIC_BYTES_MAX`.
        Form::Atomic { .. } => 28,
        _ => 36,
    };
    let room = datagram - super::super::wire::COMMON - own;
    let offset = op.sent;
    let len = room.min(op.span.len() - offset as usize) as u32;
    op.sent += len;
    What::Eager { op: id, attempt: op.attempt, offset, len }
}

fn eager(op: &Op, number: u32, offset: u32, len: u32, what: What) -> Option<Cut> {
    let payload = op.span.part(u64::from(offset), u64::from(len))?;
    let total = op.span.len() as u32;
    let (to, from, seq, data) = (op.to, op.endpoint, op.seq.unwrap_or(0), op.data.unwrap_or(0));
    let mut flags = if op.data.is_some() { flags::DATA } else { 0 };
    flags |= if op.resumes { flags::RESUME } else { 0 };
    let body = match op.form {
        Form::Write { key, at } => {
            let (at, behind) = (at.wrapping_add(u64::from(offset)), total - offset - len);
            Body::Write(Write { to, from, op: number, seq, behind, key, at, data })
        }
        Form::Placed { key, at, len } => {
            Body::Placed(Write { to, from, op: number, seq, behind: len, key, at, data })
        }
        Form::Message { tag } => {
            flags |= if tag.is_some() { flags::TAGGED } else { 0 };
            Body::Message(Message { to, from, op: number, seq, total, offset, tag: tag.unwrap_or(0), data })
        }
        Form::Atomic { key, at, change, datatype, count, found } => {
            flags |= if found.is_some() { flags::DATA } else { 0 };
            Body::Atomic(Atomic { to, from, op: number, change, datatype, count, key, at })
        }
        Form::Read { .. } => return None,
    };
    // Bytes that are in place already were this endpoint's, too.
    let besides = if let Form::Placed { len, .. } = op.form { len.into() } else { 0 };
    Some(Cut { flags, payload, charged: Some((op.endpoint, besides)), ..Cut::free(what, body) })
}

fn offer(op: &Op, number: u32, what: What) -> Cut {
    let mut flags = if op.data.is_some() { flags::DATA } else { 0 };
    flags |= if op.resumes { flags::RESUME } else { 0 };
    let (tag, at) = match op.form {
        Form::Message { tag } => {
            flags |= if tag.is_some() { flags::TAGGED } else { 0 };
            (tag.unwrap_or(0), 0)
        }
        Form::Write { key, at }
        | Form::Placed { key, at, .. }
        | Form::Read { key, at }
        | Form::Atomic { key, at, .. } => {
            flags |= flags::MEMORY;
            (key, at)
        }
    };
    let (seq, total, data) = (op.seq.unwrap_or(0), op.span.len() as u64, op.data.unwrap_or(0));
    let body = Body::Offer(Offer { to: op.to, from: op.endpoint, op: number, seq, total, tag, at, data });
    Cut { flags, charged: Some((op.endpoint, 0)), ..Cut::free(what, body) }
}

impl Numbers {
    fn cut(&mut self, what: What) -> Cut {
        // SAFETY: the vector is kept with its entry, unchanged, until the peer has acknowledged it; the packet is sent before
        // that, and nothing writes through the span.
        let payload = unsafe { Span::new(self.bytes.as_mut_ptr(), self.bytes.len()) };
        Cut { payload, ..Cut::free(what, Body::Found(Found { op: self.op })) }
    }
}

impl Channel {
    /// Builds a header that includes the current acknowledgement.
    #[inline]
    pub(super) fn header(&mut self, flags: u8, number: u64, body: Body, has_map_room: bool) -> Header {
        let (ack, map) = self.arrivals.acknowledge(has_map_room);
        let congestion = if std::mem::take(&mut self.arrivals.congestion) { flags::CONGESTION } else { 0 };
        let session = self.peer.map_or(0, |peer| peer.session);
        let failures = self.arrivals.failures;
        Header { flags: flags | congestion, failures, session, number: number as u32, ack, map, body }
    }

    /// Like `header`, for a stream packet. It may arrive late, so a datagram still has to carry the acknowledgement that is due.
    pub(super) fn header_in_stream(&self, flags: u8, number: u64, body: Body) -> Header {
        let (ack, failures) = (self.arrivals.expected(), self.arrivals.failures);
        let session = self.peer.map_or(0, |peer| peer.session);
        Header { flags, failures, session, number: number as u32, ack, map: None, body }
    }

    /// Whether the packet that was just cut is the last one, with nothing left to send for now.
    pub(super) fn is_last_of_all(&self) -> bool {
        self.serving.iter().all(|id| self.serves.get(id).is_none_or(Serve::is_sent))
            && self.flows.iter().all(Flow::is_empty)
    }
}
