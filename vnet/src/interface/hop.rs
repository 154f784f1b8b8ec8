//! How a container's packets to an address leave its network namespace.
//!
//! Its routes and neighbours are the container's own: whoever administers its namespace may change them, and misleads only the container.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use netlink_packet_route::link::LinkAttribute;

use super::netns::{NamespaceId, Netns, NetnsError};
use crate::helper;
use crate::netlink::{NextHop, link, neighbour, next_hop};
use crate::wire::ethernet::Mac;

/// The first step of packets to an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hop {
    /// They do not leave the namespace.
    Local,
    /// They leave by a device.
    Device {
        /// Name of the device.
        device: String,
        /// MAC address of the device.
        mac: Mac,
        /// Source address of the packets.
        source: IpAddr,
        /// Where the device sends them.
        next: Next,
    },
}

/// The next station of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// A router.
    Router,
    /// Their destination, of which the kernel does not know the MAC address yet.
    Unknown,
    /// Their destination.
    Destination(Mac),
}

impl Netns {
    /// How packets from `own`, or from any address if it is unspecified, to `peer` leave the namespace. Returns the namespace's identity, too.
    ///
    /// # Errors
    /// The namespace does not exist. Inside: it has no address `own`, or no route.
    pub fn hop(&self, own: IpAddr, peer: SocketAddr) -> Result<(NamespaceId, io::Result<Hop>), NetnsError> {
        self.run(|| hop(own, peer))
    }
}

fn hop(own: IpAddr, peer: SocketAddr) -> io::Result<Hop> {
    // Sockets for both families write IPv4 addresses as IPv6.
    let (own, peer_ip) = (own.to_canonical(), peer.ip().to_canonical());
    let own = match peer_ip {
        IpAddr::V4(_) if own.is_unspecified() => Ipv4Addr::UNSPECIFIED.into(),
        _ => own,
    };
    let peer = match peer {
        SocketAddr::V6(_) if peer_ip.is_ipv4() => SocketAddr::new(peer_ip, peer.port()),
        _ => peer,
    };
    // The kernel refuses addresses that the namespace does not have.
    let socket = helper::udp(SocketAddr::new(own, 0))?;
    socket.connect(peer)?;
    let source = socket.local_addr()?.ip();
    let scope = match peer {
        SocketAddr::V6(v6) => v6.scope_id(),
        SocketAddr::V4(_) => 0,
    };
    let NextHop::Device { index, is_routed } = next_hop(peer.ip(), scope)? else { return Ok(Hop::Local) };
    let (mut device, mut mac) = (String::new(), None);
    for attribute in link(index)?.attributes {
        match attribute {
            LinkAttribute::IfName(name) => device = name,
            LinkAttribute::Address(bytes) => mac = bytes.try_into().ok(),
            _ => {}
        }
    }
    let next = if is_routed {
        Next::Router
    } else {
        neighbour(peer.ip(), index).map_or(Next::Unknown, |mac| Next::Destination(Mac(mac)))
    };
    Ok(Hop::Device { device, mac: Mac(mac.unwrap_or_default()), source, next })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_to_an_own_address_stay() {
        let peer = "127.0.0.1:7000".parse().unwrap();
        assert_eq!(hop("0.0.0.0".parse().unwrap(), peer).unwrap(), Hop::Local);
        assert_eq!(hop("127.0.0.1".parse().unwrap(), peer).unwrap(), Hop::Local);
        assert_eq!(
            hop("::".parse().unwrap(), "[::ffff:127.0.0.1]:7000".parse().unwrap()).unwrap(),
            Hop::Local
        );
        let foreign = hop("192.0.2.1".parse().unwrap(), peer).unwrap_err();
        assert_eq!(foreign.kind(), io::ErrorKind::AddrNotAvailable);
    }
}
