//! Posting of the application's operations.

use super::super::channel::{Form, Op, Reports};
use super::super::endpoint::{Buffer, Completion, Kind, Match, Peer, Posted};
use super::super::memory::{Key, Span};
use super::super::status::Status;
use super::{Atomic, Engine, PostError};

/// Kind of operation, with its parameters at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A message, optionally with a tag, which consumes a posted buffer.
    Message {
        /// Tag to match.
        tag: Option<u64>,
    },
    /// A write into registered memory.
    Write {
        /// Key of the region.
        key: Key,
        /// Offset within the region.
        at: u64,
    },
    /// A write whose bytes are in the peer's registered memory already. The library makes these of writes to processes of this host
    /// whose memory it shares.
    Placed {
        /// Key of the region.
        key: Key,
        /// Offset within the region.
        at: u64,
        /// Number of bytes.
        len: u32,
    },
    /// A read from registered memory.
    Read {
        /// Key of the region.
        key: Key,
        /// Offset within the region.
        at: u64,
    },
    /// An atomic operation on registered memory.
    Atomic(Atomic),
}

/// An operation to post.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing {
    /// Kind of operation.
    pub shape: Shape,
    /// The bytes to send, the destination of a read, or the operands of an atomic operation.
    pub span: Span,
    /// Immediate data that the target's application gets with the message, or when the write has arrived.
    pub data: Option<u64>,
    /// Context that the completion returns.
    pub context: u64,
    /// Copies up to `eager_max` bytes and completes at once: the application may reuse the memory when the call returns. If the
    /// operation fails after all, a second completion with `is_late` says so.
    pub is_buffered: bool,
    /// Reports a completion only if the operation fails.
    pub is_quiet: bool,
}

impl Op {
    /// Makes `bytes` the payload of the operation.
    fn own(&mut self, bytes: Vec<u8>) {
        let bytes = self.owned.insert(bytes);
        // SAFETY: the vector is kept unchanged with the operation, and each use of the span looks up the operation first.
        // Nothing writes through the span: only reads do that, and they are never eager.
        self.span = unsafe { Span::new(bytes.as_mut_ptr(), bytes.len()) };
    }
}

/// A buffer to post.
#[derive(Clone, Copy, Debug)]
pub struct Receive {
    /// Selects the messages that the buffer accepts.
    pub matching: Match,
    /// Destination of the messages.
    pub span: Span,
    /// Context that the completion returns.
    pub context: u64,
    /// The buffer takes several messages, until fewer than this many bytes are left.
    pub several: Option<u64>,
}

impl Engine {
    /// Posts an operation from `endpoint` to `peer`.
    pub fn post(&mut self, now: u64, endpoint: u16, peer: Peer, out: &Outgoing) -> Result<(), PostError> {
        self.now = now;
        let own = self.endpoint(endpoint).ok_or(PostError::NoEndpoint)?;
        if self.ops.is_full() || own.completions.len() >= super::OPERATIONS_MAX {
            return Err(PostError::Busy);
        }
        let owned = match &out.shape {
            Shape::Atomic(atomic) => Some(self.numbers_of(atomic, out.span)?),
            _ => None,
        };
        let channel = self.channel_to(peer.address)?;
        let is_eager = out.span.len() <= self.config.eager_max && !matches!(out.shape, Shape::Read { .. });
        let mut op = Op {
            channel,
            endpoint,
            to: peer.endpoint,
            context: out.context,
            form: match out.shape {
                Shape::Message { tag } => Form::Message { tag },
                Shape::Write { key, at } => Form::Write { key, at },
                Shape::Placed { key, at, len } => Form::Placed { key, at, len },
                Shape::Read { key, at } => Form::Read { key, at },
                Shape::Atomic(atomic) => atomic.form(),
            },
            data: out.data,
            span: out.span,
            owned: None,
            reports: if out.is_quiet { Reports::Failure } else { Reports::Any },
            is_eager,
            sent: 0,
            seq: None,
            attempt: 0,
            resumes: false,
            pull: None,
            is_fetching: false,
            deadline: match self.config.operation_timeout_ns {
                0 => u64::MAX,
                timeout => now + timeout,
            },
        };
        if let Some(bytes) = owned {
            op.own(bytes);
        } else if is_eager && out.is_buffered {
            self.complete_now(&mut op, peer);
        }
        let to = op.to;
        let number = self.ops.insert(op).ok_or(PostError::Busy)?;
        if let Some(channel) = self.channels.get_mut(channel) {
            channel.uses += 1;
            channel.flow(to).lanes.push(endpoint, number);
        }
        self.make_ready(channel);
        Ok(())
    }

    /// Copies the bytes of an operation and completes it at once.
    fn complete_now(&mut self, op: &mut Op, peer: Peer) {
        let mut bytes = self.buffer();
        op.span.read_to(&mut bytes);
        op.own(bytes);
        if op.reports == Reports::Any {
            op.reports = Reports::LateFailure;
            let kind = if matches!(op.form, Form::Write { .. }) { Kind::Write } else { Kind::Send };
            self.report(
                op.endpoint,
                Completion {
                    kind,
                    status: Status::Success,
                    context: op.context,
                    len: op.span.len() as u64,
                    tag: None,
                    data: None,
                    peer,
                    offset: 0,
                    is_released: false,
                    is_late: false,
                    buffer: None,
                },
            );
        }
    }

    /// Posts a buffer for messages. A matching unexpected message goes into it at once.
    pub fn post_receive(&mut self, endpoint: u16, receive: &Receive) -> Result<(), PostError> {
        self.has_room_for_receive(endpoint)?;
        let Some(own) = self.endpoint_mut(endpoint) else { return Err(PostError::NoEndpoint) };
        let several = match receive.several {
            None => None,
            Some(least) => Some((least, own.buffers.insert(Buffer::default()).ok_or(PostError::Busy)?)),
        };
        own.posted.push_back(Posted {
            matching: receive.matching,
            span: receive.span,
            context: receive.context,
            several,
            used: 0,
        });
        while self.take_unexpected(endpoint) && receive.several.is_some() {}
        Ok(())
    }

    /// Withdraws a posted buffer. Returns false if no posted buffer has this context, or if a message is already being received
    /// into it. A buffer for several messages then accepts no further message, and the completion of the pending one releases
    /// it.
    pub fn cancel(&mut self, endpoint: u16, context: u64) -> bool {
        let Some(own) = self.endpoint_mut(endpoint) else { return false };
        let Some(place) = own.posted.iter().position(|posted| posted.context == context) else {
            return false;
        };
        own.take_back(place)
    }
}
