//! Matches messages with posted buffers.

use super::super::channel::{Assembled, Assembly, CREDITS, Grant, What};
use super::super::endpoint::{Completion, Held, Kind, Match, Peer, Unexpected};
use super::super::memory::Span;
use super::super::status::Status;
use super::super::wire::{Body, Credit, End, Message, Offer, Subject, flags};
use super::super::write_order::WriteOrder;
use super::{Engine, PullSource, Purpose};

/// Upper bound on the size of a message that a peer may push, whatever the peer's own threshold is.
const EAGER_ACCEPTED_MAX: u32 = 1 << 20;

/// A message that the application has not received yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Sender of the message.
    pub from: Peer,
    /// Tag of the message, if any.
    pub tag: Option<u64>,
    /// Immediate data of the message, if any.
    pub data: Option<u64>,
    /// Length of the message in bytes.
    pub len: u64,
}

/// What a peer's packet brings for an endpoint.
pub(super) enum Admitted {
    /// `bytes`: length of the message's copy in the engine's memory, if no buffer is posted for it.
    Message { tag: Option<u64>, from: Peer, bytes: usize },
    /// A write whose bytes are in place.
    Write,
    /// A write whose bytes are to be pulled.
    LargeWrite,
}

impl Engine {
    /// Handles a fragment of a message, in order.
    pub(super) fn take_message(&mut self, channel: u32, flags: u8, message: Message, payload: &[u8]) {
        let Some(own) = self.channels.get_mut(channel) else { return };
        let from = Peer { address: own.address, endpoint: message.from };
        let tag = (flags & flags::TAGGED != 0).then_some(message.tag);
        let data = (flags & flags::DATA != 0).then_some(message.data);
        if message.offset == 0 {
            self.abandon_assembly(channel);
            let total = u64::from(message.total);
            if message.total > EAGER_ACCEPTED_MAX || payload.len() as u64 > total {
                return self.fail_operation(channel, message.op, Status::Protocol);
            }
            let name = (message.to, message.seq, message.op);
            if !self.admit(
                channel,
                flags,
                name,
                &Admitted::Message { tag, from, bytes: message.total as usize },
            ) {
                return;
            }
            let posted =
                self.endpoint_mut(message.to).and_then(|own| own.take_posted(tag, data, from, total));
            let target = match posted {
                Some((span, completion)) => {
                    self.consumed(channel, message.to, 1);
                    Assembled::Posted(span, Box::new(completion))
                }
                None => Assembled::Unexpected(self.buffer_for(message.total as usize)),
            };
            let Some(own) = self.channels.get_mut(channel) else { return };
            let Message { to, op, total, .. } = message;
            let assembly = own.assembly.insert(Assembly { to, op, total, received: 0, target });
            self.kept_bytes += assembly.cost();
        }
        let Some(own) = self.channels.get_mut(channel) else { return };
        let assembly = own.assembly.as_mut().filter(|assembly| {
            let room = assembly.total - assembly.received;
            assembly.op == message.op
                && assembly.received == message.offset
                && payload.len() as u64 <= u64::from(room)
        });
        let Some(assembly) = assembly else { return };
        match &mut assembly.target {
            Assembled::Posted(span, _) => {
                let room = (span.len() as u64).saturating_sub(u64::from(message.offset));
                let fitting = payload.len().min(room as usize);
                span.write(u64::from(message.offset), &payload[..fitting]);
            }
            Assembled::Unexpected(bytes) => bytes.extend_from_slice(payload),
        }
        assembly.received += payload.len() as u32;
        if assembly.received == assembly.total {
            self.finish_assembly(channel, from, tag, data);
        }
    }

    pub(super) fn take_assembly(&mut self, channel: u32) -> Option<Assembly> {
        let assembly = self.channels.get_mut(channel)?.assembly.take()?;
        self.kept_bytes -= assembly.cost();
        Some(assembly)
    }

    fn finish_assembly(&mut self, channel: u32, from: Peer, tag: Option<u64>, data: Option<u64>) {
        let Some(assembly) = self.take_assembly(channel) else { return };
        match assembly.target {
            Assembled::Posted(_, completion) => self.report(assembly.to, *completion),
            Assembled::Unexpected(bytes) => {
                let len = bytes.len() as u64;
                let Some(own) = self.endpoint_mut(assembly.to) else { return };
                match own.take_posted(tag, data, from, len) {
                    Some((span, completion)) => {
                        span.write(0, &bytes[..span.len()]);
                        self.report(assembly.to, completion);
                        self.consumed(channel, assembly.to, 1);
                        self.recycle(bytes);
                    }
                    None => {
                        own.hold(Unexpected { from, tag, data, len, held: Held::Bytes(bytes), claim: None })
                    }
                }
            }
        }
    }

