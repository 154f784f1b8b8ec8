//! The interconnect inside virtual machines: how an application in a guest gets the engine of the host's daemon.
//!
//! ```text
//!   guest:  application --- Unix socket, as with a daemon ---> helper (root)
//!               |  queues and registered memory: memfds            | pins pages, finds their guest physical addresses
//!               v                                                  v
//!           ordinary guest memory                      control frames on the interface of the overlay
//!               ^                                                  |
//!   host:   engine of the daemon <--- windows of guest pages --- daemon
//! ```
//!
//! The helper looks to the application like a daemon (`meeting/`): the library needs no other code than in a container. It passes the memory of
//! the application on as lists of guest physical pages, in control frames that the daemon takes up at the guest's interface. The daemon
//! maps the pages once more, behind each other; then application and engine share them, as the memfd of a container (paper 004's frontend,
//! without a kernel module). Bells become control frames, too.
//!
//! Frames may be lost: requests are repeated until they are answered, and answering twice does no harm.
//!
//! - `wire.rs`: the control frames; `doorbell.rs`: bells that survive lost frames;
//! - `client.rs`: an attachment on the helper's side, without I/O;
//! - `helper.rs`: the helper's loop, over a machine's own ways to pin pages and send frames;
//! - `host.rs`: the daemon's side of one guest, where all input is hostile; `nic.rs`: what it needs of the interface;
//! - `relay.rs`: rate limit of datagrams that are relayed between applications of one machine, if only one has the daemon's engine;
//! - `questions.rs`: keys of what crosses sealed links; `per_second.rs`: a bound for what a guest may do in a second;
//! - `fuzz.rs`, `hostile.rs`: hostile guests, for tests.
//!
//! docs/interconnect.md has the format of the frames.

mod client;
mod doorbell;
#[cfg(any(test, feature = "test-util"))]
pub(crate) mod fake;
#[cfg(any(test, feature = "test-util"))]
pub mod fuzz;
mod helper;
mod host;
#[cfg(any(test, feature = "test-util"))]
pub mod hostile;
mod nic;
mod per_second;
mod questions;
mod relay;
#[cfg(test)]
mod relay_tests;
#[cfg(test)]
mod tests;
mod wire;

pub use client::{Client, Event};
pub use helper::{Helper, Machine, Pinned, Reserved};
pub use host::GuestHost;
pub use nic::{Nic, Stations};
pub use per_second::PerSecond;
pub use wire::{
    Body, DATAGRAM_MAX, ETHERTYPE, FRAME_MAX, GROUP, Message, OWN, PAGE, QUEUES, QUEUES_BYTES, RUNS_MAX, Run,
    ShareState, Token,
};
