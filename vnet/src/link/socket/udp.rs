//! The bridge's UDP sockets: creation, buffer sizes, and the fragmentation policy.
//!
//! One socket carries all links of a dispatcher, unless the host has several ports ([`ports`](super::ports)). Behaviour of Linux
//! 6.18 with the options used here, measured on a veth pair of MTU 1500 (IPv4, IPv6 and IPv4 through an IPv6 socket behave alike
//! unless noted):
//!
//! - `UDP_SEGMENT` refuses a segment that does not fit the path MTU (`EMSGSIZE`), whatever `IP_MTU_DISCOVER` says; it takes at
//!   most 128 segments (64 before Linux 6.9, `EINVAL` beyond), and 65 507 bytes over IPv4, 65 527 over IPv6. Before Linux 6.14 a
//!   segment that does not fit also yields `EINVAL`. A device that computes no checksums yields `EIO`.
//! - With `IP_PMTUDISC_WANT` a segmented message over IPv4 leaves *without* DF, because the kernel compares the whole message
//!   with the path MTU; only `IP_PMTUDISC_DO` sets DF on its segments. Single datagrams within the MTU carry DF with both
//!   options. Above the MTU, `WANT` fragments and `DO` refuses (`EMSGSIZE`).
//! - A message whose packet, Ethernet header included, reaches the device's `gso_max_size` (65 536) is cut in software before it
//!   gets there: 65 507 bytes cross a veth pair as 46 packets, 65 400 as one.
//!
//! - `DO` obeys ICMP's "fragmentation needed", which anybody can forge who guesses addresses and ports. `PROBE` sets DF like `DO`
//!   and is bounded by the device's MTU only.
//!
//! So native datagrams are sent with `DO`, those of sealed links with `PROBE`, and bare frames with `WANT`; senders switch with
//! [`Socket::set_oversize`]. The kernel accepts both options on an IPv6 socket and applies the one that fits.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering::Relaxed};

use super::buffers::{ASSUMED_MBPS, buffer_bytes};
use super::name::{Name, Target, normalised};

/// Options for buffer sizes: privileged (beyond the host's limit), and unprivileged.
const RECEIVE_BUFFER: (libc::c_int, libc::c_int) = (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF);
const SEND_BUFFER: (libc::c_int, libc::c_int) = (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF);

/// `IP_LOCAL_PORT_RANGE` (ip(7)), missing in libc, and its encoding of ports 49152 to 65535.
const IP_LOCAL_PORT_RANGE: libc::c_int = 51;
const SOURCE_PORTS: libc::c_int = (65_535u32 << 16 | 49_152) as libc::c_int;

/// Index of the dropped datagrams in what `SO_MEMINFO` tells (`SK_MEMINFO_DROPS` of linux/sock_diag.h).
const MEMINFO_DROPS: usize = 8;

/// A bound, non-blocking UDP socket.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    local: SocketAddr,
    /// An [`Oversize`], or [`UNKNOWN`].
    oversize: AtomicU8,
    /// See [`Socket::zero_copies`].
    zero_copies: AtomicU32,
    /// Datagrams that the kernel has dropped, at the last call of [`Socket::newly_lost`].
    lost: AtomicU32,
}

/// What becomes of packets larger than the path MTU (`IP_MTU_DISCOVER`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) enum Oversize {
    /// IP fragments them.
    Fragment,
    /// The kernel refuses them; it learns the path MTU from ICMP as well.
    Refuse,
    /// The path drops them; the kernel refuses only what its device does not take.
    Probe,
}

