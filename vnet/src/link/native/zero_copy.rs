//! Zero-copy send from guest memory (`MSG_ZEROCOPY`, Documentation/networking/msg_zerocopy.rst): the send side of cut-through
//! forwarding (VNET/P+ section IV.B).
//!
//! ```text
//!   frame of a guest:  head (copied)   slices of the guest's pages
//!                          |                 |
//!   slot:  header + head, header, ...        |            one Hold of the frame a message
//!                |                           |
//!            sendmsg(MSG_ZEROCOPY)  ---> message n: the kernel holds the pages of both
//!                ...
//!   error queue: "n to m have been sent [copied after all]"  ---> slots are free, holds let go: the guest gets its buffers
//! ```
//!
//! The kernel may read *all* of a message, prepared headers included, at any time until completion. Copied and uncopied bytes
//! cannot be mixed in one datagram: with several calls per datagram (`MSG_MORE`) the kernel copies everything. So headers and
//! heads live in a *slot* of a pool until the message completes. An skb holds [`SKB_PIECES_MAX`] page fragments; each header
//! takes one, each slice one per page it touches. Zero copy pays off for large datagrams (on an underlay with jumbo frames); on a
//! path of 1500 bytes a message holds about five datagrams, which costs more than the copy saves. Hence [`ZeroCopy::Auto`].
//!
//! The kernel numbers successful calls per socket from 0 on. A call that fails late may also have taken a number; its
//! notification is then in the error queue when the call returns, so that queue is read after each error. A vnetd that takes over goes on
//! with the number of each socket (`vnetd --take-over`): otherwise it would wait for completions that have other numbers.
//!
//! A send never waits. Frames without a slot, or beyond the kernel's accounting (`ENOBUFS`: net.core.optmem_max, RLIMIT_MEMLOCK),
//! are copied.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::encode::{Cursor, Route, header};
use super::zero_copy_backoff::Trial;
use crate::frame::{HEAD_MAX, Hold, Segment};
use crate::link::sending::Sending;
use crate::link::socket::error_queue::notification;
use crate::link::socket::message::send_message;
use crate::link::socket::udp::{Socket, set};
use crate::stats::DropReason;
use crate::wire::native::HEADER_LEN;
use crate::wire::offload::WIRE_LEN;

/// Maximum number of page fragments in one skb (`MAX_SKB_FRAGS`; some kernels are built with more).
const SKB_PIECES_MAX: usize = 17;
/// Maximum number of datagrams per message: each has at least a header and a byte of payload.
const DATAGRAMS_MAX: usize = SKB_PIECES_MAX.div_ceil(2);
/// Maximum number of bytes per message, as in send_batch.rs.
const MESSAGE_MAX: usize = 65_400;
/// Maximum number of messages per frame: a frame that needs more is copied.
const MESSAGES_MAX: usize = 64;
const PAGE: usize = 4096;
/// Size of a slot in bytes: the headers of a message and one head. Slots do not cross pages.
const SLOT_LEN: usize = 512;
const _: () =
    assert!(DATAGRAMS_MAX * HEADER_LEN + WIRE_LEN + HEAD_MAX <= SLOT_LEN && PAGE.is_multiple_of(SLOT_LEN));
/// Number of slots of a sender, which bounds its messages in flight: 64 MB of frames, as the largest send buffer holds.
const SLOTS: usize = 2048;
/// Minimum length of a frame in bytes, even with [`ZeroCopy::On`]: for smaller frames, pinning pages and reading completions
/// costs more than a copy.
const ON_FRAME_MIN: usize = 8 << 10;
/// Minimum number of bytes per message with [`ZeroCopy::Auto`].
const AUTO_MESSAGE_MIN: usize = 16 << 10;
/// How long a closing sender waits for the kernel to release its slots.
const END_WITHIN: Duration = Duration::from_millis(100);

