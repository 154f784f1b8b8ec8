//! Endpoints: posted receives, messages that nobody waited for, completions.

use std::collections::VecDeque;
use std::net::SocketAddr;

use super::memory::Span;
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
    /// A buffer for several messages is used up with this one.
    pub is_released: bool,
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
    /// It takes messages until fewer bytes than this are left.
    pub(super) several: Option<u64>,
    pub(super) used: u64,
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

#[derive(Default)]
pub(super) struct Endpoint {
    pub(super) posted: VecDeque<Posted>,
    pub(super) unexpected: VecDeque<Unexpected>,
    pub(super) unexpected_bytes: usize,
    pub(super) completions: VecDeque<Completion>,
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
        let is_released = posted.several.is_none_or(|least| left < least.max(1));
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
            is_released,
        };
        if is_released {
            self.posted.remove(place);
        }
        Some((span, completion))
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
