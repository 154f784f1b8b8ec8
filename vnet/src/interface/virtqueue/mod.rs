//! Virtqueues in the mapped memory of a hostile guest (virtio 1.2 section 2.7, split format).
//!
//! How it works, in the order in which a descriptor chain passes:
//!
//! 1. [`memory`] maps the memory that the front end shares and translates guest addresses into pointers: a range lies inside one
//!    mapping or is refused. [`sigbus`] keeps the daemon alive when a file is truncated under its mapping.
//! 2. [`split`] reads the available ring in bursts, copies each descriptor once, checks the copy, and returns chains to the
//!    driver strictly in the order in which they were made available. The layout of rings and descriptors is in [`layout`].
//! 3. [`net`] turns chains into frames of a [`Batch`](crate::frame::Batch), and frames into filled chains (section 5.1.6).
//!
//! Besides, [`window`] lends pages of the memory to engines of this process.
//!
//! Guests can break the rules in two ways. A [`RingError`] means the ring itself cannot be trusted any more: the queue is
//! disabled until the guest resets it. A [`ChainError`] affects one chain, which is returned unused.
//!
//! No code in this room blocks, allocates per frame, or loops a number of times that the guest chose.
//!
//! Implemented here instead of using `virtio-queue`: bursts, prefetching, in-order completion and chains held for zero copy do
//! not fit its interface of one chain at a time.

mod chain;
pub mod dirty;
mod layout;
pub mod memory;
pub mod net;
mod prefetch;
pub mod sigbus;
pub mod split;
pub mod window;

#[cfg(any(test, feature = "test-util"))]
pub mod fuzz;
#[cfg(any(test, feature = "test-util"))]
pub mod fuzz_dirty;
#[cfg(any(test, feature = "test-util"))]
pub mod mock;
#[cfg(test)]
mod tests;

pub use chain::{Buffer, CHAIN_MAX, ChainError};
pub use layout::{
    AVAIL_NO_INTERRUPT, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor, QUEUE_SIZE_MAX, USED_NO_NOTIFY,
};
pub use split::{Ring, RingConfig, RingError};
