//! The packet socket: sends and receives several frames with one system call.

use std::io;
use std::mem::zeroed;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::time::Duration;

use rustix::net::sockopt;

use super::address::{mac_of, station};
use super::device::{Device, Refusal};
use super::filter;
use super::frame::{self, ETHERTYPE, HEADER, Mac};
use crate::proto::{Departure, Span};

/// Maximum number of frames that one system call sends, and receives.
const SENDS_MAX: usize = 64;
const RECEIVES_MAX: usize = 16;
/// A payload of at most this many bytes is copied behind its header: a frame with one range of memory is faster than one with two.
const COPIED_MAX: usize = 128;
/// Size of both socket buffers in bytes; without CAP_NET_ADMIN the kernel limits it to `net.core.rmem_max` and `wmem_max`.
const SOCKET_BUFFER: usize = 8 << 20;
/// How long sending waits for a device that takes no frames.
const PATIENCE: Duration = Duration::from_millis(10);
/// Bytes of a frame left to tunnels below, as UDP packets leave them: an overlay that carries the device's whole MTU over networks with the same
/// MTU would send a full frame in two fragments.
const TUNNEL_HEADERS: usize = 80;
/// Smallest packet that the protocol needs to send.
const PACKET_MIN: usize = 576;

/// Length of a socket name of the family AF_PACKET.
const NAME_BYTES: libc::socklen_t = size_of::<libc::sockaddr_ll>() as libc::socklen_t;

/// A frame that waits for its system call.
struct Queued {
    to: Mac,
    /// Length of its part of `heads`: the headers, and a small payload.
    head: usize,
    /// The rest of the payload.
    rest: Span,
}

pub(crate) struct Socket {
    socket: OwnedFd,
    /// Keeps the port.
    _reservation: OwnedFd,
    device: Device,
    port: u16,
    /// Room for `RECEIVES_MAX` frames of `stride` bytes.
    room: Vec<u8>,
    stride: usize,
    heads: Vec<u8>,
    queued: Vec<Queued>,
    /// Number of packets that the device refused, or that no frame can carry.
    pub(crate) refused: u64,
}

