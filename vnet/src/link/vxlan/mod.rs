//! Links to peers that take finished Ethernet frames only: VXLAN (RFC 7348), and the classic VNET encapsulation beside it.
//!
//! [`finish_frames`] finishes and cuts frames for both; [`send`] and [`classic`] choose sockets and destinations. A VXLAN link leads to
//! one VTEP or several ([`vteps`]), from source ports that follow the flow ([`source_ports`]); frames are taken from listed VTEPs
//! only, over unicast or multicast ([`groups`]). TCP streams leave by a kernel VXLAN device where one can be made
//! ([`kernel_device`]).

pub(in crate::link) mod classic;
mod finish_frames;
pub(in crate::link) mod groups;
pub(in crate::link) mod kernel_device;
pub(in crate::link) mod kind;
pub(in crate::link) mod receive;
pub(in crate::link) mod send;
pub(in crate::link) mod source_ports;
pub(in crate::link) mod vteps;
