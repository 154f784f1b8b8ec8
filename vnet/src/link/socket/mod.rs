//! The bridge's UDP sockets, and all use of `msghdr` and `cmsghdr`.
//!
//! A host has one UDP port or several ([`ports`]). [`send_batch`] batches headers and slices of guest memory for `sendmmsg`
//! ([`message`]), [`error_queue`] reads completions of zero-copy sends, [`buffers`] sizes socket buffers by device speed,
//! [`name`] holds addresses in the kernel's form, [`source_filter`] lets one source through. [`tcp`] listens for handshakes and streams.

pub(in crate::link) mod buffers;
pub(in crate::link) mod error_queue;
pub(crate) mod message;
pub(crate) mod name;
pub(crate) mod ports;
pub(crate) mod receive_buffers;
pub(in crate::link) mod send_batch;
mod source_filter;
pub(in crate::link) mod tcp;
pub(crate) mod udp;
