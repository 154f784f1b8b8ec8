//! An underlay port of an interface's own: the receiving half of cut-through forwarding (VNET/P+ section IV.B), with the
//! paper's device assignment done by the kernel, which sorts datagrams by port.
//!
//! ```text
//!   peek: source, length, segment, first bytes      nothing is taken from the socket, nothing is in the guest's memory
//!     | of the port's own peer, a large frame, first fragment, and (dispatch/direct.rs) routed to this interface only?
//!     v yes                                         no: recvmmsg into our buffers, the ordinary way
//!   guess: the frame is as long as its IP header says, and its fragments follow each other, all of one size
//!   recvmsg: header aside | payload in the guest's buffers | header aside | payload ...
//!     | is it what was guessed, to the last header?
//!     v yes                                         no: *copied out* of the guest's buffers, then the ordinary way
//!   the guest is told
//! ```
//!
//! What can be wrong about the guess is only what is behind the first datagram, so the bytes that stand in a guest's buffers for
//! nothing came from the peer of its port, to its port, behind a frame that was for it. It is not told of them. Others cannot
//! put anything there: the socket is connected to the peer's address, so that the kernel drops what comes from elsewhere, and
//! the source of each message is looked at before it is taken; whoever can forge the peer's address can forge any datagram of
//! a link in clear text.
//!
//! A guest writes to its memory when it likes. What is looked at for decisions is the private copy that the peek made, and the
//! headers, which never stand in its memory. What is copied out may have been changed by the guest that it was sent to.

use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

use super::{Encapsulation, Link, Peers};
use crate::frame::{Batch, FRAME_MAX, HEAD_MAX, NetworkId, Room};
use crate::link::native::reassembly::FRAGMENTS_MAX;
use crate::link::native::receive::{BUFFER_LEN, MESSAGES, Received, Receiver};
use crate::link::socket::name::Name;
use crate::link::socket::ports::BridgeError;
use crate::link::socket::udp::{Socket, check};
use crate::stats::DiscardReason;
use crate::wire::ethernet::{self, Mac};
use crate::wire::ip;
use crate::wire::native::{HEADER_LEN, Header, Kind, metadata};
use crate::wire::offload::{Offload, WIRE_LEN};

/// Frames shorter than this go the ordinary way: two more system calls cost more than a copy.
const LEN_MIN: usize = 4096;
/// What a peek takes: headers and the head of a frame.
pub(super) const PEEK_LEN: usize = HEADER_LEN + WIRE_LEN + HEAD_MAX;
/// `UIO_MAXIOV`.
const SLICES_MAX: usize = 1024;

/// The port and its peer.
pub struct Direct {
    socket: Arc<Socket>,
    /// Where the peer is that it is connected to.
    peer: Mutex<Option<SocketAddr>>,
}

impl Direct {
    /// Binds `address`. Nothing is received before [`Direct::aim`].
    pub fn bind(address: SocketAddr) -> Result<Arc<Direct>, BridgeError> {
        let socket = Socket::bind(address, false).map_err(|error| BridgeError::new(address, error))?;
        Ok(Arc::new(Direct { socket: Arc::new(socket), peer: Mutex::new(None) }))
    }

    /// Takes datagrams from `peer` only, from now on. Those that came before are dropped.
    pub fn aim(&self, peer: SocketAddr) -> io::Result<()> {
        let mut current = self.peer.lock().unwrap_or_else(PoisonError::into_inner);
        if *current == Some(peer) {
            return Ok(());
        }
        let name = Name::new(peer, self.socket.local().is_ipv6()).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: `name` holds a socket address (AF_UNSPEC disconnects) of the length it tells.
        let connect =
            |name: &Name| unsafe { libc::connect(self.fd().as_raw_fd(), name.as_ptr(), name.len()) };
        if current.take().is_some() {
            // The first connection gave the socket a source address, which would stay: the next has to begin without.
            check(connect(&Name::unknown()))?;
        }
        check(connect(&name))?;
        let mut byte = [0u8; 1];
        // SAFETY: one byte is writable; the rest of a datagram is dropped.
        while unsafe { libc::recv(self.fd().as_raw_fd(), byte.as_mut_ptr().cast(), 1, libc::MSG_DONTWAIT) }
            >= 0
        {}
        *current = Some(peer);
        Ok(())
    }

    /// The address bound, whose port the kernel may have chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.socket.local()
    }

    /// To wait for.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn socket(&self) -> &Arc<Socket> {
        &self.socket
    }

    /// Looks at the next message without taking it. `None` when none waits.
    pub fn peek(&self) -> Option<Peeked> {
        let mut head = [0; PEEK_LEN];
        let slice = libc::iovec { iov_base: head.as_mut_ptr().cast(), iov_len: PEEK_LEN };
        let flags = libc::MSG_PEEK | libc::MSG_TRUNC;
        let Ok(Message { source, len, segment, .. }) = take(&self.socket, &mut [slice], flags) else {
            return None;
        };
        Some(Peeked { source, len, segment, head })
    }
}

