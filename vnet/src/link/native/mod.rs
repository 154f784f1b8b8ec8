//! Native links: frames of up to 64 KiB over UDP, with their offload metadata, bundled when small and fragmented when large.
//!
//! [`send`] bundles or fragments, [`receive`] splits and dispatches by type, [`reassembly`] joins fragments, [`duplicates`]
//! suppresses duplicates, and [`zero_copy`] lets the kernel send from guest pages. [`wire_state`] knows whether frames may take the
//! kernel's own path instead, [`translations`] agrees on packets that need no tunnel there, [`direct_ports`] negotiates the ports at which single guests receive.

pub(in crate::link) mod direct_ports;
pub(in crate::link) mod duplicates;
pub(in crate::link) mod encode;
pub(in crate::link) mod link_part;
pub mod reassembly;
pub(in crate::link) mod receive;
pub(in crate::link) mod send;
pub(in crate::link) mod send_probes;
pub mod translations;
pub(in crate::link) mod wire_state;
pub(in crate::link) mod zero_copy;
mod zero_copy_backoff;
