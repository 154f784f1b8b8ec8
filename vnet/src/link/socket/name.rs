//! Socket addresses in the kernel's form.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// The canonical form of an address, used in all tables: IPv4 not mapped into IPv6, no flow label.
pub fn normalised(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(ip) => SocketAddr::new(IpAddr::V4(ip), v6.port()),
            None => SocketAddrV6::new(*v6.ip(), v6.port(), 0, v6.scope_id()).into(),
        },
        v4 => v4,
    }
}

/// Remote of a link that learns its peer's address. No host has this address.
pub const ANYWHERE: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);
/// Maximum number of ports of a host's bridge, equal to the maximum number of dispatchers.
pub const PORTS_MAX: u16 = 64;

/// The addresses of `ports` consecutive ports from that of `remote` on. Ports beyond 65535 are omitted.
pub(in crate::link) fn addresses(remote: SocketAddr, ports: u16) -> impl Iterator<Item = SocketAddr> {
    let ports = (0..ports.min(PORTS_MAX)).map_while(move |offset| remote.port().checked_add(offset));
    ports.map(move |port| {
        let mut address = remote;
        address.set_port(port);
        address
    })
}

/// One address in both forms: for IPv4 sockets, and for IPv6 sockets, which need IPv4 addresses mapped.
/// [`Socket::form_of`](super::udp::Socket::form_of) chooses.
#[derive(Clone, Copy, Debug)]
pub(in crate::link) struct Target {
    pub(super) is_v4: bool,
    /// Indexed by whether the socket is IPv6.
    pub(super) forms: [Option<Name>; 2],
}

impl Target {
    /// Both forms of `address`, which must be normalised.
    pub(in crate::link) fn new(address: SocketAddr) -> Target {
        Target { is_v4: address.is_ipv4(), forms: [false, true].map(|v6| Name::new(address, v6)) }
    }
}

/// An IPv4 or IPv6 address in the kernel's form, in storage for the larger of the two.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Name {
    storage: libc::sockaddr_in6,
    len: libc::socklen_t,
}

const _: () = assert!(
    size_of::<libc::sockaddr_in>() <= size_of::<libc::sockaddr_in6>()
        && align_of::<libc::sockaddr_in>() <= align_of::<libc::sockaddr_in6>()
);

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address().fmt(f)
    }
}

impl Name {
    /// `address` for a socket of the given family: IPv4 is mapped into IPv6; `None` for IPv6 on an IPv4 socket.
    pub(crate) fn new(address: SocketAddr, v6: bool) -> Option<Name> {
        let mut name = Name::unknown();
        let ip = match (address.ip(), v6) {
            (IpAddr::V4(ip), true) => IpAddr::V6(ip.to_ipv6_mapped()),
            (IpAddr::V6(_), false) => return None,
            (ip, _) => ip,
        };
        match ip {
            IpAddr::V4(ip) => {
                let sin = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: address.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(ip.octets()) },
                    sin_zero: [0; 8],
                };
                name.len = size_of_val(&sin) as libc::socklen_t;
                // SAFETY: the storage is large enough for either address and aligned for both, as asserted above.
                unsafe { name.as_mut_ptr().cast::<libc::sockaddr_in>().write(sin) };
            }
            IpAddr::V6(ip) => {
                let sin6 = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: address.port().to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr { s6_addr: ip.octets() },
                    sin6_scope_id: if let SocketAddr::V6(v6) = address { v6.scope_id() } else { 0 },
                };
                name.len = size_of_val(&sin6) as libc::socklen_t;
                // SAFETY: as above.
                unsafe { name.as_mut_ptr().cast::<libc::sockaddr_in6>().write(sin6) };
            }
        }
        Some(name)
    }

    /// Storage for any address; initially of no family (AF_UNSPEC).
    pub(crate) fn unknown() -> Name {
        // SAFETY: `sockaddr_in6` is plain data, for which all zeros is a valid value (family AF_UNSPEC).
        let storage = unsafe { std::mem::zeroed::<libc::sockaddr_in6>() };
        Name { storage, len: size_of::<libc::sockaddr_in6>() as libc::socklen_t }
    }

    /// The address written by the kernel; `None` for other families.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        match libc::c_int::from(self.storage.sin6_family) {
            libc::AF_INET => {
                // SAFETY: the family identifies the kind of address, and the storage is aligned for it.
                let sin = unsafe { (&raw const self.storage).cast::<libc::sockaddr_in>().read() };
                let ip = Ipv4Addr::from(sin.sin_addr.s_addr.to_ne_bytes());
                Some(SocketAddr::new(ip.into(), u16::from_be(sin.sin_port)))
            }
            libc::AF_INET6 => {
                let sin6 = &self.storage;
                let ip = Ipv6Addr::from(sin6.sin6_addr.s6_addr);
                let port = u16::from_be(sin6.sin6_port);
                Some(SocketAddrV6::new(ip, port, 0, sin6.sin6_scope_id).into())
            }
            _ => None,
        }
    }

    /// True when both hold the same kernel-written address.
    #[inline]
    pub(crate) fn same(&self, other: &Name) -> bool {
        // The same source yields identical bytes in all fields, so comparing the larger struct suffices.
        // SAFETY: `sockaddr_in6` has no padding, so that all of its bytes are initialised.
        let bytes = |name: &Name| unsafe {
            std::mem::transmute::<libc::sockaddr_in6, [u8; size_of::<libc::sockaddr_in6>()]>(name.storage)
        };
        bytes(self) == bytes(other)
    }

    pub(crate) fn as_ptr(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.storage).cast()
    }

    pub(crate) fn len(&self) -> libc::socklen_t {
        self.len
    }
}
