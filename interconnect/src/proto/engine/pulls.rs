//! Pulls: requests for the bytes of large messages, large writes and reads.
//!
//! One budget bounds the bytes that were requested from all peers together and have not arrived (`asking.rs`).

use super::super::channel::{Channel, Form, PULLING_MAX, Serve, Source, WRITES_OFFERED_MAX, What};
use super::super::endpoint::Completion;
use super::super::memory::{Key, Span};
use super::super::ranges::Ranges;
use super::super::status::Status;
use super::super::wire::{Body, Data, End, Offer, Pull as PullBody, Subject, flags};
use super::super::write_order::{WriteNotice, WriteOrder};
use super::{Engine, Pull, PullSource, Purpose};

/// Maximum number of bytes that a pull without budget requests by one packet. Its requests are sent at once, and a peer serves
/// `SERVES_MAX`.
const FREE_CHUNK: u64 = 1 << 30;

impl Engine {
    /// Starts to pull the bytes of an offer or a region. Returns the number of the pull.
    pub(super) fn start_pull(
        &mut self,
        channel: u32,
        source: PullSource,
        to: u16,
        span: Span,
        purpose: Purpose,
    ) -> Option<u32> {
        let is_empty = span.is_empty();
        self.want_stream(channel, span.len());
        let own = self.channels.get(channel);
        // Streams and rings have flow control of their own.
        let has_way = |own: &Channel| own.local.is_some() || own.stream.is_incoming;
        let is_free = own.is_some_and(|own| has_way(own) && own.pulling < PULLING_MAX);
        // The endpoint of the peer whose share the bytes are.
        let sender = match &purpose {
            Purpose::Read(_) => to,
            Purpose::Message(_, completion) => completion.peer.endpoint,
            Purpose::Write { from, .. } => *from,
        };
        let pull =
            Pull { channel, source, to, span, asked: 0, received: Ranges::default(), purpose, group: None };
        let id = self.pulls.insert(pull);
        debug_assert!(id.is_some(), "callers look for room first");
        if let Some(own) = self.channels.get_mut(channel).filter(|_| id.is_some()) {
            own.uses += 1;
        }
        if is_empty {
            self.finish_pull(id?, Status::Success);
        } else if is_free {
            while self.request(id?, FREE_CHUNK) {}
        } else {
            let group = self.asking.join((channel, sender), id?);
            if let Some(pull) = self.pulls.get_mut(id?) {
                pull.group = group;
            }
            self.make_ready(channel);
        }
        id
    }

    pub(super) fn start_read(&mut self, id: u32) {
        let Some(op) = self.ops.get_mut(id) else { return };
        let Form::Read { key, at } = op.form else { return };
        let (channel, to, span) = (op.channel, op.to, op.span);
        let pull = self.start_pull(channel, PullSource::Key { key, at }, to, span, Purpose::Read(id));
        if let Some(op) = self.ops.get_mut(id) {
            op.pull = pull;
        }
    }

    /// Starts to pull a peer's large write.
    pub(super) fn pull_write(
        &mut self,
        channel: u32,
        offer: &Offer,
        data: Option<u64>,
    ) -> Result<(), Status> {
        let span = self.memory.find(offer.to, offer.tag, offer.at, offer.total, true).inspect_err(|_| {
            self.counters.bad_keys += 1;
        })?;
        if !self.takes_writes(channel) {
            return Err(Status::NotReady);
        }
        let own = self.channels.get_mut(channel).ok_or(Status::Cancelled)?;
        // A peer without IN_ORDER does not say when it has given a write up, so no arrival may wait for it. It offers one such write at a time.
        let place =
            if own.peer_orders { own.grant(offer.to).map(|grant| grant.writes.begin()) } else { None };
        own.writes_taken += 1;
        let purpose = Purpose::Write { endpoint: offer.to, key: offer.tag, from: offer.from, data, place };
        self.start_pull(channel, PullSource::Offer(offer.op), offer.to, span, purpose);
        Ok(())
    }

    /// Whether there is room for another large write of this peer.
    pub(super) fn takes_writes(&self, channel: u32) -> bool {
        let taken = self.channels.get(channel).map_or(0, |own| own.writes_taken);
        self.pulls.len() < super::PULLS_MAX / 2 && taken < WRITES_OFFERED_MAX
    }

