//! Options of UDP sockets.

use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;

/// Size of both socket buffers in bytes; without CAP_NET_ADMIN the kernel limits it to `net.core.rmem_max` and `wmem_max`.
const SOCKET_BUFFER: libc::c_int = 8 << 20;
/// ECN code point of RFC 3168: ECN-capable transport.
const ECN_CAPABLE: libc::c_int = 2;

/// Prepares a socket: large buffers, coalesced datagrams, marks of congestion.
pub(super) fn prepare(socket: &UdpSocket) -> io::Result<()> {
    let fd = socket.as_raw_fd();
    for (force, plain) in [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)] {
        set(fd, libc::SOL_SOCKET, force, SOCKET_BUFFER)
            .or_else(|_| set(fd, libc::SOL_SOCKET, plain, SOCKET_BUFFER))?;
    }
    // Older kernels without these options send and receive packets one by one.
    let _ = set(fd, libc::SOL_UDP, libc::UDP_GRO, 1);
    if socket.local_addr()?.is_ipv4() {
        let _ = set(fd, libc::IPPROTO_IP, libc::IP_RECVTOS, 1);
        let _ = set(fd, libc::IPPROTO_IP, libc::IP_TOS, ECN_CAPABLE);
    } else {
        let _ = set(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1);
        let _ = set(fd, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, ECN_CAPABLE);
    }
    Ok(())
}

/// Sets an option whose value is a number.
pub(super) fn set(fd: RawFd, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of `value`, which has this length.
    let result = unsafe { libc::setsockopt(fd, level, option, ptr::from_ref(&value).cast(), len) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
