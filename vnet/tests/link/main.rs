//! The bridge over real sockets on the loopback device: what is sent comes out, once, unchanged, in order, and counted.

mod crossing;
mod faults;
mod foreign;
mod host;
mod network;
mod ports;
mod vxlan;