/// Zero-copy transmission of guest memory.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
pub enum ZeroCopy {
    /// Where it pays off: for large datagrams, unless the link's device makes the kernel copy anyway.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Every frame of 8 KiB or more.
    On,
}

/// Outcome of sending a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The frame is counted as sent or dropped.
    Done,
    /// The frame must be sent by copying.
    Copy,
}

/// A message that the kernel may still read.
struct InFlight {
    /// Holds the frame's memory; released on drop.
    _hold: Hold,
    slot: u16,
    trial: Arc<Trial>,
}

/// One socket's messages in flight, by the kernel's numbers.
struct Flight {
    socket: Arc<Socket>,
    /// Number of the first message.
    first: u32,
    /// `None`: completed, or the number of a failed call.
    messages: VecDeque<Option<InFlight>>,
    /// True if the socket supports `MSG_ZEROCOPY`.
    able: bool,
}

impl Flight {
    /// Completes messages `low` to `high`; passes those that were in flight to `done`.
    fn complete(&mut self, low: u32, high: u32, mut done: impl FnMut(InFlight)) {
        self.begin();
        let count = high.wrapping_sub(low).saturating_add(1) as usize;
        // Failed calls may have taken numbers beyond the last one: the next message follows them.
        let bound = self.messages.len() + SLOTS;
        for index in
            (0..count.min(bound)).map(|n| low.wrapping_add(n as u32).wrapping_sub(self.first) as usize)
        {
            if index >= bound {
                continue;
            }
            while index >= self.messages.len() {
                self.messages.push_back(None);
            }
            self.messages[index].take().into_iter().for_each(&mut done);
        }
        while let Some(None) = self.messages.front() {
            self.messages.pop_front();
            self.first = self.first.wrapping_add(1);
        }
        self.note();
    }

    /// Adds a message that the kernel has just taken.
    fn push(&mut self, message: InFlight) {
        self.begin();
        self.messages.push_back(Some(message));
        self.note();
    }

    /// The first message in flight has the socket's next number: another vnetd may have sent messages on it before.
    fn begin(&mut self) {
        if self.messages.is_empty() {
            self.first = self.socket.zero_copies();
        }
    }

    fn note(&self) {
        self.socket.set_zero_copies(self.first.wrapping_add(self.messages.len() as u32));
    }
}

/// Page-aligned memory that does not move, so no slot crosses a page.
#[repr(C, align(4096))]
#[derive(Clone, Copy)]
struct Page([u8; PAGE]);

/// The memory of a sender's slots.
struct Pool {
    pages: *mut [Page],
    free: Vec<u16>,
}

// SAFETY: this value owns the allocation.
unsafe impl Send for Pool {}

impl Pool {
    fn new() -> Pool {
        let pages = vec![Page([0; PAGE]); SLOTS * SLOT_LEN / PAGE].into_boxed_slice();
        Pool { pages: Box::into_raw(pages), free: (0..SLOTS as u16).collect() }
    }

    /// Pointer to byte `offset` of a slot.
    fn ptr(&self, slot: u16, offset: usize) -> *mut u8 {
        debug_assert!(usize::from(slot) < SLOTS && offset <= SLOT_LEN);
        self.pages.cast::<u8>().wrapping_add(usize::from(slot) * SLOT_LEN + offset)
    }
}

/// Sends frames from guest memory without copying; shared by all sockets of a sender.
pub(super) struct CutThrough {
    setting: ZeroCopy,
    /// Allocated for the first frame.
    pool: Option<Pool>,
    /// Messages in flight by exit.
    flights: Vec<Flight>,
    /// True if completions were read since the last [`CutThrough::reap`].
    reaped: bool,
    /// The frame being assembled.
    draft: Draft,
}

/// One frame, split into messages.
#[derive(Default)]
struct Draft {
    slices: Vec<libc::iovec>,
    messages: Vec<Part>,
}

// SAFETY: the pointers are used only within the call that creates them.
unsafe impl Send for Draft {}

