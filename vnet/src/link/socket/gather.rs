//! Datagrams gathered for one `sendmmsg`.
//!
//! A datagram is put together from bytes that are copied to scratch memory (headers, small frames) and from slices that
//! are not (the rest). Datagrams that follow each other join one *message*, which the kernel cuts again (`UDP_SEGMENT`),
//! as long as all have the same size but for a shorter last one: the fragments of a frame do so by themselves, and so do
//! whole frames of one size. A message that the kernel cannot cut is sent again datagram by datagram. A frame is *recorded*
//! with the messages its datagrams are in; it has gone out when all of its datagrams have.
//!
//! Nothing here waits: what does not fit into the socket's buffer is dropped, as any full queue on the way would. A wait
//! would hold up the other links and the guests of this host, which have no part in the congestion.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::Ordering::Relaxed;

use crate::frame::{Batch, Frame, Segment};
use crate::link::Link;
use crate::link::sealed::aead::{SealingKey, TAG_LEN};
use crate::link::socket::udp::{Name, Socket, check};
use crate::scratch::Scratch;
use crate::stats::{DropReason, PortStats};

/// Segments that every kernel with `UDP_SEGMENT` takes in a message; from Linux 6.9 on it would be 128, which matters only
/// below a path MTU of 1024.
const SEGMENTS_MAX: usize = 64;
/// Bytes of a message that is to be cut. Larger ones reach the devices' limit with their headers (udp.rs).
const MESSAGE_MAX: usize = 65_400;
/// `UIO_MAXIOV`.
const MESSAGE_SLICES_MAX: usize = 1024;
/// Messages gathered; `UIO_MAXIOV` is the kernel's limit.
const MESSAGES: usize = 512;
const SLICES: usize = 8192;
/// Holds the segments of several super-frames for encapsulations that carry none.
const SCRATCH: usize = 256 << 10;

/// A flush that ended early, because a datagram was larger than the path MTU: encode again from `position`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) struct TooBig {
    /// The first frame not sent (as it was recorded).
    pub(in crate::link) position: usize,
}

struct Message {
    first_slice: usize,
    slices: usize,
    bytes: usize,
    /// Size of its first datagram.
    segment: usize,
    datagrams: usize,
    /// Another datagram may join.
    open: bool,
    /// Its datagrams that went out; those behind them failed, if any did.
    sent: usize,
    failed: Option<DropReason>,
}

struct Record {
    position: usize,
    bytes: usize,
    first: usize,
    last: usize,
    /// Datagrams of the last message up to the end of the frame.
    end: usize,
}

/// A control message that holds `UDP_SEGMENT`'s 16-bit value.
#[repr(C)]
#[derive(Clone, Copy)]
struct Control {
    header: libc::cmsghdr,
    segment: u16,
    padding: [u8; 6],
}

const CONTROL_LEN: usize = size_of::<libc::cmsghdr>() + size_of::<u16>();

/// See the module's comment.
pub(in crate::link) struct Gather {
    /// Filled from the start on, up to `scratch_used`, while slices already point into what is filled.
    scratch: Scratch,
    scratch_used: usize,
    slices: Vec<libc::iovec>,
    messages: Vec<Message>,
    records: Vec<Record>,
    /// First slice of the datagram being put together, and its bytes.
    start: usize,
    bytes: usize,
    /// Whether datagrams join messages: what is known of the link that they are for.
    pub(in crate::link) segmentation: bool,
    headers: Vec<libc::mmsghdr>,
    controls: Vec<Control>,
}

// SAFETY: the pointers in `slices`, `headers` and `controls` are only used between the calls that gather and the flush that
// ends them, all through `&mut self`; a flushed one holds nothing that is used again.
unsafe impl Send for Gather {}

