//! What a link is able to do at the moment.

/// What a link is able to do at the moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// The kernel has a route to the remote address, and the other host, if it ever answered, has not gone silent; for a sealed
    /// link: it was heard under keys agreed with it.
    Up,
    /// It works, but badly, or not for long.
    Degraded(String),
    /// A sealed link without keys, or one whose other end has gone silent. Frames are sent all the same where they can be.
    Down(String),
    /// It has none, and says why.
    Unreachable(String),
}
