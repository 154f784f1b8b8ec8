//! Speed of the device that a route uses, from rtnetlink(7) and ethtool.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::link::socket::buffers::ASSUMED_MBPS;
use crate::link::socket::udp::check;
use crate::netlink::route_to;

/// Speed in Mbit/s of the device on the route to `remote`; [`ASSUMED_MBPS`] if unknown. `socket` is any socket in the network
/// namespace.
pub(in crate::link) fn path_mbps(socket: BorrowedFd<'_>, remote: SocketAddr) -> u32 {
    let device = match remote {
        // A link-local address carries its device's index.
        SocketAddr::V6(v6) if v6.scope_id() != 0 => Ok(v6.scope_id()),
        _ => route_to(remote.ip()).map(|route| route.device),
    };
    device.and_then(|index| device_mbps(socket, index)).unwrap_or(ASSUMED_MBPS)
}

/// `struct ethtool_cmd` (linux/ethtool.h).
#[repr(C)]
#[derive(Default)]
struct EthtoolCommand {
    command: u32,
    supported: u32,
    advertising: u32,
    speed_low: u16,
    modes: [u8; 6],
    packets_max: [u32; 2],
    speed_high: u16,
    crossover: [u8; 2],
    partner: u32,
    reserved: [u32; 2],
}

/// Speed that a device reports, in Mbit/s.
fn device_mbps(socket: BorrowedFd<'_>, index: u32) -> io::Result<u32> {
    const ETHTOOL_GSET: u32 = 1;
    let mut name = [0; libc::IFNAMSIZ];
    // SAFETY: `name` has IF_NAMESIZE bytes, the most that this call writes.
    if unsafe { libc::if_indextoname(index, name.as_mut_ptr()) }.is_null() {
        return Err(io::Error::last_os_error());
    }
    let mut command = EthtoolCommand { command: ETHTOOL_GSET, ..EthtoolCommand::default() };
    let data = libc::__c_anonymous_ifr_ifru { ifru_data: (&raw mut command).cast() };
    let mut request = libc::ifreq { ifr_name: name, ifr_ifru: data };
    // SAFETY: SIOCETHTOOL takes an `ifreq` whose data is a command; ETHTOOL_GSET writes one `ethtool_cmd` there, which this
    // function owns.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) })?;
    match u32::from(command.speed_high) << 16 | u32::from(command.speed_low) {
        // SPEED_UNKNOWN, in both encodings that drivers use.
        0 | 0xffff | u32::MAX => Err(io::ErrorKind::Unsupported.into()),
        mbps => Ok(mbps),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    /// The loopback device reports no speed; an address without a route has no device.
    #[test]
    fn unknown_speeds_are_assumed() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        for remote in ["127.0.0.1:9000", "[::1]:9000"] {
            let remote: SocketAddr = remote.parse().unwrap();
            assert_eq!(path_mbps(socket.as_fd(), remote), ASSUMED_MBPS);
        }
        let index = route_to([127, 0, 0, 1].into()).unwrap().device;
        assert_eq!(index, 1, "the loopback device is the first one of every namespace");
        assert!(
            device_mbps(socket.as_fd(), index).is_err() && device_mbps(socket.as_fd(), u32::MAX).is_err()
        );
    }
}