/// The next message, as far as it was looked at.
pub struct Peeked {
    pub(super) source: Name,
    pub(super) len: usize,
    pub(super) segment: usize,
    pub(super) head: [u8; PEEK_LEN],
}

/// A frame that begins with the next message, and what it is guessed to look like.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// The network it belongs to.
    pub network: NetworkId,
    /// Destination address.
    pub dst: Mac,
    /// Source address.
    pub src: Mac,
    /// Bytes.
    pub len: usize,
    /// What is left to do on it, checked against the length.
    pub offload: Offload,
    head: [u8; HEAD_MAX],
    header: Header,
    /// Bytes of metadata before it.
    metadata: usize,
    /// Payload of each datagram but the last.
    size: usize,
    /// Datagrams.
    count: usize,
    /// The message that it begins with.
    first: Message,
}

impl Candidate {
    /// Its first bytes, which no guest can change.
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// Payload of datagram `k`.
    pub(super) fn payload(&self, k: usize) -> usize {
        (self.len + self.metadata - k * self.size).min(self.size)
    }

    /// The header that datagram `k` has.
    fn header(&self, k: usize) -> [u8; HEADER_LEN] {
        let first = k == 0;
        let (index, number) = (k as u16, self.header.number.wrapping_add(k as u64));
        let (last, offload) = (k + 1 == self.count, self.header.offload && first);
        Header { last, offload, index, number, ..self.header }.to_bytes()
    }

    /// The next message, if it goes on with datagram `k`.
    fn following(&self, direct: &Direct, k: usize) -> Option<Message> {
        let Peeked { source, len, segment, head } = direct.peek()?;
        (head[..HEADER_LEN] == self.header(k)).then_some(Message { source, len, segment })
    }

    /// Datagrams that it is sent in.
    pub fn datagrams(&self) -> usize {
        self.count
    }

    /// How many datagrams from `k` on a message of `len` bytes holds, if it is one of this frame.
    pub(super) fn part(&self, k: usize, len: usize, segment: usize) -> Option<usize> {
        let whole = HEADER_LEN + self.size;
        let count = len.div_ceil(whole);
        let short = if k + count == self.count { self.size - self.payload(self.count - 1) } else { 0 };
        let fits = k + count <= self.count && len + short == count * whole;
        // All of its datagrams but the last are as long as the segment.
        let alike = if count == 1 { segment >= len } else { segment == whole };
        (fits && alike).then_some(count)
    }
}

impl Peeked {
    /// The link that the message came by, and the frame that begins with it, if that can be received in place.
    pub fn candidate<'a>(&self, peers: &'a Peers) -> Option<(&'a Arc<Link>, Candidate)> {
        let link = peers.link(self.source.address()?)?;
        if link.options().kind.encapsulation() != Encapsulation::Native || link.seal().is_some() {
            return None;
        }
        let (header, payload) = Header::parse(self.head.get(..self.len.min(PEEK_LEN))?).ok()?;
        if header.kind != Kind::Frame || header.index != 0 || header.sealed {
            return None;
        }
        let (offload, frame) = metadata(payload, header.offload)?;
        let head: [u8; HEAD_MAX] = *frame.first_chunk()?;
        let metadata = payload.len() - frame.len();
        let (len, size) = if header.last {
            let payload = self.len.checked_sub(HEADER_LEN)?;
            (payload - metadata, payload)
        } else {
            // The head is the first datagram's: what is judged is what the frame begins with.
            let whole = |size: &usize| *size >= metadata + HEAD_MAX;
            (guessed_len(&head)?, self.segment.checked_sub(HEADER_LEN).filter(whole)?)
        };
        if !(LEN_MIN..=FRAME_MAX).contains(&len) {
            return None;
        }
        let count = (len + metadata).div_ceil(size);
        let (dst, src) = ethernet::addresses(&head)?;
        let network = NetworkId::new(header.network).filter(|network| link.carries(*network))?;
        let offload = offload.checked(len).ok()?;
        let first = Message { source: self.source, len: self.len, segment: self.segment };
        let candidate =
            Candidate { network, dst, src, len, offload, head, header, metadata, size, count, first };
        let possible = link.allows_source(src) && (count == 1) == header.last && count <= FRAGMENTS_MAX;
        candidate.part(0, self.len, self.segment).filter(|_| possible)?;
        Some((link, candidate))
    }
}

