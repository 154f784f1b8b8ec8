//! Rendezvous: two hosts behind NAT find each other through a third one.
//!
//! [`client`] asks for a meeting, [`relay`] is the third host that forwards between the two, and [`choice`] picks between the
//! relayed and the direct path once hole punching has worked.

pub(in crate::link) mod choice;
pub mod client;
pub mod relay;
