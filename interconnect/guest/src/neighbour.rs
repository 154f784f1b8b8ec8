//! MAC addresses of peers, from the kernel's neighbour table (ARP, ND).

use std::net::{IpAddr, UdpSocket};

use netlink_packet_core::{NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourMessage, NeighbourState};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

/// UDP port of a datagram that nobody answers (discard, RFC 863).
const DISCARD: u16 = 9;

/// The MAC address of a neighbour on a device, as far as the kernel knows it (RTM_GETNEIGH).
pub fn known(address: IpAddr, device: u32) -> Option<[u8; 6]> {
    let mut question = NeighbourMessage::default();
    question.header.family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    question.header.ifindex = device;
    question.attributes.push(NeighbourAttribute::Destination(address.into()));
    let mut message = NetlinkMessage::from(RouteNetlinkMessage::GetNeighbour(question));
    message.header.flags = NLM_F_REQUEST;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    let mut socket = Socket::new(NETLINK_ROUTE).ok()?;
    socket.bind_auto().ok()?;
    socket.connect(&SocketAddr::new(0, 0)).ok()?;
    socket.send(&bytes, 0).ok()?;
    let (answer, _) = socket.recv_from_full().ok()?;
    let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer).ok()?;
    let NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewNeighbour(found)) = answer.payload else {
        return None;
    };
    let is_unknown = matches!(
        found.header.state,
        NeighbourState::Incomplete | NeighbourState::Failed | NeighbourState::None | NeighbourState::Noarp
    );
    if is_unknown {
        return None;
    }
    found.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => bytes[..].try_into().ok(),
        _ => None,
    })
}

/// Has the kernel look for a neighbour: it does before it sends anything there.
pub fn look_for(address: IpAddr) {
    let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    if let Ok(socket) = UdpSocket::bind(any) {
        let _ = socket.send_to(&[], (address, DISCARD));
    }
}
