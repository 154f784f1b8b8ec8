//! How far a burst of datagrams is worked off, between two fills of a batch.

use crate::stats::DiscardReason;
use crate::wire::native::HeaderError;

/// How far a burst is worked off.
#[derive(Default)]
pub(in crate::link) struct Progress {
    /// Messages in the burst.
    pub(in crate::link) messages: usize,
    /// The message under way.
    pub(in crate::link) message: usize,
    /// Its next datagram; when it is not the first, the message's link is `link`.
    pub(in crate::link) datagram: usize,
    pub(in crate::link) link: Option<u64>,
    /// Bytes of a bundle's payload worked off.
    pub(in crate::link) bundle: usize,
    /// For each datagram of a sealed message under way: whether it could be decrypted.
    pub(in crate::link) opened: Vec<bool>,
    /// Probes answered in this burst.
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

/// Why a datagram without a header that makes sense is discarded.
pub(in crate::link) fn discard_reason(error: HeaderError) -> DiscardReason {
    match error {
        HeaderError::Short => DiscardReason::Truncated,
        HeaderError::Version(_) => DiscardReason::BadVersion,
        HeaderError::Contradiction => DiscardReason::BadHeader,
    }
}