    /// Requests more bytes, as far as the budget allows.
    pub(super) fn ask(&mut self) {
        if !self.asking.take_due() {
            return;
        }
        let mut tries = self.asking.waiting();
        while tries > 0 {
            let Some((group, first)) = self.asking.front() else { return };
            let Some(id) = first else {
                self.asking.pass();
                tries -= 1;
                continue;
            };
            let Some(pull) = self.pulls.get(id) else {
                self.asking.skip();
                continue;
            };
            let begins = pull.asked == 0;
            let left = pull.span.len() as u64 - pull.asked;
            let may_begin =
                !begins || self.channels.get(pull.channel).is_some_and(|own| own.pulling < PULLING_MAX);
            match self.asking.chunk(group, left).filter(|_| may_begin) {
                Some(0) => return,
                Some(chunk) => {
                    let has_more = self.request(id, chunk);
                    self.asking.take(chunk, has_more);
                    tries = self.asking.waiting();
                }
                None => {
                    self.asking.pass();
                    tries -= 1;
                }
            }
        }
    }

    /// Requests the next bytes of a pull, at most `most`. Returns whether more remain to be requested.
    fn request(&mut self, id: u32, most: u64) -> bool {
        let Some(pull) = self.pulls.get_mut(id) else { return false };
        let (total, offset) = (pull.span.len() as u64, pull.asked);
        let len = most.min(total - offset);
        pull.asked += len;
        let (source, at, flags) = match pull.source {
            PullSource::Offer(op) => (u64::from(op), offset, 0),
            PullSource::Key { key, at } => (key, at.wrapping_add(offset), flags::MEMORY),
        };
        let body = Body::Pull(PullBody { to: pull.to, pull: id, len: len as u32, source, at, offset });
        let (number, has_more) = (pull.channel, pull.asked < total);
        if let Some(own) = self.channels.get_mut(number) {
            own.pulling += u32::from(offset == 0);
        }
        self.control(number, What::Control(body, flags));
        has_more
    }

    /// Places pulled bytes.
    pub(super) fn place_data(&mut self, channel: u32, data: Data, payload: Span) -> Status {
        let Some(pull) = self.pulls.get_mut(data.pull).filter(|pull| pull.channel == channel) else {
            // The pull failed on this side while its bytes were in flight.
            return Status::Cancelled;
        };
        let end = data.offset.checked_add(payload.len() as u64);
        if end.is_none_or(|end| end > pull.asked) || !pull.span.copy_from(data.offset, payload) {
            return Status::Protocol;
        }
        let Ok(fresh) = pull.received.add(data.offset, data.offset + payload.len() as u64) else {
            return Status::Protocol;
        };
        if let Some(group) = pull.group {
            self.asking.arrived(group, fresh);
        }
        if pull.received.bytes() == pull.span.len() as u64 {
            self.finish_pull(data.pull, Status::Success);
        }
        Status::Success
    }

    /// Ends a pull: reports to the application, and to the peer that made the offer.
    pub(super) fn finish_pull(&mut self, id: u32, status: Status) {
        let Some(pull) = self.remove_pull(id) else { return };
        let len = pull.span.len() as u64;
        if let PullSource::Offer(op) = pull.source {
            self.end_operation(pull.channel, op, status);
        }
        match pull.purpose {
            Purpose::Read(op) => self.complete_op(op, status, len),
            Purpose::Message(endpoint, mut completion) => {
                if status != Status::Success {
                    completion.status = status;
                }
                self.report(endpoint, *completion);
            }
            Purpose::Write { endpoint, from, data, place, .. } => {
                let is_success = status == Status::Success;
                let notice = data.filter(|_| is_success).map(|data| WriteNotice { from, data, len });
                match (place, notice) {
                    (Some(place), notice) => self.write_ended(pull.channel, endpoint, place, notice),
                    (None, Some(notice)) => self.arrival(pull.channel, endpoint, &notice),
                    (None, None) => {}
                }
                if data.is_some() && !is_success {
                    self.consumed(pull.channel, endpoint, 1);
                }
            }
        }
    }

    /// A peer's large write has ended: reports the arrivals that waited for it, and for no other write.
    pub(super) fn write_ended(
        &mut self,
        channel: u32,
        endpoint: u16,
        place: u64,
        notice: Option<WriteNotice>,
    ) {
        if let Some(grant) = self.channels.get_mut(channel).and_then(|own| own.grant(endpoint)) {
            grant.writes.end(place, notice);
            self.report_arrivals(channel, endpoint, WriteOrder::take_ready);
        }
    }

    /// Reports the arrivals that `take` returns.
    pub(super) fn report_arrivals(
        &mut self,
        channel: u32,
        endpoint: u16,
        take: impl Fn(&mut WriteOrder) -> Option<WriteNotice>,
    ) {
        while let Some(grant) = self.channels.get_mut(channel).and_then(|own| own.grant(endpoint)) {
            let Some(notice) = take(&mut grant.writes) else { return };
            self.arrival(channel, endpoint, &notice);
        }
    }

