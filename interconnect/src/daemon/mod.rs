//! The daemon engine: the daemon of the host runs the protocol for processes of its containers.
//!
//! A process asks at the meeting point (`meeting/`), and gets two queues in shared memory and a bell: it submits operations by one queue and finds
//! events, mostly completions, in the other. Packets travel by a UDP socket that the daemon opens in the container's network namespace, so
//! peers see no difference to an engine inside the process. One thread of the daemon serves all processes: the container with the
//! highest weight first, each with bytes by weight and rate (`proto/share.rs`).
//!
//! The engine reads and writes only memory that the process has registered with the daemon (`translation.rs`): memfds that the library
//! allocates. Operations on other memory pass through an arena that the library registers, at the price of a copy (`arena.rs`).
//!
//! Packets to peers behind sealed links are sealed, and nothing goes there in clear text (`seals.rs`).
//!
//! Packets between two processes of the daemon bypass the network if their containers may meet (`links.rs`).
//!
//! A process in a virtual machine lends pages of the machine's memory instead of a memfd (`lent.rs`), and its packets enter the overlay by the
//! machine's interface (`carrier.rs`, `udp_frame.rs`); `vm/` is how it gets there.
//!
//! - `entry.rs`: the entries of the queues; `queue.rs`: the queues;
//! - `process.rs`, `inner.rs`, `posting.rs`: the process's side;
//! - `fuzz.rs`, `hostile.rs`: hostile processes, for tests;
//! - `served.rs`, `room.rs`, `links.rs`, `seals.rs`, `service.rs`, `translation.rs`: the daemon's side, where all input is hostile.

mod arena;
pub(crate) mod carrier;
pub mod entry;
#[cfg(any(test, feature = "test-util"))]
pub mod fuzz;
#[cfg(any(test, feature = "test-util"))]
pub mod hostile;
mod inner;
pub(crate) mod lent;
mod links;
mod posting;
mod process;
pub(crate) mod queue;
mod room;
mod seals;
mod served;
mod service;
mod translation;
pub(crate) mod udp_frame;

pub use crate::proto::{ShareSettings, WEIGHT_MAX};
pub use carrier::{Datagrams, GuestFrame, MacAddress, RelayCounters};
pub use lent::Lent;
pub(crate) use process::{Endpoint, Node};
pub use room::{ContainerCounters, ContainerId, Note};
pub use served::EndpointReport;
pub(crate) use service::GuestEnds;
pub use service::{SERVED_MAX, Service};

#[cfg(test)]
mod links_tests;
#[cfg(test)]
mod seals_tests;
#[cfg(test)]
pub(crate) mod tests;
