//! Links: the edges of the overlay, and the bridge that carries frames along them.
//!
//! ```text
//!            batch of frames                                         batch of frames
//!                  |                                                        ^
//!   Sender: one of a kind each (native, vxlan, ...)        Receiver: split, reassemble
//!                  v                                                        |
//!     messages of headers and slices (socket/gather.rs) -- sendmmsg --> IP --> recvmmsg into one burst of buffers
//! ```
//!
//! A [`Link`] is what is known of one neighbour: what all links have ([`Common`]: name, counters, the next datagram number, the
//! path), and what its kind has beside that. It owns no socket (but a stream link's connections, see [`stream`]). Each dispatcher
//! has one [`Bridge`] for all links: UDP sockets with a [`Sender`] and a [`Receiver`], two halves so that a frame may be relayed
//! while the burst it came in is still being worked on. The source address and port of a datagram tell which link it arrived on,
//! through an immutable [`Peers`] table that control replaces as a whole; sealed links follow their peers to other addresses
//! (roaming). A host may have several ports, over which flows are spread ([`socket`]).
//!
//! A *sealed* link carries nothing in clear text: datagrams are encrypted with keys that two hosts agree on by TLS, which the
//! [`keeper`](sealed::keeper) does outside the data path. Two hosts behind NAT meet by a third one ([`rendezvous`]).
//!
//! Bytes are not copied on the way, unless they are to be sealed: datagrams leave as slices of the guest's memory between prepared
//! headers, and frames arrive as slices of the receive buffers. Only frames that are still incomplete when a burst ends are
//! moved.
//!
//! Each file here knows only those before it: `socket`, [`path`], [`sealed`], [`rendezvous`], what all links have, the kinds
//! ([`native`], [`vxlan`], [`stream`]), `Link`, then whoever works on links.

mod bridge;
mod common;
pub mod fake;
#[cfg(feature = "test-util")]
pub mod fuzz;
pub mod inquiry;
mod intake;
mod limits;
#[expect(clippy::module_inception, reason = "the type that the room is named after")]
mod link;
pub mod native;
mod options;
pub mod path;
mod peers;
mod progress;
mod receiver;
pub mod rendezvous;
pub mod sealed;
mod sending;
mod sending_keepalives;
pub mod socket;
mod state;
pub mod stream;
pub mod vxlan;

pub use bridge::{Bridge, Sender};
pub use common::Common;
use common::first_number;
pub use limits::{DIRECT_MAX, HOPS_UNKNOWN, PATH_MTU_MIN, UDP_PAYLOAD_MAX};
pub use link::Link;
pub use native::control_datagrams::Courier;
pub use native::reassembly::ReassemblyBudget;
pub use native::zero_copy::ZeroCopy;
pub use options::{Encapsulation, LinkKind, LinkOptions, Security};
pub use path::watch::PathWatch;
pub use peers::Peers;
pub use receiver::{PeersView, Receiver, ReceiverParts};
pub use sealed::session::SealView;
pub use socket::name::{ANYWHERE, PORTS_MAX, normalised};
pub use socket::ports::BridgeError;
pub use socket::udp::kernel_offloads;
pub use state::LinkState;
pub use stream::{Proxy, StreamOptions};
pub use vxlan::vteps::{FLOOD_MAX, VxlanOptions};