impl Socket {
    /// Opens a packet socket at this device; port 0 selects any free port.
    pub(crate) fn bind(device: &str, port: u16) -> Result<Self, Refusal> {
        // Protocol 0: no frame arrives before the filter is there.
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if fd < 0 {
            let error = io::Error::last_os_error();
            let is_denied = matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES));
            return Err(if is_denied { Refusal::Capability } else { error.into() });
        }
        // SAFETY: the descriptor was just opened, and belongs to nobody else.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let device = Device::find(&socket, device)?;
        let (reservation, port) = device.reserve(port)?;
        filter::attach(&socket, port)?;
        for (force, plain) in [
            (
                sockopt::set_socket_recv_buffer_size_force as fn(_, _) -> _,
                sockopt::set_socket_recv_buffer_size as fn(_, _) -> _,
            ),
            (sockopt::set_socket_send_buffer_size_force, sockopt::set_socket_send_buffer_size),
        ] {
            force(&socket, SOCKET_BUFFER)
                .or_else(|_| plain(&socket, SOCKET_BUFFER))
                .map_err(io::Error::from)?;
        }
        let patience = Some(PATIENCE);
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, patience).map_err(io::Error::from)?;
        listen(&socket, device.index)?;
        let stride = device.mtu;
        Ok(Self {
            socket,
            _reservation: reservation,
            device,
            port,
            room: vec![0; RECEIVES_MAX * stride],
            stride,
            heads: vec![],
            queued: vec![],
            refused: 0,
        })
    }

    /// The node's own address.
    pub(crate) fn address(&self) -> SocketAddr {
        station(self.device.mac, self.port)
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Number of packet bytes that fit into the receive buffer beside the kernel's overhead for each frame.
    pub(crate) fn receive_room(&self) -> usize {
        sockopt::socket_recv_buffer_size(&self.socket).map_or(64 << 10, |bytes| bytes / 4)
    }

    /// Size of the largest packet in bytes.
    pub(crate) fn packet_max(&self) -> usize {
        let most = self.device.mtu - HEADER;
        most.saturating_sub(TUNNEL_HEADERS).max(PACKET_MIN.min(most)).min(65_507)
    }

    /// Whether a frame to this address leaves the device and does not have to come back by it.
    pub(crate) fn reaches(&self, to: SocketAddr) -> bool {
        mac_of(to).is_some_and(|mac| mac != self.device.mac)
    }

    /// Receives frames without blocking, with one system call, and gives each packet to `take` with its sender. Malformed frames give an
    /// empty one. Returns whether any frame was there.
    pub(crate) fn receive(&mut self, mut take: impl FnMut(SocketAddr, &mut [u8])) -> bool {
        // SAFETY: all are plain C structures, for which zero bytes are valid.
        let (mut names, mut vectors, mut messages) = unsafe {
            (
                zeroed::<[libc::sockaddr_ll; RECEIVES_MAX]>(),
                zeroed::<[libc::iovec; RECEIVES_MAX]>(),
                zeroed::<[libc::mmsghdr; RECEIVES_MAX]>(),
            )
        };
        let rooms = self.room.chunks_exact_mut(self.stride);
        let parts = names.iter_mut().zip(&mut vectors).zip(&mut messages);
        for (((name, vector), message), room) in parts.zip(rooms) {
            *vector = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
            message.msg_hdr.msg_name = ptr::from_mut(name).cast();
            message.msg_hdr.msg_namelen = NAME_BYTES;
            message.msg_hdr.msg_iov = vector;
            message.msg_hdr.msg_iovlen = 1;
        }
        let fd = self.socket.as_raw_fd();
        // SAFETY: names, vectors and the room that they name outlive the call and have the lengths that the message headers state.
        let count = unsafe {
            let first = messages.as_mut_ptr();
            libc::recvmmsg(fd, first, RECEIVES_MAX as u32, libc::MSG_DONTWAIT as _, ptr::null_mut())
        };
        let count = usize::try_from(count).unwrap_or(0).min(RECEIVES_MAX);
        let rooms = self.room.chunks_exact_mut(self.stride);
        for ((message, name), room) in messages.iter().zip(&names).zip(rooms).take(count) {
            let [a, b, c, d, e, f, ..] = name.sll_addr;
            let mac = [a, b, c, d, e, f];
            let len = (message.msg_len as usize).min(room.len());
            let is_whole = message.msg_hdr.msg_flags & libc::MSG_TRUNC == 0;
            let found = frame::decode(&mut room[..len], self.port).filter(|_| is_whole);
            let from = found.as_ref().map_or(0, |found| found.source);
            let from = station(mac, from);
            match found.filter(|_| mac_of(from).is_some()) {
                Some(found) => take(from, found.packet),
                None => take(from, &mut []),
            }
        }
        count > 0
    }

    /// Queues a packet. `flush` sends what is queued; a full queue is sent at once.
    pub(crate) fn send(&mut self, packet: &Departure) {
        let (header, payload) = (packet.header.as_bytes(), packet.payload);
        let Some((to, start)) = self.begin(packet.to, header.len() + payload.len()) else { return };
        self.heads.extend_from_slice(header);
        let rest = if payload.len() <= COPIED_MAX {
            payload.read_to(&mut self.heads);
            Span::EMPTY
        } else {
            payload
        };
        self.end(to, start, rest);
    }

    /// Queues a packet of whole bytes.
    pub(crate) fn send_bytes(&mut self, to: SocketAddr, packet: &[u8]) {
        let Some((to, start)) = self.begin(to, packet.len()) else { return };
        self.heads.extend_from_slice(packet);
        self.end(to, start, Span::EMPTY);
    }

    /// Adds the header of a frame. Returns the station and where the header starts, or `None` if no frame carries so many bytes to this
    /// address.
    fn begin(&mut self, to: SocketAddr, len: usize) -> Option<(Mac, usize)> {
        let fits = len + HEADER <= self.device.mtu;
        let (Ok(len), Some(mac), true) = (u16::try_from(len), mac_of(to), fits) else {
            self.refused += 1;
            return None;
        };
        let start = self.heads.len();
        self.heads.extend_from_slice(&frame::header(to.port(), self.port, len));
        Some((mac, start))
    }

    fn end(&mut self, to: Mac, start: usize, rest: Span) {
        self.queued.push(Queued { to, head: self.heads.len() - start, rest });
        if self.queued.len() >= SENDS_MAX {
            self.flush();
        }
    }

    /// Sends the queued frames. A frame that the device refuses counts as lost in the network.
    pub(crate) fn flush(&mut self) {
        if self.queued.is_empty() {
            return;
        }
        self.refused += transmit(self.socket.as_raw_fd(), self.device.index, &self.heads, &self.queued);
        self.heads.clear();
        self.queued.clear();
    }
}