/// One message of a frame.
struct Part {
    slot: u16,
    /// Number of used bytes of the slot.
    used: usize,
    first_slice: usize,
    slices: usize,
    bytes: usize,
    segment: usize,
    datagrams: usize,
    fragments: usize,
}

impl CutThrough {
    /// Creates a sender that copies until [`CutThrough::configure`].
    pub(super) fn new(sockets: &[Arc<Socket>]) -> CutThrough {
        let flight = |socket: &Arc<Socket>| Flight {
            socket: socket.clone(),
            first: 0,
            messages: VecDeque::new(),
            able: false,
        };
        CutThrough {
            setting: ZeroCopy::Off,
            pool: None,
            flights: sockets.iter().map(flight).collect(),
            reaped: false,
            draft: Draft::default(),
        }
    }

    /// Enables zero copy on the sockets according to `setting`.
    pub(super) fn configure(&mut self, setting: ZeroCopy) {
        self.setting = setting;
        if setting == ZeroCopy::Off {
            return;
        }
        for flight in &mut self.flights {
            let set = set(&*flight.socket, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1);
            flight.able = set.is_ok();
            if let Err(error) = set {
                tracing::warn!(%error, "the kernel has no zero copy for UDP; frames are copied");
            }
        }
    }

    /// True when zero copy is worthwhile for frame `index` in datagrams of `size` bytes of payload.
    #[inline]
    pub(super) fn wants(&self, route: &Route<'_>, out: &Sending<'_>, index: u16, size: usize) -> bool {
        let frame = out.frame(index);
        self.setting != ZeroCopy::Off
            && frame.len() >= ON_FRAME_MIN
            && out.batch.can_hold(frame)
            && self.flights[route.exit].able
            && (self.setting == ZeroCopy::On
                || (message_bytes(frame.len(), size) >= AUTO_MESSAGE_MIN && route.trial.allows()))
    }

    /// Sends one clear-text frame in datagrams of at most `size` bytes of payload.
    pub(super) fn send(
        &mut self,
        route: &Route<'_>,
        out: &mut Sending<'_>,
        index: u16,
        size: usize,
    ) -> Outcome {
        let mut draft = std::mem::take(&mut self.draft);
        let outcome = if self.put(&mut draft, out, index, size) {
            self.send_draft(&mut draft, route, out, index)
        } else {
            out.link.stats.zero_copy.fallen_back.add(1);
            Outcome::Copy
        };
        let free = &mut self.pool.get_or_insert_with(Pool::new).free;
        free.extend(draft.messages.drain(..).map(|part| part.slot));
        draft.slices.clear();
        self.draft = draft;
        outcome
    }

