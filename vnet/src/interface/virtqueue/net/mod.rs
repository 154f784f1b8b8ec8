//! Frames in virtqueues (virtio 1.2 section 5.1.6).
//!
//! *Transmit* and *receive* are named from the guest's point of view. [`take`] turns each chain of a transmitq into a frame, in
//! place: frames enter the core this way. [`Giver::give`] copies a frame into as many chains of a receiveq as it needs: frames
//! leave the core this way.

mod format;
mod receiveq;
mod transmitq;

pub use format::{Format, LEGACY_HDR_LEN, Owner};
pub use receiveq::{BUFFERS_MAX, Giver, MERGE_MAX};
pub use transmitq::{TakenChains, look_ahead, take};
