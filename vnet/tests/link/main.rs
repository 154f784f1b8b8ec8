//! The bridge over real sockets on the loopback device: every sent frame arrives once, unchanged and in order, and is counted.

#[path = "../common/mod.rs"]
mod common;
mod crossing;
mod faults;
mod foreign;
mod host;
mod network;
mod ports;
mod vxlan;
