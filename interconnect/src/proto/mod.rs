//! The interconnect's protocol: state machines without sockets, threads or clocks.
//!
//! An [`Engine`] represents one process on the network. Its inputs are operations, arriving packets and the current time; its
//! outputs are packets to send and completions. Two engines can communicate over any datagram transport; the tests connect them
//! over a simulated network.
//!
//! How data moves:
//!
//! - All traffic between two engines shares one **channel**: one sequence of numbered packets, a cumulative acknowledgement, and
//!   an arrival map of 256 bits behind it (`window.rs` for the sender, `arrivals.rs` for the receiver).
//! - A data packet names its target, so the engine places it on arrival, in any order. Events with a defined order (message
//!   headers, completions at the target, requests) wait until all earlier packets have arrived.
//! - The origin pushes operations of up to `eager_max` bytes. For a larger operation it sends an **offer**, and the target
//!   **pulls** the bytes in chunks. One budget bounds the pulls from all peers together, so many senders cannot overrun
//!   one receiver; senders have equal parts of it (`asking.rs`).
//! - The endpoints of an engine share what it sends by weight, and each may have a rate limit (`shares.rs`).
//! - The target's engine executes **atomic operations** in packet order (`atomic.rs`).
//! - Each message consumes a **credit** of its target endpoint. An endpoint that cannot accept a message answers
//!   **receiver not ready**; the origin sends that message and all messages behind it again later.
//! - Packets between two processes of one host may travel through **shared memory** in place of the network (`engine/local.rs`);
//!   the protocol stays the same.
//! - No operation waits forever: a peer that acknowledges nothing for `dead_after` counts as dead, a restarted peer rejects
//!   packets of its former life, and operations can have a deadline. Each of these cases ends the operation with a [`Status`].
//!
//! Each bound is defined beside the resource that it limits: `WINDOW`, `OPERATIONS_MAX`, `PULLS_MAX`, `SERVES_MAX`,
//! `CHANNELS_MAX`, `REGIONS_MAX`, `ENDPOINTS_MAX`, `UNEXPECTED_MAX`, `POSTED_MAX`, and in `Config`.

mod arrivals;
mod asking;
mod atomic;
mod channel;
mod endpoint;
mod engine;
mod lanes;
mod memory;
mod ranges;
pub(crate) mod share;
mod shares;
pub(crate) mod slab;
mod status;
mod window;
pub mod wire;
mod write_order;

pub use atomic::{ATOMIC_BYTES_MAX, Change, Datatype};
pub use endpoint::{Completion, Kind, Match, Peer};
pub use engine::{
    Atomic, Config, Counters, Departure, Engine, LOCAL_PACKET_MAX, Outgoing, PostError, Receive, Seen, Shape,
};
pub(crate) use engine::{PARTED_MAX, PARTS_MAX};
pub use memory::{Access, Key, Span};
pub use share::{ShareSettings, WEIGHT_MAX};
pub use shares::EndpointCounters;
pub use status::Status;

#[cfg(test)]
mod tests;