/// Not set yet: the host's default applies.
const UNKNOWN: u8 = u8::MAX;

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Socket {
    /// A socket that only sends. Port 0 picks one from the range of VXLAN source ports (RFC 7348 section 5).
    pub(in crate::link) fn sending(from: SocketAddr) -> io::Result<Socket> {
        let fd = udp_socket(from.is_ipv6())?;
        // Before Linux 6.3 the host's own range applies (net.ipv4.ip_local_port_range).
        let _ = set(&fd, libc::SOL_IP, IP_LOCAL_PORT_RANGE, SOURCE_PORTS);
        // This socket is never read: let the kernel drop datagrams from unknown hosts early.
        set(&fd, libc::SOL_SOCKET, libc::SO_RCVBUF, 0)?;
        let socket = Socket::bound(fd, from)?;
        socket.set_buffer(SEND_BUFFER, buffer_bytes(ASSUMED_MBPS))?;
        Ok(socket)
    }

    pub(crate) fn bind(listen: SocketAddr, shared: bool) -> io::Result<Socket> {
        let fd = udp_socket(listen.is_ipv6())?;
        if shared {
            set(&fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
        }
        set(&fd, libc::SOL_UDP, libc::UDP_GRO, 1)?;
        let socket = Socket::bound(fd, listen)?;
        socket.set_buffers(buffer_bytes(ASSUMED_MBPS))?;
        Ok(socket)
    }

    /// A socket that a running vnetd has bound.
    pub(crate) fn inherit(fd: OwnedFd) -> io::Result<Socket> {
        let local = local_name(&fd)?.address().ok_or(io::ErrorKind::InvalidData)?;
        let socket = Socket::of(fd, local);
        // That vnetd has counted these.
        socket.newly_lost();
        Ok(socket)
    }

    fn of(fd: OwnedFd, local: SocketAddr) -> Socket {
        let (zero_copies, lost) = (AtomicU32::new(0), AtomicU32::new(0));
        Socket { fd, local, oversize: AtomicU8::new(UNKNOWN), zero_copies, lost }
    }

    /// Datagrams that the kernel has dropped since the last call, because the receive buffer was full or a checksum was wrong.
    pub(in crate::link) fn newly_lost(&self) -> u64 {
        let mut memory = [0_u32; MEMINFO_DROPS + 1];
        let mut len = size_of_val(&memory) as libc::socklen_t;
        let (fd, room) = (self.fd.as_raw_fd(), memory.as_mut_ptr().cast());
        // SAFETY: `memory` is writable for `len` bytes, of which the kernel writes no more.
        let status = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_MEMINFO, room, &mut len) };
        if status != 0 {
            return 0;
        }
        let now = memory[MEMINFO_DROPS];
        u64::from(now.wrapping_sub(self.lost.swap(now, Relaxed)))
    }

    /// Number of the next message with `MSG_ZEROCOPY`, as the kernel counts them; a vnetd that takes the socket over goes on with it.
    pub(crate) fn zero_copies(&self) -> u32 {
        self.zero_copies.load(Relaxed)
    }

    pub(crate) fn set_zero_copies(&self, next: u32) {
        self.zero_copies.store(next, Relaxed);
    }

    fn bound(fd: OwnedFd, listen: SocketAddr) -> io::Result<Socket> {
        if listen.is_ipv6() {
            set(&fd, libc::SOL_IPV6, libc::IPV6_V6ONLY, 0)?;
        }
        let name = Name::new(listen, listen.is_ipv6()).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: `name` holds a socket address of the stated length.
        check(unsafe { libc::bind(fd.as_raw_fd(), name.as_ptr(), name.len()) })?;
        let local = local_name(&fd)?;
        let local = local.address().ok_or(io::ErrorKind::InvalidData)?;
        Ok(Socket::of(fd, local))
    }

    /// Sets both buffers to `bytes` bytes.
    pub(in crate::link) fn set_buffers(&self, bytes: usize) -> io::Result<()> {
        self.set_buffer(RECEIVE_BUFFER, bytes)?;
        self.set_buffer(SEND_BUFFER, bytes)
    }

    fn set_buffer(&self, (forced, polite): (libc::c_int, libc::c_int), bytes: usize) -> io::Result<()> {
        let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
        // Unprivileged: capped by net.core.rmem_max and wmem_max.
        set(&self.fd, libc::SOL_SOCKET, forced, bytes)
            .or_else(|_| set(&self.fd, libc::SOL_SOCKET, polite, bytes))
    }

    pub(crate) fn local(&self) -> SocketAddr {
        self.local
    }

    /// Sends one datagram.
    pub(in crate::link) fn send(&self, datagram: &[u8], to: &Name) -> io::Result<()> {
        let (fd, flags) = (self.fd.as_raw_fd(), libc::MSG_DONTWAIT);
        // SAFETY: `datagram` and `to` are readable for the stated lengths.
        let sent = unsafe {
            libc::sendto(fd, datagram.as_ptr().cast(), datagram.len(), flags, to.as_ptr(), to.len())
        };
        check(sent).map(drop)
    }

    /// Sets the policy for packets larger than the path MTU. Makes no system call when it is unchanged.
    #[inline]
    pub(in crate::link) fn set_oversize(&self, policy: Oversize) {
        if self.oversize.load(Relaxed) != policy as u8 {
            self.oversize.store(policy as u8, Relaxed);
            // On failure the socket still sends; only the treatment of large packets differs.
            let _ = oversize(&self.fd, self.local.is_ipv6(), policy);
        }
    }

    /// Makes this socket receive every datagram for the port that it shares. It must have been bound first.
    pub(in crate::link) fn receive_alone(&self) -> io::Result<()> {
        // Classic BPF: return 0, the socket's index in bind order (socket(7)).
        let mut code = libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 };
        let program = libc::sock_fprog { len: 1, filter: &raw mut code };
        set(&self.fd, libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF, program)
    }

    /// The form of `target` for this socket. `None` when the socket cannot reach it: IPv6 from an IPv4 address, and IPv4 from any
    /// IPv6 address except the unspecified one.
    #[inline]
    pub(in crate::link) fn form_of<'a>(&self, target: &'a Target) -> Option<&'a Name> {
        target.forms[usize::from(self.local.is_ipv6())].as_ref().filter(|_| self.reaches(target.is_v4))
    }

    /// `address` in this socket's form.
    pub(in crate::link) fn name_of(&self, address: SocketAddr) -> Option<Name> {
        let name = Name::new(address, self.local.is_ipv6())?;
        self.reaches(address.is_ipv4()).then_some(name)
    }

    /// True when the socket can reach addresses of that family.
    #[inline]
    pub(in crate::link) fn reaches(&self, v4: bool) -> bool {
        let local = normalised(self.local).ip();
        v4 == local.is_ipv4() || local == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
    }
}

