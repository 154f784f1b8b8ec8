//! The UDP socket: sends trains of packets with `UDP_SEGMENT` and receives coalesced packets with `UDP_GRO`.

use std::io;
use std::mem::{size_of, zeroed};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr;

use super::busy_peer::{BusyPeer, Change, Place};
use super::udp::prepare;
use crate::proto::{Departure, Span};
use crate::seal::{OVERHEAD, Session, sealed_in_parts};

/// Maximum number of packets per system call: `UDP_MAX_SEGMENTS` of older kernels.
const TRAIN_PACKETS_MAX: usize = 64;
/// Maximum number of bytes per system call: with its headers and those of a tunnel below it fits one IP packet (65 535 bytes), so that
/// an overlay can keep it whole.
const TRAIN_BYTES_MAX: usize = 64_900;
/// A payload of at most this many bytes is copied behind its header: a call with one range of memory is faster than one with two.
const COPIED_MAX: usize = 128;
/// Maximum size of a coalesced datagram (`UDP_GRO`).
const RECEIVE_BYTES: usize = 65_536;
/// ECN code point of RFC 3168: "congestion experienced".
const ECN_CONGESTION: u8 = 3;
const CONTROL_BYTES: usize = 128;

/// Buffer for ancillary data, aligned as `cmsghdr` requires.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

pub(crate) struct Socket {
    socket: UdpSocket,
    busy: BusyPeer,
    buffer: Vec<u8>,
    train: Train,
    /// Number of datagrams that the kernel refused.
    pub(super) refused: u64,
}

/// A received datagram, or several coalesced datagrams of one sender and one size.
pub(crate) struct Received<'a> {
    pub(crate) from: SocketAddr,
    pub(crate) bytes: &'a mut [u8],
    /// Size of each packet except the last.
    pub(crate) segment: usize,
    pub(crate) congestion: bool,
    /// Largest datagram in bytes that may be sent back to `from`, if it is smaller than that of other peers.
    pub(crate) reply_max: Option<usize>,
}

/// What was received into the buffer, as in `Received`.
struct Taken {
    from: SocketAddr,
    len: usize,
    segment: usize,
    congestion: bool,
}

struct Train {
    to: Option<SocketAddr>,
    /// Headers, each with a small payload.
    heads: Vec<u8>,
    /// Length of each packet's head, and the rest of its payload.
    packets: Vec<(usize, Span)>,
    /// Sealed packets, in place of `packets`.
    sealed: Vec<u8>,
    segment: usize,
    bytes: usize,
    /// The train ended with a packet shorter than its segment size, so no packet may be appended.
    is_closed: bool,
}

impl Socket {
    pub(super) fn bind(address: SocketAddr) -> io::Result<Self> {
        Self::new(UdpSocket::bind(address)?)
    }

