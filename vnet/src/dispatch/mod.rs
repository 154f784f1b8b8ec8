//! Dispatchers: the threads that move frames (VNET/P section 4.3).
//!
//! ```text
//! loop {
//!     adopt a new setup, if one was published
//!     for source in mine {                         // guests' queues, the bridge's sockets, stream links' connections
//!         burst = source.receive()
//!         decide(burst)
//!         for destination in decided { deliver(selection of the burst) }
//!     }                                            // the burst gives its memory back
//!     nothing done? yield, spin or sleep
//! }
//! ```
//!
//! A batch runs to completion before the next one is taken: no frame ever waits in a queue between threads. Each source belongs
//! to exactly one dispatcher; no other thread reads from it. A thread runs one dispatcher, or several in turn while there is little
//! to do.
//!
//! - [`core`](mod@self::core): all dispatchers together; `shared`: what they share; `publication`: how they adopt a new setup
//!   without a lock on the data path.
//! - `dispatcher`: one dispatcher's sources, sockets and cache, and its turn; `busy_clock`: the time that it takes.
//! - `worker`: a thread: the loop over its dispatchers, what it does when all are idle, and how it hands one to another thread;
//!   `mailbox`: how it is told to.
//! - [`recruit`]: how many threads the load needs; `crew`: starts them, moves dispatchers and ends them; `spare_cpus`: idle CPUs.
//! - [`setup`](mod@self::setup): the ports, peers and routes that a core forwards between. Immutable once published.
//! - [`forward`](mod@self::forward): decide and deliver, for one batch.
//! - `arrival`: early interrupts when data arrives, before it is received; `pending`: guests that may need a later interrupt.
//! - [`in_place`](mod@self::in_place): frames received straight into a guest's buffers (cut-through forwarding).
//! - [`dispatcher_stats`]: a dispatcher's own statistics.
//! - `observe`: records frames for captures; [`observers`](mod@self::observers): active captures and cache queries.
//! - `kernel_path`: verdicts that the kernel applies by itself; `tunnels`: between hosts; `wire_path`: to vnet hosts;
//!   [`sealed_sessions`]: what applications have sealed, across sealed links.
//! - [`timeline`](mod@self::timeline): when a guest is notified of what arrives, and when it reacts.
//! - [`mode`](mod@self::mode): guest-driven or VMM-driven queues; `served`: when a queue is polled and when it sleeps.
//! - [`yielding`](mod@self::yielding): the yield strategy of an idle dispatcher.
//! - [`share`]: weights of sources, and rate limits.
//! - [`isolation`](mod@self::isolation): shields dispatchers from noise of the host.

mod arrival;
mod busy_clock;
pub mod core;
mod crew;
mod dispatcher;
pub mod dispatcher_stats;
mod forward;
#[cfg(test)]
mod handover_model;
pub mod in_place;
pub mod isolation;
mod kernel_path;
mod mailbox;
pub mod mode;
mod observe;
pub mod observers;
mod pending;
mod publication;
pub mod recruit;
pub mod sealed_sessions;
mod served;
#[cfg(test)]
mod served_model;
pub mod setup;
pub mod share;
mod shared;
mod spare_cpus;
pub mod timeline;
mod translator;
mod tunnels;
mod wire_path;
mod worker;
pub mod yielding;

/// `mailbox` and `publication` are built from these; their model takes loom's.
mod sync {
    pub(super) use std::sync::Arc;
    pub(super) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    pub(super) use arc_swap::ArcSwap;
    pub(super) use parking_lot::{Condvar, Mutex};
}
