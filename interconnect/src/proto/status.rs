//! How an operation ended.

/// How an operation ended. The numbers travel in packets and are those of the C header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u8)]
pub enum Status {
    /// It was carried out.
    #[error("success")]
    Success = 0,
    /// The peer did not answer for `dead_after`; whether the operation was carried out is unknown.
    #[error("the peer does not answer: check its address and the network between")]
    Unreachable = 1,
    /// The peer was restarted, or gave this host up; whether the operation was carried out is unknown.
    #[error("the peer was restarted")]
    PeerRestarted = 2,
    /// Key, range or access right is wrong at the target.
    #[error("the target refuses the key, the range or the access")]
    BadKey = 3,
    /// The target endpoint had no room or did not exist for as long as the origin was willing to wait.
    #[error("the target endpoint takes no messages: it is not open, or its queue stays full")]
    NotReady = 4,
    /// The message is longer than the posted buffer; its beginning was received.
    #[error("the message is longer than the buffer")]
    Truncated = 5,
    /// The application cancelled it, or closed the endpoint or the region that it used.
    #[error("cancelled")]
    Cancelled = 6,
    /// It was not done when its deadline passed.
    #[error("the deadline passed")]
    TimedOut = 7,
    /// The peer sent what the protocol does not allow.
    #[error("the peer violated the protocol")]
    Protocol = 8,
}

impl Status {
    /// The status of this number.
    pub fn from_number(number: u8) -> Option<Self> {
        use Status::*;
        [Success, Unreachable, PeerRestarted, BadKey, NotReady, Truncated, Cancelled, TimedOut, Protocol]
            .into_iter()
            .find(|status| *status as u8 == number)
    }
}
