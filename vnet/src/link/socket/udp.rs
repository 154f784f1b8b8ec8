//! The bridge's UDP socket: made, sized, and asked about routes.
//!
//! One socket carries all links of a dispatcher, unless the host has several ports (ports.rs). What Linux 6.18 really does
//! with the options used here, found by trying them on a veth pair of MTU 1500 (IPv4, IPv6 and IPv4 through an IPv6 socket behave alike unless noted):
//!
//! - `UDP_SEGMENT` refuses a segment that does not fit the path MTU (`EMSGSIZE`), whatever `IP_MTU_DISCOVER` says; it takes at
//!   most 128 segments (64 before Linux 6.9, `EINVAL` beyond), and 65 507 bytes over IPv4, 65 527 over IPv6. Before Linux 6.14
//!   a segment that does not fit is `EINVAL` too. A device that computes no checksums gives `EIO`.
//! - With `IP_PMTUDISC_WANT` a segmented message over IPv4 leaves *without* DF, because the kernel compares the whole
//!   message with the path MTU; only `IP_PMTUDISC_DO` sets DF on its segments. Single datagrams within the MTU carry DF both
//!   ways. Above the MTU, `WANT` fragments and `DO` refuses (`EMSGSIZE`).
//! - A message whose packet, Ethernet header included, reaches the device's `gso_max_size` (65 536) is cut in software
//!   before it gets there: 65 507 bytes cross a veth pair as 46 packets, 65 400 as one.
//!
//! So native datagrams are sent under `DO` and bare frames under `WANT`; the [`Sender`] switches when the encapsulation
//! changes from one call to the next. The kernel accepts both options on an IPv6 socket and applies the one that fits.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use crate::link::socket::buffers;
use crate::link::socket::control_datagrams::Courier;
use crate::link::vxlan::SourcePorts;
use crate::link::{Link, PORTS_MAX, ReassemblyBudget, Receiver, Sender, normalised};
use crate::stats::PortStats;

/// Options that size a buffer, for those who may exceed the host's limit and for others.
const RECEIVE_BUFFER: (libc::c_int, libc::c_int) = (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF);
const SEND_BUFFER: (libc::c_int, libc::c_int) = (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF);

/// `IP_LOCAL_PORT_RANGE` (ip(7)), not in libc yet, and ports 49152 to 65535 as it takes them.
const IP_LOCAL_PORT_RANGE: libc::c_int = 51;
const SOURCE_PORTS: libc::c_int = (65_535u32 << 16 | 49_152) as libc::c_int;

/// Why the bridge has no socket.
#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    /// Somebody else has the port.
    #[error(
        "cannot listen on {0}: address already in use; is another vnetd running? choose another [bridge] listen"
    )]
    InUse(SocketAddr),
    /// The address is nobody's here.
    #[error("cannot listen on {0}: not an address of this host; choose another [bridge] listen")]
    NotHere(SocketAddr),
    /// A port below 1024 without the privilege.
    #[error("cannot listen on {0}: permission denied; run vnetd as root or choose a port above 1023")]
    Denied(SocketAddr),
    /// Anything else.
    #[error("cannot listen on {0}: {1}")]
    Other(SocketAddr, #[source] io::Error),
}

impl BridgeError {
    pub(in crate::link) fn new(listen: SocketAddr, error: io::Error) -> BridgeError {
        match error.raw_os_error() {
            Some(libc::EADDRINUSE) => BridgeError::InUse(listen),
            Some(libc::EADDRNOTAVAIL) => BridgeError::NotHere(listen),
            Some(libc::EACCES | libc::EPERM) => BridgeError::Denied(listen),
            _ => BridgeError::Other(listen, error),
        }
    }
}

/// One dispatcher's end of all links: its UDP sockets in two halves.
pub struct Bridge {
    /// Takes datagrams in.
    pub rx: Receiver,
    /// Sends frames out.
    pub tx: Sender,
    /// Takes VXLAN datagrams in, which have a port of their own; where [`Bridge::add_vxlan`] was called.
    pub vxlan_rx: Option<Receiver>,
}

