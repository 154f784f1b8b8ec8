//! Endpoints: posted receives, messages that nobody waited for, completions.

use std::collections::VecDeque;
use std::net::SocketAddr;

use super::memory::Span;
use super::slab::Slab;
use super::status::Status;

/// Endpoints of one engine.
pub(super) const ENDPOINTS_MAX: usize = 1024;
/// Receives posted on one endpoint and kind.
pub(super) const POSTED_MAX: usize = 65_536;
/// Messages that nobody waits for, of one endpoint.
pub(super) const UNEXPECTED_MAX: usize = 65_536;
/// Their bytes.
pub(super) const UNEXPECTED_BYTES_MAX: usize = 64 << 20;

/// An endpoint of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Where the engine receives.
    pub address: SocketAddr,
    /// Number of the endpoint there.
    pub endpoint: u16,
}

/// What a completion reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A message was sent.
    Send,
    /// A write is in the target's memory.
    Write,
    /// Bytes were read.
    Read,
    /// A message was received.
    Receive,
    /// A peer's write with immediate data is in this side's memory.
    Arrival,
    /// Numbers were changed, and those found are there.
    Atomic,
}

/// The end of an operation, or a peer's write with immediate data.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// What ended.
    pub kind: Kind,
    /// How.
    pub status: Status,
    /// What the application gave with the operation; 0 of an arrival.
    pub context: u64,
    /// Bytes received, read or written. A truncated message has its full length here.
    pub len: u64,
    /// Tag of a received message.
    pub tag: Option<u64>,
    /// Immediate data of the peer.
    pub data: Option<u64>,
    /// The other side.
    pub peer: Peer,
    /// Place of a received message in a buffer for several messages.
    pub offset: u64,
    /// The buffer belongs to the application again. A buffer for several messages is released with the last of them.
    pub is_released: bool,
    /// Buffer for several messages that this one went into. None once the completion is reported.
    pub(crate) buffer: Option<u32>,
}

/// Which messages a receive takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// Messages with a tag, equal to `.0` where the bits of `.1` are 0; otherwise only messages without one.
    pub tag: Option<(u64, u64)>,
    /// Only of this peer.
    pub from: Option<Peer>,
}

impl Match {
    pub(super) fn takes(&self, tag: Option<u64>, from: Peer) -> bool {
        let has_tag = match (self.tag, tag) {
            (None, None) => true,
            (Some((wanted, ignored)), Some(tag)) => (wanted ^ tag) & !ignored == 0,
            _ => false,
        };
        has_tag && self.from.is_none_or(|wanted| wanted == from)
    }
}

/// A posted buffer.
pub(super) struct Posted {
    pub(super) matching: Match,
    pub(super) span: Span,
    pub(super) context: u64,
    /// It takes messages until fewer bytes than `.0` are left; `.1` numbers it among the endpoint's `buffers`.
    pub(super) several: Option<(u64, u32)>,
    pub(super) used: u64,
}

/// A buffer for several messages, from when it is posted until it is released.
#[derive(Default)]
pub(super) struct Buffer {
    /// Messages that are being received into it.
    under_way: u32,
    /// It takes no more messages.
    is_used_up: bool,
}

/// Where a message lies that nobody waited for.
pub(super) enum Held {
    Bytes(Vec<u8>),
    Offer { channel: u32, op: u32 },
}

pub(super) struct Unexpected {
    pub(super) from: Peer,
    pub(super) tag: Option<u64>,
    pub(super) data: Option<u64>,
    pub(super) len: u64,
    pub(super) held: Held,
    /// Set apart for one receive.
    pub(super) claim: Option<u64>,
}

pub(super) struct Endpoint {
    pub(super) posted: VecDeque<Posted>,
    /// Buffers for several messages. As many as receives: those in use and not posted are bounded by the pulls of the engine.
    pub(super) buffers: Slab<Buffer>,
    pub(super) unexpected: VecDeque<Unexpected>,
    pub(super) unexpected_bytes: usize,
    pub(super) completions: VecDeque<Completion>,
}

impl Default for Endpoint {
    fn default() -> Self {
        Self {
            posted: VecDeque::new(),
            buffers: Slab::new(POSTED_MAX),
            unexpected: VecDeque::new(),
            unexpected_bytes: 0,
            completions: VecDeque::new(),
        }
    }
}

impl Endpoint {
    /// Takes the first posted buffer for such a message, and returns where it goes with the completion to report.
    pub(super) fn take_posted(
        &mut self,
        tag: Option<u64>,
        data: Option<u64>,
        from: Peer,
        len: u64,
    ) -> Option<(Span, Completion)> {
        let place = self.posted.iter().position(|posted| posted.matching.takes(tag, from))?;
        let posted = &mut self.posted[place];
        let room = posted.span.part(posted.used, posted.span.len() as u64 - posted.used)?;
        let span = room.first(len);
        let offset = posted.used;
        posted.used += span.len() as u64;
        let left = posted.span.len() as u64 - posted.used;
        let is_used_up = posted.several.is_none_or(|(least, _)| left < least.max(1));
        let buffer = posted.several.map(|(_, number)| number);
        let status = if len > span.len() as u64 { Status::Truncated } else { Status::Success };
        let completion = Completion {
            kind: Kind::Receive,
            status,
            context: posted.context,
            len,
            tag,
            data,
            peer: from,
            offset,
            is_released: is_used_up,
            buffer,
        };
        if is_used_up {
            self.posted.remove(place);
        }
        if let Some(buffer) = buffer.and_then(|number| self.buffers.get_mut(number)) {
            buffer.under_way += 1;
            buffer.is_used_up = is_used_up;
        }
        Some((span, completion))
    }

    /// Queues a completion for the application. A small message may fill a buffer while a large one before it is still being pulled into it:
    /// the buffer is released with the message that is complete last.
    pub(super) fn report(&mut self, mut completion: Completion) {
        if let Some(number) = completion.buffer.take()
            && let Some(buffer) = self.buffers.get_mut(number)
        {
            buffer.under_way -= 1;
            completion.is_released = buffer.is_used_up && buffer.under_way == 0;
            if completion.is_released {
                self.buffers.remove(number);
            }
        }
        self.completions.push_back(completion);
    }

    /// Takes the posted buffer at `place` back. False: a message is being received into it; its completion releases the buffer.
    pub(super) fn take_back(&mut self, place: usize) -> bool {
        let Some(posted) = self.posted.remove(place) else { return false };
        let Some((_, number)) = posted.several else { return true };
        let Some(buffer) = self.buffers.get_mut(number) else { return true };
        buffer.is_used_up = true;
        if buffer.under_way > 0 {
            return false;
        }
        self.buffers.remove(number);
        true
    }

    /// Whether one more message that nobody waits for fits.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.unexpected.len() < UNEXPECTED_MAX && self.unexpected_bytes + bytes <= UNEXPECTED_BYTES_MAX
    }

    /// Keeps a message that nobody waits for.
    pub(super) fn hold(&mut self, message: Unexpected) {
        if let Held::Bytes(bytes) = &message.held {
            self.unexpected_bytes += bytes.len();
        }
        self.unexpected.push_back(message);
    }

    /// Takes the kept message at `place` out.
    pub(super) fn release(&mut self, place: usize) -> Option<Unexpected> {
        let message = self.unexpected.remove(place)?;
        if let Held::Bytes(bytes) = &message.held {
            self.unexpected_bytes -= bytes.len();
        }
        Some(message)
    }
}
