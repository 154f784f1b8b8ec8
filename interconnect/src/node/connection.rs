//! What connections of streams begin with and how they end (`streams.rs`).

use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

use rustix::net::sockopt as socket_options;

/// First bytes of a connection.
pub(super) const MAGIC: [u8; 16] = *b"vnet-rdma-bytes1";
/// Bytes of each half of the secret: the one that connects shows the first, and the other one answers with the second.
pub(super) const HALF: usize = 8;
pub(super) const PREFACE: usize = MAGIC.len() + HALF;
/// How long a path may be silent at most.
const SILENT: Duration = Duration::from_secs(3);
/// A path is lossy if one of so many segments was sent again, and at least so many of those that are judged together.
const LOSSES_OF: u64 = 200;
const LOSSES_MIN: u32 = 20;

/// The connection is of no use any more.
pub(super) struct Ended;

/// Segments that a connection has sent since it began, and those of them that were sent again.
#[derive(Clone, Copy, Default)]
pub(super) struct Segments {
    pub(super) all: u32,
    pub(super) again: u32,
}

impl Segments {
    /// What the kernel says about a connection (`TCP_INFO`).
    pub(super) fn of(socket: &TcpStream) -> Option<Segments> {
        /// Offsets in `struct tcp_info` of linux/tcp.h: tcpi_total_retrans and tcpi_segs_out (since Linux 4.2).
        const AGAIN: usize = 100;
        const ALL: usize = 136;
        let mut info = [0u8; 140];
        let mut len = info.len() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes into `info`, which has this length.
        let result = unsafe {
            let to = info.as_mut_ptr().cast();
            libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, to, &mut len)
        };
        let number = |at: usize| Some(u32::from_ne_bytes(*info[..len as usize].get(at..)?.first_chunk()?));
        (result == 0).then_some(())?;
        Some(Segments { all: number(ALL)?, again: number(AGAIN)? })
    }

    /// TCP slows down for each lost segment; the engine's own protocol repeats packets without slowing down.
    pub(super) fn shows_losses_since(self, before: Segments) -> bool {
        let (all, again) = (self.all.wrapping_sub(before.all), self.again.wrapping_sub(before.again));
        again >= LOSSES_MIN && u64::from(again) * LOSSES_OF > u64::from(all)
    }
}

/// How long a path may be silent, where the engine takes a peer for dead after `dead_after_ns`: the stream ends well before.
pub(super) fn silence(dead_after_ns: u64) -> Duration {
    SILENT.min(Duration::from_nanos(dead_after_ns) / 3)
}

/// Has the kernel end a connection whose peer does not answer for so long, also while nothing is sent.
pub(super) fn end_when_silent(socket: &TcpStream, silence: Duration) -> io::Result<()> {
    const SECOND: Duration = Duration::from_secs(1);
    socket_options::set_tcp_user_timeout(socket, silence.as_millis().max(1) as u32)?;
    socket_options::set_tcp_keepidle(socket, silence.max(SECOND))?;
    socket_options::set_tcp_keepintvl(socket, SECOND)?;
    socket_options::set_tcp_keepcnt(socket, 2)?;
    Ok(socket_options::set_socket_keepalive(socket, true)?)
}

/// Whether the call would have to wait.
pub(super) fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
        // Of a connection that is being made.
        || error.raw_os_error() == Some(libc::ENOTCONN)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn the_kernel_tells_how_many_segments_were_sent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut other, _) = listener.accept().unwrap();
        let before = Segments::of(&one).unwrap();
        for _ in 0..100 {
            one.write_all(&[7]).unwrap();
            other.read_exact(&mut [0]).unwrap();
        }
        let after = Segments::of(&one).unwrap();
        assert!((100..300).contains(&(after.all - before.all)), "{} segments", after.all - before.all);
        assert_eq!(after.again, 0);
    }

    #[test]
    fn a_path_is_lossy_from_one_segment_in_two_hundred() {
        let at = |all, again| Segments { all, again };
        let before = at(u32::MAX - 10, u32::MAX);
        let after = |all: u32, again: u32| at(before.all.wrapping_add(all), before.again.wrapping_add(again));
        for (all, again, is_lossy) in [
            (0, 0, false),
            (100, 19, false),
            (100, 20, true),
            (1 << 20, 5_000, false),
            (1 << 20, 5_300, true),
        ] {
            assert_eq!(after(all, again).shows_losses_since(before), is_lossy, "{again} of {all}");
        }
    }
}
