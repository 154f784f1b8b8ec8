//! The vnet interconnect: RDMA semantics for applications in virtual machines and containers, without RDMA hardware.
//!
//! An application opens a [`Node`], which is a socket with a protocol engine, opens endpoints on it, registers memory, and
//! posts operations: messages, writes into and reads from registered memory of other nodes, and atomic operations. Each
//! operation ends with one [`Completion`].
//!
//! - [`proto`]: the protocol, without I/O;
//! - `node/`: the engine inside the application: socket, progress, waiting;
//! - [`ether`]: packets in raw Ethernet frames, in place of UDP;
//! - [`seal`]: encrypts packets that cross a sealed link;
//! - [`ring`]: packets through memory shared with a process of the same host;
//! - [`meeting`]: how two processes of one host get a ring from its daemon;
//! - [`daemon`]: the engine in the daemon of the host, for processes that ask for it;
//! - [`vm`]: how processes in virtual machines get that engine;
//! - `attached.rs`, `region.rs`: what applications use, whoever runs the engine;
//! - `c_api.rs`, `c_counters.rs`, `c_settings.rs`, `c_wait.rs`: the C interface, declared in `include/vnet_rdma.h`.
//!
//! docs/interconnect.md contains a guide, the wire format, and the guarantees under failure.

mod attached;
mod c_api;
mod c_counters;
mod c_settings;
mod c_types;
mod c_wait;
mod closer;
pub mod daemon;
pub mod ether;
pub mod meeting;
mod node;
pub mod proto;
mod random;
mod region;
pub mod ring;
pub mod seal;
pub mod vm;

pub use attached::{Endpoint, Node};
pub use ether::address::Bind;
#[doc(hidden)]
pub use node::Records;
pub use node::{Attachment, BounceCounters, Error, Options, RingCounters, StreamCounters, name_of, resolve};
pub use proto::{
    ATOMIC_BYTES_MAX, Access, Atomic, Change, Completion, Counters, Datatype, EndpointCounters, Key, Kind,
    Match, Outgoing, Peer, PostError, Receive, Seen, Shape, Span, Status,
};
pub use region::Region;
pub use seal::SealCounters;