/// The length of an untagged frame according to its IP header. A guess: the peer wrote the header.
fn guessed_len(head: &[u8; HEAD_MAX]) -> Option<usize> {
    let (offset, ip) = ip::in_frame(head)?;
    (offset == ethernet::HEADER_LEN).then_some(offset + ip.total_len)
}

/// What became of the messages that were to be received in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Landed {
    /// The frame is in the room.
    InPlace,
    /// So many messages were taken and stand in the receiver's burst: [`Receiver::work_off`] goes on with them.
    CopiedOut(usize),
}

/// Memory for receiving in place; one for each receiver.
#[derive(Default)]
pub(super) struct Landing {
    /// A header, and metadata behind the first one.
    prefixes: Vec<[u8; HEADER_LEN + WIRE_LEN]>,
    slices: Vec<libc::iovec>,
    /// Where the messages end in `slices`.
    ends: Vec<usize>,
}

// SAFETY: the pointers in `slices` are used only within the call that made them.
unsafe impl Send for Landing {}

impl Landing {
    pub(super) fn new() -> Landing {
        Landing {
            prefixes: vec![[0; HEADER_LEN + WIRE_LEN]; FRAGMENTS_MAX],
            slices: Vec::with_capacity(SLICES_MAX),
            ends: Vec::with_capacity(MESSAGES),
        }
    }
}

impl Receiver {
    /// Receives the candidate, which was just peeked on `direct`, into `room`, memory of a guest for exactly its length.
    ///
    /// # Safety
    /// The room is writable for the time of the call.
    pub unsafe fn land(
        &mut self,
        direct: &Direct,
        link: &Link,
        candidate: &Candidate,
        room: &[Room],
        now_ms: u64,
    ) -> Landed {
        // Each end of a datagram may cut one more piece.
        let pieces = room.len() + 2 * candidate.count;
        if room.iter().map(Room::len).sum::<usize>() != candidate.len || pieces > SLICES_MAX {
            return Landed::CopiedOut(0);
        }
        let mut landing = std::mem::take(&mut self.landing);
        landing.slices.clear();
        landing.ends.clear();
        let mut space = Space { room, offset: 0 };
        let (mut k, mut right) = (0, true);
        while right && k < candidate.count && landing.ends.len() < MESSAGES {
            let next = if k == 0 { Some(candidate.first) } else { candidate.following(direct, k) };
            let Some(next) = next else { break };
            let Some(count) = candidate.part(k, next.len, next.segment) else { break };
            let Some(message) = landing.receive(direct, candidate, k..k + count, &mut space) else {
                // The guest took its memory away: what was in the message is gone.
                link.stats.in_datagrams.add(count as u64);
                link.stats.discard(DiscardReason::Truncated, count as u64);
                break;
            };
            // Nobody else takes from this socket but who aims it, so it is the one that was looked at; if not, it is not known
            // how much of it came.
            right = message.source.same(&next.source)
                && (message.len, message.segment) == (next.len, next.segment);
            let (source, len, segment) = match right {
                true => (message.source, next.len, next.segment),
                false => (Name::unknown(), 0, 1),
            };
            self.set_message(landing.ends.len() - 1, source, len, segment);
            right &= (k..k + count).all(|k| landing.prefixes[k].first_chunk() == Some(&candidate.header(k)));
            k += count;
        }
        let landed = if right && k == candidate.count {
            link.stats.in_datagrams.add(candidate.count as u64);
            link.stats.in_frames.add(1);
            link.stats.in_bytes.add(candidate.len as u64);
            link.stats.direct_in_place.add(1);
            link.heard(now_ms);
            Landed::InPlace
        } else {
            self.copy_out(&landing);
            link.stats.direct_copied_out.add(landing.ends.len() as u64);
            Landed::CopiedOut(landing.ends.len())
        };
        self.landing = landing;
        landed
    }

    /// Takes one burst of datagrams from a direct port the ordinary way, see [`Receiver::receive`].
    pub fn receive_direct(
        &mut self,
        direct: &Direct,
        peers: &Peers,
        batch: &mut Batch,
        now_ms: u64,
        run: &mut dyn FnMut(&Batch),
    ) -> Received {
        self.receive_from(direct.socket(), peers, batch, now_ms, run)
    }

    /// Makes frames of the messages that [`Receiver::land`] copied out. Returns how many datagrams they were.
    pub fn work_off(
        &mut self,
        direct: &Direct,
        messages: usize,
        peers: &Peers,
        batch: &mut Batch,
        now_ms: u64,
        run: &mut dyn FnMut(&Batch),
    ) -> usize {
        self.work(direct.socket(), messages, peers, batch, now_ms, run)
    }

