//! Links: the edges of the overlay, and the bridge that carries frames along them.
//!
//! ```text
//!            batch of frames                                         batch of frames
//!                  |                                                        ^
//!   Sender: one per kind (native, vxlan, ...)             Receiver: split, reassemble
//!                  v                                                        |
//!     messages of headers and slices (socket/send_batch.rs) -- sendmmsg --> IP --> recvmmsg into one burst of buffers
//! ```
//!
//! A [`Link`] is the state kept for one neighbour: the part common to all links ([`Common`]: name, counters, next datagram
//! number, path) and the part of its kind. It owns no socket, except a stream link's connections (see [`stream`]). Each
//! dispatcher has one [`Bridge`] for all links: UDP sockets with a [`Sender`] and a [`Receiver`], two halves so that a frame can
//! be relayed while its burst is still being processed. A datagram's source address and port select its link, through an
//! immutable [`Peers`] table that control replaces as a whole; sealed links follow roaming peers. A host may have several ports,
//! over which flows are spread ([`socket`]).
//!
//! A *sealed* link sends nothing in clear text: datagrams are encrypted with keys that two hosts agree on by TLS; the
//! [`keeper`](sealed::keeper) does that outside the data path. Two hosts behind NAT meet through a third host ([`rendezvous`]).
//!
//! No frame is copied, except on sealed links: datagrams leave as slices of guest memory between prepared headers, and frames
//! arrive as slices of the receive buffers. Only frames still incomplete at the end of a burst are copied.
//!
//! Each part imports only those before it in this list: `socket`, [`path`], [`sealed`], [`rendezvous`], the common parts, the
//! kinds ([`native`], [`vxlan`], [`stream`]), `Link`, then the users of links.

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
mod strangers;
pub mod stream;
pub mod succession;
mod succession_bytes;
pub mod vxlan;

pub use bridge::{Bridge, Sender};
pub use common::Common;
use common::first_number;
pub(crate) use common::seed;
pub use limits::{DIRECT_MAX, HOPS_UNKNOWN, PATH_MTU_MIN, UDP_PAYLOAD_MAX};
pub use link::{Link, Tunnel};
pub use native::direct_ports::{DirectOffer, DirectPort, DirectState};
pub use native::reassembly::ReassemblyBudget;
pub use native::send_probes::Courier;
pub(crate) use native::translations;
pub use native::wire_state::WireTerms;
pub use native::zero_copy::ZeroCopy;
pub use options::{Encapsulation, LinkKind, LinkOptions, Security, SourceMatch};
pub use path::watch::PathWatch;
pub use peers::Peers;
pub use receiver::{PeersView, Receiver, ReceiverParts};
pub use sealed::session::{ApplicationKeys, SealView};
pub use socket::name::{ANYWHERE, PORTS_MAX, normalised};
pub use socket::ports::BridgeError;
pub use socket::udp::kernel_offloads;
pub use state::LinkState;
pub use stream::{Proxy, StreamOptions};
pub use vxlan::vteps::{FLOOD_MAX, VxlanOptions};