    /// Removes a pull from the tables and counters.
    pub(super) fn remove_pull(&mut self, id: u32) -> Option<Pull> {
        let pull = self.pulls.remove(id)?;
        if let Some(group) = pull.group {
            self.asking.arrived(group, pull.asked - pull.received.bytes());
            self.asking.leave(group);
        }
        // Another pull of the channel may begin.
        self.asking.set_due();
        if let Some(own) = self.channels.get_mut(pull.channel) {
            own.uses -= 1;
            own.pulling -= u32::from(pull.asked > 0);
            own.writes_taken -= u32::from(matches!(pull.purpose, Purpose::Write { .. }));
        }
        Some(pull)
    }

    /// Reports to the peer how its operation ended.
    pub(super) fn end_operation(&mut self, channel: u32, op: u32, status: Status) {
        let end = End { subject: Subject::Operation, status, to: 0, number: op, seq: 0 };
        self.control(channel, What::Control(Body::End(end), 0));
    }

    /// Handles a peer's request for bytes.
    pub(super) fn serve(&mut self, channel: u32, flags: u8, pull: PullBody) {
        let len = u64::from(pull.len);
        if len == 0 {
            return;
        }
        let found = if flags & flags::MEMORY != 0 {
            let span = self.memory.find(pull.to, pull.source, pull.at, len, false);
            self.counters.bad_keys += u64::from(span.is_err());
            span.map(|span| (Source::Key(pull.source), pull.to, span))
        } else {
            let number = u32::try_from(pull.source).unwrap_or(u32::MAX);
            let op = self.ops.get(number).filter(|op| op.channel == channel && op.is_offered());
            let part = op.and_then(|op| Some((op.endpoint, op.span.part(pull.at, len)?)));
            part.map(|(endpoint, span)| (Source::Offer(number), endpoint, span)).ok_or(Status::Cancelled)
        };
        // The peer counts with offsets up to the end of what it asks for.
        let found = match pull.offset.checked_add(len) {
            Some(_) => found,
            None => Err(Status::Protocol),
        };
        let status = match (found, self.channels.get_mut(channel)) {
            (Ok((source, endpoint, span)), Some(own)) => {
                let PullBody { pull: number, offset, .. } = pull;
                let serve = Serve {
                    source,
                    endpoint,
                    span,
                    pull: number,
                    offset,
                    sent: 0,
                    again: vec![],
                    arrived: 0,
                };
                match own.serves.insert(serve) {
                    Some(id) => {
                        own.serving.push(endpoint, id);
                        return;
                    }
                    None => Status::NotReady,
                }
            }
            (Ok(_), None) => return,
            (Err(status), _) => status,
        };
        self.end_pull(channel, pull.pull, status);
    }

    /// Reports to the peer that its pull fails.
    fn end_pull(&mut self, channel: u32, number: u32, status: Status) {
        let end = End { subject: Subject::Pull, status, to: 0, number, seq: 0 };
        self.control(channel, What::Control(Body::End(end), 0));
    }

    /// Pulled bytes have arrived at the peer.
    pub(super) fn served(&mut self, channel: u32, id: u32, len: u32) {
        let Some(own) = self.channels.get_mut(channel) else { return };
        let Some(serve) = own.serves.get_mut(id) else { return };
        serve.arrived += len;
        if serve.arrived as usize == serve.span.len() {
            own.serves.remove(id);
        }
    }

    /// Stops serving bytes from `source`. `status` is reported to the peer if the peer does not know it yet.
    pub(super) fn stop_serving(&mut self, channel: u32, source: Source, status: Option<Status>) {
        let Some(own) = self.channels.get_mut(channel) else { return };
        let stopped = own.serves.numbers(|serve| serve.source == source);
        for id in stopped {
            let Some(serve) = self.channels.get_mut(channel).and_then(|own| own.serves.remove(id)) else {
                continue;
            };
            if let Some(status) = status {
                self.end_pull(channel, serve.pull, status);
            }
        }
    }

    /// Memory was deregistered: fails all accesses of peers to it.
    pub(super) fn revoke(&mut self, key: Key) {
        for channel in self.channels.numbers(|channel| channel.serves.len() > 0) {
            self.stop_serving(channel, Source::Key(key), Some(Status::BadKey));
        }
        let writes = |pull: &Pull| matches!(pull.purpose, Purpose::Write { key: own, .. } if own == key);
        for id in self.pulls.numbers(writes) {
            self.finish_pull(id, Status::BadKey);
        }
    }

    /// An endpoint closes: ends its large receives.
    pub(super) fn drop_pulls_of(&mut self, endpoint: u16) {
        let own = |pull: &Pull| matches!(pull.purpose, Purpose::Message(to, _) if to == endpoint);
        for id in self.pulls.numbers(own) {
            self.finish_pull(id, Status::Cancelled);
        }
    }

    pub(super) fn report(&mut self, endpoint: u16, completion: Completion) {
        if let Some(own) = self.endpoint_mut(endpoint) {
            own.report(completion);
        }
    }
}
