//! Links to peers that accept only finished Ethernet frames: VXLAN (RFC 7348), and the classic VNET encapsulation beside it.
//!
//! [`finish_frames`] completes checksums and segments for both; [`send`] and [`classic`] choose sockets and destinations. A VXLAN
//! link leads to one VTEP or several ([`vteps`]), from source ports that follow the flow ([`source_ports`]); frames are
//! accepted from listed VTEPs only, over unicast or multicast ([`groups`]). TCP streams leave through a kernel VXLAN device
//! where one can be created ([`kernel_device`]).

pub(in crate::link) mod classic;
mod finish_frames;
pub(in crate::link) mod groups;
pub(in crate::link) mod kernel_device;
pub(in crate::link) mod link_part;
pub(in crate::link) mod receive;
pub(in crate::link) mod send;
pub(in crate::link) mod source_ports;
pub(in crate::link) mod vteps;
