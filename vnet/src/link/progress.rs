//! Progress through a burst of datagrams, kept between two fills of a batch.

use crate::stats::DiscardReason;
use crate::wire::native::HeaderError;

/// Position in a burst.
#[derive(Default)]
pub(in crate::link) struct Progress {
    /// Number of messages in the burst.
    pub(in crate::link) messages: usize,
    /// Index of the current message.
    pub(in crate::link) message: usize,
    /// Index of the next datagram in that message; if it is not the first, the message belongs to `link`.
    pub(in crate::link) datagram: usize,
    pub(in crate::link) link: Option<u64>,
    /// Number of bytes of the current bundle's payload already processed.
    pub(in crate::link) bundle: usize,
    /// For each datagram of the current sealed message: true if it decrypted.
    pub(in crate::link) opened: Vec<bool>,
    /// Number of probes answered in this burst.
    pub(in crate::link) replies: usize,
}

impl Progress {
    pub(in crate::link) fn begin(&mut self, messages: usize) {
        (self.messages, self.message, self.replies) = (messages, 0, 0);
        self.next_message();
        self.message = 0;
    }

    pub(in crate::link) fn next_message(&mut self) {
        (self.message, self.datagram, self.link, self.bundle) = (self.message + 1, 0, None, 0);
        self.opened.clear();
    }

    pub(in crate::link) fn is_done(&self) -> bool {
        self.message >= self.messages
    }
}

/// Discard reason of a datagram without a valid header.
pub(in crate::link) fn discard_reason(error: HeaderError) -> DiscardReason {
    match error {
        HeaderError::Short => DiscardReason::Truncated,
        HeaderError::Version(_) => DiscardReason::BadVersion,
        HeaderError::Contradiction => DiscardReason::BadHeader,
    }
}
