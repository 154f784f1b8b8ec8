//! Asks the kernel's routing table: path MTU and source address towards a remote.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use crate::link::socket::name::{Name, normalised};
use crate::link::socket::udp::{check, local_name, udp_socket};

/// Asks the kernel's routes for path MTUs. A UDP socket that is connected anew for each question and never sends.
pub(in crate::link) struct RouteProbe {
    local: SocketAddr,
    v4: Option<OwnedFd>,
    v6: Option<OwnedFd>,
}

impl RouteProbe {
    /// For packets that leave from `local`.
    pub(in crate::link) fn new(local: SocketAddr) -> RouteProbe {
        RouteProbe { local: normalised(local), v4: None, v6: None }
    }

    /// The path MTU to `remote` in bytes, as the kernel knows it: device, route, ICMP heard.
    pub(in crate::link) fn path_mtu(&mut self, remote: SocketAddr) -> io::Result<u32> {
        let v6 = remote.is_ipv6();
        let fd = self.connect(remote)?;
        let (level, option) =
            if v6 { (libc::SOL_IPV6, libc::IPV6_MTU) } else { (libc::SOL_IP, libc::IP_MTU) };
        let mut mtu: libc::c_int = 0;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: `mtu` is writable for the `len` bytes told.
        check(unsafe { libc::getsockopt(fd.as_raw_fd(), level, option, (&raw mut mtu).cast(), &mut len) })?;
        u32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// The address of this host that packets to `remote` leave from.
    pub(in crate::link) fn source(&mut self, remote: SocketAddr) -> Option<IpAddr> {
        let fd = self.connect(remote).ok()?;
        Some(local_name(fd).ok()?.address()?.ip())
    }

    /// Makes the socket look for the way to `remote`.
    fn connect(&mut self, remote: SocketAddr) -> io::Result<&OwnedFd> {
        let v6 = remote.is_ipv6();
        let (local, slot) = (self.local, if v6 { &mut self.v6 } else { &mut self.v4 });
        let fd = match slot {
            Some(fd) => fd,
            none => none.insert(RouteProbe::socket(v6, local)?),
        };
        let name = Name::new(remote, v6).ok_or(io::ErrorKind::InvalidInput)?;
        // The first question gives the socket a source address, which would stay: the next one has to begin without, or it
        // fails where that address cannot be a source (127.0.0.1 for a remote elsewhere) or has gone. An address that the
        // socket was bound to remains.
        for name in [&Name::unknown(), &name] {
            // SAFETY: `name` holds a socket address (AF_UNSPEC disconnects) of the length it tells.
            check(unsafe { libc::connect(fd.as_raw_fd(), name.as_ptr(), name.len()) })?;
        }
        Ok(fd)
    }

    /// Bound like the bridge where it is bound to one address, so that routes by source address are the same.
    fn socket(v6: bool, mut local: SocketAddr) -> io::Result<OwnedFd> {
        let fd = udp_socket(v6)?;
        if local.is_ipv6() == v6 && !local.ip().is_unspecified() {
            local.set_port(0);
            let name = Name::new(local, v6).ok_or(io::ErrorKind::InvalidInput)?;
            // SAFETY: `name` holds a socket address of the length it tells.
            check(unsafe { libc::bind(fd.as_raw_fd(), name.as_ptr(), name.len()) })?;
        }
        Ok(fd)
    }
}