    /// Drops a partially received message whose remaining fragments will not come, or have no endpoint any more. The origin must
    /// not take their acknowledgements for success.
    pub(super) fn abandon_assembly(&mut self, channel: u32) {
        let Some(assembly) = self.take_assembly(channel) else { return };
        self.fail_operation(channel, assembly.op, Status::NotReady);
        match assembly.target {
            Assembled::Posted(_, mut completion) => {
                completion.status = Status::Cancelled;
                self.report(assembly.to, *completion);
            }
            Assembled::Unexpected(bytes) => {
                self.recycle(bytes);
                self.consumed(channel, assembly.to, 1);
            }
        }
    }

    /// Handles the offer of a message or write.
    pub(super) fn take_offer(&mut self, channel: u32, flags: u8, offer: Offer) {
        let Some(own) = self.channels.get(channel) else { return };
        let from = Peer { address: own.address, endpoint: offer.from };
        let data = (flags & flags::DATA != 0).then_some(offer.data);
        let name = (offer.to, offer.seq, offer.op);
        if flags & flags::MEMORY != 0 {
            if data.is_some() && !self.admit(channel, flags, name, &Admitted::LargeWrite) {
                return;
            }
            if let Err(status) = self.pull_write(channel, &offer, data) {
                if data.is_some() {
                    self.consumed(channel, offer.to, 1);
                }
                self.fail_operation(channel, offer.op, status);
            }
            return;
        }
        let tag = (flags & flags::TAGGED != 0).then_some(offer.tag);
        if !self.admit(channel, flags, name, &Admitted::Message { tag, from, bytes: 0 }) {
            return;
        }
        let Some(own) = self.endpoint_mut(offer.to) else { return };
        match own.take_posted(tag, data, from, offer.total) {
            Some((span, completion)) => {
                self.consumed(channel, offer.to, 1);
                self.pull_message(channel, offer.op, offer.to, span, completion);
            }
            None => {
                let held = Held::Offer { channel, op: offer.op };
                own.hold(Unexpected { from, tag, data, len: offer.total, held, claim: None });
                if let Some(own) = self.channels.get_mut(channel) {
                    own.uses += 1;
                }
            }
        }
    }

    /// Whether the endpoint accepts a message, or the notice of a write, now. If not, the peer gets the report "receiver not ready".
    pub(super) fn admit(
        &mut self,
        channel: u32,
        flags: u8,
        (to, seq, op): (u16, u32, u32),
        what: &Admitted,
    ) -> bool {
        if !matches!(what, Admitted::LargeWrite) {
            // The peer sends these once all its large writes have ended, or it has given them up.
            self.report_arrivals(channel, to, WriteOrder::take_any);
        }
        let (kept, most) = (self.kept_bytes, self.config.unexpected_bytes_max);
        let kept_max = self.config.kept_bytes_max;
        let takes_writes = self.takes_writes(channel);
        let has_room = self.endpoint(to).is_some_and(|own| match *what {
            Admitted::Write => own.completions.len() < super::OPERATIONS_MAX,
            Admitted::LargeWrite => takes_writes && own.completions.len() < super::OPERATIONS_MAX,
            Admitted::Message { tag, from, bytes } => {
                own.has_room(bytes, most) && kept + bytes <= kept_max
                    || own.posted.iter().any(|posted| posted.matching.takes(tag, from))
            }
        });
        // The peer may send only messages for which it has credits, and each of them once.
        let is_granted = |grant: &&mut Grant| {
            (seq.wrapping_sub(grant.expected) as i32) >= 0 && (seq.wrapping_sub(grant.limit) as i32) < 0
        };
        let grant = self.channels.get_mut(channel).and_then(|own| own.grant(to)).filter(is_granted);
        let Some(grant) = grant else {
            self.fail_channel(channel, Status::Protocol);
            return false;
        };
        if flags & flags::RESUME != 0 {
            grant.is_refusing = false;
        }
        if grant.is_refusing || !has_room {
            self.counters.not_ready += 1;
            if !std::mem::replace(&mut grant.is_refusing, true) {
                let end = End { subject: Subject::NotReady, status: Status::NotReady, to, number: op, seq };
                self.fail_packet(channel, end);
            }
            return false;
        }
        // Skips the numbers of messages that ended at their origin before they were sent.
        let skipped = seq.wrapping_sub(grant.expected);
        grant.expected = seq.wrapping_add(1);
        if skipped > 0 {
            self.consumed(channel, to, skipped);
        }
        true
    }