impl Gather {
    pub(in crate::link) fn new() -> Gather {
        Gather {
            scratch: Scratch::new(SCRATCH),
            scratch_used: 0,
            slices: Vec::with_capacity(SLICES),
            messages: Vec::with_capacity(MESSAGES),
            records: Vec::with_capacity(MESSAGES),
            start: 0,
            bytes: 0,
            segmentation: true,
            headers: Vec::with_capacity(MESSAGES),
            controls: Vec::with_capacity(MESSAGES),
        }
    }

    /// True when `datagrams` more fit, with `bytes` of copies and `slices` all together.
    #[inline]
    pub(in crate::link) fn has_room(&self, datagrams: usize, slices: usize, bytes: usize) -> bool {
        self.messages.len() + datagrams <= MESSAGES
            && self.slices.len() + slices <= SLICES
            && self.scratch_used + bytes <= SCRATCH
    }

    /// Adds a copy of `bytes` to the datagram.
    #[inline]
    pub(in crate::link) fn copy(&mut self, bytes: &[u8]) {
        self.next_scratch(bytes.len()).copy_from_slice(bytes);
        self.add_scratch(bytes.len());
    }

    /// Adds a copy of a whole frame to the datagram.
    #[inline]
    pub(in crate::link) fn copy_frame(&mut self, batch: &Batch, frame: &Frame) {
        batch.copy_to(frame, self.next_scratch(frame.len()));
        self.add_scratch(frame.len());
    }

    /// Adds `len` bytes that `fill` writes to the datagram.
    #[inline]
    pub(in crate::link) fn write(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) {
        fill(self.next_scratch(len));
        self.add_scratch(len);
    }

    /// Adds a copy of a slice of a frame to the datagram.
    #[inline]
    pub(in crate::link) fn copy_slice(&mut self, slice: Segment) {
        let to = self.next_scratch(slice.len());
        // SAFETY: the slice is one of a frame's, readable until its batch is cleared; the scratch memory is our own, so that
        // the two cannot overlap.
        unsafe { std::ptr::copy_nonoverlapping(slice.as_ptr(), to.as_mut_ptr(), slice.len()) };
        self.add_scratch(slice.len());
    }

    /// Seals the datagram being put together, all of which was copied, header first.
    #[inline]
    pub(in crate::link) fn seal(&mut self, key: &SealingKey) {
        let start = self.scratch_used - self.bytes;
        self.next_scratch(TAG_LEN);
        key.seal(self.scratch.bytes_mut(start..self.scratch_used));
        self.add_scratch(TAG_LEN);
    }

    /// The scratch memory's next `len` bytes.
    ///
    /// # Panics
    /// When there are not so many: ask [`Gather::has_room`] first.
    #[inline]
    fn next_scratch(&mut self, len: usize) -> &mut [u8] {
        let start = self.scratch_used;
        self.scratch_used += len;
        self.scratch.bytes_mut(start..start + len)
    }

    /// Adds the scratch memory's last `len` bytes, to the slice before when it ends there.
    #[inline]
    fn add_scratch(&mut self, len: usize) {
        let base = self.scratch.ptr(self.scratch_used - len).cast_mut();
        self.bytes += len;
        if self.slices.len() > self.start
            && let Some(last) = self.slices.last_mut()
            && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base
        {
            last.iov_len += len;
            return;
        }
        self.slices.push(libc::iovec { iov_base: base.cast(), iov_len: len });
    }

    /// Adds memory as it is to the datagram. It has to stay readable until the flush.
    #[inline]
    pub(in crate::link) fn slice(&mut self, segment: Segment) {
        self.bytes += segment.len();
        self.slices
            .push(libc::iovec { iov_base: segment.as_ptr().cast_mut().cast(), iov_len: segment.len() });
    }

