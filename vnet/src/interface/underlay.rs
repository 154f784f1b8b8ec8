//! Devices of the underlay for datagrams that programs of the kernel's own path make.

use std::net::{IpAddr, Ipv4Addr};

use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkLayerType};

use crate::netlink::{self, link, route_to};

/// The way of datagrams to a remote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Index of the device on the route.
    pub device: u32,
    /// This host's source address on it.
    pub local: Ipv4Addr,
    /// The router, or the remote itself; `None` if the router has an IPv6 address.
    pub next_hop: Option<Ipv4Addr>,
}

/// The way to `remote`. `None` without a route, and for a device that is not an Ethernet device.
pub fn way_to(remote: Ipv4Addr) -> Option<Way> {
    let route = route_to(remote.into()).ok()?;
    let Some(IpAddr::V4(local)) = route.source else { return None };
    let device = link(route.device).ok()?.header;
    let is_ethernet =
        device.link_layer_type == LinkLayerType::Ether && !device.flags.contains(LinkFlags::Loopback);
    let next_hop = match route.next_hop {
        Some(IpAddr::V4(address)) => Some(address),
        _ => None,
    };
    is_ethernet.then_some(Way { device: route.device, local, next_hop })
}

/// True if the host has IPsec policies, or if they cannot be queried.
pub fn has_ipsec_policies() -> bool {
    netlink::has_ipsec_policies()
}

/// The name of a device.
pub fn name_of(device: u32) -> Option<String> {
    link(device).ok()?.attributes.into_iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_is_no_way() {
        assert_eq!(way_to(Ipv4Addr::LOCALHOST), None);
        assert_eq!(name_of(1).as_deref(), Some("lo"));
        assert_eq!(name_of(u32::MAX), None);
    }
}
