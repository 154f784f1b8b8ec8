//! Changes of network devices of the calling thread's namespace, by rtnetlink.

use std::io;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};

use crate::helper;
use crate::netlink::Netlink;
use crate::wire::ethernet::Mac;

/// Sets a device up.
pub(super) fn raise(device: &str, mtu: usize, mac: Option<Mac>) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = helper::device_index(device)?;
    link.attributes.push(LinkAttribute::Mtu(mtu as u32));
    link.attributes.extend(mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
    link.header.flags = LinkFlags::Up;
    link.header.change_mask = LinkFlags::Up;
    Netlink::new()?.change(RouteNetlinkMessage::SetLink(link), 0)
}

/// Removes a device, and with it a pair's other end.
pub(super) fn remove(device: &str) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = helper::device_index(device)?;
    Netlink::new()?.change(RouteNetlinkMessage::DelLink(link), 0)
}

/// Makes device `port` a port of bridge `controller`.
pub(super) fn set_controller(port: u32, controller: u32) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = port;
    link.attributes.push(LinkAttribute::Controller(controller));
    Netlink::new()?.change(RouteNetlinkMessage::SetLink(link), 0)
}
