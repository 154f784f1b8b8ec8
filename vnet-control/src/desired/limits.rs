//! Limits of a host, and valid names and addresses.

use std::net::{IpAddr, SocketAddr};

/// Maximum number of interfaces of a host.
pub const INTERFACES_MAX: usize = 1_024;
/// Maximum number of links of a host.
pub const LINKS_MAX: usize = 4_096;
/// Maximum number of routes of a host.
pub const ROUTES_MAX: usize = 1_048_576;
/// Smallest interface MTU in bytes (RFC 791: every IPv4 module forwards 68 bytes unfragmented).
pub const MTU_MIN: u32 = 68;
/// Default MTU of an interface in bytes.
pub const MTU_DEFAULT: u32 = 1_500;
/// Smallest path MTU of a link in bytes (RFC 791: every IPv4 host reassembles 576 bytes).
pub const LINK_MTU_MIN: u32 = 576;
/// Maximum number of queues of a TAP (the kernel's limit).
pub const TAP_QUEUES_MAX: u32 = 256;
/// Maximum number of IP addresses of an interface's guest.
pub const ADDRESSES_MAX: usize = 16;
/// Maximum length of a Unix socket's path in bytes (`sockaddr_un` without the terminating zero).
pub const SOCKET_PATH_MAX: usize = 107;
/// Default control socket.
pub const CONTROL_SOCKET: &str = "/run/vnet/vnet.sock";
/// Default UDP port of links, as in VNET/P.
pub const BRIDGE_PORT: u16 = 9_000;

/// Maximum length of the name of a host, interface or link, in bytes.
pub const NAME_MAX: usize = 64;

/// True for a valid name of a host, interface or link.
pub fn is_name(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    !name.is_empty() && name.len() <= NAME_MAX && name.chars().all(good) && !name.starts_with(['.', '-'])
}

/// True for an address at which another host can be reached: unicast, not loopback, with a port.
pub fn is_host_address(address: SocketAddr) -> bool {
    address.port() != 0 && !address.ip().is_loopback() && is_station_address(address.ip())
}

/// True for a unicast address, loopback excluded.
pub fn is_station_address(address: IpAddr) -> bool {
    let broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
    !(address.is_unspecified() || address.is_multicast() || address.is_loopback() || broadcast)
}
