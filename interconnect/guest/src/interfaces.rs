//! The machine's Ethernet interfaces and their addresses.

use std::io;
use std::net::{IpAddr, SocketAddr};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// An Ethernet interface that is up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    pub index: u32,
    pub mac: [u8; 6],
    pub addresses: Vec<IpAddr>,
}

/// All Ethernet interfaces that are up, by index.
pub fn ethernet() -> io::Result<Vec<Interface>> {
    let mut found: Vec<(String, Interface)> = vec![];
    let mut addresses: Vec<(String, IpAddr)> = vec![];
    for entry in getifaddrs()? {
        let is_used = entry.flags.contains(InterfaceFlags::IFF_UP)
            && !entry.flags.contains(InterfaceFlags::IFF_LOOPBACK);
        let Some(address) = entry.address.filter(|_| is_used) else { continue };
        let name = entry.interface_name;
        if let Some(link) = address.as_link_addr() {
            if let Some(mac) = link.addr().filter(|mac| *mac != [0; 6]) {
                let index = link.ifindex() as u32;
                found.push((name, Interface { index, mac, addresses: vec![] }));
            }
        } else if let Some(v4) = address.as_sockaddr_in() {
            addresses.push((name, v4.ip().into()));
        } else if let Some(v6) = address.as_sockaddr_in6() {
            addresses.push((name, v6.ip().into()));
        }
    }
    for (name, ip) in addresses {
        let of = found.iter_mut().filter(|(known, _)| *known == name);
        of.for_each(|(_, interface)| interface.addresses.push(ip));
    }
    let mut found: Vec<Interface> = found.into_iter().map(|(_, interface)| interface).collect();
    found.sort_by_key(|interface| interface.index);
    Ok(found)
}

/// All local addresses, also of devices that are down or no Ethernet.
pub fn addresses() -> io::Result<Vec<IpAddr>> {
    let of = |address: nix::sys::socket::SockaddrStorage| match address.as_sockaddr_in() {
        Some(v4) => Some(v4.ip().into()),
        None => address.as_sockaddr_in6().map(|v6| v6.ip().into()),
    };
    Ok(getifaddrs()?.filter_map(|entry| of(entry.address?)).collect())
}

/// The interface that has this address, and the address; of no address, the first one of the same family that peers can reach.
pub fn choose(interfaces: &[Interface], bind: SocketAddr) -> Option<(&Interface, IpAddr)> {
    let wanted = bind.ip();
    let fits = |ip: &&IpAddr| match (wanted.is_unspecified(), ip) {
        (false, ip) => **ip == wanted,
        (true, IpAddr::V4(v4)) => wanted.is_ipv4() && !v4.is_link_local(),
        (true, IpAddr::V6(v6)) => wanted.is_ipv6() && !v6.is_unicast_link_local(),
    };
    interfaces.iter().find_map(|interface| Some((interface, *interface.addresses.iter().find(fits)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unspecified_address_is_the_first_that_peers_reach() {
        let interface = |index, addresses: &[&str]| Interface {
            index,
            mac: [2, 0, 0, 0, 0, index as u8],
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
        };
        let all = [
            interface(2, &["169.254.1.1", "fe80::1"]),
            interface(3, &["fe80::2", "fd00::2", "10.0.0.2"]),
            interface(4, &["10.0.0.3"]),
        ];
        let of =
            |bind: &str| choose(&all, bind.parse().unwrap()).map(|(found, ip)| (found.index, ip.to_string()));
        assert_eq!(of("0.0.0.0:0"), Some((3, "10.0.0.2".into())));
        assert_eq!(of("[::]:0"), Some((3, "fd00::2".into())));
        assert_eq!(of("10.0.0.3:7"), Some((4, "10.0.0.3".into())));
        assert_eq!(of("10.0.0.4:7"), None);
        assert!(addresses().unwrap().contains(&IpAddr::from([127, 0, 0, 1])));
        assert!(ethernet().unwrap().iter().all(|interface| interface.mac != [0; 6]));
    }
}