    /// Assembles the frame. Returns false when slots run out or a datagram has too many page fragments.
    fn put(&mut self, draft: &mut Draft, out: &Sending<'_>, index: u16, size: usize) -> bool {
        let (link, batch, frame) = (out.link, out.batch, out.frame(index));
        let pool = self.pool.get_or_insert_with(Pool::new);
        // Maximum size of a datagram that fits into one message.
        let size = size.min((SKB_PIECES_MAX - 4) * PAGE);
        let mut header = header(frame, None, 0);
        let metadata = if header.offload { WIRE_LEN } else { 0 };
        let count = (frame.len() + metadata).div_ceil(size);
        header.number = link.take_numbers(count as u64);
        let mut cursor = Cursor { segments: batch.segments(frame), offset: 0 };
        for k in 0..count {
            header.index = k as u16;
            header.last = k + 1 == count;
            let (mut prefix, mut prefix_len) = ([0; HEADER_LEN + WIRE_LEN], HEADER_LEN);
            prefix[..HEADER_LEN].copy_from_slice(&header.to_bytes());
            if header.offload {
                prefix[HEADER_LEN..].copy_from_slice(&frame.offload.to_wire());
                prefix_len += WIRE_LEN;
            }
            let len = size + HEADER_LEN - prefix_len;
            let start = draft.slices.len();
            let (mut bytes, mut fragments) = (prefix_len, 1);
            // Filled in once the message, and so its slot, is chosen.
            draft.slices.push(libc::iovec { iov_base: std::ptr::null_mut(), iov_len: prefix_len });
            let mut head = (k == 0).then_some(batch.head(frame));
            cursor.take(len, |slice| {
                bytes += slice.len();
                match head.take() {
                    // The first segment is the private copy of the frame's head.
                    Some(_) => draft.slices[start].iov_len += slice.len(),
                    None => {
                        fragments += pages(slice);
                        let base = slice.as_ptr().cast_mut().cast();
                        draft.slices.push(libc::iovec { iov_base: base, iov_len: slice.len() });
                    }
                }
            });
            let copied = draft.slices[start].iov_len;
            let Some(to) = draft.datagram(pool, start, bytes, fragments, copied) else { return false };
            draft.slices[start].iov_base = to.cast();
            // SAFETY: `copied` bytes from `to` on lie inside the slot, which only this message uses; they are the prefix and,
            // behind it, the first bytes of the head, which a batch keeps readable.
            unsafe {
                std::ptr::copy_nonoverlapping(prefix.as_ptr(), to, prefix_len);
                let head = batch.head(frame).as_ptr();
                std::ptr::copy_nonoverlapping(head, to.add(prefix_len), copied - prefix_len);
            }
            header.number += 1;
            header.offload = false;
        }
        true
    }

    fn send_draft(
        &mut self,
        draft: &mut Draft,
        route: &Route<'_>,
        out: &mut Sending<'_>,
        index: u16,
    ) -> Outcome {
        let (stats, batch, frame) = (&*out.link.stats, out.batch, out.frame(index));
        let mut sent = 0;
        while !draft.messages.is_empty() {
            let part = &draft.messages[0];
            let slices = &mut draft.slices[part.first_slice..][..part.slices];
            let Some(hold) = batch.hold(frame) else { return Outcome::Copy };
            let segment = (part.datagrams > 1).then_some(part.segment as u16);
            // SAFETY: the slices point into the part's slot, which is not written to until the message completes, and into the
            // frame's memory, which the batch keeps readable; the kernel holds the pages that it reads later.
            let first =
                unsafe { send_message(route.socket, route.name, slices, segment, libc::MSG_ZEROCOPY) };
            let result = match first {
                Ok(()) => {
                    let part = draft.messages.remove(0);
                    sent += part.datagrams as u64;
                    stats.zero_copy.sent.add(1);
                    let message = InFlight { _hold: hold, slot: part.slot, trial: route.trial.clone() };
                    self.flights[route.exit].push(message);
                    continue;
                }
                Err(error) => {
                    drop(hold);
                    // The failed call may have taken a number.
                    self.reap_exit(route.exit);
                    match error.raw_os_error() {
                        // SAFETY: as above; the kernel reads nothing after the call.
                        Some(libc::ENOBUFS) => unsafe {
                            send_message(route.socket, route.name, slices, segment, 0)
                        },
                        _ => Err(error),
                    }
                }
            };
            let reason = match result {
                Ok(()) => {
                    stats.zero_copy.fallen_back.add(1);
                    sent += part.datagrams as u64;
                    self.free(draft.messages.remove(0).slot);
                    continue;
                }
                Err(error) => match error.raw_os_error().unwrap_or(libc::EIO) {
                    // The datagram exceeds the path MTU, or the device cannot segment it: the copying path handles both.
                    refused @ (libc::EMSGSIZE | libc::EINVAL | libc::EIO) => {
                        if refused != libc::EMSGSIZE {
                            route.trial.copied(0);
                        }
                        stats.out_datagrams.add(sent);
                        stats.zero_copy.fallen_back.add(1);
                        return Outcome::Copy;
                    }
                    refused => DropReason::of_refusal(refused),
                },
            };
            stats.out_datagrams.add(sent);
            out.dropped(reason, index);
            return Outcome::Done;
        }
        stats.out_datagrams.add(sent);
        stats.delivered(1, frame.len() as u64);
        Outcome::Done
    }

