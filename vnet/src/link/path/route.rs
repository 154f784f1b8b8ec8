//! Queries the kernel's routing table for the path MTU and the source address towards a remote.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use crate::link::socket::name::{Name, normalised};
use crate::link::socket::udp::{check, local_name, udp_socket};

/// Queries the kernel's routes for path MTUs. Its UDP socket is reconnected for each query and never sends.
pub(in crate::link) struct RouteProbe {
    local: SocketAddr,
    v4: Option<OwnedFd>,
    v6: Option<OwnedFd>,
}

impl RouteProbe {
    /// A probe for packets that leave from `local`.
    pub(in crate::link) fn new(local: SocketAddr) -> RouteProbe {
        RouteProbe { local: normalised(local), v4: None, v6: None }
    }

    /// The kernel's path MTU to `remote` in bytes, derived from device, route and ICMP.
    pub(in crate::link) fn path_mtu(&mut self, remote: SocketAddr) -> io::Result<u32> {
        let v6 = remote.is_ipv6();
        let fd = self.connect(remote)?;
        let (level, option) =
            if v6 { (libc::SOL_IPV6, libc::IPV6_MTU) } else { (libc::SOL_IP, libc::IP_MTU) };
        let mut mtu: libc::c_int = 0;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: `mtu` is writable for the stated `len` bytes.
        check(unsafe { libc::getsockopt(fd.as_raw_fd(), level, option, (&raw mut mtu).cast(), &mut len) })?;
        u32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// This host's source address for packets to `remote`.
    pub(in crate::link) fn source(&mut self, remote: SocketAddr) -> Option<IpAddr> {
        let fd = self.connect(remote).ok()?;
        Some(local_name(fd).ok()?.address()?.ip())
    }

    /// Connects the socket to `remote`, which looks up the route.
    fn connect(&mut self, remote: SocketAddr) -> io::Result<&OwnedFd> {
        let v6 = remote.is_ipv6();
        let (local, slot) = (self.local, if v6 { &mut self.v6 } else { &mut self.v4 });
        let fd = match slot {
            Some(fd) => fd,
            none => none.insert(RouteProbe::socket(v6, local)?),
        };
        let name = Name::new(remote, v6).ok_or(io::ErrorKind::InvalidInput)?;
        // The first connect fixes the source address. Without a disconnect, the next connect fails if that address cannot be a
        // source (127.0.0.1 for a remote elsewhere) or no longer exists. An explicitly bound address remains.
        for name in [&Name::unknown(), &name] {
            // SAFETY: `name` holds a socket address (AF_UNSPEC disconnects) of the stated length.
            check(unsafe { libc::connect(fd.as_raw_fd(), name.as_ptr(), name.len()) })?;
        }
        Ok(fd)
    }

    /// Creates a socket that is bound to the bridge's address if that is a specific one, so that source routing matches.
    fn socket(v6: bool, mut local: SocketAddr) -> io::Result<OwnedFd> {
        let fd = udp_socket(v6)?;
        if local.is_ipv6() == v6 && !local.ip().is_unspecified() {
            local.set_port(0);
            let name = Name::new(local, v6).ok_or(io::ErrorKind::InvalidInput)?;
            // SAFETY: `name` holds a socket address of the stated length.
            check(unsafe { libc::bind(fd.as_raw_fd(), name.as_ptr(), name.len()) })?;
        }
        Ok(fd)
    }
}
