//! rtnetlink(7): requests to the kernel, one at a time, and its notifications.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd};

use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourMessage, NeighbourState};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_XFRM;

use crate::helper::{self, Kind};

/// An rtnetlink socket in the thread's target namespace when it was created ([`crate::helper`]).
pub(crate) struct Netlink(Socket);

fn open() -> io::Result<Socket> {
    let socket = helper::socket(Kind::ROUTES)?;
    // SAFETY: the descriptor is an rtnetlink socket, and its owner gives it up.
    Ok(unsafe { Socket::from_raw_fd(socket.into_raw_fd()) })
}

impl Netlink {
    /// Opens the socket in the thread's target namespace.
    pub(crate) fn new() -> io::Result<Netlink> {
        let mut socket = open()?;
        socket.bind_auto()?;
        socket.connect(&netlink_sys::SocketAddr::new(0, 0))?;
        Ok(Netlink(socket))
    }

    /// Sends a change with extra `flags` (`NLM_F_…`) and waits for the kernel's acknowledgement.
    pub(crate) fn change(&self, request: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        let mut message = NetlinkMessage::from(request);
        message.header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
        match self.exchange(message)?.payload {
            NetlinkPayload::Error(error) if error.code.is_some() => Err(error.to_io()),
            _ => Ok(()),
        }
    }

    /// Sends a query for one object and returns the reply.
    pub(crate) fn ask(&self, request: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
        let mut message = NetlinkMessage::from(request);
        message.header.flags = NLM_F_REQUEST;
        match self.exchange(message)?.payload {
            NetlinkPayload::InnerMessage(answer) => Ok(answer),
            NetlinkPayload::Error(error) => Err(error.to_io()),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    fn exchange(
        &self,
        mut message: NetlinkMessage<RouteNetlinkMessage>,
    ) -> io::Result<NetlinkMessage<RouteNetlinkMessage>> {
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.0.send(&bytes, 0)?;
        let (answer, _) = self.0.recv_from_full()?;
        NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer).map_err(io::Error::other)
    }
}

/// A route to a remote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Index of the device.
    pub(crate) device: u32,
    /// Source address that the kernel chooses.
    pub(crate) source: Option<IpAddr>,
    /// Where packets go on the device's network: the router, or else the remote; `None`: a router of the other address family.
    pub(crate) next_hop: Option<IpAddr>,
}

/// The kernel's answer about the route to `remote` (RTM_GETROUTE), from any address or from `source`.
fn ask_route(remote: IpAddr, source: Option<IpAddr>, flags: RouteFlags) -> io::Result<RouteMessage> {
    let mut question = RouteMessage::default();
    question.header.flags = flags;
    (question.header.address_family, question.header.destination_prefix_length) = match remote {
        IpAddr::V4(_) => (AddressFamily::Inet, 32),
        IpAddr::V6(_) => (AddressFamily::Inet6, 128),
    };
    question.attributes.push(RouteAttribute::Destination(remote.into()));
    if let Some(source) = source {
        question.header.source_prefix_length = question.header.destination_prefix_length;
        question.attributes.push(RouteAttribute::Source(source.into()));
    }
    match Netlink::new()?.ask(RouteNetlinkMessage::GetRoute(question))? {
        RouteNetlinkMessage::NewRoute(route) => Ok(route),
        _ => Err(io::ErrorKind::NetworkUnreachable.into()),
    }
}

/// The kernel's route to `remote`.
pub(crate) fn route_to(remote: IpAddr) -> io::Result<Route> {
    let route = ask_route(remote, None, RouteFlags::empty())?;
    let (mut device, mut source, mut next_hop) = (None, None, Some(remote));
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Oif(index) => device = Some(*index),
            RouteAttribute::PrefSource(RouteAddress::Inet(ip)) => source = Some(IpAddr::V4(*ip)),
            RouteAttribute::PrefSource(RouteAddress::Inet6(ip)) => source = Some(IpAddr::V6(*ip)),
            RouteAttribute::Gateway(RouteAddress::Inet(ip)) => next_hop = Some(IpAddr::V4(*ip)),
            RouteAttribute::Gateway(RouteAddress::Inet6(ip)) => next_hop = Some(IpAddr::V6(*ip)),
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => next_hop = None,
            _ => {}
        }
    }
    Ok(Route { device: device.ok_or(io::ErrorKind::NotFound)?, source, next_hop })
}

/// How packets to a remote leave the calling thread's namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextHop {
    /// They do not leave it.
    Local,
    /// By the device with this index.
    Device {
        index: u32,
        /// A router is at the device's network.
        is_routed: bool,
    },
}

/// The next hop to `remote`; `device` is the index of the device for a link-local address, or 0.
pub(crate) fn next_hop(remote: IpAddr, device: u32) -> io::Result<NextHop> {
    if device != 0 {
        return Ok(NextHop::Device { index: device, is_routed: false });
    }
    let route = ask_route(remote, None, RouteFlags::empty())?;
    if route.header.kind == RouteType::Local {
        return Ok(NextHop::Local);
    }
    let (mut device, mut is_routed) = (None, false);
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Oif(index) => device = Some(*index),
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => is_routed = true,
            _ => {}
        }
    }
    Ok(NextHop::Device { index: device.ok_or(io::ErrorKind::NotFound)?, is_routed })
}