    /// The application has received messages of a peer: returns as many credits to the peer.
    pub(super) fn consumed(&mut self, channel: u32, to: u16, count: u32) {
        let Some(grant) = self.channels.get_mut(channel).and_then(|own| own.grant(to)) else { return };
        grant.consumed = grant.consumed.wrapping_add(count);
        let limit = grant.consumed.wrapping_add(CREDITS);
        if limit.wrapping_sub(grant.limit) >= CREDITS / 2 {
            grant.limit = limit;
            self.control(channel, What::Control(Body::Credit(Credit { to, limit }), 0));
        }
    }

    /// Fills the most recently posted buffer with an unexpected message that matches. Returns false if there is none.
    pub(super) fn take_unexpected(&mut self, endpoint: u16) -> bool {
        let Some(own) = self.endpoint_mut(endpoint) else { return false };
        let Some(posted) = own.posted.back() else { return false };
        let matching = posted.matching;
        let place = own
            .unexpected
            .iter()
            .position(|message| message.claim.is_none() && matching.takes(message.tag, message.from));
        let Some(message) = place.and_then(|place| own.release(place)) else { return false };
        // Buffers that were posted earlier do not match, because otherwise they would already hold the message.
        let Some((span, completion)) = own.take_posted(message.tag, message.data, message.from, message.len)
        else {
            return false;
        };
        self.deliver_held(endpoint, message, span, completion);
        true
    }

    fn deliver_held(&mut self, endpoint: u16, message: Unexpected, span: Span, completion: Completion) {
        match message.held {
            Held::Bytes(bytes) => {
                span.write(0, &bytes[..span.len()]);
                self.recycle(bytes);
                self.report(endpoint, completion);
                if let Some(channel) = self.addresses.get(&message.from.address).copied() {
                    self.consumed(channel, endpoint, 1);
                }
            }
            Held::Offer { channel, op } => {
                self.offer_leaves(channel);
                self.consumed(channel, endpoint, 1);
                self.pull_message(channel, op, endpoint, span, completion);
            }
        }
    }

    /// An endpoint holds an offer of this channel no longer.
    pub(super) fn offer_leaves(&mut self, channel: u32) {
        if let Some(own) = self.channels.get_mut(channel) {
            own.uses -= 1;
        }
    }

    /// Starts to pull an offered message into its buffer.
    pub(super) fn pull_message(
        &mut self,
        channel: u32,
        op: u32,
        endpoint: u16,
        span: Span,
        completion: Completion,
    ) {
        if self.pulls.is_full() {
            self.end_operation(channel, op, Status::NotReady);
            return self.report(endpoint, Completion { status: Status::NotReady, ..completion });
        }
        let purpose = Purpose::Message(endpoint, Box::new(completion));
        self.start_pull(channel, PullSource::Offer(op), endpoint, span, purpose);
    }

    /// Finds an unexpected message that `matching` accepts, without receiving it. `claim` reserves the message for
    /// `receive_claimed` with this number.
    pub fn peek(&mut self, endpoint: u16, matching: &Match, claim: Option<u64>) -> Option<Seen> {
        let own = self.endpoint_mut(endpoint)?;
        let found = own
            .unexpected
            .iter_mut()
            .find(|message| message.claim.is_none() && matching.takes(message.tag, message.from))?;
        found.claim = claim;
        Some(Seen { from: found.from, tag: found.tag, data: found.data, len: found.len })
    }

    /// Receives the message that was reserved with `claim`, or discards it if there is no span. Returns false if no such
    /// message exists.
    pub fn receive_claimed(&mut self, endpoint: u16, claim: u64, span: Option<Span>, context: u64) -> bool {
        let Some(own) = self.endpoint_mut(endpoint) else { return false };
        let place = own.unexpected.iter().position(|message| message.claim == Some(claim));
        let Some(message) = place.and_then(|place| own.release(place)) else { return false };
        let Unexpected { from: peer, tag, data, len, .. } = message;
        let is_cut = span.is_some_and(|span| len > span.len() as u64);
        let status = if is_cut { Status::Truncated } else { Status::Success };
        let span = span.map_or(Span::EMPTY, |span| span.first(len));
        let completion = Completion {
            kind: Kind::Receive,
            status,
            context,
            len,
            tag,
            data,
            peer,
            offset: 0,
            is_released: true,
            is_late: false,
            buffer: None,
        };
        self.deliver_held(endpoint, message, span, completion);
        true
    }
}
