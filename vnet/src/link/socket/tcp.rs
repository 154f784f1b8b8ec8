//! Listening TCP sockets.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};

use super::udp::set;

/// Maximum number of connections that wait to be accepted (listen backlog). With as many unconfirmed SYNs the kernel answers
/// by SYN cookies (net.ipv4.tcp_syncookies): it keeps no state for addresses that may be forged.
const BACKLOG: i32 = 128;

/// A listening TCP socket that does not block.
pub(in crate::link) fn listening(address: SocketAddr) -> io::Result<TcpListener> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    // A restarted daemon need not wait for the connections of its former process.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    bind(&socket, &address)?;
    answer_briefly(&socket)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Limits a TCP listener to two SYN-ACKs per SYN. The default is five retransmissions to an unconfirmed SYN; this bounds
/// amplification towards spoofed addresses.
fn answer_briefly(listener: &impl AsFd) -> io::Result<()> {
    const REPETITIONS: libc::c_int = 1;
    set(listener, libc::IPPROTO_TCP, libc::TCP_SYNCNT, REPETITIONS)
}
