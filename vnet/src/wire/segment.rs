//! Finishing in software what a receiver cannot: completing checksums, cutting super-frames (TSO, USO).
//!
//! The slow path. It runs only for a receiver that did not negotiate the offload (an old guest, a VNET/P peer), on a
//! private copy of the frame, so that nothing here races with a guest.
