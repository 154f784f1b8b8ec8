//! Gathers datagrams for one `sendmmsg`.
//!
//! A datagram consists of bytes copied to scratch memory (headers, small frames) and slices that stay in place (the rest).
//! Consecutive datagrams join one *message*, which the kernel segments again (`UDP_SEGMENT`), as long as all have equal size
//! except a shorter last one: true for a frame's fragments, and for whole frames of one size. A message that the kernel refuses
//! to segment is sent again datagram by datagram. A frame is *recorded* with the messages of its datagrams; it is sent when all
//! of them are.
//!
//! Sending never waits: datagrams that do not fit into the socket's buffer are dropped, as at any full queue on the path. Waiting
//! would delay other links and this host's guests, which do not cause the congestion.

use super::message::Outgoing;
use super::name::Name;
use super::udp::Socket;
use crate::frame::{Batch, DropSink, Frame, Segment};
use crate::scratch::Scratch;
use crate::stats::{DropReason, PortStats};

/// Number of segments per message that every kernel with `UDP_SEGMENT` accepts. Linux 6.9 and later accept 128, which matters
/// only below a path MTU of 1024.
const GSO_DATAGRAMS_MAX: usize = 64;
/// Maximum number of bytes of a segmented message. Larger ones, with their headers, reach the device's limit
/// ([`udp`](super::udp)).
const MESSAGE_MAX: usize = 65_400;
/// Maximum number of slices of a message (`UIO_MAXIOV`).
const MESSAGE_SLICES_MAX: usize = 1024;
/// Maximum number of messages gathered; the kernel's limit is `UIO_MAXIOV`.
const MESSAGES: usize = 512;
const SLICES: usize = 8192;
/// Size of the scratch memory in bytes: several segmented super-frames, for encapsulations without offload metadata.
const SCRATCH: usize = 256 << 10;

/// Socket, destination and counters of a flush.
pub(in crate::link) struct Exit<'a> {
    /// The sending socket.
    pub(in crate::link) socket: &'a Socket,
    /// The destination.
    pub(in crate::link) to: &'a Name,
    /// The link's counters.
    pub(in crate::link) stats: &'a PortStats,
}

/// What a flush found out about the path.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::link) struct Flushed {
    /// `Some` if the flush stopped early because a datagram exceeded the path MTU: encode again from this frame on.
    pub(in crate::link) stopped_at: Option<u16>,
    /// True if a datagram exceeded the path MTU.
    pub(in crate::link) too_big: bool,
    /// True if the path's device does not segment messages.
    pub(in crate::link) no_segmentation: bool,
}

struct GsoMessage {
    first_slice: usize,
    slices: usize,
    bytes: usize,
    /// Size of the message's first datagram.
    segment: usize,
    datagrams: usize,
    /// True if another datagram may join.
    open: bool,
    /// Number of datagrams sent; those after them failed.
    sent: usize,
    failed: Option<DropReason>,
}

struct Record {
    /// Index of the frame in the batch.
    frame: u16,
    bytes: usize,
    first: usize,
    last: usize,
    /// Number of datagrams of the last message up to the end of the frame.
    end: usize,
}

/// The gathered datagrams of one flush.
pub(in crate::link) struct Gather {
    /// Scratch memory, filled from the start up to `scratch_used`; slices point into the filled part.
    scratch: Scratch,
    scratch_used: usize,
    slices: Vec<libc::iovec>,
    messages: Vec<GsoMessage>,
    records: Vec<Record>,
    /// First slice of the current datagram, and the datagram's bytes.
    start: usize,
    bytes: usize,
    /// True if datagrams join messages, because the device of the link's path is believed to segment.
    pub(in crate::link) segmentation: bool,
    outgoing: Outgoing,
}