/// Has frames of the ethertype from this device arrive.
fn listen(socket: &OwnedFd, index: libc::c_int) -> io::Result<()> {
    let name = name(index, Mac::default());
    // SAFETY: the kernel reads as many bytes of `name` as it has.
    let result = unsafe { libc::bind(socket.as_raw_fd(), ptr::from_ref(&name).cast(), NAME_BYTES) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Socket name of a station at the device with this index.
fn name(index: libc::c_int, mac: Mac) -> libc::sockaddr_ll {
    // SAFETY: a plain C structure, for which zero bytes are valid.
    let mut name = unsafe { zeroed::<libc::sockaddr_ll>() };
    name.sll_family = libc::AF_PACKET as u16;
    name.sll_protocol = ETHERTYPE.to_be();
    name.sll_ifindex = index;
    name.sll_halen = mac.len() as u8;
    name.sll_addr[..mac.len()].copy_from_slice(&mac);
    name
}

/// Sends frames, at most `SENDS_MAX`. Returns the number of those that were refused.
fn transmit(fd: RawFd, index: libc::c_int, mut heads: &[u8], queued: &[Queued]) -> u64 {
    // SAFETY: all are plain C structures, for which zero bytes are valid.
    let (mut names, mut vectors, mut messages) = unsafe {
        (
            zeroed::<[libc::sockaddr_ll; SENDS_MAX]>(),
            zeroed::<[[libc::iovec; 2]; SENDS_MAX]>(),
            zeroed::<[libc::mmsghdr; SENDS_MAX]>(),
        )
    };
    let count = queued.len().min(SENDS_MAX);
    let parts = names.iter_mut().zip(&mut vectors).zip(&mut messages);
    for (((own, vector), message), queued) in parts.zip(queued) {
        let (head, others) = heads.split_at(queued.head);
        heads = others;
        *own = name(index, queued.to);
        let (head, rest) = ((head.as_ptr().cast_mut(), head.len()), (queued.rest.start(), queued.rest.len()));
        *vector = [head, rest].map(|(start, len)| libc::iovec { iov_base: start.cast(), iov_len: len });
        message.msg_hdr.msg_name = ptr::from_mut(own).cast();
        message.msg_hdr.msg_namelen = NAME_BYTES;
        message.msg_hdr.msg_iov = vector.as_mut_ptr();
        message.msg_hdr.msg_iovlen = if queued.rest.is_empty() { 1 } else { 2 };
    }
    let (mut done, mut refused) = (0, 0);
    while done < count {
        let rest = &mut messages[done..count];
        // SAFETY: names, vectors and the heads that they name outlive the call; payloads are spans whose creators guarantee valid memory. Only
        // the kernel reads them, so an unmapped payload makes the call fail.
        let sent = unsafe { libc::sendmmsg(fd, rest.as_mut_ptr(), rest.len() as u32, 0) };
        if let Some(sent) = usize::try_from(sent).ok().filter(|sent| *sent > 0) {
            done += sent;
            continue;
        }
        // Other errors hold for all frames: the device is down or gone, or takes none.
        let is_own = [libc::EFAULT, libc::EMSGSIZE, libc::EINVAL].map(Some);
        let skipped =
            if is_own.contains(&io::Error::last_os_error().raw_os_error()) { 1 } else { count - done };
        refused += skipped as u64;
        done += skipped;
    }
    refused
}
