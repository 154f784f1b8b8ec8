//! Result of an operation.

/// Result of an operation. Packets carry these discriminants, which are also those of the C header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u8)]
pub enum Status {
    /// The operation succeeded.
    #[error("success")]
    Success = 0,
    /// The peer did not answer for `dead_after`; whether the operation was carried out is unknown.
    #[error("the peer does not answer: check its address and the network between")]
    Unreachable = 1,
    /// The peer restarted, or it gave up the channel to this host; whether the operation was carried out is unknown.
    #[error("the peer was restarted")]
    PeerRestarted = 2,
    /// The target rejected the key, the range or the access right.
    #[error("the target refuses the key, the range or the access")]
    BadKey = 3,
    /// The target endpoint had no room or did not exist for as long as the origin was configured to wait.
    #[error("the target endpoint takes no messages: it is not open, or its queue stays full")]
    NotReady = 4,
    /// The message is longer than the posted buffer; the buffer holds its beginning.
    #[error("the message is longer than the buffer")]
    Truncated = 5,
    /// The application cancelled the operation, or closed the endpoint or region that it used.
    #[error("cancelled")]
    Cancelled = 6,
    /// The operation was incomplete when its deadline passed.
    #[error("the deadline passed")]
    TimedOut = 7,
    /// The peer violated the protocol.
    #[error("the peer violated the protocol")]
    Protocol = 8,
}

impl Status {
    /// Returns the status with this discriminant.
    pub fn from_number(number: u8) -> Option<Self> {
        use Status::*;
        [Success, Unreachable, PeerRestarted, BadKey, NotReady, Truncated, Cancelled, TimedOut, Protocol]
            .into_iter()
            .find(|status| *status as u8 == number)
    }
}
