//! Filters on a UDP socket that let the datagrams of one source through (classic BPF, socket(7), `SO_ATTACH_FILTER`).
//!
//! A connected socket would also drop all other sources, but `connect` fixes the local address: after this host's own address
//! changes, the socket receives nothing, and disconnecting it releases a port that the kernel chose. A filter depends on neither
//! address nor route of this host, and one call replaces it by the next: no datagram comes through in between.
//!
//! The kernel runs the filter with the UDP header at offset 0 and the IP header at [`NETWORK`]. Measured on Linux 6.18: that holds
//! for IPv4, IPv6 and IPv4 at an IPv6 socket, also for messages that `UDP_GRO` has coalesced.

use std::io;
use std::net::{IpAddr, SocketAddr};

use super::name::normalised;
use super::udp::{Socket, set};

/// Base of offsets into the network header (`SKF_NET_OFF`).
const NETWORK: u32 = -0x10_0000_i32 as u32;
/// Offset of the source address in an IPv4 header.
const V4_SOURCE: u32 = 12;
/// Offset of the source address in an IPv6 header.
const V6_SOURCE: u32 = 8;
/// Offset of the source port in the UDP header.
const SOURCE_PORT: u32 = 0;

/// Load a word, load a half-word, load a byte, all from the packet; shift right; compare; return a constant.
const WORD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
const HALF: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
const BYTE: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
const SHIFT: u32 = libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K;
const EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

impl Socket {
    /// Lets only datagrams from `source` through from now on; none for `None`.
    ///
    /// # Errors
    /// The kernel refuses the filter; the one before remains.
    pub(crate) fn accept_only(&self, source: Option<SocketAddr>) -> io::Result<()> {
        let mut code = source.map_or_else(|| vec![op(RETURN, 0)], program);
        let program = libc::sock_fprog { len: code.len() as u16, filter: code.as_mut_ptr() };
        // `code` lives until the call returns; the kernel copies it.
        set(self, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, program)
    }
}

/// Passes packets whose source address and port are those of `source`.
fn program(source: SocketAddr) -> Vec<libc::sock_filter> {
    let source = normalised(source);
    let (version, at, address) = match source.ip() {
        IpAddr::V4(ip) => (4, V4_SOURCE, ip.octets().to_vec()),
        IpAddr::V6(ip) => (6, V6_SOURCE, ip.octets().to_vec()),
    };
    let mut wanted = vec![(SOURCE_PORT, HALF, u32::from(source.port()))];
    let (words, _) = address.as_chunks::<4>();
    wanted.extend((0..).zip(words).map(|(n, word)| (NETWORK + at + 4 * n, WORD, u32::from_be_bytes(*word))));

    let mut code = vec![op(BYTE, NETWORK), op(SHIFT, 4), op(EQUAL, version)];
    for (at, load, value) in wanted {
        code.extend([op(load, at), op(EQUAL, value)]);
    }
    code.extend([op(RETURN, u32::MAX), op(RETURN, 0)]);
    // A comparison that fails jumps to the last instruction.
    let end = code.len() - 1;
    for (at, op) in code.iter_mut().enumerate().filter(|(_, op)| u32::from(op.code) == EQUAL) {
        op.jf = (end - at - 1) as u8;
    }
    code
}

fn op(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    use super::*;

    /// Texts of the datagrams that wait at the socket.
    fn waiting(socket: &Socket) -> Vec<String> {
        let mut buffer = [0; 100];
        let mut next = || {
            let flags = rustix::net::RecvFlags::DONTWAIT;
            let (len, _) = rustix::net::recv(socket.as_fd(), &mut buffer[..], flags).ok()?;
            Some(String::from_utf8_lossy(&buffer[..len]).into_owned())
        };
        std::iter::from_fn(&mut next).collect()
    }

    /// Sources with another address, another port, and of the other family are dropped, whatever address of this host they send to.
    #[test]
    fn one_source_passes_to_all_addresses() {
        for (listen, right, others) in [
            ("0.0.0.0:0", "127.0.0.1", ["127.0.0.3", "127.0.0.4"]),
            ("[::]:0", "127.0.0.1", ["127.0.0.3", "::1"]),
            ("[::]:0", "::1", ["127.0.0.1", "127.0.0.3"]),
        ] {
            let socket = Socket::bind(listen.parse().unwrap(), false).unwrap();
            let port = socket.local().port();
            let bound = |address: &str| UdpSocket::bind((address, 0)).unwrap();
            let (peer, same_address) = (bound(right), bound(right));
            let peer_at = peer.local_addr().unwrap();
            let strangers = others.map(bound);
            let send = |from: &UdpSocket, text: &str| {
                let to = if from.local_addr().unwrap().is_ipv4() {
                    &["127.0.0.1", "127.0.0.2"][..]
                } else {
                    &["::1"]
                };
                to.iter().for_each(|to| assert!(from.send_to(text.as_bytes(), (*to, port)).is_ok()));
                to.len()
            };
            socket.accept_only(None).unwrap();
            send(&peer, "early");
            assert_eq!(waiting(&socket), Vec::<String>::new());
            socket.accept_only(Some(peer_at)).unwrap();
            strangers.iter().chain([&same_address]).for_each(|from| _ = send(from, "stranger"));
            assert_eq!(waiting(&socket), Vec::<String>::new(), "{listen}, only from {peer_at}");
            let sent = send(&peer, "right");
            assert_eq!(waiting(&socket), vec!["right"; sent], "{listen}, from {peer_at}");
            socket.accept_only(Some(same_address.local_addr().unwrap())).unwrap();
            send(&peer, "late");
            let sent = send(&same_address, "next");
            assert_eq!(waiting(&socket), vec!["next"; sent]);
        }
    }
}