impl Bridge {
    /// Has the bridges of one host listen for VXLAN on `listen`, too, beside each other as [`Bridge::bind_group`] does it.
    pub fn add_vxlan(
        bridges: &mut [Bridge],
        listen: SocketAddr,
        stats: &Arc<PortStats>,
        budget: &Arc<ReassemblyBudget>,
    ) -> Result<(), BridgeError> {
        let failed = |error| BridgeError::new(listen, error);
        drop(Socket::bind(listen, false).map_err(failed)?);
        let shared = bridges.len() > 1;
        for (index, bridge) in bridges.iter_mut().enumerate() {
            let socket = Arc::new(Socket::bind(listen, shared).map_err(failed)?);
            // Else a datagram for a group comes to every socket there is, members or not.
            set(&socket, libc::SOL_IP, libc::IP_MULTICAST_ALL, 0).map_err(failed)?;
            let rx = Receiver::new(vec![socket], stats.clone(), budget.clone());
            bridge.vxlan_rx = Some(rx.for_vxlan(index == 0));
            bridge.tx.vxlan = Some(SourcePorts::new(listen).map_err(failed)?);
        }
        Ok(())
    }

    /// Sends what is no frame on this bridge's first socket.
    pub fn courier(&self) -> Courier {
        Courier::new(self.tx.socket().clone())
    }
}