    /// Ends the datagram and returns the index of its message. `within_mtu` is false when IP will have to fragment it, so
    /// that it must not be part of a message that is cut.
    #[inline]
    pub(in crate::link) fn end_datagram(&mut self, within_mtu: bool) -> usize {
        let (bytes, slices) = (self.bytes, self.slices.len() - self.start);
        let first_slice = std::mem::replace(&mut self.start, self.slices.len());
        self.bytes = 0;
        if let Some(message) = self.messages.last_mut()
            && message.open
            && within_mtu
            && bytes <= message.segment
            && message.datagrams < SEGMENTS_MAX
            && message.bytes + bytes <= MESSAGE_MAX
            && message.slices + slices <= MESSAGE_SLICES_MAX
        {
            message.slices += slices;
            message.bytes += bytes;
            message.datagrams += 1;
            message.open = bytes == message.segment;
        } else {
            let open = within_mtu && self.segmentation;
            let (segment, datagrams) = (bytes, 1);
            self.messages.push(Message {
                first_slice,
                slices,
                bytes,
                segment,
                datagrams,
                open,
                sent: 0,
                failed: None,
            });
        }
        self.messages.len() - 1
    }

    /// Notes a frame of `bytes` bytes whose datagrams are in the messages from `first` to `last`. `position` is what
    /// [`TooBig`] will call it.
    #[inline]
    pub(in crate::link) fn record(&mut self, position: usize, bytes: usize, first: usize, last: usize) {
        let end = self.messages[last].datagrams;
        self.records.push(Record { position, bytes, first, last, end });
    }

    /// Sends everything to `to`, which is the remote of `link`, counts each recorded frame as out or dropped, and starts again
    /// from nothing.
    ///
    /// With `may_stop`, a datagram that is larger than the path MTU ends it early: the frames before it are counted, those
    /// from [`TooBig::position`] on are not.
    pub(in crate::link) fn flush(
        &mut self,
        socket: &Socket,
        to: &Name,
        link: &Link,
        may_stop: bool,
    ) -> Result<(), TooBig> {
        if self.messages.is_empty() {
            return Ok(());
        }
        self.address(to);
        let tried = self.send(socket, link, may_stop);
        let stop = self.account(&link.stats, tried);
        self.scratch_used = 0;
        self.slices.clear();
        self.messages.clear();
        self.records.clear();
        self.start = 0;
        stop.map_or(Ok(()), |position| Err(TooBig { position }))
    }

    /// Makes the kernel's view of the messages.
    fn address(&mut self, to: &Name) {
        self.headers.clear();
        self.controls.clear();
        for message in &self.messages {
            let slices = &mut self.slices[message.first_slice..][..message.slices];
            // SAFETY: `msghdr` is plain data for which all zeros is a value; libc hides its padding, so that it cannot be
            // written as a literal.
            let mut header = unsafe { std::mem::zeroed::<libc::msghdr>() };
            header.msg_name = to.as_ptr().cast_mut().cast();
            header.msg_namelen = to.len();
            header.msg_iov = slices.as_mut_ptr();
            header.msg_iovlen = slices.len();
            if message.datagrams > 1 {
                self.controls.push(Control {
                    header: libc::cmsghdr {
                        cmsg_len: CONTROL_LEN,
                        cmsg_level: libc::SOL_UDP,
                        cmsg_type: libc::UDP_SEGMENT,
                    },
                    segment: message.segment as u16,
                    padding: [0; 6],
                });
                header.msg_controllen = size_of::<Control>();
            }
            self.headers.push(libc::mmsghdr { msg_hdr: header, msg_len: 0 });
        }
        // Only now do the control messages stay where they are.
        let mut controls = self.controls.iter_mut();
        for header in self.headers.iter_mut().filter(|header| header.msg_hdr.msg_controllen != 0) {
            header.msg_hdr.msg_control =
                controls.next().map_or(std::ptr::null_mut(), |c| (&raw mut *c).cast());
        }
    }

