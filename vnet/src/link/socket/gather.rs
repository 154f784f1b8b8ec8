//! Gathers datagrams for one `sendmmsg`.
//!
//! A datagram is put together from bytes copied to scratch memory (headers, small frames) and from slices that stay where they
//! are (the rest). Consecutive datagrams join one *message*, which the kernel cuts again (`UDP_SEGMENT`), as long as all have
//! the same size but for a shorter last one: the fragments of a frame do so by themselves, and so do whole frames of one size.
//! A message that the kernel refuses to cut is sent again datagram by datagram. A frame is *recorded* with the messages its
//! datagrams are in; it has gone out when all of its datagrams have.
//!
//! Nothing here waits: what does not fit into the socket's buffer is dropped, as at any full queue on the path. Waiting would
//! hold up the other links and the guests of this host, which have no part in the congestion.

use super::message::Outgoing;
use super::name::Name;
use super::udp::Socket;
use crate::frame::{Batch, DropSink, Frame, Segment};
use crate::scratch::Scratch;
use crate::stats::{DropReason, PortStats};

/// Segments that every kernel with `UDP_SEGMENT` takes in a message; from Linux 6.9 on it would be 128, which matters only
/// below a path MTU of 1024.
const GSO_DATAGRAMS_MAX: usize = 64;
/// Bytes of a message that is to be cut. Larger ones reach the devices' limit with their headers ([`udp`](super::udp)).
const MESSAGE_MAX: usize = 65_400;
/// `UIO_MAXIOV`.
const MESSAGE_SLICES_MAX: usize = 1024;
/// Messages gathered; `UIO_MAXIOV` is the kernel's limit.
const MESSAGES: usize = 512;
const SLICES: usize = 8192;
/// Holds the segments of several super-frames for encapsulations that carry none.
const SCRATCH: usize = 256 << 10;

/// Where datagrams go, and what is counted and told on the way.
pub(in crate::link) struct Exit<'a> {
    /// What they leave by.
    pub(in crate::link) socket: &'a Socket,
    /// Where to.
    pub(in crate::link) to: &'a Name,
    /// The link's counters.
    pub(in crate::link) stats: &'a PortStats,
}

/// What a flush found out about the path.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::link) struct Flushed {
    /// Set when it ended early, because a datagram was larger than the path MTU: encode again from this frame on.
    pub(in crate::link) stopped_at: Option<u16>,
    /// A datagram was larger than the path MTU.
    pub(in crate::link) too_big: bool,
    /// The path's device does not cut messages.
    pub(in crate::link) no_segmentation: bool,
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
    /// Index in the batch.
    frame: u16,
    bytes: usize,
    first: usize,
    last: usize,
    /// Datagrams of the last message up to the end of the frame.
    end: usize,
}

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
    /// Whether datagrams join messages: whether the device of the link's path is known to cut them.
    pub(in crate::link) segmentation: bool,
    outgoing: Outgoing,
}

// SAFETY: the pointers in `slices` are used only between the calls that gather and the flush that ends them, all through
// `&mut self`; a flushed one holds nothing that is used again.
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

    /// Has `encrypt` work on the datagram being put together, all of which was copied, with `tag_len` bytes more at its end.
    #[inline]
    pub(in crate::link) fn encrypt(&mut self, tag_len: usize, encrypt: impl FnOnce(&mut [u8])) {
        let start = self.scratch_used - self.bytes;
        self.next_scratch(tag_len);
        encrypt(self.scratch.bytes_mut(start..self.scratch_used));
        self.add_scratch(tag_len);
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

    /// Records frame `frame` of the batch, `bytes` long, whose datagrams are in the messages from `first` to `last`.
    #[inline]
    pub(in crate::link) fn record(&mut self, frame: u16, bytes: usize, first: usize, last: usize) {
        let end = self.messages[last].datagrams;
        self.records.push(Record { frame, bytes, first, last, end });
    }

    /// Sends everything by `exit`, counts each recorded frame as out or dropped, and starts again from nothing.
    ///
    /// With `may_stop`, a datagram larger than the path MTU ends it early: the frames before it are counted, those from
    /// [`Flushed::stopped_at`] on are not.
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

    /// Sends the messages and marks those that failed. Returns how many were tried: all, unless it stops early.
    fn send(&mut self, socket: &Socket, may_stop: bool, flushed: &mut Flushed) -> usize {
        let mut next = 0;
        while next < self.messages.len() {
            // SAFETY: names and slices live in `self` or in `flush`'s arguments; the memory that the slices tell of is kept
            // readable until the flush is over (contract of `slice`).
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
            // EINVAL: what EMSGSIZE was for messages that are cut, before Linux 6.14; also for a socket without checksums.
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
    fn send_uncut(&mut self, socket: &Socket, index: usize) -> libc::c_int {
        let message = &mut self.messages[index];
        let mut slices = &mut self.slices[message.first_slice..][..message.slices];
        while message.sent < message.datagrams {
            // No slice is part of two datagrams.
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

    /// Counts the frames whose messages are all among the first `tried`. Returns the first other one.
    fn account(&mut self, stats: &PortStats, drops: &mut DropSink, tried: usize) -> Option<u16> {
        let (mut frames, mut bytes, mut stop) = (0, 0, None);
        for record in &self.records {
            if record.last >= tried {
                stop = Some(record.frame);
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
                Some(reason) => drops.dropped(stats, reason, record.frame, 1),
            }
        }
        stats.delivered(frames, bytes);
        stats.out_datagrams.add(self.messages.iter().map(|message| message.sent as u64).sum());
        stop
    }
}
