//! The state of a link.

/// The state of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// The kernel has a route to the remote, and a peer that ever answered has not gone silent. For a sealed link: the peer is
    /// heard under the current keys.
    Up,
    /// Works, but badly or not for long; holds the reason.
    Degraded(String),
    /// A sealed link without keys, or one whose peer has gone silent; holds the reason. Frames are still sent where possible.
    Down(String),
    /// No route to the remote; holds the kernel's error.
    Unreachable(String),
}