/// The link-layer address of a neighbour on a device (RTM_GETNEIGH), as far as the kernel knows it.
pub(crate) fn neighbour(address: IpAddr, device: u32) -> Option<[u8; 6]> {
    let mut question = NeighbourMessage::default();
    question.header.family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    question.header.ifindex = device;
    question.attributes.push(NeighbourAttribute::Destination(address.into()));
    let answer = Netlink::new().and_then(|netlink| netlink.ask(RouteNetlinkMessage::GetNeighbour(question)));
    let Ok(RouteNetlinkMessage::NewNeighbour(found)) = answer else { return None };
    if matches!(
        found.header.state,
        NeighbourState::Incomplete | NeighbourState::Failed | NeighbourState::None | NeighbourState::Noarp
    ) {
        return None;
    }
    found.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => bytes[..].try_into().ok(),
        _ => None,
    })
}

/// The MTU towards `remote` that the administrator has configured, on the device and perhaps on the route. A socket's path MTU can
/// be smaller: that is what ICMP has claimed. `local`: the packets' source, or the unspecified address.
pub(crate) fn configured_mtu(local: IpAddr, remote: SocketAddr) -> io::Result<u32> {
    let device = match remote {
        // A link-local address carries its device's index.
        SocketAddr::V6(v6) if v6.scope_id() != 0 => v6.scope_id(),
        _ => route_to(remote.ip())?.device,
    };
    let of_device = link(device)?.attributes.into_iter().find_map(|attribute| match attribute {
        LinkAttribute::Mtu(mtu) => Some(mtu),
        _ => None,
    });
    let source = Some(local).filter(|local| !local.is_unspecified() && local.is_ipv4() == remote.is_ipv4());
    // The entry of the table, without exceptions (RTM_F_FIB_MATCH).
    let route = ask_route(remote.ip(), source, RouteFlags::FibMatch);
    let metrics =
        route.ok().into_iter().flat_map(|route| route.attributes).find_map(|attribute| match attribute {
            RouteAttribute::Metrics(metrics) => Some(metrics),
            _ => None,
        });
    let of_route = metrics.into_iter().flatten().find_map(|metric| match metric {
        RouteMetric::Mtu(mtu) => Some(mtu),
        _ => None,
    });
    of_device
        .map(|mtu| of_route.map_or(mtu, |of_route| mtu.min(of_route)))
        .ok_or(io::ErrorKind::NotFound.into())
}

/// A device of the calling thread's namespace (RTM_GETLINK).
pub(crate) fn link(index: u32) -> io::Result<LinkMessage> {
    let mut question = LinkMessage::default();
    question.header.index = index;
    match Netlink::new()?.ask(RouteNetlinkMessage::GetLink(question))? {
        RouteNetlinkMessage::NewLink(link) => Ok(link),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// True if the calling thread's namespace has IPsec policies (XFRM_MSG_GETSPDINFO), or if the kernel does not answer.
pub(crate) fn has_ipsec_policies() -> bool {
    const GETSPDINFO: u16 = 0x25;
    const HEADERS: usize = 16 + 4 + 4;
    let ask = || -> io::Result<Vec<u8>> {
        let mut socket = Socket::new(NETLINK_XFRM)?;
        socket.bind_auto()?;
        socket.connect(&netlink_sys::SocketAddr::new(0, 0))?;
        // Netlink header, flags.
        let mut request = [0; 16 + 4];
        request[..4].copy_from_slice(&20_u32.to_ne_bytes());
        request[4..6].copy_from_slice(&GETSPDINFO.to_ne_bytes());
        request[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
        socket.send(&request, 0)?;
        Ok(socket.recv_from_full()?.0)
    };
    match ask() {
        // Netlink header, flags, attribute header; then six counters of 4 bytes.
        Ok(answer) => {
            answer.get(HEADERS..).is_none_or(|counts| counts.iter().take(24).any(|byte| *byte != 0))
        }
        Err(error) => error.raw_os_error() != Some(libc::EPROTONOSUPPORT),
    }
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Notifications that something changed in the network namespace of the thread that created the socket. The reader looks up what
/// changed: when many notifications arrive at once the kernel may drop some of them, but never all.
pub(crate) struct Notifications(Socket);

impl Notifications {
    /// Subscribes to `groups` (`RTMGRP_…`).
    pub(crate) fn subscribe(groups: u32) -> io::Result<Notifications> {
        let mut socket = open()?;
        socket.set_non_blocking(true)?;
        socket.bind(&netlink_sys::SocketAddr::new(0, groups))?;
        Ok(Notifications(socket))
    }

    /// Discards pending notifications. Stops after a bounded number, so that a fast writer cannot keep the reader here.
    pub(crate) fn drain(&self) {
        const MESSAGES_MAX: usize = 1024;
        for _ in 0..MESSAGES_MAX {
            let mut room = [0; 1];
            // The kernel truncates messages to `room`. ENOBUFS reports lost messages and precedes the remaining ones.
            match self.0.recv(&mut room.as_mut_slice(), 0) {
                Err(error) if error.raw_os_error() != Some(libc::ENOBUFS) => return,
                _ => {}
            }
        }
    }
}

impl AsFd for Notifications {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
