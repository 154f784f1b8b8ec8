//! Receives a candidate's messages: headers into vnet's memory, payload into guest buffers.

use std::ops::Range;

use super::candidate::Candidate;
use super::port::UnderlayPort;
use crate::frame::{HEAD_MAX, Room};
use crate::link::native::reassembly::FRAGMENTS_MAX;
use crate::link::socket::message::{Report, receive_message};
use crate::link::socket::name::Name;
use crate::link::socket::receive_buffers::{BUFFER_LEN, MESSAGES, ReceiveBuffers};
use crate::link::{Link, Receiver};
use crate::stats::DiscardReason;
use crate::wire::native::HEADER_LEN;
use crate::wire::offload::WIRE_LEN;

/// Maximum number of slices in one message (`UIO_MAXIOV`).
const SLICES_MAX: usize = 1024;

/// The outcome of receiving in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Landed {
    /// The frame is in the guest's buffers.
    InPlace,
    /// This many messages were received and copied into the receiver's burst, which still has to process them.
    CopiedOut(usize),
}

/// Memory for receiving in place; one per receiver.
#[derive(Default)]
pub(super) struct Landing {
    /// Memory for the headers of datagrams; metadata follows the first header.
    prefixes: Vec<[u8; HEADER_LEN + WIRE_LEN]>,
    slices: Vec<libc::iovec>,
    /// End of each message in `slices`.
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

impl Landing {
    /// Receives the candidate, just peeked on `port`, into `room`: guest memory of exactly its length. Messages that do not match
    /// the guessed layout are copied to the receiver's burst.
    ///
    /// # Safety
    /// The room must stay writable during the call.
    pub(super) unsafe fn land(
        &mut self,
        (port, receiver): (&UnderlayPort, &mut Receiver),
        link: &Link,
        candidate: &Candidate,
        room: &[Room],
        now_ms: u64,
    ) -> Landed {
        // Both ends of each datagram may split one more piece.
        let pieces = room.len() + 2 * candidate.count;
        if room.iter().map(Room::len).sum::<usize>() != candidate.len || pieces > SLICES_MAX {
            return Landed::CopiedOut(0);
        }
        self.slices.clear();
        self.ends.clear();
        let burst = receiver.burst();
        if self.receive_all(port, link, candidate, (burst, room)) {
            link.stats().in_datagrams.add(candidate.count as u64);
            link.stats().in_frames.add(1);
            link.stats().in_bytes.add(candidate.len as u64);
            link.stats().direct_in_place.add(1);
            link.heard(now_ms);
            return Landed::InPlace;
        }
        self.copy_out(receiver.burst(), candidate);
        link.stats().direct_copied_out.add(self.ends.len() as u64);
        Landed::CopiedOut(self.ends.len())
    }

    /// Receives messages while they match the guess. Returns true when the whole frame is in the room.
    fn receive_all(
        &mut self,
        port: &UnderlayPort,
        link: &Link,
        candidate: &Candidate,
        (burst, room): (&mut ReceiveBuffers, &[Room]),
    ) -> bool {
        let mut space = Space { room, offset: 0 };
        let (mut k, mut right) = (0, true);
        while right && k < candidate.count && self.ends.len() < MESSAGES {
            let next = if k == 0 { Some(candidate.first) } else { candidate.following(port, k) };
            let Some(next) = next else { break };
            let Some(count) = candidate.part(k, next.len, next.segment) else { break };
            let Some(message) = self.receive(port, candidate, k..k + count, &mut space) else {
                // The guest has unmapped its memory: the message is lost.
                link.stats().in_datagrams.add(count as u64);
                link.stats().discard(DiscardReason::Truncated, count as u64);
                break;
            };
            // This thread alone reads from the socket, except for `aim`, so this should be the peeked message. If it is not, the
            // number of bytes received is unknown.
            right = message.source.same(&next.source)
                && (message.len, message.segment) == (next.len, next.segment);
            let (source, len, segment) = match right {
                true => (message.source, next.len, next.segment),
                false => (Name::unknown(), 0, 1),
            };
            burst.set(self.ends.len() - 1, source, len, segment);
            right &= (k..k + count).all(|k| self.prefixes[k].first_chunk() == Some(&candidate.header(k)));
            k += count;
        }
        right && k == candidate.count
    }

    /// Copies the messages received so far to the burst's buffers. The frame's head is the copy that was checked: the guest can
    /// still write to its memory, and could give the frame other addresses.
    fn copy_out(&self, burst: &mut ReceiveBuffers, candidate: &Candidate) {
        let mut start = 0;
        for (message, end) in self.ends.iter().enumerate() {
            let mut at = 0;
            let buffer = burst.buffer(message);
            for slice in &self.slices[start..*end] {
                let len = slice.iov_len.min(BUFFER_LEN - at);
                // SAFETY: the slice is one of `lay_out`: a prefix, or room that `land`'s caller keeps mapped; the buffer has room
                // for `len` more bytes and is vnet's memory, which overlaps no guest's.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        slice.iov_base.cast::<u8>(),
                        buffer[at..].as_mut_ptr(),
                        len,
                    );
                }
                at += len;
            }
            if message == 0 {
                // The whole head lies in the candidate's first datagram, and so in the first message.
                let head = HEADER_LEN + candidate.metadata;
                buffer[head..head + HEAD_MAX].copy_from_slice(candidate.head());
            }
            start = *end;
        }
    }

    /// Receives the next message, which holds `datagrams` of the candidate. `None` when the kernel refuses.
    fn receive(
        &mut self,
        direct: &UnderlayPort,
        candidate: &Candidate,
        datagrams: Range<usize>,
        space: &mut Space<'_>,
    ) -> Option<Report> {
        let start = self.slices.len();
        self.lay_out(candidate, datagrams, space);
        let message = receive_message(direct.socket(), &mut self.slices[start..], libc::MSG_TRUNC);
        match message {
            Ok(_) => self.ends.push(self.slices.len()),
            Err(_) => self.slices.truncate(start),
        }
        message.ok()
    }

    /// Appends the slices for `datagrams`: headers into `prefixes`, payload into the guest's room.
    fn lay_out(&mut self, candidate: &Candidate, datagrams: Range<usize>, space: &mut Space<'_>) {
        for k in datagrams {
            let metadata = if k == 0 { candidate.metadata } else { 0 };
            let prefix = self.prefixes[k].as_mut_ptr();
            self.slices.push(libc::iovec { iov_base: prefix.cast(), iov_len: HEADER_LEN + metadata });
            space.take(candidate.payload(k) - metadata, &mut self.slices);
        }
    }
}

/// A position in the guest's room.
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