    fn free(&mut self, slot: u16) {
        if let Some(pool) = &mut self.pool {
            pool.free.push(slot);
        }
    }

    /// True while the kernel may still read memory that was sent.
    #[inline]
    fn is_flying(&self) -> bool {
        self.pool.as_ref().is_some_and(|pool| pool.free.len() < SLOTS)
    }

    /// Reads completions. Returns true when there were any since the last call, including those read during another send.
    #[inline]
    pub(super) fn reap(&mut self) -> bool {
        if self.is_flying() {
            for exit in 0..self.flights.len() {
                if !self.flights[exit].messages.is_empty() {
                    self.reap_exit(exit);
                }
            }
        }
        std::mem::take(&mut self.reaped)
    }

    fn reap_exit(&mut self, exit: usize) {
        while let Some((low, high, copied)) = notification(&self.flights[exit].socket) {
            self.reaped = true;
            let (flight, pool) = (&mut self.flights[exit], &mut self.pool);
            flight.complete(low, high, |message| {
                if copied {
                    message.trial.copied(1);
                }
                if let Some(pool) = pool {
                    pool.free.push(message.slot);
                }
            });
        }
    }

    /// Waits briefly for messages in flight; leaks the memory of those that remain.
    pub(super) fn end(&mut self) {
        let until = Instant::now() + END_WITHIN;
        while self.is_flying() && Instant::now() < until {
            if !self.reap() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        if self.is_flying() {
            // Dropping the holds would return memory to the guest that the kernel still reads.
            std::mem::forget(std::mem::take(&mut self.flights));
        } else if let Some(pool) = self.pool.take() {
            // SAFETY: `pages` came from `Box::into_raw`, is freed only here, and is no longer read.
            drop(unsafe { Box::from_raw(pool.pages) });
        }
    }
}

impl Draft {
    /// Appends the slices from `start` on, `bytes` in `fragments` page fragments, as a datagram of the last message or of a new
    /// one. Returns the address of its first `copied` bytes in the message's slot. `None` when no message or slot is left.
    fn datagram(
        &mut self,
        pool: &mut Pool,
        start: usize,
        bytes: usize,
        fragments: usize,
        copied: usize,
    ) -> Option<*mut u8> {
        let slices = self.slices.len() - start;
        let joins = self.messages.last().is_some_and(|part| {
            part.fragments + fragments <= SKB_PIECES_MAX
                && part.bytes + bytes <= MESSAGE_MAX
                && bytes <= part.segment
                && part.datagrams < DATAGRAMS_MAX
        });
        if !joins {
            if fragments > SKB_PIECES_MAX || self.messages.len() == MESSAGES_MAX {
                return None;
            }
            self.messages.push(Part {
                slot: pool.free.pop()?,
                used: 0,
                first_slice: start,
                slices: 0,
                bytes: 0,
                segment: bytes,
                datagrams: 0,
                fragments: 0,
            });
        }
        let part = self.messages.last_mut()?;
        part.slices += slices;
        part.bytes += bytes;
        part.datagrams += 1;
        part.fragments += fragments;
        let to = pool.ptr(part.slot, part.used);
        part.used += copied;
        (part.used <= SLOT_LEN).then_some(to)
    }
}

/// Number of pages that a slice touches.
fn pages(slice: Segment) -> usize {
    (slice.as_ptr().addr() % PAGE + slice.len()).div_ceil(PAGE)
}

/// Number of payload bytes per message, for a frame of `len` bytes in datagrams of `size` bytes.
fn message_bytes(len: usize, size: usize) -> usize {
    let pieces = size.min(len).div_ceil(PAGE) + 2;
    (size * (SKB_PIECES_MAX / pieces).max(1)).min(len)
}

#[cfg(test)]
#[path = "zero_copy_tests.rs"]
mod tests;
