//! Frames in virtqueues (virtio 1.2 section 5.1.6).
//!
//! *Transmit* and *receive* are the guest's words. [`take`] turns each chain of a transmitq into a frame, in place: that is how
//! frames enter the core. [`Giver::give`] copies a frame into as many chains of a receiveq as it needs: that is how they leave it.

mod format;
mod receiveq;
mod transmitq;

pub use format::{Format, LEGACY_HDR_LEN, Owner};
pub use receiveq::{BUFFERS_MAX, Giver, MERGE_MAX};
pub use transmitq::{TakenChains, take};
