//! Endpoints: posted receives, unexpected messages, completions.

use std::collections::VecDeque;
use std::net::SocketAddr;

use super::memory::Span;
use super::slab::Slab;
use super::status::Status;

/// Maximum number of endpoints of one engine.
pub(super) const ENDPOINTS_MAX: usize = 1024;
/// Maximum number of receives posted on one endpoint.
pub(super) const POSTED_MAX: usize = 65_536;
/// Maximum number of unexpected messages of one endpoint.
pub(super) const UNEXPECTED_MAX: usize = 65_536;
/// Default of the maximum memory of an endpoint's unexpected messages, in bytes.
pub(super) const UNEXPECTED_BYTES_MAX: usize = 64 << 20;

/// Address of an endpoint: socket address of its engine and endpoint number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Socket address of the engine.
    pub address: SocketAddr,
    /// Number of the endpoint within the engine.
    pub endpoint: u16,
}

/// Kind of event that a completion reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A message was sent.
    Send,
    /// A write was placed in the target's memory.
    Write,
    /// A read has placed its bytes in local memory.
    Read,
    /// A message was received.
    Receive,
    /// A peer's write with immediate data was placed in local memory.
    Arrival,
    /// An atomic operation was carried out, and the values that it fetched are available.
    Atomic,
}

/// Reports the end of an operation, or the arrival of a peer's write with immediate data.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// Kind of the reported event.
    pub kind: Kind,
    /// Result of the operation.
    pub status: Status,
    /// The context that the application passed with the operation; 0 for a peer's write.
    pub context: u64,
    /// Number of bytes received, read or written. For a truncated message, its full length.
    pub len: u64,
    /// Tag of a received message.
    pub tag: Option<u64>,
    /// Immediate data from the peer.
    pub data: Option<u64>,
    /// The remote endpoint.
    pub peer: Peer,
    /// Offset of a received message within a buffer that takes several messages.
    pub offset: u64,
    /// The buffer belongs to the application again. A buffer that takes several messages is released with its last completion.
    pub is_released: bool,
    /// The operation was buffered and reported as a success before; now it has failed.
    pub is_late: bool,
    /// The multi-message buffer that holds this message. `None` once the completion has been queued for the application.
    pub(crate) buffer: Option<u32>,
}

/// Selects the messages that a receive accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// Accepts tagged messages whose tag equals `.0` in all bits that are 0 in `.1`. `None` accepts only untagged messages.
    pub tag: Option<(u64, u64)>,
    /// Accepts only messages from this peer.
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

/// A posted receive buffer.
pub(super) struct Posted {
    pub(super) matching: Match,
    pub(super) span: Span,
    pub(super) context: u64,
    /// The buffer takes messages until fewer than `.0` bytes are left; `.1` is its number in the endpoint's `buffers`.
    pub(super) several: Option<(u64, u32)>,
    pub(super) used: u64,
}

/// A buffer that takes several messages, from its posting until its release.
#[derive(Default)]
pub(super) struct Buffer {
    /// Number of messages that are being received into the buffer.
    under_way: u32,
    /// The buffer takes no further messages.
    is_used_up: bool,
}

/// Storage of an unexpected message.
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
    /// A probe reserved the message for the receive with this number.
    pub(super) claim: Option<u64>,
}

impl Unexpected {
    /// Bytes of memory that the message takes.
    fn cost(&self) -> usize {
        size_of::<Self>() + if let Held::Bytes(bytes) = &self.held { bytes.capacity() } else { 0 }
    }
}

pub(super) struct Endpoint {
    pub(super) posted: VecDeque<Posted>,
    /// Buffers that take several messages. The slab has room for as many as there can be posted receives; the engine's limit on
    /// pulls bounds the buffers that are in use but no longer posted.
    pub(super) buffers: Slab<Buffer>,
    pub(super) unexpected: VecDeque<Unexpected>,
    /// Memory of the unexpected messages, in bytes.
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
    /// Finds the first posted buffer that matches a message. Returns the span for the message and the completion to report.
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
            is_late: false,
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

    /// Queues a completion for the application. A small message may fill a buffer while an earlier large message is still being
    /// pulled into it, so the message that completes last releases the buffer.
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

    /// Withdraws the posted buffer at `place`. Returns false while a message is being received into it: that message's
    /// completion releases the buffer.
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

    /// Whether there is room for another unexpected message of `bytes` bytes, if all may take `bytes_max`.
    pub(super) fn has_room(&self, bytes: usize, bytes_max: usize) -> bool {
        self.unexpected.len() < UNEXPECTED_MAX
            && self.unexpected_bytes + bytes + size_of::<Unexpected>() <= bytes_max
    }

    /// Stores an unexpected message.
    pub(super) fn hold(&mut self, message: Unexpected) {
        self.unexpected_bytes += message.cost();
        self.unexpected.push_back(message);
    }

    /// Removes the offers of a channel that has failed.
    pub(super) fn forget_offers(&mut self, lost: u32) {
        let bytes = &mut self.unexpected_bytes;
        self.unexpected.retain(|message| {
            let is_lost = matches!(message.held, Held::Offer { channel, .. } if channel == lost);
            *bytes -= if is_lost { message.cost() } else { 0 };
            !is_lost
        });
    }

    /// Removes the unexpected message at `place` and returns it.
    pub(super) fn release(&mut self, place: usize) -> Option<Unexpected> {
        let message = self.unexpected.remove(place)?;
        self.unexpected_bytes -= message.cost();
        Some(message)
    }
}
