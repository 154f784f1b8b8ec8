//! Headroom: free bytes before packets of containers, where the headers of datagrams to other hosts go.
//!
//! A container's kernel leaves as much room before a packet as the device asks for (`needed_headroom`). A pair asks for none, so a
//! program that adds headers would have the kernel copy each ping, UDP datagram and IP fragment. Neither a program nor rtnetlink can
//! ask for more; a bridge can, for all its ports: as much as the neediest of them (`netdev_set_rx_headroom`).
//!
//! ```text
//!   vnet-room, a bridge that is never up
//!     |-- vnet-room-vxlan, never up: needs room for VXLAN's headers
//!     |-- host's end of each container's pair
//! ```
//!
//! The bridge never sees a frame: programs at a host's end run before it and take every frame. If one did pass, a bridge that is down
//! drops it. Without the bridge everything works, slower.

use std::io;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkInfo, LinkMessage};
use parking_lot::Mutex;

use super::link_request::{remove, set_controller};
use super::tap;
use crate::netlink::Netlink;

const BRIDGE: &str = "vnet-room";
const NEEDY: &str = "vnet-room-vxlan";
/// VXLAN network and UDP port of a device that never opens its socket: neither is in use on any network.
const NEEDY_ID: u32 = 0xff_ffff;
const NEEDY_PORT: u16 = 9;

/// Number of hosts' ends of this process that are ports of the bridge.
static PORTS: Mutex<usize> = Mutex::new(0);

/// Has the container at the other end of pair `device` leave headroom. Creates the bridge if it does not exist.
///
/// # Errors
/// The kernel has no bridges or no VXLAN, or the device is a port of another bridge.
pub(super) fn join(device: u32) -> io::Result<()> {
    let mut ports = PORTS.lock();
    // Both may be those of a vnetd that has died.
    let needy = find_or_make(NEEDY, InfoKind::Vxlan, || {
        Some(InfoData::Vxlan(vec![InfoVxlan::Id(NEEDY_ID), InfoVxlan::Port(NEEDY_PORT)]))
    })?;
    let bridge = find_or_make(BRIDGE, InfoKind::Bridge, || None)?;
    set_controller(needy, bridge)?;
    set_controller(device, bridge)?;
    *ports += 1;
    Ok(())
}

/// A device that has joined is gone. The bridge goes with the last one.
pub(super) fn leave() {
    let mut ports = PORTS.lock();
    *ports -= 1;
    if *ports == 0 {
        remove_both();
    }
}

/// Removes the bridge of a vnetd that has died, if this process does not use it.
pub(crate) fn remove_dead() {
    let ports = PORTS.lock();
    if *ports == 0 {
        remove_both();
    }
}

fn remove_both() {
    for device in [BRIDGE, NEEDY] {
        if tap::device_index(device).is_some() {
            let _ = remove(device);
        }
    }
}

/// Index of a device of the calling thread's namespace, created down if it does not exist.
fn find_or_make(name: &str, kind: InfoKind, data: impl Fn() -> Option<InfoData>) -> io::Result<u32> {
    if let Some(index) = tap::device_index(name) {
        return Ok(index);
    }
    let mut info = vec![LinkInfo::Kind(kind)];
    info.extend(data().map(LinkInfo::Data));
    let mut request = LinkMessage::default();
    request.attributes = vec![LinkAttribute::IfName(name.into()), LinkAttribute::LinkInfo(info)];
    Netlink::new()?.change(RouteNetlinkMessage::NewLink(request), NLM_F_CREATE | NLM_F_EXCL)?;
    tap::device_index(name).ok_or_else(io::Error::last_os_error)
}
