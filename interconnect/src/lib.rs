//! The vnet interconnect: RDMA semantics for applications in virtual machines and containers, without RDMA hardware.
//!
//! An application opens a [`Node`], which is a UDP socket with a protocol engine, opens endpoints on it, registers memory, and
//! posts operations: messages, writes into and reads from registered memory of other nodes, and atomic operations. Each
//! operation ends with one [`Completion`].
//!
//! - [`proto`]: the protocol, without I/O;
//! - `node/`: the engine inside the application: socket, progress, waiting;
//! - `c_api.rs`, `c_wait.rs`: the C interface, declared in `include/vnet_rdma.h`.
//!
//! docs/interconnect.md contains a guide, the wire format, and the guarantees under failure.

mod c_api;
mod c_types;
mod c_wait;
mod node;
pub mod proto;

pub use node::{Endpoint, Error, Node, Options, Region, resolve};
pub use proto::{
    ATOMIC_BYTES_MAX, Access, Atomic, Change, Completion, Counters, Datatype, Key, Kind, Match, Outgoing,
    Peer, PostError, Receive, Seen, Shape, Span, Status,
};
