//! Cut-through forwarding, the receiving half (VNET/P+ section IV.B): frames are received straight into the buffers of the guest they
//! are for. The paper's device assignment is done by the kernel: an interface may have an underlay UDP port of its own ([`port`]).
//!
//! ```text
//!   peek: source, length, segment, first bytes      nothing is taken from the socket, nothing is in the guest's memory
//!     | from the port's peer, a large frame, first fragment (candidate.rs), and routed to this interface only (source.rs)?
//!     v yes                                         no: recvmmsg into our buffers, the ordinary way
//!   guess: the frame is as long as its IP header says, and its fragments follow each other, all of one size
//!   recvmsg: header aside | payload in the guest's buffers | header aside | payload ...          (landing.rs)
//!     | is it what was guessed, to the last header?
//!     v yes                                         no: *copied out* of the guest's buffers, then the ordinary way
//!   the guest is notified
//! ```
//!
//! A guess can only be wrong about what follows the first datagram. So bytes that stand in a guest's buffers in vain came from the peer
//! of its port, to its port, behind a frame that was for it, and the guest is not told of them. Others cannot put anything there: the
//! socket is connected to the peer's address, so the kernel drops what comes from elsewhere, and the source of each message is checked
//! before it is taken. Whoever can forge the peer's address can forge any datagram of a clear-text link.
//!
//! A guest writes to its memory when it likes. Decisions use the private copy that the peek made, and the headers, which never stand in
//! guest memory. What is copied out may have been changed by the guest that it was sent to.

mod candidate;
#[cfg(feature = "test-util")]
pub mod fuzz;
mod landing;
mod port;
mod source;
#[cfg(test)]
mod tests;

pub use port::UnderlayPort;
