//! Wire formats: bounds-checked views of foreign bytes, without I/O.
//!
//! An attacker may have chosen the bytes. No function here panics on them, allocates for them, or trusts a length before
//! comparing it with the available bytes.

pub mod checksum;
pub mod ethernet;
pub mod flow;
pub mod ip;
pub mod native;
pub mod neighbour;
pub mod offload;
pub mod partial;
pub mod sealed_datagram;
pub mod segment;
pub mod sender;
pub mod socks;
pub mod stream;
pub mod translation;
pub mod vxlan;