// SAFETY: the pointers in `slices` are used only between the calls that gather and the flush that ends them, all through `&mut
// self`; after a flush no pointer is used again.
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
            outgoing: Outgoing::new(MESSAGES),
        }
    }

    /// True when `datagrams` more datagrams fit, with `bytes` of copies and `slices` slices in total.
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

    /// Adds `len` bytes, written by `fill`, to the datagram.
    #[inline]
    pub(in crate::link) fn write(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) {
        fill(self.next_scratch(len));
        self.add_scratch(len);
    }

    /// Adds a copy of a slice of a frame to the datagram.
    #[inline]
    pub(in crate::link) fn copy_slice(&mut self, slice: Segment) {
        let to = self.next_scratch(slice.len());
        // SAFETY: the slice belongs to a frame and is readable until its batch is cleared; the scratch memory belongs to this
        // value, so the two cannot overlap.
        unsafe { std::ptr::copy_nonoverlapping(slice.as_ptr(), to.as_mut_ptr(), slice.len()) };
        self.add_scratch(slice.len());
    }

    /// Encrypts the current datagram in place with `encrypt`; all of it must have been copied. Appends `tag_len` bytes.
    #[inline]
    pub(in crate::link) fn encrypt(&mut self, tag_len: usize, encrypt: impl FnOnce(&mut [u8])) {
        let start = self.scratch_used - self.bytes;
        self.next_scratch(tag_len);
        encrypt(self.scratch.bytes_mut(start..self.scratch_used));
        self.add_scratch(tag_len);
    }

    /// The next `len` bytes of scratch memory.
    ///
    /// # Panics
    /// When fewer are left; call [`Gather::has_room`] first.
    #[inline]
    fn next_scratch(&mut self, len: usize) -> &mut [u8] {
        let start = self.scratch_used;
        self.scratch_used += len;
        self.scratch.bytes_mut(start..start + len)
    }

    /// Adds the last `len` bytes of scratch memory; extends the previous slice if it is adjacent.
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

    /// Adds memory to the datagram without copying. The memory must stay readable until the flush.
    #[inline]
    pub(in crate::link) fn slice(&mut self, segment: Segment) {
        self.bytes += segment.len();
        self.slices
            .push(libc::iovec { iov_base: segment.as_ptr().cast_mut().cast(), iov_len: segment.len() });
    }

    /// Ends the datagram and returns the index of its message. With `within_mtu` false, IP will fragment the datagram, so it must
    /// not join a segmented message.
    #[inline]
    pub(in crate::link) fn end_datagram(&mut self, within_mtu: bool) -> usize {
        let (bytes, slices) = (self.bytes, self.slices.len() - self.start);
        let first_slice = std::mem::replace(&mut self.start, self.slices.len());
        self.bytes = 0;
        if let Some(message) = self.messages.last_mut()
            && message.open
            && within_mtu
            && bytes <= message.segment
            && message.datagrams < GSO_DATAGRAMS_MAX
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
            self.messages.push(GsoMessage {
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

    /// Records frame `frame` of the batch, `bytes` long, with its messages from `first` to `last`.
    #[inline]
    pub(in crate::link) fn record(&mut self, frame: u16, bytes: usize, first: usize, last: usize) {
        let end = self.messages[last].datagrams;
        self.records.push(Record { frame, bytes, first, last, end });
    }

    /// Sends everything through `exit`, counts each recorded frame as sent or dropped, and clears the gather.
    ///
    /// With `may_stop`, the first datagram that exceeds the path MTU ends the flush: frames before [`Flushed::stopped_at`] are
    /// counted, the others are not.
    pub(in crate::link) fn flush(
        &mut self,
        exit: &Exit<'_>,
        drops: &mut DropSink,
        may_stop: bool,
    ) -> Flushed {
        let mut flushed = Flushed::default();
        if self.messages.is_empty() {
            return flushed;
        }
        self.outgoing.clear();
        for message in &self.messages {
            let slices = &mut self.slices[message.first_slice..][..message.slices];
            let segment = (message.datagrams > 1).then_some(message.segment as u16);
            self.outgoing.push(exit.to, slices, segment);
        }
        let tried = self.send(exit.socket, may_stop, &mut flushed);
        flushed.stopped_at = self.account(exit.stats, drops, tried);
        self.scratch_used = 0;
        self.slices.clear();
        self.messages.clear();
        self.records.clear();
        self.start = 0;
        flushed
    }

    /// Sends the messages and marks failed ones. Returns how many messages were tried: all, unless it stops early.
    fn send(&mut self, socket: &Socket, may_stop: bool, flushed: &mut Flushed) -> usize {
        let mut next = 0;
        while next < self.messages.len() {
            // SAFETY: names and slices live in `self` or in `flush`'s arguments; the memory that the slices describe stays
            // readable until the flush ends (contract of `slice`).
            let refused = match unsafe { self.outgoing.send(socket, next) } {
                Ok(sent) => {
                    let sent = &mut self.messages[next..next + sent];
                    sent.iter_mut().for_each(|message| message.sent = message.datagrams);
                    next += sent.len();
                    continue;
                }
                Err(error) => error.raw_os_error().unwrap_or(libc::EIO),
            };
            if refused == libc::EINTR {
                continue;
            }
            let cut = self.messages[next].datagrams > 1;
            // EINVAL: before Linux 6.14, returned instead of EMSGSIZE for segmented messages; also for a socket without
            // checksums.
            let uncut = refused == libc::EIO || refused == libc::EINVAL || !may_stop;
            flushed.no_segmentation |= refused == libc::EIO && cut;
            self.segmentation &= !(refused == libc::EIO && cut);
            flushed.too_big |= refused == libc::EMSGSIZE || (refused == libc::EINVAL && cut);
            let is_size = matches!(refused, libc::EIO | libc::EINVAL | libc::EMSGSIZE);
            let error = if cut && is_size && uncut { self.send_uncut(socket, next) } else { refused };
            flushed.too_big |= error == libc::EMSGSIZE;
            if error == libc::EMSGSIZE && may_stop && self.messages[next].sent == 0 {
                return next;
            }
            if error == 0 {
                next += 1;
                continue;
            }
            let reason = DropReason::of_refusal(error);
            // A full socket buffer will also refuse the rest.
            let until = if error == libc::EAGAIN { self.messages.len() } else { next + 1 };
            self.messages[next..until].iter_mut().for_each(|message| message.failed = Some(reason));
            next = until;
        }
        next
    }

    /// Sends a message's datagrams one by one until one fails. Returns that error, or 0.
    #[cold]
    fn send_uncut(&mut self, socket: &Socket, index: usize) -> libc::c_int {
        let message = &mut self.messages[index];
        let mut slices = &mut self.slices[message.first_slice..][..message.slices];
        while message.sent < message.datagrams {
            // No slice spans two datagrams.
            let (mut count, mut bytes) = (0, 0);
            while count < slices.len() && bytes < message.segment {
                bytes += slices[count].iov_len;
                count += 1;
            }
            // SAFETY: as in `send`; these are some of the slices that were pushed.
            if let Err(error) = unsafe { self.outgoing.send_apart(socket, index, &mut slices[..count]) } {
                return error.raw_os_error().unwrap_or(libc::EIO);
            }
            message.sent += 1;
            slices = &mut slices[count..];
        }
        0
    }

    /// Counts the frames whose messages are all among the first `tried`. Returns the first other frame.
    fn account(&mut self, stats: &PortStats, drops: &mut DropSink, tried: usize) -> Option<u16> {
        let (mut frames, mut bytes, mut stop) = (0, 0, None);
        for record in &self.records {
            if record.last >= tried {
                stop = Some(record.frame);
                break;
            }
            let last = &self.messages[record.last];
            // Failed datagrams are at the end of a message, and so is the start of a frame that continues in the next message.
            let before = &self.messages[record.first..record.last];
            let failed = before.iter().find_map(|message| message.failed);
            match failed.or(last.failed.filter(|_| record.end > last.sent)) {
                None => {
                    frames += 1;
                    bytes += record.bytes as u64;
                }
                Some(reason) => drops.dropped(stats, reason, record.frame, 1),
            }
        }
        stats.delivered(frames, bytes);
        stats.out_datagrams.add(self.messages.iter().map(|message| message.sent as u64).sum());
        stop
    }
}
