//! TCP sockets of a node: how they are made, their timeouts and losses, and the first bytes of a stream.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt as socket_options;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};

/// First bytes that the connecting side sends.
pub(super) const MAGIC: [u8; 16] = *b"vnet-rdma-bytes1";
/// Bytes of each half of the secret: the connecting side sends the first half, the accepting side answers with the second.
pub(super) const HALF: usize = 8;
pub(super) const PREFACE: usize = MAGIC.len() + HALF;
/// Maximum time without an acknowledgement from the peer's kernel.
const USER_TIMEOUT_MAX: Duration = Duration::from_secs(3);
/// A path is lossy if more than one in `LOSSY_ONE_IN` segments was retransmitted, and at least `LOSSY_MIN` segments.
const LOSSY_ONE_IN: u64 = 200;
const LOSSY_MIN: u32 = 20;

/// The connection is closed, or has to be.
pub(super) struct Closed;

/// Segments that a connection has sent since it was opened, and retransmissions among them.
#[derive(Clone, Copy, Default)]
pub(super) struct Segments {
    pub(super) sent: u32,
    pub(super) retransmitted: u32,
}

impl Segments {
    /// Reads the kernel's counters (`TCP_INFO`).
    pub(super) fn of(socket: &TcpStream) -> Option<Segments> {
        /// Offsets in `struct tcp_info` of linux/tcp.h: tcpi_total_retrans and tcpi_segs_out (since Linux 4.2).
        const RETRANSMITTED: usize = 100;
        const SENT: usize = 136;
        let mut info = [0u8; 140];
        let mut len = info.len() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes into `info`, which has this length.
        let result = unsafe {
            let to = info.as_mut_ptr().cast();
            libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, to, &mut len)
        };
        let number = |at: usize| Some(u32::from_ne_bytes(*info[..len as usize].get(at..)?.first_chunk()?));
        (result == 0).then_some(())?;
        Some(Segments { sent: number(SENT)?, retransmitted: number(RETRANSMITTED)? })
    }

    /// Whether too many segments were retransmitted since `before`.
    pub(super) fn is_lossy_since(self, before: Segments) -> bool {
        let (sent, retransmitted) =
            (self.sent.wrapping_sub(before.sent), self.retransmitted.wrapping_sub(before.retransmitted));
        retransmitted >= LOSSY_MIN && u64::from(retransmitted) * LOSSY_ONE_IN > u64::from(sent)
    }
}

/// TCP user timeout (RFC 5482), well below the time after which the engine declares a peer dead.
pub(super) fn user_timeout(dead_after_ns: u64) -> Duration {
    USER_TIMEOUT_MAX.min(Duration::from_nanos(dead_after_ns) / 3)
}

/// A socket of the address's family that never blocks.
pub(super) fn new_socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(socket_with(family, SocketType::STREAM, flags, None)?)
}

/// Starts to connect a socket. It is connected when it becomes writable.
pub(super) fn start_connect(socket: OwnedFd, address: SocketAddr) -> io::Result<TcpStream> {
    match connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket.into()),
        Err(error) => Err(error.into()),
    }
}

/// Sets the TCP user timeout and keepalive, so that the kernel also closes an idle connection whose path is dead.
pub(super) fn set_timeouts(socket: &TcpStream, user_timeout: Duration) -> io::Result<()> {
    const SECOND: Duration = Duration::from_secs(1);
    socket_options::set_tcp_user_timeout(socket, user_timeout.as_millis().max(1) as u32)?;
    socket_options::set_tcp_keepidle(socket, user_timeout.max(SECOND))?;
    socket_options::set_tcp_keepintvl(socket, SECOND)?;
    socket_options::set_tcp_keepcnt(socket, 2)?;
    Ok(socket_options::set_socket_keepalive(socket, true)?)
}

/// Whether the call would have blocked.
pub(super) fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
        // The connection is still being established.
        || error.raw_os_error() == Some(libc::ENOTCONN)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn tcp_info_counts_segments() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut other, _) = listener.accept().unwrap();
        let before = Segments::of(&one).unwrap();
        for _ in 0..100 {
            one.write_all(&[7]).unwrap();
            other.read_exact(&mut [0]).unwrap();
        }
        let after = Segments::of(&one).unwrap();
        assert!((100..300).contains(&(after.sent - before.sent)), "{} segments", after.sent - before.sent);
        assert_eq!(after.retransmitted, 0);
    }

    #[test]
    fn a_path_is_lossy_from_one_segment_in_two_hundred() {
        let at = |sent, retransmitted| Segments { sent, retransmitted };
        let before = at(u32::MAX - 10, u32::MAX);
        let after = |sent: u32, retransmitted: u32| {
            at(before.sent.wrapping_add(sent), before.retransmitted.wrapping_add(retransmitted))
        };
        for (sent, retransmitted, is_lossy) in [
            (0, 0, false),
            (100, 19, false),
            (100, 20, true),
            (1 << 20, 5_000, false),
            (1 << 20, 5_300, true),
        ] {
            assert_eq!(
                after(sent, retransmitted).is_lossy_since(before),
                is_lossy,
                "{retransmitted} of {sent}"
            );
        }
    }
}
