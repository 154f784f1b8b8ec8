//! The interconnect's protocol: state machines without sockets, threads or clocks.
//!
//! An [`Engine`] stands for one process on the network. It is given operations, arriving packets and the time, and gives packets to send and
//! completions. Two engines meet over anything that carries datagrams; tests run them against each other over a fake network.
//!
//! How data moves:
//!
//! - All traffic between two engines shares one **channel**: packets numbered in one sequence, a cumulative acknowledgement and a map of 256
//!   bits behind it (`window.rs` for the sender, `arrivals.rs` for the receiver).
//! - A packet of data names its target, so it is placed when it arrives, in any order. What must be seen in order (headers of messages,
//!   completions at the target, requests) waits until all packets before it have arrived.
//! - Up to `eager_max` bytes an operation is pushed. Above, the origin sends an **offer** and the target **pulls** the bytes in chunks, within
//!   one budget for all its peers: many senders to one receiver cannot overrun it.
//! - **Atomic operations** are carried out by the target's engine, in the order of the packets (`atomic.rs`).
//! - Messages consume **credits** of their target endpoint. One that cannot take a message says **receiver not ready**; the origin sends that
//!   message and those behind it again later.
//! - Nothing waits for ever: a peer that acknowledges nothing for `dead_after` is dead, a restarted one is recognised by its epoch, an operation
//!   has a deadline. Each ends with a [`Status`].
//!
//! Bounds stand beside what they bound: `WINDOW`, `OPERATIONS_MAX`, `PULLS_MAX`, `SERVES_MAX`, `CHANNELS_MAX`, `REGIONS_MAX`, `ENDPOINTS_MAX`,
//! `UNEXPECTED_MAX`, `UNEXPECTED_BYTES_MAX`, `POSTED_MAX`.

mod arrivals;
mod atomic;
mod channel;
mod endpoint;
mod engine;
mod memory;
mod random;
mod slab;
mod status;
mod window;
pub mod wire;

pub use atomic::{ATOMIC_BYTES_MAX, Change, Datatype};
pub use endpoint::{Completion, Kind, Match, Peer};
pub use engine::{Atomic, Config, Counters, Departure, Engine, Outgoing, PostError, Receive, Seen, Shape};
pub use memory::{Access, Key, Span};
pub use status::Status;

#[cfg(test)]
mod tests;
