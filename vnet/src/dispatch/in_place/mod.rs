//! Cut-through forwarding, receive side (VNET/P+ section IV.B): frames are received directly into the buffers of the destination
//! guest. Where the paper assigns a device to a guest, vnet lets the kernel demultiplex: an interface may have its own underlay
//! UDP ports ([`port`]), each for one link: configured ones, or those that the link negotiates (`link/native/direct_ports.rs`).
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
//! The guess can only be wrong about what follows the first datagram. So bytes that a wrong guess writes to guest buffers came
//! from the port's peer, were sent to that port, and followed a frame for this guest; the guest is never notified of them. No
//! other sender can write there: the socket's filter drops other sources (link/socket/source_filter.rs), and each message's
//! source is checked before it is received. An attacker who can forge the peer's address can forge any datagram of a
//! clear-text link.
//!
//! A configured port is for a MAC address, which may occur in several networks, so it needs a link with one network: otherwise
//! a wrong guess could write bytes of one network to a guest of another. A negotiated port is for a MAC address in one network.
//!
//! A port of a sealed link receives nothing in place: its datagrams are decrypted in vnetd's memory, as those at the link's port. It
//! still tells before any receive for which guest the data is, which early interrupts use (dispatch/arrival.rs).
//!
//! A guest may write to its memory at any time. Routing decisions use the peek's private copy and the headers, which never lie in
//! guest memory. Data that is copied out may have been changed by the guest it was sent to, except for the head that was checked.

mod candidate;
#[cfg(feature = "test-util")]
pub mod fuzz;
mod landing;
mod port;
mod source;
#[cfg(test)]
mod tests;

pub use port::UnderlayPort;
