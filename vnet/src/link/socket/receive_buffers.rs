//! One burst of datagrams: buffers for a `recvmmsg`, and the received messages.
//!
//! A message is one datagram, or several of equal size that the kernel coalesced (`UDP_GRO`). The buffers are raw memory
//! ([`Scratch`]): frames of a batch point into them while other messages are still being decrypted in place.

use std::ops::Range;

use super::message::{Incoming, Report};
use super::name::Name;
use super::udp::Socket;
use crate::scratch::Scratch;

/// Maximum number of messages in a burst.
pub(crate) const MESSAGES: usize = 32;
/// Size of a message buffer in bytes: large enough for any UDP payload.
pub(crate) const BUFFER_LEN: usize = 65_536;

/// One received message of a burst.
#[derive(Clone, Copy)]
pub(crate) struct Message {
    pub(crate) source: Name,
    /// Offset of the message in the burst's memory.
    start: usize,
    len: usize,
    /// Length in bytes of each of its datagrams but the last; at least 1.
    segment: usize,
    pub(crate) truncated: bool,
}

impl Message {
    /// Number of datagrams. An empty message is one datagram.
    pub(crate) fn datagrams(&self) -> usize {
        self.len.div_ceil(self.segment).max(1)
    }

    /// Range of the message in the burst's memory.
    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// Range of datagram `n` in the burst's memory.
    #[inline]
    pub(crate) fn datagram(&self, n: usize) -> Range<usize> {
        let (start, end) = (self.start + n * self.segment, self.start + self.len);
        start..end.min(start + self.segment)
    }
}

/// The buffers and messages of a burst.
pub(crate) struct ReceiveBuffers {
    memory: Scratch,
    incoming: Incoming,
}

impl ReceiveBuffers {
    pub(crate) fn new() -> ReceiveBuffers {
        ReceiveBuffers { memory: Scratch::new(MESSAGES * BUFFER_LEN), incoming: Incoming::new(MESSAGES) }
    }

    /// Receives at most `limit` waiting messages; returns their number.
    pub(crate) fn receive(&mut self, socket: &Socket, limit: usize) -> usize {
        let memory = &self.memory;
        let buffer = |index: usize| memory.ptr(index * BUFFER_LEN).cast_mut();
        // SAFETY: the buffers lie side by side in this value's memory, and `&mut self` excludes all other access.
        unsafe { self.incoming.receive(socket, limit, (buffer, BUFFER_LEN)) }
    }

    /// Sets a message whose bytes the caller has written into its buffer.
    pub(crate) fn set(&mut self, index: usize, source: Name, len: usize, segment: usize) {
        self.incoming.set(index, source, len, segment);
    }

    /// The memory of all messages.
    pub(crate) fn memory(&self) -> &Scratch {
        &self.memory
    }

    /// The bytes of a message, to be decrypted in place.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        self.memory.bytes_mut(range)
    }

    /// The whole buffer of a message.
    pub(crate) fn buffer(&mut self, message: usize) -> &mut [u8] {
        self.memory.bytes_mut(message * BUFFER_LEN..(message + 1) * BUFFER_LEN)
    }

    /// Message `index` as it was received.
    pub(crate) fn message(&self, index: usize) -> Message {
        let Report { source, len, segment, truncated } = self.incoming.report(index);
        Message { source, start: index * BUFFER_LEN, len: len.min(BUFFER_LEN), segment, truncated }
    }
}