    /// Copies messages that were received in place into the burst's buffers.
    fn copy_out(&mut self, landing: &Landing) {
        let mut start = 0;
        for (message, end) in landing.ends.iter().enumerate() {
            let mut at = 0;
            let buffer = self.buffer(message);
            for slice in &landing.slices[start..*end] {
                let len = slice.iov_len.min(BUFFER_LEN - at);
                // SAFETY: the slice is one of `lay_out`: a prefix, or room that `land`'s caller keeps mapped; the buffer has
                // room for `len` more bytes and is our own memory, where no guest's is.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        slice.iov_base.cast::<u8>(),
                        buffer[at..].as_mut_ptr(),
                        len,
                    );
                }
                at += len;
            }
            start = *end;
        }
    }
}

impl Landing {
    /// Receives the next message, which is `datagrams` of the candidate. `None` when that cannot be done.
    fn receive(
        &mut self,
        direct: &Direct,
        candidate: &Candidate,
        datagrams: Range<usize>,
        space: &mut Space<'_>,
    ) -> Option<Message> {
        let start = self.slices.len();
        self.lay_out(candidate, datagrams, space);
        let message = take(direct.socket(), &mut self.slices[start..], libc::MSG_TRUNC);
        match message {
            Ok(_) => self.ends.push(self.slices.len()),
            Err(_) => self.slices.truncate(start),
        }
        message.ok()
    }

    /// Adds the slices of some datagrams: headers aside, payload in the room.
    fn lay_out(&mut self, candidate: &Candidate, datagrams: Range<usize>, space: &mut Space<'_>) {
        for k in datagrams {
            let metadata = if k == 0 { candidate.metadata } else { 0 };
            let prefix = self.prefixes[k].as_mut_ptr();
            self.slices.push(libc::iovec { iov_base: prefix.cast(), iov_len: HEADER_LEN + metadata });
            space.take(candidate.payload(k) - metadata, &mut self.slices);
        }
    }
}

/// A place in a guest's room.
struct Space<'a> {
    room: &'a [Room],
    offset: usize,
}

impl Space<'_> {
    /// Adds the next `len` bytes to `slices`.
    fn take(&mut self, mut len: usize, slices: &mut Vec<libc::iovec>) {
        while let [room, rest @ ..] = self.room
            && len > 0
        {
            let part = len.min(room.len() - self.offset);
            slices.push(libc::iovec {
                iov_base: room.as_ptr().wrapping_add(self.offset).cast(),
                iov_len: part,
            });
            (len, self.offset) = (len - part, self.offset + part);
            if self.offset == room.len() {
                (self.room, self.offset) = (rest, 0);
            }
        }
    }
}

/// What `recvmsg` said of a message.
#[derive(Clone, Copy, Debug)]
struct Message {
    source: Name,
    len: usize,
    segment: usize,
}

/// Receives into `slices`, whose memory has to be writable.
fn take(socket: &Socket, slices: &mut [libc::iovec], flags: libc::c_int) -> io::Result<Message> {
    /// Room for `UDP_GRO`'s `int`.
    #[repr(C)]
    struct Control {
        header: libc::cmsghdr,
        segment: libc::c_int,
        padding: libc::c_int,
    }
    let mut source = Name::unknown();
    // SAFETY: both are plain data of integers and pointers, for which all zeros is a value.
    let (mut control, mut header) =
        unsafe { (std::mem::zeroed::<Control>(), std::mem::zeroed::<libc::msghdr>()) };
    let mut errors = 0;
    loop {
        header.msg_name = source.as_mut_ptr().cast();
        header.msg_namelen = Name::unknown().len();
        header.msg_iov = slices.as_mut_ptr();
        header.msg_iovlen = slices.len();
        header.msg_control = (&raw mut control).cast();
        header.msg_controllen = size_of::<Control>();
        let fd = socket.as_fd().as_raw_fd();
        // SAFETY: the header points to a name, slices and a control message that are writable for the lengths it tells.
        match check(unsafe { libc::recvmsg(fd, &raw mut header, flags | libc::MSG_DONTWAIT) }) {
            Ok(len) => {
                let len = len as usize;
                let offered = header.msg_controllen >= size_of::<libc::cmsghdr>() + size_of::<libc::c_int>()
                    && control.header.cmsg_level == libc::SOL_UDP
                    && control.header.cmsg_type == libc::UDP_GRO;
                let segment = if offered { usize::try_from(control.segment).unwrap_or(0) } else { 0 };
                return Ok(Message { source, len, segment: if segment == 0 { len.max(1) } else { segment } });
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // An error of an earlier datagram (a peer that is not there yet, a path that is closed) is told once, before what
            // is waiting.
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EFAULT) => return Err(error),
                _ if errors == 2 => return Err(error),
                _ => errors += 1,
            },
        }
    }
}

#[cfg(test)]
#[path = "direct_tests.rs"]
mod tests;