    /// Prepares a bound socket.
    pub(crate) fn new(socket: UdpSocket) -> io::Result<Self> {
        prepare(&socket)?;
        let train = Train {
            to: None,
            heads: vec![],
            packets: vec![],
            sealed: vec![],
            segment: 0,
            bytes: 0,
            is_closed: false,
        };
        Ok(Self { socket, busy: BusyPeer::default(), buffer: vec![0; RECEIVE_BYTES], train, refused: 0 })
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    pub(super) fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Number of packet bytes that fit into the receive buffer beside the kernel's overhead for each packet.
    pub(crate) fn receive_room(&self) -> usize {
        let mut bytes: libc::c_int = 0;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes into `bytes`, which has this length.
        let result = unsafe {
            let value = ptr::from_mut(&mut bytes).cast();
            libc::getsockopt(self.descriptor(), libc::SOL_SOCKET, libc::SO_RCVBUF, value, &mut len)
        };
        if result == 0 { bytes as usize / 4 } else { 64 << 10 }
    }

    /// Gives the busiest peer a socket of its own, or takes it away, as what arrived has shown. `watch` begins to watch a descriptor for
    /// arrivals (true), or ends that.
    pub(super) fn settle(&mut self, now: u64, watch: impl Fn(BorrowedFd<'_>, bool) -> io::Result<()>) {
        match self.busy.change(now) {
            None => {}
            Some(Change::Open(peer)) => {
                self.busy.open(now, &self.socket, peer, |socket| watch(socket.as_fd(), true));
            }
            Some(Change::Retire) => self.busy.retire(),
            Some(Change::Close) => {
                if let Some(socket) = self.busy.close() {
                    // It only fails for what is not watched.
                    let _ = watch(socket.as_fd(), false);
                }
            }
        }
    }

    /// The engine has taken what was received last.
    pub(super) fn accepted(&mut self) {
        self.busy.accepted();
    }

    #[cfg(test)]
    pub(super) fn busy_peer(&self) -> Option<SocketAddr> {
        self.busy.peer()
    }

    /// Receives a datagram without blocking. Unless it polls `all` sockets, it may find none although one of a peer that is not the busiest
    /// waits: one of four calls finds it.
    pub(crate) fn receive(&mut self, all: bool) -> Option<Received<'_>> {
        let mut taken = None;
        for (fd, place) in self.busy.sockets(self.socket.as_raw_fd(), all).into_iter().flatten() {
            let is_empty = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
            let mut received = receive_by(fd, &mut self.buffer, self.busy.only_sender(place));
            if received.as_ref().is_err_and(|error| !is_empty(error)) {
                // A connected socket also reports what an earlier packet met (ICMP) before what has arrived.
                self.busy.check_connected(place);
                received = receive_by(fd, &mut self.buffer, self.busy.only_sender(place));
            }
            if received.as_ref().is_err_and(is_empty) {
                self.busy.emptied(place);
            }
            taken = received.ok();
            if !self.busy.polled(place, taken.as_ref().map(|taken| taken.from)) {
                break;
            }
        }
        let Taken { from, len, segment, congestion } = taken?;
        Some(Received { from, bytes: &mut self.buffer[..len], segment, congestion, reply_max: None })
    }

    /// Queues a packet. Sends the queued packets first if this packet does not fit into their train. `flush` sends the rest.
    pub(crate) fn send(&mut self, packet: &Departure) {
        let header = packet.header.as_bytes();
        let bytes = header.len() + packet.payload.len();
        self.make_room(packet.to, bytes, bytes, self.train.sealed.is_empty());
        self.train.heads.extend_from_slice(header);
        let (head, rest) = if packet.payload.len() <= COPIED_MAX {
            packet.payload.read_to(&mut self.train.heads);
            (bytes, Span::EMPTY)
        } else {
            (header.len(), packet.payload)
        };
        self.train.packets.push((head, rest));
    }

    /// Like `send`, but seals the packet.
    pub(crate) fn send_sealed(&mut self, packet: &Departure, session: &mut Session) {
        let header = packet.header.as_bytes();
        let bytes = header.len() + packet.payload.len();
        let is_same_kind = self.train.packets.is_empty();
        if packet.parts_of > 0 {
            let datagram = packet.parts_of + OVERHEAD;
            self.make_room(packet.to, datagram, sealed_in_parts(bytes, datagram), is_same_kind);
            session.seal_in_parts(&mut self.train.sealed, header, packet.payload, datagram);
        } else {
            self.make_room(packet.to, bytes + OVERHEAD, bytes + OVERHEAD, is_same_kind);
            session.seal(&mut self.train.sealed, header, packet.payload);
        }
    }

    /// Makes room in the train for a packet of `bytes` bytes, in datagrams of `datagram` bytes of which the last may be shorter: sends the
    /// queued packets first if it does not fit behind them.
    fn make_room(&mut self, to: SocketAddr, datagram: usize, bytes: usize, is_same_kind: bool) {
        let train = &self.train;
        let fits = train.to == Some(to)
            && is_same_kind
            && !train.is_closed
            && (datagram == train.segment || datagram == bytes && bytes <= train.segment)
            && train.bytes + bytes <= TRAIN_BYTES_MAX.min(train.segment * TRAIN_PACKETS_MAX);
        if !fits {
            self.flush();
            self.train.to = Some(to);
            self.train.segment = datagram;
        }
        let train = &mut self.train;
        train.bytes += bytes;
        train.is_closed = !bytes.is_multiple_of(train.segment);
    }

    /// Sends a packet that joins no train.
    pub(crate) fn send_alone(&mut self, to: SocketAddr, packet: &[u8]) {
        self.refused += u64::from(self.socket.send_to(packet, to).is_err());
    }

    /// Sends the queued packets. A packet that the kernel refuses counts as lost in the network.
    pub(crate) fn flush(&mut self) {
        let train = &mut self.train;
        let Some(to) = train.to.take() else { return };
        let fd = self.socket.as_raw_fd();
        let is_train = train.bytes > train.segment;
        let segment = if is_train { train.segment } else { 0 };
        let send = |fd, to| {
            if !train.sealed.is_empty() {
                transmit_sealed(fd, to, &train.sealed, segment)
            } else if matches!(&train.packets[..], [(_, rest)] if rest.is_empty()) {
                transmit_alone(fd, to, &train.heads)
            } else {
                transmit(fd, to, &train.heads, &train.packets, segment)
            }
        };
        // A connected socket also reports what earlier packets met (ICMP), and then sends nothing.
        let mut has_failed = false;
        let sent = match self.busy.socket_to(to) {
            Some(peers) => send(peers, None).or_else(|_| {
                has_failed = true;
                send(fd, Some(to))
            }),
            None => send(fd, Some(to)),
        };
        if has_failed {
            self.busy.check_connected(Place::Peer);
        }
        let to = Some(to);
        if let Err(error) = sent {
            // The path MTU is smaller than the packets, or the device cannot segment: send each packet alone and let the kernel
            // fragment it.
            let narrow = [libc::EMSGSIZE, libc::EINVAL, libc::EIO].map(Some).contains(&error.raw_os_error());
            let again = narrow && is_train;
            let mut heads = &train.heads[..];
            for packet in &train.packets {
                let (head, others) = heads.split_at(packet.0);
                let sent = again && transmit(fd, to, head, std::slice::from_ref(packet), 0).is_ok();
                self.refused += u64::from(!sent);
                heads = others;
            }
            for packet in train.sealed.chunks(train.segment) {
                let sent = again && transmit_sealed(fd, to, packet, 0).is_ok();
                self.refused += u64::from(!sent);
            }
        }
        train.heads.clear();
        train.packets.clear();
        train.sealed.clear();
        (train.segment, train.bytes, train.is_closed) = (0, 0, false);
    }
}

/// Receives a datagram into `buffer` without blocking. `sender`: its sender, if known; otherwise the kernel reports it.
fn receive_by(fd: RawFd, buffer: &mut [u8], sender: Option<SocketAddr>) -> io::Result<Taken> {
    // SAFETY: both are plain C structures, for which zero bytes are valid.
    let (mut name, mut message) = unsafe { (zeroed::<libc::sockaddr_storage>(), zeroed::<libc::msghdr>()) };
    let mut control = Control([0; CONTROL_BYTES]);
    let mut vector = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    if sender.is_none() {
        message.msg_name = ptr::from_mut(&mut name).cast();
        message.msg_namelen = size_of::<libc::sockaddr_storage>() as u32;
    }
    message.msg_iov = &mut vector;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES;
    // SAFETY: name, control buffer and vector outlive the call and have the lengths that the message header states. libc's own
    // function would make the call a cancellation point, which takes a twentieth of the time of one that finds nothing.
    let len =
        unsafe { libc::syscall(libc::SYS_recvmsg, fd, ptr::from_mut(&mut message), libc::MSG_DONTWAIT) };
    let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
    let (mut segment, mut congestion) = (len, false);
    // SAFETY: the kernel filled the message header; CMSG_FIRSTHDR reads only its control part.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&message) };
    while !header.is_null() {
        // SAFETY: the header and the data that its length covers lie within `control`; the kernel sends an int with UDP_GRO
        // and IPV6_TCLASS, and a byte with IP_TOS.
        unsafe {
            let data = libc::CMSG_DATA(header);
            match ((*header).cmsg_level, (*header).cmsg_type) {
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    segment = data.cast::<libc::c_int>().read_unaligned() as usize
                }
                (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    congestion = *data & 3 == ECN_CONGESTION;
                }
                _ => {}
            }
            header = libc::CMSG_NXTHDR(&message, header);
        }
    }
    let from = sender.or_else(|| from_raw(&name)).ok_or(io::ErrorKind::InvalidData)?;
    Ok(Taken { from, len, segment: segment.max(1), congestion })
}

