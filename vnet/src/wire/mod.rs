//! Checked views of foreign bytes, without I/O.
//!
//! Every function here takes bytes that an attacker may have chosen. None panics, none allocates, none trusts a length
//! that it has not compared with what is there.

pub mod checksum;
pub mod ethernet;
pub mod flow;
pub mod native;
pub mod neighbour;
pub mod offload;
pub mod partial;
pub mod segment;
pub mod socks;
pub mod stream;
pub mod vxlan;