pub(in crate::link) fn udp_socket(v6: bool) -> io::Result<OwnedFd> {
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the call passes no pointers.
    let fd = check(unsafe { libc::socket(family, kind, 0) })?;
    // SAFETY: the kernel just created this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The address that a socket is bound to.
pub(in crate::link) fn local_name(fd: &OwnedFd) -> io::Result<Name> {
    let mut name = Name::unknown();
    let mut len = name.len();
    // SAFETY: `name` is large enough for any socket address, and `len` states its size.
    check(unsafe { libc::getsockname(fd.as_raw_fd(), name.as_mut_ptr(), &mut len) })?;
    Ok(name)
}

/// Sets an option to an integer or another plain value.
pub(in crate::link) fn set<T>(
    fd: &impl AsFd,
    level: libc::c_int,
    option: libc::c_int,
    value: T,
) -> io::Result<()> {
    let len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: `value` is readable for the stated `len` bytes.
    check(unsafe {
        libc::setsockopt(fd.as_fd().as_raw_fd(), level, option, (&raw const value).cast(), len)
    })?;
    Ok(())
}

/// See [`Socket::set_oversize`].
pub(in crate::link) fn oversize(fd: &impl AsFd, is_v6: bool, policy: Oversize) -> io::Result<()> {
    let (v4, v6) = match policy {
        Oversize::Fragment => (libc::IP_PMTUDISC_WANT, libc::IPV6_PMTUDISC_WANT),
        Oversize::Refuse => (libc::IP_PMTUDISC_DO, libc::IPV6_PMTUDISC_DO),
        Oversize::Probe => (libc::IP_PMTUDISC_PROBE, libc::IPV6_PMTUDISC_PROBE),
    };
    if is_v6 {
        set(fd, libc::SOL_IPV6, libc::IPV6_MTU_DISCOVER, v6)?;
    }
    set(fd, libc::SOL_IP, libc::IP_MTU_DISCOVER, v4)
}

/// Returns whether the kernel segments messages into datagrams (`UDP_SEGMENT`), and whether it coalesces received ones
/// (`UDP_GRO`).
pub fn kernel_offloads() -> (bool, bool) {
    let has = |option| {
        let socket = udp_socket(false).or_else(|_| udp_socket(true));
        // Any size works, because nothing is sent.
        socket.and_then(|fd| set(&fd, libc::SOL_UDP, option, 1)).is_ok()
    };
    (has(libc::UDP_SEGMENT), has(libc::UDP_GRO))
}

/// Converts a system call's -1 into the error.
pub(crate) fn check<T: Default + PartialOrd>(result: T) -> io::Result<T> {
    if result < T::default() { Err(io::Error::last_os_error()) } else { Ok(result) }
}
