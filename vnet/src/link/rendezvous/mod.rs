//! Rendezvous: two hosts behind NAT find each other through a third host.
//!
//! [`client`] asks for a meeting, [`relay`] is the third host that forwards between the two, and [`hole_punching`] chooses
//! between the relayed and the direct path. [`relay_succession`] hands the third host's part to the next vnetd.

pub mod client;
pub(in crate::link) mod hole_punching;
pub mod relay;
pub mod relay_succession;