/// A bound, non-blocking UDP socket.
#[derive(Debug)]
pub(in crate::link) struct Socket {
    fd: OwnedFd,
    local: SocketAddr,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Socket {
    /// A socket that sends only. Port 0 stands for one of the range that RFC 7348 section 5 names for VXLAN's source ports.
    pub(in crate::link) fn sending(from: SocketAddr) -> io::Result<Socket> {
        let fd = udp_socket(from.is_ipv6())?;
        // Before Linux 6.3 it is a port of the host's own range (net.ipv4.ip_local_port_range).
        let _ = set(&fd, libc::SOL_IP, IP_LOCAL_PORT_RANGE, SOURCE_PORTS);
        // What strangers send there is not read: the kernel is to drop it soon.
        set(&fd, libc::SOL_SOCKET, libc::SO_RCVBUF, 0)?;
        let socket = Socket::bound(fd, from)?;
        socket.set_buffer(SEND_BUFFER, buffers::buffer_bytes(buffers::ASSUMED_MBPS))?;
        Ok(socket)
    }

    pub(in crate::link) fn bind(listen: SocketAddr, shared: bool) -> io::Result<Socket> {
        let fd = udp_socket(listen.is_ipv6())?;
        if shared {
            set(&fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
        }
        set(&fd, libc::SOL_UDP, libc::UDP_GRO, 1)?;
        let socket = Socket::bound(fd, listen)?;
        socket.set_buffers(buffers::buffer_bytes(buffers::ASSUMED_MBPS))?;
        Ok(socket)
    }

    fn bound(fd: OwnedFd, listen: SocketAddr) -> io::Result<Socket> {
        if listen.is_ipv6() {
            set(&fd, libc::SOL_IPV6, libc::IPV6_V6ONLY, 0)?;
        }
        let name = Name::new(listen, listen.is_ipv6()).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: `name` holds a socket address of the length it tells.
        check(unsafe { libc::bind(fd.as_raw_fd(), name.as_ptr(), name.len()) })?;
        let mut local = Name::unknown();
        // SAFETY: `local` has room for any socket address and tells how much.
        check(unsafe { libc::getsockname(fd.as_raw_fd(), local.as_mut_ptr(), &mut local.len) })?;
        let local = local.address().ok_or(io::ErrorKind::InvalidData)?;
        Ok(Socket { fd, local })
    }

    /// Has the kernel hold up to `bytes` bytes in each direction.
    pub(in crate::link) fn set_buffers(&self, bytes: usize) -> io::Result<()> {
        self.set_buffer(RECEIVE_BUFFER, bytes)?;
        self.set_buffer(SEND_BUFFER, bytes)
    }

    fn set_buffer(&self, (forced, polite): (libc::c_int, libc::c_int), bytes: usize) -> io::Result<()> {
        let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
        // Without the privilege the kernel gives what net.core.rmem_max and wmem_max allow.
        set(&self.fd, libc::SOL_SOCKET, forced, bytes)
            .or_else(|_| set(&self.fd, libc::SOL_SOCKET, polite, bytes))
    }

    pub(in crate::link) fn local(&self) -> SocketAddr {
        self.local
    }

    /// Sends one datagram.
    pub(in crate::link) fn send(&self, datagram: &[u8], to: &Name) -> io::Result<()> {
        let (fd, flags) = (self.fd.as_raw_fd(), libc::MSG_DONTWAIT);
        // SAFETY: `datagram` and `to` are readable for the lengths told.
        let sent = unsafe {
            libc::sendto(fd, datagram.as_ptr().cast(), datagram.len(), flags, to.as_ptr(), to.len())
        };
        check(sent).map(drop)
    }

    /// Lets packets that are larger than the path MTU be fragmented by IP (`false`) or refused, with DF on all (`true`).
    pub(in crate::link) fn set_dont_fragment(&self, on: bool) -> io::Result<()> {
        dont_fragment(&self.fd, self.local.is_ipv6(), on)
    }

    /// Has this socket get every datagram that comes to the port it shares; it has to be the first of those that do.
    pub(in crate::link) fn receive_alone(&self) -> io::Result<()> {
        // Classic BPF: return 0, the index of the socket in the order of their binds (socket(7)).
        let mut code = libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 };
        let program = libc::sock_fprog { len: 1, filter: &raw mut code };
        set(&self.fd, libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF, program)
    }

    /// The address of the link's remote, at the `port`th of its ports, or from [`PORTS_MAX`] on at those of its guests, in the form that this socket sends to. `None` when it
    /// cannot: IPv6 from an IPv4 address, and IPv4 from any IPv6 address but the unspecified one.
    #[inline]
    pub(in crate::link) fn name(&self, link: &Link, port: usize) -> Option<Name> {
        let v6 = self.local.is_ipv6();
        let (name, is_v4) = match port.checked_sub(PORTS_MAX.into()) {
            None => link.place.name(port, v6)?,
            Some(guest) => link.place.direct(guest, v6)?,
        };
        self.reaches(is_v4).then_some(name)
    }

    /// Any address in the form that this socket sends to.
    pub(in crate::link) fn name_of(&self, address: SocketAddr) -> Option<Name> {
        let name = Name::new(address, self.local.is_ipv6())?;
        self.reaches(address.is_ipv4()).then_some(name)
    }

    /// True when the socket can send to addresses of that kind.
    #[inline]
    pub(in crate::link) fn reaches(&self, v4: bool) -> bool {
        let local = normalised(self.local).ip();
        v4 == local.is_ipv4() || local == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
    }
}

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
        let mut name = Name::unknown();
        // SAFETY: `name` has room for any socket address and tells how much.
        check(unsafe { libc::getsockname(fd.as_raw_fd(), name.as_mut_ptr(), &mut name.len) }).ok()?;
        Some(name.address()?.ip())
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

/// An IPv4 or IPv6 address in the kernel's form, in the room of the larger one.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::link) struct Name {
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
    /// `address` for a socket of the family told: IPv4 is mapped into IPv6; `None` for IPv6 on an IPv4 socket.
    pub(in crate::link) fn new(address: SocketAddr, v6: bool) -> Option<Name> {
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
                // SAFETY: the storage has room for either address and is aligned for both, as asserted above.
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

    /// Room for any address; as it is, an address of no family.
    pub(in crate::link) fn unknown() -> Name {
        // SAFETY: `sockaddr_in6` is plain data, for which all zeros is a value (family AF_UNSPEC).
        let storage = unsafe { std::mem::zeroed::<libc::sockaddr_in6>() };
        Name { storage, len: size_of::<libc::sockaddr_in6>() as libc::socklen_t }
    }

    /// The address, as written by the kernel; `None` for other families.
    pub(in crate::link) fn address(&self) -> Option<SocketAddr> {
        match libc::c_int::from(self.storage.sin6_family) {
            libc::AF_INET => {
                // SAFETY: the family says which address is inside, and the storage is aligned for it.
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

    /// True when the kernel wrote the same address into both.
    #[inline]
    pub(in crate::link) fn same(&self, other: &Name) -> bool {
        // Two addresses of the same source differ in no field, so comparing all of the larger kind does.
        // SAFETY: `sockaddr_in6` has no padding, so that all of its bytes are initialised.
        let bytes = |name: &Name| unsafe {
            std::mem::transmute::<libc::sockaddr_in6, [u8; size_of::<libc::sockaddr_in6>()]>(name.storage)
        };
        bytes(self) == bytes(other)
    }

    pub(in crate::link) fn as_ptr(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    pub(in crate::link) fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.storage).cast()
    }

    pub(in crate::link) fn len(&self) -> libc::socklen_t {
        self.len
    }
}

fn udp_socket(v6: bool) -> io::Result<OwnedFd> {
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no memory is passed.
    let fd = check(unsafe { libc::socket(family, kind, 0) })?;
    // SAFETY: the kernel just made this descriptor for us, nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sets an option whose value is an integer, or the plain data that the option takes.
pub(in crate::link) fn set<T>(
    fd: &impl AsFd,
    level: libc::c_int,
    option: libc::c_int,
    value: T,
) -> io::Result<()> {
    let len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: `value` is readable for the `len` bytes told.
    check(unsafe {
        libc::setsockopt(fd.as_fd().as_raw_fd(), level, option, (&raw const value).cast(), len)
    })?;
    Ok(())
}

/// See [`Socket::set_dont_fragment`].
pub(in crate::link) fn dont_fragment(fd: &impl AsFd, is_v6: bool, on: bool) -> io::Result<()> {
    if is_v6 {
        let mode = if on { libc::IPV6_PMTUDISC_DO } else { libc::IPV6_PMTUDISC_WANT };
        set(fd, libc::SOL_IPV6, libc::IPV6_MTU_DISCOVER, mode)?;
    }
    let mode = if on { libc::IP_PMTUDISC_DO } else { libc::IP_PMTUDISC_WANT };
    set(fd, libc::SOL_IP, libc::IP_MTU_DISCOVER, mode)
}

/// Has a TCP listener answer a SYN at most twice. The kernel repeats its answer to one that is never confirmed five times
/// unless it is told otherwise; whoever writes an address that is not his own should not have it reached with more than he spends.
pub(in crate::link) fn answer_briefly(listener: &impl AsFd) -> io::Result<()> {
    const REPETITIONS: libc::c_int = 1;
    set(listener, libc::IPPROTO_TCP, libc::TCP_SYNCNT, REPETITIONS)
}

/// Whether the kernel cuts messages into datagrams (`UDP_SEGMENT`), and keeps those that arrive together (`UDP_GRO`).
pub fn kernel_offloads() -> (bool, bool) {
    let has = |option| {
        let socket = udp_socket(false).or_else(|_| udp_socket(true));
        // Any size does: nothing is sent.
        socket.and_then(|fd| set(&fd, libc::SOL_UDP, option, 1)).is_ok()
    };
    (has(libc::UDP_SEGMENT), has(libc::UDP_GRO))
}

/// The result of a system call that reports an error as -1.
pub(in crate::link) fn check<T: Default + PartialOrd>(result: T) -> io::Result<T> {
    if result < T::default() { Err(io::Error::last_os_error()) } else { Ok(result) }
}
