//! Multicast group memberships of VXLAN links.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};

use crate::link::path::route::RouteProbe;
use crate::link::socket::udp::Socket;

/// Multicast group memberships. One dispatcher per host holds them, because the kernel delivers a group's datagrams to every
/// member.
#[derive(Default)]
pub(in crate::link) struct Groups(Vec<(Ipv4Addr, Ipv4Addr)>);

impl Groups {
    /// Joins `groups`, each on the device of the route to its remote, and leaves all other groups.
    pub(in crate::link) fn follow(
        &mut self,
        socket: &Socket,
        groups: impl Iterator<Item = (Ipv4Addr, SocketAddr)>,
        routes: &mut RouteProbe,
    ) {
        let mut wanted: Vec<(Ipv4Addr, Ipv4Addr)> = vec![];
        for (group, remote) in groups {
            let device = match routes.source(remote) {
                Some(IpAddr::V4(source)) => source,
                _ => Ipv4Addr::UNSPECIFIED,
            };
            if !wanted.contains(&(group, device)) {
                wanted.push((group, device));
            }
        }
        let gone: Vec<_> = self.0.iter().copied().filter(|old| !wanted.contains(old)).collect();
        for membership in gone {
            // A membership that disappeared with its device is not an error.
            let _ = change(socket, libc::IP_DROP_MEMBERSHIP, membership);
            self.0.retain(|old| *old != membership);
        }
        for membership in wanted {
            if self.0.contains(&membership) {
                continue;
            }
            match change(socket, libc::IP_ADD_MEMBERSHIP, membership) {
                Ok(()) => self.0.push(membership),
                Err(error) => {
                    tracing::warn!(group = %membership.0, device = %membership.1, %error, "cannot join the group")
                }
            }
        }
    }
}

fn change(socket: &Socket, option: libc::c_int, (group, device): (Ipv4Addr, Ipv4Addr)) -> io::Result<()> {
    let in_addr = |ip: Ipv4Addr| libc::in_addr { s_addr: u32::from_ne_bytes(ip.octets()) };
    let request = libc::ip_mreq { imr_multiaddr: in_addr(group), imr_interface: in_addr(device) };
    let len = size_of_val(&request) as libc::socklen_t;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: `request` is readable for the stated `len` bytes.
    let result = unsafe { libc::setsockopt(fd, libc::SOL_IP, option, (&raw const request).cast(), len) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