fn transmit(
    fd: RawFd,
    to: Option<SocketAddr>,
    mut heads: &[u8],
    packets: &[(usize, Span)],
    segment: usize,
) -> io::Result<()> {
    let mut vectors = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; 2 * TRAIN_PACKETS_MAX];
    let mut used = 0;
    for (len, rest) in packets {
        let (head, others) = heads.split_at(*len);
        heads = others;
        let parts = [(head.as_ptr().cast_mut(), head.len()), (rest.start(), rest.len())];
        for (start, len) in parts.into_iter().filter(|(_, len)| *len > 0) {
            vectors[used] = libc::iovec { iov_base: start.cast(), iov_len: len };
            used += 1;
        }
    }
    send_message(fd, to, &mut vectors[..used], segment)
}

/// Sends one packet. Without an address the socket is connected.
fn transmit_alone(fd: RawFd, to: Option<SocketAddr>, packet: &[u8]) -> io::Result<()> {
    let name = to.map(to_raw);
    let (name, len) = name.as_ref().map_or((ptr::null(), 0), |(name, len)| (ptr::from_ref(name), *len));
    // SAFETY: the kernel reads `packet` and `len` bytes of `name`, both of which outlive the call.
    let sent = unsafe { libc::sendto(fd, packet.as_ptr().cast(), packet.len(), 0, name.cast(), len) };
    if sent >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn transmit_sealed(fd: RawFd, to: Option<SocketAddr>, packets: &[u8], segment: usize) -> io::Result<()> {
    let start = packets.as_ptr().cast_mut().cast();
    send_message(fd, to, &mut [libc::iovec { iov_base: start, iov_len: packets.len() }], segment)
}

/// Sends the bytes of `vectors`, which the caller keeps valid during the call. Without an address the socket is connected.
fn send_message(
    fd: RawFd,
    to: Option<SocketAddr>,
    vectors: &mut [libc::iovec],
    segment: usize,
) -> io::Result<()> {
    let mut name = to.map(to_raw);
    // SAFETY: a plain C structure, for which zero bytes are valid.
    let mut message = unsafe { zeroed::<libc::msghdr>() };
    let mut control = Control([0; CONTROL_BYTES]);
    if let Some((name, len)) = &mut name {
        (message.msg_name, message.msg_namelen) = (ptr::from_mut(name).cast(), *len);
    }
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = vectors.len();
    if segment > 0 {
        message.msg_control = control.0.as_mut_ptr().cast();
        // SAFETY: CMSG_LEN and CMSG_SPACE only compute lengths.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<u16>() as u32) } as usize;
        // SAFETY: the control buffer is aligned, and longer than the header and the u16 that are written to it.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_UDP;
            (*header).cmsg_type = libc::UDP_SEGMENT;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<u16>() as u32) as usize;
            libc::CMSG_DATA(header).cast::<u16>().write_unaligned(segment as u16);
        }
    }
    // SAFETY: name, control buffer and vectors outlive the call; the vectors name headers and sealed packets of the caller, and payloads,
    // which are spans whose creators guarantee valid memory. Only the kernel reads them, so an unmapped payload makes the call fail.
    let sent = unsafe { libc::sendmsg(fd, &message, 0) };
    if sent >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Maximum number of parts that `send_parts` takes.
