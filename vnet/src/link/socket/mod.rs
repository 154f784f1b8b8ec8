//! The bridge's UDP sockets, and everything that knows `msghdr` and `cmsghdr`.
//!
//! A [`udp::Bridge`] is a host's set of ports ([`ports`]). [`gather`] batches headers and slices of guest memory for `sendmmsg`,
//! [`error_queue`] reads what the kernel reports of messages sent before, [`buffers`] sizes socket buffers by the speed of the
//! device, and [`control_datagrams`] sends keepalives, probes and inquiries outside the data path.

pub(in crate::link) mod buffers;
pub mod control_datagrams;
pub(in crate::link) mod error_queue;
pub(in crate::link) mod gather;
pub(in crate::link) mod ports;
pub(in crate::link) mod udp;
