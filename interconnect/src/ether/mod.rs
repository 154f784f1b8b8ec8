//! Raw Ethernet: the protocol's packets in Ethernet frames, without IP and UDP, between stations of one LAN.
//!
//! A node at an Ethernet device has a packet socket (`AF_PACKET`) bound to the device. A frame carries one packet behind a header of ten bytes
//! ([`frame`]): a magic number, the ports of both nodes, because several nodes share a device, and the packet's length, because Ethernet
//! pads short frames. A classic BPF program in the kernel (`filter.rs`) passes only frames to the device's own address and this node's
//! port. So frames of other protocols with the same ethertype, such as control frames of virtual machines ([`crate::vm`]), never reach the
//! process.
//!
//! Peers are addresses of the type `SocketAddr` everywhere else. A station is written as the link-local IPv6 address that is made from its
//! MAC address ([`address`]), with the node's port and without a scope. The kernel requires a scope for link-local addresses, so no such
//! address stands for a UDP socket, too.
//!
//! The kernel does not distribute ports of an ethertype. A node reserves its own by an abstract Unix socket with the device and the port in
//! its name: those names belong to the network namespace, as devices do, and are free again when the process ends.
//!
//! Nothing below fragments, so a packet is never longer than the device's MTU permits. Ethernet carries no mark of congestion. A frame
//! that the device refuses counts as lost in the network.

pub mod address;
mod device;
mod filter;
pub mod frame;
mod socket;

pub use device::Refusal;
pub use filter::attach_filter;
pub(crate) use socket::Socket;

#[cfg(test)]
mod tests;