pub(super) const PARTS_MAX: usize = 32;

/// sendmsg(2) on a connected socket, without blocking. Returns the number of bytes sent.
pub(super) fn send_parts(
    to: impl AsFd,
    parts: impl Iterator<Item = Span>,
    flags: libc::c_int,
) -> io::Result<usize> {
    let mut vectors = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; PARTS_MAX];
    let mut used = 0;
    for (vector, part) in vectors.iter_mut().zip(parts) {
        *vector = libc::iovec { iov_base: part.start().cast(), iov_len: part.len() };
        used += 1;
    }
    // SAFETY: a plain C structure, for which zero bytes are valid.
    let mut message = unsafe { zeroed::<libc::msghdr>() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = used;
    let flags = flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the vectors outlive the call. They name spans, whose creators guarantee valid memory; only the kernel reads it, so an
    // unmapped payload makes the call fail.
    let sent = unsafe { libc::sendmsg(to.as_fd().as_raw_fd(), &message, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

fn to_raw(address: SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: a plain C structure, for which zero bytes are valid.
    let mut raw = unsafe { zeroed::<libc::sockaddr_storage>() };
    match address {
        SocketAddr::V4(v4) => {
            let value = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(*v4.ip()).to_be() },
                sin_zero: [0; 8],
            };
            // SAFETY: a sockaddr_storage has the size and alignment for every address family.
            unsafe { ptr::from_mut(&mut raw).cast::<libc::sockaddr_in>().write(value) };
            (raw, size_of::<libc::sockaddr_in>() as u32)
        }
        SocketAddr::V6(v6) => {
            let value = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: a sockaddr_storage has the size and alignment for every address family.
            unsafe { ptr::from_mut(&mut raw).cast::<libc::sockaddr_in6>().write(value) };
            (raw, size_of::<libc::sockaddr_in6>() as u32)
        }
    }
}

fn from_raw(raw: &libc::sockaddr_storage) -> Option<SocketAddr> {
    match libc::c_int::from(raw.ss_family) {
        libc::AF_INET => {
            // SAFETY: the kernel wrote an address of this family; a sockaddr_storage has sufficient size and alignment.
            let v4 = unsafe { ptr::from_ref(raw).cast::<libc::sockaddr_in>().read() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Some(SocketAddr::new(IpAddr::V4(ip), u16::from_be(v4.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: the kernel wrote an address of this family; a sockaddr_storage has sufficient size and alignment.
            let v6 = unsafe { ptr::from_ref(raw).cast::<libc::sockaddr_in6>().read() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let port = u16::from_be(v6.sin6_port);
            Some(std::net::SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// Bytes of a packet left to tunnels below: an overlay that carries the device's whole MTU over networks with the same MTU sends a
/// full packet in two fragments, and then the kernel cannot keep packets together. VXLAN over IPv6 takes 70 bytes, WireGuard 80.
const TUNNEL_HEADERS: libc::c_int = 80;
/// Smallest packet that every IPv4 host takes (RFC 791).
const PACKET_MIN: libc::c_int = 576;

/// Returns the size of the largest datagram to this address without fragmentation, also if an overlay encapsulates it, derived from
/// the MTU of its route.
pub(crate) fn datagram_to(address: SocketAddr) -> io::Result<usize> {
    let any: SocketAddr = match address {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let probe = UdpSocket::bind(any)?;
    probe.connect(address)?;
    let (level, option, headers) = match address {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU, 28),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU, 48),
    };
    let mut mtu: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into `mtu`, which has this length.
    let result = unsafe {
        libc::getsockopt(probe.as_raw_fd(), level, option, ptr::from_mut(&mut mtu).cast(), &mut len)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let packet = (mtu - TUNNEL_HEADERS).max(PACKET_MIN.min(mtu));
    Ok((packet.max(headers) - headers) as usize)
}

/// Waits until one of the descriptors is readable or the time expires.
pub(crate) fn wait_readable(descriptors: &[RawFd], timeout_ns: Option<u64>) {
    let mut polled: [libc::pollfd; 2] = [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; 2];
    for (entry, fd) in polled.iter_mut().zip(descriptors) {
        entry.fd = *fd;
    }
    let time = timeout_ns.map(|ns| libc::timespec {
        tv_sec: (ns / 1_000_000_000) as libc::time_t,
        tv_nsec: (ns % 1_000_000_000) as libc::c_long,
    });
    let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: the entries outlive the call, which writes only their `revents`; `time` is null or valid.
    unsafe { libc::ppoll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, time, ptr::null()) };
}

/// Splits a received datagram into the packets that the kernel coalesced, which may be decrypted in place.
pub(crate) fn segments_mut<'a>(received: &'a mut Received<'_>) -> impl Iterator<Item = &'a mut [u8]> {
    received.bytes.chunks_mut(received.segment)
}