    /// Sends the messages and marks those that failed. Returns how many were tried: all, unless it stops early.
    fn send(&mut self, socket: &Socket, link: &Link, may_stop: bool) -> usize {
        let fd = socket.as_fd().as_raw_fd();
        let mut next = 0;
        while next < self.headers.len() {
            let rest = &mut self.headers[next..];
            // SAFETY: every header points to a name, slices and a control message that live in `self` or the caller's
            // arguments, and whose lengths it tells; the memory that the slices tell of is kept readable until the flush.
            let sent = unsafe { libc::sendmmsg(fd, rest.as_mut_ptr(), rest.len() as libc::c_uint, 0) };
            if sent > 0 {
                let sent = sent as usize;
                self.messages[next..next + sent]
                    .iter_mut()
                    .for_each(|message| message.sent = message.datagrams);
                next += sent;
                continue;
            }
            let mut error = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            let cut = self.messages[next].datagrams > 1;
            // EINVAL: what EMSGSIZE was for messages that are cut, before Linux 6.14.
            let too_big = error == libc::EMSGSIZE || (error == libc::EINVAL && cut);
            if error == libc::EINTR {
                continue;
            }
            if too_big && may_stop {
                return next;
            }
            if too_big {
                link.refresh_soon();
            }
            if error == libc::EIO && cut {
                self.segmentation = false;
                link.segmentation.store(false, Relaxed);
            }
            if cut && (too_big || error == libc::EIO) {
                error = self.send_uncut(fd, next);
            }
            let reason = match error {
                0 => {
                    next += 1;
                    continue;
                }
                libc::EMSGSIZE => DropReason::MtuExceeded,
                libc::EAGAIN => DropReason::NoBuffer,
                _ => DropReason::SendFailed,
            };
            // A full socket buffer will not take the rest either.
            let until = if error == libc::EAGAIN { self.messages.len() } else { next + 1 };
            self.messages[next..until].iter_mut().for_each(|message| message.failed = Some(reason));
            next = until;
        }
        next
    }

    /// Sends the datagrams of a message one by one, up to the first that fails. Returns its error, or 0.
    #[cold]
    fn send_uncut(&mut self, fd: libc::c_int, index: usize) -> libc::c_int {
        let message = &mut self.messages[index];
        let mut header = self.headers[index].msg_hdr;
        header.msg_control = std::ptr::null_mut();
        header.msg_controllen = 0;
        let mut slices = &mut self.slices[message.first_slice..][..message.slices];
        while message.sent < message.datagrams {
            // No slice is part of two datagrams.
            let (mut count, mut bytes) = (0, 0);
            while count < slices.len() && bytes < message.segment {
                bytes += slices[count].iov_len;
                count += 1;
            }
            header.msg_iov = slices.as_mut_ptr();
            header.msg_iovlen = count;
            // SAFETY: the header is one of `send`, told of fewer slices and no control message.
            while let Err(error) = check(unsafe { libc::sendmsg(fd, &raw const header, 0) }) {
                if error.kind() != io::ErrorKind::Interrupted {
                    return error.raw_os_error().unwrap_or(libc::EIO);
                }
            }
            message.sent += 1;
            slices = &mut slices[count..];
        }
        0
    }

    /// Counts the frames whose messages are all among the first `tried`. Returns the position of the first other one.
    fn account(&mut self, stats: &PortStats, tried: usize) -> Option<usize> {
        let (mut frames, mut bytes, mut stop) = (0, 0, None);
        for record in &self.records {
            if record.last >= tried {
                stop = Some(record.position);
                break;
            }
            let last = &self.messages[record.last];
            // What failed of a message is its end, and so is what a frame that goes on in the next one has of it.
            let before = &self.messages[record.first..record.last];
            let failed = before.iter().find_map(|message| message.failed);
            match failed.or(last.failed.filter(|_| record.end > last.sent)) {
                None => {
                    frames += 1;
                    bytes += record.bytes as u64;
                }
                Some(reason) => stats.drop_frames(reason, 1),
            }
        }
        stats.delivered(frames, bytes);
        stats.out_datagrams.add(self.messages.iter().map(|message| message.sent as u64).sum());
        stop
    }
}
