//! The VXLAN part of a link.

use std::net::SocketAddr;

use super::kernel_device::Drivers;
use super::vteps::{Vteps, VxlanOptions};

/// The VXLAN part of a link.
#[derive(Debug)]
pub(in crate::link) struct Vxlan {
    /// The first VTEP.
    pub(in crate::link) remote: SocketAddr,
    pub(in crate::link) vteps: Vteps,
    /// Kernel devices for TCP streams; `None` if disabled in the configuration.
    pub(in crate::link) drivers: Option<Drivers>,
}

impl Vxlan {
    /// A link to the VTEP at `remote`.
    pub(in crate::link) fn new(remote: SocketAddr, options: &VxlanOptions) -> Vxlan {
        let drivers = options.offload.then(Drivers::default);
        Vxlan { remote, vteps: Vteps::new(remote, options), drivers }
    }
}
